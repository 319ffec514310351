"""The section `tests` of a suite: how it is read, and the family of comparisons that comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import small

from fatbench.report import contrasts, sentences
from fatbench.report.numbers.statistics import contrast, holm
from fatbench.report.numbers.stored import Measurement
from fatbench.report.sentences import points_up
from fatbench.store.stages import Store
from fatbench.suite import files, filters
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.files import Suite

RESULTS = Path(__file__).parent.parent / "results"
SUITE = small(
    name="four", seeds="[0, 1, 2]", data="cifar10", train="", test="", partition="{name: iid, clients: 5}", model="nin",
    axes="{dataset: {CIFAR-10: {}, SVHN: {data: {name: svhn}}}, method: {A: {}, B: {validation: 100},"
    " C: {validation: 200}, D: {validation: 300}}}",
    evaluate="{checkpoints: [last], attacks: {natural: natural, fgsm: {name: fgsm, eps: 8/255}}}",
    presets="{paper: {}, few: {axes: {method: [A, B, C]}}}", tables="",
)  # fmt: skip
FACTORIAL = """\
tests:
  family: claims
  contrasts: {first: {C: 1/2, D: 1/2, A: -1/2, B: -1/2}, interaction: [1, -1, -1, 1], plain: {A: 1, B: -1}}
"""


def written(folder: Path, tests: str) -> Suite:
    (folder / "four.yaml").write_text(SUITE + tests)
    return files.load(str(folder / "four.yaml"))


# --- how it is read ----------------------------------------------------------------------------------------------


def test_contrasts_by_label_and_by_position(tmp_path: Path) -> None:
    (tests,) = written(tmp_path, FACTORIAL).tests
    assert (tests.family, tests.margin, tests.metrics) == ("claims", None, None)
    assert {one.axis for one in tests.contrasts.values()} == {"method"}
    assert tests.contrasts["first"].weights == {("C", ""): 0.5, ("D", ""): 0.5, ("A", ""): -0.5, ("B", ""): -0.5}
    assert tests.contrasts["interaction"].weights == {("A", ""): 1, ("B", ""): -1, ("C", ""): -1, ("D", ""): 1}
    assert [one.of_two for one in tests.contrasts.values()] == [False, False, True]
    assert written(tmp_path, "").tests == []
    assert written(tmp_path, "tests: {margin: 2}\n").margin == 2


# --- the family --------------------------------------------------------------------------------------------------

N = 40


def pretended(plan: Plan, lacking: Callable[[Cell], bool] = lambda _: False) -> Callable[[str], Mapping[str, Any]]:
    """Outcomes of every cell but some, drawn from its id."""
    known: dict[str, dict[str, Measurement]] = {}
    for cell in plan.cells:
        draw = np.random.default_rng(int(cell.id, 16))
        known[cell.id] = {}
        for evaluation in () if lacking(cell) else cell.evaluations:
            right = draw.random(N) < 0.6
            outcomes = int("".join(map(str, right.astype(int))), 2), N
            known[cell.id][evaluation.id] = Measurement(float(right.mean()), N, outcomes)
    return known.__getitem__


def test_a_family_is_every_contrast_row_and_metric(tmp_path: Path) -> None:
    """3 contrasts x 2 data sets x 2 metrics, each the contrast of its cells' outcomes; Holm over the twelve."""
    suite = written(tmp_path, FACTORIAL)
    plan = suite.plan("paper")
    of = pretended(plan)
    found = contrasts.family(suite.tests[0], plan, of)
    every = product(("first", "interaction", "plain"), ("CIFAR-10", "SVHN"), ("natural", "fgsm"))
    assert [(one.name, one.row, one.metric) for one in found] == [*every]
    assert [one.p_holm for one in found] == holm([one.test.p for one in found if one.test])
    one = next(one for one in found if (one.name, one.row, one.metric) == ("interaction", "SVHN", "fgsm"))
    cells = []
    for method, weight in zip("ABCD", (1.0, -1.0, -1.0, 1.0), strict=True):
        mine = [c for c in plan.cells if (c.key["dataset"], c.key["method"]) == ("SVHN", method)]
        names = [e.id for e in mine[0].evaluations if e.label == "fgsm"]
        cells.append((weight, [of(c.id)[names[0]].outcomes or (0, 0) for c in mine]))
    assert one.test == contrast(cells) and (one.seeds, one.n, one.unit) == ((0, 1, 2), N, "image")


