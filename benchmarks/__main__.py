"""`python -m benchmarks`: measure, and write a table, JSON and figures.

`-o results/bench` measures everything, on a GPU if the machine has one. `--rows at_nin cells --quick` is some rows,
only to see that they work.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import scale, table
from benchmarks.measure import Bench, clock, provenance
from benchmarks.rows import BY_HAND, ROWS
from benchmarks.scale import SERIES


def main() -> None:
    """Run the rows and series asked for; what is there in the folder of others stays."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    every = [*ROWS, *SERIES]
    parser.add_argument("--rows", nargs="+", metavar="NAME", choices=every,
                        default=[name for name in every if name not in BY_HAND],
                        help=f"of {', '.join(every)}; default: all but {', '.join(BY_HAND)}")  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on both sides (default: 1, as workers have)")
    parser.add_argument("--quick", action="store_true", help="the least that shows that it works")
    parser.add_argument("-o", "--output", type=Path, default=Path("results/bench"), metavar="FOLDER")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    chosen.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(torch.device(chosen.device), chosen.quick, Path(folder))
        for name in chosen.rows:
            begin = time.perf_counter()
            found = {"lines": ROWS[name](bench)} if name in ROWS else SERIES[name](bench)
            seconds = time.perf_counter() - begin
            print(f"{name}: {seconds:.0f} s", flush=True)
            made = {"row": name, **found, "seconds": seconds, "quick": bench.quick, "where": provenance(bench.device),
                    "clock": clock(bench.device)}  # fmt: skip
            table.save(chosen.output, bench.device.type, made)
            if name in SERIES:
                scale.draw(chosen.output / f"{name}-{bench.device.type}.png", made)
    print(table.write(chosen.output, bench.device.type, [*ROWS]))


if __name__ == "__main__":
    main()
