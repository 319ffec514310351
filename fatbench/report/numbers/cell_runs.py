"""The runs of one cell side by side, for `fatbench show`, without loading the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fatbench.report.numbers.cell_rows import accuracies
from fatbench.store import replicates

if TYPE_CHECKING:
    from fatbench.store.stages import Store


def runs_of_cell(store: Store, cell: str) -> list[dict[str, Any]]:
    """One record for each run of a cell: where it ran, and its evaluations (stage -> value)."""
    original, _, _ = cell.partition(replicates.SIGN)
    run_records = []
    ids = replicates.by_cell(store.database, [original]).get(original, [])
    numbers = accuracies(ids, store)
    for id in ids:
        training_runs = (run for run in store.runs([id]) if run["stage"] == "train" and not run.get("dropped"))
        run = next(training_runs, {})  # an external model has no training
        values = {stage: value for (cell, stage), (value, _) in numbers.items() if cell == id}
        provenance = {key: run.get(key) for key in ("host", "device", "precision", "commit", "dirty", "started")}
        run_records.append({"id": id, **provenance, "evaluations": values})
    return run_records


def runs_as_text(runs: Sequence[Mapping[str, Any]]) -> str:
    """Runs as lines of text: each run, then each evaluation with its values and their range."""
    lines = ["runs of this cell:"]
    for run in runs:
        lines.append(f"  {run['id']}  {run['device']}, {run['precision']}, commit {(run['commit'] or 'unknown')[:10]}")
    for stage in dict.fromkeys(stage for run in runs for stage in run["evaluations"]):
        values = [run["evaluations"].get(stage) for run in runs]
        measured_values = [value for value in values if value is not None]
        values_text = "  ".join("--" if value is None else f"{100 * value:.2f}" for value in values)
        distance_text = (
            f"  (apart {100 * (max(measured_values) - min(measured_values)):.2f})" if len(measured_values) > 1 else ""
        )
        lines.append(f"  {stage}: {values_text}{distance_text}")
    return "\n".join(lines)