def test_what_cannot_be_tested_counts_with_one(tmp_path: Path) -> None:
    """Cells of D are not run, or not in the preset: their contrasts stay in the family."""
    suite = written(tmp_path, FACTORIAL)
    plan = suite.plan("paper")
    found = contrasts.family(suite.tests[0], plan, pretended(plan, lambda cell: cell.key["method"] == "D"))
    assert len(found) == 12
    tested = [one for one in found if one.test is not None]
    assert [one.name for one in tested] == ["plain"] * 4
    ps = [1.0] * 8 + [one.test.p for one in tested if one.test]
    assert [one.p_holm for one in found] == holm(ps)
    said = {(one.why, one.seeds) for one in found if one.test is None}
    assert said == {("fewer than two seeds are measured of every cell", ())}
    few = suite.plan("few")
    found = contrasts.family(suite.tests[0], few, pretended(few))
    assert [one.why for one in found] == ["D is not in this preset"] * 8 + [""] * 4
    assert [one.seeds for one in found[:8]] == [()] * 8
    text = sentences.family(found, suite.tests[0], few, "last")
    (line,) = [line for line in text.splitlines() if line.split()[:3] == ["interaction", "SVHN", "fgsm"]]
    assert line.endswith("D is not in this preset") and " 1 " in line
    assert text.startswith("none of 12 comparisons significant")
    assert "3 seeds: a claim about methods needs at least 5" in text
    found = contrasts.family(suite.tests[0], plan, lambda _: {})
    assert all(one.test is None and one.p_holm == 1 for one in found)


def test_seeds_and_outcomes_that_are_missing(tmp_path: Path) -> None:
    """Only the seeds that all cells have; without outcomes of one cell over these images, the largest weight counts."""
    suite = written(tmp_path, FACTORIAL)
    plan = suite.plan("paper")
    of = pretended(plan, lambda cell: cell.key["method"] == "C" and cell.spec["seed"] == 1)
    found = contrasts.family(suite.tests[0], plan, of)
    assert {one.name: one.seeds for one in found} == {"first": (0, 2), "interaction": (0, 2), "plain": (0, 1, 2)}

    def bare(id: str) -> dict[str, Measurement]:
        return {name: Measurement(one.value, one.n, None) for name, one in of(id).items()}

    found = contrasts.family(suite.tests[0], plan, bare)
    assert {one.over for one in found} == {"seeds, these images"}
    first = next(one for one in found if one.name == "first").test
    assert first is not None and first.image_variance == 0
    means = []
    for seed in (0, 2):
        at = {c.key["method"]: c for c in plan.cells if c.key["dataset"] == "CIFAR-10" and c.spec["seed"] == seed}
        value = {m: next(v.value for k, v in of(c.id).items() if k.startswith("natural-")) for m, c in at.items()}
        means.append((value["C"] + value["D"] - value["A"] - value["B"]) / 2)
    assert first.mean == pytest.approx(np.mean(means))
    assert first.seed_variance == pytest.approx((np.std(means, ddof=1) + 0.5 / (2 * N)) ** 2 / 2)


def test_a_contrast_of_methods_and_attacks(tmp_path: Path) -> None:
    """How much more A loses under attack than B does: one comparison a row."""
    tests = "tests: {family: f, contrasts: {loss: {A: {natural: 1, fgsm: -1}, B: {natural: -1, fgsm: 1}}}}\n"
    suite = written(tmp_path, tests)
    plan = suite.plan("paper")
    found = contrasts.family(suite.tests[0], plan, pretended(plan))
    assert [(one.row, one.metric) for one in found] == [("CIFAR-10", "natural, fgsm"), ("SVHN", "natural, fgsm")]
    assert all(one.test is not None for one in found)
    text = sentences.family(found, suite.tests[0], plan, "last")
    assert "loss = A under natural + B under fgsm - A under fgsm - B under natural" in text

    def other_images(id: str) -> dict[str, Measurement]:
        of = pretended(plan)(id)
        return {name: Measurement(one.value, 30 if "fgsm" in name else N, None) for name, one in of.items()}

    found = contrasts.family(suite.tests[0], plan, other_images)
    assert {one.why for one in found} == {"the cells were not evaluated by the same attack on the same images"}


