"""`python -m fatbench` is the command `fatbench`."""

from fatbench.cli import main

main()
