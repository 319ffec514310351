"""A cell's training, committed so that a process killed at any instant loses little and never a number.

A round's numbers, the name of the checkpoint to go on from and the best rounds so far are committed in one transaction,
after the checkpoint file they name is on disk. The SHA-256 of every file is in the record of the stage: a file that is
lost or damaged is never used, and the training begins again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.engine.rounds import Number
from fatbench.runner import checkpoints, own_network, reading, transfer, versions
from fatbench.runner.checkpoints import clients_file, model_file
from fatbench.runner.jobs import CellStatus, Event, Job, Machine, Turn
from fatbench.runner.oom_retry import gpu_memory, with_oom_retry
from fatbench.runner.stage import (
    claim,
    demand_same_inputs,
    files_of,
    header_of,
    ready_for,
    record_failure,
    renewed,
    with_some_kernel,
)
from fatbench.store import selection
from fatbench.store.doubt_names import PREFIX
from fatbench.suite import cost, plugins, weights

if TYPE_CHECKING:
    from fatbench.engine.rounds import State

log = logging.getLogger("fatbench")
SHARE = 0.05  # of the time that saving may take: states of thousands of clients are large


def train(turn: Turn, machine: Machine) -> CellStatus:
    """What is not done of a cell's training, from its last checkpoint on."""
    job, store = turn.job, turn.store
    row = store.stages([job.cell]).get((job.cell, "train"))
    changed_inputs = versions.changed([job], store).get(job.cell, {}).get("train")
    if changed_inputs and not machine.rerun_changed:
        reason_text = "; ".join(reason.words for reason in changed_inputs)
        turn.notify(Event(job.cell, "train", "interrupted", message=f"kept: {reason_text}; see --rerun-changed"))
        return "interrupted"
    if row is not None and row.status == "done" and not changed_inputs:
        checkpoints.sweep(turn.folder, files_of(row.record))  # what a process killed after its last commit has left
        return "done"
    origin = weights.trained_by(job.spec)
    if origin is not None and transfer.trained(origin, store) is None:
        turn.notify(Event(job.cell, "train", "waiting", message=f"for the weights of cell {origin}, not trained yet"))
        return "waiting"
    run = claim(turn, "train", machine, int(job.spec["algorithm"]["rounds"]), fresh=changed_inputs is not None)
    if run is None:
        # also where it was free when we looked, and another process was quicker to claim it
        return "failed" if row is not None and row.status == "failed" else "elsewhere"
    try:
        with renewed(machine, run):
            return with_oom_retry(
                lambda less: with_some_kernel(run, less, store, lambda how: _rounds(run, turn, how)),
                machine, int(cost.local(job.spec["algorithm"])["batch"]), partial(store.describe_run, run),
            )  # fmt: skip
    except BaseException as error:
        return record_failure(error, run, turn, "train")


