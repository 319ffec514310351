"""One cell's work, stage by stage: train, then every evaluation on every checkpoint the suite asks for.

The database is the truth. A training round's numbers, the name of the checkpoint to go on from and the best rounds so
far are committed in one transaction, after the checkpoint file they name is on disk; so a process killed at any
instant leaves a state from which the same command goes on and ends with the same bytes. The SHA-256 of every file is
in the record of its stage: a file that is lost or damaged is never used, and the training begins again.
"""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fatbench.engine.rounds import Number
from fatbench.errors import FatbenchError, MachineError, Unavailable
from fatbench.run import checkpoints, transfer, versions
from fatbench.run.checkpoints import clients_file, model_file
from fatbench.run.provenance import produced_by
from fatbench.run.pulse import Pulse, pulse_of, renewing
from fatbench.run.shortage import free_memory, gpu_memory, sparing
from fatbench.store import selection
from fatbench.store.leases import LEASE
from fatbench.store.stages import Stolen, Store
from fatbench.suite import cost, formulas, plugins, signatures, weights
from fatbench.suite.cells import Evaluation

if TYPE_CHECKING:
    from fatbench.engine.fast.cells import Together
    from fatbench.engine.rounds import State

log = logging.getLogger("fatbench")

# waiting: for other cells' models; blocked: what every cell needs is not to be had (Unavailable), so the run stops
Outcome = Literal["done", "failed", "interrupted", "elsewhere", "waiting", "blocked"]
WORSE: tuple[Outcome, ...] = ("done", "elsewhere", "failed")  # of stages, for their cell


@dataclass(frozen=True)
class Job:
    """A cell and what a suite wants to know of it; plain data, so that it travels to other processes and machines."""

    cell: str
    spec: dict[str, Any]
    evaluations: list[Evaluation]
    checkpoints: list[str]
    suite: str
    preset: str
    label: str = ""  # the point of the grid in words, for people: "Non-IID, FedAvg, SFAT, seed 6"


@dataclass(frozen=True)
class Machine:
    """How this run is carried out: what `fatbench run` was told about the machine."""

    db: str
    files: str
    data: str
    device: str = "cpu"
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    strict: bool = True  # deterministic kernels only, where the precision has them; see `_with_some_kernel`
    path: Literal["reference", "loop", "fast"] = "loop"
    microbatch: int | None = None
    together: int = 1  # cells that one process trains as one program
    retry_failed: bool = False
    rerun_changed: bool = False  # begin again what other versions of the plug-ins computed
    checkpoint_seconds: float = 30.0
    threads: int = 1
    plugins: tuple[str, ...] = ()
    lease: float = LEASE  # seconds without progress after which another process may take a stage over
    time_limit: float | None = None  # seconds that a turn at a cell may take
    meeting: Together | None = None  # of the cells of a worker process, made there
    pulse: Pulse | None = None  # of the cell in hand, made there


@dataclass(frozen=True)
class Event:
    """What a worker tells whoever watches."""

    cell: str
    stage: str  # a stage; "cell" when all of a cell's work is over; "lane" when a worker is "given" it
    kind: Literal["given", "start", "progress", "done", "failed", "interrupted", "elsewhere", "waiting", "blocked"]
    round: int = 0
    total: int = 0
    images: float = 0.0  # image passes since the last event
    loss: float | None = None  # of the round's training
    accuracy: float | None = None  # of training: on clean test images; of an attack: so far
    message: str = ""


def evaluation_rounds(job: Job, record: Mapping[str, Any]) -> list[int]:
    """The rounds whose models the job's evaluations attack; each once."""
    rounds = [int(record[name]["round"]) for name in job.checkpoints if name in record]
    return list(dict.fromkeys(rounds))


