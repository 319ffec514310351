"""`fatbench run`: from a plan to finished cells. Everything that can be checked is checked before a worker starts."""

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
from fatbench.data.catalogue import CATALOGUE
from fatbench.data.own import load
from fatbench.engine.splits import auxiliary_images, split
from fatbench.errors import MachineError, NothingMatched, SpecError, Unavailable, did_you_mean
from fatbench.runner import cell_labels, progress, provenance, slots, transfer, versions, waiting
from fatbench.runner.executors import local
from fatbench.runner.gpu_estimates import choices
from fatbench.runner.jobs import Event, Job, Machine, Recovery, Summary, Work
from fatbench.runner.run_options import RunOptions
from fatbench.runner.slots import gpu_name
from fatbench.runner.waiting import StopRequest
from fatbench.store import folder, inputs, rights
from fatbench.store.database import NoDatabase
from fatbench.store.grid_points import Point
from fatbench.store.leases import LEASE
from fatbench.store.opening import opened
from fatbench.store.stage_names import parsed
from fatbench.store.stages import Store
from fatbench.store.timing import gpu_memory, timed_runs
from fatbench.suite import calls, cost, duration, plugins, signatures, weights
from fatbench.suite.cells import Cell, Evaluation, Plan
from fatbench.suite.facts import data_key, first_images
from fatbench.suite.types import number

LARGE = 1e9  # bytes: a worker that needs more is announced
EVERY, SOON = 15.0, 2.0  # seconds between two lines about decoding, and before the first
ASKED = ("precision", "attack_precision")
EXECUTORS = ("local", "ray", "slurm")


def jobs_of(plan: Plan) -> list[Job]:
    """A plan's cells as jobs, each once; a cell whose model another one begins with comes before it.

    SpecError: its rows are to be tuned first.
    """
    if plan.untuned:
        raise SpecError(f"suite {plan.suite} tunes each row before it is compared: {plan.untuned}")
    points: dict[str, list[Point]] = {}
    for point in cell_labels.points_of(plan):
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
    """Receives the progress of a run; `fatbench.cli.watch` displays it."""

    what: str  # the run in words: "suite sfat-cifar10, preset quick"

    def begin(self, jobs: Sequence[Job], earlier_states: Mapping[str, str], slots: Sequence[str]) -> None:
        """The run starts. earlier_states: cell -> its state before the run; slots: the name of each worker's place."""

    def work_in(self, slots: Sequence[str]) -> None:
        """The slots have changed."""

    def see(self, slot: int, event: Event) -> None:
        """A worker has sent an event."""

    def note(self, text: str) -> None:
        """Show a line of text to the user now."""

    def summary(self, end: Summary) -> None:
        """The run is over."""


