"""`fatbench audit`: what published numbers, or those of exported files, can bear."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fatbench.cli.common import known_format, print_json

if TYPE_CHECKING:
    from fatbench.report.audit import Check

FORMATS = ("text", "markdown", "json")


def audit(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]...", help="Exported results; default: the tables of papers.", show_default=False
        ),
    ] = None,
    spread: Annotated[
        float | None,
        typer.Option(help="Standard deviation over seeds of a difference, in points; default: as printed."),
    ] = None,
    format: Annotated[str, typer.Option("--format", help="text, markdown or json.")] = "text",
) -> None:
    """Ask printed numbers what they can bear: floor, order of attacks, runs, seeds. Trains nothing.

    Example: fatbench audit --spread 2.5
    """
    known_format(format, FORMATS)
    from fatbench.report import audit as auditing

    if files:
        from fatbench.api import results

        checks = auditing.of_results(results(db=[str(file) for file in files]))
    else:
        checks = auditing.audit(auditing.published(), spread)
    if format == "json":
        print_json({"checks": [_record(check) for check in checks]})
    else:
        print("\n\n".join(text(check, format) for check in checks))


def text(check: Check, format: str = "text") -> str:
    """Question, answer and rows, as a terminal or a Markdown page shows them."""
    from tabulate import tabulate

    heading = f"### {check.question}\n\n" if format == "markdown" else f"{check.question}\n  "
    sections = [f"{heading}{check.answer}"]
    if not check.rows.empty:
        rows = check.rows.astype(object).where(check.rows.notna(), "-")
        style = "github" if format == "markdown" else "simple"
        sections.append(tabulate(rows.values.tolist(), [*rows.columns], tablefmt=style, floatfmt=".4g"))
    return "\n\n".join(sections)


def _record(check: Check) -> dict[str, Any]:
    rows = check.rows.astype(object).where(check.rows.notna(), None)
    return {"question": check.question, "answer": check.answer, "rows": rows.to_dict("records")}
