"""Robustness that gradient attacks overstate: the counts that two binomial tests need, and who does not fire."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import result_files

from fatbench.report.numbers.doubts import Doubt, doubts, in_words
from fatbench.report.numbers.stored import join_chunks

RESULTS = Path(__file__).parent.parent / "results"
BALL = {"eps": "8/255", "implementation": "fatbench 0.1.0"}
ATTACKS: dict[str, dict[str, Any]] = {
    "natural-0": {"name": "natural"},
    "fgsm-1": {"name": "fgsm", **BALL},
    "pgd-2": {"name": "pgd", "step": "2/255", "steps": 20, "start": "uniform", **BALL},
    "cw-3": {"name": "cw", "step": "2/255", "steps": 30, **BALL},
    "autoattack-4": {"name": "autoattack", **BALL},
}


def found(right: dict[str, int], n: int, attacks: dict[str, dict[str, Any]] = ATTACKS) -> dict[str, list[Doubt]]:
    """The doubts of a model whose first `right` of n images each attack leaves right."""
    label = {evaluation: f"{evaluation}@5" for evaluation in right}
    numbers = [("cell", label[name], 5, -1, name.rpartition("-")[0], count / n, n) for name, count in right.items()]
    bits = {label[name]: ((1 << n) - (1 << (n - count)), n) for name, count in right.items()}
    reasons = doubts(numbers, attacks, {}, lambda cell, stage: bits[stage])
    return {name: [d for d in reasons.get(("cell", label[name]), ()) if d.code == "masked"] for name in right}


@pytest.mark.parametrize(("n", "alone", "together"), [(100, 14, 11), (500, 45, 33), (1000, 81, 58)])
def test_so_many_images_that_autoattack_alone_breaks(n: int, alone: int, together: int) -> None:
    half = n // 2
    for count, fires in ((alone - 1, False), (alone, True)):
        one = found({"pgd-2": half + count, "autoattack-4": half}, n)
        assert bool(one["pgd-2"]) == fires and not one["autoattack-4"]
    for count, fires in ((together - 1, False), (together, True)):
        both = found({"fgsm-1": half + count, "pgd-2": half + count, "cw-3": half + count, "autoattack-4": half}, n)
        assert bool(both["pgd-2"]) == bool(both["cw-3"]) == fires and not both["autoattack-4"]
    few = found({"pgd-2": half + together, "autoattack-4": half}, n)
    assert not few["pgd-2"]  # alone it may be as far


def test_a_masked_number_is_marked_in_words() -> None:
    (doubt,) = found({"pgd-2": 400, "cw-3": 300, "autoattack-4": 300}, 500)["pgd-2"]
    assert in_words([doubt]) == [
        "masked: 20.0 points more than AutoAttack on the same images; gradient attacks overstate robustness"
    ]


def test_of_other_balls_images_models_and_precisions_nothing_is_said() -> None:
    gap = {"pgd-2": 45, "autoattack-4": 5}
    assert not found(gap, 49)["pgd-2"] and found(gap, 50)["pgd-2"]
    for change in ({"eps": "4/255"}, {"norm": "L2"}, {"origin": "cell 0"}):
        assert not found(gap, 50, {**ATTACKS, "pgd-2": {**ATTACKS["pgd-2"], **change}})["pgd-2"]
    assert not found({"fgsm-1": 45, "autoattack-4": 5}, 50)["fgsm-1"]


@pytest.mark.slow
@pytest.mark.nightly
def test_no_committed_evaluation_is_masked() -> None:
    """Of honest networks: 463 had AutoAttack beside PGD on the same images when the bounds were chosen."""
    compared = 0
    for file in sorted(RESULTS.glob("*.jsonl.xz")):
        for cell in result_files.cells(file):
            complete = [stage for stage in cell["stages"] if stage["status"] == "done" and stage["outcomes"]]
            stages = {stage["stage"]: stage for stage in complete}
            attacks = {name.rpartition("@")[0]: stage["settings"] for name, stage in stages.items()}
            if "autoattack" not in {attack.get("name") for attack in attacks.values()}:
                continue
            bits: dict[str, Any] = {}
            for name, stage in stages.items():
                bits[name] = join_chunks((start, n, base64.b64decode(text)) for start, n, text in stage["outcomes"])
            numbers = [
                (cell["cell"], name, round, -1, metric, value, n)
                for name, stage in stages.items()
                for round, client, metric, value, n, *_ in stage["numbers"]
                if client == -1 and n
            ]
            reasons = doubts(numbers, attacks, {}, lambda _, stage: bits[stage])  # noqa: B023
            assert not [d for stage in reasons.values() for d in stage if d.code == "masked"], (file.name, cell["cell"])
            rounds = {name.rpartition("@")[2] for name in stages if name.startswith("pgd")}
            compared += sum(name == f"autoattack-{name[11:19]}@{at}" for name in stages for at in rounds)
    assert compared > 400
