"""What training and attacks share: claim a stage, set it up, renew its lease, and record how it ended."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fatbench import whole_file
from fatbench.data import decoded
from fatbench.engine.memory import out_of_memory
from fatbench.errors import FatbenchError, MachineError, Unavailable
from fatbench.runner import versions
from fatbench.runner.checkpoints import clients_file, model_file
from fatbench.runner.heartbeat import renewing
from fatbench.runner.jobs import CellStatus, Event, Job, Machine, Turn
from fatbench.runner.oom_retry import free_memory, with_oom_retry
from fatbench.runner.provenance import cpu, produced_by, slurm_job
from fatbench.store import selection
from fatbench.store.inputs import Inputs
from fatbench.store.leases import LEASE
from fatbench.store.stages import LeaseLost, Store
from fatbench.suite import calls, cost, plugin_reads, plugins, registered, source_files, weights
from fatbench.suite.cells import Evaluation, canonical

log = logging.getLogger("fatbench")
HERE = Path(__file__).parents[2]


def carry_out(
    work: Callable[[int, Machine], CellStatus],
    turn: Turn,
    machine: Machine,
    stage: str,
    *,
    batch: int,
    total: int = 0,
    evaluation: Evaluation | None = None,
    fresh: bool = False,
    raised: tuple[type[Exception], ...] = (),
) -> CellStatus:
    """Claim a stage and do its work by `work(run, machine)`, while its lease is renewed.

    If memory runs out, the work is repeated with fewer images in the network at once; if an operation has no
    deterministic kernel, it is repeated with other kernels; if a step cannot be recorded, with steps that are not. A
    failure is stored with its traceback and returned; errors of the types in `raised` release the stage and are raised.
    batch: images of a step. The others: see `claim`.
    """
    job, store = turn.job, turn.store
    run = claim(turn, stage, machine, total, evaluation, fresh)
    if run is None:
        row = store.stages([job.cell]).get((job.cell, stage))
        return "failed" if row is not None and row.status == "failed" else "elsewhere"
    try:
        # each retry is an attempt of the next
        recorded = partial(retry_unrecorded, run, store, partial(work, run))
        deterministic = partial(retry_nondeterministic, run, store, recorded)
        with renewing(machine.db, run, turn.heartbeat, machine.recovery.lease):
            return with_oom_retry(deterministic, machine, batch, partial(store.describe_run, run))
    except raised:
        store.release(run)
        raise
    except BaseException as error:
        return record_failure(error, run, turn, stage)


def claim(
    turn: Turn, stage: str, machine: Machine, total: int = 0, evaluation: Evaluation | None = None, fresh: bool = False
) -> int | None:
    """Claim a stage for this process and store its provenance.

    Returns the run's number, or None if the stage cannot be claimed. evaluation: None for training. fresh: discard what
    is done of the stage.
    """
    job = turn.job
    used = plugins.used(job.spec, [] if evaluation is None else [evaluation])
    other_plugins = source_files.run_here() - {*used.values()}
    # what a notebook gave to one call changes nothing in other cells
    other_plugins = frozenset(file for file in other_plugins if not registered.is_lent(file))
    for file in other_plugins:
        log.warning("%s: this process has run %s, which the stage does not use", stage, file)
    made_by = produced_by(machine.device)
    # cuDNN then chooses kernels by their speed
    fast_kernels = machine.device.startswith("cuda") and machine.precision == "bf16"
    return turn.store.claim(
        job.cell,
        stage,
        suite=job.suite,
        total=total,
        settings=None if evaluation is None else _settings(evaluation),
        retry_failed=machine.recovery.retry_failed,
        fresh=fresh or versions.code_changed(turn.store, job.cell, stage, made_by),
        provenance={
            **made_by,
            "cpu": cpu(),
            "preset": job.preset,
            "precision": machine.precision,
            "path": machine.path,
            "threads": machine.threads,
            **({"not_reproducible": f"{machine.precision} on a GPU"} if fast_kernels else {}),
            **({"microbatch": machine.microbatch} if machine.microbatch else {}),
            **({"slurm_job": name} if (name := slurm_job()) else {}),
            **({"lease": machine.recovery.lease} if machine.recovery.lease != LEASE else {}),
            **({"plugins": plugins.records(used)} if used else {}),
            **({"answers": job.answers} if job.answers else {}),
            **({"other_plugins": [plugins.version(file) for file in sorted(other_plugins)]} if other_plugins else {}),
        },
    )


def demand_same_inputs(turn: Turn, run: int, stage: str, current_facts: Mapping[str, Any]) -> None:
    """Raise MachineError if the cell's stored results were computed with other inputs than this machine has.

    run: the run that asks. current_facts: its data, auxiliary and weights, as in its provenance.
    """
    rows = {stage: row for (_, stage), row in turn.store.stages([turn.job.cell]).items()}
    for earlier_run in turn.store.runs([turn.job.cell]):
        same_stage = earlier_run["stage"] == stage and rows[stage].round > 0 and not earlier_run.get("dropped")
        trained = stage != "train" and earlier_run["id"] == rows["train"].run
        # the run that asks, or one whose results this stage neither continues nor attacks
        if earlier_run["id"] == run or not (same_stage or trained):
            continue
        compared = ("data", "weights") if same_stage else ("data",)  # initial weights concern only the training
        earlier_inputs, current = Inputs.of_run(earlier_run), Inputs.of_run(current_facts)
        if reasons := Inputs({name: earlier_inputs[name] for name in compared}).differ(current):
            raise MachineError(
                f"{stage}: this machine has {'; '.join(reason.words for reason in reasons)}: the cell's stored"
                " results cannot be continued; --rerun changed computes them again"
            )


class Reader:
    """Writes to a stage's run what its plug-ins have read, whenever there is something new."""

    def __init__(self, store: Store, run: int, job: Job, stage: str, evaluations: Sequence[Evaluation] = ()) -> None:
        self.store, self.run, self.used = store, run, plugins.used(job.spec, evaluations)
        self.earlier: dict[str, str] = {}  # what earlier runs of this stage have read
        for earlier_run in store.runs([job.cell]) if self.used else ():
            if earlier_run["stage"] == stage and earlier_run["id"] != run and not earlier_run.get("dropped"):
                self.earlier |= earlier_run.get("read") or {}
        self.told: dict[str, str] = {}
        plugin_reads.recorded(self.used)  # so that modules are recorded as they are now, before the work

    def tell(self) -> None:
        """Write the digests to the run's provenance. Raises the errors of `Store.describe_run`."""
        digests = {**self.earlier, **plugin_reads.recorded(self.used)}
        if digests != self.told:
            self.store.describe_run(self.run, {"read": digests})
            self.told = digests


