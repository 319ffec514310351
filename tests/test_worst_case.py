"""The worst case over adversaries: its interval by hand, its level by simulation, and where it is shown."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np
import pytest

import fatbench
from fatbench.errors import SpecError
from fatbench.report.numbers.statistics import ImageOutcomes, bits_of, contrast
from fatbench.report.numbers.worst_case import worst_case, worst_case_difference
from fatbench.store.stages import Store
from fatbench.suite import files

N = 400
Row = list[list[ImageOutcomes]]


def row(rng: np.random.Generator, means: list[float], seeds: int, effect: np.ndarray | None = None) -> Row:
    """Outcomes of each adversary and seed on the same N images, of which some are hard."""
    effect = rng.normal(0, 0.04, seeds) if effect is None else effect
    hard = np.tile([-0.3, 0.0, 0.3, 0.0], N // 4)
    own = rng.normal(0, 0.025, (len(means), seeds))
    return [
        [bits_of(rng.random(N) < np.clip(mean + effect[s] + own[a, s] + hard, 0, 1)) for s in range(seeds)]
        for a, mean in enumerate(means)
    ]


def test_of_one_adversary_it_is_the_plain_interval() -> None:
    rng = np.random.default_rng(0)
    one, other = row(rng, [0.5], 6), row(rng, [0.4], 6)
    plain, worst = contrast([(1.0, one[0])], N), worst_case(one, N)
    assert plain is not None and worst is not None and worst.kept == (1,)
    assert (worst.mean, worst.low, worst.high) == pytest.approx((plain.mean, plain.low, plain.high), abs=1e-12)
    both, apart = contrast([(1.0, one[0]), (-1.0, other[0])], N), worst_case_difference(one, other, N)
    assert both is not None and apart is not None
    assert (apart.mean, apart.low, apart.high) == pytest.approx((both.mean, both.low, both.high), abs=1e-12)
    assert apart.p == pytest.approx(both.p, rel=1e-3, abs=2e-6)


def test_equal_outcomes_cost_nothing_over_seeds() -> None:
    """Ten copies have correlation 1: c is that of a single t, and only the images are corrected for ten."""
    single = row(np.random.default_rng(1), [0.5], 6)
    one, ten = worst_case(single, N), worst_case(single * 10, N)
    assert one is not None and ten is not None and ten.kept == (10,)
    assert ten.mean == pytest.approx(one.mean) and ten.low == pytest.approx(one.low, abs=0.003)  # b is spent
    assert one.high < ten.high < one.high + 0.02


def test_the_order_of_adversaries_is_no_matter() -> None:
    rows = row(np.random.default_rng(2), [0.5, 0.52, 0.6], 5)
    first, turned = worst_case(rows, N), worst_case(rows[::-1], N)
    assert first is not None and turned is not None
    assert (first.mean, first.low) == pytest.approx((turned.mean, turned.low), abs=1e-12)
    assert first.high == pytest.approx(turned.high, abs=0.004)  # the draws belong to other columns
    assert first.least == (2 - turned.least[0],)


def test_a_milder_adversary_is_left_out_and_too_few_give_nothing() -> None:
    rows = row(np.random.default_rng(3), [0.3, 0.8, 0.81], 8)
    found = worst_case(rows, N)
    assert found is not None and found.kept == (1,) and found.least == (0,) and found.low < 0.3 < found.high
    assert worst_case([one[:1] for one in rows], N) is None
    assert worst_case_difference([one[:1] for one in rows], [one[:1] for one in rows], N) is None


SHAPES = {"equal": [0.0] * 10, "one worse": [0.0, *[0.02] * 9], "ladder": [i / 100 for i in range(10)],
          "one far worse": [0.0, *[0.1] * 9]}  # fmt: skip


def misses(seeds: int, shapes: tuple[str, str], studies: int) -> tuple[float, float]:
    """How often the interval misses a worst case of 0.55, and how often that of two rows misses 0."""
    rng, one, two = np.random.default_rng(seeds), 0, 0
    for _ in range(studies):
        effect = rng.normal(0, 0.04, seeds)
        own, other = (row(rng, [0.55 + more for more in SHAPES[shape]], seeds, effect) for shape in shapes)
        found, apart = worst_case(own, N), worst_case_difference(own, other, N)
        assert found is not None and apart is not None
        one += not found.low <= 0.55 <= found.high
        two += not apart.low <= 0 <= apart.high
        # p is the level at which 0 leaves the interval
        assert (apart.p < 0.05) == (not apart.low <= 0 <= apart.high) or apart.p == pytest.approx(0.05, abs=0.005)
    return one / studies, two / studies


def test_it_keeps_its_level() -> None:
    one, two = misses(5, ("one worse", "one far worse"), 24)
    assert max(one, two) <= 0.05 + 3 * (0.05 * 0.95 / 24) ** 0.5


@pytest.mark.nightly
@pytest.mark.parametrize("seeds", [5, 10, 30])
@pytest.mark.parametrize("shapes", [*itertools.combinations_with_replacement(SHAPES, 2)])
def test_the_grid_of_nulls(seeds: int, shapes: tuple[str, str]) -> None:
    studies = 200
    bound = 0.05 + 3 * (0.05 * 0.95 / studies) ** 0.5
    one, two = misses(seeds, shapes, studies)
    assert one <= bound and two <= bound


# --- in suites ----------------------------------------------------------------------------------------------------


def test_a_family_compares_the_worst_cases_of_two_aggregators(committed: Mapping[str, Store]) -> None:
    """Of eight adversaries IPM 100 destroys the mean; it is the one that the family names."""
    db = str(committed["fat-byzantine-cpu"].database.path)
    tests = fatbench.tests("fat-byzantine", preset="cpu", db=db)
    found = tests.frame().query("family == 'worst-case'").set_index("metric").loc["pgd20"]
    assert (found["row"], found["estimator"]) == ("worst of 8", "worst case") and found["size"] == 2
    numbers = fatbench.results("fat-byzantine", preset="cpu", db=db).query("metric == 'pgd20' and training == 'AT'")
    means = numbers.groupby(["aggregator", "adversary"])["value"].mean()
    declared = ["none", "label flip", "sign flip", "IPM 0.1", "IPM 0.5", "IPM 100", "ALIE", "Min-Max"]
    worst = {name: means[name][declared].min() for name in ("mean", "multi-Krum")}
    assert found["difference"] == pytest.approx(worst["multi-Krum"] - worst["mean"], abs=0.02)
    assert found["low"] < worst["multi-Krum"] - worst["mean"] < found["high"] and found["p_holm"] < 1e-5
    assert "worst of 8 (IPM 0.5, IPM 100)" in str(tests)


def test_a_label_may_have_any_words(committed: Mapping[str, Store], write: Callable[[str], str]) -> None:
    """ "1 of 2" is a label of another axis, and says nothing of how many adversaries were measured."""
    suite = write(
        "extends: fat-byzantine\nname: own\naxes: {split: {1 of 2: {}}}\npresets: {cpu: {axes: {split: [1 of 2]}}}\n"
        "tests:\n  family: own\n  where: {split: 1 of 2, training: AT}\n  axis: aggregator\n  metrics: [pgd20]\n"
        "  worst_over: {adversary: [none, ALIE]}\n"
        "  contrasts: {a: {multi-Krum: 1, mean: -1}, b: {median: 1, mean: -1}}\n"
    )
    frame = fatbench.tests(suite, preset="cpu", db=str(committed["fat-byzantine-cpu"].database.path)).frame()
    assert frame["not_tested"].tolist()[0] == "" and "two seeds" in frame["not_tested"].tolist()[1], frame.T


def test_a_column_shows_the_worst_case(committed: Mapping[str, Store]) -> None:
    db = str(committed["fat-byzantine-cpu"].database.path)
    table = fatbench.table("fat-byzantine", "worst", preset="cpu", db=db)
    numbers = table.frame().query("heading == 'PGD-20, worst' and training == 'AT'").set_index("aggregator")
    assert numbers.loc["mean", "mean"] == pytest.approx(0.115) and "diverged" in numbers.loc["mean", "doubts"]
    krum = numbers.loc["multi-Krum"]
    assert krum["low"] < krum["mean"] < krum["high"] and krum["metric"].startswith("pgd20 worst of none, label flip")
    assert np.isnan(numbers.loc["trimmed mean", "mean"]), "seven of its eight adversaries are not measured"
    assert "the least over none, label flip" in table.markdown()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("worst_over", "{adversary: [none, ALIE], split: [IID, Dirichlet]}", "expected one axis"),
        ("worst_over", "{adversary: [none, nobody]}", "nobody"),
        ("contrasts", "{both: {mean: 1, multi-Krum: 1, median: -2}}", "a worst case is compared with another"),
    ],
)
def test_a_family_of_worst_cases_with_a_mistake_is_refused(
    key: str, value: str, said: str, write: Callable[[str], str]
) -> None:
    family = {
        "family": "own", "axis": "aggregator", "metrics": "[pgd20]", "worst_over": "{adversary: [none, ALIE]}",
        "contrasts": "{a: {multi-Krum: 1, mean: -1}}",
    }  # fmt: skip
    lines = "\n".join(f"  {name}: {text}" for name, text in (family | {key: value}).items())
    with pytest.raises(SpecError, match=said):
        files.load(write(f"extends: fat-byzantine\nname: own\ntests:\n{lines}\n")).plan("cpu")


@pytest.fixture
def write(tmp_path) -> Callable[[str], str]:  # type: ignore[no-untyped-def]
    def written(text: str) -> str:
        (tmp_path / "own.yaml").write_text(text)
        return str(tmp_path / "own.yaml")

    return written
