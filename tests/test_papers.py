"""docs/papers.md is true: it lists each table and figure of the five papers, and its ids are those of the suites."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from fatbench.report.numbers.points import points_of_figure
from fatbench.suite import files, filters
from fatbench.suite.files import Suite

ROOT = Path(__file__).parent.parent
LINE = re.compile(r"^- ((?:Table|Figure|Appendix).*?): (.*?)(?=\n- |\n\n|\Z)", re.MULTILINE | re.DOTALL)
NOTHING = "no numbers: "
TABLES = {"SFAT": 21, "Federated": 3, "Random": 1, "FedVKD": 1, "AdFL": 1}  # how many each paper has
FIGURES = {"SFAT": 12, "Federated": 25, "Random": 6, "FedVKD": 5, "AdFL": 6}
VARIANTS = ("-jpeg75", "-jpeg")  # the same suites on other images


class Item(NamedTuple):
    """A line of a list: a table or some figures of a paper."""

    kind: str  # "Table", "Figure" or "Appendix"
    numbers: list[int]
    suites: list[str]
    ids: list[str]
    differs: str


def numbered(said: str) -> list[int]:
    """ "3 to 5, 7" -> 3, 4, 5, 7."""
    ends = re.findall(r"(\d+)(?:(?:-| to )(\d+))?", said)
    return [n for first, last in ends for n in range(int(first), int(last or first) + 1)]


def listed() -> dict[str, list[Item]]:
    """Paper -> the lines of its list in docs/papers.md."""
    found: dict[str, list[Item]] = {}
    for part in (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        for item, text in LINE.findall(part):
            where, _, differs = " ".join(text.split()).partition("; ")
            where, differs = ("-", where) if where.startswith(NOTHING) else (where, differs)
            ids = re.sub(r"`[^`]*`,?", "", where).replace(",", "").split()
            suites = re.findall(r"`([^`]*)`", where)
            kind = item.split()[0].removesuffix("s")
            said = [] if kind == "Appendix" else numbered(item.split(" ", 1)[1])
            found.setdefault(part.split()[0], []).append(Item(kind, said, suites, ids, differs))
    return found


LISTED = [item for items in listed().values() for item in items]


def titled(suite: Suite, kind: str) -> dict[str, str]:
    """Id -> title of the tables or figures of a suite."""
    shown = suite.tables if kind == "Table" else suite.figures if kind == "Figure" else [*suite.tables, *suite.figures]
    return {one.id: one.title for one in shown}


@pytest.mark.parametrize(("kind", "counts"), [("Table", TABLES), ("Figure", FIGURES)])
def test_every_table_and_figure_of_every_paper_is_listed(kind: str, counts: dict[str, int]) -> None:
    here = {p: sorted({n for one in items if one.kind == kind for n in one.numbers}) for p, items in listed().items()}
    assert here == {paper: list(range(1, count + 1)) for paper, count in counts.items()}


@pytest.mark.parametrize("item", LISTED, ids=lambda one: f"{one.kind}-{one.numbers[:1]}-{'-'.join(one.suites[:1])}")
def test_a_listed_item_is_one_of_its_suites_or_has_no_numbers(item: Item) -> None:
    """Its suites have the table or figure, and where the title names a number it is this one."""
    assert "partly" not in item.differs
    if item.ids == ["-"]:
        assert len(item.differs) > len(NOTHING)
        return
    assert item.ids and item.suites
    for name in item.suites:
        titles = titled(files.load(name), item.kind)
        for id in item.ids:
            assert id in titles, (name, id)
            for wanted in re.findall(r'`-k "(.*?)"`', item.differs):
                plan = files.load(name).plan("paper")
                assert len(filters.select(plan, wanted).cells) < len(plan.cells), (name, wanted)
            if said := re.search(rf"{item.kind}s? (\d[\d,a-z()]*(?:(?:-| to | and |, )\d+)*)", titles[id]):
                assert set(item.numbers) <= set(numbered(said[1].replace(" and ", ", "))), (titles[id], item)


def test_what_names_a_number_is_listed() -> None:
    """So that a table or a figure which somebody adds to a suite cannot be forgotten in the list."""
    known = {(item.kind, name, id) for item in LISTED for name in item.suites for id in item.ids}
    for name in files.available():
        if name.endswith(VARIANTS):
            continue
        suite = files.load(name)
        for kind in ("Table", "Figure"):
            for id, title in titled(suite, kind).items():
                assert not re.search(rf"{kind}s? \d", title) or (kind, name, id) in known, (kind, name, id)


@pytest.mark.parametrize(("id", "images"), [("clean", "clean"), ("adversarial", "adv")])
def test_sv_cca_has_a_panel_for_each_pair_and_block_and_a_page_for_every_cell(id: str, images: str) -> None:
    """Figures 20 to 25 of FAT with transformers: 22 and 23 are of T2T-ViT with VIS."""
    suite = files.load("fat-transformers-drift")
    [figure] = [one for one in suite.figures if one.id == id]
    pairs = ("c0_c3", "c0_c1", "c0_server", "c3_server")
    wanted = {f"train:svcca_b{block}_{pair}_{images}" for block in (1, 9) for pair in pairs}
    assert set(figure.series.values()) == wanted and not figure.where
    plan = suite.plan("paper")
    found = points_of_figure(plan, figure)
    assert {cell.id for here in found.values() for cells in here.values() for cell in cells} == {
        cell.id for cell in plan.cells
    }
    pages: dict[tuple[str, ...], set[str]] = {}
    for panel, line in found:
        pages.setdefault(tuple(dict(panel)[axis] for axis in ("model", "head", "partition")), set()).add(str(line))
    assert {"IID", "Non-IID(4)", "Non-IID(2)"} == {page[2] for page in pages if page[:2] == ("T2T-ViT-14", "VIS")}
    assert {len(lines) for lines in pages.values()} == {6}  # a line for each aggregator, and no more
