"""`python -m benchmarks.fidelity`: the authors' programs beside ours, as a table.

`--clones FOLDER` takes the repositories from clones that are here, else they are fetched. Exit code 1: a comparison
that should pass does not; 2: a repository cannot be had.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.fidelity import fedtorch, networks, others, privacy, robust, sfat, table
from benchmarks.fidelity.measure import Row
from benchmarks.fidelity.sources import SOURCES, unpacked
from benchmarks.measure import provenance
from fatbench.errors import FatbenchError

COMPARISONS: dict[str, Callable[[Path], list[Row]]] = {
    "sfat": sfat.compare,
    "fedtorch": fedtorch.compare,
    "so-vit": networks.so_vit,
    "t2t": networks.t2t_vit,
    "tnt": networks.tnt_s,
    "timm": networks.tnt_legacy,
    "fedml": others.fedgkt,
    "fednova": others.fednova,
    "fedaux": others.fedaux,
    "tamaya": others.fedsoftbetter,
    "calfat": robust.calfat,
    "awp": robust.awp,
    "fedrbn": robust.fedrbn,
    "blades": robust.blades,
    "byzantine": robust.byzantine,
    "breaching": privacy.breaching,
    "ilrg": privacy.ilrg,
}


def main() -> int:
    """Compare what is asked for; what is in the output folder of other sources stays."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(COMPARISONS), default=list(COMPARISONS),
                        help=f"of {', '.join(COMPARISONS)}; default: all")  # fmt: skip
    parser.add_argument("--clones", type=Path, default=os.environ.get("FATBENCH_CLONES"), metavar="FOLDER",
                        help="of git clones, OWNER+NAME, OWNER/NAME or NAME (FATBENCH_CLONES); else fetch")  # fmt: skip
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/fatbench/upstream").expanduser(), metavar="FOLDER",
                        help="of what is fetched (default: %(default)s)")  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, default=Path("results/bench"), metavar="FOLDER")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        try:  # all are there before the first is compared
            places = {name: unpacked(SOURCES[name], chosen.clones, chosen.cache, Path(folder)) for name in chosen.only}
        except FatbenchError as error:
            print(f"fidelity: {error}", file=sys.stderr)
            return 2
        chosen.output.mkdir(parents=True, exist_ok=True)
        for name, place in places.items():
            begin = time.perf_counter()
            rows = list(COMPARISONS[name](place))
            table.save(chosen.output, name, rows, provenance(torch.device("cpu")))
            failed += [row.id for row in rows if row.expected and not row.passes]
            print(f"{name}: {len(rows)} comparisons, {time.perf_counter() - begin:.0f} s", flush=True)
    print(table.write(chosen.output))
    if failed:
        print(f"fidelity: not the same: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
