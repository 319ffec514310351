"""A table before it is printed: which number stands where, which are marked, what stands under it.

entries          a row for each printed number, and the tables of a suite
sheet            one table: its entries and what is said of it all
external_suite   the suite "evaluate", of models that were trained elsewhere
significance     which numbers are bold or marked
notes            the notes under a table
number_format    how numbers are printed
"""
