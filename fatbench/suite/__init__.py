"""A suite file becomes checked cells, and what they will cost. Nothing here imports torch, numpy or a method.

files       finds a suite, reads its YAML with the line of every key, lays it over what it extends
contents    the structure of the file, of parts in model and tables; located: mappings that know their lines
cells       a checked cell, its identity and evaluations; filters: which of them
expansion   every point of the grid of a preset as a cell; grid: the points; transfers: attacks from other models
perturbation  norm and radius that a task gives to attacks which state none; confounders: what compared rows differ in
signatures  what a suite may call, and the settings of each; types: what a setting may be
calls       a mapping of a suite, checked, with the signature of what it calls; from it the function is built
entry       what a table says of a function; facts: what is known of a cell, and what refuses it; cost: its work

Functions of other folders import `fatbench.suite.types`, so this file imports nothing. What runs a cell, stores it or
reports it does not belong here, nor does an aggregator about one method: that stands in the method's docstring.
"""
