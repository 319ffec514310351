"""`fatbench run`: from a plan to finished cells. What can be wrong is found before a worker has work."""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fatbench import settings
from fatbench.data import decoded
from fatbench.data.own import load
from fatbench.engine.splits import split
from fatbench.errors import MachineError, NothingMatched, SpecError, Unavailable, did_you_mean
from fatbench.runner import labels, progress, provenance, reading, slots, transfer, versions, waiting
from fatbench.runner.executors import local
from fatbench.runner.jobs import Event, Job, Machine, Summary
from fatbench.runner.run_options import RunOptions
from fatbench.runner.slots import gpu_name
from fatbench.runner.waiting import StopRequest
from fatbench.store import folder, inputs
from fatbench.store.database import NoDatabase
from fatbench.store.leases import LEASE
from fatbench.store.opening import opened
from fatbench.store.points import Point
from fatbench.store.stage_names import parsed
from fatbench.store.stages import Store
from fatbench.store.timing import gpu_memory, measured
from fatbench.suite import calls, duration, foreign, memory_need, plugins, signatures, weights
from fatbench.suite.cells import Cell, Evaluation, Plan
from fatbench.suite.first_images import data_key, first_images
from fatbench.suite.types import number

LARGE = 1e9  # bytes that a worker takes, from which it is said
EVERY, SOON = 15.0, 2.0  # seconds between two lines on decoding, and before the first
EXECUTORS = ("local", "ray", "slurm")


def jobs_of(plan: Plan) -> list[Job]:
    """A plan's cells as jobs, each once, after those with whose models they begin."""
    points: dict[str, list[Point]] = {}
    for point in labels.points_of(plan):
        points.setdefault(point.cell, []).append(point)
    return [
        Job(
            cell.id,
            cell.spec,
            list(cell.evaluations),
            plan.checkpoints,
            cell.suite or plan.suite,
            plan.preset,
            ", ".join([*cell.key.values(), f"seed {cell.spec['seed']}"]),
            tuple(points[cell.id]),
        )
        for cell in plan.to_run()
    ]


class Observer(Protocol):
    """Who is told how a run goes on: `fatbench.cli.watch` shows it to a person."""

    what: str  # the run in words: "suite sfat-cifar10, preset quick"

    def begin(self, jobs: Sequence[Job], before: Mapping[str, str], slots: Sequence[str]) -> None:
        """The run starts. before: cell -> its state until now; slots: a name for each place a cell is worked on."""

    def work_in(self, slots: Sequence[str]) -> None:
        """From now on cells are worked on in these places."""

    def see(self, slot: int, event: Event) -> None:
        """A worker says something."""

    def note(self, text: str) -> None:
        """Something that a person should know now, in a line."""

    def summary(self, end: Summary) -> None:
        """The run is over."""