def _settings(evaluation: Evaluation) -> dict[str, Any]:
    """The settings that are stored with an evaluation's numbers."""
    from fatbench.methods.packages import implementation

    settings = {**evaluation.attack, "implementation": implementation(evaluation.attack["name"])}
    settings |= {"on": evaluation.on} if evaluation.on else {}
    return settings if evaluation.origin is None else {**settings, "origin": evaluation.origin.stored_text}


def ready_for(turn: Turn, machine: Machine, trained: Path | None) -> tuple[dict[str, Any], Any]:
    """Return (the cell's settings bound to their functions, the cell's Setup); its network beats for the turn's lease.

    trained: the file of a cell's model whose weights the network begins with, if it does.
    """
    import torch

    from fatbench.engine.microbatch import has_dropout
    from fatbench.engine.setup import Runtime, setup

    job, device = turn.job, torch.device(machine.device)
    torch.set_num_threads(machine.threads)
    bound = calls.bind_cell(job.spec, Path(machine.data), trained)
    assert machine.path != "auto" and machine.precision != "auto"  # the worker has chosen both
    runtime = Runtime(Path(machine.data), device, machine.precision, machine.path, machine.microbatch, machine.strict)
    try:
        ready = setup(runtime, **bound)
    except Exception as error:  # no batch was computed yet, so smaller ones would not help
        if not out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        name = job.spec["data"]["name"]
        raise MachineError(
            f"out of memory while data set {name} was read{cost.memory_text(job.spec)}: {reason}"
        ) from None
    if machine.microbatch and has_dropout(ready.problem.model):
        log.warning(
            "dropout draws a mask for each microbatch: not the masks of the whole batch, but equally likely ones"
        )
    if ready.note:
        log.warning("%s", ready.note)
    turn.heartbeat.watch(ready.problem.model)
    return bound, ready


