"""`fatbench compare`: whether two rows, cells, databases or files differ."""

from __future__ import annotations

from typing import Annotated

import typer

from fatbench.cli.common import known_format, named_filter, named_preset, print_json
from fatbench.cli.options import Db, Format, Preset, Seeds, Select, Smoke, Where
from fatbench.cli.reporting import checkpoint
from fatbench.errors import SpecError


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
    from fatbench.api.comparing import declared_families
    from fatbench.report import contrasts, sentences
    from fatbench.suite.seeds import parse_seeds

    known_format(format, ("text", "json"))
    chosen_checkpoint = checkpoint(select)
    chosen_preset, filter_text = named_preset(preset, smoke), named_filter(where)
    if tests:
        if a is None:
            raise SpecError(f"--tests: the suite stands where A is: fatbench compare {name or 'NAME'} --tests")
        if b is not None or name or metric:
            raise SpecError("--tests: the suite is A, and what it declares says the rest: no B, --suite or --metric")
        chosen_seeds = parse_seeds(seeds) if seeds else None
        plan, families = declared_families(
            a, chosen_preset, chosen_seeds, filter_text, chosen_checkpoint, groups=groups, db=db
        )
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
    if a is None or b is None:
        raise SpecError(
            f"compare takes two sides, A and B: fatbench compare {a or 'A'} B --suite {name or 'NAME'} of two rows;"
            " two cells, databases or files; or fatbench compare NAME --tests"
        )
    comparison = api.compare(
        a, b, suite=name, metric=metric or (), preset=chosen_preset, seeds=seeds, where=filter_text,
        select=chosen_checkpoint, groups=groups, db=db,
    )  # fmt: skip
    if format == "json":
        header = {"a": a, "b": b, "checkpoint": select, "exploratory": True, "margin": comparison.parts[0].margin}
        print_json({**header, "comparisons": [sentences.record(part) for part in comparison.parts]})
    else:
        print(comparison, end="")
