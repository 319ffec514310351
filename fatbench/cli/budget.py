"""`fatbench plan` without a suite: which suite and preset this machine, or a GPU, finishes in how long."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fatbench.errors import FatbenchError, NothingMatched, SpecError, did_you_mean
from fatbench.store.opening import opened

OTHER_TIMES = "--on h100 estimates a GPU, fatbench plan NAME --calibrate measures this machine"
HOURS = {"m": 1 / 60, "min": 1 / 60, "h": 1.0, "d": 24.0}


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


def hours(text: str) -> float:
    """ "8h", "90m", "1.5d" in hours. SpecError: no such time."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(m|min|h|d)", text.strip())
    if match is None:
        raise SpecError(f"--budget: expected a time such as 8h, 90m or 2d, got '{text}'")
    return float(match[1]) * HOURS[match[2]]


def offers(on: str | None, preset: str | None, db: str | None, say: Callable[[str], None]) -> Iterator[Offer]:
    """Every preset of every suite on the published images but smoke, with its time on one worker or on one GPU `on`.

    Suites in the working directory come last, under their files' names.
    preset: this one alone; of a GPU, whose time is counted network by network, it is `quick` unless another is named.
    say: gets what is being estimated. SpecError: no suite has this preset.
    NothingMatched: nothing has run here from which a time could be known.
    """
    from fatbench import settings
    from fatbench.runner import progress
    from fatbench.store import timing
    from fatbench.suite import duration, files, folders, sizes
    from fatbench.suite.papers import is_jpeg

    suite_files = files.available()
    known_files = {file.resolve() for file in suite_files.values()}
    own_names = [file for file in folders.own_files().values() if Path(file).resolve() not in known_files]
    if preset is not None:
        known_presets = {preset_name for row in sizes.listing() for preset_name in row.get("presets", ())}
        known_presets |= {preset_name for name in own_names for preset_name in _presets(name)}
        if preset not in known_presets:
            raise SpecError(f"--preset: no suite has a preset '{preset}'{did_you_mean(preset, known_presets)}")
    with opened(db, create=True) as store:
        measured_speeds = duration.speeds([] if store is None else timing.timed_runs(store))
        if on is None and measured_speeds == duration.Speeds():
            raise NothingMatched(f"nothing has run here yet, so no time is known: {OTHER_TIMES}")
        for name in [*suite_files, *own_names]:
            if is_jpeg(name):
                continue
            say(f"estimating {name}")
            try:
                suite = files.load(name)
                preset_names = [
                    preset_name
                    for preset_name in suite.presets()
                    if preset_name == preset or (preset is None and preset_name != "smoke")
                ]
                plans = [suite.plan(preset_name) for preset_name in preset_names]
            except FatbenchError:  # `suite list` says what is wrong with it
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
    from fatbench.suite import files

    try:
        return list(files.load(name).presets())
    except FatbenchError:
        return []


def show(budget: str | None, on: str | None, preset: str | None, db: str | None) -> None:
    """Print what fits, the longest first, and the commands to run it. NothingMatched: nothing does."""
    from fatbench.cli.common import working
    from fatbench.cli.show import new_console, print_rows
    from fatbench.cli.watch import duration
    from fatbench.runner.executors.local import slots
    from fatbench.runner.slots import gpu_name

    seconds_allowed = None if budget is None else 3600 * hours(budget)
    local_slots = slots(None, None)
    if on is None and (gpu := gpu_name(local_slots[0])):
        from fatbench.runner.gpu_estimates import known_gpu

        on = known_gpu(gpu)
    with working("estimating every suite") as say:
        all_offers = list(offers(on, preset or ("quick" if on else None), db, say))
    where = f"one {on.upper()}, an estimate" if on else "one worker of this machine"
    timed = [offer for offer in all_offers if offer.seconds is not None]
    fit = [
        offer
        for offer in timed
        if offer.done < offer.cells and (seconds_allowed is None or (offer.seconds or 0) <= seconds_allowed)
    ]
    unknown = len(all_offers) - len(timed)
    if fit:
        rows = [
            [
                offer.suite,
                offer.preset,
                str(offer.cells - offer.done),
                duration(offer.seconds or 0),
                ", ".join(offer.data),
            ]
            for offer in sorted(fit, key=lambda one: -(one.seconds or 0))
        ]
        print_rows(new_console(), ("suite", "preset", "cells", "time", "data"), rows, ("cells", "time"))
        print(
            f"time on {where}; fatbench plan NAME --preset PRESET has the cells, fatbench run NAME --preset PRESET runs"
        )
    if unknown:
        presets = f"{unknown} preset{'s' * (unknown != 1)}"
        print(
            f"fatbench: {presets}: nothing comparable has run here" + f"; {OTHER_TIMES}" * (on is None), file=sys.stderr
        )
    if not fit:
        shortest = min((offer.seconds for offer in timed if offer.seconds), default=None)
        remark = "" if shortest is None else f"; the shortest takes {duration(shortest)}"
        raise NothingMatched(f"no preset is known to fit{f' --budget {budget}' if budget else ''} on {where}{remark}")
