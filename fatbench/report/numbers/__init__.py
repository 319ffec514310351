"""Measurements read from the database, with their tests, doubts, provenance and published values.

frame            all stored numbers as one data frame
stored           what a report or a comparison needs of the stored numbers
sources          what the sources of a suite file name
points           the cells of a point of the grid
long             a row for each number of a seed that a table or figure shows
cell_rows        the one reader of stored numbers and outcomes
cell_runs        the runs of one cell side by side, for `fatbench show`
cell_facts       the settings of a cell in words
shown_runs       which of several runs is shown
sql_tables       fills the view `results`: doubts and shown runs
doubts           every reason to doubt a number
published        the paper's numbers
provenance       what produced the numbers of a table
statistics       tests of significance and intervals
quantiles        quartiles over clients
"""
