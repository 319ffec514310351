"""The command line: what people type, what is printed, what is live on a terminal.

Arguments are parsed here and nowhere else, and what the other folders return becomes text here. A command is a function
of `fatbench.cli.app`; it says what was asked, calls `fatbench.run` or `fatbench.report`, and prints. Not here: anything
that computes a number or reads a database by itself.
"""
