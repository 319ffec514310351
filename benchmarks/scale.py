"""How cost grows: one series each for clients, the cohort, cells and workers, and a figure of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import many
from benchmarks.measure import Bench, cores, wall
from benchmarks.rows import cell

Series = dict[str, Any]


def clients(bench: Bench) -> Series:
    """A NIN cell with more and more clients, 5 of them in every round."""
    return _nin(bench, "clients, 5 a round", [(k, 5) for k in ((5, 50) if bench.quick else (5, 20, 50, 100, 200, 500))])


def cohort(bench: Bench) -> Series:
    """A NIN cell of 50 clients, more and more of them in every round."""
    return _nin(bench, "clients a round, of 50", [(50, m) for m in ((5, 10) if bench.quick else (5, 10, 20, 35, 50))])


def _nin(bench: Bench, label: str, sizes: list[tuple[int, int]]) -> Series:
    measured = [cell(bench, clients, cohort, each=4) for clients, cohort in sizes]
    varied = 0 if sizes[0][0] != sizes[-1][0] else 1
    return {
        "x": [size[varied] for size in sizes],
        "label": label,
        "y": {
            "peak memory over torch (MB)": [one["megabytes"] for one in measured],
            "seconds a round, 4 images a client": [one["seconds"] for one in measured],
        },
    }


def cells(bench: Bench) -> Series:
    """Runs of more and more cells that have next to nothing to train: what a cell costs beside its training."""
    sizes = (3, 6) if bench.quick else (3, 30, 150, 399)
    jobs, seconds = cores(), []
    for size in sizes:
        file = many.table_suite(bench.folder / f"bench-{size}-cells.yaml", size // 3, rounds=1, train=64)
        seconds.append(wall(bench.device, lambda file=file: many.run(bench, file, jobs)))  # type: ignore[misc]
    return {
        "x": list(sizes),
        "label": f"cells of one round on 64 images, --jobs {jobs}",
        "y": {"seconds": seconds, "seconds a cell": [s / n for s, n in zip(seconds, sizes, strict=True)]},
    }


def workers(bench: Bench) -> Series:
    """The same cells with more and more workers, never more than cores."""
    sizes = [jobs for jobs in (1, 2, 4, 8) if jobs <= cores()]
    file = many.table_suite(bench.folder / "bench-workers.yaml", 1 if bench.quick else 4)
    seconds = [wall(bench.device, lambda jobs=jobs: many.run(bench, file, jobs)) for jobs in sizes]  # type: ignore[misc]
    number = 3 if bench.quick else 12
    return {
        "x": sizes,
        "label": f"workers (--jobs), {number} small cells",
        "y": {"cells an hour": [3600 * number / s for s in seconds], "seconds": seconds},
    }


def draw(file: Path, made: Series) -> None:
    """A panel for each of the series' quantities."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * len(made["y"]), 3.4), layout="constrained")
    panels = figure.subplots(1, len(made["y"]), squeeze=False)[0]
    for axes, (label, values) in zip(panels, made["y"].items(), strict=True):
        axes.plot(made["x"], values, marker="o", color="0.2")
        axes.set(xlabel=made["label"], ylabel=label, ylim=(0, None), xlim=(0, None))
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150, metadata={"Software": "benchmarks"})


SERIES: dict[str, Callable[[Bench], Series]] = {
    "clients_series": clients,
    "cohort_series": cohort,
    "cells_series": cells,
    "workers_series": workers,
}
