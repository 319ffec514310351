"""`fatbench compare`: whether two rows, cells, databases or files differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from fatbench.cli.common import known_format, named_filter, named_preset, plan_in, print_json
from fatbench.cli.options import Db, Format, Preset, Seeds, Select, Smoke, Where
from fatbench.cli.reporting import checkpoint
from fatbench.errors import SpecError
from fatbench.store.opening import opened

if TYPE_CHECKING:
    from fatbench.store.selection import Checkpoint
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Plan
    from fatbench.suite.files import Suite


def compare(
    a: Annotated[str | None, typer.Argument(help="A filter, label, cell id, database or exported file.")] = None,
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
    groups: Annotated[
        str | None,
        typer.Option(
            "--groups",
            metavar="FILE",
            help="Whose each test image is, a label a line; or writers, which some data know.",
        ),
    ] = None,
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
    chosen_checkpoint = checkpoint(select)
    if tests and a is None:
        raise SpecError(f"--tests: the suite stands where A is: fatbench compare {name or 'NAME'} --tests")
    if tests:
        assert a is not None
        if b is not None or name or metric:
            raise SpecError("--tests: the suite is A, and what it declares says the rest: no B, --suite or --metric")
        _declared(
            lambda store: plan_in(a, preset, smoke, seeds, None, store), where, chosen_checkpoint, groups, db, format
        )
        return
    if a is None or b is None:
        raise SpecError(
            f"compare takes two sides, A and B: fatbench compare {a or 'A'} B --suite {name or 'NAME'} of two rows;"
            " two cells, databases or files; or fatbench compare NAME --tests"
        )
    comparison = api.compare(
        a, b, suite=name, metric=metric or (), preset=named_preset(preset, smoke), seeds=seeds,
        where=named_filter(where), select=chosen_checkpoint, groups=groups, db=db,
    )  # fmt: skip
    if format == "json":
        header = {"a": a, "b": b, "checkpoint": select, "exploratory": True, "margin": comparison.margin}
        print_json({**header, "comparisons": comparing.as_json(comparison.parts, comparison.margin)})
    else:
        print(comparison, end="")


def _declared(
    suite_and_plan: Callable[[Store | None], tuple[Suite, Plan]],
    where: list[str] | None,
    select: Checkpoint,
    groups: str | None,
    db: str | None,
    format: str,
) -> None:
    """Print the families of comparisons that a suite declares. SpecError: it declares none.

    suite_and_plan: the plan, not filtered. A filter chooses what is shown; Holm's correction stays over the whole
    family.
    """
    from fatbench import api
    from fatbench.api.image_groups import labels_of
    from fatbench.report.numbers import declared_tests
    from fatbench.report.numbers.compare import measured_numbers
    from fatbench.suite import filters

    with opened(db) as store:
        suite, plan = suite_and_plan(store)
        families = [tests for tests in suite.tests if tests.contrasts]
        if not families:
            raise SpecError(f"--tests: suite '{suite.name}' declares no contrasts (section 'tests', docs/suites.md)")
        store = api.existing_store(store, db)
        plan = api.to_read(suite, plan, store)
        shown_cells = {cell.id for cell in filters.select(plan, filters.join_filters(where)).cells} if where else None
        numbers_of_cell = measured_numbers(
            store, [cell.id for cell in plan.cells], select, labels_of(groups)
        ).__getitem__
        tested = [(tests, declared_tests.run(tests, plan, numbers_of_cell)) for tests in families]
    if format == "json":
        print_json({
            "suite": plan.suite, "preset": plan.preset, "checkpoint": select,
            "families": [{"family": tests.family, "size": len(results), "margin": tests.margin, "note": tests.note,
                          "comparisons": declared_tests.as_json(
                              declared_tests.comparisons_of(results, shown_cells), tests.margin, len(results))}
                         for tests, results in tested],
        })  # fmt: skip
        return
    seeds = suite.contents.presets[plan.preset].seeds or suite.contents.seeds
    print(
        "\n".join(
            declared_tests.as_text(results, tests, plan, select, shown_cells, seeds) for tests, results in tested
        ),
        end="",
    )
