"""Every difference that is printed of the committed rows, beside the one that was printed before.

FATBENCH_UPDATE_GOLDEN=1 pytest tests/test_contrasts.py -k golden writes them anew; look at the difference.
"""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import said_differences
from typer.testing import CliRunner

import fatbench
from fatbench.cli.app import app
from fatbench.errors import SpecError
from fatbench.store.stages import Store

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "contrasts.json"
FILES = sorted(runpy.run_path(str(ROOT / "docs" / "results_pages.py"))["files_of_rows"]())
QUICK = ("fedvkd-robust-cpu",)


def unequal(now: Any, before: Any, place: str = "") -> Iterator[str]:
    """Where two dumps differ: "fat-baselines, cpu/tests/4: 0.1 is 0.2"; numbers agree to 1e-12."""
    if isinstance(now, dict) and isinstance(before, dict):
        for key in now.keys() | before.keys():
            yield from unequal(now.get(key), before.get(key), f"{place}/{key}")
    elif isinstance(now, list) and isinstance(before, list) and len(now) == len(before):
        for i, pair in enumerate(zip(now, before, strict=True)):
            yield from unequal(*pair, f"{place}/{i}")
    elif now != before and not (isinstance(now, float) and now == pytest.approx(before, rel=1e-12, abs=1e-12)):
        yield f"{place}: {now!r} is {before!r}"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.nightly] * (n not in QUICK)) for n in FILES])
def test_golden_differences(name: str, committed: Mapping[str, Store]) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    said = said_differences.said_of(committed[name])
    if os.environ.get("FATBENCH_UPDATE_GOLDEN"):
        write({**golden, name: said})
        return
    assert list(unequal(json.loads(json.dumps(said)), golden[name])) == []


def write(golden: Mapping[str, Any]) -> None:
    """A line for each suite and view."""
    text = json.dumps(golden, separators=(",", ":"), sort_keys=True)
    for view in said_differences.VIEWS:
        text = text.replace(f'"{view}":', f'\n"{view}":')
    GOLDEN.write_text(f"{text}\n", encoding="utf-8")


def test_the_families_of_a_suite_in_python(committed: Mapping[str, Store]) -> None:
    """The frame has what the command prints: each comparison with p after Holm, and what would have been found."""
    db = str(committed["fedvkd-robust-cpu"].database.path)
    asked = ["compare", "fedvkd-robust", "--preset", "cpu", "--db", db]
    families = json.loads(CliRunner().invoke(app, [*asked, "--format", "json"]).stdout)["families"]
    found = fatbench.tests("fedvkd-robust", preset="cpu", db=db)
    assert f"{found}" == CliRunner().invoke(app, asked).stdout
    frame = found.frame()
    said = [(one["contrast"], one["metric"], one["p_holm"], one["test"]["detectable_corrected"])
            for family in families for one in family["comparisons"]]  # fmt: skip
    assert [*frame[["contrast", "metric", "p_holm", "detectable"]].itertuples(index=False, name=None)] == said
    sizes = frame.groupby("family", sort=False)["size"].first()
    assert [*sizes.items()] == [(family["family"], family["size"]) for family in families]
    assert ((frame["low"] <= frame["difference"]) & (frame["difference"] <= frame["high"])).all()
    some = fatbench.tests("fedvkd-robust", preset="cpu", where="method=FedVKD", db=db).frame()
    assert 0 < len(some) < len(frame) and {*some["p_holm"]} <= {*frame["p_holm"]}
    with pytest.raises(SpecError, match="declares no contrasts"):
        fatbench.tests("sfat-cifar10", db=db)
