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
    if bad := next((one for one in labels if "=" not in one), None):
        raise SpecError(f"--label: expected PAPER=OURS, such as 'Standard AT=FAT', got '{bad}'")
    named = {paper.strip(): ours.strip() for paper, _, ours in (one.partition("=") for one in labels)}
    suite = files.load(name)
    table = publish.chosen(suite, id)
    taken = publish.matched([row for paper in papers for row in publish.read(paper)], suite, table, named)
    for line in taken.refused:
        print(f"fatbench: refused: {line}", file=sys.stderr)
    if taken.refused and not (skip_bad and taken.count):
        raise SpecError(f"{len(taken.refused)} rows are refused, and nothing was written; --skip-bad takes the others")
    target = publish.write(taken, suite, select, unit)
    if format == "json":
        print_json({"suite": str(suite.file), "table": table.id, "file": str(target), "rows": len(taken.rows),
                    "numbers": taken.count, "refused": taken.refused, "unused": taken.unused})  # fmt: skip
        return
    print(
        f"{suite.file}: table {table.id} has {taken.count} published numbers in {len(taken.rows)} rows, from {target}"
    )
    if taken.unused:
        print(f"fatbench: columns that the table does not have: {', '.join(taken.unused)}", file=sys.stderr)