def run(
    jobs: Sequence[Job],
    watch: Observer,
    options: RunOptions,
) -> None:
    """Run jobs; returns when all is done, whoever did it, else raises SystemExit with the documented code.

    Cells in other processes' hands are waited for, and taken over where those lose them; without `wait` it ends when
    nothing is left that this process may do. Unavailable: the disk is full, or the database cannot be used any more.
    """
    if getattr(
        multiprocessing.current_process(), "_inheriting", False
    ):  # a worker that imports the script of its parent
        raise SystemExit(f"fatbench: {Path(sys.argv[0]).name}: run suites under `if __name__ == '__main__':`")
    _check(options)
    limit, lease = settings.time_limit(options.time_limit), settings.lease_seconds(LEASE)
    url = settings.database(options.db)
    root = settings.data_folder(str(options.data) if options.data else None)
    if options.dry_run:
        if options.executor == "local":  # what a run would refuse
            here = local.slots(options.device, options.jobs, options.per_gpu or 1)
            settings.path(_path(options), here)
            settings.precision(options.precision, here)
        check_packages(jobs)
        _say_what_would_run(jobs, url, watch.what, options)
        return
    chosen: Any = importlib.import_module(f"fatbench.runner.executors.{options.executor}")
    fit: Any = options.per_gpu or 1
    by_memory = options.per_gpu is None and options.executor == "local"
    memory: dict[int, int | None] = {}  # free on each GPU before this run takes any
    if by_memory:
        memory = _free_memory()
        with contextlib.suppress(NoDatabase), Store.open(url) as store:
            fit = per_gpu_of(jobs, store, memory)
    slots = chosen.slots(options.device, options.jobs, fit, url)
    precision, path = settings.precision(options.precision, slots), settings.path(_path(options), slots)
    for file in sorted({file for job in jobs for file in plugins.files(job.spec, job.evaluations)}):
        watch.note(f"runs the plug-in {inputs.describe(plugins.version(file))} at {file}")  # a suite may have named it
    check_packages(jobs)
    local_cpu = options.executor == "local" and "cpu" in slots
    if local_cpu and (said := memory_need.line((job.spec for job in jobs), min(len(slots), len(jobs)), LARGE)):
        watch.note(said)
    reading.watch()
    with decoded.progress(_decoding(watch)):
        seen = check_data(jobs, root)
    files, checkpoint_seconds = settings.files_folder(url).absolute(), settings.checkpoint_seconds()
    with opened(url, new=True) as known:
        before, changed, left = _standing(jobs, known, options, seen)
        _check_origins(left, known, files)
        if known is not None:
            done = [job.cell for job in jobs if before[job.cell] == "done"]
            asked = None if precision == settings.AUTO or not options.precision else precision
            attacks = settings.attack_precision(options.attack_precision, slots) if options.attack_precision else None
            for line in versions.asked_in_vain(done, known, asked, path, attacks):
                watch.note(line)
            if again := {job.cell: changed[job.cell] for job in left if job.cell in changed}:
                watch.note(_cost_of_again(left, again, known))
    following = [job for job in left if versions.only_follows(changed.get(job.cell, {}))]
    left = [job for job in left if job not in following]
    with folder.opened(url, files) as store:
        store.see_data(seen)
        store.label(point for job in jobs for point in job.points)
        address = str(store.database.path or url)
    machine = Machine(  # a worker may have another working directory
        db=address,
        files=str(files),
        data=str(root.absolute()),
        precision=precision,
        attack_precision=settings.attack_precision(options.attack_precision, slots)
        or ("fp32" if precision == settings.AUTO else None),
        path=path,
        microbatch=options.microbatch,
        retry_failed=options.retry_failed,
        rerun_changed=options.rerun_changed,
        checkpoint_seconds=checkpoint_seconds,
        lease=lease,
        time_limit=limit,
        plugins=signatures.of_plugins(),
    )
    if options.executor == "local" and (gpu := next((slot for slot in slots if slot != "cpu"), None)) and left:
        watch.note(_choices(left, gpu, machine, len({*slots})))
    if (
        options.executor == "local" and left and "cpu" in slots
        and "bf16" in (machine.precision, machine.attack_precision) and provenance.emulates_bfloat16()
    ):  # fmt: skip
        watch.note(
            "this CPU has no instructions for bfloat16 (avx512_bf16, amx_bf16): fp32 would be several times as fast"
        )
    request, blocked = StopRequest(), list[str]()
    slots = slots[: len(left)]

    def see(slot: int, event: Event) -> None:
        if event.kind == "blocked":
            blocked.append(event.message)
        watch.see(slot, event)

    watch.begin(jobs, before, slots if options.executor == "local" else [options.executor] * len(slots))
    with request, Store.open(url) as store:
        store.database.patience, store.database.stop = math.inf, request.ask  # type: ignore[method-assign]

        def places(waiting: Sequence[Job]) -> Sequence[str]:
            """The slots, and more where the first rounds have shown that these cells fit side by side."""
            room = chosen.slots(options.device, options.jobs, per_gpu_of(waiting, store, memory), url)
            if new := list((Counter(room) - Counter(slots)).elements()):
                slots.extend(new[: len(waiting)])
                watch.work_in(slots)
            return slots

        more: dict[str, Any] = {}
        open_ = left
        if (
            by_memory and "cpu" not in slots
        ):  # one cell on every GPU, of each kind one first, and then more side by side
            open_, more = _each_kind_first(left), {"places": places}
        first = True
        while open_:
            statuses = chosen.run(
                open_,
                machine,
                slots[: len(open_)],
                see,
                request.ask,
                fail_fast=options.fail_fast,
                note=watch.note,
                **more,
            )
            ended = {*statuses.values()}
            if request.times or "blocked" in ended or (options.fail_fast and "failed" in ended):
                break
            others = [job for job in open_ if statuses[job.cell] == "elsewhere"] if options.wait else []
            free = waiting.until_free(others, store, watch.note, request.ask)
            # attacks on models of other cells: those of this run are trained by now, others may be
            lacking = [job for job in open_ if statuses[job.cell] == "waiting"]
            open_ = free + (lacking if first or others or "done" in ended else [])
            first = False
            if not open_ and following:  # those whose models they use are trained again by now
                _, others_changed, todo = _standing(following, store, options)
                open_ = [job for job in todo if not versions.only_follows(others_changed.get(job.cell, {}))]
                following = [job for job in following if job not in open_]
        changed = versions.changed(jobs, store)
        states = progress.of_jobs(jobs, store, changed)  # what the database says, and `fatbench status` too
        held = waiting.holders([job for job in jobs if states[job.cell] == "running"], store)
    changed = {cell: stages for cell, stages in changed.items() if states[cell] not in ("failed", "running")}

    def those(state: str) -> list[str]:
        return [job.cell for job in jobs if states[job.cell] == state and job.cell not in changed]

    watch.summary(Summary(len(jobs), those("failed"), those("todo"), those("running"), changed))
    for line in held:
        watch.note(line)
    if request.code:
        raise SystemExit(request.code)
    if blocked and (those("todo") or those("running")):
        raise Unavailable(f"{blocked[0]}; no cell is marked failed: run the same command again to continue")
    if set(states.values()) != {"done"} and states:
        raise SystemExit(1)