def test_families_are_of_some_points_and_may_be_several(tmp_path: Path) -> None:
    """`where`, `mean_over` and `between` by hand; Holm is over each family alone."""
    tests = """\
tests:
  - {family: everywhere, note: before the run, margin: 2, metrics: [fgsm], PLAIN, mean_over: dataset}
  - {family: one, where: {dataset: SVHN}, metrics: [natural], PLAIN}
  - {family: interaction, metrics: [fgsm], between: {dataset: [SVHN, CIFAR-10]}, PLAIN}
"""
    suite = written(tmp_path, tests.replace("PLAIN", "contrasts: {plain: {A: 1, B: -1}}"))
    plan = suite.plan("paper")
    of = pretended(plan)
    first, second, third = (contrasts.family(tests, plan, of) for tests in suite.tests)
    assert [one.row for one in first] == ["CIFAR-10", "SVHN", "mean over dataset"] and suite.margin == 2
    assert [(one.row, one.metric) for one in second] == [("", "natural")]
    for found in (first, second):
        assert [one.p_holm for one in found] == holm([one.test.p for one in found if one.test])
    parts = []
    for dataset in ("CIFAR-10", "SVHN"):
        for method, sign in (("A", 1), ("B", -1)):
            mine = [c for c in plan.cells if (c.key["dataset"], c.key["method"]) == (dataset, method)]
            (name,) = {e.id for e in mine[0].evaluations if e.label == "fgsm"}
            parts.append((sign / 2, [of(c.id)[name].outcomes or (0, 0) for c in mine]))
    assert first[2].test == contrast(parts)
    assert first[2].test.mean == pytest.approx(sum(one.test.mean for one in first[:2] if one.test) / 2)
    assert [one.row for one in third] == ["SVHN - CIFAR-10"]
    of_svhn = [(-2 * weight if i < 2 else 2 * weight, of_it) for i, (weight, of_it) in enumerate(parts)]
    assert third[0].test == contrast(of_svhn)
    text = sentences.family(first, suite.tests[0], plan, "last")
    assert "\nbefore the run\n" in text and "plain mean over dataset fgsm" in " ".join(text.split())


def test_cells_of_a_seed_in_different_precisions_are_not_tested(tmp_path: Path) -> None:
    suite = written(tmp_path, "tests: {family: f, metrics: [fgsm], contrasts: {plain: {A: 1, B: -1}}}\n")
    plan = suite.plan("paper")
    of = pretended(plan)
    lower = {c.id for c in plan.cells if c.key["method"] == "A" and c.key["dataset"] == "SVHN" and c.spec["seed"] == 2}
    both = {c.id for c in plan.cells if c.key["dataset"] == "CIFAR-10" and c.spec["seed"] == 2}

    def measured(id: str) -> dict[str, Measurement]:
        stage = "x-00.bf16@1" if id in lower | both else "x-00@1"
        return {name: replace(one, stage=stage) for name, one in of(id).items()}

    cifar, svhn = contrasts.family(suite.tests[0], plan, measured)
    assert svhn.test is None and svhn.why == "the cells of a seed were attacked in different precisions"
    assert cifar.test is not None and cifar.precisions == ("fp32", "fp32", "bf16")
    text = sentences.family([cifar, svhn], suite.tests[0], plan, "last")
    assert "0, 1, 2; attacked in fp32 at seeds 0, 1, bf16 at seed 2" in text


# --- the command -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def db(committed: Mapping[str, Store]) -> str:
    return str(committed["sfat-jpeg75-cpu"].database.path)


