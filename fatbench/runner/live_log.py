"""Write learning curves to TensorBoard, Weights & Biases or MLflow while cells run, beside another observer.

    with add_writer(watch, options) as observer: start.run(jobs, observer, options)

Each cell is a run of the writer, named by suite and labels: loss and accuracy per round, then each attack's accuracy.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fatbench import settings
from fatbench.errors import MachineError, SpecError, did_you_mean
from fatbench.runner.jobs import Event, Job, Summary
from fatbench.runner.run_options import RunOptions
from fatbench.runner.start import Observer
from fatbench.suite.confounders import leaves

Write = Callable[[str, int, Mapping[str, float]], None]  # (stage, round, {name: value})


@contextlib.contextmanager
def add_writer(watch: Observer, options: RunOptions) -> Iterator[Observer]:
    """Add the writer that the options name as `log` to an observer. Its files are in the run's folder.

    SpecError: there is no such writer. MachineError: it is not installed.
    """
    if (name := options.log) is None:
        yield watch
        return
    folder = settings.files_folder(settings.database(options.db))
    if name not in WRITERS:
        raise SpecError(f"no writer is named '{name}'{did_you_mean(name, WRITERS)}", option="run.log")
    with WRITERS[name](folder) as open_writer:
        yield Both(watch, open_writer)


class Both:
    """Passes everything on to another observer, and writes the numbers of the cells' events."""

    def __init__(self, watch: Observer, open_writer: Callable[[Job], Write]) -> None:
        self.watch, self.open = watch, open_writer
        self.what = watch.what
        self.jobs: dict[str, Job] = {}
        self.writes: dict[str, Write] = {}

    def begin(self, jobs: Sequence[Job], earlier_states: Mapping[str, str], slots: Sequence[str]) -> None:
        self.jobs = {job.cell: job for job in jobs}
        self.watch.begin(jobs, earlier_states, slots)

    def work_in(self, slots: Sequence[str]) -> None:
        self.watch.work_in(slots)

    def see(self, slot: int, event: Event) -> None:
        self.watch.see(slot, event)
        values = {"loss": event.loss, "accuracy": event.accuracy}
        numbers = {key: float(value) for key, value in values.items() if value is not None}
        if event.kind != "progress" or not numbers or event.cell not in self.jobs:
            return
        if event.cell not in self.writes:
            self.writes[event.cell] = self.open(self.jobs[event.cell])
        name, separator, round = event.stage.partition("@")
        stage = f"{name.rpartition('-')[0]}{separator}{round}" if separator else name  # "pgd-1a2b3c@30" -> "pgd@30"
        self.writes[event.cell](stage, event.round, numbers)

    def note(self, text: str) -> None:
        self.watch.note(text)

    def summary(self, end: Summary) -> None:
        self.watch.summary(end)


def _name(job: Job) -> str:
    return f"{job.suite}, {job.preset}, {job.label}"


@contextlib.contextmanager
def tensorboard(folder: Path) -> Iterator[Callable[[Job], Write]]:
    """Write files for `tensorboard --logdir FOLDER`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MachineError("pip install 'fatbench[tensorboard]'", option="run.log=tensorboard") from None
    with contextlib.ExitStack() as stack:

        def open_(job: Job) -> Write:
            run_folder = folder / "tensorboard" / re.sub(r"[^\w.+-]+", "-", f"{_name(job)}-{job.cell}")
            writer: Any = stack.enter_context(SummaryWriter(str(run_folder)))

            def write(stage: str, round: int, numbers: Mapping[str, float]) -> None:
                for key, value in numbers.items():
                    writer.add_scalar(f"{stage}/{key}", value, round)
                writer.flush()

            return write

        yield open_


@contextlib.contextmanager
def wandb(folder: Path) -> Iterator[Callable[[Job], Write]]:
    """Write to the project "fatbench"; WANDB_MODE=offline keeps its runs in the folder."""
    try:
        import wandb as package
    except ImportError:
        raise MachineError("pip install 'fatbench[wandb]'", option="run.log=wandb") from None
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:

        def open_(job: Job) -> Write:
            run: Any = package.init(
                project="fatbench", name=_name(job), group=job.suite, dir=str(folder), config=dict(job.spec),
                reinit="create_new", settings=package.Settings(silent=True, console="off"),
            )  # fmt: skip
            stack.callback(run.finish)
            return lambda stage, round, numbers: run.log(
                {f"{stage}/{key}": value for key, value in numbers.items()} | {f"{stage}/round": round}
            )

        yield open_


@contextlib.contextmanager
def mlflow(folder: Path) -> Iterator[Callable[[Job], Write]]:
    """Write to the experiment "fatbench" at MLFLOW_TRACKING_URI, or in a database in the folder."""
    try:
        import mlflow as package
    except ImportError:
        raise MachineError("pip install 'fatbench[mlflow]'", option="run.log=mlflow") from None
    folder.mkdir(parents=True, exist_ok=True)
    own_uri = f"sqlite:///{(folder / 'mlflow.db').absolute()}"
    client: Any = package.MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", own_uri))
    existing = client.get_experiment_by_name("fatbench")
    experiment = client.create_experiment("fatbench") if existing is None else existing.experiment_id
    runs: list[str] = []

    def open_run(job: Job) -> Write:
        tags = {"suite": job.suite, "preset": job.preset, "cell": job.cell}
        run = client.create_run(experiment, run_name=_name(job), tags=tags).info.run_id
        runs.append(run)
        for name, value in leaves(job.spec).items():
            client.log_param(run, name, str(value)[:500])  # MLflow allows 500 characters

        def write(stage: str, round: int, numbers: Mapping[str, float]) -> None:
            for key, value in numbers.items():
                client.log_metric(run, f"{stage.replace('@', ' at ')}/{key}", value, step=round)  # MLflow refuses "@"

        return write

    try:
        yield open_run
    finally:
        for run in runs:
            client.set_terminated(run)


WRITERS: dict[str, Callable[[Path], contextlib.AbstractContextManager[Callable[[Job], Write]]]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
}
