"""A table before it is printed: which number stands where, which are marked, what stands under it.

grid             a table's data: headings, rows, fields
grid_points      the cells of a point of the grid
layout           from measurements to tables
relative         the value of a field: over seeds, as a difference, between two rows
common_images    accuracies on the images that all attacks share
combined         one table over several suites
external_suite   the suite "evaluate", of models that were trained elsewhere
sorting          sorts rows by a column
significance     which numbers are bold or marked
notes            the notes under a table
number_format    how numbers are printed
tidy             a data frame with a row for each number
"""
