"""Web pages that open from disk: leaderboards, tables, figures and the runs of each number.

pages          writes a report as one file, or a database as a folder
leaderboards   all rows of a task, from any suite, in one table
drilldown      the runs behind a number
"""
