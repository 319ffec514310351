"""What grows with the work grows no faster than it, and what can be large is not held at once."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fatbench.engine.rounds import Number
from fatbench.store import export_lines, jsonl
from fatbench.store.stages import Store


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url, create=True) as opened:
        yield opened


def peak(act: Callable[[], object]) -> float:
    """Megabytes that Python's objects take at most while something is done."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def numbered(store: Store, rounds: int, clients: int) -> int:
    """The run of a cell that has a number of each client in each round."""
    store.add_cell("a", {"seed": 0})
    run = store.claim("a", "train", suite="s", total=rounds, provenance={})
    assert run is not None
    for t in range(1, rounds + 1):
        store.commit(run, numbers=[Number("loss", k / t, t, 1, k) for k in range(clients)], round=t)
    return run


def test_the_end_of_a_stage_streams(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "a.db"), create=True) as store:
        run = numbered(store, 60, 500)
        last = [Number("accuracy", 0.5, 60)]
        assert peak(lambda: store.finish(run, last, round=60)) < 5  # 60 MB for all
        with store.database.reading() as connection:
            (line,) = export_lines.lines(connection, ["a"])
        assert len(line["stages"][0]["numbers"]) == 30_001
        assert not list(export_lines.mismatches(line))
        stream = io.StringIO()
        assert peak(lambda: jsonl.export(store, stream)) < 12  # of which the text is 4
        assert len(stream.getvalue()) > 1e6


def test_others_write_while_a_digest_is_made(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are there are read before the transaction that ends the stage, and those alone."""
    run = numbered(store, 3, 2)
    rounds, asked = export_lines.rounds, []

    def other(connection, cell, stage, first=0, end=None):
        asked.append((first, end))
        if end is not None:
            store.add_cell("b", {"seed": 1})
        return rounds(connection, cell, stage, first, end)

    monkeypatch.setattr(export_lines, "rounds", other)
    store.finish(run, [Number("accuracy", 0.5, 3)], round=3)
    assert asked == [(0, 3), (3, None)] and set(store.cells()) == {"a", "b"}
    with store.database.reading() as connection:
        (line, _) = export_lines.lines(connection, ["a", "b"])
    assert not list(export_lines.mismatches(line))


def test_a_stage_without_last_numbers_is_read_before(store: Store) -> None:
    store.finish(numbered(store, 3, 2), round=3)
    with store.database.reading() as connection:
        (line,) = export_lines.lines(connection, ["a"])
    assert len(line["stages"][0]["numbers"]) == 6 and not list(export_lines.mismatches(line))
