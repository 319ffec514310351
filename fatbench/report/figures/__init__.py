"""Figures: curves, bars, matrices and images, drawn with matplotlib as files or inside a page.

series          from measurements to curves
panel_kinds     draws one panel: a function for each kind
plots           draws figures into files
inline          draws figures into pages, as SVG
forest          the forest plot of differences from the baseline
heat_map        a table as squares
styles          colours, line styles and markers
adhoc_figures   figures that are asked for on the command line
artifacts       matrices and images that a round keeps
"""
