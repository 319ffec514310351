"""Which test images a cell classified right, one row each."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fatbench import settings
from fatbench.data.own import load
from fatbench.errors import FatbenchError, NothingMatched, SpecError
from fatbench.report.numbers.stored import accuracies, join_chunks
from fatbench.store.inputs import Inputs, stored_inputs
from fatbench.store.stage_names import parsed
from fatbench.store.stages import StageRow, Store
from fatbench.suite.facts import first_images
from fatbench.suite.standard_attacks import did_you_mean_metric


def outcome_rows(store: Store, id: str, metrics: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each image of each evaluation of a cell, or of these metrics. SpecError, NothingMatched."""
    spec = store.cells([id])[id]
    stages = {stage: row for (_, stage), row in store.stages([id]).items()}
    bits_by_stage = {stage: bits for stage in stages if (bits := _bits(store.outcomes(id, stage)))}
    sizes = {stage: n for (_, stage), (_, n) in accuracies([id], store, bits_by_stage).items()}
    answered = {stage: inputs for (_, stage), inputs in stored_inputs(store.database, [id]).items()}
    names = {parsed(stage).metric for stage in bits_by_stage}
    for name in metrics:
        if name not in names:
            raise SpecError(f"cell {id} has no outcomes of '{name}'{did_you_mean_metric(name, names)}", option="metric")
    labels = _labels(spec, answered)
    rows = [
        row
        for stage, bits in bits_by_stage.items()
        for row in _rows(id, stage, stages, bits, sizes.get(stage) or len(bits), labels.get(stage))
        if not metrics or row["metric"] in metrics
    ]
    if not rows:
        raise NothingMatched(f"cell {id} has no outcomes: it has not been evaluated")
    return rows


def _bits(chunks: Sequence[tuple[int, int, bytes]]) -> str:
    """The outcomes in order, as "0" and "1"."""
    bits, n = join_chunks(chunks)
    return f"{bits:0{n}b}" if n else ""  # with leading zeros: the first images may be wrong


def _rows(
    cell: str, stage: str, stages: dict[str, StageRow], bits: str, n: int, labels: Sequence[int] | None
) -> list[dict[str, Any]]:
    """One row an image; of a stage that attacked several models, all images of the first, then of the next."""
    metric, _, _, stage_round = parsed(stage)
    record = stages["train"].record if "train" in stages else {}
    checkpoint_names = [
        name for name, best in record.items() if isinstance(best, dict) and best.get("round") == stage_round
    ]
    return [
        {
            "cell": cell,
            "stage": stage,
            "metric": metric,
            "round": stage_round,
            "checkpoint": ";".join(checkpoint_names),
            "model": position // n,  # bits of all images of the first model come first
            "image": position % n,
            "label": None if labels is None or position % n >= len(labels) else int(labels[position % n]),
            "correct": int(bit),
        }
        for position, bit in enumerate(bits)
    ]


def _labels(spec: dict[str, Any], answered: Mapping[str, Mapping[str, Any]]) -> dict[str, Sequence[int]]:
    """Stage -> labels of its test images, of those that were measured on the data set of this machine.

    Empty: it is not on this machine, or not as the cell names it.
    """
    try:
        image_count = first_images(spec)["data"]
        dataset = load(spec["data"], settings.data_folder(), image_count)
    except FatbenchError:  # outcomes are of use without labels, so no data set is demanded
        return {}
    current_inputs = Inputs(data={"": dataset.fingerprint})
    changed_stages = {
        stage: reasons
        for stage, inputs in answered.items()
        if (reasons := Inputs(data=inputs["data"]).differ(current_inputs))
    }
    for reason in dict.fromkeys(reason for reasons in changed_stages.values() for reason in reasons):
        print(f"fatbench: no labels: the outcomes are of {reason.words}", file=sys.stderr)
    return {stage: dataset.test_labels.tolist() for stage in answered if stage not in changed_stages}
