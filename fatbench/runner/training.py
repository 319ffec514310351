"""Train a cell, so that a process killed at any instant loses a few rounds at most and never stores a wrong number.

A round's numbers, the name of the checkpoint to resume from and the best rounds so far are committed in one
transaction, once the checkpoint file is on disk. The stage's record has the SHA-256 of every file: a lost or damaged
file is never used, and training begins again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.engine.rounds import Number, Round, State, Tensors
from fatbench.runner import checkpoints, own_network, transfer, versions
from fatbench.runner.checkpoints import clients_file, model_file
from fatbench.runner.jobs import CellStatus, Event, Job, Machine, Turn
from fatbench.runner.oom_retry import gpu_memory
from fatbench.runner.stage import Reader, carry_out, demand_same_inputs, files_of, header_of, ready_for
from fatbench.store import selection
from fatbench.store.doubt_names import PREFIX
from fatbench.suite import cost, weights

if TYPE_CHECKING:
    from fatbench.engine.setup import Setup

log = logging.getLogger("fatbench")
SAVING_SHARE = 0.05  # of the time may go into saving: states of thousands of clients are large


def train(turn: Turn, machine: Machine) -> CellStatus:
    """Do what is left of a cell's training, from its last checkpoint on."""
    job, store = turn.job, turn.store
    row = store.stages([job.cell]).get((job.cell, "train"))
    changed_inputs = versions.changed([job], store).get(job.cell, {}).get("train")
    if changed_inputs and not machine.recovery.rerun_changed:
        reason_text = "; ".join(reason.words for reason in changed_inputs)
        turn.notify(Event(job.cell, "train", "interrupted", message=f"kept: {reason_text}; see --rerun changed"))
        return "interrupted"
    if row is not None and row.status == "done" and not changed_inputs:
        checkpoints.sweep(turn.folder, files_of(row.record))  # a process killed after its last commit left others
        return "done"
    origin = weights.trained_by(job.spec)
    if origin is not None and transfer.trained_model(origin, store) is None:
        turn.notify(Event(job.cell, "train", "waiting", message=f"for the weights of cell {origin}, not trained yet"))
        return "waiting"
    algorithm = job.spec["algorithm"]
    return carry_out(
        partial(_rounds, turn), turn, machine, "train", batch=int(cost.local(algorithm)["batch"]),
        total=int(algorithm["rounds"]), fresh=changed_inputs is not None,
    )  # fmt: skip


def _rounds(turn: Turn, run: int, machine: Machine) -> CellStatus:
    """Train from the stage's current round to the last, or until asked to stop."""
    from fatbench.engine.experiment import experiment

    job, store, folder, notify = turn.job, turn.store, turn.folder, turn.notify
    rounds = int(job.spec["algorithm"]["rounds"])
    origin = weights.trained_by(job.spec)
    bound, ready = ready_for(turn, machine, None if origin is None else transfer.model_of(origin, store, machine))
    initial_weights = ready.weights and {**ready.weights, **({} if origin is None else {"cell": origin})}
    run_inputs = {**ready.data, **({"weights": initial_weights} if initial_weights else {})}
    demand_same_inputs(turn, run, "train", run_inputs)
    store.describe_run(run, run_inputs)
    state, record, digests = _resume(turn, run, machine, ready.initial)
    reader = Reader(store, run, job, "train")
    checkpoints.sweep(folder, digests)
    log.info("train: from round %d of %d on %s", state.round, rounds, machine.device)
    notify(Event(job.cell, "train", "start", state.round, rounds))
    unsaved = _Unsaved(job, folder, ready)
    saved_at, interval = time.monotonic(), machine.recovery.checkpoint_seconds
    for result, numbers in experiment(ready, state, **bound):
        count = result.index + 1
        if count == state.round + 1:
            checkpoints.demand_tensors(result.state)  # after one round, not when the first checkpoint fails
        series = {number.metric: number.value for number in numbers if number.client < 0}
        record = _record_with_round(record, count, series)
        unsaved.add(result, numbers, record)
        if count == state.round + 1 and (gpu_bytes := gpu_memory(machine.device)):
            store.describe_run(run, {"gpu_memory": gpu_bytes})  # first: the event lets the run start cells beside it
        images = series["forward"] + series["backward"]
        loss, accuracy = series.get("train_loss"), series.get("natural")
        notify(Event(job.cell, "train", "progress", count, rounds, images, loss=loss, accuracy=accuracy))
        log.info("round %d: %s", count, " ".join(f"{k}={v:.6g}" for k, v in series.items() if k != "seconds"))
        stopping = turn.stop()
        if count == rounds or stopping or time.monotonic() - saved_at >= interval:
            begin = time.monotonic()
            store.heartbeat(run)  # raises if another process has taken over: its files must not be overwritten
            reader.tell()
            digests |= unsaved.write(record)
            pointer = f"state-{count:06d}.safetensors"
            if count < rounds:
                digests[pointer] = checkpoints.save_state(folder / pointer, result.state, job.cell)
            kept_files = {pointer, *files_of(record)}
            digests = {name: digest for name, digest in digests.items() if name in kept_files or "/" in name}
            full_record = {**record, "sha256": digests}
            if count == rounds:
                if gpu_bytes := gpu_memory(machine.device):
                    store.describe_run(run, {"gpu_memory": gpu_bytes})
                store.finish(run, unsaved.numbers, round=count, record=full_record)
                checkpoints.sweep(folder, kept_files)
                break
            store.commit(run, numbers=unsaved.numbers, round=count, checkpoint=pointer, record=full_record)
            checkpoints.sweep(folder, kept_files)
            unsaved, saved_at = _Unsaved(job, folder, ready), time.monotonic()
            if interval:  # an interval of 0 saves every round
                interval = max(machine.recovery.checkpoint_seconds, (saved_at - begin) / SAVING_SHARE)
        del result  # free the clients' uploads before the next round
        if stopping:
            store.release(run)
            notify(Event(job.cell, "train", "interrupted", count, rounds))
            return "interrupted"
    notify(Event(job.cell, "train", "done", rounds, rounds))
    return "done"