def _check(options: RunOptions) -> None:
    """SpecError: an option's value that there is not, or two options that contradict each other."""
    executor, path = options.executor, _path(options)
    if executor not in EXECUTORS:
        raise SpecError(f"--executor: no executor is named '{executor}'{did_you_mean(executor, EXECUTORS)}")
    settings.precision(options.precision)
    settings.attack_precision(options.attack_precision)
    settings.path(path)
    if path == "graphs" and options.microbatch is not None:
        raise SpecError(
            f"--path {path} and --microbatch {options.microbatch} contradict each other: more and less at once"
        )


def _path(options: RunOptions) -> str:
    """The path asked for; not `auto` where small batches are asked for."""
    return "loop" if options.path == settings.AUTO and options.microbatch is not None else options.path


def _choices(jobs: Sequence[Job], gpu: str, machine: Machine, gpus: int) -> str:
    from fatbench.runner.gpu_estimates import choices

    cells = [Cell(job.cell, {}, job.spec, tuple(job.evaluations)) for job in jobs]
    auto = machine.precision == "auto"
    bits = slots.precision_for(gpu) if machine.precision == "auto" else machine.precision
    name = gpu_name(gpu) or gpu
    return choices(cells, name, bits, machine.attack_precision, machine.path, auto=auto, gpus=gpus)


def per_gpu_of(jobs: Sequence[Job], store: Store, free: Mapping[int, int | None]) -> dict[int, int]:
    """GPU -> how many of these cells it takes side by side, from its free memory and what such cells used before.

    free: the bytes of each GPU that were free before any of them ran.
    """
    if not (known := gpu_memory(store, duration.kind)):
        return {}
    most = slots.used((job.spec for job in jobs), known, duration.kind)
    return {gpu: slots.slots(bytes_, most) for gpu, bytes_ in free.items()}


