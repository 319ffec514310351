"""The committed tables are what the committed rows and today's suites give, byte for byte.

FATBENCH_UPDATE_GOLDEN=1 pytest tests/test_results.py writes the tables anew; look at the difference.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from fatbench import report
from fatbench.report.numbers import flags
from fatbench.store import selection
from fatbench.store.stages import Store
from fatbench.suite import files

RESULTS = Path(__file__).parent.parent / "results"
PAGES = runpy.run_path(str(RESULTS.parent / "docs" / "results_pages.py"))
FORMATS = {".md": "markdown", ".tex": "latex"}
NAMES = sorted({table.stem for table in (RESULTS / "tables").iterdir()})


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Store]]:
    """The committed rows; processes that share the tests share what they import."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "rows"
    folder.mkdir(exist_ok=True)
    with closing(PAGES["Rows"](folder)) as rows:
        yield rows


@pytest.mark.parametrize("page", sorted(file.name.removesuffix(".md.j2") for file in PAGES["TEMPLATES"].iterdir()))
def test_pages_are_made_of_the_rows(page: str, stores: Mapping[str, Store]) -> None:
    """If it fails: make results; look at the difference."""
    assert (RESULTS / f"{page}.md").read_text(encoding="utf-8") == PAGES["Pages"](stores).page(page)


@pytest.mark.parametrize("name", NAMES)
def test_golden_tables_are_made_of_the_rows(name: str, stores: Mapping[str, Store]) -> None:
    select = next(select for select in selection.WORDS if name.endswith(f"-{select}"))
    suite = files.load(name.removesuffix(f"-{select}"))
    file, preset = PAGES["rows_of"](name)
    grids = report.build_tables(suite, suite.plan(preset), stores[file], select=select)
    for ending, format in FORMATS.items():
        table, text = RESULTS / "tables" / f"{name}{ending}", report.render(grids, format)
        if os.environ.get("FATBENCH_UPDATE_GOLDEN"):
            table.write_text(text, encoding="utf-8")
        assert table.read_text(encoding="utf-8") == text


def test_every_committed_network_has_learned(stores: Mapping[str, Store]) -> None:
    """But for those that the page on malicious clients says are destroyed: the mean of updates with IPM 100 in them."""
    below = {file: flags.at_chance(store.measurements(), store.cells()) for file, store in stores.items()}
    assert len(below) > 10 and {file for file, found in below.items() if found} == {"fat-byzantine-cpu"}
    specs = [stores["fat-byzantine-cpu"].cells()[cell] for cell, _ in below["fat-byzantine-cpu"]]
    assert [spec["malicious"]["attack"] for spec in specs] == [{"name": "ipm", "epsilon": 100.0}] * 5
    assert {spec["algorithm"]["aggregator"]["name"] for spec in specs} == {"uniform"}
