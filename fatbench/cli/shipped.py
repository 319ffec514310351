"""Numbers that come with the program: which files have cells of a suite, and what is left to run beside them."""

from __future__ import annotations

import filecmp
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fatbench import packed
from fatbench.cli.shared import working
from fatbench.errors import FatbenchError
from fatbench.store.opening import opened
from fatbench.suite.types import seeds_text

if TYPE_CHECKING:
    from fatbench.suite.cells import Plan

CELL = re.compile(r'{"cell":"([0-9a-f]+)"')
PACKAGE = Path(__file__).parent.parent


def files_of(cells: set[str]) -> list[Path]:
    """The exported files, in ./results and in the clone's, that have one of these cells."""
    folders = {folder.resolve(): folder for folder in (PACKAGE.parent / "results", Path("results"))}  # shown as named
    candidates: list[Path] = []
    for file in (file for folder in folders.values() for file in packed.results_in(folder)):
        if not any(file.name == other.name and filecmp.cmp(file, other, shallow=False) for other in candidates):
            candidates.append(file)  # of a clone and a copy of its files one is enough
    return [file for file in candidates if not cells.isdisjoint(_ids(file))]


def _ids(file: Path) -> Iterator[str]:
    with packed.read_text(file) as lines:
        yield from (ids[1] for line in lines if (ids := CELL.match(line)))


def take_rows(name: str, cell_filter: str, rows: Sequence[Path]) -> None:
    """Import the numbers that there are of a suite's cells, and print what is left to run.

    name: the suite's file. cell_filter: a filter of the cells that the suite adds to what it extends; empty: all are
    new.
    """
    from fatbench.cli.exchange import take_in
    from fatbench.report import unlike
    from fatbench.suite import files

    suite = files.load(name)
    extended = str(suite.contents.extends)
    plans: dict[str, Plan] = {}
    with working(f"reading which cells of {extended} have numbers"):
        for preset in suite.presets():
            try:
                plans[preset] = suite.plan(preset)
            except FatbenchError as error:
                print(f"fatbench: preset {preset} cannot run yet: {error.at_terminal()}", file=sys.stderr)
        parent_suite = files.load(extended)
        cells = {cell.id for preset in parent_suite.presets() for cell in parent_suite.plan(preset).cells}
        row_files = list(rows) or files_of(cells)
    if row_files:
        take_in(row_files)
    else:
        similar_suites = [suite_name for suite_name in files.available() if suite_name.startswith(f"{extended}-")]
        hint = f"; {', '.join(similar_suites)} may have some" if similar_suites else ""
        print(f"no numbers of {extended} are here: --beside FILE takes an exported file{hint}")
    for presets, sentence in unlike(suite, list(plans.values())):
        print(f"not compared in {presets}: {sentence}")
    if not plans:
        print(f"next: change {name}, then\n  fatbench check {name}")
        return
    with working("estimating what is left to run"):
        preset, left_text = _what_is_left(plans, cell_filter)
    quote = '"' if "'" in cell_filter else ""
    filter_option = f" -k {quote}{cell_filter}{quote}" if cell_filter else ""
    preset_option = "" if preset == "paper" else f" --preset {preset}"
    print(f"{left_text}\nnext:")
    if "smoke" in plans:
        print(f"  fatbench run {name} --smoke{filter_option}\n  fatbench report {name} --smoke{filter_option}")
    print(f"  fatbench run {name}{preset_option}{filter_option}\n  fatbench report {name}{preset_option}")


def _what_is_left(plans: Mapping[str, Plan], cell_filter: str) -> tuple[str, str]:
    """(the preset that most numbers are there of, how many of its cells are done and how long the added ones take)."""
    from fatbench.cli.watch import duration
    from fatbench.runner import progress
    from fatbench.store import timing
    from fatbench.suite import duration as durations
    from fatbench.suite.filters import select

    with opened(None, create=True) as store:
        states = {preset: progress.cells_of(plan, store) for preset, plan in plans.items()}
        begun_by_preset = {preset: sum(row.stages_done > 0 for row in rows) for preset, rows in states.items()}
        preset = max(begun_by_preset, key=begun_by_preset.__getitem__)
        plan, own_plan = plans[preset], select(plans[preset], cell_filter) if cell_filter else plans[preset]
        if store is None:
            return preset, f"yours: {_cell_count(own_plan)}"
        speeds = durations.speeds(timing.timed_runs(store, everywhere=True))
        time = durations.estimate(own_plan.to_run(), speeds, progress.cells_left(own_plan, store))
    done_count, left_count = sum(row.status == "done" for row in states[preset]), len(own_plan.to_run()) - time.done
    time_each = f", about {duration(time.seconds / left_count)} each" if left_count and not time.unknown else ""
    untouched_count = len(plan.to_run()) - done_count - left_count
    lines = [f"preset {preset}: {done_count} cells are there", f"yours: {_cell_count(own_plan)}{time_each}"]
    if untouched_count:
        lines.append(f"others: {untouched_count} cells not run yet; yours do not need them")
    if not cell_filter:
        lines.append("it needs the models, which exported numbers do not hold")
    return preset, "\n".join(lines)


def _cell_count(plan: Plan) -> str:
    """ "5 cells (seeds 0, 1, 2, 3, 4)"."""
    seeds = {cell.spec["seed"] for cell in plan.cells}
    cells = len(plan.to_run())
    return f"{cells} cell{'s' * (cells != 1)} (seed{'s' * (len(seeds) > 1)} {seeds_text(seeds)})"