def _free_memory() -> dict[int, int | None]:
    return {gpu: slots.free_memory(gpu) for gpu in range(local.gpu_count())}


def _each_kind_first(jobs: Sequence[Job]) -> list[Job]:
    """The cells in their order, the first of each kind before all others: what a GPU has room for goes by all kinds."""
    kinds = {duration.kind(job.spec): job for job in reversed(jobs)}
    first = {job.cell for job in kinds.values()}
    return sorted(jobs, key=lambda job: job.cell not in first)


def check_packages(jobs: Sequence[Job]) -> None:
    """MachineError: a cell, or an evaluation of it, calls a function of a package that is not installed."""
    alike = {repr([[item for item in job.spec.items() if item[0] != "seed"], job.evaluations]): job for job in jobs}
    for job in alike.values():
        for call in plugins.calls_of(job.spec, job.evaluations):
            foreign.check(call, f"cell {job.cell}")


def _decoding(watch: Any) -> decoded.Progress:
    """Says how far the decoding of images is, where it takes long."""
    last = time.monotonic() - EVERY + SOON

    def say(what: str, done: int, images: int) -> None:
        nonlocal last
        if what and time.monotonic() - last >= EVERY:
            last = time.monotonic()
            watch.note(f"{what}: {done:,} done")

    return say


def check_data(jobs: Sequence[Job], root: Path) -> dict[str, str]:
    """Read every data set of the run once and deal it to the clients, before a worker has work.

    SHA-256 of the images and labels of each data set, by `first_images.data_key`. MachineError: missing, damaged or not
    as named, or a file of weights is not there or another; SpecError: the data cannot be split as the cell says.
    """
    for text in weights.weights_of(job.spec for job in jobs):
        found = weights.read(text)
        if found is not None and (row := weights.status(found, root))["state"] != "complete":
            how = (
                found.got_by
                if text in weights.WEIGHTS
                else "put the file there; the description of the suite says where it comes from"
            )
            raise MachineError(f"model: weights: {text}: {row['message']} ({how})")
    keys = ("data", "partition", "seed", "train", "train_from", "validation", "client_holdout")
    splits = {repr([*(job.spec[key] for key in keys), first_images(job.spec)["data"]]): job for job in jobs}
    datasets: dict[str, Any] = {}
    seen: dict[str, str] = {}
    with_auxiliary = [job for job in jobs if job.spec.get("auxiliary") is not None]
    for job in {repr([job.spec.get(key) for key in AUXILIARY]): job for job in with_auxiliary}.values():
        first = first_images(job.spec)["auxiliary"]
        seen[data_key(job.spec["auxiliary"], first)] = _check_auxiliary(job, root)
    for job in splits.values():
        first = first_images(job.spec)["data"]
        name = data_key(job.spec["data"], first)
        if name not in datasets:
            datasets = {name: load(job.spec["data"], root, first)}  # one in memory at a time
            seen[name] = datasets[name].fingerprint
        spec = {key: number(job.spec[key]) for key in keys[2:]}
        try:
            split(datasets[name], partition=calls.build("Partition", job.spec["partition"]), **spec)
        except ValueError as error:
            raise SpecError(f"cell {job.cell}: partition: {str(error).removeprefix('partition: ')}") from None
    return seen


def _standing(
    jobs: Sequence[Job], store: Store | None, options: RunOptions, seen: Mapping[str, str] | None = None
) -> tuple[dict[str, str], versions.Changed, list[Job]]:
    """(cell -> its state, the stages that changed, the jobs that are to run).

    store: None before the first run. seen: as for `versions.changed`.
    """
    if store is None:
        return {job.cell: "todo" for job in jobs}, {}, list(jobs)
    changed = versions.changed(jobs, store, seen)
    states = progress.of_jobs(jobs, store, changed)
    keep = {"done"} | (set() if options.rerun_changed else {progress.CHANGED})
    keep |= set() if options.retry_failed else {"failed"}
    return states, changed, [job for job in jobs if states[job.cell] not in keep]


