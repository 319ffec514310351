"""What compared rows differ in besides their labels is named, and takes away the difference and its mark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from test_suites import QUICKLY

from fatbench import report
from fatbench.report import contrasts, sentences
from fatbench.report.numbers.stored import Measurement
from fatbench.report.pairs import pairs
from fatbench.suite import confounders, files
from fatbench.suite.cells import Plan

SUITE = """
name: own
title: Own
seeds: [0, 1]
base:
  data: digits
  train: 300
  test: 100
  partition: {name: iid, clients: 3}
  model: {name: small_cnn, width: 4}
  algorithm:
    name: fedavg
    rounds: 2
    participation: 0.9
    local:
      {epochs: 1, batch: 16, lr: 0.1, objective: {name: at, attack: {name: pgd, eps: 8/255, step: 2/255, steps: 2}}}
    aggregator: {name: samples}
axes:
  method:
    FAT: {}
    SFAT: {algorithm: {aggregator: {name: sfat, alpha: 1/6, top: 1}}}
    RS: {algorithm: {local: {objective: {attack: {step: 10/255, steps: 1}}}}}
    own: {algorithm: {aggregator: uniform}}
baseline: FAT
grid:
  overrides:
    - {when: {method: [FAT, SFAT, RS]}, set: {algorithm: {local: {objective: {attack: {eps: 25/255}}}}}}
evaluate:
  attacks: {natural: natural, pgd: {name: pgd, eps: 25/255, step: 3/255, steps: 2}}
presets: {paper: {}}
tests: {family: f, axis: method, metrics: [pgd], contrasts: {own: {own: 1, FAT: -1}, SFAT: {SFAT: 1, FAT: -1}}}
tables:
  - id: t
    title: T
    rows: [method]
    compare_across: [method]
    values: {natural: natural, PGD: pgd, gain: {source: pgd, minus: {method: FAT}}}
    paired: {axis: method, against: FAT}
"""
Run = Callable[..., tuple[int, str, str]]
RADIUS = "own trains at 8/255, the other three at 25/255"


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., files.Suite]:
    def suite(*changes: tuple[str, str]) -> files.Suite:
        text = SUITE
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        (tmp_path / "own.yaml").write_text(text)
        return files.load(str(tmp_path / "own.yaml"))

    return suite


def differ(plan: Plan) -> list[str]:
    return confounders.sentences(confounders.against(plan.cells, plan.baseline))


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        ([], [RADIUS]),
        ([("method: [FAT, SFAT, RS]}", "method: [FAT, SFAT, RS, own]}")], []),
        # what a label writes is compared; so is an exception, which names fewer than half of the labels
        ([("own: {algorithm: {aggregator: uniform}}",
           "own: {algorithm: {local: {objective: {attack: {eps: 1/255}}}}}")],
         []),
        ([("method: [FAT, SFAT, RS]}", "method: RS}")], []),
        ([("method: [FAT, SFAT, RS]}", "method: [FAT, SFAT]}")],
         ["RS and own train at 8/255, the other two at 25/255"]),
        # a label that names a function owns its defaults, not what the others state
        ([("own: {algorithm: {aggregator: uniform}}", "own: {algorithm: {name: fedbn, rounds: 2, "
           "aggregator: {name: samples}, local: {epochs: 1, batch: 16, lr: 0.1, "
           "objective: {name: at, attack: {name: pgd, eps: 25/255, step: 2/255, steps: 2}}}}}")],
         ["own: algorithm.participation is 1.0, of the other three 0.9"]),
        ([("set: {algorithm: {local: {objective: {attack: {eps: 25/255}}}}}", "set: {train: 200, model: {width: 8}}")],
         ["own: model.width is 4, of the other three 8", "own: train is 300, of the other three 200"]),
        ([("set: {algorithm: {local: {objective: {attack: {eps: 25/255}}}}}", "set: {per_class: true}")], []),
        ([("set: {algorithm: {local: {objective: {attack: {eps: 25/255}}}}}",
           "set: {augment: {name: crop_flip, padding: 2}}")],
         ["own: augment is None, of the other three crop_flip"]),
    ],
)  # fmt: skip
def test_what_rows_differ_in(
    own: Callable[..., files.Suite], changes: list[tuple[str, str]], sentences: list[str]
) -> None:
    suite = own(*changes)
    assert differ(suite.plan()) == sentences
    assert sorted(one for _, one in report.unlike(suite, [suite.plan()])) == sorted(sentences)


@pytest.mark.parametrize("name", QUICKLY)
def test_rows_of_our_suites_differ_in_their_labels_alone(name: str) -> None:
    suite = files.load(name)
    assert report.unlike(suite, [suite.plan(preset) for preset in suite.presets()]) == []


def test_the_check_of_a_suite_names_them(own: Callable[..., files.Suite], run: Run) -> None:
    file = str(own().file)
    code, out, _ = run("check", file)
    assert code == 0 and f"{file}: not compared in paper: {RADIUS}" in out


def measured(cell: str) -> dict[str, Measurement]:
    return {"pgd-00": Measurement(0.3 + int(cell, 16) % 100 / 400, 100, None)}


def test_rows_that_differ_have_no_difference_from_the_baseline_and_no_test(own: Callable[..., files.Suite]) -> None:
    suite = own()
    plan = suite.plan()
    assert {one.sides[0] for one in contrasts.from_baseline(plan, measured)} == {"SFAT", "RS"}
    (one,) = contrasts.compare(pairs(plan, "own", "FAT"), measured, measured)
    assert (one.test, one.over_seeds, one.unlike) == (None, None, ("own trains at 8/255, FAT at 25/255",))
    text = sentences.exploratory([one], "own", "FAT", "last")
    assert "=> not compared: own trains at 8/255, FAT at 25/255" in text and "difference +" not in text
    assert sentences.record(one)["difference"] is None
    (other,) = contrasts.compare(pairs(plan, "SFAT", "FAT"), measured, measured)
    assert other.test is not None and other.unlike == ()
    why = {one.name: one.why for one in contrasts.family(suite.tests[0], plan, measured)}
    assert why["own"] == "not compared: own trains at 8/255, FAT at 25/255" and "not compared" not in why["SFAT"]


@pytest.mark.slow
def test_the_table_gives_them_no_mark_and_no_difference_and_says_why(
    own: Callable[..., files.Suite], tmp_path: Path, run: Run
) -> None:
    file, db = str(own().file), str(tmp_path / "x.db")
    assert run("run", "suite", file, "--db", db)[0] == 0
    assert RADIUS in run("report", file, "--db", db, "--format", "json")[1]
    assert RADIUS in run("report", file, "--db", db, "--format", "terminal")[1]
    markdown = run("report", file, "--db", db, "--format", "markdown")[1]
    assert f"*not compared*: {RADIUS}" in markdown
    lines = [line for line in markdown.splitlines() if line.startswith("| ")]
    marked = {line.split("|")[1].strip(): line for line in lines[1:]}
    assert not any(sign in marked["own"] for sign in ("↓", "°", "**"))
    assert marked["own"].split("|")[-2].strip() == "" and "(" in marked["SFAT"].split("|")[-2]
