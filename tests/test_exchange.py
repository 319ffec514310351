"""Results between machines: exported and imported is the same, twice is once, and a bad file changes nothing."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import random
import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import result_files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select, update
from typer.testing import CliRunner

from fatbench import api, packed
from fatbench.cli.app import app
from fatbench.engine.rounds import Number
from fatbench.errors import CONTROL, DatabaseError, FatbenchError, MachineError
from fatbench.store import jsonl as exchange
from fatbench.store.grid_points import Point
from fatbench.store.integrity import check
from fatbench.store.jsonl import ExchangeError, import_
from fatbench.store.rows import dumps
from fatbench.store.schema import CELLS, RUNS, STAGES
from fatbench.store.stages import Store

pytest_plugins = ("databases",)

PROVENANCE = {"preset": "quick", "device": "H200", "precision": "bf16", "commit": "abc0" * 10, "dirty": True,
              "versions": {"torch": "2.15"}, "data": "cifar10 jpeg75"}  # fmt: skip


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url, create=True) as opened:
        yield opened


@pytest.fixture
def other(other_url: str) -> Iterator[Store]:
    with Store.open(other_url, create=True) as opened:
        yield opened


def claim(store: Store, cell: str, stage: str, *, retry_failed: bool = False) -> int:
    run = store.claim(cell, stage, suite="s", total=4, provenance=PROVENANCE, retry_failed=retry_failed)
    assert run is not None
    return run


def fill(store: Store) -> None:
    """Two cells: one done with an evaluation, one under way after a failure."""
    store.add_cells({"b": {"seed": 1, "eps": "8/255"}, "a": {"seed": 2**70}})
    run = claim(store, "b", "train")
    store.commit(run, numbers=[Number("loss", 0.1, 1, n=9), Number("w", 1 / 3, 1, client=2)], round=1, checkpoint="s1")
    store.finish(run, [Number("loss", 5e-324, 2, n=9)], round=2, record={"best": {"round": 2, "value": 0.25}})
    run = claim(store, "b", "pgd20-x@2")
    store.commit(run, round=9, outcomes=(0, 9, b"\xff\x80"))
    store.commit(run, round=12, outcomes=(9, 3, b"\x40"))
    store.finish(run, [Number("pgd20", 10 / 12, 2, n=12)])
    run = claim(store, "a", "train")
    store.commit(run, numbers=[Number("loss", 2.5, 1)], round=1, checkpoint="s1")
    store.fail(run, "Traceback: ä \udce4")
    run = claim(store, "a", "train", retry_failed=True)
    store.commit(run, numbers=[Number("loss", 1.5, 2)], round=2, checkpoint="s2")


def exported(store: Store, cells: list[str] | None = None) -> str:
    stream = io.StringIO()
    exchange.export(store, stream, cells)
    return stream.getvalue()


def as_rows(text: str) -> str:
    return "".join(map(result_files.rows, text.splitlines()))


def put(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "results.jsonl"
    file.write_text(text, encoding="utf-8")
    return file


def resealed(text: str) -> str:
    """Lines with the digests of what they say: what a forger writes who knows how."""

    def one(line: str) -> str:
        value = json.loads(line)
        for stage, digest in result_files.mismatches(value) if "cell" in value else ():
            stage["digest"] = digest
        return dumps(value) + "\n"

    return "".join(map(one, as_rows(text).splitlines()))


def content(store: Store) -> Any:
    """All that a person can see of a store; run ids are its own."""
    runs = store.runs()
    place = {run["id"]: i for i, run in enumerate(sorted(runs, key=lambda run: run["uid"]))}
    numbers = [{**m, "run": place[m["run"]]} for m in store.measurements()]
    stages = store.stages()
    return store.cells(), stages, numbers, runs, [store.outcomes(*key) for key in stages]


# --- there and back ----------------------------------------------------------------------------------------------


def with_attacked(path: Path) -> str:
    """A new database with the cell of `attacked`: its path."""
    with Store.open(str(path), create=True) as store:
        attacked(store)
    return str(path)


def edit(path: str, *statements: str) -> int:
    """Change a database as a person with SQLite would: how many rows the last statement changed."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        return [connection.execute(statement).rowcount for statement in statements][-1]


