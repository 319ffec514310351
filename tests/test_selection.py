"""Which round's model is evaluated: the last, the best on validation images, the best on the test images."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st

from fatbench.store import selection


def test_the_round_with_the_highest_value() -> None:
    assert selection.checkpoint_round({1: 0.2, 2: 0.4, 3: 0.3}) == 2
    assert selection.checkpoint_round({1: 0.4, 5: 0.4, 3: 0.4}) == 5  # later rounds win ties
    assert selection.checkpoint_round({1: float("nan"), 2: 0.0}) == 2
    assert selection.checkpoint_round({}) is None
    assert selection.checkpoint_round({1: float("nan")}) is None


def test_every_checkpoint_that_a_suite_may_ask_for_has_words_and_the_number_it_follows() -> None:
    """Validation images choose one, test images the other; the last follows nothing."""
    assert (*selection.WORDS,) == get_args(selection.Checkpoint) == ("last", *selection.MONITORED)
    assert selection.MONITORED == {"best-val": "val_monitor", "best-test": "monitor"}
    assert "validation" in selection.WORDS["best-val"] and "test" in selection.WORDS["best-test"]


def test_each_best_round_follows_its_own_number() -> None:
    """By hand: validation is best in round 1, the test images in round 2; round 3 measures neither."""
    record: dict[str, Any] = {"kept": True}
    for round, (val, test) in enumerate([(0.5, 0.25), (0.25, 0.75)], 1):
        record = selection.update(record, round, {"val_monitor": val, "monitor": test, "loss": 9.0})
    record = selection.update(record, 3, {"loss": 9.0})
    assert record.keys() == {"kept", *selection.WORDS}
    assert record == {
        "kept": True, "last": {"round": 3},
        "best-val": {"round": 1, "value": 0.5}, "best-test": {"round": 2, "value": 0.75},
    }  # fmt: skip


@given(st.lists(st.one_of(st.none(), st.sampled_from([0.1, 0.2, 0.3, float("nan")])), min_size=1, max_size=12))
def test_a_record_kept_round_by_round_names_the_same_round(series: list[float | None]) -> None:
    """What training records as it goes is what the whole series says; None: not measured that round."""
    record: dict[str, Any] = {}
    for round, value in enumerate(series, 1):
        record = selection.update(record, round, {"train_loss": 1.0} if value is None else {"monitor": value})
    measured = {round: value for round, value in enumerate(series, 1) if value is not None}
    best = selection.checkpoint_round(measured)
    assert record.get("best-test", {}).get("round") == best
    assert record["last"] == {"round": len(series)}
    assert "best-val" not in record
    if best is not None:
        assert record["best-test"]["value"] == measured[best]
