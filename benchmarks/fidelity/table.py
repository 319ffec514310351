"""What was compared, on disk: `fidelity.json`, and the table in Markdown made from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.fidelity.claims import carried, outcomes
from benchmarks.fidelity.measure import Row
from benchmarks.fidelity.sources import SOURCES

FILE = "fidelity.json"
SAID = {True: "passes", False: "does not pass", None: "not compared"}


def save(folder: Path, name: str, rows: Sequence[Row], where: dict[str, Any]) -> None:
    """Put one source in the place of what was compared with it before."""
    file = folder / FILE
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    kept[name] = {"commit": SOURCES[name].commit, "where": where, "rows": [asdict(row) for row in rows]}
    file.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def load(folder: Path) -> dict[str, list[Row]]:
    """The comparisons on disk, by source. Those with another commit than today's are left out."""
    return _rows(json.loads((folder / FILE).read_text(encoding="utf-8")))


def _rows(kept: dict[str, Any]) -> dict[str, list[Row]]:
    return {
        name: [Row(**row) for row in kept[name]["rows"]]
        for name, source in SOURCES.items()
        if name in kept and kept[name]["commit"] == source.commit
    }


def write(folder: Path) -> str:
    """`fidelity.md`: rows of suites that are called after a release, then every comparison."""
    kept = json.loads((folder / FILE).read_text(encoding="utf-8"))
    found = _rows(kept)
    rows = [row for several in found.values() for row in several]
    text = ["# The authors' programs and ours, side by side", "", "| row of a suite | | comparisons | altered |"]
    text.append("|---|---|---|---|")
    for label, passes in outcomes(rows).items():
        behind = carried(label, rows)
        altered = "; ".join(f"{row.id}: {row.altered}" for row in behind if row.altered)
        text.append(f"| {label} | {SAID[passes]} | {', '.join(row.id for row in behind) or '-'} | {altered or '-'} |")
    text += ["", "`make fidelity` makes this file; docs/fidelity.md says how to read it.", ""]
    for name, several in found.items():
        source = SOURCES[name]
        text += [f"## {source.title}", "", f"{source.name}, commit {source.commit[:12]}.", ""]
        text += ["| comparison | theirs | altered | ours | measure | found | limit | |"]
        text += ["|---|---|---|---|---|---|---|---|"]
        text += [_line(row) for row in several]
        text.append("")
    places = {_where(kept[name]["where"]): None for name in found}
    text += ["Compared on:", "", *(f"- {place}" for place in places)]
    written = "\n".join(text) + "\n"
    (folder / "fidelity.md").write_text(written, encoding="utf-8")
    return written


def _line(row: Row) -> str:
    said = "passes" if row.passes else "does not pass" if row.expected else "differs, as meant"
    if row.note:
        said += f"; {row.note}"
    sign = ">=" if row.measure == "initial distribution" else "<="
    found = f"{row.measure} | {row.value:.2g} | {sign} {row.limit:g}"
    return f"| {row.id} | {row.theirs} | {row.altered or '-'} | {row.ours} | {found} | {said} |"


def _where(where: dict[str, Any]) -> str:
    versions = where["versions"]
    dirty = " with changes" if where["dirty"] else ""
    return (
        f"{where['device']}, torch {versions.get('torch')}, Python {versions.get('python')}, "
        f"commit {where['commit'][:12]}{dirty}, {where['date'][:10]}"
    )