def flipped(content: bytes, place: int) -> bytes:
    damaged = bytearray(content)
    damaged[place // 8] ^= 1 << place % 8
    return bytes(damaged)


def put_database(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for log in ("wal", "shm", "journal"):
        Path(f"{path}-{log}").unlink(missing_ok=True)


def test_export_import_export_is_the_same(store: Store, other: Store, tmp_path: Path) -> None:
    fill(store)
    text = exported(store)
    assert exported(store) == text
    counts = import_(other, put(tmp_path, text))
    assert counts == {"cells": 2, "new cells": 2, "new replicates": 0, "new stages": 3, "new numbers": 6,
                      "numbers already here": 0}  # fmt: skip
    assert exported(other) == text
    assert other.cells() == store.cells()
    assert other.outcomes("b", "pgd20-x@2") == [(0, 9, b"\xff\x80"), (9, 3, b"\x40")]
    mine, theirs = content(store)[2], content(other)[2]
    assert mine == theirs, "the public view shows the same numbers with the same provenance"
    assert (theirs[0]["device"], theirs[0]["dirty"], theirs[0]["suite"], theirs[-1]["seed"]) == ("H200", True, "s", 1)


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz", "r.jsonl.xz"])
def test_a_compressed_file_and_one_of_version_1_are_the_same_results(tmp_path: Path, empty: Store, name: str) -> None:
    """The numbers of a round stand in one list a metric, those of other clients or other counts apart."""
    with Store.open(str(tmp_path / "source.db"), create=True) as store:
        store.add_cell("a", {"seed": 1})
        run = claim(store, "a", "train")
        of_clients = [Number(metric, k / 3, 3, 5, k) for metric in "wx" for k in (2, 7)]
        store.finish(run, [Number("w", 0.5, 3), *of_clients, Number("y", 1, 3, 4, 2), Number("y", 1, 3, 5, 7)], round=3)
        text = exported(store)
        for file in (tmp_path / name, tmp_path / f"again-{name}"):
            exchange.export(store, file)
    assert (tmp_path / name).read_bytes() == (tmp_path / f"again-{name}").read_bytes()
    assert (name == "r.jsonl") == (b"fatbench results" in (tmp_path / name).read_bytes())
    assert exchange.is_export(tmp_path / name) and "".join(result_files.lines(tmp_path / name)) == text
    (train,) = json.loads(text.splitlines()[1])["stages"]
    assert [entry[:4] for entry in train["numbers"]] == [
        [3, [-1, 2, 7], [0, 5, 5], {"w": [0.5, 2 / 3, 7 / 3]}],
        [3, [2, 7], 5, {"x": [2 / 3, 7 / 3]}],
        [3, [2, 7], [4, 5], {"y": [1.0, 1.0]}],
    ]
    old = put(tmp_path, as_rows(text).replace('"schema_version":2', '"schema_version":1'))
    for first, second in ((tmp_path / name, old), (old, tmp_path / name)):
        with Store.open(str(tmp_path / f"{first.name}.db"), create=True) as store:
            assert (import_(store, first)["new numbers"], import_(store, second)["new numbers"]) == (7, 0)
            assert exported(store) == text


@pytest.mark.parametrize("name", ["r.jsonl.gz", "r.jsonl.xz"])
def test_a_compressed_file_that_is_cut(empty: Store, lines: list[str], tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as handle, packed.text_writer(handle, name) as text:
        text.writelines(lines)
    whole = (tmp_path / name).read_bytes()
    for cut in (20, len(whole) // 2, len(whole) - 9):
        (tmp_path / name).write_bytes(whole[:cut])
        with pytest.raises(ExchangeError, match=f"^{re.escape(str(tmp_path / name))}: (damaged|ends after)"):
            import_(empty, tmp_path / name)
        assert empty.cells() == {}


def test_lists_that_do_not_fit_are_named(empty: Store, lines: list[str], tmp_path: Path) -> None:
    for change in (lambda b: b[1].append(4), lambda b: b[3].update(w=[]), lambda b: b.__setitem__(2, [1, 2, 3])):
        cell = json.loads(lines[2])
        change(cell["stages"][1]["numbers"][0])
        file = put(tmp_path, "".join([*lines[:2], dumps(cell), "\n"]))
        unchanged(empty, file, "{}:3: stages.1.numbers.0: its lists differ in length")


def test_series_of_clients_may_be_left_out(store: Store, other: Store, tmp_path: Path) -> None:
    """The digests are of what is left; what is known of more stays when less is imported."""
    fill(store)
    exchange.export(store, tmp_path / "few.jsonl", without=["w", "loss"])
    assert import_(other, tmp_path / "few.jsonl")["new numbers"] == 5
    assert {row["metric"] for row in other.measurements()} == {"loss", "pgd20"}, "loss is of no client"
    before = content(store)
    assert import_(store, tmp_path / "few.jsonl")["new numbers"] == 0 and content(store) == before
    assert import_(other, put(tmp_path, exported(store)))["new numbers"] == 1
    assert content(other)[2] == before[2]


def test_suites_that_share_a_cell_travel_with_it(store: Store, other: Store, tmp_path: Path) -> None:
    """With the labels and the evaluations that each gives it; those that are here already stay."""
    fill(store)
    points = [
        Point("s", "quick", "b", '{"split":"IID","method":"FAT"}', "FAT", "mnist", "IID", "cnn", ("pgd20-x", "cw-y")),
        Point("t", "paper", "b", "{}"),
    ]
    assert "points" not in exported(store)
    store.store_points([*points, points[0]._replace(cell="unknown")])
    text = exported(store)
    assert [len(json.loads(line).get("points", ())) for line in text.splitlines()[1:]] == [0, 2]
    for _ in range(2):
        import_(other, put(tmp_path, text))
        assert exported(other) == exported(other, ["a", "b"]) == text
    other.store_points([points[0]._replace(method="SFAT")])
    import_(other, put(tmp_path, text))
    assert '"method":"SFAT"' in exported(other) and '"method":"FAT","model"' not in exported(other)


def test_what_a_file_looks_like(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "x.db"), create=True) as store:
        fill(store)
        header, a, b = (json.loads(line) for line in exported(store).splitlines())
    assert header == {"format": "fatbench results", "schema_version": 2, "cells": 2}
    assert (a["cell"], b["cell"]) == ("a", "b")
    assert [(run["stage"], run["status"]) for run in a["runs"]] == [("train", "failed"), ("train", "interrupted")]
    (train,) = a["stages"]
    assert (train["status"], train["round"], train["run"], train["error"]) == ("interrupted", 2, 1, None)
    assert [n[:5] for n in train["numbers"]] == [[1, [-1], 0, {"loss": [2.5]}, 0], [2, [-1], 0, {"loss": [1.5]}, 1]]
    assert b["stages"][0]["outcomes"] == [[0, 9, "/4A="], [9, 3, "QA=="]]
    assert b["spec"] == {"seed": 1, "eps": "8/255"}
    assert b["runs"][0]["extra"] == {"data": "cifar10 jpeg75"}
    assert "checkpoint" not in exported_keys(a) | exported_keys(b)
    assert "process" not in exported_keys(a)


def exported_keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for item in value.values() for key in exported_keys(item)}
    return {key for item in value for key in exported_keys(item)} if isinstance(value, list) else set()


def test_a_choice_of_cells(store: Store) -> None:
    fill(store)
    assert [json.loads(line).get("cell") for line in exported(store, ["b", "nobody", "b"]).splitlines()] == [None, "b"]
    assert exported(store, []) == '{"cells":0,"format":"fatbench results","schema_version":2}\n'


def test_a_finished_cell_imports_as_done(store: Store, other: Store, tmp_path: Path) -> None:
    fill(store)
    import_(other, put(tmp_path, exported(store)))
    train = other.stages()["b", "train"]
    assert (train.status, train.round, train.checkpoint) == ("done", 2, None)
    assert train.record == {"best": {"round": 2, "value": 0.25}}
    assert other.claim("b", "train", suite="s", total=4, provenance={}) is None
    unfinished = other.stages()["a", "train"]
    assert (unfinished.status, unfinished.round, unfinished.checkpoint) == ("interrupted", 2, None)
    assert not unfinished.alive
    run = claim(other, "a", "train")
    other.restart(run)
    other.finish(run, [Number("loss", 2.5, 1)])


# the program's own words, of which Hypothesis tries those that it finds in the source, have bounds
names = st.text(st.characters(codec="utf-8", exclude_characters="\0\t\n\r"), min_size=1, max_size=8).filter(
    lambda name: not re.fullmatch("[a-z_-]{4,}", name) and not CONTROL.search(name)
)
values = st.floats(-1e100, 1e100)
stage_names = names.map(lambda name: f"{name.replace('@', '')}@1" if name.strip("@") else "train")
plain = st.none() | st.booleans() | st.integers() | values | names
json_values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3))
stages_of = st.fixed_dictionaries(
    {
        "commits": st.lists(
            st.tuples(st.lists(st.tuples(names, st.integers(-1, 3), values), max_size=4), st.integers(1, 20)),
            max_size=3,
        ),
        "record": st.dictionaries(names, json_values, max_size=2),
        "end": st.sampled_from(["finish", "fail", "release", "go on"]),
    }
)
worlds = st.dictionaries(
    names,
    st.tuples(st.dictionaries(names, json_values, max_size=3), st.dictionaries(stage_names, stages_of, max_size=3)),
    max_size=3,
)


