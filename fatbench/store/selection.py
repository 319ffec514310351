"""Which round's model is evaluated: the last, the best on held-out validation images, the best on the test images.

Rounds are counts of completed rounds, from 1. Used by the engine in training and by reports, so it imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

Checkpoint = Literal["last", "best-val", "best-test"]

# {checkpoint: the training metric whose highest value selects it}. The papers select the best round on the test set
# (methods: Metrics; differences: test-selection), which is optimistic; best-val is the honest counterpart.
MONITORED: dict[str, str] = {"best-val": "val_monitor", "best-test": "monitor"}

WORDS: dict[str, str] = {
    "last": "last round",
    "best-val": "best by held-out validation",
    "best-test": "best on the test set, as the papers select it",
}
PUBLISHED: dict[str, str] = {  # the round of a paper's number
    "last": "last round",
    "best-val": "best round by held-out validation",
    "best-test": "best round on the test set",
    "unknown": "round not stated",
}


def checkpoint_round(series: Mapping[int, float]) -> int | None:
    """The round with the highest value; later rounds win ties (the SFAT release compares with >=).

    series: {round: accuracy in [0, 1]}. A NaN never wins. None if nothing was measured.
    """
    comparable = [(value, round) for round, value in series.items() if not math.isnan(value)]
    return max(comparable)[1] if comparable else None


def update(record: Mapping[str, Any], round: int, series: Mapping[str, float]) -> dict[str, Any]:
    """The checkpoints after one more round, as a train stage records them: {checkpoint: {"round", "value"}}.

    series: the round's numbers by metric. "last" is always this round and has no value; the others appear once their
    metric has been measured.
    """
    new_record: dict[str, Any] = {**record, "last": {"round": round}}
    for checkpoint, metric in MONITORED.items():
        if metric not in series:
            continue
        values = {round: series[metric]}
        if old_record := record.get(checkpoint):
            values[old_record["round"]] = old_record["value"]
        best = checkpoint_round(values)
        if best is not None:
            new_record[checkpoint] = {"round": best, "value": values[best]}
    return new_record
