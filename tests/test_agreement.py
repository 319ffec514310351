"""Whether numbers of a file and of a run here agree: the same machine to the last bit, another one as chance allows."""

from __future__ import annotations

from typing import Any

import pytest

from fatbench.report.agreement import AGREEMENT, Agreement, NumberPair, compared_numbers, overall, text

SAME = "same machine, torch and precision"
OTHER = "cpu: A there, B here"


def one(there: int = 0, here: int = 0, n: int = 1000, cell: str = "a", metric: str = "pgd20 (last)") -> NumberPair:
    """An accuracy of which so many images are right only there, and only here."""
    value = 0.5 + (there - here) / n
    return NumberPair(cell, metric, value, 0.5, abs(value - 0.5), (there, here, n))


def logged(metric: str, theirs: float, ours: float, band: float = 0.02) -> NumberPair:
    return NumberPair("a", f"{metric} of training", theirs, ours, abs(theirs - ours), band=band)


LOSS = logged("train_loss", 1.0, 1.001, 0.25)


def test_on_the_same_machine_nothing_may_differ() -> None:
    found = overall([one(), logged("natural", 0.5, 0.5)], [], None)
    assert found == Agreement(found.numbers, [], 0.0, SAME, []) and found.agrees and found.far == 0
    assert overall([one(1, 1), logged("natural", 0.5, 0.5)], [], None).agrees  # the same accuracy
    assert not overall([one(1, 0)], [], None).agrees
    bit = overall([one(), logged("natural", 1.0, 1 - 2**-53)], [], None)
    assert bit.reasons == ["natural of training of cell a is 100.00 % there and 100.00 % here"]


def test_what_was_not_compared_is_no_agreement() -> None:
    found = overall([one()], ["pgd20-0a@3 of cell a"], None)
    assert not found.agrees and found.reasons == []
    assert text(found).splitlines()[:2] == [
        "not verified: 1 number of 1 cell, accuracies at most 0.00 points apart, 100.0 % of outcomes agree"
        f" (tolerance 0: {SAME})",
        "  not verified: pgd20-0a@3 of cell a",
    ]
    assert not overall([], [], None).agrees and not overall([], [], OTHER).agrees


def test_another_machine_is_not_believed_where_training_gives_the_same_bits() -> None:
    same = logged("train_loss", 1.0, 1.0)
    assert overall([one(), same], [], OTHER).because == "training gave the same bits here"
    assert not overall([one(1, 0), same], [], OTHER).agrees
    other = overall([one(1, 0), LOSS], [], OTHER)
    assert other.agrees and (other.tolerance, other.because) == (0.02, OTHER)
    assert overall([one(1, 0)], [], OTHER).agrees  # of a cell that logs no loss nothing is known


def test_on_another_machine_networks_differ_both_ways() -> None:
    """Measured: the same cells in float32 and bfloat16, 500 images, images that are right only on one side."""
    pairs = [(23, 23), (27, 28), (34, 29), (28, 26), (32, 28), (33, 25), (28, 29), (18, 17), (23, 18), (26, 23)]
    assert overall([LOSS, *(one(there, here, 500) for there, here in pairs)], [], OTHER).agrees
    far = overall([LOSS, one(40, 10)], [], OTHER)
    assert any("53.00 % there and 50.00 % here" in said for said in far.reasons)
    assert overall([LOSS, one(35, 15)], [], OTHER).agrees  # exactly two points


def test_outcomes_that_changed_to_one_side_only_are_no_chance() -> None:
    """Each within two points: 8 of 400 images, all to one side, in two numbers; five images say nothing."""
    found = overall([LOSS, one(8, 0, 400), one(8, 0, 400, metric="fgsm (last)")], [], OTHER)
    assert len(found.reasons) == 1
    assert found.reasons[0].startswith("of 16 outcomes that changed 16 are right only there and 0 only here: networks")
    assert not overall([LOSS, one(0, 8, 400), one(0, 8, 400)], [], OTHER).agrees
    assert overall([LOSS, one(5, 0, 400)], [], OTHER).agrees
    assert overall([LOSS, one(30, 12, 1000)], [], OTHER).agrees


def test_cells_that_are_all_on_one_side_are_no_chance() -> None:
    """Each cell within two points and with changes both ways; eight of eight above, then seven of eight."""
    eight = [one(60, 45, cell=str(k)) for k in range(8)]
    assert overall([LOSS, *eight], [], OTHER).reasons[0].startswith("8 of 8 cells are above what they are here")
    assert overall([LOSS, *eight[:7]], [], OTHER).agrees
    assert overall([LOSS, *eight[:7], one(45, 60, cell="7")], [], OTHER).agrees
    assert overall([LOSS, *eight[:7], *(one(60, 45, cell="0") for _ in range(9))], [], OTHER).agrees  # one cell is one
    below = [one(45, 60, cell=str(k)) for k in range(8)]
    assert overall([LOSS, *below], [], OTHER).reasons[0].startswith("8 of 8 cells are below what they are here")