def retry_nondeterministic(
    run: int, store: Store, stage: Callable[[Machine], CellStatus], machine: Machine
) -> CellStatus:
    """Run a stage, and once more without determinism if an operation has no deterministic kernel; the run says so."""
    try:
        return stage(machine)
    except Exception as error:
        import torch

        from fatbench.engine.precision import exact, without_kernel

        if not machine.strict or (operation := without_kernel(error)) is None:
            raise
        log.warning("not reproducible bit for bit: %s has no deterministic kernel", operation)
        store.describe_run(run, {"not_reproducible": f"{operation} has no deterministic kernel"})
        device = torch.device(machine.device)
    assert machine.precision != "auto"
    # the other kernels only for this stage: the worker goes on with others
    exact(device, machine.precision, strict=False)
    try:
        return stage(replace(machine, strict=False))
    finally:
        exact(device, machine.precision)


def retry_unrecorded(run: int, store: Store, stage: Callable[[Machine], CellStatus], machine: Machine) -> CellStatus:
    """Run a stage, and once more on the path loop if a step cannot be recorded, or a recording takes too much memory.

    The run and its resumes keep that path.
    """
    try:
        return stage(machine)
    except Exception as error:
        from fatbench.engine.graphs import NotRecorded

        if not isinstance(error, NotRecorded) and not (machine.path == "graphs" and out_of_memory(error)):
            raise
        log.warning("%s: trained with run.path=loop", str(error).partition("\n")[0])
        store.describe_run(run, {"path": "loop"})
    free_memory()  # outside `except`, where the error no longer keeps the recording alive
    return stage(replace(machine, path="loop"))


def files_of(record: Mapping[str, Any]) -> list[str]:
    """The files that a train stage's record refers to: the models, and the clients' models of the same rounds."""
    rounds = {int(record[name]["round"]) for name in selection.WORDS if name in record}
    return sorted(file(round) for round in rounds for file in (model_file, clients_file))


def header_of(job: Job, round: int, classes: int) -> dict[str, str]:
    """The header of a model's file: enough to attack the model outside any suite.

    Settings at their default are left out, as in a cell's identity: otherwise a setting that a later version adds would
    change the file of the same network, and so its SHA-256. The weights that training began with are left out too.
    """
    short_spec = calls.without_defaults(calls.call("Experiment", job.spec))
    spec_text = json.dumps({**short_spec, "model": without_weights(short_spec["model"])}, sort_keys=True)
    return {"cell": job.cell, "round": str(round), "spec": spec_text, "classes": str(classes)}


def spec_of(header: Mapping[str, str]) -> calls.Call:
    """The canonical cell of a model's file, without its initial weights. SpecError: another version wrote it."""
    spec = json.loads(header["spec"])
    return canonical({**spec, "model": without_weights(spec["model"])})


def without_weights(model: Mapping[str, Any]) -> dict[str, Any]:
    """A network's settings without that of its initial weights, and of those in it."""
    return weights.changed(model, lambda _: None)


def record_failure(error: BaseException, run: int, turn: Turn, stage: str) -> CellStatus:
    """Store a failure with its traceback, or with the message alone if it is one of our own errors.

    If the cell is not at fault (Ctrl-C, a full disk, a lost lease), the stage is released and not marked as failed. If
    even that cannot be written, the lease runs out.
    """
    store, job = turn.store, turn.job
    if isinstance(error, KeyboardInterrupt):
        store.release(run)
        raise error
    if isinstance(error, decoded.Interrupted):
        store.release(run)
        turn.notify(Event(job.cell, stage, "interrupted"))
        return "interrupted"
    if isinstance(error, Unavailable) or (isinstance(error, OSError) and error.errno in whole_file.FULL):
        reason = str(error) if isinstance(error, Unavailable) else f"the disk is full: {error}"
        log.error("%s: released: %s", stage, reason)
        store.database.patience = 0.0  # the disk that is full may be the database's
        with suppress(Unavailable):
            store.release(run)
        turn.notify(Event(job.cell, stage, "blocked", message=reason))
        return "blocked"
    if isinstance(error, LeaseLost):
        log.warning("%s: taken over by another process", stage)
        return "elsewhere"
    text = f"{type(error).__name__}: {error}" if isinstance(error, FatbenchError) else traceback.format_exc()
    text = text.replace(f"{HERE}/", "")  # paths from the package on, wherever it lies
    log.error("%s failed\n%s", stage, text)
    store.fail(run, text)
    last_line = f"{type(error).__name__}: {error}".splitlines()[0]
    turn.notify(Event(job.cell, stage, "failed", message=last_line))
    free_memory()  # what the failed work held on the card
    return "failed"
