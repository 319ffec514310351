"""Every printed number of the committed rows is what it was: entries, notes, differences.

FATBENCH_UPDATE_GOLDEN=1 pytest tests/test_entries.py, in one process, writes tests/golden/entries.json.xz anew. It
holds each table of each file of results as JSON and as text, and the differences; say in the commit why it changed.
"""

from __future__ import annotations

import functools
import json
import lzma
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fatbench import packed, report
from fatbench.report import differences
from fatbench.runner import progress
from fatbench.store.stages import Store
from fatbench.suite import files, standard_attacks

GOLDEN = Path(__file__).parent / "golden" / "entries.json.xz"
FILES = sorted(file.name.partition(".")[0] for file in packed.results_in(Path(__file__).parent.parent / "results"))
OPTIONS = ({}, {"select": "best-test"}, {"images": "common", "published": False, "digits": 1})


def tables_of(store: Store, ways: tuple[dict[str, Any], ...] = OPTIONS) -> Iterator[tuple[str, Any]]:
    """(name, content) of every table of each suite and preset with results, in these ways, and of its differences."""
    for name, preset in sorted(progress.by_suite(store)):
        suite = files.load(name)
        plan = suite.plan(preset, refuse=False)
        for options in ways if suite.tables else ():
            asked = ", ".join([f"{name}:{preset}", *(f"{key}={value}" for key, value in options.items())])
            grids = report.build_tables(suite, plan, store, **options)
            tables = json.loads(report.render(grids, "json"))["tables"]
            yield asked, {"json": tables, "text": report.render(grids, "markdown").splitlines()}
        if plan.baseline is not None and plan.metrics():
            metric = max(plan.metrics(), key=standard_attacks.strength)
            yield f"{name}:{preset} - {metric}", differences.records(differences.of_plan(suite, plan, store, metric))


@functools.cache
def golden() -> dict[str, dict[str, Any]]:
    return json.loads(lzma.decompress(GOLDEN.read_bytes())) if GOLDEN.exists() else {}  # type: ignore[no-any-return]


@pytest.mark.parametrize("ways", [2, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("file", FILES)
def test_golden_entries(file: str, ways: int, committed: Mapping[str, Store]) -> None:
    update = os.environ.get("FATBENCH_UPDATE_GOLDEN")
    ways = len(OPTIONS) if update else ways
    found = json.loads(json.dumps(dict(tables_of(committed[file], OPTIONS[:ways]))))
    if update:
        content = json.dumps({**golden(), file: found}, sort_keys=True).encode()
        GOLDEN.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
        golden.cache_clear()
    expected = golden()[file]
    left_out = {name for name in expected if ways < len(OPTIONS) and "images=common" in name}
    assert found.keys() == expected.keys() - left_out
    for name, content in found.items():
        assert content == expected[name], f"{file}: {name}"
