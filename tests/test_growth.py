"""What grows with the work grows no faster than it, and what can be large is not held at once."""

from __future__ import annotations

import errno
import io
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import data_layouts as layouts
import numpy as np
import pytest
import torch

from fatbench import settings
from fatbench.data import DATASETS, common, decoded
from fatbench.engine.mapped import MappedImages
from fatbench.engine.rounds import Number
from fatbench.engine.setup import Runtime, setup
from fatbench.errors import MachineError
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


# --- images of files ---------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two classes of 40 training and 10 test images each, decoded into a cache of their own however small they are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(decoded, "SMALL", 0)
    folder = layouts.write_image_folder(tmp_path / "mine", n=40)
    for name, red in (("ant", 20), ("bee", 220)):
        for i in range(9):
            layouts.save(folder / "test" / name / f"{i}.png", (12, 12), (red, i, 2))
    return folder


def read_folder(folder: Path, *first: int | None):
    return DATASETS["image_folder"](folder.parent, first or (None, None), path=folder.name, size=12)


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were decoded."""
    files, pixels = [], decoded._pixels

    def counted(file, *rest):
        files.append(file)
        return pixels(file, *rest)

    monkeypatch.setattr(decoded, "_pixels", counted)
    return files


def test_only_the_images_that_are_wanted_are_decoded_and_once(images: Path, decodings: list[Path]) -> None:
    data = read_folder(images, 10, 6)
    assert len(data.train_images) == len(data.train_labels) == 10 and len(data.test_images) == 6
    assert len(decodings) == 16
    again = read_folder(images, 10, 6)
    assert len(decodings) == 16 and again.fingerprint == data.fingerprint
    assert isinstance(again.train_images, np.memmap) and (again.train_images == data.train_images).all()
    every = read_folder(images)
    assert (every.train_images[:10] == data.train_images).all() and (every.test_images[:6] == data.test_images).all()
    assert every.fingerprint != data.fingerprint and len(every.train_images) > 10


def test_an_array_is_found_by_what_its_files_hold(images: Path, decodings: list[Path]) -> None:
    """A file that is replaced by another of its time and size is decoded anew; one with another name only is not."""
    before, count = read_folder(images), len(decodings)
    one, other = sorted((images / "train").glob("*/*"))[:2]
    padded = [file.read_bytes() for file in (one, other)]
    longest = max(map(len, padded))
    for file, data in zip((one, other), padded, strict=True):
        file.write_bytes(data + bytes(longest - len(data)))
        os.utime(file, (0, 0))
    same = read_folder(images)
    assert (same.train_images == before.train_images).all() and len(decodings) == 2 * count
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    for file in (one, other):
        os.utime(file, (0, 0))
    changed = read_folder(images)
    assert not (changed.train_images == before.train_images).all() and changed.fingerprint != same.fingerprint


def test_in_memory_and_in_the_cache_are_the_same(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = read_folder(images)
    monkeypatch.setattr(decoded, "SMALL", 1 << 30)
    held = read_folder(images)
    assert not isinstance(held.train_images, np.memmap) and held.fingerprint == mapped.fingerprint
    assert (held.train_images == mapped.train_images).all() and (held.test_images == mapped.test_images).all()


def test_all_damaged_files_are_named_before_any_is_decoded(images: Path, decodings: list[Path]) -> None:
    files = sorted((images / "train").glob("*/*"))
    for file in (files[3], files[50]):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    files[60].write_bytes(b"text")
    with pytest.raises(common.DamagedData, match="not an image") as refused:
        read_folder(images)
    assert (
        all(str(files[i]) in str(refused.value) for i in (3, 50, 60)) and str(refused.value).count("not an image") == 3
    )
    assert len([file for file in decodings if file not in files]) == 0


def test_what_ends_decoding_ends_it_soon(images: Path, decodings: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, or a worker that is asked to stop: what is left of a set is not decoded, and nothing stays behind."""
    monkeypatch.setattr(decoded, "CHUNK", 2)

    def stop(what: str, done: int, n: int) -> None:
        if what.startswith("decoding"):
            raise decoded.Interrupted

    with decoded.progress(stop), pytest.raises(decoded.Interrupted):
        read_folder(images)
    assert 0 < len(decodings) < 70
    assert not list((settings.cache_folder() / "decoded").glob(".decoding-*"))


def test_without_room_in_the_cache_images_are_decoded_into_memory(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert not isinstance(read_folder(images).train_images, np.memmap)
    assert not list((settings.cache_folder() / "decoded").iterdir())
    monkeypatch.setattr(settings, "available_memory", lambda: 20_000.0)
    with pytest.raises(MachineError, match=r"decoded images take .* GB; .*decoded has .* GB left.*XDG_CACHE_HOME"):
        read_folder(images)


def test_a_cell_reads_a_mapped_set_as_one_in_memory(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same images in every place, and those of training are not copied."""

    def made(**settings):
        def halves(labels, rng, writers):
            return np.array_split(rng.permutation(len(labels)), 2)

        def reader(root, first=(None, None)):
            return DATASETS["image_folder"](root, first, path=images.name, size=12)

        runtime = Runtime(images.parent, torch.device("cpu"))
        model = lambda shape, classes: torch.nn.Linear(1, 1)  # noqa: E731
        return setup(runtime, seed=0, data=reader, partition=halves, model=model, **settings)

    how = {"train": 40, "train_from": 3, "test": 20, "validation": 8, "client_holdout": 0.2}
    mapped = made(**how)
    monkeypatch.setattr(decoded, "SMALL", 1 << 30)
    held = made(**how)
    assert isinstance(mapped.problem.images, MappedImages) and isinstance(held.problem.images, torch.Tensor)
    assert mapped.problem.images.shape == held.problem.images.shape and len(mapped.problem.images) == 32
    for mine, other in zip(mapped.problem.shards, held.problem.shards, strict=True):
        assert torch.equal(mapped.problem.images[mine], held.problem.images[other])
    grid = mapped.problem.shards[0][:4].reshape(2, 2)
    assert torch.equal(mapped.problem.images[grid], held.problem.images[grid])
    assert torch.equal(mapped.problem.images[:5], held.problem.images[:5])
    assert torch.equal(mapped.problem.labels, held.problem.labels)
    for part in ("test", "validation"):
        assert all(torch.equal(a, b) for a, b in zip(getattr(mapped, part), getattr(held, part), strict=True))