def run(jobs: Sequence[Job], watch: Observer, options: RunOptions) -> None:
    """Run jobs; return when all cells are done, by whichever process, else raise SystemExit with the documented code.

    Waits for cells that other processes hold, and takes over those whose lease they lose. Without `wait`, it ends when
    nothing is left that this process may do. Raises Unavailable if the disk is full or the database becomes unusable.
    """
    # this is a worker that imports its parent's script
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(f"fatbench: {Path(sys.argv[0]).name}: run suites under `if __name__ == '__main__':`")
    _check(options)
    limit, lease = settings.time_limit(options.time_limit), settings.lease_seconds(LEASE)
    url = settings.database(options.db)
    root = settings.data_folder(str(options.data) if options.data else None)
    if options.dry_run:
        if options.executor == "local":  # refuse what a run would refuse
            local_slots = local.slots(options.device, options.jobs, options.per_gpu or 1)
            settings.path(_path(options), local_slots)
            settings.precision(options.precision, local_slots)
        check_packages(jobs)
        _say_what_would_run(jobs, url, watch.what, options)
        return
    executor_module: Any = importlib.import_module(f"fatbench.runner.executors.{options.executor}")
    fit: Any = options.per_gpu or 1
    by_memory = options.per_gpu is None and options.executor == "local"
    memory: dict[int, int | None] = {}  # GPU -> free bytes before this run takes any
    if by_memory:
        memory = _free_memory()
        with contextlib.suppress(NoDatabase), Store.open(url) as store:
            fit = per_gpu_of(jobs, store, memory)
    slots = executor_module.slots(options.device, options.jobs, fit, url)
    precision, path = settings.precision(options.precision, slots), settings.path(_path(options), slots)
    for file in sorted({file for job in jobs for file in plugins.files(job.spec, job.evaluations)}):
        watch.note(f"runs the plug-in {inputs.describe(plugins.version(file))} at {file}")  # a suite may have named it
    trained = {job.spec["data"]["name"] for job in jobs if job.preset.endswith("smoke")} & CATALOGUE.keys()
    if trained:
        titles = ", ".join(CATALOGUE[name].title for name in sorted(trained))
        watch.note(f"trains on {titles}; labels name the data of the other presets")
    check_packages(jobs)
    local_cpu = options.executor == "local" and "cpu" in slots
    with settings.data_in(root):
        memory_line = cost.memory_line((job.spec for job in jobs), min(len(slots), len(jobs)), LARGE)
    if local_cpu and memory_line:
        watch.note(memory_line)
    with decoded.progress(_decoding_progress(watch)):
        fingerprints = check_data(jobs, root)
    files, checkpoint_seconds = settings.files_folder(url).absolute(), settings.checkpoint_seconds()
    with opened(url, create=True) as known_store:
        earlier_states, changed, remaining = _states_of(jobs, known_store, options, fingerprints)
        _check_origins(remaining, known_store, files)
        if known_store is not None:
            done_cells = [job.cell for job in jobs if earlier_states[job.cell] == "done"]
            asked = [options.precision, options.attack_precision]  # here, or by -c; a file's settings ask for nothing
            asked = [one or settings.given(f"run.{key}") for one, key in zip(asked, ASKED, strict=True)]
            asked_precision = None if precision == settings.AUTO or not asked[0] else precision
            attacks = settings.attack_precision(asked[1], slots) if asked[1] else None
            for line in versions.ignored_options(done_cells, known_store, asked_precision, path, attacks):
                watch.note(line)
            if repeated := {job.cell: changed[job.cell] for job in remaining if job.cell in changed}:
                watch.note(_describe_rerun(remaining, repeated, known_store))
    following = [job for job in remaining if versions.only_follows(changed.get(job.cell, {}))]
    remaining = [job for job in remaining if job not in following]
    with folder.opened(url, files, watch.note) as store:
        _check_rights([*remaining, *following], files)
        store.record_data(fingerprints)
        store.store_points(point for job in jobs for point in job.points)
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
        plugins=signatures.of_plugins(),
        recovery=Recovery(options.retry_failed, options.rerun_changed, checkpoint_seconds, lease, limit),
    )
    if options.executor == "local" and (gpu := next((slot for slot in slots if slot != "cpu"), None)) and remaining:
        watch.note(_describe_choices(remaining, gpu, machine, len({*slots})))
    if (
        options.executor == "local" and remaining and "cpu" in slots
        and "bf16" in (machine.precision, machine.attack_precision) and provenance.emulates_bfloat16()
    ):  # fmt: skip
        watch.note(
            "this CPU has no instructions for bfloat16 (avx512_bf16, amx_bf16): fp32 would be several times as fast"
        )
    request, blocked = StopRequest(), list[str]()
    slots = slots[: len(remaining)]

    def see(slot: int, event: Event) -> None:
        if event.kind == "blocked":
            blocked.append(event.message)
        watch.see(slot, event)

    watch.begin(jobs, earlier_states, slots if options.executor == "local" else [options.executor] * len(slots))
    with request, Store.open(url) as store:
        store.database.patience, store.database.stop = math.inf, request.ask  # type: ignore[method-assign]

        def widened_slots(waiting: Sequence[Job]) -> Sequence[str]:
            """The slots, and more of them once first rounds have shown that more cells fit on a GPU."""
            room = executor_module.slots(options.device, options.jobs, per_gpu_of(waiting, store, memory), url)
            if new_slots := list((Counter(room) - Counter(slots)).elements()):
                slots.extend(new_slots[: len(waiting)])
                watch.work_in(slots)
            return slots

        executor_options: dict[str, Any] = {}
        open_jobs = remaining
        # start with one cell on each GPU, one of each kind first; then several side by side
        if by_memory and "cpu" not in slots:
            open_jobs, executor_options = _each_kind_first(remaining), {"more_slots": widened_slots}
        is_first = True
        while open_jobs:
            work = Work(open_jobs, machine, options.fail_fast)
            statuses = executor_module.run(
                work, slots[: len(open_jobs)], see, request.ask, note=watch.note, **executor_options
            )
            outcome_kinds = {*statuses.values()}
            if request.times or "blocked" in outcome_kinds or (options.fail_fast and "failed" in outcome_kinds):
                break
            held_elsewhere = [job for job in open_jobs if statuses[job.cell] == "elsewhere"] if options.wait else []
            free_jobs = waiting.until_free(held_elsewhere, store, watch.note, request.ask)
            # transfer attacks: the models of this run are trained by now, those of other runs may be
            waiting_jobs = [job for job in open_jobs if statuses[job.cell] == "waiting"]
            open_jobs = free_jobs + (waiting_jobs if is_first or held_elsewhere or "done" in outcome_kinds else [])
            is_first = False
            if not open_jobs and following:  # the models that these use have been trained again by now
                _, others_changed, todo = _states_of(following, store, options)
                open_jobs = [job for job in todo if not versions.only_follows(others_changed.get(job.cell, {}))]
                following = [job for job in following if job not in open_jobs]
        changed = versions.changed(jobs, store)
        states = progress.states_of(jobs, store, changed)  # as `fatbench status` shows them
        holder_lines = waiting.holders([job for job in jobs if states[job.cell] == "running"], store)
    changed = {cell: stages for cell, stages in changed.items() if states[cell] not in ("failed", "running")}

    def cells_in(state: str) -> list[str]:
        return [job.cell for job in jobs if states[job.cell] == state and job.cell not in changed]

    watch.summary(Summary(len(jobs), cells_in("failed"), cells_in("todo"), cells_in("running"), changed))
    for line in holder_lines:
        watch.note(line)
    if request.code:
        raise SystemExit(request.code)
    if blocked and (cells_in("todo") or cells_in("running")):
        raise Unavailable(f"{blocked[0]}; no cell is marked failed: run the same command again to continue")
    if set(states.values()) != {"done"} and states:
        raise SystemExit(1)


