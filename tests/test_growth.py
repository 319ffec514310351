"""What grows with the work grows no faster than it, and what can be large is not held at once."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import subprocess
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import data_layouts as layouts
import numpy as np
import pytest
import torch
from pandas import DataFrame
from stored import claimed, finished

from fatbench import settings, testing
from fatbench.data import DATASETS, common, decoded, own
from fatbench.engine import filed
from fatbench.engine.filed import FiledTensors
from fatbench.engine.mapped import MappedImages
from fatbench.engine.rounds import Number, State
from fatbench.engine.setup import Runtime, setup
from fatbench.errors import MachineError
from fatbench.methods.algorithms import ALGORITHMS
from fatbench.report.figures import series
from fatbench.report.numbers.sources import Source
from fatbench.runner import checkpoints, worker
from fatbench.runner.jobs import Job, Machine
from fatbench.store import cell_records, document, jsonl
from fatbench.store.problems import problems
from fatbench.store.stages import Store
from fatbench.suite import cells, cost


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
    run = claimed(store, "a", "train", total=rounds, spec={"seed": 0})
    for t in range(1, rounds + 1):
        store.commit(run, numbers=[Number("loss", k / t, t, 1, k) for k in range(clients)], round=t)
    return run


def read_whole(store: Store) -> int:
    """How many numbers cell a's first stage has, of which nothing is wrong."""
    with store.database.reading() as connection:
        cell, *_ = cell_records.read(connection, [*store.cells()])
    assert not list(problems(cell))
    return len(cell.stages[0].rows)


def test_the_end_of_a_stage_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(str(tmp_path / "a.db"), create=True) as store:
        run = numbered(store, 20, 500)
        last = [Number("accuracy", 0.5, 20)]
        assert peak(lambda: store.finish(run, last, round=20)) < 5  # 20 MB for all
        assert read_whole(store) == 10_001
        stream = io.StringIO()
        assert peak(lambda: jsonl.export(store, stream)) < 9
    file = tmp_path / "a.jsonl"
    file.write_text(stream.getvalue())
    with Store.open(str(tmp_path / "b.db"), create=True) as other:
        assert peak(lambda: jsonl.import_(other, file)) < 10  # 15 MB for all
        again = io.StringIO()
        jsonl.export(other, again)
        assert again.getvalue() == stream.getvalue()
        assert jsonl.import_(other, file)["numbers already here"] == 10_001


def test_cells_are_read_one_at_a_time(tmp_path: Path) -> None:
    """For `db check`, which asks for a hundred."""
    with Store.open(str(tmp_path / "a.db"), create=True) as store:
        for cell in "abcdefgh":
            finished(store, cell, "train", [Number("loss", k / 3, 1, 1, k) for k in range(400)], spec={"seed": 0})
        with store.database.reading() as connection:
            lines = partial(cell_records.read, connection)
            few, many = (peak(lambda n=n: [None for _ in lines([*"abcdefgh"[:n]])]) for n in (2, 8))
    assert many < 1.3 * few


