"""What a paper preset combines, some smoke cell combines too: a pair that nothing small runs breaks at night."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

from path_runs import TRAINED_WHOLE

from fatbench.methods import filtering_aggregators, robust_aggregators
from fatbench.methods.aggregators import AGGREGATORS
from fatbench.suite import files
from fatbench.suite.entry import entry_of

MODULES = {robust_aggregators.__name__, filtering_aggregators.__name__}
ROBUST = {name for name, listed in AGGREGATORS.items() if entry_of(listed).function.__module__ in MODULES}
Part = tuple[str, str]  # ("algorithm", "scaffold")


def parts(spec: dict[str, Any]) -> list[Part]:
    """What a cell calls, of the kinds that meet in its training; of a partition all see a list of images alone."""
    algorithm = spec["algorithm"]
    local = algorithm.get("local") or algorithm
    calls = {
        "algorithm": algorithm,
        "aggregator": algorithm.get("aggregator"),
        "objective": local.get("objective"),
        "model": spec["model"],
    }
    names = [(kind, call["name"]) for kind, call in calls.items() if call]
    return [*names, ("head", spec["model"]["head"])] if "head" in spec["model"] else names


@functools.cache
def pairs(preset: str) -> dict[frozenset[Part], str]:
    """Every pair of parts that meet in a preset of the suites -> a suite that has it."""
    suite_by_pair = {
        frozenset(pair): suite for suite, spec in cells(preset) for pair in itertools.combinations(parts(spec), 2)
    }
    return {pair: suite for pair, suite in suite_by_pair.items() if meet(dict(pair))}


def meet(pair: dict[str, str]) -> bool:
    """Whether two parts see anything of each other.

    A robust aggregator reads uploads, however they were trained. What a whole network trains with and is averaged by,
    test_local and test_graphs run of every network.
    """
    if pair.get("model") in TRAINED_WHOLE and (
        pair.keys() & {"aggregator", "objective"} or pair.get("algorithm") == "fedavg"
    ):
        return False
    return not (pair.keys() == {"aggregator", "objective"} and pair["aggregator"] in ROBUST)


def cells(preset: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in files.available():
        if not name.endswith(("-jpeg75", "-jpeg")) and preset in files.load(name).presets():
            for cell in files.load(name).plan(preset, [0]).unique():
                yield name, cell.spec


def test_smoke_has_every_pair_of_the_paper_presets() -> None:
    lacking = {pair: suite for pair, suite in pairs("paper").items() if pair not in pairs("smoke")}
    lines = sorted(
        f"{suite}: {' with '.join(f'{kind} {name}' for kind, name in sorted(p))}" for p, suite in lacking.items()
    )
    assert not lacking, f"{len(lacking)} of {len(pairs('paper'))} pairs are in no smoke preset:\n" + "\n".join(lines)


def test_a_pair_is_counted_whatever_its_order() -> None:
    spec = next(cells("smoke"))[1]
    assert len(parts(spec)) >= 4
    ordered_pairs = [pair for pair in itertools.permutations(parts(spec), 2) if meet(dict(pair))]
    assert ordered_pairs and all(frozenset(pair) in pairs("smoke") for pair in ordered_pairs)
