"""What tests put into a database: a stage from its claim to its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fatbench.engine.rounds import Number
from fatbench.store.stages import Store


def claimed(
    store: Store, cell: str, stage: str, *, suite: str = "s", total: int = 1, spec: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None, **provenance: Any,
) -> int:  # fmt: skip
    """The run that has the stage in hand now; with a `spec`, of a cell that is added."""
    if spec is not None:
        store.add_cell(cell, spec)
    run = store.claim(cell, stage, suite=suite, total=total, settings=settings, provenance=provenance)
    assert run is not None
    return run


def finished(store: Store, cell: str, stage: str, numbers: Iterable[Number] = (), *, round: int | None = None,
             outcomes: tuple[int, int, bytes] | None = None, **of_claim: Any) -> int:  # fmt: skip
    """The same, and done with these numbers."""
    run = claimed(store, cell, stage, **of_claim)
    store.finish(run, list(numbers), round=round, outcomes=outcomes)
    return run
