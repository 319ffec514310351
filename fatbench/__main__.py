"""The command `fatbench`, and `python -m fatbench`.

A worker process reads the script of its parent anew, and that names this module: so it imports nothing by itself.
"""

import gc
import sys

# Objects made before a first look for garbage: imports and suites make many and drop none. A look costs a `report` of
# one suite a twentieth of its CPU time, the usual 700 objects a fifth.
GARBAGE = 300_000


def main() -> None:
    """Run the command line."""
    gc.set_threshold(GARBAGE)
    from fatbench.cli.app import main as command

    try:
        command()
    finally:
        if "torch" not in sys.modules:  # triton, which timm brings, names on stderr every function that is still there
            gc.freeze()  # nothing is left for the look at the end of the program, a sixth of a `report`


if __name__ == "__main__":
    main()
