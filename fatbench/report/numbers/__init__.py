"""Measurements read from the database, with their tests, doubts, provenance and published values.

frame            all stored numbers as one data frame
query            what a report or a comparison needs of the stored numbers
measurements     finds the number for a field of a table
number           the shape of a stored number
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
