"""`fatbench compare`: whether two rows, cells, databases or files differ."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fatbench import hub, whole_file
from fatbench.cli.common import cell_in, known_format, plan_in, print_json
from fatbench.cli.options import Db, Format, Preset, Seeds, Select, Smoke, Where
from fatbench.cli.reporting import checkpoint
from fatbench.errors import NothingMatched, SpecError
from fatbench.store.opening import opened

if TYPE_CHECKING:
    from fatbench.store.selection import Checkpoint
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Plan
    from fatbench.suite.files import Suite


def compare(
    a: Annotated[str, typer.Argument(help="A filter, label, cell id, database or exported file.")],
    b: Annotated[str | None, typer.Argument(help="What to compare A with; the same kind as A.")] = None,
    *,
    name: Annotated[str | None, typer.Option("--suite", help="The suite that A and B are rows of.")] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", help="Show this evaluation only; may be repeated.")
    ] = None,
    select: Select = "last",
    tests: Annotated[bool, typer.Option("--tests", help="The comparisons that suite A declares; no B.")] = False,
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    seeds: Seeds = None,
    db: Db = None,
    format: Format = "text",
) -> None:
    """Test whether two rows, cells, databases or files differ, paired by image and seed.

    Such a comparison is exploratory. A claim is one of the comparisons that a suite declares: fatbench compare SUITE
    --tests

    Example: fatbench compare SFAT FAT --suite fat-baselines --metric pgd20
    """
    from fatbench import api
    from fatbench.report.numbers import compare as comparing

    known_format(format, ("text", "json"))
    at = checkpoint(select)
    if tests:
        if b is not None or name or metric:
            raise SpecError("--tests: the suite is A, and what it declares says the rest: no B, --suite or --metric")
        _declared(lambda store: plan_in(a, preset, smoke, seeds, None, store), where, at, db, format)
        return
    if b is None:
        raise SpecError("compare takes two sides, A and B (or a suite and --tests)")
    margin = None
    files = [_is_results(side) for side in (a, b)]
    if any(files) and not all(files):
        raise SpecError(
            f"'{a if files[0] else b}' is a file or database, but '{b if files[0] else a}' is not: give two of a kind"
        )
    with contextlib.ExitStack() as stack:
        if all(files):
            ours, theirs = (stack.enter_context(_results(side)) for side in (a, b))
            plan = None
            if name:
                suite, plan = plan_in(name, preset, smoke, seeds, where, ours)
                margin = suite.margin
            pairs = comparing.common(ours, theirs, plan)
            if not pairs:
                raise NothingMatched(f"{a} and {b} have no cell in common")
        else:
            found = stack.enter_context(opened(db))
            if found is None:
                raise NothingMatched("the database has no results yet: fatbench run NAME")
            ours = theirs = found
            if name:
                suite, plan = plan_in(name, preset, smoke, seeds, where, found)
                pairs, margin = comparing.rows(api.to_read(suite, plan, found), a, b), suite.margin
            elif any(sign in side for side in (a, b) for sign in "=<>"):
                raise SpecError(f"--suite: '{a}' and '{b}' are rows: name their suite with --suite")
            else:
                one, other = cell_in(found, a), cell_in(found, b)
                pairs = [comparing.Pair("", int(found.cells([one])[one].get("seed") or 0), one, other)]
        of_a = comparing.measured(ours, {pair.a for pair in pairs}, at)
        of_b = comparing.measured(theirs, {pair.b for pair in pairs}, at)
        done = comparing.compare(pairs, of_a.__getitem__, of_b.__getitem__, metric or ())
    if format == "json":
        said = {"a": a, "b": b, "checkpoint": select, "exploratory": True, "margin": margin}
        print_json({**said, "comparisons": comparing.as_json(done, margin)})
    else:
        print(comparing.as_text(done, a, b, select, margin), end="")


def _declared(
    whole: Callable[[Store | None], tuple[Suite, Plan]],
    where: list[str] | None,
    select: Checkpoint,
    db: str | None,
    format: str,
) -> None:
    """Print the families of comparisons that a suite declares. SpecError: it declares none.

    whole: the plan, not filtered. A filter chooses what is shown; Holm's correction stays over the whole family.
    """
    from fatbench import api
    from fatbench.report.numbers import declared_tests
    from fatbench.report.numbers.compare import measured
    from fatbench.suite import filters

    with opened(db) as store:
        suite, plan = whole(store)
        families = [tests for tests in suite.tests if tests.contrasts]
        if not families:
            raise SpecError(f"--tests: suite '{suite.name}' declares no contrasts (section 'tests', docs/suites.md)")
        if store is None:
            raise NothingMatched("the database holds no results yet: fatbench run NAME")
        plan = api.to_read(suite, plan, store)
        only = {cell.id for cell in filters.select(plan, filters.joined(where)).cells} if where else None
        of = measured(store, [cell.id for cell in plan.cells], select).__getitem__
        tested = [(tests, declared_tests.run(tests, plan, of)) for tests in families]
    if format == "json":
        print_json({
            "suite": plan.suite, "preset": plan.preset, "checkpoint": select,
            "families": [{"family": tests.family, "size": len(found), "margin": tests.margin, "note": tests.note,
                          "comparisons": declared_tests.as_json(
                              declared_tests.shown(found, only), tests.margin, len(found))}
                         for tests, found in tested],
        })  # fmt: skip
        return
    seeds = suite.contents.presets[plan.preset].seeds or suite.contents.seeds
    print("\n".join(declared_tests.as_text(found, tests, plan, select, only, seeds) for tests, found in tested), end="")


def _is_database(side: str) -> bool:
    """Whether it is a database's URL; an address of the hub names a file."""
    return "://" in side and hub.address(Path(side)) is None


def _is_results(side: str) -> bool:
    """Whether an argument is a database's URL, or a file."""
    return _is_database(side) or os.path.isfile(
        whole_file.regular(Path(side))
    )  # which says no to a name too long for a file


@contextlib.contextmanager
def _results(side: str) -> Iterator[Store]:
    """A database, or an exported file, imported into a temporary database."""
    from fatbench.store import jsonl
    from fatbench.store.stages import Store

    with contextlib.ExitStack() as stack:
        if not _is_database(side) and jsonl.is_export(side):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fatbench-"))
            store = stack.enter_context(Store.open(str(Path(folder) / "results.db"), create=True))
            jsonl.import_(store, side)
        else:
            store = stack.enter_context(Store.open(side))
        yield store
