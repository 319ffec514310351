"""`fatbench audit`: what published numbers, or those of exported files, can bear."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fatbench import whole_file
from fatbench.cli.common import known_format, print_json
from fatbench.cli.options import Argument, Option, formats
from fatbench.errors import SpecError

if TYPE_CHECKING:
    from fatbench.report.audit import Check

FORMATS = ("text", "markdown", "json")


def audit(
    files: Annotated[
        list[Path] | None,
        Argument(metavar="[FILE]...", help="Exported results; default: the tables of papers.", show_default=False),
    ] = None,
    spread: Annotated[
        float | None,
        Option(
            "--spread", metavar="X", help="Standard deviation over seeds of a difference, in points; default: printed."
        ),
    ] = None,
    format: Annotated[str, formats(*FORMATS)] = "text",
) -> None:
    """Check published tables for impossible or meaningless numbers.

    Example: fatbench audit --spread 2.5
    """
    known_format(format, FORMATS)
    from fatbench.report import audit as auditing

    if missing := next((file for file in files or () if not os.path.isfile(whole_file.regular(file))), None):
        raise SpecError(f"{missing}: no such file")
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
