"""What a stage's numbers must satisfy: each rule at its bound, from both sides, on lines written by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fatbench.store import problems as consistency
from fatbench.store.document import Cell, Run, Stage, blocks_of, sealed
from fatbench.store.problems import count_correct, disagreement, problems

SPEC = {"algorithm": {"rounds": 3}, "partition": {"clients": 2}, "test": 8}
TRAIN = {
    "stage": "train", "status": "interrupted", "round": 3, "record": {}, "run": 0, "outcomes": [],
    "numbers": [[1, -1, "monitor", 0.5, 8, 0], [3, 1, "train_loss", 9.0, 5, 0]],
}  # fmt: skip
PGD = {
    "stage": "pgd20-0a@3", "status": "done", "round": 8, "record": {}, "run": 1, "outcomes": [[0, 8, "Dw=="]],
    "numbers": [[3, -1, "pgd20", 0.5, 8, 1]],
}  # fmt: skip
LINE = {"spec": SPEC, "runs": [{"stage": "train"}, {"stage": "pgd20-0a@3"}], "stages": [TRAIN, PGD]}


def found(train: list[Any] | None = None, pgd: list[Any] | None = None, **more: Any) -> list[str]:
    """What is said of the line with these numbers added, and these fields of its stages changed."""
    line: Any = copy.deepcopy(LINE)
    line["spec"] = more.pop("spec", line["spec"])
    line["stages"][0]["numbers"] += [[*number, 0] for number in train or ()]
    line["stages"][1]["numbers"] += [[*number, 1] for number in pgd or ()]
    for key, value in more.items():
        position, _, field = key.partition("_")
        line["stages"][{"train": 0, "pgd": 1}[position]][field] = value
    return [said for _, said in problems(document_of(line))]


def document_of(line: Any) -> Cell:
    """A document with these fields alone, sealed as it is."""
    runs = [Run.model_construct(uid=str(i), **run) for i, run in enumerate(line["runs"])]
    rows = [{tuple(row[:3]): [*row, "now"] for row in stage["numbers"]} for stage in line["stages"]]
    common = {"total": 0, "error": None, "settings": None, "digest": None}
    stages = [
        Stage.model_construct(**{**common, **stage, "numbers": blocks_of(sorted(of_stage.values()))})
        for stage, of_stage in zip(line["stages"], rows, strict=True)
    ]
    return sealed(Cell.model_construct(cell="a", created="now", spec=line["spec"], runs=runs, stages=stages))


def test_bits_are_counted() -> None:
    assert count_correct([]) == (0, 0) and count_correct([(8, b"\x0f"), (3, b"\xa0")]) == (6, 11)


@pytest.mark.parametrize(
    ("value", "n", "correct", "total", "message"),
    [
        (0.0, 8, 0, 8, None),
        (1.0, 8, 8, 8, None),
        (0.0, 0, 0, 0, None),
        (0.5 + 9e-13, 8, 4, 8, None),
        (0.5 + 2e-12, 8, 4, 8, "m is 0.500000000002, its outcomes say 0.5 (4 of 8)"),
        (0.5 - 2e-12, 8, 4, 8, "m is 0.499999999998, its outcomes say 0.5 (4 of 8)"),
        (-1e-9, 8, 0, 0, "m is -1e-09: not in [0, 1]"),
        (1.5, 8, 0, 0, "m is 1.5: not in [0, 1]"),
        (float("nan"), 8, 0, 0, "m is nan: not in [0, 1]"),
        (0.5, 4, 4, 8, None),
        (0.5, 1, 4, 8, None),
        (0.5, 3, 4, 8, "m is of 3 images, its outcomes are of 8"),
        (0.5, 0, 4, 8, "m is of 0 images, its outcomes are of 8"),
    ],
)
def test_an_accuracy_and_its_outcomes(value: float, n: int, correct: int, total: int, message: str | None) -> None:
    assert disagreement("m", value, n, correct, total) == message


NUMBERS: list[tuple[list[Any], str | None]] = [
    ([3, -1, "seconds", 0.0, 0], None),
    ([0, -1, "seconds", 1e9, 0], None),
    ([4, -1, "seconds", 1.0, 0], "seconds is of round 4 of 3"),
    *(([1, 0, name, -0.1, 0], f"{name} of client 0 is -0.1: below 0") for name in sorted(consistency.COUNTS)),
    *(([1, -1, name, 1.1, 5], f"{name} is 1.1: not in [0, 1]") for name in sorted(consistency.FRACTIONS)),
    *(([1, -1, name, -0.1, 5], f"{name} is -0.1: not in [0, 1]") for name in sorted(consistency.FRACTIONS)),
    *(([1, 2, name, 0.5, 5], f"{name} of client 2: the cell has 2 clients") for name in sorted(consistency.OF_CLIENTS)),
    *(([1, 1, name, 0.5, 5], None) for name in sorted(consistency.OF_CLIENTS)),
    *(([2, -1, name, 0.5, 9], f"{name} is of 9 images, the cell has 8") for name in sorted(consistency.OF_TEST_IMAGES)),
    *(([2, -1, name, 0.5, 0], f"{name} is over no images") for name in sorted(consistency.OF_TEST_IMAGES)),
    *(([2, -1, name, x, 1], None) for name in sorted(consistency.OF_TEST_IMAGES) for x in (0.0, 1.0)),
    ([1, -1, "train_loss", -5.0, 0], None),
    ([1, 7, "other", -5.0, 0], None),
    ([1, -2, "other", 0.0, 0], "other of client -2: clients are counted from 0"),
]


@pytest.mark.parametrize(("number", "message"), NUMBERS)
def test_a_number_of_training(number: list[Any], message: str | None) -> None:
    assert found(train=[number]) == ([] if message is None else [message])


def test_the_names_that_have_bounds() -> None:
    """A name that is no longer in these sets is no longer looked at."""
    assert {"natural", "monitor", "val_monitor", "zero_gradients", "prior_accuracy"} <= consistency.FRACTIONS
    assert {"natural", "monitor", "edge_natural"} == consistency.OF_TEST_IMAGES
    assert {"weight", "train_loss", "holdout_gap"} <= consistency.OF_CLIENTS
    assert {"seconds", "forward", "backward", "gradient_steps", "bytes_up", "bytes_down"} == consistency.COUNTS
    assert [len(x) for x in (consistency.FRACTIONS, consistency.OF_CLIENTS)] == [17, 9]


def test_an_evaluation_is_of_its_round_and_of_the_cells_images() -> None:
    assert found() == []
    assert found(pgd=[[3, -1, "chance", 0.1, 0]]) == found(pgd=[[2, -1, "chance", 0.1, 0]]) == []
    assert found(pgd=[[2, 0, "pgd20", 0.5, 8]]) == ["pgd20 of client 0 is of round 2, the stage of round 3"]
    assert found(pgd=[[4, -1, "chance", 0.1, 0]]) == ["chance is of round 4 of 3"]
    assert found(pgd_stage="pgd20-0a@4")[0] == "round 4 of 3"
    assert found(pgd_stage="pgd20-0a@4", spec={})[0] == "pgd20 is of round 3, the stage of round 4"
    assert found(pgd_round=7) == ["8 outcomes of 7 examples"]
    assert found(pgd_round=7, pgd_outcomes=[]) == []
    assert found(pgd_run=0) == ["its run is one of train"] and found(train_run=1) == ["its run is one of pgd20-0a@3"]
    assert found(pgd_run=None) == []
    assert found(train_outcomes=[[0, 8, "Dw=="]]) == []  # of training there are none to compare with
    assert found(pgd_outcomes=[[0, 4, "AA=="], [4, 4, "8A=="]]) == []
    assert found(pgd_outcomes=[[0, 8, "Hw=="]]) == ["pgd20 is 0.5, its outcomes say 0.625 (5 of 8)"]


@pytest.mark.parametrize("missing", ["algorithm", "partition", "test"])
def test_what_the_cell_does_not_say_bounds_nothing(missing: str) -> None:
    numbers = {"algorithm": [9, -1, "loss", 0.5, 1], "partition": [1, 9, "weight", 0.5, 1],
               "test": [1, -1, "natural", 1.0, 99]}  # fmt: skip
    assert len(found(train=[numbers[missing]])) == 1
    less = {key: value for key, value in SPEC.items() if key != missing}
    for spec in (less, {**less, missing: None}, {**less, missing: {}}, {**less, missing: True}):
        assert found(train=[numbers[missing]], spec=spec) == []
    inner = {"rounds": True, "clients": True}
    assert found(train=[numbers[missing]], spec={**less, missing: inner}) == []


def test_a_finished_training_ends_in_its_last_round_and_knows_its_best() -> None:
    done: dict[str, Any] = {"train_status": "done"}
    assert found(**done) == []
    assert found(**done, train_round=2) == ["finished in round 2 of 3"] and found(train_round=2) == []
    assert found(**done, train_record={"last": {"round": 3}}) == []
    assert found(**done, train_record={"last": {"round": 2}}) == ["finished in round 2 of 3"]
    assert found(**done, train_round=2, train_record={"last": {"round": 3}}) == ["finished in round 2 of 3"]
    assert found(**done, train_round=2, spec={}) == []
    best = {"best-test": {"round": 1, "value": 0.5}}
    assert found(**done, train_record=best) == []
    said = ["best-test is 0.5 in round 1, the best monitor 0.5 in round 2"]
    assert found([[2, -1, "monitor", 0.5, 8]], **done, train_record=best) == said
    assert found([[2, 0, "monitor", 0.875, 8]], **done, train_record=best) == []  # of one client
    assert found([[2, -1, "val_monitor", 0.875, 8]], **done, train_record=best) == []
    for record, said in (
        ({"round": 1, "value": 0.25}, "best-test is 0.25 in round 1, the best monitor 0.5 in round 1"),
        ({"round": 1}, "best-test is None in round 1, the best monitor 0.5 in round 1"),
    ):
        assert found(**done, train_record={"best-test": record}) == [said]
    val = [[2, -1, "val_monitor", 0.75, 4]]
    assert found(val, **done, train_record={"best-val": {"round": 2, "value": 0.75}}) == []
    assert len(found(val, **done, train_record={"best-val": {"round": 1, "value": 0.75}})) == 1
    assert found(**done, train_record={"best-val": {"round": 1, "value": 0.75}}) == []  # of what was not measured


def test_models_of_clients_have_the_outcomes_in_their_order() -> None:
    """Two models of four images: 1 of 4 and 3 of 4, bits 0001 and 0111; their mean is 4 of 8."""
    two = {"pgd_outcomes": [[0, 8, "Fw=="]], "pgd_numbers": [[3, -1, "pgd20", 0.5, 4, 1]]}
    own = [[3, 0, "pgd20", 0.25, 4], [3, 1, "pgd20", 0.75, 4]]

    def of(numbers: list[Any], **more: Any) -> list[str]:
        fields: dict[str, Any] = {**two, **more}
        fields["pgd_numbers"] = fields["pgd_numbers"] + [[*number, 1] for number in numbers]
        return found(**fields)

    assert of(own) == of(own[::-1]) == []
    said = ["pgd20 of client 0 is 0.75, its outcomes say 0.25 (1 of 4)"]
    assert of([[3, 0, "pgd20", 0.75, 4], [3, 1, "pgd20", 0.25, 4]]) == said
    assert of([own[0], [3, 1, "pgd20", 0.5, 4]]) == ["pgd20 of client 1 is 0.5, its outcomes say 0.75 (3 of 4)"]
    assert of([[3, 0, "pgd20", 0.0, 3], [3, 1, "pgd20", 0.8, 5]]) == []  # 000 and 10111
    said = ["pgd20 has 2 clients, its 8 outcomes do not fit them"]
    assert of([[3, 0, "pgd20", 0.25, 4], [3, 1, "pgd20", 0.5, 3]]) == said
    assert of(own[:1]) == ["pgd20 is of 4 images and 1 model, its outcomes are of 8"]
    assert of([]) == ["pgd20 is of 4 images and 1 model, its outcomes are of 8"]
    assert of([*own, [3, 2, "pgd20", 0.5, 4]]) == ["pgd20 is of 4 images and 3 models, its outcomes are of 8"]
    assert of(own, pgd_outcomes=[], pgd_round=0) == []
    assert of(own, pgd_outcomes=[[0, 3, "AA=="], [3, 5, "uA=="]]) == []  # cut elsewhere: 000 and 10111


def test_a_number_that_so_many_images_cannot_give() -> None:
    """0.999 of 40 images; of several models the mean may be finer. Counts over epochs are no count of images."""
    assert found(train=[[1, -1, "natural", 0.999, 8]]) == ["natural is 0.999, which 8 images cannot give"]
    without = {"pgd_outcomes": [], "pgd_round": 0, "pgd_numbers": [[3, -1, "pgd20", 0.51, 8, 1]]}
    assert found(**without) == ["pgd20 is 0.51, which 8 images cannot give"]
    own = [[1, 0, "natural", 0.5, 8], [1, 1, "natural", 0.625, 8]]
    assert found(train=[[1, -1, "natural", 0.5625, 8]]) == ["natural is 0.5625, which 8 images cannot give"]
    assert found(train=[[1, -1, "natural", 0.5625, 8], *own]) == []
    said = ["natural is 0.57, which 8 images and 2 models cannot give"]
    assert found(train=[[1, -1, "natural", 0.57, 8], *own]) == said
    assert found(train=[[1, -1, "train_accuracy", 0.61, 8]]) == found(pgd=[[3, 0, "prior_accuracy", 0.61, 8]]) == []
    assert found(pgd=[[3, -1, "chance", 0.13, 8]]) == ["chance is 0.13, which 8 images cannot give"]


def test_the_accuracies_of_classes_are_those_of_all_images() -> None:
    """What tables show of a class cannot be raised alone."""
    whole = [1, -1, "natural", 0.5, 8]
    classes = [[1, 0, "natural_class", 0.25, 4], [1, 1, "natural_class", 0.75, 4]]
    assert found(train=[whole, *classes]) == []
    said = ["natural of round 1 is 0.5, its classes say 0.625"]
    assert found(train=[whole, classes[0], [1, 1, "natural_class", 1.0, 4]]) == said
    assert found(train=[whole, classes[0]]) == []  # not all of them


def test_training_and_evaluation_say_the_same_of_the_same_images() -> None:
    """Training logs the first images; 0 0 0 0 1 1 1 1 are all eight."""

    def of(value: float, n: int, *others: list[Any], **more: Any) -> list[str]:
        fields = {"pgd_stage": "natural-0a@3", "pgd_settings": {"name": "natural"}, "pgd_run": None, **more}
        own = [[3, -1, "natural", 0.5, 8, 1], *others]
        return found(train=[[3, -1, "natural", value, n]], pgd_numbers=own, **fields)

    assert of(0.5, 8) == of(0.0, 4) == of(0.2, 5) == []
    assert of(1.0, 8) == ["natural of round 3 is 1.0, natural-0a@3 says 0.5 of the same 8 images"]
    assert of(0.5, 4) == ["natural of round 3 is 0.5, natural-0a@3 says 0.0 of the same 4 images"]
    assert of(1.0, 8, pgd_settings={"name": "pgd"}) == of(1.0, 8, pgd_settings=None) == []
    assert of(1.0, 8, pgd_settings={"name": "natural", "origin": "cell a"}) == []
    assert of(1.0, 8, [3, -1, "doubt_diverged", 1.0, 0, 1]) == []


def test_the_settings_of_a_stage_are_asked_for() -> None:
    asked = problems(document_of(LINE), None, lambda stage: f"not {stage.stage}")
    assert [said for _, said in asked] == ["not train", "not pgd20-0a@3"]


def own(*changed: list[Any], **more: Any) -> list[str]:
    """Of two clients on 3 and 4 own images and one that never trains on 1, with some numbers changed."""
    rows = [[3, -1, "pgd20", 0.625, 7], [3, 0, "pgd20", 1.0, 3], [3, 1, "pgd20", 0.25, 4],
            [3, -1, "unseen_accuracy", 1.0, 1], [3, 2, "unseen_accuracy", 1.0, 1],
            [3, -1, "chance", 5 / 7, 7], [3, 0, "chance", 2 / 3, 3]]  # fmt: skip
    numbers = [*{tuple(row[:3]): [*row, 1] for row in [*rows, *changed]}.values()]
    given = {
        "pgd_settings": {"name": "natural", "on": "held_out"},
        "pgd_numbers": numbers,
        "pgd_outcomes": [[0, 3, "4A=="], [3, 4, "gA=="], [7, 1, "gA=="]],
        **more,
    }
    return found(**given, spec={**SPEC, "partition": {"clients": 3}})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ([3, 0, "chance", 1 / 3, 3], None),
        ([3, -1, "pgd20", 5 / 8, 7], None),
        ([3, -1, "pgd20", 4 / 7, 7], "pgd20 is 0.5714285714285714, the mean of its clients' is 0.625"),
        ([3, 0, "pgd20", 2 / 3, 3], "pgd20 is 0.625, the mean of its clients' is 0.4583333333333333"),
        ([3, 2, "unseen_accuracy", 0.0, 1], "pgd20 of client 2 is 0.0, its outcomes say 1.0 (1 of 1)"),
        ([3, -1, "chance", 0.7, 7], "chance is 0.7, which 7 images cannot give"),
    ],
)
def test_clients_on_their_own_images(changed: list[Any], message: str | None) -> None:
    assert own(changed) == ([] if message is None else [message])


def test_two_edited_clients_that_keep_the_mean_contradict_their_outcomes() -> None:
    said = ["pgd20 of client 0 is 0.5, its outcomes say 1.0 (3 of 3)"]
    assert own([3, 0, "pgd20", 0.5, 3], [3, 1, "pgd20", 0.75, 4]) == said