def work(
    job: Job,
    machine: Machine,
    store: Store,
    notify: Callable[[Event], None] = lambda event: None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Do what is not done of a job. A failure is stored with its traceback and returned, not raised.

    `stop` is asked after every round and every chunk of an evaluation; when it says so, the work so far is committed.
    """
    for file in machine.plugins:
        signatures.add_plugin(Path(file))
    machine = replace(machine, pulse=pulse_of(machine.meeting is not None, machine.time_limit))
    store.add_cell(job.cell, job.spec)
    folder = Path(machine.files) / job.cell
    handler = _log_to(folder / "log.txt")
    try:
        for again in (False, True):
            outcome = _train(job, machine, store, folder, notify, stop)
            if outcome != "done":
                return outcome
            try:
                return _evaluate(job, machine, store, folder, notify, stop, again)
            except checkpoints.Damaged as error:  # the first time only
                log.warning("%s: training begins again from round 0", error)
                store.reopen(job.cell, "train")
        raise AssertionError("the second evaluation stores what it finds damaged")
    finally:
        log.removeHandler(handler)
        handler.close()
        gc.collect()


def _renewing(machine: Machine, run: int) -> Any:
    assert machine.pulse is not None
    return renewing(machine.db, run, machine.pulse, machine.lease, alone=machine.meeting is None)


def _train(job: Job, machine: Machine, store: Store, folder: Path, notify: Any, stop: Any) -> Outcome:
    row = store.stages([job.cell]).get((job.cell, "train"))
    other = versions.changed([job], store).get(job.cell, {}).get("train")
    if other and not machine.rerun_changed:
        notify(Event(job.cell, "train", "interrupted", message=f"kept: of {other}; see --rerun-changed"))
        return "interrupted"
    if row is not None and row.status == "done" and not other:
        checkpoints.sweep(folder, _files(row.record))  # what a process killed after its last commit has left
        return "done"
    rounds = int(job.spec["protocol"]["rounds"])
    run = _claim(job, "train", machine, store, rounds, fresh=other is not None)
    if run is None:
        # also where it was free when we looked, and another process was quicker to claim it
        return "failed" if row is not None and row.status == "failed" else "elsewhere"
    try:
        with _renewing(machine, run):
            return sparing(
                lambda less: _with_some_kernel(
                    run, less, store, lambda how: _rounds(run, rounds, job, how, store, folder, notify, stop)
                ),
                machine, batch_of(job.spec["protocol"]), partial(store.describe_run, run),
            )  # fmt: skip
    except BaseException as error:
        return _failed(error, run, job, "train", store, notify)


def _with_some_kernel(run: int, machine: Machine, store: Store, stage: Callable[[Machine], Outcome]) -> Outcome:
    """A stage; once more where an operation has no deterministic kernel, and then its run says so."""
    try:
        return stage(machine)
    except Exception as error:
        import torch

        from fatbench.engine.precision import exact, without_kernel

        if not machine.strict or (missing := without_kernel(error)) is None:
            raise
        log.warning("not reproducible bit for bit: %s has no deterministic kernel", missing)
        store.describe_run(run, {"not_reproducible": f"{missing} has no deterministic kernel"})
        device = torch.device(machine.device)
    exact(device, machine.precision, strict=False)
    try:
        return stage(replace(machine, strict=False))
    finally:
        exact(device, machine.precision)


def _rounds(
    run: int, rounds: int, job: Job, machine: Machine, store: Store, folder: Path, notify: Any, stop: Any
) -> Outcome:
    """Train from where the stage is to the last round, or until asked to stop."""
    from fatbench.engine.experiment import experiment

    bound, ready = _ready(job, machine)
    store.describe_run(run, {"data": ready.data, **({"weights": ready.weights} if ready.weights else {})})
    row = store.stages([job.cell])[(job.cell, "train")]
    record: dict[str, Any] = dict(row.record)
    digests: dict[str, str] = record.pop("sha256", {})  # of the files that count, by their path in the folder
    state = ready.initial
    if row.checkpoint:
        try:
            state = _resumed(row.checkpoint, row.round, digests, job, machine, folder)
        except checkpoints.Damaged as error:
            log.warning("%s: training begins again from round 0", error)
    if row.round and not state.round:  # also what was imported unfinished: numbers without a state to go on from
        store.restart(run)
        record, digests = {}, {}
    checkpoints.sweep(folder, digests)
    log.info("train: from round %d of %d on %s", state.round, rounds, machine.device)
    notify(Event(job.cell, "train", "start", state.round, rounds))
    passes = cost.passes(job.spec["protocol"])
    pending: list[Number] = []
    models: dict[int, Any] = {}  # round -> (its model, the clients' own tensors), of rounds that count, not yet written
    artifacts: dict[int, Any] = {}
    clients: dict[int, Any] = {}  # round -> the clients' models before averaging, where transfers ask for them
    committed = time.monotonic()
    for result, numbers in experiment(ready, state, passes, **bound):
        count = result.index + 1
        pending += numbers
        series = {n.metric: n.value for n in numbers if n.client < 0}
        record = selection.update(record, count, series)
        latest = (result.state.model, result.own)
        models = {r: m for r, m in {**models, count: latest}.items() if model_file(r) in _files(record)}
        if kept := {**result.artifacts, **(result.mixing.artifacts if result.mixing else {})}:
            artifacts[count] = kept
        if many := transfer.wanted(job, record, count):
            clients[count] = transfer.clients_of(result, many)
        if count == state.round + 1 and (stack := max((u.stats.stack for u in result.updates), default=1)) > 1:
            store.describe_run(run, {"stack": stack})
        images = series["forward"] + series["backward"]
        loss, accuracy = series.get("train_loss"), series.get("natural")
        notify(Event(job.cell, "train", "progress", count, rounds, images, loss=loss, accuracy=accuracy))
        log.info("round %d: %s", count, " ".join(f"{k}={v:.6g}" for k, v in series.items() if k != "seconds"))
        stopping = count < rounds and stop()
        if count == rounds or stopping or time.monotonic() - committed >= machine.checkpoint_seconds:
            store.heartbeat(run)  # a file written by a run that has lost its stage would be in another's way
            for r, (model, own) in models.items():
                header = _header(job, r, ready.classes)
                digests[model_file(r)] = checkpoints.save_model(folder / model_file(r), model, own, **header)
            for r, own in clients.items():
                if clients_file(r) in _files(record) and own:
                    header = _header(job, r, ready.classes)
                    digests[clients_file(r)] = checkpoints.save_model(folder / clients_file(r), {}, own, **header)
            for r, kept in artifacts.items():
                file = artifact_file(folder, r)
                digests[file.relative_to(folder).as_posix()] = checkpoints.save_artifacts(file, kept)
            pointer = f"state-{count:06d}.safetensors"
            if count < rounds:
                digests[pointer] = checkpoints.save_state(folder / pointer, result.state, job.cell)
            keep = {pointer, *_files(record)}
            digests = {name: digest for name, digest in digests.items() if name in keep or "/" in name}
            if count == rounds:
                if used := gpu_memory(machine.device):
                    store.describe_run(run, {"gpu_memory": used})
                store.finish(run, pending, round=count, record={**record, "sha256": digests})
                checkpoints.sweep(folder, keep)
                break
            named = {**record, "sha256": digests}
            store.commit(run, numbers=pending, round=count, checkpoint=pointer, record=named)
            checkpoints.sweep(folder, keep)
            pending, models, artifacts, clients, committed = [], {}, {}, {}, time.monotonic()
        del result, latest, kept  # what crossed the wire can be large
        if stopping:
            store.release(run)
            notify(Event(job.cell, "train", "interrupted", count, rounds))
            return "interrupted"
    notify(Event(job.cell, "train", "done", rounds, rounds))
    return "done"


def batch_of(protocol: Mapping[str, Any]) -> int:
    """Images of a step of a cell's training."""
    return int(protocol["local"]["batch"] if "local" in protocol else protocol["batch"])


def _resumed(pointer: str, round: int, digests: Mapping[str, str], job: Job, machine: Machine, folder: Path) -> State:
    """The state to go on from. Damaged: it, or a model that counts, is not the file that was written."""
    for name, digest in digests.items():
        try:
            checkpoints.check(folder / name, digest)
        except checkpoints.Damaged as error:
            if "/" not in name:
                raise
            log.warning("%s: what this round kept beside its numbers is lost", error)
    digest = digests.get(pointer, "none")
    return checkpoints.load_state(folder / pointer, machine.device, digest, job.cell, round)


def _files(record: Mapping[str, Any]) -> list[str]:
    """The model files that a train stage's record names, and those of the clients beside them."""
    rounds = {int(record[name]["round"]) for name in selection.WORDS if name in record}
    return sorted(file(round) for round in rounds for file in (model_file, clients_file))


def artifact_file(folder: Path, round: int) -> Path:
    """Where what a round keeps beside its numbers (`Mixing.artifacts`) is, in a cell's folder."""
    return folder / "artifacts" / f"round-{round:06d}.safetensors"


def _header(job: Job, round: int, classes: int) -> dict[str, str]:
    """What a model's file says of it: enough to attack it outside any suite."""
    return {"cell": job.cell, "round": str(round), "spec": json.dumps(job.spec), "classes": str(classes)}


def _evaluate(
    job: Job, machine: Machine, store: Store, folder: Path, notify: Any, stop: Any, again: bool, ready: Any = None
) -> Outcome:
    """Every evaluation of the job that is not done; one that fails leaves the others to run.

    Done means done on the model that is here: one trained again elsewhere can differ. Damaged: a model trained here is
    lost or damaged; `again`, after it was trained anew, that is a failure as any other.
    """
    from fatbench.methods.packages import implementation

    record = store.stages([job.cell])[(job.cell, "train")].record
    rows = store.stages([job.cell])
    worst: Outcome = "done"
    lacking: dict[str, str] = {}  # cells whose models are waited for
    other = versions.changed([job], store).get(job.cell, {})
    shared: dict[str, Any] = {} if ready is None else {"ready": ready, "microbatch": machine.microbatch}
    for round in evaluation_rounds(job, record):
        digest = record.get("sha256", {}).get(model_file(round))  # none: the model was never here
        for evaluation in job.evaluations:
            stage = evaluation.stage(round)
            row = rows.get((job.cell, stage))
            if stage in other and not machine.rerun_changed:
                continue
            origin = evaluation.origin
            theirs = transfer.trained(origin.cell, store) if origin is not None and origin.cell else None
            if row is not None and row.status == "done" and stage not in other:
                same = digest is None or row.record.get("model", digest) == digest
                if same and (theirs is None or row.record.get("origin", theirs.digest) == theirs.digest):
                    continue
                store.reopen(job.cell, stage)
            if origin is not None and origin.cell and theirs is None:
                lacking[origin.cell] = origin.name
                continue
            settings = {**evaluation.attack, "implementation": implementation(evaluation.attack["name"])}
            settings |= {"origin": origin.said} if origin is not None else {}
            run = _claim(job, stage, machine, store, 0, evaluation, settings, fresh=stage in other)
            if run is None:
                free: Outcome = "failed" if row is not None and row.status == "failed" else "elsewhere"
                worst = max(worst, free, key=WORSE.index)
                continue
            try:
                ours = record.get("sha256", {}).get(clients_file(round))
                there = theirs or transfer.Trained(job.cell, round, clients_file(round), ours)
                stage_of = partial(
                    _attack, run, round, digest, evaluation, there, job,
                    store=store, folder=folder, shared=shared, notify=notify, stop=stop,
                )  # fmt: skip
                attempt = partial(_with_some_kernel, run, store=store, stage=stage_of)
                with _renewing(machine, run):
                    outcome = sparing(attempt, machine, evaluation.batch, partial(store.describe_run, run))
            except BaseException as error:
                if isinstance(error, checkpoints.Damaged) and digest is not None and not again:
                    store.release(run)
                    raise
                outcome = _failed(error, run, job, stage, store, notify)
            if outcome in ("interrupted", "blocked"):
                return outcome
            worst = max(worst, outcome, key=WORSE.index)
    if lacking and worst == "done":
        of = ", ".join(f"{cell} ({name})" for cell, name in lacking.items())
        notify(Event(job.cell, "transfer", "waiting", message=f"for the model of {of}, not trained yet"))
        return "waiting"
    return worst


def _attack(
    run: int,
    round: int,
    digest: str | None,
    evaluation: Evaluation,
    there: transfer.Trained,
    job: Job,
    machine: Machine,
    store: Store,
    folder: Path,
    shared: dict[str, Any],
    notify: Any,
    stop: Any,
) -> Outcome:
    import torch

    from fatbench.engine import microbatch
    from fatbench.engine.accuracy import attacked, models_of, packed, prior_accuracy, unpacked, zero_gradients
    from fatbench.methods.packages import implementation

    stage = evaluation.stage(round)
    file = folder / model_file(round)
    if digest is None and not file.exists():
        raise MachineError(
            f"the model of round {round} is not here ({file}): its results were imported or it was removed. To train"
            f" it here: fatbench forget {job.cell}, then run the suite again; the imported numbers are gone then"
        )
    if "ready" not in shared:
        shared["ready"], shared["microbatch"] = _ready(job, machine)[1], machine.microbatch
    ready = shared["ready"]
    if machine.microbatch and machine.microbatch != shared["microbatch"]:  # memory was not enough
        microbatch.bound(ready.problem.model, machine.microbatch)
        shared["microbatch"] = machine.microbatch
    if shared.get("round") != round:
        model, own, _ = checkpoints.load_model(file, machine.device, digest, job.cell, round)
        shared["models"], shared["round"] = models_of(model, own), round
    models = shared["models"]
    pairs = transfer.pairs(evaluation.origin, there, models, ready, machine, shared)
    record = {} if digest is None else {"model": digest}
    record |= {"origin": there.digest} if evaluation.origin is not None and there.digest else {}
    known = store.stages([job.cell])[(job.cell, stage)].record
    if any(known.get(which, file_digest) != file_digest for which, file_digest in record.items()):
        store.restart(run)  # what is done of it is about a model that is gone
    images, labels = ready.test[0][: evaluation.n], ready.test[1][: evaluation.n]
    n = len(labels)
    total = n * len(pairs)
    said: dict[str, Any] = {"data": ready.data, "attack": implementation(evaluation.attack["name"])}
    said |= {"microbatch": shared["microbatch"]} if shared["microbatch"] else {}
    store.describe_run(run, said, total=total)
    done = store.outcomes(job.cell, stage)
    bits = [torch.from_numpy(unpacked(data, length)) for _, length, data in done]
    position = sum(len(b) for b in bits)
    notify(Event(job.cell, stage, "start", position, total))
    attack = signatures.build("Attack", evaluation.attack)
    cost = sum(formulas.passes("Attack", evaluation.attack)) + 1
    begin = time.perf_counter()
    for place, pair in enumerate(pairs):  # all images on one model, then on the next
        first = place * n
        if position >= first + n:
            continue
        chunks = attacked(
            ready.problem, pair.judged, images, labels, attack, ("evaluate", evaluation.id, round, *pair.key),
            batch=evaluation.batch, start=position - first, origin=pair.origin,
        )  # fmt: skip
        for start, correct, _ in chunks:
            bits.append(correct)
            position = first + start + len(correct)
            chunk = (first + start, len(correct), packed(correct))
            store.commit(run, round=position, outcomes=chunk, record=record)
            so_far = sum(int(part.sum()) for part in bits) / position
            notify(Event(job.cell, stage, "progress", position, total, cost * len(correct), accuracy=so_far))
            if position < total and stop():
                store.release(run)
                notify(Event(job.cell, stage, "interrupted", position, total))
                return "interrupted"
    each = torch.cat(bits).reshape(len(pairs), n)
    right = each.double().mean(1)
    value = float(right.mean())
    numbers = [Number(evaluation.label, value, round, n=n), Number("seconds", time.perf_counter() - begin, round)]
    if len(pairs) > 1 or pairs[0].client >= 0:
        numbers += [Number(evaluation.label, float(v), round, n, p.client) for p, v in zip(pairs, right, strict=True)]
    if evaluation.origin is not None:
        return _finished(run, numbers, record, job, stage, store, notify, total)
    shares = [ready.problem.labels[shard] for shard in ready.problem.shards]
    by_client = prior_accuracy({k: each[place] for place, k in enumerate(models)}, labels, shares, ready.classes)
    numbers += [Number("prior_accuracy", v, round, n, k) for k, v in by_client.items()]
    if formulas.formula("Attack", evaluation.attack, "Forward") == 0:  # the images are as they were
        dead = [zero_gradients(ready.problem, model, images, labels) for model in models.values()]
        numbers.append(Number("zero_gradients", sum(dead) / len(dead), round, n=n))
        numbers.append(Number("chance", float(labels.bincount().max()) / n, round, n=n))
    if "evaluated" in job.spec:
        numbers += _doubts(job, ready.problem, models[-1], images, round)
    return _finished(run, numbers, record, job, stage, store, notify, total)


def _finished(
    run: int, numbers: list[Number], record: dict[str, Any], job: Job, stage: str, store: Store, notify: Any, total: int
) -> Outcome:
    store.finish(run, numbers, record=record)
    log.info("%s: %s=%.6f on %d images", stage, numbers[0].metric, numbers[0].value, numbers[0].n)
    notify(Event(job.cell, stage, "done", total, total))
    return "done"


def _doubts(job: Job, problem: Any, model: Any, images: Any, round: int) -> list[Number]:
    """What is doubtful about a model that was not trained here, as numbers that the report shows as flags."""
    from fatbench.engine import plausible

    found = plausible.doubts(problem, model, images, job.spec["evaluated"]["outputs"])
    return [Number(f"flag_{words.replace(' ', '_')}", 1.0, round) for words in found]


def evaluate(
    job: Job,
    machine: Machine,
    store: Store,
    ready: Any,
    notify: Callable[[Event], None] = lambda event: None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Attack a model that was not trained here: `ready` is its Setup, with the model as the initial state.

    The model is stored as that of the cell's only round, and from then on it is a cell as any other.
    """
    pulse = Pulse()
    pulse.felt_by(ready.problem.model)
    machine = replace(machine, pulse=pulse)
    store.add_cell(job.cell, job.spec)
    folder = Path(machine.files) / job.cell
    handler = _log_to(folder / "log.txt")
    round = int(job.spec["protocol"]["rounds"])
    try:
        header = {"cell": job.cell, "round": str(round), "classes": str(ready.classes)}
        digest = checkpoints.save_model(folder / model_file(round), ready.initial.model, {}, **header)
        run = _claim(job, "train", machine, store, round)
        if run is not None:
            store.describe_run(run, {"data": ready.data})
            store.finish(run, round=round, record={"last": {"round": round}, "sha256": {model_file(round): digest}})
        return _evaluate(job, machine, store, folder, notify, stop, True, ready)
    finally:
        log.removeHandler(handler)
        handler.close()


def _failed(error: BaseException, run: int, job: Job, stage: str, store: Store, notify: Any) -> Outcome:
    """Store a failure with its traceback; a mistake a person can cause keeps its own message.

    What is nobody's fault is no failure: the stage is given back, and where even that cannot be written, its lease
    ends.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        store.release(run)
        raise error
    if isinstance(error, Unavailable) or (isinstance(error, OSError) and error.errno in checkpoints.FULL):
        said = str(error) if isinstance(error, Unavailable) else f"the disk is full: {error}"
        log.error("%s: given back: %s", stage, said)
        store.database.patience = 0.0
        with suppress(Unavailable):
            store.release(run)
        notify(Event(job.cell, stage, "blocked", message=said))
        return "blocked"
    if isinstance(error, Stolen):
        log.warning("%s: taken over by another process", stage)
        return "elsewhere"
    text = f"{type(error).__name__}: {error}" if isinstance(error, FatbenchError) else traceback.format_exc()
    log.error("%s failed\n%s", stage, text)
    store.fail(run, text)
    last = f"{type(error).__name__}: {error}".splitlines()[0]
    notify(Event(job.cell, stage, "failed", message=last))
    free_memory()
    return "failed"


def _ready(job: Job, machine: Machine) -> tuple[dict[str, Any], Any]:
    """(the cell's settings bound to their functions, the cell's Setup)."""
    import torch

    from fatbench.engine.microbatch import dropping
    from fatbench.engine.setup import Place, setup

    device = torch.device(machine.device)
    torch.set_num_threads(machine.threads)
    signature = signatures.describe("Experiment", "cell")
    bound = signatures.bind(signature, weights.located(job.spec, Path(machine.data)))
    seat = None
    if machine.meeting is not None:
        from fatbench.engine.fast.cells import Seat

        seat = Seat(machine.meeting, job.cell, json.dumps(job.spec["model"], sort_keys=True))
    place = Place(Path(machine.data), device, machine.precision, machine.path, machine.microbatch, seat, machine.strict)
    ready = setup(place, **bound)
    if machine.microbatch and dropping(ready.problem.model):
        log.warning("dropout draws its masks for each microbatch: other masks than for the whole batch, as likely")
    if machine.pulse is not None:
        machine.pulse.felt_by(ready.problem.model)
    return bound, ready


def _claim(
    job: Job,
    stage: str,
    machine: Machine,
    store: Store,
    total: int,
    evaluation: Evaluation | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    fresh: bool = False,
) -> int | None:
    used = plugins.records(job.spec) if evaluation is None else plugins.of_evaluation(job.spec, evaluation)
    quick = machine.device.startswith("cuda") and machine.precision != "fp32"  # kernels are chosen by their speed
    return store.claim(
        job.cell,
        stage,
        suite=job.suite,
        total=total,
        settings=settings,
        retry_failed=machine.retry_failed,
        fresh=fresh,
        provenance={**produced_by(machine.device), "preset": job.preset, "precision": machine.precision,
                    "path": machine.path, "threads": machine.threads,
                    **({"not_reproducible": f"{machine.precision} on a GPU"} if quick else {}),
                    **({"microbatch": machine.microbatch} if machine.microbatch else {}),
                    **({"together": machine.together} if machine.together > 1 else {}),
                    **({"lease": machine.lease} if machine.lease != LEASE else {}),
                    **({"plugins": used} if used else {})},
    )  # fmt: skip


def _log_to(file: Path) -> logging.Handler:
    """Append this worker's log to the cell's file. Unavailable: the folder cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(file, encoding="utf-8")
    except OSError as error:
        raise Unavailable(f"cannot write {file}: {error.strerror}") from None
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk: the work goes on or says so
    own = threading.get_ident()  # a process can have several cells in hand, each in a thread
    handler.addFilter(lambda record: record.thread == own)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    return handler
