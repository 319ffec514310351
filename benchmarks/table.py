"""What was measured, on disk: one JSON file per kind of device, and the table in Markdown made from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = {"cpu": "2 CPU cores", "cuda": "one H200-class GPU"}


def save(folder: Path, device: str, made: dict[str, Any]) -> None:
    """Put one row or series in the place of what was measured of it before."""
    file = folder / f"bench-{device}.json"
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    kept[made["row"]] = made
    file.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def write(folder: Path, device: str, order: Sequence[str]) -> str:
    """The table of a device's JSON file, written beside it."""
    kept = json.loads((folder / f"bench-{device}.json").read_text(encoding="utf-8"))
    rows = [kept[name] for name in order if name in kept]
    text = ["| work | against | goal | measured | met |", "|---|---|---|---|---|"]
    for made in rows:
        for line in made["lines"]:
            kinds = {device, *(kind for kind, goal in line["goals"].items() if goal is not None)}
            text += [_line(line, kind, device) for kind in sorted(kinds)]
    text += ["", "A ratio is the median of several runs of both sides in turn; in brackets the least and the greatest."]
    if any(made["quick"] for made in rows):
        text += ["", "**Some of it was measured with --quick, which only shows that it works.**"]
    places: dict[str, list[str]] = {}
    for name, made in kept.items():
        places.setdefault(f"{_where(made['where'])}, {made.get('clock', 'wall time')}", []).append(name)
    notes = [f"- {line['work']}: {line['note']}" for made in rows for line in made["lines"] if line["note"]]
    text += ["", "Notes:", "", *notes]
    text += ["", "Measured on:", "", *(f"- {place}: {', '.join(names)}" for place, names in places.items())]
    written = "\n".join(text) + "\n"
    (folder / f"bench-{device}.md").write_text(written, encoding="utf-8")
    return written


def _line(line: dict[str, Any], kind: str, device: str) -> str:
    goal, unit = line["goals"].get(kind), line["unit"]
    sign = ">=" if unit in ("x", "%") else "<="
    shown = "-" if goal is None else f"{sign} {number(goal)}{_unit(unit)} on {HERE[kind]}"
    if kind != device:
        measured, met = f"not measured: no {'GPU' if kind == 'cuda' else 'run on a CPU'}", "-"
    else:
        spread = f" ({number(line['low'])} to {number(line['high'])})" if line["runs"] > 1 else ""
        measured = f"{number(line['measured'])}{_unit(unit)}{spread}"
        good = None if goal is None else line["measured"] >= goal if sign == ">=" else line["measured"] <= goal
        met = "-" if good is None else "yes" if good else "no"
    return f"| {line['work']} | {line['against']} | {shown} | {measured} | {met} |"


def number(value: float) -> str:
    """As the tables have it: no digits after the point from 100 on, else two, without zeros at the end."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}".rstrip("0").rstrip(".")


def _unit(unit: str) -> str:
    return unit if unit in ("x", "%") else f" {unit}"


def _where(where: dict[str, Any]) -> str:
    versions = where["versions"]
    dirty = " with changes" if where["dirty"] else ""
    return (
        f"{where['device']}, {where['cores']} cores, {where['threads']} thread of torch {versions.get('torch')},"
        f" Python {versions.get('python')}, commit {where['commit'][:12]}{dirty}, {where['date'][:10]}"
    )
