"""The command `fatbench`, and `python -m fatbench`.

A worker process runs its parent's script again, which may be this module, so this module imports nothing else.
"""

import gc
import sys

# The number of new objects before a garbage collection: imports and suites create many and drop none. One collection
# takes 5 % of the CPU time of a `report` on one suite; with the usual threshold of 700, they take 20 %.
GARBAGE = 300_000


def main() -> None:
    """Run the command line."""
    gc.set_threshold(GARBAGE)
    from fatbench.cli import streams

    streams.make_ready()
    from fatbench.cli.app import main as command

    try:
        command()
    finally:
        if (
            "torch" not in sys.modules
        ):  # with torch, triton (which timm imports) would list every remaining function on stderr
            gc.freeze()  # leave nothing for the collection at exit, which takes a sixth of a `report`


if __name__ == "__main__":
    main()
