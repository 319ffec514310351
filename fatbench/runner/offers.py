"""How long runs take: what is left of a plan, and which suites and presets a machine or GPU finishes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fatbench import settings
from fatbench.errors import FatbenchError, NothingMatched, SpecError, did_you_mean
from fatbench.store.opening import opened
from fatbench.suite import duration, files, folders
from fatbench.suite import duration as schedules
from fatbench.suite.cells import Plan
from fatbench.suite.folders import is_jpeg

if TYPE_CHECKING:
    from fatbench.store.stages import Store

CALIBRATION = 20  # seconds
ESTIMATED = ("quick", "weekend")  # presets whose time on a GPU is told without naming one


@dataclass(frozen=True)
class Offer:
    """A preset of a suite, and how long its cells take that are not done."""

    suite: str
    preset: str
    cells: int
    done: int
    seconds: float | None  # None: nothing comparable has run here
    data: tuple[str, ...]  # data sets that it needs
    title: str


def offers(on: str | None, preset: str | None, say: Callable[[str], None], other_times: str = "") -> Iterator[Offer]:
    """Every preset of every suite on the published images but smoke, with its time on one worker or on one GPU `on`.

    Suites in the working directory come last, under their files' names.
    preset: this one alone; of a GPU, whose time is counted network by network, they are ESTIMATED unless one is named.
    say: gets what is being estimated. other_times: how times can be known without a run, for the message.
    SpecError: no suite has this preset. NothingMatched: nothing has run here from which a time could be known.
    """
    from fatbench.runner import progress
    from fatbench.store import timing

    suite_files = files.available()
    known_files = {file.resolve() for file in suite_files.values()}
    own_names = [file for file in folders.own_files().values() if Path(file).resolve() not in known_files]
    if preset is not None:
        known_presets = {preset_name for row in files.listing() for preset_name in row.get("presets", ())}
        known_presets |= {preset_name for name in own_names for preset_name in _presets(name)}
        if preset not in known_presets:
            raise SpecError(f"no suite has a preset '{preset}'{did_you_mean(preset, known_presets)}", option="preset")
    with opened(None, create=True) as store:
        measured_speeds = duration.speeds([] if store is None else timing.timed_runs(store))
        if on is None and measured_speeds == duration.Speeds():
            raise NothingMatched(f"nothing has run here yet, so no time is known: {other_times}")
        for name in [*suite_files, *own_names]:
            if is_jpeg(name):
                continue
            say(f"estimating {name}")
            try:
                suite = files.load(name)
                published = [
                    name for name in suite.presets() if not settings.in_variant(name, suite.contents.variants)[0]
                ]
                usual = [name for name in published if (name != "smoke" if on is None else name in ESTIMATED)]
                asked = usual if preset is None else [name for name in published if name == preset]
                plans = [suite.plan(preset_name) for preset_name in asked]
            except FatbenchError:  # `list suites` says what is wrong with it
                continue
            for plan in plans:
                speeds_used = measured_speeds
                if on is not None:
                    from fatbench.runner.gpu_estimates import speeds

                    speeds_used = speeds(plan.to_run(), on, settings.precision(None), None, settings.AUTO)
                work_left = duration.whole_plan(plan) if store is None else progress.cells_left(plan, store)
                time = duration.estimate(plan.to_run(), speeds_used, work_left)
                data = tuple(sorted({cell.spec["data"]["name"] for cell in plan.cells}))
                seconds = None if time.unknown else time.seconds
                yield Offer(name, plan.preset, len(plan.to_run()), time.done, seconds, data, suite.title)


def _presets(name: str) -> list[str]:
    """The presets of a suite; none if its file is invalid."""
    try:
        return list(files.load(name).presets())
    except FatbenchError:
        return []


def time_left(
    plan: Plan, store: Store | None, calibrate: bool, jobs: int | None, unseen: duration.Speeds | None
) -> tuple[duration.Estimate, schedules.Schedule | None]:
    """How long what is left of the plan takes on one worker of this machine, or of one unseen; and on so many."""
    timed: list[duration.TimedStage] = []
    work_left = duration.whole_plan(plan)
    if store is not None:  # else nothing imports SQLAlchemy
        from fatbench.runner import progress
        from fatbench.store import timing

        timed += timing.timed_runs(store)
        work_left = progress.cells_left(plan, store)
    if calibrate:
        from fatbench.runner import calibrate as calibrating

        print(f"fatbench: measuring for about {CALIBRATION} s", file=sys.stderr)
        known_speeds = duration.speeds(timed)
        calibration = calibrating.measure_speeds(plan, known_speeds, settings.data_folder(), CALIBRATION)
        if not calibration and duration.estimate(plan.to_run(), known_speeds, work_left).unknown:
            print(
                "fatbench: no cell got far enough to be measured; times are known once a cell has run here",
                file=sys.stderr,
            )
        timed += calibration
    speeds_used = unseen or duration.speeds(timed)
    time = duration.estimate(plan.to_run(), speeds_used, work_left)
    if jobs is None:
        return time, None
    cells = duration.lengths(plan.to_run(), speeds_used, work_left)
    return time, schedules.schedule(cells, jobs, settings.checkpoint_seconds()) if cells else None
