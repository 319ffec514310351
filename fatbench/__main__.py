"""The command `fatbench`, and `python -m fatbench`.

A worker process reads the script of its parent anew, and that names this module: so it imports nothing by itself.
"""

import gc

# Objects made before a first look for garbage: imports and suites make many and drop none. A look costs a `report` of
# one suite a twentieth of its CPU time, the usual 700 objects a fifth.
GARBAGE = 300_000


def main() -> None:
    """Run the command line."""
    gc.set_threshold(GARBAGE)
    from fatbench.cli.app import main as command

    command()


if __name__ == "__main__":
    main()