def test_slack_and_shrink_of_the_committed_rows(db: str, run: Any) -> None:
    """The 2 x 2 design of sfat-audit: by hand from the means of FAT, FAT shrunk, SFAT and SFAT (released weights)."""
    asked = ("sfat-audit", "--preset", "jpeg75-cpu", "--db", db)
    code, out, _ = run("compare", *asked, "--format", "json")
    (said,) = json.loads(out)["families"]
    found = {(one["contrast"], one["metric"]): one for one in said["comparisons"]}
    assert (code, said["family"], len(found)) == (0, "slack-and-shrink", 9)
    means = dict(zip(("FAT", "shrunk", "SFAT", "released"), (0.36360, 0.27510, 0.35110, 0.28760), strict=True))
    effects = {
        "slack": (means["SFAT"] + means["released"] - means["FAT"] - means["shrunk"]) / 2,
        "shrink": (means["shrunk"] + means["released"] - means["FAT"] - means["SFAT"]) / 2,
        "interaction": means["FAT"] - means["shrunk"] - means["SFAT"] + means["released"],
    }
    for name, effect in effects.items():
        assert found[name, "natural"]["test"]["mean"] == pytest.approx(effect, abs=1e-4)
    assert [one["p_holm"] for one in found.values()] == holm([one["test"]["p"] for one in found.values()])
    assert 0.005 < found["shrink", "natural"]["test"]["p"] < 0.01 < 0.05 < found["shrink", "natural"]["p_holm"]
    signs = {"FAT shrunk": 0.5, "SFAT (released weights)": 0.5, "FAT": -0.5, "SFAT": -0.5}
    weights = {(one["label"], one["metric"]): one["weight"] for one in found["shrink", "natural"]["weights"]}
    assert weights == {(label, "natural"): sign for label, sign in signs.items()}
    code, out, _ = run("compare", *asked)
    assert out.startswith("none of 9 comparisons significant after Holm's correction (p < 0.05)\nsuite sfat-audit")
    assert "shrink = 0.5 FAT shrunk + 0.5 SFAT (released weights) - 0.5 FAT - 0.5 SFAT\n" in out
    test = found["shrink", "natural"]["test"]
    low, high = (100 * end for end in test["interval"])
    after, without = (points_up(test[key]) for key in ("detectable_corrected", "detectable"))
    (line,) = [line for line in out.splitlines() if line.startswith("shrink ") and " natural " in line]
    assert "\nof all: over seeds and images\n" in out  # images and precisions differ, so they stand in columns
    told = f"-7.60 ({low:+.2f} to {high:+.2f}) {points_up(test['at_most'], 2)} 0.077 {after} ({without})"
    assert f"{told} 2000 6, 7, 8, 9, 10" in " ".join(line.split()) and float(after) > float(without)
    assert "exploratory" not in out and "-0.00" not in out


def test_a_filter_chooses_what_is_shown_and_corrects_nothing_less(db: str, run: Any) -> None:
    """-k has no say in the family: p of a comparison is the same with it."""
    asked = ("compare", "sfat-audit", "--preset", "jpeg75-cpu", "--db", db, "--format", "json")

    def families(*filtered: str) -> dict[tuple[str, str], Any]:
        (family,) = json.loads(run(*asked, *filtered)[1])["families"]
        assert family["size"] == 9
        return {(one["contrast"], one["metric"]): one for one in family["comparisons"]}

    whole = families()
    assert (len(whole), families("-k", "method=SFAT")) == (9, whole)
    code, _, err = run(*asked[:-2], "-k", "method=MART")
    assert code != 0 and "method is never 'MART'" in err


def test_comparisons_of_a_filter_and_missing_seeds(tmp_path: Path) -> None:
    suite = written(tmp_path, "tests: {family: f, metrics: [fgsm], contrasts: {p: {A: 1, B: -1}, q: {C: 1, D: -1}}}\n")
    plan = suite.plan("paper")
    found = contrasts.family(suite.tests[0], plan, pretended(plan))

    def text(where: str, seeds: tuple[int, ...] = (0, 1, 2)) -> str:
        only = {cell.id for cell in filters.select(plan, where).cells}
        return sentences.family(found, suite.tests[0], plan, "last", only, seeds)

    said = text("method=C and dataset=SVHN")
    assert said.startswith("none of 4 comparisons significant") and "1 of them match the filter" in said
    assert "at 0.05 / 4 (at 0.05)" in said and "q SVHN fgsm" in " ".join(said.split())
    assert said.count(" 0, 1, 2") == 1 and "seeds of the preset" not in said
    assert "not all 4 seeds of the preset are tested" in text("method=C", (0, 1, 2, 3))
    some = replace(found[0], cells=frozenset())
    none = sentences.family([some], suite.tests[0], plan, "last", {"0"})
    assert "family 'f': none of its 1 comparison matches" in none
    said = "suite four, preset paper: family 'f' is of points of the grid that are not in this preset\n"
    assert sentences.family([], suite.tests[0], plan, "last") == said


def test_a_formula_has_what_is_subtracted_last() -> None:
    formula = sentences.formula
    assert formula({("A", ""): 1.0, ("B", ""): -1.0}) == "A - B"
    assert formula({("B", ""): -1.0, ("A", ""): 0.5, ("C", "pgd20"): 0.5}) == "0.5 A + 0.5 C under pgd20 - B"
    assert formula({("B", ""): -1.0, ("A", ""): 0.0, ("C", ""): 1.0}) == "0 A + C - B"
