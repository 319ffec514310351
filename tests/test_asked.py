"""A stage's name is a hash of its attack, its images and its batch: settings that give another name are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import result_files

from fatbench.store.document import Stage, blocks_of, document
from fatbench.store.stage_names import parsed
from fatbench.suite import asked, calls
from fatbench.suite.cells import Evaluation, TransferOrigin

RESULTS = Path(__file__).parent.parent / "results"
PGD = dict(calls.check("Attack", {"name": "pgd", "eps": "8/255", "step": "2/255", "steps": 20}))


def stage(evaluation: Evaluation, n: int | None, chunk: int | None, record: Any = None, **settings: Any) -> Stage:
    """A finished stage of an evaluation, as in a line of an export."""
    said = {**evaluation.attack, "implementation": "fatbench 0.1.0", **settings}
    chunks = [] if chunk is None else [[0, chunk, ""]]
    numbers = [] if n is None else [[3, -1, evaluation.label, 0.5, n, 0]]
    rows = blocks_of([[*row, 0] for row in numbers])
    line = {"stage": evaluation.stage(3), "settings": said, "numbers": rows, "outcomes": chunks}
    return Stage.model_construct(**line, record=record or {})


def but(of: Stage, **fields: Any) -> Stage:
    return of.model_copy(update=fields)


@pytest.mark.parametrize(
    ("n", "batch", "images", "chunk"),
    [
        (None, 20, 30, 20),  # all that there are
        (1000, 128, 355, 128),  # of so many as were asked for there are fewer
        (356, 500, 355, 355),
        (None, 37, 1000, 1000),  # the answer of a diverged network
        (60, 64, 60, None),  # no outcomes
        (3_000_000, 50_000, None, 64),  # interrupted after the first of several models of 64 images
    ],
)
def test_images_and_batch_give_the_name(n: int | None, batch: int, images: int | None, chunk: int | None) -> None:
    one = Evaluation("pgd20", PGD, n, batch)
    record = {"requested": {"n": n, "batch": batch}}
    found = asked.evaluation(one.stage(3), one.attack, record["requested"])
    assert found is not None and found.id == one.id and (found.n, found.batch) == (n, batch)
    assert asked.contradiction(stage(one, images, chunk, record)) is None
    assert asked.contradiction(stage(one, images, chunk, record, steps=1)) is not None


def test_without_recorded_images_only_the_listing_of_our_suites_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in stages of versions that did not record them."""
    one = Evaluation("pgd20", PGD, 123, 45)
    line = stage(one, 123, 45)
    assert asked.contradiction(line) is asked.contradiction(but(line, outcomes=[[0, 40, ""]])) is None
    listed = {one.id: asked.short_form(one.attack, None)}
    monkeypatch.setattr(asked, "_shipped_attacks", lambda: listed)
    assert asked.contradiction(line) is None
    assert asked.contradiction(stage(one, 123, 45, steps=1)) is not None


@pytest.mark.parametrize(
    ("requested", "images", "chunk"),
    [({"n": 100, "batch": 64}, 100, 50), ({"n": 99, "batch": 50}, 100, 50), ({"n": 100, "batch": 50}, 300, 50),
     ({"n": 100, "batch": 50}, 100, 40)],
)  # fmt: skip
def test_recorded_images_and_batch_are_of_name_and_outcomes(requested: dict[str, int], images: int, chunk: int) -> None:
    one = Evaluation("pgd20", PGD, 100, 50)
    assert asked.contradiction(stage(one, images, chunk, {"requested": requested})) is not None


@pytest.mark.parametrize(
    "change", [{"eps": "1/25500000"}, {"steps": 1}, {"early_stop": True}, {"name": "fgsm"}, {"origin": "cell a"}]
)
def test_other_settings_have_another_name(change: dict[str, Any]) -> None:
    one = Evaluation("pgd20", PGD, 100, 50)
    said = asked.contradiction(stage(one, 100, 50, {"requested": {"n": 100, "batch": 50}}, **change))
    assert said is not None and "hash in its name" in said


def test_stages_without_settings_or_with_an_unknown_attack_contradict_nothing() -> None:
    one = stage(Evaluation("pgd20", PGD, 100, 50), 100, 50, {"requested": {"n": 100, "batch": 51}})
    assert asked.contradiction(one) is not None
    assert asked.contradiction(but(one, settings=None)) is None  # whoever compares says so
    assert asked.contradiction(but(one, settings={"name": "of_a_plugin_that_is_not_loaded"})) is None
    assert asked.contradiction(but(one, stage="train")) is None


@pytest.mark.parametrize("origin", [TransferOrigin("FedAvg", "0a1b2c3d4e5f"), TransferOrigin("c", client=2, clients=5)])
def test_a_transfer_is_known_by_whose_model_it_was_computed_on(origin: TransferOrigin) -> None:
    one = Evaluation("moved", PGD, 100, 50, origin=origin)
    requested = {"n": 100, "batch": 50}
    said = stage(one, 100, 50, {"requested": requested}, origin=origin.stored_text)
    assert asked.contradiction(said) is None
    assert asked.contradiction(but(said, settings=one.attack)) is not None
    found = asked.evaluation(one.stage(3), said.settings, requested)
    assert found is not None and found.origin is not None and found.origin.stored_text == origin.stored_text


def test_a_name_of_our_suites_stands_for_their_settings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names have 32 bits, so whoever tries long enough finds weak settings for one."""
    one = Evaluation("pgd20", PGD, 100, 50)
    line = stage(one, 100, 50)
    short = {key: value for key, value in line.settings.items() if key != "early_stop"}  # of before it was added
    for ours, refused in ((one, False), (Evaluation("pgd20", {**PGD, "eps": "1/255"}, 100, 50), True)):
        monkeypatch.setattr(asked, "_shipped_attacks", lambda ours=ours: {one.id: asked.short_form(ours.attack, None)})
        for settings in (line.settings, short):
            assert (asked.contradiction(but(line, settings=settings)) is not None) == refused


@pytest.mark.parametrize("name", ["fat-byzantine-cpu", "fedvkd-cifar10-jpeg75-p02-cpu", "sfat-bf16-cpu"])
def test_committed_results_are_what_their_names_say(name: str) -> None:
    """Among them networks that diverged, models of clients, and another precision."""
    cells = result_files.cells(result_files.committed(name))
    stages = [stage for cell in cells for stage in document(cell, name).stages]
    assert len(stages) > 30 and [said for one in stages if (said := asked.contradiction(one))] == []
    names = {parsed(one.stage).evaluation for one in stages if one.stage != "train"}
    assert names and names <= asked._shipped_attacks().keys()