def _check(options: RunOptions) -> None:
    """Raise SpecError for an option with an unknown value and for options that contradict each other."""
    executor, path = options.executor, _path(options)
    if executor not in EXECUTORS:
        raise SpecError(f"no executor is named '{executor}'{did_you_mean(executor, EXECUTORS)}", option="executor")
    settings.precision(options.precision)
    settings.attack_precision(options.attack_precision)
    settings.path(path)
    if path == "graphs" and options.microbatch is not None:
        raise SpecError(f" needs path=loop, and path={path} was given", option=f"run.microbatch={options.microbatch}")


def _path(options: RunOptions) -> str:
    """The path that the options ask for; microbatch turns `auto` into `loop`."""
    return "loop" if options.path == settings.AUTO and options.microbatch is not None else options.path


def _describe_choices(jobs: Sequence[Job], gpu: str, machine: Machine, gpus: int) -> str:
    cells = [Cell(job.cell, {}, job.spec, tuple(job.evaluations)) for job in jobs]
    auto = machine.precision == "auto"
    bits = slots.precision_for(gpu) if machine.precision == "auto" else machine.precision
    name = gpu_name(gpu) or gpu
    return choices(cells, name, bits, machine.attack_precision, machine.path, auto=auto, gpus=gpus)


def per_gpu_of(jobs: Sequence[Job], store: Store, free_memory: Mapping[int, int | None]) -> dict[int, int]:
    """GPU -> how many of these cells fit on it, from its free memory and what such cells used before.

    free_memory: GPU -> bytes that were free before any of them ran.
    """
    if not (memory_by_kind := gpu_memory(store, duration.kind)):
        return {}
    most_bytes = slots.largest_use((job.spec for job in jobs), memory_by_kind, duration.kind)
    return {gpu: slots.slots(bytes_, most_bytes) for gpu, bytes_ in free_memory.items()}


def _free_memory() -> dict[int, int | None]:
    return {gpu: slots.free_memory(gpu) for gpu in range(local.gpu_count())}


