"""The document of two of one cell: idempotent, commutative where stages are finished, and never less than either."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fatbench.store import cell_records, jsonl
from fatbench.store.document import Cell, ExchangeError, as_line, digest, document, sealed
from fatbench.store.merge import contradiction, is_further, merge
from fatbench.store.old_files import UNVERIFIED
from fatbench.store.problems import problems
from fatbench.store.stages import Store

TIME = "2026-01-31T00:00:0{}.000Z"
STAGES = ("pgd20-0a@3", "train")


def run(uid: int, stage: str, ended: bool = True) -> dict[str, Any]:
    status = "done" if ended else "interrupted"
    return {
        "uid": f"{uid:032x}", "stage": stage, "suite": "s", "preset": None, "status": status,
        "started": TIME.format(uid % 10), "ended": TIME.format(9) if ended else None, "host": None, "pid": None,
        "device": None, "precision": None, "commit": None, "dirty": None, "versions": None, "log": None, "error": None,
        "extra": {},
    }  # fmt: skip


def cell(stages: list[dict[str, Any]], runs: list[dict[str, Any]]) -> Cell:
    value = {"cell": "a", "spec": {"seed": 1}, "created": TIME.format(0), "runs": runs, "stages": stages}
    return sealed(document(value, "a"))


def stage(name: str, numbers: list[Any], run: int | None = 0, status: str = "done", **more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"round": 3, "total": 3, "record": {}, "error": None, "outcomes": []}
    return {"stage": name, "status": status, "run": run, "numbers": sorted(numbers), **fields, **more}


@st.composite
def histories(draw: st.DrawFn, finished: bool) -> tuple[Cell, Cell]:
    """Two documents of one cell, which know different parts of the same runs."""
    uids = {name: draw(st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True)) for name in STAGES}
    uids["train"] = [uid + 10 for uid in uids["train"]]
    keys = st.tuples(st.sampled_from(STAGES), st.integers(1, 3), st.integers(-1, 2), st.sampled_from("vw"))
    values = st.tuples(st.floats(-10, 10), st.integers(0, 9), st.integers(0, 2))
    truth = draw(st.dictionaries(keys, values, max_size=12))
    bits = draw(st.binary(min_size=1, max_size=3))
    documents = []
    for _ in range(2):
        runs, stages = [], []
        for name in draw(st.sets(st.sampled_from(STAGES), min_size=1)):
            known = sorted(draw(st.sets(st.sampled_from(uids[name]), min_size=1)) | {uids[name][0]})
            is_done = finished or draw(st.booleans())
            runs += [run(uid, name, is_done) for uid in known]
            owner = runs.index(run(uids[name][0], name, is_done))
            rounds = 3 if is_done else draw(st.integers(0, 3))
            numbers = [
                [round, client, metric, value, n, owner, TIME.format(1)]
                for (of, round, client, metric), (value, n, _) in truth.items()
                if of == name and round <= rounds and draw(st.booleans())
            ]
            size = 8 * len(bits) if is_done else draw(st.integers(0, 8 * len(bits)))
            whole = base64.b64encode(bits[: (size + 7) // 8]).decode()
            outcomes = [[0, size, whole]] if name != "train" and size % 8 == 0 and size else []
            status = "done" if is_done else "interrupted"
            examples = sum(n for _, n, _ in outcomes)  # of an evaluation, whose rounds they are
            progress = rounds if name == "train" else examples
            stages.append(stage(name, numbers, owner, status, round=progress, outcomes=outcomes))
        documents.append(cell(stages, runs))
    return documents[0], documents[1]


def keys(one: Cell, name: str) -> set[tuple[Any, ...]]:
    found = one.by_stage.get(name)
    return set() if found is None else {(*row[:5], one.runs[row[5]].uid) for row in found.rows}


@given(histories(finished=False))
def test_the_same_twice_changes_nothing(pair: tuple[Cell, Cell]) -> None:
    once = merge(*pair)
    assert merge(once, pair[1]) == once and merge(once, once) == once and merge(once, pair[0]) == once


@given(histories(finished=True))
def test_where_all_is_finished_the_order_does_not_matter(pair: tuple[Cell, Cell]) -> None:
    here, there = pair
    assert contradiction(here, there) is contradiction(there, here) is None
    assert as_line(merge(here, there)) == as_line(merge(there, here))
    for name in STAGES:
        assert keys(merge(here, there), name) == keys(here, name) | keys(there, name)


@given(histories(finished=False))
def test_nothing_that_is_finished_is_lost(pair: tuple[Cell, Cell]) -> None:
    merged = merge(*pair)
    assert {one.uid for one in merged.runs} == {one.uid for part in pair for one in part.runs}
    for part in pair:
        for name, found in part.by_stage.items():
            if found.status == "done":
                assert merged.by_stage[name].status == "done" and keys(part, name) <= keys(merged, name)
                assert len(merged.by_stage[name].bits) >= len(found.bits)
    for found in merged.stages:
        assert found.digest == (digest(merged, found) if found.status == "done" else None)


@settings(max_examples=10)
@given(histories(finished=False))
def test_the_database_holds_what_merge_says(tmp_path_factory: pytest.TempPathFactory, pair: tuple[Cell, Cell]) -> None:
    """A file is imported where the other document is; importing it again, or the first, changes nothing."""
    folder = tmp_path_factory.mktemp("merge")
    head = '{"cells":1,"format":"fatbench results","schema_version":2}\n'
    files = [folder / "here.jsonl", folder / "there.jsonl"]
    for file, one in zip(files, pair, strict=True):
        file.write_text(head + as_line(one))
    with Store.open(str(folder / "a.db"), create=True) as store:
        for file in (*files, *files):
            jsonl.import_(store, file)
        with store.database.reading() as connection:
            (found,) = cell_records.read(connection, ["a"])
    assert found == merge(*pair) and not list(problems(found))


FURTHER = [  # (status, round, resumable, held) here, (status, round) there, whether there replaces here
    (("todo", 0, False, False), ("interrupted", 0), True),
    (("todo", 5, True, True), ("failed", 1), True),
    (("done", 1, False, False), ("done", 9), False),
    (("interrupted", 1, False, True), ("done", 9), False),
    (("interrupted", 1, False, False), ("done", 1), True),
    (("interrupted", 1, True, False), ("interrupted", 9), False),
    (("interrupted", 1, True, False), ("done", 9), True),
    (("interrupted", 1, False, False), ("interrupted", 2), True),
    (("interrupted", 2, False, False), ("interrupted", 2), False),
    (("failed", 3, False, False), ("interrupted", 2), False),
]


@pytest.mark.parametrize(("here", "there", "replaces"), FURTHER)
def test_what_is_further_replaces_what_cannot_go_on(here: Any, there: Any, replaces: bool) -> None:
    status, round, resumable, held = here
    mine = cell([stage("train", [], status=status, round=round)], [run(1, "train")])
    theirs = cell([stage("train", [], status=there[0], round=there[1])], [run(2, "train")])
    options: Any = ([mine.runs[0].uid] if held else [], ["train"] if resumable else [])
    assert is_further(mine, mine.stages[0], theirs.stages[0], *options) is replaces
    merged = merge(mine, theirs, *options).stages[0]
    assert (merged.status, merged.round) == (there if replaces else (status, round))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        ([1, 0, "loss", 0.5, 3], None),
        ([1, 0, "loss", 0.25, 3], "loss of client 0 of round 1 is 0.25 (n=3) there and 0.5 (n=3) here"),
        ([1, 0, "loss", 0.5, 4], "loss of client 0 of round 1 is 0.5 (n=4) there and 0.5 (n=3) here"),
        ([1, -1, "gain", 0.5, 3], "gain of round 1 is 0.5 (n=3) there and 0.75 (n=3) here"),
        ([1, -1, "seconds", 0.5, 4], None),
        ([2, 0, "loss", 0.25, 3], None),
        ([1, 1, "loss", 0.25, 3], None),
        ([1, 0, "gain", 0.25, 3], None),
    ],
)
def test_numbers_differ_in_value_or_n_and_never_in_wall_time(number: list[Any], said: str | None) -> None:
    numbers = [[1, 0, "loss", 0.5, 3], [1, -1, "gain", 0.75, 3], [1, -1, "seconds", 9.5, 4]]
    here = cell([stage("train", [[*row, 0, TIME.format(1)] for row in numbers])], [run(1, "train")])
    there = cell([stage("train", [[*number, 0, TIME.format(1)]])], [run(2, "train")])
    assert contradiction(here, there) == (None if said is None else f"train: {said}")


@pytest.mark.parametrize(
    ("chunks", "agrees"),
    [
        ([(0, 4, b"\xb0"), (4, 5, b"\x18")], True),
        ([(0, 4, b"\xb0")], True),
        ([(0, 8, b"\xb1")], True),
        ([], True),
        ([(0, 9, b"\xb1\x00")], False),
        ([(0, 1, b"\x00")], False),
        ([(0, 4, b"\xa0")], False),
        ([(0, 3, b"\xb0")], True),
    ],
)
def test_two_lists_of_outcomes_agree_where_both_cover(chunks: list[Any], agrees: bool) -> None:
    """1011 0001 1 in several cuts; a shorter list is compared as far as it goes, one without outcomes agrees."""

    def of(chunks: list[Any]) -> Cell:
        outcomes = [[start, n, base64.b64encode(bits).decode()] for start, n, bits in chunks]
        return cell([stage("pgd20-0a@3", [], outcomes=outcomes)], [run(1, "pgd20-0a@3")])

    whole = of([(0, 9, b"\xb1\x80")])
    for here, there in ((whole, of(chunks)), (of(chunks), whole)):
        assert (contradiction(here, there) is None) is agrees


def test_what_one_side_has_verified_is_verified() -> None:
    loss, doubt = [1, -1, "loss", 0.5, 0, 0, TIME.format(1)], [3, -1, UNVERIFIED, 1.0, 0, 0, TIME.format(1)]
    old, new = (cell([stage("train", numbers)], [run(1, "train")]) for numbers in ([loss, doubt], [loss]))
    assert as_line(merge(old, new)) == as_line(merge(new, old)) == as_line(new) and merge(old, old) == old


def test_what_is_here_word_for_word_is_known_by_its_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cell is read back for it; where one word is another, all is read and compared."""
    one = cell([stage("train", [[1, -1, "train_loss", 0.5, 8, 0, TIME.format(1)]])], [run(0, "train")])
    header = '{"cells":1,"format":"fatbench results","schema_version":2}\n'
    file, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    file.write_text(header + as_line(one))
    other.write_text(header + as_line(sealed(one.model_copy(update={"created": "2026-01-02T03:04:05.679Z"}))))
    with Store.open(str(tmp_path / "x.db"), create=True) as store:
        jsonl.import_(store, file)
        read: list[Any] = []
        real = cell_records.read
        monkeypatch.setattr(cell_records, "read", lambda *args, **how: read.append(args) or real(*args, **how))
        counts = jsonl.import_(store, file)
        assert (counts["numbers already here"], counts["new numbers"], read) == (1, 0, [])
        jsonl.import_(store, other)
        assert read
        file.write_text(file.read_text().replace("0.5", "0.25"))
        with pytest.raises(ExchangeError, match="its digest does not match its numbers"):
            jsonl.import_(store, file)
