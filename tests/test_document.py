"""What a line of exported results may be: the bounds of every field, from both sides, and how mistakes are said."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from fatbench.errors import UnknownName
from fatbench.store import document
from fatbench.store.document import Cell, ExchangeError
from fatbench.store.jsonl import cell_of

TIME, UID, MOST, FAR = "2026-01-31T00:00:00.000Z", "0" * 32, 2**31 - 1, 1.01e100
RUN: dict[str, Any] = {
    "uid": UID, "stage": "train", "suite": "s", "preset": None, "status": "done", "started": TIME, "ended": None,
    "host": None, "pid": None, "device": None, "precision": None, "commit": None, "dirty": None, "versions": None,
    "log": None, "error": None, "extra": {},
}  # fmt: skip
STAGE: dict[str, Any] = {
    "stage": "train", "status": "interrupted", "round": 2, "total": 2, "record": {}, "run": 0, "error": None,
    "numbers": [[1, -1, "loss", 0.5, 0, 0, TIME]], "outcomes": [],
}  # fmt: skip
POINT: dict[str, Any] = {
    "suite": "s", "preset": "paper", "labels": {"split": "IID"}, "method": "FAT", "data": "", "split": "IID",
    "model": "", "evaluations": ["pgd20-x"],
}  # fmt: skip
LINE: dict[str, Any] = {"cell": "a", "spec": {}, "created": TIME, "runs": [RUN], "stages": [STAGE]}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


NATURAL: tuple[list[Any], list[Any]] = ([0, MOST], [-1, MOST + 1, "1", 1.5, True, None])
WORD: tuple[list[Any], list[Any]] = ([None, "", "x"], [1, []])
TIMES: tuple[list[Any], list[Any]] = (
    [TIME, "2024-02-29T23:59:59.999Z"],
    [TIME[:-1], f"{TIME}Z", f"x{TIME}", "2026-01-31 00:00:00.000Z", "2026-01-31T00:00:00Z", "2026-02-29T00:00:00.000Z"],
)
STATUSES: tuple[list[Any], list[Any]] = (["todo", "done", "failed", "interrupted"], ["running", "", None])
STAGE_NAMES: tuple[list[Any], list[Any]] = (
    ["train", "x@0", "x@123456789", f"{188 * 'p'}@1"],
    ["trains", "x", "x@", "@1", "x@y@1", "x@1234567890", f"{189 * 'p'}@1"],
)
BEST: tuple[list[Any], list[Any]] = (
    [None, {"round": 0}, {"round": MOST, "value": None, "more": 1}, {"round": 1, "value": -1e100}],
    [{}, {"round": -1}, {"round": 1, "value": FAR}, {"round": 1, "value": "1"}, 1],
)
FIELDS: dict[str, tuple[list[Any], list[Any]]] = {
    "cell": (["x", 190 * "x"], ["", 191 * "x", 1, None]),
    "replicate": NATURAL,
    "points": ([[], [POINT]], [[{}], [{**POINT, "labels": {"split": 1}}], [{**POINT, "evaluations": [""]}], None]),
    "spec": ([{}, {"x": nested(28)}], [{"x": nested(29)}, [], None]),
    "created": TIMES,
    "runs.0.uid": (["0123456789abcdef" * 2], ["0" * 31, "0" * 33, "g" * 32, "A" * 32, None]),
    "runs.0.stage": STAGE_NAMES,
    "runs.0.suite": (["", "x"], [None, 1]),
    "runs.0.status": STATUSES,
    "runs.0.started": TIMES,
    "runs.0.ended": ([None, *TIMES[0]], TIMES[1]),
    "runs.0.pid": ([None, -(2**31), MOST], [-(2**31) - 1, MOST + 1, "1", True]),
    "runs.0.dirty": ([None, True, False], [0, 1, "yes"]),
    "runs.0.versions": ([None, {}, {"torch": "2"}], [{"torch": None}, {"torch": 2}, []]),
    **{f"runs.0.{name}": WORD for name in ("preset", "host", "device", "precision", "log", "error")},
    "runs.0.commit": ([None, 40 * "a", "release 0.1.0"], ["", "abc", 41 * "a", 40 * "A", 1]),
    "runs.0.extra": ([{}, {"any": [1]}, {"x": nested(28)}], [None, [], {"x": nested(29)}]),
    "runs.0.extra.data": (
        [None, "x", {"name": "x"}, {"name": "x", "variant": None, "fingerprint": None, "more": 1}],
        [1, {}, {"name": 1}, {"name": "x", "variant": 1}, {"name": "x", "fingerprint": 1}],
    ),
    "runs.0.extra.attack": WORD,
    "runs.0.extra.path": WORD,
    "runs.0.extra.stack": ([None, *NATURAL[0]], NATURAL[1][:-1]),
    "runs.0.extra.vectorise": ([1, MOST], [0, MOST + 1, 1.5, None]),
    "runs.0.extra.dropped": ([True, False], [0, 1, None]),
    "runs.0.extra.lease": ([None, 1e-9, 1, 1e9], [0, -1, 1.001e9, "1"]),
    "runs.0.extra.plugins": (
        [[], [{"plugin": "p", "sha256": "s", "names": ["n"], "modules": {"m": "s"}, "more": 1}],
         [{"plugin": "p", "sha256": "s", "names": []}]],
        [None, {}, [{"plugin": "p", "sha256": "s"}], [{"plugin": 1, "sha256": "s", "names": []}],
         [{"plugin": "p", "sha256": 1, "names": []}], [{"plugin": "p", "sha256": "s", "names": [1]}],
         [{"plugin": "p", "sha256": "s", "names": [], "modules": {"m": 1}}]],
    ),
    "stages.0.stage": STAGE_NAMES,
    "stages.0.status": STATUSES,
    "stages.0.round": NATURAL,
    "stages.0.total": NATURAL,
    "stages.0.run": ([None, *NATURAL[0]], NATURAL[1][:-1]),
    "stages.0.error": WORD,
    "stages.0.digest": ([None, "0123456789abcdef" * 4], ["0" * 63, "0" * 65, "g" * 64, 1]),
    "stages.0.record": ([{}, {"any": 1}, {"best_val": 1}, {"x": nested(28)}], [None, [], {"x": nested(29)}]),
    "stages.0.record.last": BEST,
    "stages.0.record.best-val": BEST,
    "stages.0.record.best-test": BEST,
    "stages.0.record.model": WORD,
    "stages.0.settings": (
        [None, {"name": "x"}, {"name": 190 * "x", "implementation": None, "more": 1}, {"name": "x", "y": nested(28)}],
        [[], {}, {"name": ""}, {"name": 191 * "x"}, {"name": "x", "implementation": 1}, {"name": "x", "y": nested(29)}],
    ),
    "stages.0.numbers": ([[]], [None, [[1, -1, "loss", 0.5, 0, 0]], [[1, -1, "loss", 0.5, 0, 0, TIME, 1]]]),
    "stages.0.numbers.0.0": NATURAL,
    "stages.0.numbers.0.1": ([-(2**31), MOST], [-(2**31) - 1, MOST + 1, "1", 0.5, None]),
    "stages.0.numbers.0.2": (["x", 190 * "x"], ["", 191 * "x", None]),
    "stages.0.numbers.0.3": ([1, -0.0, 1e100, -1e100], [FAR, -FAR, "1", None]),
    "stages.0.numbers.0.4": NATURAL,
    "stages.0.numbers.0.5": NATURAL,
    "stages.0.numbers.0.6": TIMES,
    "stages.0.outcomes": (
        [[], [[0, 1, "gA=="]], [[MOST, MOST, ""]]],
        [None, [[0, 0, ""]], [[-1, 1, ""]], [[0, 1, None]], [[0, 1]], [[0, MOST + 1, ""]], [[MOST + 1, 1, ""]]],
    ),
}  # fmt: skip
MAY_LACK = {"replicate", "points", "digest", "settings"}


def put(path: str, value: Any) -> dict[str, Any]:
    line: Any = copy.deepcopy(LINE)
    *above, last = path.split(".")
    at = line
    for key in above:
        at = at[int(key)] if isinstance(at, list) else at[key]
    at[int(last) if isinstance(at, list) else last] = value
    return line


def read(line: Any) -> Cell:
    return document.document(line, "f:2")


@pytest.mark.parametrize("path", FIELDS)
def test_a_field_takes_what_is_within_its_bounds_and_nothing_beyond(path: str) -> None:
    taken, refused = FIELDS[path]
    for value in taken:
        read(put(path, value))
    for value in refused:
        with pytest.raises(ExchangeError, match=rf"^f:2: {path}"):
            read(put(path, value))


def test_every_field_has_its_bounds_above_and_is_needed() -> None:
    keys = {**dict.fromkeys(LINE, ""), **dict.fromkeys(RUN, "runs.0."), **dict.fromkeys(STAGE, "stages.0.")}
    for key, above in [(key, keys[key]) for key in keys if key not in ("runs", "stages")]:
        assert f"{above}{key}" in FIELDS
        line = put(f"{above}{key}", None)
        part = line["runs"][0] if above == "runs.0." else line["stages"][0] if above else line
        del part[key]
        with pytest.raises(ExchangeError, match=f"^f:2: {above}{key}: Field required$"):
            read(line)
    found = read(LINE)
    assert (found.replicate, found.points, found.stages[0].digest, found.stages[0].settings) == (0, [], None, None)
    for place in ("new", "runs.0.new", "stages.0.new"):
        with pytest.raises(ExchangeError, match=f"^f:2: {place}: Extra inputs are not permitted$"):
            read(put(place, 1))


# --- a line --------------------------------------------------------------------------------------------------------


def digest_of(line: Any) -> str:
    cell = read(line)
    return document.digest(cell, cell.stages[0])


def said(line: Any, **more: Any) -> str:
    with pytest.raises(ExchangeError) as refused:
        cell_of(line if isinstance(line, str) else json.dumps(line) + "\n", 2, "f:2", **more)
    return str(refused.value)


def test_a_line_is_read_and_what_does_not_fit_together_named() -> None:
    assert cell_of(json.dumps(LINE), 2, "f:2", lambda spec: "a").cell == "a"
    run = put("runs", [RUN, {**RUN, "uid": "1" * 32}])
    run["stages"][0]["run"] = 1
    run["stages"][0]["numbers"][0][5] = 1
    assert cell_of(json.dumps(run), 2, "f:2").stages[0].run == 1
    for path in ("stages.0.run", "stages.0.numbers.0.5"):
        assert said(put(path, 1)) == "f:2: cell a train: run 1 does not exist"
    assert said(put("stages", [STAGE, STAGE])) == "f:2: cell a: stage train occurs twice"
    assert said(put("runs", [RUN, RUN])) == f"f:2: cell a: run {UID} occurs twice"
    twice = put("stages.0.numbers", [*STAGE["numbers"], [1, -1, "loss", 0.25, 0, 0, TIME]])
    assert said(twice) == "f:2: cell a: number (1, -1, 'loss') occurs twice"
    for other in ([2, -1, "loss"], [1, 0, "loss"], [1, -1, "gain"]):
        line = put("stages.0.numbers", [*STAGE["numbers"], [*other, 0.5, 0, 0, TIME]])
        assert len(cell_of(json.dumps(line), 2, "f:2").stages[0].rows) == 2


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        ([[0, 8, "Dw=="], [8, 1, "gA=="]], None),
        ([[0, 9, "D4A="]], None),
        ([[0, 9, "Dw=="]], "the outcomes from 0 on do not fit"),
        ([[0, 8, "D4A="]], "the outcomes from 0 on do not fit"),
        ([[1, 8, "Dw=="]], "the outcomes from 1 on do not fit"),
        ([[0, 8, "Dw=="], [7, 1, "gA=="]], "the outcomes from 7 on do not fit"),
        ([[0, 8, "D w=="]], "outcomes: Only base64 data is allowed"),
        ([[0, 8, "//"]], "outcomes: Incorrect padding"),
    ],
)
def test_outcomes_follow_one_another(outcomes: Any, message: str | None) -> None:
    line = put("stages.0.outcomes", outcomes)
    if message is None:
        assert len(cell_of(json.dumps(line), 2, "f:2").stages[0].outcomes) == len(outcomes)
    else:
        assert said(line) == f"f:2: cell a train: {message}"


def test_a_finished_stage_has_the_digest_of_what_it_says() -> None:
    done = put("stages.0.status", "done")
    assert said(done) == "f:2: cell a train: a finished stage has no digest: was it edited?"
    done["stages"][0]["digest"] = "0" * 64
    assert said(done) == "f:2: cell a train: its digest does not match its numbers or outcomes: was it edited?"
    done["stages"][0]["digest"] = digest_of(done)
    assert cell_of(json.dumps(done), 2, "f:2").stages[0].status == "done"
    beside = put("stages.0.numbers.0.1", -2)
    assert said(beside) == "f:2: cell a train: loss of client -2: clients are counted from 0"


def test_an_identity_that_cannot_be_computed_names_the_plugin_of_the_runs() -> None:
    record = {"plugin": "mine.py", "sha256": "0123456789abcdef", "names": ["blank"]}
    other = {"plugin": "other.py", "sha256": "f" * 64, "names": ["else"]}
    line = put("runs", [{**RUN, "extra": {"plugins": [record, other]}}, {**RUN, "uid": "1" * 32}])

    def unknown(_: Any) -> str:
        raise UnknownName("no attack is named 'blank'", "blank")

    def wrong(_: Any) -> str:
        raise KeyError("x" * 301)

    text = str(UnknownName("no attack is named 'blank'", "blank"))
    brought = "; its runs used the plug-in mine.py (sha256 0123456789ab): pass it with --plugin"
    assert said(line, identify=unknown) == f"f:2: cell a: {text}{brought}"
    assert said(LINE, identify=unknown) == f"f:2: cell a: {text}"
    assert said(line, identify=wrong) == f"f:2: cell a: '{'x' * 299}..."
    assert said(LINE, identify=lambda _: "b") == "f:2: cell a: its id does not match its settings (b): was it edited?"


def test_messages_are_cut_at_300_characters_and_in_one_line() -> None:
    assert document.shorten(f"a \n b{295 * 'x'}") == f"a b{295 * 'x'}"
    assert document.shorten(f"a \n b{296 * 'x'}") == f"a b{295 * 'x'}..."
    assert document.shorten(300 * "x") == 300 * "x"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"format": "fatbench results", "schema_version": "' + 30 * "9" + '", "cells": 1}',
         f"f:1: written by another fatbench (schema_version {20 * '9'}; this one reads 1 and 2)"),
        ('{"format": "fatbench results", "schema_version": 1, "cells": 1, "more": 1}',
         "f:1: more: Extra inputs are not permitted"),
        ('{"format": "fatbench results", "schema_version": 1, "cells": -1}',
         "f:1: cells: Input should be greater than or equal to 0"),
        ("[" * 100_000, "f:1: not a file written by 'fatbench export'"),
        ("Dear diary", "f:1: not a file written by 'fatbench export'"),
        ('{"format": "fatbench results", "schema_version": 3, "cells": 2}',
         "f:1: written by another fatbench (schema_version 3; this one reads 1 and 2)"),
        ('{"format": "fatbench results", "schema_version": 1}', "f:1: cells: Field required"),
        ('{"format": "fatbench results", "schema_version": 1, "cells": NaN}', "f:1: NaN is not a number"),
        ('{"format": "other"}', "f:1: not a file written by 'fatbench export'"),
    ],
)  # fmt: skip
def test_the_first_line(line: str, message: str) -> None:
    assert document.header('{"format": "fatbench results", "schema_version": 1, "cells": 7}', "f:1") == (7, 1)
    with pytest.raises(ExchangeError) as refused:
        document.header(line, "f:1")
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]\n", "f:2: expected a JSON object, got a list"),
        ("\n", "f:2: not JSON (Expecting value at column 1)"),
        ('{"a": Infinity}\n', "f:2: Infinity is not a number"),
        ('{"a": ' + "[" * 100_000 + "\n", "f:2: nested more than 30 levels deep"),
        ('{"a": ' + "9" * 5000 + "}\n",
         "f:2: Exceeds the limit (4300 digits) for integer string conversion: value has"
         " 5000 digits; use sys.set_int_max_str_digits() to increase the limit"),
        ('{"a"}\n', "f:2: not JSON (Expecting ':' delimiter at column 5)"),
        ('{"a"', "f:2: not JSON (Expecting ':' delimiter at column 5); the file is truncated here"),
        ('{"a": "\\u0000"}\n', "f:2: text that cannot be stored (a NUL, or half of a surrogate pair)"),
        ('{"\\ud800": 1}\n', "f:2: text that cannot be stored (a NUL, or half of a surrogate pair)"),
        ('{"a": "\\u00e4"}\n', "f:2: cell: Field required"),
    ],
)  # fmt: skip
def test_what_is_no_line(line: str, message: str) -> None:
    assert said(line) == message
