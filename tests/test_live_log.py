"""Learning curves for TensorBoard and Weights & Biases, read back by their own readers."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fatbench.runner.jobs import Event, Job
from fatbench.runner.live_log import add_writer
from fatbench.runner.run_options import RunOptions


def events(name: str, tmp_path: Path) -> None:
    """Two rounds of a cell, as a run tells of them."""
    heard: list[Any] = []
    watch: Any = SimpleNamespace(
        what="suite tiny", begin=lambda *a: heard.append("begin"), see=lambda slot, event: heard.append(event.kind)
    )
    job = Job("0123456789ab", {"seed": 1}, [], ["last"], "tiny", "paper", "FAT, seed 1")
    with add_writer(watch, RunOptions(db=str(tmp_path / "r.db"), log=name)) as observer:
        observer.begin([job], {job.cell: "todo"}, ["cpu"])
        for round in (1, 2):
            observer.see(0, Event(job.cell, "train", "progress", round, 2, loss=1.0 / round, accuracy=0.25 * round))
        observer.see(0, Event(job.cell, "train", "done", 2, 2))
        for round in (1, 2):  # the best model and the last one are attacked alike
            observer.see(0, Event(job.cell, f"natural-01abdeb9@{round}", "progress", 64, 64, accuracy=0.3 * round))
    assert heard == ["begin", "progress", "progress", "done", "progress", "progress"]


def test_tensorboard_reads_the_curves(tmp_path: Path) -> None:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events("tensorboard", tmp_path)
    (folder,) = (tmp_path / "r-files" / "tensorboard").iterdir()
    assert folder.name == "tiny-paper-FAT-seed-1-0123456789ab"
    read = module.EventAccumulator(str(folder))
    read.Reload()
    assert [(one.step, one.value) for one in read.Scalars("train/loss")] == [(1, 1.0), (2, 0.5)]
    assert [one.value for one in read.Scalars("train/accuracy")] == [0.25, 0.5]
    for round, value in ((1, 0.3), (2, 0.6)):
        assert [one.value for one in read.Scalars(f"natural@{round}/accuracy")] == pytest.approx([value])


def logged_records(data: bytes) -> Iterator[bytes]:
    """LevelDB's log format after a header of 7 bytes: CRC, length and kind of a piece; none crosses 32 KiB."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # padding
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):  # it is being written
            return
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


def test_weights_and_biases_reads_the_curves_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    events("wandb", tmp_path)
    (file,) = tmp_path.rglob("run-*.wandb")
    written: list[Any] = []
    for _ in range(600):  # its service may write the last of them after the run is over
        written = [records.Record.FromString(one) for one in logged_records(file.read_bytes())]
        if written and written[-1].WhichOneof("record_type") == "exit":
            break
        time.sleep(0.1)
    history = [record.history.item for record in written if record.WhichOneof("record_type") == "history"]
    rows = [{"/".join(one.nested_key) or one.key: json.loads(one.value_json) for one in row} for row in history[:2]]
    shown = [(row["train/round"], row["train/loss"], row["train/accuracy"]) for row in rows]
    assert shown == [(1, 1.0, 0.25), (2, 0.5, 0.5)]


def test_mlflow_reads_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    events("mlflow", tmp_path)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'r-files' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("fatbench").experiment_id])
    assert (run.info.run_name, run.info.status) == ("tiny, paper, FAT, seed 1", "FINISHED")
    assert run.data.params == {"seed": "1"} and run.data.tags["cell"] == "0123456789ab"
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in losses] == [(1, 1.0), (2, 0.5)]
    assert run.data.metrics["natural at 2/accuracy"] == pytest.approx(0.6)
