"""The committed tables are what the committed rows and today's suites give, byte for byte.

FATBENCH_UPDATE_GOLDEN=1 pytest tests/test_results.py writes the tables anew; look at the difference.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fatbench import report
from fatbench.report.numbers import flags
from fatbench.store import jsonl, selection
from fatbench.store.stages import Store
from fatbench.suite import files

RESULTS = Path(__file__).parent.parent / "results"
FORMATS = {".md": "markdown", ".tex": "latex"}
ROWS = {  # the first words of a suite's name -> the file of its rows, and the preset that was run
    "adfl": ("adfl-mnist-jpeg-cpu", "cpu"),
    "april-trained-vit-s": ("april-trained-vit-s-jpeg75-cpu", "cpu"),
    "april-trained": ("april-trained-jpeg75-cpu", "cpu"),
    "april": ("april-jpeg75-cpu", "cpu"),
    "fat-transformers": ("fat-transformers-trained-jpeg75-cpu", "cpu"),
    "fedaux-imagenet": ("fedaux-imagenet-jpeg75-cpu", "cpu"),
    "fedvkd": ("fedvkd-cifar10-jpeg75-p02-cpu", "cpu"),
    "sfat-fashion": ("sfat-fashion-cpu", "cpu"),
    "vit-s-half": ("vit-s-half-jpeg75-cpu", "cpu"),
    "vit-half": ("vit-half-jpeg75-cpu", "cpu"),
    "sfat-": ("sfat-jpeg75-cpu", "cpu"),
}
NAMES = sorted({table.stem for table in (RESULTS / "tables").iterdir()})


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Store]]:
    folder = tmp_path_factory.mktemp("results")
    opened = {}
    for rows in sorted(RESULTS.glob("*.jsonl")):
        opened[rows.stem] = Store.open(str(folder / f"{rows.stem}.db"), create=True)
        jsonl.import_(opened[rows.stem], rows)
    yield opened
    for store in opened.values():
        store.close()


@pytest.mark.parametrize("name", NAMES)
def test_golden_tables_are_made_of_the_rows(name: str, stores: dict[str, Store]) -> None:
    select = next(select for select in selection.WORDS if name.endswith(f"-{select}"))
    suite = files.load(name.removesuffix(f"-{select}"))
    file, preset = next(found for begin, found in ROWS.items() if name.startswith(begin))
    grids = report.build_tables(suite, suite.plan(preset), stores[file], select=select)
    for ending, format in FORMATS.items():
        table, text = RESULTS / "tables" / f"{name}{ending}", report.render(grids, format)
        if os.environ.get("FATBENCH_UPDATE_GOLDEN"):
            table.write_text(text, encoding="utf-8")
        assert table.read_text(encoding="utf-8") == text


def test_every_committed_network_has_learned(stores: dict[str, Store]) -> None:
    below = {file: flags.at_chance(store.measurements(), store.cells()) for file, store in stores.items()}
    assert len(below) > 10 and not {file: found for file, found in below.items() if found}