def test_what_is_here_is_known_and_not_taken_in(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell or its replicate. One that was edited in the file is seen."""
    store.finish(numbered(store, 3, 2), round=3)
    file = tmp_path / "a.jsonl"
    jsonl.export(store, file)
    known = {"cells": 1, "numbers already here": 6, "new numbers": 0, "new replicates": 0}
    assert len(jsonl.check(store, file).known) == 1 and known.items() <= jsonl.import_(store, file).items()
    with Store.open(str(tmp_path / "other.db"), create=True) as other:
        run = claimed(other, "a", "train", total=3, spec={"seed": 0})
        other.commit(run, numbers=[Number("loss", 7.0, 1, 1, 0)], round=1)
        assert jsonl.import_(other, file)["new replicates"] == 1
        assert len(jsonl.check(other, file).known) == 1 and known.items() <= jsonl.import_(other, file).items()
    file.write_text(file.read_text().replace("[1,[0,", "[1,[5,", 1))
    with pytest.raises(jsonl.ExchangeError, match="its digest does not match its numbers"):
        jsonl.import_(store, file)


def test_others_write_while_a_digest_is_made(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are there are read before the transaction that ends the stage, and those alone."""
    run = numbered(store, 3, 2)
    begin = cell_records.begin_sealing

    def other(*given: Any) -> document.Sealing:
        store.add_cell("b", {"seed": 1})
        return begin(*given)

    monkeypatch.setattr(cell_records, "begin_sealing", other)
    store.finish(run, [Number("accuracy", 0.5, 3)], round=3)
    assert set(store.cells()) == {"a", "b"} and read_whole(store) == 7


def test_a_stage_without_last_numbers_is_read_before(store: Store) -> None:
    store.finish(numbered(store, 3, 2), round=3)
    assert read_whole(store) == 6


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


def test_a_few_images_of_many_are_as_much_work_as_they_alone(
    images: Path, decodings: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reads = Path.read_bytes, []
    monkeypatch.setattr(Path, "read_bytes", lambda file: (reads.append(file), read(file))[1])
    few = read_folder(images, 10, 6)
    of_many = len(reads), len(decodings)
    kept = {*decodings}
    for file in {*images.glob("*/*/*.png")} - kept:
        file.unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(images / "other cache"))
    alone = read_folder(images)
    assert (len(reads), len(decodings)) == (2 * of_many[0], 2 * of_many[1]) and len(kept) == 16
    assert (few.train_images == alone.train_images).all() and few.fingerprint == alone.fingerprint


def test_workers_share_one_copy(images: Path) -> None:
    """Of a set that each of three processes reads whole there is one in memory, and none outside the file."""
    read = rf"""
import re, sys, pathlib
from fatbench.data import DATASETS, decoded
decoded.SMALL = 0
data = DATASETS["image_folder"](pathlib.Path({str(images.parent)!r}), path={images.name!r}, size=160)
print(sum(int(part.sum()) for part in (data.train_images, data.test_images)), flush=True)
sys.stdin.readline()
parts = re.findall(r"images\.npy\n(.*?)VmFlags", pathlib.Path("/proc/self/smaps").read_text(), re.DOTALL)
count = lambda name: sum(int(re.search(name + r": +(\d+)", part)[1]) for part in parts)
print(count("Pss"), count("Anonymous"), flush=True)
sys.stdin.readline()
"""
    start = partial(subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with contextlib.ExitStack() as ended:
        processes = [ended.enter_context(start([sys.executable, "-c", read])) for _ in range(3)]

        def said() -> list[str]:
            return [process.stdout.readline() for process in processes]

        assert len({*said()}) == 1
        for process in processes:
            process.stdin.write("all have read\n")
            process.stdin.flush()
        kilobytes = [[int(word) for word in line.split()] for line in said()]
        for process in processes:
            process.communicate("end\n")
    size = len([*images.glob("*/*/*.png")]) * 3 * 160**2 / 1024
    assert 0.95 * size < sum(shared for shared, _ in kilobytes) < 1.1 * size
    assert [own for _, own in kilobytes] == [0, 0, 0]


def test_what_was_not_used_for_a_month_goes_when_something_is_added(images: Path) -> None:
    kept, cached = read_folder(images, 10, 6), settings.cache_folder() / "decoded"
    read_folder(images, 12, 6)
    (cached / ".decoding-killed").mkdir()
    for place in cached.iterdir():
        os.utime(place, (0, 0))
    read_folder(images, 10, 6)  # is used
    read_folder(images, 14, 6)
    assert len(list(cached.iterdir())) == 2 and (read_folder(images, 10, 6).train_images == kept.train_images).all()


def test_an_array_is_found_by_what_its_files_hold(images: Path, decodings: list[Path]) -> None:
    """A file that is replaced by another of its time and size is decoded anew; one with another name only is not."""
    before, count = read_folder(images), len(decodings)
    files = sorted((images / "train").glob("*/*"))[:2]
    contents = [file.read_bytes() for file in files]

    def written(contents: list[bytes]) -> Any:
        for file, data in zip(files, contents, strict=True):
            file.write_bytes(data.ljust(max(map(len, contents)), b"\0"))
            os.utime(file, (0, 0))
        return read_folder(images)

    same = written(contents)
    assert (same.train_images == before.train_images).all() and len(decodings) == 2 * count
    changed = written(contents[::-1])
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
    said = str(refused.value)
    assert all(str(files[i]) in said for i in (3, 50, 60)) and said.count("not an image") == 3
    assert not {*decodings} - {*files}


def test_what_ends_decoding_ends_it_soon(images: Path, decodings: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, or a worker that is asked to stop: what is left of a set is not decoded, and nothing stays behind."""
    monkeypatch.setattr(decoded, "CHUNK", 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # one thread, which waits for the first word
    heard, pixels, total = threading.Event(), decoded._pixels, 100

    def waits(*given: Any) -> Any:
        if len(decodings) >= 2:
            heard.wait(5)
        return pixels(*given)

    monkeypatch.setattr(decoded, "_pixels", waits)

    def stop(what: str, done: int, n: int) -> None:
        if what.startswith("decoding"):
            threading.Timer(0.2, heard.set).start()
            raise decoded.Interrupted

    with decoded.progress(stop), pytest.raises(decoded.Interrupted):
        read_folder(images)
    assert 0 < len(decodings) < total
    assert not list((settings.cache_folder() / "decoded").glob(".decoding-*"))


def test_without_room_in_the_cache_images_are_in_memory(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# --- uploads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"fedgkt", "fedrbn", "fedvkd"}))  # slow ones
def test_an_algorithm_takes_uploads_from_a_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from memory, to the last bit."""
    results, written = [], []
    monkeypatch.setattr(filed, "FiledTensors", lambda *given: (written.append(1), FiledTensors(*given))[1])
    for share in (1.0, -1.0):
        monkeypatch.setattr(filed, "IN_MEMORY", share)
        assert not written
        results.append(testing._call_algorithm(testing.member("Algorithm", name)))
    assert written or name in ("fedsgd", "gradient_inversion"), "its clients send models"
    for held, in_file in zip(*results, strict=True):
        for part in ("state", "numbers", "updates"):
            assert testing.equal(held[part], in_file[part])


def test_of_uploads_in_a_file_none_is_in_memory(tmp_path: Path) -> None:
    def held() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10

    model = {"w": torch.ones(10_000_000), "n": torch.tensor(3), "b": torch.arange(6.0).reshape(2, 3).t().bfloat16()}
    keep, before = filed.keeper(model, 10**6), held()
    models = [keep(model) for _ in range(5)]
    assert held() - before < 40e6, "of 200 MB"
    assert all(testing.equal(one, model) for one in models)
    read = weakref.ref(models[0]["w"])  # not within assert, which keeps what it has computed
    assert read() is None, "what was read is not kept, whatever the allocator holds"
    places = [os.readlink(place) for place in Path("/proc/self/fd").iterdir() if place.is_symlink()]
    assert sum("fatbench" in place and "deleted" in place for place in places) == 1, "one file, without a name"


# --- checkpoints -------------------------------------------------------------------------------------------------


def test_a_state_is_written_as_safetensors_writes_it_and_not_copied(tmp_path: Path) -> None:
    from safetensors.torch import save

    kinds = ("int64", "float64", "float32", "int32", "bfloat16", "float16", "int16", "int8", "uint8", "bool")
    tensors = {f"{name}/~0 ö{i}": torch.arange(i + 3).to(getattr(torch, name)) for i, name in enumerate(kinds)}
    tensors |= {"b/": torch.empty(0), "a": torch.tensor(1.5), "z": torch.ones(1)}
    tensors["t"] = torch.arange(6.0).reshape(2, 3).t()
    header = {"cell": "ü", "round": 3}
    checkpoints._write(tmp_path / "s", tensors, header)
    known = {name: value.contiguous() for name, value in tensors.items()}
    assert (tmp_path / "s").read_bytes() == save(known, metadata={"fatbench": json.dumps(header)})
    many = {k: {"c": torch.zeros(250_000)} for k in range(40)}
    state = State(1, {"w": torch.zeros(2)}, {}, many)
    assert peak(lambda: checkpoints.save_state(tmp_path / "many", state)) < 5  # of 40 MB
    assert (tmp_path / "many").stat().st_size > 40e6
    same = checkpoints.load_state(tmp_path / "many", "cpu")
    assert torch.equal(same.clients[7]["c"], many[7]["c"])


def test_lines_of_many_clients_are_quantiles() -> None:
    rows = [
        (0, k, round, seed, float(k + more) if round == 1 else 1.0, (), "", "eps")
        for seed, more in enumerate((0, 2))
        for k in range(61)
        for round in (1, 2)
    ]
    line = series.Line({}, "loss", Source.parse("train:loss[*]"), None, [], 2, ("a", "b"))
    numbers = DataFrame(rows, columns=series.COLUMNS)
    lines = list(series._lines(line, numbers))
    names = ("least", "25 %", "median", "75 %", "largest")
    assert [line.heading for line in lines] == [f"loss, {name} of 61 clients" for name in names]
    assert [line.points[0].mean for line in lines] == [1.0, 16.0, 31.0, 46.0, 61.0]
    assert len(list(series._lines(line, numbers[numbers["client"] < 49]))) == 49


# --- memory ------------------------------------------------------------------------------------------------------


def cell(**more) -> dict:
    """A canonical cell on CIFAR-10 with SCAFFOLD, 10 clients, half of them in a round."""
    algorithm = {"name": "scaffold", "rounds": 2, "participation": 0.5, "aggregator": "samples"}
    algorithm["local"] = {"epochs": 1, "batch": 32, "lr": 0.1, "momentum": 0.9, "objective": "standard"}
    settings = {"data": "cifar10", "partition": {"name": "iid", "clients": 10}, "algorithm": algorithm, **more}
    return cells.canonical({"seed": 0, "model": {"name": "mlp"}, **settings})


def test_memory_is_counted_from_the_suite_alone(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = cost.memory_of(cell())
    size = 4 * cost.parameters(cell())
    assert one == cost.MemoryNeed(60_000 * 3072, size * 5, 2 * size * 5, size * 11)
    folder = {"name": "image_folder", "path": "nowhere", "size": 64}
    assert cost.memory_of(cell(data=folder, train=40, test=10)) is None  # its classes are not known
    with settings.data_in(images.parent):
        counted = cost.memory_of(cell(data={**folder, "path": images.name}, train=40, test=10))
    assert counted is not None and counted.data == 50 * 3 * 64**2
    beside = one.network + one.state  # uploads that take much of it lie in a file
    monkeypatch.setattr(cost, "available_memory", lambda: beside - 1)
    assert cost.memory_line([cell()]).endswith("free here: not enough")
    monkeypatch.setattr(cost, "available_memory", lambda: 1.5 * beside)
    assert "uploads in a file" in cost.memory_line([cell()])
    assert cost.memory_line([cell()], 2).endswith("free here: not enough for 2 workers")
    assert cost.memory_line([cell()]).endswith("free here")
    monkeypatch.setattr(cost, "available_memory", lambda: 9 * one.uploads)
    assert "uploads in a file" not in cost.memory_line([cell()]) and cost.memory_line([cell()], threshold=1e12) is None


def test_models_of_clients_and_their_own_images_count_in_a_plan() -> None:
    """FedBN with half of ten clients a round looks at 5 and then 7.5 models; held out images are looked at by each."""
    shared = ("rounds", "participation", "aggregator", "local")
    fedbn = {"name": "fedbn", **{key: value for key, value in cell()["algorithm"].items() if key in shared}}
    model = {"name": "resnet18"}
    one = cost.monitoring(cell(monitor="natural", test=100))
    many = cost.monitoring(cell(monitor="natural", test=100, algorithm=fedbn, model=model))
    assert many.forward == one.forward * (5 + 7.5) / 2
    held = cost.monitoring(cell(monitor="natural", test=100, train=500, client_holdout=0.2))
    assert held.forward == one.forward + 2 * 2 * 100


def test_memory_that_a_data_set_takes_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(root: Path, *, variant: str | None = None) -> None:
        raise MemoryError("Unable to allocate 1.40 GiB")

    monkeypatch.setitem(DATASETS, "cifar10", replace(DATASETS["cifar10"], function=full))
    with pytest.raises(MachineError, match=r"cifar10, 60,000 images, 0\.18 GB: out of memory \(Unable to allocate"):
        own.load({"name": "cifar10", "variant": None}, tmp_path)
    job = Job("a", cell(), [], ["last"], "s", "paper")
    machine = Machine(db=str(tmp_path / "a.db"), files=str(tmp_path), data=str(tmp_path), device="cpu")
    with Store.open(machine.db, create=True) as store:
        assert worker.work(job, machine, store) == "failed"
        (row,) = store.stages().values()
        assert row.error.startswith("MachineError: out of memory while data set cifar10 was read (data 0.184 GB, net")
        assert "microbatch" not in store.runs()[0]