def _resume(turn: Turn, run: int, machine: Machine, initial: State) -> tuple[State, dict[str, Any], dict[str, str]]:
    """Return (the state to continue from, the record of the rounds so far, path in the folder -> SHA-256)."""
    row = turn.store.stages([turn.job.cell])[(turn.job.cell, "train")]
    record: dict[str, Any] = dict(row.record)
    digests: dict[str, str] = record.pop("sha256", {})  # path in the cell's folder -> SHA-256
    state = initial
    if row.checkpoint:
        try:
            for name, digest in digests.items():
                try:
                    checkpoints.check(turn.folder / name, digest)
                except checkpoints.DamagedCheckpoint as error:
                    if "/" not in name:
                        raise
                    log.warning("%s: the artifacts of this round are lost", error)
            file, digest = turn.folder / row.checkpoint, digests.get(row.checkpoint, "none")
            state = checkpoints.load_state(file, machine.device, digest, turn.job.cell, row.round)
        except checkpoints.DamagedCheckpoint as error:
            log.warning("%s: training begins again from round 0", error)
    if row.round and not state.round:  # the state is lost, or unfinished training was imported without one
        turn.store.restart(run)
        return state, {}, {}
    return state, record, digests


def _record_with_round(record: Mapping[str, Any], count: int, series: Mapping[str, float]) -> dict[str, Any]:
    """Add a round to a training's record. series: metric -> its value in this round."""
    updated = selection.update(record, count, series)
    updated |= {word: int(series[word]) for word in ("diverged", "ended") if word in series}
    if refused := int(series.get("uploads_refused", 0)):
        updated["uploads_refused"] = updated.get("uploads_refused", 0) + refused
    for code in [metric.removeprefix(PREFIX) for metric in series if metric.startswith(PREFIX)]:
        doubt_counts = updated.get("said", {})  # code -> number of rounds
        updated["said"] = {**doubt_counts, code: doubt_counts.get(code, 0) + 1}
    return updated


@dataclass
class _Unsaved:
    """The results of the rounds since the last checkpoint, until they are written."""

    job: Job
    folder: Path  # with the cell's files
    ready: Setup
    numbers: list[Number] = field(default_factory=list)
    models: dict[int, tuple[Tensors, dict[int, Tensors]]] = field(default_factory=dict)  # selected rounds only
    clients: dict[int, dict[int, Tensors]] = field(default_factory=dict)  # before averaging, for transfer attacks
    artifacts: dict[int, Tensors] = field(default_factory=dict)

    def add(self, result: Round, numbers: Sequence[Number], record: Mapping[str, Any]) -> None:
        """Add a round's results, and drop the models of earlier rounds that are no longer selected."""
        count = result.index + 1
        self.numbers += numbers
        self.models[count] = result.state.model, result.own
        self.models = {r: models for r, models in self.models.items() if model_file(r) in files_of(record)}
        if artifacts := {**result.artifacts, **(result.mixing.artifacts if result.mixing else {})}:
            self.artifacts[count] = artifacts
        if client_limit := transfer.clients_wanted(self.job, record, count):
            self.clients[count] = transfer.client_models(result, client_limit)

    def write(self, record: Mapping[str, Any]) -> dict[str, str]:
        """Write models and artifacts, and return path in the cell's folder -> SHA-256."""
        digests: dict[str, str] = {}
        for round, (model, client_tensors) in self.models.items():
            name, header = model_file(round), header_of(self.job, round, self.ready.classes)
            header |= own_network.in_header(self.job.spec, self.ready.problem, model)
            digests[name] = checkpoints.save_model(self.folder / name, model, client_tensors, **header)
        for round, client_models in self.clients.items():
            name, header = clients_file(round), header_of(self.job, round, self.ready.classes)
            if name in files_of(record) and client_models:
                digests[name] = checkpoints.save_model(self.folder / name, {}, client_models, **header)
        for round, artifacts in self.artifacts.items():
            file = artifact_file(self.folder, round)
            name = file.relative_to(self.folder).as_posix()
            digests[name] = checkpoints.save_artifacts(file, artifacts, self.job.cell, round)
        return digests


def artifact_file(folder: Path, round: int) -> Path:
    """The file in a cell's folder for the tensors that a round keeps beside its numbers (`Mixing.artifacts`)."""
    return folder / "artifacts" / f"round-{round:06d}.safetensors"
