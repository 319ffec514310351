"""`fatbench import --as-published`: a paper's table becomes the published numbers of a suite."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from fatbench.cli.common import known_format, print_json
from fatbench.errors import SpecError, did_you_mean


def publish(
    papers: Sequence[Path],
    name: str,
    id: str | None,
    labels: Sequence[str],
    select: str,
    unit: str | None,
    skip_bad: bool,
    format: str,
) -> None:
    """Take tables of papers as published numbers of a suite's table, and say what was refused. SpecError."""
    from fatbench.suite import files, publish
    from fatbench.suite.tables import Selected

    known_format(format, ("text", "json"))
    checkpoints = get_args(Selected)
    if select not in checkpoints:
        raise SpecError(f"--select: no checkpoint is named '{select}'{did_you_mean(select, checkpoints)}")
    if unit not in (None, "percent", "plain"):
        raise SpecError(f"--unit: expected percent or plain, got '{unit}'")
    if bad_label := next((label_text for label_text in labels if "=" not in label_text), None):
        raise SpecError(f"--label: expected PAPER=OURS, such as 'Standard AT=FAT', got '{bad_label}'")
    ours_by_paper = {
        paper.strip(): our_label.strip() for paper, _, our_label in (label_text.partition("=") for label_text in labels)
    }
    suite = files.load(name)
    table = publish.table_of(suite, id)
    matched_rows = publish.match_rows(
        [row for paper in papers for row in publish.read_table(paper)], suite, table, ours_by_paper
    )
    for line in matched_rows.refused:
        print(f"fatbench: refused: {line}", file=sys.stderr)
    if matched_rows.refused and not (skip_bad and matched_rows.count):
        raise SpecError(
            f"{len(matched_rows.refused)} rows are refused, and nothing was written; --skip-bad takes the others"
        )
    target = publish.write(matched_rows, suite, select, unit)
    if format == "json":
        print_json(
            {
                "suite": str(suite.file),
                "table": table.id,
                "file": str(target),
                "rows": len(matched_rows.rows),
                "numbers": matched_rows.count,
                "refused": matched_rows.refused,
                "unused": matched_rows.unused,
            }
        )
        return
    print(
        f"{suite.file}: table {table.id} has {matched_rows.count} published numbers in "
        f"{len(matched_rows.rows)} rows, from {target}"
    )
    if matched_rows.unused:
        print(f"fatbench: columns that the table does not have: {', '.join(matched_rows.unused)}", file=sys.stderr)