def _cost_of_again(jobs: Sequence[Job], changed: versions.Changed, store: Store) -> str:
    """What `--rerun-changed` is about to compute again, why, and how long that takes on one worker."""
    again = [Cell(job.cell, {}, job.spec, tuple(job.evaluations)) for job in jobs if job.cell in changed]

    def left(cell: Cell) -> tuple[float, list[tuple[Evaluation, float]]]:
        stages = changed[cell.id]
        if "train" in stages:
            return 1.0, [(one, 1.0) for one in cell.evaluations]
        judged = {parsed(stage).evaluation for stage in stages}
        return 0.0, [(one, 1.0) for one in cell.evaluations if one.id in judged]

    time = duration.estimate(again, duration.speeds(measured(store)), left)
    long = f"about {max(1, round(time.seconds / 60))} min on one worker" if not time.unknown else "time unknown"
    reasons = "; ".join(versions.words({cell.id: changed[cell.id] for cell in again}))
    return f"--rerun-changed computes {len(again)} cell{'s' * (len(again) != 1)} again ({long}): {reasons}"


def _check_origins(jobs: Sequence[Job], store: Store | None, files: Path) -> None:
    """MachineError: cells begin with the model of a cell that this run does not train and that is not here."""
    todo = {job.cell for job in jobs}
    for job in jobs:
        origin = weights.trained_by(job.spec)
        if origin is None or origin in todo:
            continue
        there = None if store is None else transfer.trained(origin, store)
        if store is None or there is None:
            raise MachineError(
                f"cell {job.cell} begins with the weights of cell {origin}: run that first, or its suite"
            )
        row = store.stages([job.cell]).get((job.cell, "train"))
        if (row is None or row.status != "done") and not (files / origin / there.file).is_file():
            raise MachineError(
                f"cell {job.cell} begins with the weights of cell {origin}, whose model is not here"
                f" ({files / origin / there.file}): its results were imported, or it was removed. Copy it from where it"
                f" was trained; or, to train it here, fatbench delete {origin} and run this again"
            )


AUXILIARY = ("data", "train", "test", "train_from", "auxiliary", "auxiliary_n")


def _check_auxiliary(job: Job, root: Path) -> str:
    """Read the server's images too, and refuse those of the test set; their fingerprint."""
    from fatbench.engine.splits import auxiliary_images

    first = first_images(job.spec)
    own = load(job.spec["data"], root, first["data"])
    same = job.spec["auxiliary"] == job.spec["data"]
    other = own if same else load(job.spec["auxiliary"], root, first["auxiliary"])
    try:
        auxiliary_images(own, other, job.spec["train"], job.spec["auxiliary_n"], job.spec["train_from"])
    except SpecError as error:
        raise SpecError(f"cell {job.cell}: {error}") from None
    return other.fingerprint


def _say_what_would_run(jobs: Sequence[Job], url: str, what: str, options: RunOptions) -> None:
    with opened(url, new=True) as known:
        states, changed, left = _standing(jobs, known, options)
        again = {job.cell: changed[job.cell] for job in left if job.cell in changed}
        cost = _cost_of_again(left, again, known) if again and known is not None else ""
    failed = [job for job in jobs if states[job.cell] == "failed" and job not in left]
    if not jobs:
        raise NothingMatched("nothing to run")
    print(f"{what}: {len(jobs)} cells, {len(left)} to run")
    for job in left:
        print(f"{job.cell}  {states[job.cell]}  {job.label}".rstrip())
    if failed:
        print(f"{len(failed)} failed earlier: --retry-failed")
    if changed and not options.rerun_changed:
        print("\n".join(versions.lines(changed)))
    elif cost:
        print(cost)
    if options.executor == "slurm" and left:
        from fatbench.runner.executors import slurm

        print(slurm.try_out(options.device))
