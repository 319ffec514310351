"""Numbers that come with the program: which files have cells of a suite, and what is left to run beside them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fatbench import packed
from fatbench.errors import FatbenchError
from fatbench.store.opening import opened

if TYPE_CHECKING:
    from fatbench.suite.cells import Plan

CELL = re.compile(r'{"cell":"([0-9a-f]+)"')
PACKAGE = Path(__file__).parent.parent


def files_of(cells: set[str]) -> list[Path]:
    """The exported files, in ./results and in the clone's, that have one of these cells."""
    folders = dict.fromkeys(folder.resolve() for folder in (Path("results"), PACKAGE.parent / "results"))
    return [file for folder in folders for file in packed.results_in(folder) if not cells.isdisjoint(_ids(file))]


def _ids(file: Path) -> Iterator[str]:
    with packed.read_text(file) as lines:
        yield from (found[1] for line in lines if (found := CELL.match(line)))


def take_rows(name: str, added: str, rows: Sequence[Path], db: str | None) -> None:
    """Import the numbers that there are of a suite's cells, and print what is left to run.

    name: the suite's file. added: a filter of the cells that the suite adds to what it extends; empty: all are new.
    """
    from fatbench.cli.db import import_
    from fatbench.report import unlike
    from fatbench.suite import files

    suite = files.load(name)
    extended = str(suite.contents.extends)
    plans: dict[str, Plan] = {}
    for preset in suite.presets():
        try:
            plans[preset] = suite.plan(preset)
        except FatbenchError as error:
            print(f"fatbench: preset {preset} cannot run yet: {error}", file=sys.stderr)
    under = files.load(extended)
    cells = {cell.id for preset in under.presets() for cell in under.plan(preset).cells}
    if found := list(rows) or files_of(cells):
        import_(found, db=db)
    else:
        near = [one for one in files.available() if one.startswith(f"{extended}-")]
        others = f"; {', '.join(near)} may have some" if near else ""
        print(f"no numbers of {extended} are here: give exported files with --rows{others}")
    for presets, sentence in unlike(suite, list(plans.values())):
        print(f"not compared in {presets}: {sentence}")
    if not plans:
        print(f"next: change {name}, then\n  fatbench suite check {name}")
        return
    preset, said = _what_is_left(plans, added, db)
    quote = '"' if "'" in added else ""
    chosen = f" -k {quote}{added}{quote}" if added else ""
    which = "" if preset == "paper" else f" --preset {preset}"
    print(f"{said}\nnext:")
    if "smoke" in plans:
        print(f"  fatbench run {name} --smoke{chosen}")
    print(f"  fatbench run {name}{which}{chosen}\n  fatbench report {name}{which}")


def _what_is_left(plans: Mapping[str, Plan], added: str, db: str | None) -> tuple[str, str]:
    """(the preset that most numbers are there of, how many of its cells are done and how long the added ones take)."""
    from fatbench.cli.watch import duration
    from fatbench.runner import progress
    from fatbench.store import timing
    from fatbench.suite import duration as durations
    from fatbench.suite.filters import select

    with opened(db, new=True) as store:
        states = {preset: progress.cells_of(plan, store) for preset, plan in plans.items()}
        begun = {preset: sum(row.stages_done > 0 for row in rows) for preset, rows in states.items()}
        preset = max(begun, key=begun.__getitem__)
        plan, own = plans[preset], select(plans[preset], added) if added else plans[preset]
        if store is None:
            return preset, f"yours: {_counted(own)}"
        known = durations.speeds(timing.measured(store, everywhere=True))
        time = durations.estimate(own.to_run(), known, progress.cells_left(own, store))
    done, left = sum(row.status == "done" for row in states[preset]), len(own.to_run()) - time.done
    each = f", about {duration(time.seconds / left)} each" if left and not time.unknown else ""
    nobody = len(plan.to_run()) - done - left
    rest = f"; {nobody} more that nobody has run" if nobody else ""
    models = "; it needs the models, which exported numbers do not hold" if not added else ""
    return preset, f"preset {preset}: {done} cells are there; yours: {_counted(own)}{each}{rest}{models}"


def _counted(plan: Plan) -> str:
    """ "5 cells (seeds 0, 1, 2, 3, 4)"."""
    seeds = ", ".join(map(str, sorted({cell.spec["seed"] for cell in plan.cells})))
    cells = len(plan.to_run())
    return f"{cells} cell{'s' * (cells != 1)} (seed{'s' * (',' in seeds)} {seeds})"
