"""The runs of one cell beside each other, for `fatbench show`: apart from the tables, which it does not load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fatbench.report.numbers.cell_rows import accuracies
from fatbench.store import replicates

if TYPE_CHECKING:
    from fatbench.store.stages import Store


def runs_of_cell(store: Store, cell: str) -> list[dict[str, Any]]:
    """The runs of a cell beside each other: where each ran, and its evaluations (stage -> value)."""
    first, _, _ = cell.partition(replicates.SIGN)
    found = []
    ids = replicates.of(store.database, [first]).get(first, [])
    numbers = accuracies(ids, store)
    for id in ids:
        runs = (run for run in store.runs([id]) if run["stage"] == "train" and not run.get("dropped"))
        run = next(runs, {})
        values = {stage: value for (cell, stage), (value, _) in numbers.items() if cell == id}
        where = {key: run.get(key) for key in ("host", "device", "precision", "commit", "dirty", "started")}
        found.append({"id": id, **where, "evaluations": values})
    return found


def runs_as_text(runs: Sequence[Mapping[str, Any]]) -> str:
    """`beside` as lines: the runs, then each evaluation with its values and how far they lie apart."""
    lines = ["runs of this cell:"]
    for run in runs:
        lines.append(f"  {run['id']}  {run['device']}, {run['precision']}, commit {str(run['commit'])[:10]}")
    for stage in dict.fromkeys(stage for run in runs for stage in run["evaluations"]):
        values = [run["evaluations"].get(stage) for run in runs]
        there = [value for value in values if value is not None]
        shown = "  ".join("--" if value is None else f"{100 * value:.2f}" for value in values)
        apart = f"  (apart {100 * (max(there) - min(there)):.2f})" if len(there) > 1 else ""
        lines.append(f"  {stage}: {shown}{apart}")
    return "\n".join(lines)
