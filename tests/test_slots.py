"""Cells side by side on a GPU, from free memory that is made up and from what runs have said they used."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from fatbench.runner import slots, start
from fatbench.runner.executors import local
from fatbench.runner.jobs import Event, Work
from fatbench.runner.run_options import RunOptions
from fatbench.store.pools import Pool
from fatbench.store.stages import Store
from fatbench.store.timing import gpu_memory

GB = 1 << 30


@pytest.mark.parametrize(
    ("free", "used", "fit"),
    [
        (24 * GB, 4 * GB, 4),  # 0.9 * 24 / (4 + 0.59) = 4.7
        (139 * GB, 4 * GB, 8),  # no more than eight
        (3 * GB, 4 * GB, 1),  # one is always tried
        (None, 4 * GB, 1),
        (24 * GB, None, 1),
    ],
)
def test_as_many_as_fit(free: int | None, used: float | None, fit: int) -> None:
    assert slots.slots(free, used) == fit


def test_the_largest_of_the_cells_counts_and_an_unknown_one_forbids() -> None:
    known = {"a": 1.0, "b": 3.0}
    kind = dict.__getitem__
    assert slots.largest_use([{"k": "a"}, {"k": "b"}], known, lambda spec: kind(spec, "k")) == 3.0
    assert slots.largest_use([{"k": "a"}, {"k": "c"}], known, lambda spec: kind(spec, "k")) is None
    assert slots.largest_use([], known, lambda spec: "a") is None


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, ["0", "1", "2"]), ("2,0", ["2", "0", None]), ("GPU-ab12", ["GPU-ab12", None, None]), ("", [None] * 3)],
)
def test_what_the_driver_calls_a_gpu(visible: str | None, names: list[str | None]) -> None:
    assert [slots.driver_name(gpu, visible) for gpu in range(3)] == names


class _Nvml:
    """A management library of two GPUs with 10 and 20 bytes free."""

    def __init__(self) -> None:
        self.open = 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: object) -> int:
        handle._obj.value = index + 1  # type: ignore[attr-defined]
        return 0 if index < 2 else 2

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: object) -> int:
        handle._obj.value = 2  # type: ignore[attr-defined]
        return 0 if name == b"GPU-1" else 6

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: object) -> int:
        memory._obj.free = 10 * (handle.value or 0)  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: ctypes.c_void_p, major: object, minor: object) -> int:
        major._obj.value = 6 + (handle.value or 0)  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetName(self, handle: ctypes.c_void_p, name: ctypes.Array[ctypes.c_char], size: int) -> int:
        name.value = b"NVIDIA H%d00" % (handle.value or 0)
        return 0


def test_free_memory_is_asked_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    library = _Nvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [slots.free_memory(gpu) for gpu in range(3)] == [10, 20, None]
    chosen = [slots.precision_for(device) for device in ("cpu", "cuda:0", "cuda:1", "cuda:2")]
    assert chosen == ["fp32", "fp32", "tf32", "fp32"]  # a Volta, an Ampere, none
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,GPU-7")
    assert [slots.free_memory(gpu) for gpu in range(3)] == [20, None, None]
    assert [slots.gpu_name(f"cuda:{gpu}") for gpu in range(2)] == ["NVIDIA H200", None]
    assert library.open == 0


@pytest.mark.promise(
    "Faults of the machine", "A GPU runs as many cells as fit, by the memory that such cells used before"
)
def test_slots_follow_what_cells_used_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, 10 and 30 GB free; a cell of the kind has used 4 GB: one slot there would be two and five."""
    from fatbench.suite import duration, files

    monkeypatch.chdir(tmp_path)
    plan = files.load("sfat-cifar10").plan("smoke")
    jobs = start.jobs_of(plan)[:6]
    free: dict[int, int | None] = {0: 10 * GB, 1: 30 * GB}
    monkeypatch.setattr(local, "gpu_count", lambda: 2)
    with Store.open(str(tmp_path / "r.db"), create=True) as store:
        store.add_cell(jobs[0].cell, jobs[0].spec)
        assert start.per_gpu_of(jobs, store, free) == {}
        run = store.claim(
            jobs[0].cell, "train", suite="s", total=1, provenance={"gpu_memory": 4 * GB, "device": "NVIDIA H200"}
        )
        assert run is not None
        assert gpu_memory(store, duration.kind) == {duration.kind(jobs[0].spec): 4 * GB}
        alike = [job for job in jobs if duration.kind(job.spec) == duration.kind(jobs[0].spec)]
        fit = start.per_gpu_of(alike, store, free)
    assert fit == {0: 1, 1: 5}
    assert local.slots("cuda", None, fit) == ["cuda:0", "cuda:1", "cuda:1", "cuda:1", "cuda:1", "cuda:1"]
    assert local.slots("cuda:1", 2, fit) == ["cuda:1", "cuda:1"]
    assert local.slots("cuda", None, 2) == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]


