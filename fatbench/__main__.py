"""`python -m fatbench` is the command `fatbench`."""

from fatbench.cli.app import main

main()
