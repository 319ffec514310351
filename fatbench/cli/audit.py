"""`fatbench audit`: what printed accuracies can bear."""

from __future__ import annotations

from typing import Annotated

from fatbench.cli.options import Argument, Option, formats
from fatbench.cli.shared import known_format, print_json
from fatbench.errors import SpecError

FORMATS = ("text", "markdown", "json", "csv")


def audit(
    files: Annotated[
        list[str] | None,
        Argument(
            metavar="[FILE]...",
            help="Table in CSV, Markdown, LaTeX or pasted lines; exported results, database; default: all papers.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[str | None, Option("--method", metavar="COLUMN", help="Column with the methods.")] = None,
    baseline: Annotated[
        str | None, Option("--baseline", metavar="NAME", help="Method that others are compared with.")
    ] = None,
    classes: Annotated[int | None, Option("--classes", metavar="N", help="Number of classes.")] = None,
    images: Annotated[int | None, Option("--images", metavar="N", help="Number of images.")] = None,
    radius: Annotated[str | None, Option("--radius", metavar="R", help="Radius of every attack: 8/255.")] = None,
    spread: Annotated[
        float | None,
        Option(
            "--spread", metavar="X", help="Standard deviation over seeds of a difference, in points; default: printed."
        ),
    ] = None,
    format: Annotated[str, formats(*FORMATS)] = "text",
) -> None:
    """Ask what a printed table can bear: impossible decimals, weak attacks, small leads. Trains nothing.

    Example: fatbench audit paper.csv --baseline FedAvg --radius 8/255
    """
    known_format(format, FORMATS)
    from fatbench import api
    from fatbench.report import audit as auditing

    given = {"method": method, "baseline": baseline, "classes": classes, "images": images, "radius": radius}
    if not files and (option := next((name for name, value in given.items() if value is not None), None)):
        raise SpecError("only with a FILE: what holds for the papers is said beside their tables", option=option)
    found = api.audit(*files, **given, spread=spread) if files else auditing.of_papers(spread)  # type: ignore[arg-type]
    if format == "json":
        print_json(found.record())
    else:
        print(found.numbers.to_csv(index=False).rstrip() if format == "csv" else found.text(format))
