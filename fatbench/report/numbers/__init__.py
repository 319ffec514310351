"""Measurements read from the database, with their tests, doubts, provenance and published values.

stored        the one reader: numbers, outcomes, doubts, and what a report or comparison needs of them
sources       what the sources of a suite file name
points        the cells of a point of the grid; one table over several suites (`combined`)
long          a row for each number: of one seed of a table or figure, or of all that is stored (`frame`)
shown_runs    which of several runs is shown
sql_tables    fills the view `results`: doubts and shown runs
doubts        every reason to doubt a number
published     the paper's numbers
table_facts   what produced the numbers of a table
statistics    tests of significance and intervals
shares        tests of a yes or no of each client
worst_case    the least accuracy over adversaries, with its interval
"""
