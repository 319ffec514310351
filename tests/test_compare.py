"""`fatbench compare`: which cells are paired, what is computed, what is said of it. The tests: test_statistics.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from fatbench.errors import NothingMatched, SpecError
from fatbench.report.contrasts import Difference, compare
from fatbench.report.numbers.doubts import Doubt
from fatbench.report.numbers.stored import Measurement
from fatbench.report.pairs import Pair, pairs
from fatbench.report.sentences import FLOOR, conclusion, exploratory, points_up, record
from fatbench.store import jsonl
from fatbench.store.stages import Store
from fatbench.suite import files
from fatbench.suite.standard_attacks import did_you_mean_metric

RESULTS = Path(__file__).parent.parent / "results"
SUITE = ["--suite", "sfat-audit", "--preset", "jpeg75-precision"]


def measured(bits: str) -> dict[str, Measurement]:
    """One evaluation, the outcome of each image a character."""
    return {"e-00": Measurement(bits.count("1") / len(bits), len(bits), (int(bits, 2), len(bits)))}


def compared(a: list[str], b: list[str]) -> Difference:
    cells = [Pair((), seed, f"a{seed}", f"b{seed}") for seed in range(len(a))]
    (found,) = compare(cells, lambda id: measured(a[int(id[1:])]), lambda id: measured(b[int(id[1:])]))
    return found


# --- what is computed --------------------------------------------------------------------------------------------


def test_one_seed_says_nothing_of_methods() -> None:
    """A alone is right on three of six images, B on one: McNemar 0.625, about these two networks. Nothing else."""
    found = compared(["111010"], ["010001"])
    assert (found.values, found.difference) == (((4 / 6,), (2 / 6,)), pytest.approx(2 / 6))
    assert (found.test, found.p, found.over_seeds) == (None, None, None)
    assert found.images[0].p == 0.625
    text = exploratory([found], "x", "y", "last")
    assert "A 66.67, B 33.33: difference +33.33\n  => not tested: one seed\n" in text
    assert "  these two trained networks on other such images, which says nothing about the methods:\n" in text
    said = "agreement 33.3 %, only A right 3, only B right 1, matched odds ratio 3.00; McNemar p = 0.62\n"
    assert text.endswith(f"    seed 0: {said}")
    assert "1 seed: a claim about methods needs at least 5\n" in text
    assert record(found)["test"] is None


def test_several_models_a_side() -> None:
    """Images count 1 and 1/2 with two models, and 0 with one, at both seeds: s = 0, half an image is 1/4."""
    sides = {"a": {"e-00": Measurement(0.75, 2, (0b1110, 4))}, "b": {"e-00": Measurement(0.0, 2, (0b00, 2))}}
    cells = [Pair((), seed, "a", "b") for seed in (0, 1)]
    (found,) = compare(cells, sides.__getitem__, sides.__getitem__)
    assert found.test is not None and found.images == () and found.over == "seeds and images"
    assert (found.test.mean, found.test.seed_variance) == (0.75, pytest.approx(0.25**2 / 2))
    (alone,) = compare(cells[:1], sides.__getitem__, sides.__getitem__)
    assert exploratory([alone], "x", "y", "last").endswith("=> not tested: one seed\n")


def test_two_seeds_and_a_row_without_outcomes() -> None:
    """With outcomes, over seeds and images; without them, over seeds on these images, half an image added: 10 images
    and differences 0.3 and 0.2 are t = 0.25 sqrt 2 / (0.0707 + 0.05) of one degree of freedom.
    """
    here = {"a0": "11", "a1": "11", "b0": "00", "b1": "01"}
    bare = {"c0": 0.9, "c1": 0.8, "d0": 0.6, "d1": 0.6}

    def of(id: str) -> dict[str, Measurement]:
        return measured(here[id]) if id in here else {"e-00": Measurement(bare[id], 10, None)}

    rows = (("x", "a", "b"), ("y", "c", "d"))
    cells = [Pair((("row", row),), s, f"{a}{s}", f"{b}{s}") for row, a, b in rows for s in (0, 1)]
    first, second = compare(cells, of, of)
    assert (first.over, second.over) == ("seeds and images", "seeds, these images")
    assert (first.test.mean, second.test.image_variance) == (0.75, 0)
    assert second.p == pytest.approx(2 * stats.t.sf(0.25 * 2**0.5 / (0.05 * 2**0.5 + 0.05), 1))
    assert second.over_seeds.t_p == pytest.approx(0.12566592)  # t = 5 of one degree of freedom
    assert second.images == ()
    text = exploratory([first, second], "x", "y", "last")
    assert "over seeds, these images: 95 % interval" in text and "over seeds and images: 95 % interval" in text
    assert "exploratory, not corrected for 2 comparisons\n2 seeds: a claim about methods needs at least 5\n" in text
    assert text.startswith("2 comparisons: accuracies differ in 2, significantly (p < 0.05) in 0 of 2 tested\n")
    unlearned, above = Doubt("chance", 0.1), Doubt("ended", 2.0)
    doubts = ((unlearned, above), (unlearned,))
    sides = tuple(tuple(replace(n, doubts=own) for n in first.numbers[0]) for own in doubts)
    doubted = replace(first, numbers=sides, test=None, why="x")
    text = exploratory([doubted, doubted], "x", "y", "last")
    assert text.startswith("2 comparisons: accuracies differ in 0, none is tested\n")
    assert text.count(f"  A and B: {unlearned.words}\n  A: {above.words}\n") == 2
    text = exploratory(compare([*cells, Pair((("row", "y"),), 2, "c0", "d0")], of, of), "x", "y", "last")
    assert "seeds 0, 1)\n  2 seeds: a claim" in text and "seeds 0, 1, 2)\n  3 seeds: a claim" in text


def test_networks_that_agree_on_everything() -> None:
    """p = 1, and the interval is half an image a seed: t of one degree at 0.975, times 1/4 over sqrt 2."""
    found = compared(["10", "10"], ["10", "10"])
    assert (found.p, found.difference) == (1, 0)
    assert found.test is not None and found.test.at_most == pytest.approx(stats.t.isf(0.025, 1) / 4 / 2**0.5)
    assert "not significantly different (p >= 0.05); they differ by at most 224.62 points" in text_of(found)


def text_of(found: Difference, margin: float | None = None) -> str:
    return exploratory([replace(found, margin=margin)], "x", "y", "last")


def test_a_null_result_says_what_is_excluded() -> None:
    """The larger end of the interval; "equivalent" only within a margin that is given and not exceeded."""
    found = compared(["1" * 500 + "0" * 500] * 5, ["1" * 498 + "0" * 502] * 5)
    assert found.test is not None and found.test.at_most == max(-found.test.low, found.test.high)
    assert "they differ by at most 0.49 points (95 %)" in text_of(found)
    assert "a claim" not in text_of(found) and "equivalent" not in text_of(found)
    assert "=> equivalent within ±0.5 points, the margin that the suite declares" in text_of(found, 0.5)
    assert "equivalent" not in text_of(found, 0.4)
    assert [record(replace(found, margin=m))["test"]["equivalent"] for m in (None, 0.5, 0.4)] == [None, True, False]


@pytest.mark.parametrize(
    ("fraction", "said"), [(0.0239, "2.4"), (0.024, "2.4"), (0.02401, "2.5"), (0.1 * 3 / 10, "3.0"), (1e-9, "0.1")]
)
def test_points_are_rounded_up(fraction: float, said: str) -> None:
    assert points_up(fraction) == said


def test_small_p_values() -> None:
    found = compared(["1" * 1000] * 8, ["0" * 1000] * 8)
    assert "p < 1e-6" in text_of(found) and "=> significantly different (p < 0.05)" in text_of(found)


def test_other_attacks_are_not_compared() -> None:
    """A metric is an attack, its settings, n and batch: the name alone is not enough."""
    sides = ({"pgd-aa": Measurement(0.5, 2, None)}, {"pgd-bb": Measurement(0.5, 2, None)})
    with pytest.raises(NothingMatched, match="no evaluation in common"):
        compare([Pair((), 0, "a", "b")], lambda _: sides[0], lambda _: sides[1])
    with pytest.raises(SpecError, match=r"^metric: nothing is measured as 'pdg' \(did you mean 'pgd'\?\)"):
        compare([Pair((), 0, "a", "b")], lambda _: sides[0], lambda _: sides[1], ["pdg"])
    assert did_you_mean_metric("AA", ["pgd20", "autoattack"]) == " (did you mean 'autoattack'?)"
    assert did_you_mean_metric("pgd-20", ["pgd20", "autoattack"]) == " (did you mean 'pgd20'?)"


# --- which cells are paired --------------------------------------------------------------------------------------


def test_rows_of_a_suite() -> None:
    plan = files.load("sfat-audit").plan("jpeg75-precision")
    by_label = pairs(plan, "SFAT", "FAT")
    method = {cell.id: cell.key["method"] for cell in plan.cells}
    assert [(method[p.a], method[p.b], p.seed) for p in by_label] == [("SFAT", "FAT", seed) for seed in (6, 7)]
    assert pairs(plan, "aggregator=sfat", "aggregator=samples") == by_label
    assert {pair.labels for pair in by_label} == {()}, "what all pairs share says nothing"
    with pytest.raises(SpecError, match=r"has no label 'SFATT' \(did you mean 'SFAT'\?\)"):
        pairs(plan, "SFATT", "FAT")
    with pytest.raises(SpecError, match="'SFAT' and 'aggregator=sfat' share 2 cells"):
        pairs(plan, "SFAT", "aggregator=sfat")
    with pytest.raises(SpecError, match="'aggregator!=samples' holds several cells of seed 6: name one of method"):
        pairs(plan, "aggregator!=samples", "FAT")
    with pytest.raises(NothingMatched, match="has a partner of the same seed"):
        pairs(plan, "aggregator=sfat and seed=6", "aggregator=samples and seed=7")


# --- the command -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("compare") / "sfat.db")
    with Store.open(path, create=True) as store:
        jsonl.import_(store, RESULTS / "sfat-bf16-cpu.jsonl.xz")
    return path


def test_two_rows_of_committed_results(db: str, run: Any, tmp_path: Path) -> None:
    """SFAT is 1.1 points below FAT under PGD-20, two seeds: in JSON and in text, by label and by filter."""
    code, out, _ = run("compare", "SFAT", "FAT", *SUITE, "--db", db, "--format", "json")
    found = {one["metric"]: one for one in json.loads(out)["comparisons"]}
    assert code == 0
    assert set(found) == {"natural", "fgsm", "fgsm_sfat", "pgd20", "cw"}
    pgd20 = found["pgd20"]
    assert (pgd20["difference"], pgd20["seeds"], pgd20["n"]) == (pytest.approx(-0.011), [6, 7], 500)
    assert [image["only_a"] - image["only_b"] for image in pgd20["images"]] == [-4, -7]
    assert json.loads(out)["exploratory"] and json.loads(out)["margin"] is None
    test = pgd20["test"]
    assert test["interval"][0] < -0.011 < test["interval"][1] and test["over"] == "seeds and images"
    assert test["p"] == pgd20["p"] > 0.05 and test["at_most"] > 0.011 and test["equivalent"] is None
    assert json.loads(out)["preset"] == "jpeg75-precision"
    words = ("compare", "aggregator=sfat", "aggregator=samples", *SUITE, "--db", db, "--metric", "pgd20")
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    unnamed = run("compare", "SFAT", "FAT", *SUITE[:2], "--db", db, "--metric", "pgd20")
    assert unnamed[2] == "fatbench: preset jpeg75-cpu, which has most cells here (--preset)\n"
    assert run(*words, "-k", "run.precision=bf16") == (0, out, "")  # as all of these were run
    assert run(*words, "-k", "run.precision=fp32")[0] == 3
    assert "A 23.90, B 25.00: difference -1.10" in out
    assert "=> not significantly different (p >= 0.05); they differ by at most" in out
    persons = tmp_path / "persons.txt"
    persons.write_text("".join(f"person {i // 20}\n" for i in range(600)))
    code, out, _ = run("compare", "SFAT", "FAT", *SUITE, "--db", db, "--groups", str(persons), "--format", "json")
    (grouped,) = (one for one in json.loads(out)["comparisons"] if one["metric"] == "pgd20")
    assert grouped["test"]["over"] == "seeds and 25 groups of images" and grouped["a"] == pgd20["a"]
    assert grouped["images"][1]["mcnemar_p"] != pgd20["images"][1]["mcnemar_p"]
    persons.write_text("one\ntwo\n")
    code, _, err = run("compare", "SFAT", "FAT", *SUITE, "--db", db, "--groups", str(persons))
    assert code == 2 and "groups: expected a label for each of 500 test images, (images,), got (2,)" in err
    code, _, err = run("compare", "SFAT", "FAT", *SUITE, "--db", db, "--groups", "writer")
    assert code == 2 and "expected 'writers' or a text file with a label a line" in err


def test_files_databases_and_cells(db: str, run: Any) -> None:
    """bf16 against fp32: a database against a file, paired by cell; two cells; a mixture is refused."""
    fp32 = str(RESULTS / "sfat-fp32-cpu.jsonl.xz")
    code, out, _ = run("compare", db, fp32, "--metric", "natural", "--format", "json")
    found = json.loads(out)["comparisons"]
    assert code == 0 and [one["seeds"] for one in found] == [[6, 7]] * 2
    assert [one["row"] for one in found] == ["algorithm.aggregator=samples", "algorithm.aggregator=sfat"]
    code, out, _ = run("compare", "cce9", "77d1", "--db", db, "--metric", "cw")
    assert "(500 images, seed 6; attacked in bf16)" in out
    assert "=> not tested: one seed" in out and "McNemar p = 0.0086" in out
    said = f"fatbench: '{fp32}' is a file or database, but 'cce9' is not: give two of a kind\n"
    assert run("compare", "cce9", fp32, "--db", db)[::2] == (2, said)
    other = str(RESULTS / "fat-bounds-fmnist25-large.jsonl.xz")
    code, _, err = run("compare", db, other)
    assert code == 3 and f"no cell in common: {db} has sfat-audit (jpeg75-cpu)" in err
    assert f"{other} has fat-bounds (" in err
    code, _, err = run("compare", "aggregator=sfat", "aggregator=samples", "--db", db)
    expected = "fatbench: --suite: 'aggregator=sfat' and 'aggregator=samples' are rows: name their suite"
    assert (code, err) == (2, f"{expected} ({db} has sfat-audit (jpeg75-cpu))\n")


def test_nothing_is_said_of_size_between_two_numbers_at_the_floor() -> None:
    found = replace(compared(["1" * 500 + "0" * 500] * 5, ["1" * 498 + "0" * 502] * 5), margin=1.0)
    lines = list(conclusion(found))
    assert any("equivalent" in line for line in lines) and any("at most" in line for line in lines)
    sides = tuple(tuple(replace(n, doubts=(Doubt("majority", 0.1),)) for n in side) for side in found.numbers)
    at_floor = "\n".join(conclusion(replace(found, numbers=sides)))
    assert FLOOR in at_floor and "at most" not in at_floor and "equivalent" not in at_floor
