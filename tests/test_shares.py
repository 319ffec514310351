"""A yes or no of each client: tests by hand, against published intervals and scipy; the family of `privacy-line`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fatbench import report
from fatbench.api.asking import plugged
from fatbench.engine.rounds import Number
from fatbench.errors import SpecError
from fatbench.report import contrasts, pairs
from fatbench.report.numbers import shares
from fatbench.report.numbers.sources import Source
from fatbench.report.numbers.statistics import holm, mcnemar
from fatbench.report.tables import notes, number_format
from fatbench.report.tables.sheet import Column
from fatbench.store.stages import Store
from fatbench.suite import files
from fatbench.suite.cells import Plan
from fatbench.suite.declared_contrasts import Tests as Family


def test_a_table_of_two_by_two_by_hand() -> None:
    """Nine clients alone on A and one on B: 2 (1 + 10) / 2^10; 12 and 4 of 40 yes."""
    found = shares.paired(3, 9, 1, 40)
    assert (found.mean, found.p) == pytest.approx((0.2, 22 / 1024))
    assert found.counts == "12 - 4 of 40 (A alone 9, B alone 1)"
    other = shares.paired(3, 1, 9, 40)
    assert (other.low, other.high, other.p) == pytest.approx((-found.high, -found.low, found.p))


@pytest.mark.parametrize(
    ("table", "low", "high"),
    [((36, 12, 2, 0), 0.0569, 0.3404), ((54, 0, 0, 0), -0.0664, 0.0664), ((0, 29, 1, 0), 0.6666, 0.9882)],
)
def test_newcombes_published_intervals(table: tuple[int, ...], low: float, high: float) -> None:
    """Newcombe 1998, table III, method 10: both, A alone, B alone, neither."""
    found = shares.paired(*table[:3], sum(table))
    assert (found.low, found.high) == pytest.approx((low, high), abs=6e-5)
    assert found.at_most == max(abs(found.low), abs(found.high))


@pytest.mark.parametrize(("yes", "n", "line"), [(0, 40, 0.05), (6, 40, 0.05), (7, 300, 0.05), (40, 40, 0.9)])
def test_a_share_against_a_line(yes: int, n: int, line: float) -> None:
    """p is below 0.05 exactly where the line is outside the interval, so that it agrees with the verdict."""
    found, theirs = shares.against(yes, n, line), stats.binomtest(yes, n).proportion_ci(method="exact")
    assert (found.low, found.high) == pytest.approx((theirs.low - line, theirs.high - line))
    tails = [stats.binomtest(yes, n, line, side).pvalue for side in ("less", "greater")]
    assert found.p == pytest.approx(min(1, 2 * min(tails)))
    assert (found.p < 0.05) == (found.low > 0 or found.high < 0)


@pytest.mark.parametrize(
    ("against", "difference", "n", "power"), [(0.05, 0.4, 40, 0.838), (0.1, 0.3, 80, 0.866), (0.0, 0.05, 100, None)]
)
def test_the_power_is_that_of_all_tables(against: float, difference: float, n: int, power: float | None) -> None:
    """Against the sum over all tables by `mcnemar`; of few pairs nothing is found at all."""
    level, either = 0.05 / 8, 2 * against + difference
    way = (against + difference) / either
    by_hand = 0.0
    for count in range(n + 1):
        rejected = [k for k in range(count + 1) if mcnemar(k, count - k) <= level]
        by_hand += stats.binom.pmf(count, n, either) * stats.binom.pmf(rejected, count, way).sum()
    found = shares.power_paired(against, difference, n, level)
    assert found == pytest.approx(by_hand, abs=1e-9)
    assert power is None or found == pytest.approx(power, abs=1e-3)


def test_what_would_be_found() -> None:
    """At that difference the power is .8; nine clients all one way are the fewest at .05 / 8, six at .05."""
    found = shares.paired(0, 5, 2, 40).detectable(0.05)
    assert found is not None and shares.power_paired(2 / 40, found, 40, 0.05) == pytest.approx(0.8, abs=1e-3)
    assert shares.paired(0, 0, 0, 8).detectable(0.05 / 8) is None
    assert shares.paired(0, 0, 0, 9).detectable(0.05 / 8) is not None
    above = shares.against(0, 40, 0.05).detectable(0.05)
    assert above is not None and stats.binom.sf(5, 40, 0.05 + above) == pytest.approx(0.8)  # six leak, see the verdict
    assert shares.against(40, 40, 0.9).detectable(0.05 / 8) is None


SETS = 2000


@pytest.mark.parametrize("n", [40, *(pytest.param(n, marks=pytest.mark.nightly) for n in (24, 100, 300))])
def test_eight_nulls_and_their_intervals(n: int) -> None:
    """A family of eight true nulls is rejected in at most 5 % of studies (130 of 2,000 by chance), and 0 is covered."""
    draw, missed, rejected = np.random.default_rng(n), 0, 0
    chances = [(0.02, 0.03), (0.1, 0.1), (0.3, 0.2), (0.5, 0.05), (0.0, 0.15)]  # both; each alone
    for _ in range(SETS):
        ps = [shares.against(int(draw.binomial(n, line)), n, line).p for line in (0.05, 0.05, 0.9)]
        for both, alone in chances:
            table = draw.multinomial(n, (both, alone, alone, 1 - both - 2 * alone))
            found = shares.paired(*map(int, table[:3]), n)
            missed += not found.low <= 0 <= found.high
            ps.append(found.p)
        rejected += min(holm(ps)) < 0.05
    assert rejected <= 130 and missed <= 0.055 * SETS * len(chances)


# --- the family of a suite -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def line() -> tuple[Family, Plan]:
    suite = files.load("privacy-line")
    (tests,) = suite.tests
    return tests, suite.plan("quick")


def answers_of(plan: Plan) -> dict[str, dict[int, float]]:
    return {cell.id: {k: float(k < 3) for k in range(12)} for cell in plan.cells}


def test_the_eight_comparisons(line: tuple[Family, Plan]) -> None:
    tests, plan = line
    sides, answers = contrasts.sides_of(tests, plan), answers_of(plan)
    assert [len(of) for of in sides.values()] == [1, 1, 2, 2, 2, 2, 2, 1]
    trained, frozen = sides["train - eval, 1 image"]
    assert (trained[0].key["mode"], frozen[0].key["mode"]) == ("train", "eval")
    answers[trained[0].id] = {k: float(k < 11) for k in range(12)}
    answers[frozen[0].id] = {k: float(k == 11) for k in range(12)}
    found = contrasts.family_of_clients(tests, plan, answers)
    one = found[2]
    assert one.test == dataclasses.replace(shares.paired(0, 11, 1, 12), detectable=one.test.detectable)  # type: ignore[union-attr]
    assert found[7].p is not None and found[7].p < 1e-6  # 3 of 12 against 90 %, the smallest of the eight
    assert one.p_holm == pytest.approx(7 * 26 / 4096)
    assert one.difference == pytest.approx(10 / 12) and one.size == 8 and one.significant
    assert [f.p_holm for f in found[3:7]] == [1.0] * 4
    assert contrasts.frame(found)["difference"][0] == pytest.approx(0.2)


def test_what_is_not_tested_counts_with_one(line: tuple[Family, Plan]) -> None:
    tests, plan = line
    a, b = (cells[0].id for cells in contrasts.sides_of(tests, plan)["BN - GN"])

    def reason(**changed: Any) -> str:
        answers = {**answers_of(plan), **changed}
        found = contrasts.family_of_clients(tests, plan, {cell: of for cell, of in answers.items() if of})[5]
        assert found.size == 8 and (not found.why or (found.test, found.p_holm) == (None, 1.0))
        return found.why

    assert reason() == ""
    assert reason(**{b: {}}) == "not all clients are measured yet"
    assert reason(**{a: dict.fromkeys(range(11), 1.0)}) == "the sides have other clients"
    assert reason(**{a: dict.fromkeys(range(12), 0.5)}) == "identified_first is no yes or no"
    longer = {cell.id: {**cell.spec, "algorithm": {**cell.spec["algorithm"], "rounds": 4}} for cell in plan.cells}
    other = [dataclasses.replace(cell, spec=longer[a]) if cell.id == a else cell for cell in plan.cells]
    found = contrasts.family_of_clients(tests, dataclasses.replace(plan, cells=other), answers_of(plan))[5]
    assert "rounds" in found.why or found.why == "the sides have other clients"


def test_clients_of_a_database_and_what_is_printed(line: tuple[Family, Plan], tmp_path: Path, run: Any) -> None:
    """Only whole cells are read: a test that looks at clients as they arrive rejects too often."""
    db = f"sqlite:///{tmp_path / 'fatbench.db'}"
    whole, half = (cells[0] for cells in contrasts.sides_of(*line)["train - eval, 16 images"])
    with Store.open(db, create=True) as store:
        store.add_cells({cell.id: cell.spec for cell in (whole, half)})
        for cell, rounds in ((whole, 3), (half, 2)):
            claimed = store.claim(cell.id, "train", suite="privacy-line", total=3, provenance={})
            numbers = [Number("identified_first_client", float(k == 0), k // 4 + 1, 0, k) for k in range(4 * rounds)]
            store.commit(claimed, numbers=numbers, round=rounds)
        read = pairs.answers_of_clients(store, [whole.id, half.id], "identified_first")
    assert read == {whole.id: {k: float(k == 0) for k in range(12)}}
    code, out, _ = run("--db", db, "compare", "privacy-line", "--preset", "quick")
    assert code == 0 and "none of 8 comparisons significant" in out
    assert "not all clients are measured yet" in out and "BN, 16, gradient, train, kept, matching - GN, eval" in out


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("clients: identified_first", "clients: identifed_first", "did you mean 'identified_first'"),
        (", 0.9]", ", 9.0]", "expected [labels of A, labels of B] or [labels of A, a fraction]"),
        ("[*many, {network: GN,", "[*many, {network: XN,", "XN"),
        ("  clients: identified_first\n", "", "name both"),
        ("BN - GN: [*many, {network: GN, mode: eval}]", "BN - GN: [*many, {network: GN}]", "no preset has both sides"),
        ("&one {network: BN, images: \"1\", sent: gradient, ", "&one {network: BN, sent: gradient, ", "several cells"),
    ],
)  # fmt: skip
def test_bad_families(old: str, new: str, message: str, tmp_path: Path) -> None:
    text = files.load("privacy-line").file.read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "privacy-line.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(SpecError) as error, plugged((), None):
        suite = files.load(str(tmp_path / "privacy-line.yaml"))
        report.check_headings(suite, [suite.plan(preset) for preset in ("quick", "smoke")])
    assert message in str(error.value)


def test_so_few_clients_never_show_that_it_holds(line: tuple[Family, Plan]) -> None:
    """40 clients have an upper limit of 1 - .025^(1/40) = 8.8 %, the 100 that decide one of 3.6 %."""
    plan = files.load("privacy-line").plan("cpu")
    said = notes._never_holds(plan.cells)
    assert said.startswith("24 clients (upper limit 14.2 % with no hit) or 40 clients (upper limit 8.8 % with no hit)")
    assert "can never show that something holds" in said and "100" not in said
    assert notes._never_holds(files.load("privacy-line").plan("paper").cells) == ""


def test_verdicts_are_printed_in_words() -> None:
    column = Column("verdict", Source.parse("train:verdict"), "verdict", "none", "plain", 2)
    said = [number_format.number(value, column) for value in (1.0, 0.0, -1.0, 0.5)]
    assert said == ["leaks", "open", "holds", "0.50"]
