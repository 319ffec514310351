"""The parts of the name of an evaluation's stage: "pgd20-0a1b2c3d.bf16@20"."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple


class StageName(NamedTuple):
    """The parts of a name that `fatbench.suite.cells.Evaluation.stage` makes."""

    metric: str  # "pgd20"; empty for a stage that is no evaluation
    evaluation: str  # "pgd20-0a1b2c3d": the attack, its images and its batch
    precision: str  # of the attack; float32 has no suffix
    round: int  # of the model


_NAME = re.compile(r"(?s)(?P<evaluation>.*?)(?:\.(?P<precision>tf32|bf16))?@(?P<round>[0-9]+)")


@functools.lru_cache(4096)
def parsed(stage: str) -> StageName:
    """The parts of a stage's name."""
    match = _NAME.fullmatch(stage)
    if match is None:
        return StageName("", stage, "fp32", 0)
    evaluation = match["evaluation"]
    return StageName(evaluation.rpartition("-")[0], evaluation, match["precision"] or "fp32", int(match["round"]))