def _rounds(run: int, turn: Turn, machine: Machine) -> CellStatus:
    """Train from where the stage is to the last round, or until asked to stop."""
    from fatbench.engine.experiment import experiment

    job, store, folder, notify = turn.job, turn.store, turn.folder, turn.notify
    rounds = int(job.spec["algorithm"]["rounds"])
    origin = weights.trained_by(job.spec)
    bound, ready = ready_for(job, machine, None if origin is None else transfer.model_of(origin, store, machine))
    began = ready.weights and {**ready.weights, **({} if origin is None else {"cell": origin})}
    with_what = {**ready.data, **({"weights": began} if began else {})}
    demand_same_inputs(turn, run, "train", with_what)
    store.describe_run(run, with_what)
    row = store.stages([job.cell])[(job.cell, "train")]
    record: dict[str, Any] = dict(row.record)
    digests: dict[str, str] = record.pop("sha256", {})  # of the files that count, by their path in the folder
    state = ready.initial
    if row.checkpoint:
        try:
            state = _resumed(row.checkpoint, row.round, digests, job, machine, folder)
        except checkpoints.DamagedCheckpoint as error:
            log.warning("%s: training begins again from round 0", error)
    if row.round and not state.round:  # also what was imported unfinished: numbers without a state to go on from
        store.restart(run)
        record, digests = {}, {}
    reader = reading.Reader(store, run, job.cell, "train", plugins.files(job.spec))
    checkpoints.sweep(folder, digests)
    log.info("train: from round %d of %d on %s", state.round, rounds, machine.device)
    notify(Event(job.cell, "train", "start", state.round, rounds))
    pending: list[Number] = []
    models: dict[int, Any] = {}  # round -> (its model, the clients' own tensors), of rounds that count, not yet written
    artifacts: dict[int, Any] = {}
    clients: dict[int, Any] = {}  # round -> the clients' models before averaging, where transfers ask for them
    checkpoint_interval = machine.checkpoint_seconds
    committed, wait = time.monotonic(), checkpoint_interval
    for result, numbers in experiment(ready, state, **bound):
        count = result.index + 1
        if count == state.round + 1:
            checkpoints.demand_tensors(result.state)  # before what a checkpoint would lose is computed
        pending += numbers
        series = {n.metric: n.value for n in numbers if n.client < 0}
        record = selection.update(record, count, series)
        record |= {word: int(series[word]) for word in ("diverged", "ended") if word in series}
        if refused := int(series.get("uploads_refused", 0)):
            record["uploads_refused"] = record.get("uploads_refused", 0) + refused
        for code in [name.removeprefix(PREFIX) for name in series if name.startswith(PREFIX)]:
            doubt_counts = record.get("said", {})
            record["said"] = {**doubt_counts, code: doubt_counts.get(code, 0) + 1}
        latest = (result.state.model, result.own)
        models = {r: m for r, m in {**models, count: latest}.items() if model_file(r) in files_of(record)}
        if round_artifacts := {**result.artifacts, **(result.mixing.artifacts if result.mixing else {})}:
            artifacts[count] = round_artifacts
        if client_limit := transfer.clients_wanted(job, record, count):
            clients[count] = transfer.client_models(result, client_limit)
        if count == state.round + 1 and (gpu_bytes := gpu_memory(machine.device)):
            store.describe_run(run, {"gpu_memory": gpu_bytes})  # others may begin beside it: before the round is told
        images = series["forward"] + series["backward"]
        loss, accuracy = series.get("train_loss"), series.get("natural")
        notify(Event(job.cell, "train", "progress", count, rounds, images, loss=loss, accuracy=accuracy))
        log.info("round %d: %s", count, " ".join(f"{k}={v:.6g}" for k, v in series.items() if k != "seconds"))
        stopping = turn.stop()
        if count == rounds or stopping or time.monotonic() - committed >= wait:
            begin = time.monotonic()
            store.heartbeat(run)  # a file written by a run that has lost its stage would be in another's way
            reader.tell()
            for r, (model, client_tensors) in models.items():
                header = {**header_of(job, r, ready.classes), **own_network.in_header(job.spec, ready.problem, model)}
                digests[model_file(r)] = checkpoints.save_model(folder / model_file(r), model, client_tensors, **header)
            for r, client_tensors in clients.items():
                if clients_file(r) in files_of(record) and client_tensors:
                    header = header_of(job, r, ready.classes)
                    digests[clients_file(r)] = checkpoints.save_model(
                        folder / clients_file(r), {}, client_tensors, **header
                    )
            for r, round_artifacts in artifacts.items():
                file = artifact_file(folder, r)
                digests[file.relative_to(folder).as_posix()] = checkpoints.save_artifacts(
                    file, round_artifacts, job.cell, r
                )
            pointer = f"state-{count:06d}.safetensors"
            if count < rounds:
                digests[pointer] = checkpoints.save_state(folder / pointer, result.state, job.cell)
            keep = {pointer, *files_of(record)}
            digests = {name: digest for name, digest in digests.items() if name in keep or "/" in name}
            if count == rounds:
                if gpu_bytes := gpu_memory(machine.device):
                    store.describe_run(run, {"gpu_memory": gpu_bytes})
                store.finish(run, pending, round=count, record={**record, "sha256": digests})
                checkpoints.sweep(folder, keep)
                break
            full_record = {**record, "sha256": digests}
            store.commit(run, numbers=pending, round=count, checkpoint=pointer, record=full_record)
            checkpoints.sweep(folder, keep)
            pending, models, artifacts, clients, committed = [], {}, {}, {}, time.monotonic()
            wait = checkpoint_interval and max(
                checkpoint_interval, (committed - begin) / SHARE
            )  # 0 seconds: every round is saved
        del result, latest, round_artifacts  # what crossed the wire can be large
        if stopping:
            store.release(run)
            notify(Event(job.cell, "train", "interrupted", count, rounds))
            return "interrupted"
    notify(Event(job.cell, "train", "done", rounds, rounds))
    return "done"


def _resumed(pointer: str, round: int, digests: Mapping[str, str], job: Job, machine: Machine, folder: Path) -> State:
    """The state to go on from. DamagedCheckpoint: it, or a model that counts, is not the file that was written."""
    for name, digest in digests.items():
        try:
            checkpoints.check(folder / name, digest)
        except checkpoints.DamagedCheckpoint as error:
            if "/" not in name:
                raise
            log.warning("%s: the artifacts of this round are lost", error)
    digest = digests.get(pointer, "none")
    return checkpoints.load_state(folder / pointer, machine.device, digest, job.cell, round)


def artifact_file(folder: Path, round: int) -> Path:
    """Where what a round keeps beside its numbers (`Mixing.artifacts`) is, in a cell's folder."""
    return folder / "artifacts" / f"round-{round:06d}.safetensors"