def build(store: Store, world: Any) -> None:
    """Put a generated world into a store by the calls that the engine makes."""
    store.add_cells({cell: spec for cell, (spec, _) in world.items()})
    for cell, (_, stages) in world.items():
        for stage, what in stages.items():
            run = claim(store, cell, stage)
            position = 0
            for numbers, n in what["commits"]:
                unique = {(metric, client): value for metric, client, value in numbers}
                rows = [Number(m, value, position + n, client=client) for (m, client), value in unique.items()]
                outcomes = (position, n, bytes([n * 11 % 256] * ((n + 7) // 8)))
                position += n
                said = {"numbers": rows, "outcomes": outcomes, "record": what["record"], "checkpoint": "c"}
                store.commit(run, round=position, **said)
            match what["end"]:
                case "finish":
                    store.finish(run)
                case "fail":
                    store.fail(run, f"{cell}\n{stage}")
                case "release":
                    store.release(run)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(worlds)
def test_any_results_survive_the_journey(tmp_path_factory: pytest.TempPathFactory, world: Any) -> None:
    here, there = (Store.open(str(tmp_path_factory.mktemp("world") / "w.db"), create=True) for _ in range(2))
    with here, there:
        text = exported(here)
        file = put(tmp_path_factory.mktemp("file"), text)
        import_(there, file)
        assert exported(there) == text
        before = content(there)
        import_(there, file)
        assert content(there) == before
        assert content(there)[2] == content(here)[2]
    assert "intact" in check_of(there)


# --- merging -----------------------------------------------------------------------------------------------------


def test_a_stage_that_can_go_on_here_is_left_alone(store: Store, other: Store, tmp_path: Path) -> None:
    """The file knows one round more, but its checkpoint is elsewhere and ours is here."""
    for place, rounds in ((store, 3), (other, 2)):
        place.add_cell("a", {"seed": 1})
        run = claim(place, "a", "train")
        for round in range(1, rounds + 1):
            place.commit(run, numbers=[Number("loss", 1.0 / round, round)], round=round, checkpoint=f"s{round}")
        place.release(run)
    counts = import_(other, put(tmp_path, exported(store)))
    assert (counts["new stages"], counts["new numbers"], counts["numbers already here"]) == (0, 0, 2)
    assert (other.stages()["a", "train"].round, other.stages()["a", "train"].checkpoint) == (2, "s2")
    run = claim(other, "a", "train")
    other.commit(run, numbers=[Number("loss", 1.0 / 3, 3)], round=3, checkpoint="s3")
    assert len(other.measurements()) == 3


def test_finished_work_replaces_what_is_not_finished_here(store: Store, other: Store, tmp_path: Path) -> None:
    store.add_cell("a", {"seed": 1})
    other.add_cell("a", {"seed": 1})
    run = claim(store, "a", "e@1")
    store.commit(run, round=12, outcomes=(0, 12, b"\xff\xf0"))
    store.finish(run, [Number("pgd20", 1.0, 1, n=12)])
    run = claim(other, "a", "e@1")
    other.commit(run, round=5, outcomes=(0, 5, b"\xf8"))
    file = put(tmp_path, exported(store))
    counts = import_(other, file)
    assert counts["new stages"] == 0, "a live process is at it"
    assert other.stages()["a", "e@1"].alive
    other.release(run)
    assert import_(other, file)["new stages"] == 1
    assert other.stages()["a", "e@1"].status == "done"
    assert other.outcomes("a", "e@1") == [(0, 12, b"\xff\xf0")]
    assert "intact" in check_of(other)


def check_of(store: Store) -> str:
    url = store.database._engine.url.render_as_string(hide_password=False)
    return check(str(store.database.path) if store.database.path else url)


def test_a_dead_run_here_is_no_live_one(store: Store, other: Store, tmp_path: Path) -> None:
    for place in (store, other):
        place.add_cell("a", {"seed": 1})
    store.finish(claim(store, "a", "train"), [Number("loss", 0.5, 1)])
    run = claim(other, "a", "train")
    with other.database.writing() as connection:
        connection.execute(update(RUNS).where(RUNS.c.id == run).values(pid=2**22 + 1))
    assert import_(other, put(tmp_path, exported(store)))["new stages"] == 1


def test_a_run_whose_versions_are_not_known(other: Store, tmp_path: Path) -> None:
    with Store.open(with_attacked(tmp_path / "here.db")) as here:
        text = exported(here)
    head, line, _ = text.split("\n")
    cell = json.loads(line)
    for run in cell["runs"]:
        run["versions"] = None
    text = resealed(f"{head}\n{dumps(cell)}\n")
    import_(other, put(tmp_path, text))
    assert as_rows(exported(other)) == text and [run["versions"] for run in other.runs()] == [{}, {}]


def test_the_settings_of_an_attack_travel(store: Store, other: Store, tmp_path: Path) -> None:
    """A stage without them, as another program may write it, is taken in without."""
    store.add_cell("a", {"seed": 1})
    pgd = {"name": "pgd", "eps": "8/255", "implementation": "fatbench 0.1.0"}
    run = store.claim("a", "pgd20-ab@3", suite="s", total=4, provenance={}, settings=pgd)
    store.finish(run, [Number("pgd20", 0.25, 3, n=4)])
    line = exported(store)
    import_(other, put(tmp_path, line))
    assert other.stages()["a", "pgd20-ab@3"].settings == pgd
    assert exported(other) == line
    bare = resealed(line.replace(f'"settings":{dumps(pgd)},', ""))
    assert bare != line
    with Store.open(str(tmp_path / "third.db"), create=True) as third:
        import_(third, put(tmp_path, bare))
        assert third.stages()["a", "pgd20-ab@3"].settings is None


# --- conflicts and damage ----------------------------------------------------------------------------------------


def unchanged(store: Store, file: Path, message: str, **more: Any) -> None:
    """Importing fails with exactly this message ({} stands for the file) and changes nothing."""
    before = content(store)
    with pytest.raises(ExchangeError, match=f"^{re.escape(message.replace('{}', str(file)))}$"):
        import_(store, file, **more)
    assert content(store) == before


def test_another_value_for_the_same_number(store: Store, other: Store, tmp_path: Path) -> None:
    """Of the same run: the file was edited. The new cell before it in the file is not imported either."""
    store.add_cell("b", {"seed": 1})
    store.finish(claim(store, "b", "train"), [Number("loss", 1.0, 1), Number("w", 0.25, 2, n=9, client=3)])
    import_(other, put(tmp_path, exported(store)))
    store.add_cell("a", {"seed": 1})
    text = as_rows(exported(store))
    for edited, said in ((",0.5,9,", "0.5 (n=9)"), (",0.25,10,", "0.25 (n=10)")):
        message = f"{{}}:3: cell b train: w of client 3 of round 2 is {said} there and 0.25 (n=9) here"
        unchanged(other, put(tmp_path, resealed(text.replace(",0.25,9,", edited))), f"{message}; nothing was imported")
        assert "a" not in other.cells()


@pytest.fixture
def lines(tmp_path: Path) -> list[str]:
    with Store.open(str(tmp_path / "source.db"), create=True) as source:
        fill(source)
        return exported(source).splitlines(keepends=True)


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Store]:
    with Store.open(str(tmp_path / "empty.db"), create=True) as opened:
        yield opened


def test_a_truncated_file(empty: Store, lines: list[str], tmp_path: Path) -> None:
    """Cut anywhere: between two lines, within one, before the last line's end."""
    text = "".join(lines)
    unchanged(empty, put(tmp_path, "".join(lines[:2])), "{}: ends after 1 of 2 cells: it is truncated")
    unchanged(empty, put(tmp_path, lines[0]), "{}: ends after 0 of 2 cells: it is truncated")
    unchanged(empty, put(tmp_path, ""), "{}: empty; expected a file written by 'fatbench export'")
    for cut in range(len(lines[0]) + 1, len(text) - 1, 97):
        file = put(tmp_path, text[:cut])
        with pytest.raises(ExchangeError, match=rf"^{re.escape(str(file))}(:\d: .*truncated|: ends after \d of 2)"):
            import_(empty, file)
        assert content(empty) == ({}, {}, [], [], [])
    import_(empty, put(tmp_path, text[:-1]))
    assert len(empty.cells()) == 2, "a last line without its end is whole"


def changed(line: str, change: Callable[[Any], Any]) -> str:
    value = json.loads(result_files.rows(line))
    change(value)
    return json.dumps(value) + "\n"


ODD: dict[str, tuple[Any, str]] = {
    "stages.0.stage": ("pgd20", "stages.0.stage: String should match pattern '^(train|[^@]+@[0-9]{1,9})$'"),
    "runs.0.extra.vectorise": ("x", "runs.0.extra.vectorise: Input should be a valid integer"),
    "spec.x": ("a\0", "text that cannot be stored (a NUL, or half of a surrogate pair)"),
    "runs.0.started": ("2026-02-30T10:00:00.000Z", "runs.0.started: 2026-02-30T10:00:00.000Z is not a valid time"),
}


@pytest.mark.parametrize("path", ODD)
@pytest.mark.promise("Input", "Every field of an imported line is checked before any of the line is stored")
def test_a_field_that_cannot_be(empty: Store, lines: list[str], tmp_path: Path, path: str) -> None:
    value, message = ODD[path]

    def change(cell: Any) -> None:
        *above, last = path.split(".")
        for key in above:
            cell = cell[int(key) if isinstance(cell, list) else key]
        cell[int(last) if isinstance(cell, list) else last] = value

    file = put(tmp_path, "".join(lines[:2]) + changed(lines[2], change))
    unchanged(empty, file, "{}:3: " + message)


def test_more_lines_than_promised_and_files_that_are_no_text(empty: Store, lines: list[str], tmp_path: Path) -> None:
    file = put(tmp_path, "".join([*lines, lines[2]]))
    unchanged(empty, file, "{}:4: more cells than the 2 that the first line promises")
    file.write_bytes(b"\x80\x02\xff")
    unchanged(empty, file, "{}: not a text file; expected one written by 'fatbench export'")


def test_a_run_of_another_cell(empty: Store, lines: list[str], tmp_path: Path) -> None:
    uid = json.loads(lines[1])["runs"][0]["uid"]
    file = put(tmp_path, "".join(lines[:2]) + resealed(changed(lines[2], lambda c: c["runs"][0].update(uid=uid))))
    unchanged(empty, file, f"{{}}:3: run {uid} is also in line 2")
    last = file.read_text().splitlines()[2]
    import_(empty, put(tmp_path, "".join([lines[0].replace("2", "1", 1), lines[1]])))
    file = put(tmp_path, "".join([lines[0].replace("2", "1", 1), last]))
    unchanged(empty, file, f"{{}}:2: contradicts what is here: run {uid} is of cell a; nothing was imported")


def test_what_is_taken_in_is_what_was_checked(
    empty: Store, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All identities are checked before the first cell. The file may be another by then."""
    monkeypatch.setattr(exchange, "BATCH", 1)
    file = put(tmp_path, "".join(lines))
    with pytest.raises(ExchangeError, match=r"cell b: its id does not match its settings \(a\)"):
        import_(empty, file, identify=lambda spec: "a")
    assert empty.cells() == {}
    documents = io.BytesIO()
    checked = exchange.check(empty, file, target=documents)
    file.write_text("another")
    documents.seek(0)
    assert exchange.take(empty, checked, documents)["new cells"] == 2


@pytest.mark.promise("Input", "With `--skip-bad`, bad lines are named and left out")
def test_bad_lines_are_named_and_left_out(store: Store, empty: Store, lines: list[str], tmp_path: Path) -> None:
    """A line that is no JSON, one with a field too many, one that contradicts the database; the good one is taken."""
    fill(store)
    text = exported(store).splitlines(keepends=True)
    import_(empty, put(tmp_path, "".join(text)))
    edited = changed(text[1], lambda c: c["stages"][0]["numbers"][0].__setitem__(3, 7.5))
    other = changed(lines[2], lambda c: c.update(cell="c"))
    whole = [text[0].replace("2", "5", 1), edited, "no\n", changed(other, lambda c: c.update(colour="red")), other]
    file = put(tmp_path, "".join(whole))
    bad: list[str] = []
    documents = io.BytesIO()
    checked = exchange.check(empty, file, problems=bad, target=documents)
    assert checked.bad == {2, 3, 4}
    assert [message.removeprefix(str(file)) for message in bad] == [
        ":2: cell a train: loss of round 1 is 7.5 (n=0) there and 2.5 (n=0) here",
        ":3: not JSON (Expecting value at column 1)",
        ":4: colour: Extra inputs are not permitted",
        ": ends after 4 of 5 cells: it is truncated",
    ]
    documents.seek(0)
    assert exchange.take(empty, checked, documents)["new cells"] == 1
    assert sorted(empty.cells()) == ["a", "b", "c"]


def test_an_import_waits_for_who_claims_a_stage_of_the_cell(store: Store, tmp_path: Path) -> None:
    """On a server `claim` locks the cell's row, and so does an import; another cell's it does not wait for."""
    if store.database.path is not None:
        pytest.skip("SQLite has one writer")
    fill(store)
    file = put(tmp_path, exported(store, ["a"]))
    documents = io.BytesIO()
    checked = exchange.check(None, file, target=documents)  # as if its line were not known
    at = store.database._engine.url
    at = at.update_query_dict({"options": f"{at.query.get('options', '')} -c lock_timeout=200"})
    with Store.open(at.render_as_string(hide_password=False)) as impatient:
        for cell, waits in (("b", False), ("a", True)):
            with store.database.writing() as connection:
                connection.execute(select(CELLS.c.id).where(CELLS.c.id == cell).with_for_update(key_share=True))
                with pytest.raises(FatbenchError, match="lock timeout") if waits else contextlib.nullcontext():
                    documents.seek(0)
                    exchange.take(impatient, checked, documents)


@pytest.mark.promise("Input", "An import lets other processes write in between")
def test_an_import_lets_others_write_in_between(empty: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """250 cells are 3 transactions; an error in the third leaves 200 and says so; the same import goes on."""
    with Store.open(str(tmp_path / "many.db"), create=True) as many:
        many.add_cells({f"c{i:03d}": {"seed": i} for i in range(250)})
        file = put(tmp_path, exported(many))
    taken: list[int] = []
    take = exchange.take_in

    def counted(connection: Any, cells: Any, *rest: Any) -> None:
        with Store.open(str(empty.database.path)) as reader:
            taken.append(len(reader.cells()))
        take(connection, cells, *rest)
        if any(cell.cell == "c240" for _, cell in cells):
            raise exchange.ExchangeError("c240: somebody wrote it in the meantime; nothing was imported")

    monkeypatch.setattr(exchange, "take_in", counted)
    with pytest.raises(ExchangeError, match=r"in the meantime; 200 cells before it were imported$"):
        import_(empty, file)
    assert taken == [0, 100, 200]
    assert len(empty.cells()) == 200
    monkeypatch.undo()
    assert import_(empty, file)["new cells"] == 50


# --- files -------------------------------------------------------------------------------------------------------


def test_a_file_is_whole_or_not_there(empty: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(empty)
    file = tmp_path / "out" / "results.jsonl"
    with pytest.raises(MachineError, match=f"^cannot write {re.escape(str(file))}: No such file or directory$"):
        exchange.export(empty, file)
    file.parent.mkdir()
    assert exchange.export(empty, str(file)) == 2
    assert file.read_text(encoding="utf-8") == exported(empty)

    def full(*_: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(exchange, "_exported", full)
    before = file.read_bytes()
    with pytest.raises(MachineError, match="No space left on device"):
        exchange.export(empty, file)
    assert file.read_bytes() == before
    assert [p.name for p in file.parent.iterdir()] == ["results.jsonl"]


def test_a_file_that_cannot_be_read(empty: Store, tmp_path: Path) -> None:
    for file, reason in ((tmp_path / "no.jsonl", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(MachineError, match=f"^cannot read {re.escape(str(file))}: {reason}$"):
            import_(empty, file)


def test_a_stage_nobody_ran(store: Store, other: Store, tmp_path: Path) -> None:
    """A row without a run (no command makes one yet) travels too."""
    store.add_cell("a", {"seed": 1})
    store.release(claim(store, "a", "train"))
    with store.database.writing() as connection:
        connection.execute(update(STAGES).values(status="todo", run=None))
    text = exported(store)
    import_(other, put(tmp_path, text))
    assert exported(other) == text
    assert claim(other, "a", "train")


# --- values and outcomes -----------------------------------------------------------------------------------------


def attacked(store: Store, value: float = 0.5, **more: Any) -> None:
    """A cell of two rounds and two clients whose PGD-20 accuracy over 8 images is 4 of 8."""
    spec = {"seed": 1, "algorithm": {"rounds": 2}, "partition": {"clients": 2}, "test": 8}
    store.add_cell("a", spec)
    run = claim(store, "a", "train")
    numbers = [Number("train_accuracy", 0.5, 2, 9), Number("train_accuracy", 0.25, 2, 9, 1), Number("seconds", 3.0, 2)]
    numbers += [Number("monitor", 0.125, 1, 8), Number("monitor", 0.375, 2, 8)]
    store.finish(run, numbers, round=2, record={"best-test": {"round": 2, "value": 0.375}})
    run = claim(store, "a", "pgd20-0a1b2c3d@2")
    store.commit(run, round=8, outcomes=(0, 8, b"\x0f"))
    store.finish(run, [Number("pgd20", value, 2, 8), Number("prior_accuracy", 0.5, 2, 8, 0)])


FORGED = [
    ('"pgd20",0.5,8', '"pgd20",0.51,8', "pgd20-0a1b2c3d@2: pgd20 is 0.51, its outcomes say 0.5 (4 of 8)"),
    ('"run":0', '"run":1', "pgd20-0a1b2c3d@2: its run is one of train"),
    ('"train_accuracy",0.25', '"train_accuracy",0.5',
     "train: its digest does not match its numbers or outcomes: was it edited?"),
]  # fmt: skip


@pytest.mark.parametrize(("true", "forged", "said"), FORGED)
def test_a_value_that_its_outcomes_contradict(tmp_path: Path, empty: Store, true: str, forged: str, said: str) -> None:
    """The line is named, and nothing is taken in, though its digests fit; test_problems.py has every rule."""
    with Store.open(with_attacked(tmp_path / "true.db")) as store:
        text = as_rows(exported(store))
    assert text.count(true)
    edited = text.replace(true, forged)
    unchanged(empty, put(tmp_path, edited if "digest" in said else resealed(edited)), f"{{}}:2: cell a {said}")


def test_an_edited_database_is_neither_whole_nor_exported(tmp_path: Path) -> None:
    path = with_attacked(tmp_path / "x.db")
    assert "is intact" in check(path)
    judged = "SELECT id FROM round_metrics WHERE metric = 'pgd20'"
    edit(path, f"UPDATE numbers SET value = 0.51 WHERE round_metric IN ({judged})")
    said = "pgd20 is 0.51, its outcomes say 0.5 (4 of 8); cell a pgd20-0a1b2c3d@2: its digest does not match"
    said += " its numbers or outcomes: was it edited?"
    with pytest.raises(DatabaseError, match=f"is damaged: cell a pgd20-0a1b2c3d@2: {re.escape(said)}$"):
        check(path)
    with Store.open(path) as store, pytest.raises(DatabaseError, match="cell a pgd20-0a1b2c3d@2 is damaged"):
        exported(store)
    for command in (["show", "a"], ["export", "--format", "csv"]):
        result = CliRunner().invoke(app, [*command, "--db", path])
        assert isinstance(result.exception, DatabaseError) and said.partition(";")[0] in str(result.exception)


@pytest.mark.parametrize("command", [["show", "a"], ["export", "--format", "csv"]])
def test_no_command_ends_in_a_traceback_on_a_damaged_record(tmp_path: Path, command: list[str]) -> None:
    """Text that is no JSON any more, wherever it is read first: the same sentence as that of `db check`."""
    path = with_attacked(tmp_path / "x.db")
    columns = {"cells": "spec", "runs": "extra = '{\"a\"(1}', versions", "stages": "record"}
    edit(path, *(f"UPDATE {table} SET {column} = '{{\"a\"(1}}'" for table, column in columns.items()))
    result = CliRunner().invoke(app, [*command, "--db", path])
    assert isinstance(result.exception, DatabaseError), result.exception
    assert re.search(r"x\.db is damaged: cells a to a: it cannot be read \(Expecting", str(result.exception))


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.nightly)])
def test_no_flipped_bit_of_the_header_of_a_database_is_a_traceback(step: int, tmp_path: Path) -> None:
    """SQLite reads the first 100 bytes when it connects: some bits it does without, all others are a message."""
    path, said = tmp_path / "x.db", set()
    Store.open(str(path), create=True).close()
    content = path.read_bytes()
    for place in range(0, 800, step):
        put_database(path, flipped(content, place))
        try:
            Store.open(str(path)).close()
        except FatbenchError as error:
            said.add(str(error).partition("x.db ")[2])
    assert "is damaged: unsupported file format" in said and "is not a fatbench database, nor any SQLite file" in said


FLIPS = [40, pytest.param(2000, marks=pytest.mark.nightly)]


@pytest.mark.parametrize("flips", FLIPS)
def test_no_flipped_bit_of_a_database_is_called_intact(flips: int, tmp_path: Path) -> None:
    """The export says the same, or is refused in a sentence; then `db check` says that the file is damaged."""
    path = tmp_path / "x.db"
    with Store.open(with_attacked(path)) as store:
        store.store_points([Point("other", "quick", "a", method="FAT", evaluations=("pgd20-x",))])
        text = exported(store)
    content, draws, other = path.read_bytes(), random.Random(32), 0
    places = [draws.randrange(8 * len(content)) for _ in range(20 * flips)]
    used = [place for place in places if any(content[max(0, place // 8 - 4) : place // 8 + 5])][:flips]
    assert len(used) == flips
    for place in used:
        put_database(path, flipped(content, place))
        try:
            with Store.open(str(path)) as store:
                found = exported(store)
            assert found == text, f"bit {place} changes what is exported"
            same = True
        except FatbenchError:  # `check` must say it too
            same = False
        other += not same
        try:
            whole = "is intact" in check(str(path))
        except FatbenchError:
            whole = False
        assert same or not whole, f"bit {place} changes what is read, and the database is called intact"
    assert other > flips / 4


@pytest.mark.parametrize("flips", FLIPS)
def test_no_flipped_bit_of_a_file_is_imported(flips: int, tmp_path: Path) -> None:
    """What is taken in of a file with a flipped bit says the same as before."""
    with Store.open(with_attacked(tmp_path / "x.db")) as store:
        text = exported(store)
    content, draws, refused = text.encode(), random.Random(32), 0
    file = tmp_path / "results.jsonl"
    for place in draws.sample(range(8 * len(content)), flips):
        file.write_bytes(flipped(content, place))
        url = str(tmp_path / f"{place}.db")
        with Store.open(url, create=True) as store:
            try:
                import_(store, file, identify=lambda spec: "a")
                taken = exported(store)
            except ExchangeError:
                refused += 1
                continue
        assert taken == text, f"bit {place}"
    assert refused > flips / 4


@pytest.mark.parametrize(("content", "is_one"), [(b"{", True), (b'{"cells":1}', True), (b"", False), (b"SQL{", False)])
def test_an_export_begins_with_a_brace(content: bytes, is_one: bool, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    assert exchange.is_export(tmp_path / "x") is is_one
    with pytest.raises(MachineError, match=r"cannot read .*y: No such file"):
        exchange.is_export(tmp_path / "y")


def test_lines_come_a_hundred_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line is no cell; a part ends with the line that goes beyond PART characters."""
    head = json.dumps({"format": "fatbench results", "schema_version": 1, "cells": 205}) + "\n"
    file = put(tmp_path, head + "12345678\n" * 205)
    with exchange.read_parts(file) as (promised, _, parts):
        found = list(parts)
    assert promised == 205 and [len(part) for part in found] == [100, 100, 5]
    assert [number for part in found for number, _ in part] == list(range(2, 207))
    assert {line for part in found for _, line in part} == {"12345678\n"}
    monkeypatch.setattr(exchange, "PART", 27)
    with exchange.read_parts(file) as (_, _, parts):
        assert [len(part) for part in parts] == [4] * 51 + [1]
    assert (exchange.BATCH, exchange.LINE) == (100, 2**26)


EDITED = {  # what is edited: where the message of the export says so; a NULL is beyond what SQLite would write
    "UPDATE stages SET status = 'dond' WHERE stage = 'train'": r"CHECK constraint failed in stages",
    "UPDATE runs SET status = 'dond' WHERE stage = 'train'": r"CHECK constraint failed in runs",
    "UPDATE stages SET digest = NULL WHERE stage = 'train'": r"a train is damaged: it is finished and has no digest",
    "UPDATE stages SET stage = 'train' || char(1) WHERE stage = 'train'": r"cell a: stages\.1\.stage: String",
    "UPDATE stages SET cell = 'c' WHERE cell = 'b'": r"stages refers to missing cells",
    "UPDATE points SET cell = 'c'": r"points refers to missing cells",
    "UPDATE runs SET cell = 'c'": r"runs refers to missing cells",
    "UPDATE cells SET id = 'c' WHERE id = 'a'": r"refers to missing cells",
    "UPDATE runs SET started = 'late' WHERE cell = 'b'": r"cell b: runs\.0\.started: String should match pattern",
    "UPDATE runs SET uid = 'x' WHERE cell = 'b'": r"cell b: runs\.0\.uid",
    "UPDATE cells SET created = 'late' WHERE id = 'b'": r"cell b: created",
    "UPDATE stages SET stage = 'train@' WHERE cell = 'b'": r"cell b: stages\.0\.stage",
    "UPDATE round_metrics SET created = 'late' WHERE cell = 'b'": r"cell b: stages\.0\.numbers\.0\.5",
    "INSERT INTO cells SELECT 'a~1', spec, seed, created FROM cells WHERE id = 'a'": r"cell a~1 is named as a rep",
    "INSERT INTO replicates VALUES ('b', 'a', 1)": r"replicate b is recorded as number 1 of a",
}


@pytest.mark.parametrize("statement", EDITED)
def test_every_column_of_an_export_is_checked(statement: str, tmp_path: Path) -> None:
    """Of a finished stage its digest covers all; its keys, and the fields of what is not finished, are looked at."""
    path = with_attacked(tmp_path / "x.db")
    with Store.open(path) as store:
        store.add_cell("b", {"seed": 1})
        run = claim(store, "b", "train")
        store.commit(run, numbers=[Number("loss", 2.5, 1)], round=1, checkpoint="s1")
        store.store_points([Point("other", "quick", "a", method="FAT", evaluations=("pgd20-x",))])
    assert edit(path, statement)
    with Store.open(path) as store, pytest.raises(DatabaseError, match=EDITED[statement]) as refused:
        exported(store)
    assert "None" not in str(refused.value)  # the address, where it is said


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE cells SET seed = 2", "cell a: its seed is recorded as 2, but is 1"),
        ("UPDATE stages SET heartbeat = 'late'", "cell a pgd20-0a1b2c3d@2: its heartbeat is not a time"),
    ],
)
def test_what_no_line_says_is_checked_too(statement: str, message: str, tmp_path: Path) -> None:
    path = with_attacked(tmp_path / "x.db")
    edit(path, statement)
    with pytest.raises(DatabaseError, match=f"is damaged: {message}"):
        check(path)


def test_long_lines_are_judged_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of many long bad lines ends it before the others are read; a line without an end is refused by name."""
    head = json.dumps({"format": "fatbench results", "schema_version": 1, "cells": 9}) + "\n"
    monkeypatch.setattr(exchange, "PART", 1000)
    file = tmp_path / "long.jsonl"
    file.write_text(head + ("x" * 2000 + "\n") * 9)
    read: list[int] = []
    real = exchange.translated
    monkeypatch.setattr(exchange, "translated", lambda line, *said: (read.append(len(line)), real(line, *said))[1])
    with exchange.read_parts(file) as (_, _, parts):
        assert [len(part) for part in parts] == [1] * 9
    with pytest.raises(exchange.ExchangeError, match=r"long\.jsonl:2: "):
        exchange.check(None, file)
    assert read == [2001]
    monkeypatch.setattr(exchange, "LINE", 1500)
    with pytest.raises(exchange.ExchangeError, match=r"long\.jsonl:2: a line of more than 1500 characters is no cell"):
        exchange.check(None, file)


def test_sentences_in_the_names_of_older_numbers_become_codes(store: Store, other: Store, tmp_path: Path) -> None:
    """An exported file of before is taken in under the names of now, also twice; nothing else in it changes."""
    names = {
        "flag_training_diverged_in_round_4,_so_accuracy_is_that_of_the_most_frequent_class": ("doubt_diverged", 4.0),
        "flag_12_uploads_were_not_finite_and_were_left_out": ("doubt_uploads_refused", 12.0),
        "flag_a_b_in_5_rounds": ("doubt_a_b_in_rounds", 5.0),
        "flag_outputs_are_not_finite": ("doubt_outputs_are_not_finite", 1.0),
        "flags": ("flags", 1.0),
    }
    store.add_cell("a", {"seed": 1})
    store.finish(claim(store, "a", "pgd20-x@7"), [Number(name, 1.0, 7) for name in names])
    file = put(tmp_path, exported(store))
    for _ in range(2):
        import_(other, file)
        assert {(row["metric"], row["value"]) for row in other.measurements()} == {*names.values()}
    text = exported(other)
    assert "flag_" not in text
    assert json.loads(text.splitlines()[1])["runs"] == json.loads(exported(store).splitlines()[1])["runs"]


@pytest.mark.parametrize("label", ["SFAT", "FAT"])
def test_labels_that_a_suite_does_not_give_are_said_when_a_file_is_imported(label: str, tmp_path: Path) -> None:
    """Digests do not cover them: who edits a label moves a number to another row of a table."""
    file = tmp_path / "edited.jsonl"
    with packed.read_text(Path(__file__).parent.parent / "results" / "sfat-fashion-cpu.jsonl.xz") as stream:
        file.write_text(stream.read().replace('"method":"SFAT"', f'"method":"{label}"'))
    (summary,), _, found = api.take_in([file], str(tmp_path / "x.db"), None)
    said = r"sfat-fashion, preset cpu: method of cell \w+ is 'FAT' in the file and 'SFAT' in the suite, and 7 more"
    assert summary["cells"] == 31 and len(found) == (label != "SFAT")
    assert all(re.fullmatch(said, sentence) for sentence in found)