class _Recorder:
    """Stands in for the processes of workers: tells the first round of each cell, and ends it after a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, used: int) -> None:
        self.used, self.at_work, self.most = used, dict[str, str](), list[int]()
        self.begun: list[tuple[str, str]] = []  # (device, cell), in the order in which they began
        monkeypatch.setattr(local.processes, "start_or_take_early", self.start)

    def start(self, serve: object, *arguments: str) -> SimpleNamespace:
        process = SimpleNamespace(exitcode=None, kill=lambda: None)
        threading.Thread(target=self.serve, args=(process, *arguments), daemon=True).start()
        return process

    def serve(self, process: SimpleNamespace, db: str, pool_id: str, name: str, device: str) -> None:
        with Store.open(db) as store:
            pool = Pool(store.database, pool_id)
            pool.enter(name)
            jobs = {job.cell: job for job in Work.parsed(pool.work() or "", db).jobs}
            while (cell := pool.take(name, lambda cell: True)) is not None:
                self.begun.append((device, cell))
                self.at_work[cell] = device
                self.most.append(len(self.at_work))
                store.add_cell(cell, jobs[cell].spec)
                found = {"gpu_memory": self.used, "device": "NVIDIA H100"}
                store.claim(cell, "train", suite="s", total=1, provenance=found)
                time.sleep(0.6)  # every GPU has a cell by now
                pool.report(name, [asdict(Event(cell, "train", "progress", 1, 100))])
                time.sleep(1.0)
                del self.at_work[cell]
                pool.end(name, cell, "failed")
        process.exitcode = 0


@pytest.mark.parametrize(("used", "most"), [(40 * GB, 8), (20 * GB, 16)])
def test_a_first_run_has_a_cell_on_every_gpu_at_once_and_more_when_the_first_rounds_say_that_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: int, most: int
) -> None:
    """Eight GPUs of 70 GB, 21 cells that take 40 or 20 GB: eight begin at once, and of the small ones then 8 more.

    The sixteen are two, not three a GPU: `--jobs`.
    """
    from fatbench.cli.watch import Watch
    from fatbench.suite import files

    monkeypatch.chdir(tmp_path)
    jobs = start.jobs_of(files.load("sfat-cifar10").plan("smoke"))
    monkeypatch.setattr(local, "gpu_count", lambda: 8)
    monkeypatch.setattr(slots, "free_memory", lambda gpu: 70 * GB)
    workers = _Recorder(monkeypatch, used)
    with pytest.raises(SystemExit):
        start.run(jobs, Watch("a run"), RunOptions(db="r.db", device="cuda", jobs=16))
    assert {device for device, _ in workers.begun[:8]} == {f"cuda:{gpu}" for gpu in range(8)}
    assert len({cell for _, cell in workers.begun}) == len(workers.begun) == 21 and max(workers.most) == most
    assert max(Counter(device for device, _ in workers.begun).values()) <= 4


def test_the_first_of_each_kind_is_before_all_others() -> None:
    from fatbench.suite import duration, files

    jobs = start.jobs_of(files.load("fat-baselines").plan("paper"))
    ordered = start._each_kind_first(jobs)
    kinds = [duration.kind(job.spec) for job in ordered]
    many = len({*kinds})
    assert many > 1 and len({*kinds[:many]}) == many and sorted(map(id, ordered)) == sorted(map(id, jobs))
    assert [job.cell for job in start._each_kind_first(jobs[:1])] == [jobs[0].cell]
