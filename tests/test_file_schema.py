"""`fatbench check --schema`: an editor takes every suite of ours, and marks mistakes where they stand."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from fatbench.cli.new import TEMPLATES
from fatbench.suite import file_schema, trees

SUITES = Path(__file__).parent.parent / "suites"
TEMPLATE = (TEMPLATES / "suite.yaml").read_text(encoding="utf-8")


@functools.cache
def editor() -> Draft7Validator:
    """What an editor reads of the command's output."""
    schema = json.loads(file_schema.text())
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def plain(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: plain(value) for key, value in node.items()}
    return [plain(value) for value in node] if isinstance(node, list) else node


def marked(text: str) -> set[str]:
    """The dotted places that an editor marks in a suite file."""
    places, errors = set(), [*editor().iter_errors(plain(trees.parse(text, Path("s.yaml"))))]
    while errors:
        error = errors.pop()
        errors += error.context
        places.add(".".join(map(str, error.absolute_path)))
    return places


def test_every_suite_of_ours_is_taken() -> None:
    found = {
        file.name: marked(file.read_text(encoding="utf-8")) for file in SUITES.glob("*.yaml") if "." not in file.stem
    }
    assert len(found) > 50 and {name: places for name, places in found.items() if places} == {}


WRONG = [  # what stands in the template, what is written in its place, where that is marked
    ("seeds: [6, 7, 8]", "seeds: [six]", "seeds.0"),
    ("seeds: [6, 7, 8]", "sedes: [6]", ""),
    ("title: ", "titel: ", ""),
    ("baseline: FAT", "baseline: [FAT]", "baseline"),
    ("{name: sfat,", "{name: sfta,", "axes.method.SFAT.algorithm.aggregator.name"),
    ("{name: sfat, alpha: 1/6, top: 1}", "sfta", "axes.method.SFAT.algorithm.aggregator"),
    ("alpha: 1/6", "alhpa: 1/6", "axes.method.SFAT.algorithm.aggregator"),
    ("alpha: 1/6", "alpha: 2", "axes.method.SFAT.algorithm.aggregator.alpha"),
    ("alpha: 1/6", "alpha: sixth", "axes.method.SFAT.algorithm.aggregator.alpha"),
    ("top: 1}", "top: 0}", "axes.method.SFAT.algorithm.aggregator.top"),
    ("eps: 25/255", "eps: wide", "base.perturbation.eps"),
    ("{name: digits}", "{name: digist}", "base.data.name"),
    ("rounds: 20", "rounds: 1.5", "base.algorithm.rounds"),
    ("momentum: 0.9", "momentun: 0.9", "base.algorithm.local"),
    ("objective: {name: at, attack: {name: pgd}}", "objective: {name: at, attack: {name: pgdd}}",
     "base.algorithm.local.objective.attack.name"),
    ("checkpoints: [last]", "checkpoints: [first]", "evaluate.checkpoints.0"),
    ("fgsm: {name: fgsm}", "fgsm: {name: fgms}", "evaluate.attacks.fgsm.name"),
    ("steps: 20", "steps: 0", "evaluate.attacks.pgd20.steps"),
    ("note: 800", "notes: 800", "presets.smoke"),
    ("width: 8", "width: wide", "presets.smoke.overrides.0.set.model.width"),
    ("rows: [method]", "row: [method]", "tables.0"),
    ("lines: [method]", "lines: [method]\n    kind: pie", "figures.0.kind"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "place"), WRONG, ids=[after for _, after, _ in WRONG])
def test_a_mistake_is_marked_where_it_stands(before: str, after: str, place: str) -> None:
    assert before in TEMPLATE and marked(TEMPLATE) == set()
    assert place in marked(TEMPLATE.replace(before, after))


def test_a_list_of_radii_null_and_names_of_plugins_are_taken() -> None:
    for before, after in (
        ("{name: fgsm}", "{name: fgsm, eps: [2/255, 8/255]}"),
        ("evaluate: {n: 64, batch: 64}", "evaluate: {attacks: {pgd20: null}}"),
        ("seeds: [6, 7, 8]", 'seeds: "0-4"\nplugins: [mine.py]'),
    ):
        assert marked(TEMPLATE.replace(before, after)) == set(), after
    own = TEMPLATE.replace("{name: sfat, alpha: 1/6, top: 1}", "{name: mine, near: true}")
    assert marked(own) and marked(f"plugins: [mine.py]\n{own}") == set()
    assert marked(f"plugins: [mine.py]\n{own.replace('momentum', 'momentun')}") != set()
