"""`fatbench compare`: what a suite declares, or whether two rows, cells, databases or files differ."""

from __future__ import annotations

import sys
from typing import Annotated

from fatbench.cli import completing
from fatbench.cli.options import Argument, Format, Metric, Option, Preset, Select, Where
from fatbench.cli.shared import known_format, name_list, print_json
from fatbench.errors import SpecError


def compare(
    a: Annotated[
        str,
        Argument(
            metavar="SUITE|A", help="A suite; or a label, filter, cell, database or exported file.",
            show_default=False, autocompletion=completing.suites,
        ),
    ],
    b: Annotated[
        str | None, Argument(metavar="[B]", help="What to compare A with; the same kind as A.", show_default=False)
    ] = None,
    suite: Annotated[str | None, Option("--suite", metavar="NAME", help="The suite that A and B are rows of.")] = None,
    metric: Metric = None,
    preset: Preset = None,
    where: Where = None,
    select: Select = "last",
    groups: Annotated[
        str | None,
        Option(
            "--groups", metavar="FILE",
            help='File with one group label per test image, or "writers" if the data set has them.',
        ),
    ] = None,
    format: Format = "text",
) -> None:  # fmt: skip
    """Test what a suite declares, or whether two rows, cells or files differ.

    Both are paired by image and seed. Use A and B to explore; to support a claim, use the comparisons the suite
    declares.

    Example: fatbench compare SFAT FAT --suite fat-baselines --metric pgd20
    """
    from fatbench import api
    from fatbench.api.comparing import declared_families
    from fatbench.report import contrasts, sentences

    known_format(format, ("text", "json"))
    if b is None:
        _refuse_missing_b(a, suite)
        if metric:
            raise SpecError("--metric needs A and B: what a suite declares says its metrics")
        plan, families = declared_families(a, preset, None, where, select, groups=groups, db=None)
        if format == "json":
            print_json({
                "suite": plan.suite, "preset": plan.preset, "checkpoint": select,
                "families": [
                    {"family": family.family, "size": len(declared), "margin": family.margin, "note": family.note,
                     "comparisons": [sentences.record(one) for one in contrasts.of_cells(declared, cells)]}
                    for family, declared, cells, _ in families
                ],
            })  # fmt: skip
        else:
            print("\n".join(text for *_, text in families), end="")
        return
    comparison = api.compare(
        a, b, suite=suite, metric=name_list(metric), preset=preset, where=where, select=select,
        groups=groups,
    )  # fmt: skip
    if format == "json":
        header = {"a": a, "b": b, "preset": comparison.preset or None, "checkpoint": select, "exploratory": True}
        margin = comparison.parts[0].margin
        print_json({**header, "margin": margin, "comparisons": [sentences.record(part) for part in comparison.parts]})
    else:
        if comparison.preset and preset is None:
            print(f"fatbench: preset {comparison.preset}, which has most cells here (--preset)", file=sys.stderr)
        print(comparison, end="")


def _refuse_missing_b(a: str, suite: str | None) -> None:
    """SpecError: A is no suite, so something to compare it with is missing."""
    from fatbench.suite import files

    reason = ""
    try:
        files.locate(files.split_settings(a)[0])
    except SpecError as error:
        reason = f" ({error.at_terminal()})"
    if suite or reason:
        name = suite or "NAME"
        raise SpecError(f"missing B: fatbench compare {a} B --suite {name}, or fatbench compare {name}{reason}")