def _each_kind_first(jobs: Sequence[Job]) -> list[Job]:
    """Move the first cell of each kind to the front: how many fit on a GPU is known once every kind has run."""
    kinds = {duration.kind(job.spec): job for job in reversed(jobs)}
    first_cells = {job.cell for job in kinds.values()}
    return sorted(jobs, key=lambda job: job.cell not in first_cells)


def check_packages(jobs: Sequence[Job]) -> None:
    """Raise MachineError if a cell or an evaluation calls a function of a package that is not installed."""
    distinct_jobs = {
        repr([[item for item in job.spec.items() if item[0] != "seed"], job.evaluations]): job for job in jobs
    }
    for job in distinct_jobs.values():
        for call in plugins.calls_of(job.spec, job.evaluations):
            calls.demand_installed(call, f"cell {job.cell}")


def _decoding_progress(watch: Any) -> decoded.Progress:
    """A callback that reports the progress of decoding images, if that takes long."""
    last_said = time.monotonic() - EVERY + SOON

    def say(source: str, decoded_count: int, images: int) -> None:
        nonlocal last_said
        if source and time.monotonic() - last_said >= EVERY:
            last_said = time.monotonic()
            watch.note(f"{source}: {decoded_count:,} done")

    return say


def check_data(jobs: Sequence[Job], root: Path) -> dict[str, str]:
    """Read every data set of the run once and split it among clients, before a worker starts.

    Returns the SHA-256 of each data set's images and labels, by `first_images.data_key`. Raises MachineError if a data
    set or a file of weights is missing, damaged or not the one named, and SpecError if data cannot be split as asked.
    """
    for text in weights.weights_of(job.spec for job in jobs):
        weights_source = weights.parse_weights(text)
        if weights_source is not None and (row := weights.status(weights_source, root))["state"] != "complete":
            by_hand = "put the file there; the description of the suite says where it comes from"
            advice = weights_source.fetch_command if text in weights.WEIGHTS else by_hand
            raise MachineError(f"model: weights: {text}: {row['message']} ({advice})")
    keys = ("data", "partition", "seed", "train", "train_from", "validation", "client_holdout", "unseen")
    splits = {repr([*(job.spec[key] for key in keys), first_images(job.spec)["data"]]): job for job in jobs}
    datasets: dict[str, Any] = {}
    fingerprints: dict[str, str] = {}
    with_auxiliary = [job for job in jobs if job.spec.get("auxiliary") is not None]
    for job in {repr([job.spec.get(key) for key in AUXILIARY]): job for job in with_auxiliary}.values():
        image_counts = first_images(job.spec)["auxiliary"]
        fingerprints[data_key(job.spec["auxiliary"], image_counts)] = _check_auxiliary(job, root)
    for job in splits.values():
        image_counts = first_images(job.spec)["data"]
        name = data_key(job.spec["data"], image_counts)
        if name not in datasets:
            datasets = {name: load(job.spec["data"], root, image_counts)}  # one in memory at a time
            fingerprints[name] = datasets[name].fingerprint
        spec = {key: number(job.spec[key]) for key in keys[2:]}
        try:
            split(datasets[name], partition=calls.build("Partition", job.spec["partition"]), **spec)
        except ValueError as error:
            raise SpecError(f"cell {job.cell}: partition: {str(error).removeprefix('partition: ')}") from None
    return fingerprints


def _states_of(
    jobs: Sequence[Job], store: Store | None, options: RunOptions, fingerprints: Mapping[str, str] | None = None
) -> tuple[dict[str, str], versions.Changed, list[Job]]:
    """Return (cell -> its state, the stages that changed, the jobs to run).

    store: None before the first run. fingerprints: as for `versions.changed`.
    """
    if store is None:
        return {job.cell: "todo" for job in jobs}, {}, list(jobs)
    changed = versions.changed(jobs, store, fingerprints)
    states = progress.states_of(jobs, store, changed)
    keep = {"done"} | (set() if options.rerun_changed else {progress.CHANGED})
    keep |= set() if options.retry_failed else {"failed"}
    return states, changed, [job for job in jobs if states[job.cell] not in keep]