def test_outcomes_that_do_not_agree_are_another_network() -> None:
    changed = round((1 - AGREEMENT) * 1000)
    assert overall([LOSS, one(changed // 2, changed - changed // 2)], [], OTHER).agrees
    found = overall([LOSS, one(changed // 2 + 1, changed - changed // 2)], [], OTHER)
    assert found.reasons[0].startswith("only 79.9 % of all outcomes agree")


@pytest.mark.parametrize(("theirs", "agrees"), [(0.745, True), (0.775, False)])
def test_a_training_accuracy_has_a_band_over_its_rounds(theirs: float, agrees: bool) -> None:
    assert overall([LOSS, logged("natural", theirs, 0.75)], [], OTHER).agrees is agrees


def test_whoever_verifies_may_name_a_tolerance() -> None:
    """Of accuracies, and nothing else counts then."""
    numbers = [LOSS, one(40, 0), one(40, 0, metric="fgsm (last)")]
    assert overall(numbers, [], None, 0.04).agrees and not overall(numbers, [], OTHER, 0.039).agrees
    assert not overall(numbers, ["pgd7-0a@3 of cell a"], None, 0.04).agrees
    assert 0.594 - 0.574 > 0.02
    exact = NumberPair("c", "pgd20 (last)", 0.594, 0.574, 0.594 - 0.574, (20, 0, 1000))
    assert overall([exact], [], OTHER, 0.02).agrees and not exact.beyond


def test_the_result_comes_first_and_accuracies_in_per_cent() -> None:
    found = overall([one(8, 0, 400), LOSS], [], None)
    assert text(found, {"a": " (at chance)"}).splitlines() == [
        "differs: 2 numbers of 1 cell, accuracies at most 2.00 points apart, 98.0 % of outcomes agree"
        f" (tolerance 0: {SAME})",
        "  differs: pgd20 (last) of cell a is 52.00 % there and 50.00 % here",
        "  differs: train_loss of training of cell a is 1 there and 1.001 here",
        "cell a: there, here (at chance)",
        "  pgd20 (last): 52.00 %, 50.00 %, 98.0 % of outcomes agree",
        "  1 further number, 0 the same to the bit",
        "  train_loss of training: 1, 1.001",
    ]
    many = overall([logged(f"m{k}", 1.0, 2.0) for k in range(12)], [], None)
    assert text(many).splitlines()[9] == "  and 4 more"


class Results:
    """A store of one cell with one evaluation, as far as `apart` reads it."""

    def __init__(self, tmp_path: Any, name: str, **change: Any):
        from fatbench.engine.rounds import Number
        from fatbench.store.stages import Store

        self.store = Store.open(str(tmp_path / f"{name}.db"), create=True)
        self.store.add_cell("a", {"seed": 0, "algorithm": {"rounds": 1}})
        settings = change.get("settings", {"name": "pgd"})
        stages = change.get("stages", {"pgd20-0a@1": 0.5})
        train = [Number("natural", change.get("natural", 0.5), 1, n=8), Number("seconds", hash(name) % 7, 1)]
        train += [Number("natural_class", value, 1, 4, k) for k, value in enumerate(change.get("classes", ()))]
        train += [Number("monitor", 0.5, 1, n=8)] * bool(change.get("monitor"))
        for stage, value in {"train": None, **stages}.items():
            run = self.store.claim("a", stage, suite="s", total=1, provenance={}, settings=settings if value else None)
            if value is None:
                self.store.finish(run, train, round=1, record={"last": {"round": 1}})
                continue
            self.store.commit(run, round=8, outcomes=(0, 8, change.get("bits", b"\x0f")))
            metric = stage.partition("-")[0]
            numbers = [Number(metric, value, 1, n=8), Number("chance", 0.125, 1, n=8)]
            numbers += [Number(name, 1.0, 1) for name in change.get("flags", ())]
            self.store.finish(run, numbers, record={"requested": {"n": 8, "batch": 8}})


def test_every_finished_number_is_compared_or_named(tmp_path: Any) -> None:
    here = Results(tmp_path, "here", classes=(0.25, 0.75)).store
    numbers, missing = compared_numbers(here, here, "a")
    assert missing == [] and {number.far for number in numbers} == {0.0}
    assert [number.metric for number in numbers] == [
        "pgd20 (last)", "chance of pgd20 (last)", "natural of training", "natural_class[0] of training",
        "natural_class[1] of training",
    ]  # fmt: skip
    other = Results(tmp_path, "other", stages={"pgd20-0b@1": 0.5, "pgd20-0a@2": 0.5}, natural=0.75).store
    numbers, missing = compared_numbers(other, here, "a")
    assert missing == ["pgd20-0a@2 of cell a", "pgd20-0b@1 of cell a"]  # another attack, a round that is no checkpoint
    assert [(number.metric, number.theirs, number.ours) for number in numbers] == [("natural of training", 0.75, 0.5)]
    assert compared_numbers(here, other, "a")[1] == [
        "natural_class[0] of training of cell a", "natural_class[1] of training of cell a", "pgd20-0a@1 of cell a"
    ]  # fmt: skip
    doubtful = Results(tmp_path, "doubtful", flags=["doubt_gradients_vanish"]).store
    assert "the doubt 'doubt_gradients_vanish' of pgd20 (last) of cell a" in compared_numbers(here, doubtful, "a")[1]
    series = Results(tmp_path, "series", monitor=True).store  # no best round is recorded: it follows from the series
    assert "pgd20 (best-test)" in [number.metric for number in compared_numbers(series, series, "a")[0]]
    for store in (here, other, doubtful, series):
        store.close()