def _describe_rerun(jobs: Sequence[Job], changed: versions.Changed, store: Store) -> str:
    """A line on what `--rerun changed` will compute again, why, and how long that takes on one worker."""
    repeated = [Cell(job.cell, {}, job.spec, tuple(job.evaluations)) for job in jobs if job.cell in changed]

    def work_left(cell: Cell) -> tuple[float, list[tuple[Evaluation, float]]]:
        stages = changed[cell.id]
        if "train" in stages:
            return 1.0, [(planned, 1.0) for planned in cell.evaluations]
        changed_evaluations = {parsed(stage).evaluation for stage in stages}
        return 0.0, [(planned, 1.0) for planned in cell.evaluations if planned.id in changed_evaluations]

    time = duration.estimate(repeated, duration.speeds(timed_runs(store)), work_left)
    duration_text = (
        f"about {max(1, round(time.seconds / 60))} min on one worker" if not time.unknown else "time unknown"
    )
    reasons = "; ".join(versions.words({cell.id: changed[cell.id] for cell in repeated}))
    return (
        f"--rerun changed computes {len(repeated)} cell{'s' * (len(repeated) != 1)} again ({duration_text}): {reasons}"
    )


def _check_origins(jobs: Sequence[Job], store: Store | None, files: Path) -> None:
    """Raise MachineError if a cell begins with another cell's model that is neither trained by this run nor here."""
    todo = {job.cell for job in jobs}
    for job in jobs:
        origin = weights.trained_by(job.spec)
        if origin is None or origin in todo:
            continue
        origin_model = None if store is None else transfer.trained_model(origin, store)
        if store is None or origin_model is None:
            raise MachineError(
                f"cell {job.cell} begins with the weights of cell {origin}: run that first, or its suite"
            )
        row = store.stages([job.cell]).get((job.cell, "train"))
        if (row is None or row.status != "done") and not (files / origin / origin_model.file).is_file():
            raise MachineError(
                f"cell {job.cell} begins with the weights of cell {origin}, whose model is not here"
                f" ({files / origin / origin_model.file}): its results were imported, or it was removed. Copy "
                "it from where it"
                f" was trained; or, to train it here, fatbench delete {origin} and run this again"
            )


def _check_rights(jobs: Sequence[Job], files: Path) -> None:
    """Raise MachineError if this user may not write the files of a cell, which another may have begun."""
    for job in jobs:
        own_folder = files / job.cell
        for file in (own_folder if own_folder.exists() else files, own_folder / "log.txt"):
            if reason := rights.refusal(file):
                raise MachineError(f"cell {job.cell} cannot be run: {file} {reason}")


AUXILIARY = ("data", "train", "test", "train_from", "auxiliary", "auxiliary_n")


def _check_auxiliary(job: Job, root: Path) -> str:
    """Read the server's images, refuse images of the test set, and return their fingerprint."""
    image_counts = first_images(job.spec)
    own_set = load(job.spec["data"], root, image_counts["data"])
    is_same_set = job.spec["auxiliary"] == job.spec["data"]
    auxiliary_set = own_set if is_same_set else load(job.spec["auxiliary"], root, image_counts["auxiliary"])
    try:
        auxiliary_images(own_set, auxiliary_set, job.spec["train"], job.spec["auxiliary_n"], job.spec["train_from"])
    except SpecError as error:
        raise SpecError(f"cell {job.cell}: {error}") from None
    return auxiliary_set.fingerprint


def _say_what_would_run(jobs: Sequence[Job], url: str, title: str, options: RunOptions) -> None:
    with opened(url, create=True) as known_store:
        states, changed, remaining = _states_of(jobs, known_store, options)
        repeated = {job.cell: changed[job.cell] for job in remaining if job.cell in changed}
        rerun = _describe_rerun(remaining, repeated, known_store) if repeated and known_store is not None else ""
    failed_jobs = [job for job in jobs if states[job.cell] == "failed" and job not in remaining]
    if not jobs:
        raise NothingMatched("nothing to run")
    print(f"{title}: {len(jobs)} cells, {len(remaining)} to run")
    for job in remaining:
        print(f"{job.cell}  {states[job.cell]}  {job.label}".rstrip())
    if failed_jobs:
        print(f"{len(failed_jobs)} failed earlier: --rerun failed")
    if changed and not options.rerun_changed:
        print("\n".join(versions.lines(changed)))
    elif rerun:
        print(rerun)
    if options.executor == "slurm" and remaining:
        from fatbench.runner.executors import slurm

        print(slurm.try_out(options.device))
