"""The committed tables are what the committed rows and today's suites give, byte for byte.

FATBENCH_UPDATE_GOLDEN=1 pytest tests/test_results.py writes the tables anew; look at the difference.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import runpy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas
import pytest
import result_files
from PIL import Image
from sqlalchemy import func, select, update
from typer.testing import CliRunner

from fatbench import packed, report
from fatbench.cli.app import app
from fatbench.report import contrasts, sentences
from fatbench.report.numbers import doubts, sql_tables
from fatbench.report.numbers.doubts import NOT_LEARNED, Doubt, in_words
from fatbench.report.numbers.long import frame
from fatbench.report.numbers.stored import doubts_of
from fatbench.report.pairs import measured_numbers, pairs
from fatbench.report.site import drilldown, leaderboards
from fatbench.store import jsonl, selection
from fatbench.store.schema import DOUBTS, STAGES
from fatbench.store.stage_names import parsed
from fatbench.store.stages import Store
from fatbench.suite import files
from fatbench.suite.tables import KEPT

RESULTS = Path(__file__).parent.parent / "results"
PAGES = runpy.run_path(str(RESULTS.parent / "docs" / "results_pages.py"))
FORMATS = {".md": "markdown", ".tex": "latex"}
NAMES = sorted({table.stem for table in (RESULTS / "tables").iterdir()})


@pytest.fixture(scope="module")
def pages(committed: Mapping[str, Store]) -> Any:
    """Of the committed rows; pages share plans and tests."""
    return PAGES["Pages"](committed)


TEMPLATES = sorted(file.name.removesuffix(".md.j2") for file in PAGES["TEMPLATES"].iterdir())


@pytest.mark.parametrize("page", [pytest.param(p, marks=[pytest.mark.nightly] * (p != "sfat")) for p in TEMPLATES])
def test_pages_are_made_of_the_rows(page: str, pages: Any) -> None:
    """If it fails: make results; look at the difference."""
    assert (RESULTS / f"{page}.md").read_text(encoding="utf-8") == pages.page(page)


SHARED = ("sfat-bf16-cpu", "sfat-fp32-cpu", "sfat-jpeg75-cpu")  # files with runs of the same cells


@pytest.mark.parametrize("files", [SHARED, pytest.param(None, marks=pytest.mark.nightly)], ids=["shared", "all"])
@pytest.mark.parametrize("backwards", [False, True])
def test_one_database_of_many_files_has_the_pages_numbers(
    backwards: bool, files: tuple[str, ...] | None, tmp_path: Path
) -> None:
    """In whatever order they were imported; each run is read where the page of its own file reads it."""
    with Store.open(str(tmp_path / "r.db"), create=True) as store:
        every = packed.results_in(RESULTS) if files is None else sorted(map(result_files.committed, files))
        for file in reversed(every) if backwards else every:
            jsonl.import_(store, file)
        pages = PAGES["Pages"](defaultdict(lambda: store))
        names = [file.name.removesuffix(".md.j2") for file in PAGES["TEMPLATES"].iterdir()]
        for page in ["sfat"] if files else names:
            assert (RESULTS / f"{page}.md").read_text(encoding="utf-8") == pages.page(page)


@pytest.mark.parametrize("name", NAMES)
def test_golden_tables_are_made_of_the_rows(name: str, committed: Mapping[str, Store]) -> None:
    select = next(select for select in selection.WORDS if name.endswith(f"-{select}"))
    suite = files.load(name.removesuffix(f"-{select}"))
    file, preset = PAGES["rows_of"](name)
    grids = report.build_tables(suite, suite.plan(preset), committed[file], select=select)
    for ending, format in FORMATS.items():
        table, text = RESULTS / "tables" / f"{name}{ending}", report.render(grids, format)
        if os.environ.get("FATBENCH_UPDATE_GOLDEN"):
            table.write_text(text, encoding="utf-8")
        assert table.read_text(encoding="utf-8") == text


FILES = sorted(PAGES["files_of_rows"]())
QUICK = ("fedvkd-robust-cpu", "sfat-jpeg75-cpu", "fat-byzantine-cpu")


@pytest.mark.parametrize("file", [pytest.param(f, marks=[pytest.mark.nightly] * (f not in QUICK)) for f in FILES])
def test_a_number_has_the_same_doubts_in_every_view(file: str, committed: Mapping[str, Store]) -> None:
    _check_doubts_of_all_views(committed[file])


def test_an_attack_that_its_name_does_not_stand_for_is_doubted_in_every_view(tmp_path: Path) -> None:
    """Also where no suite is at hand: PGD-20 at 8/255 whose stored settings are those of 1/255."""
    with Store.open(str(tmp_path / "r.db"), create=True) as store:
        jsonl.import_(store, result_files.committed("sfat-fp32-cpu"))
        weak = func.replace(STAGES.c.settings, '"8/255"', '"1/255"')
        with store.database.writing() as connection:
            weakened = update(STAGES).where(STAGES.c.stage.startswith("pgd20-")).values(settings=weak)
            attacked = connection.execute(weakened).rowcount
        why = _check_doubts_of_all_views(store)
    doubted = [stage for (_, stage), found in why.items() if "other_attack" in {one.code for one in found}]
    assert [parsed(stage).metric for stage in doubted] == ["pgd20"] * attacked != []


def _check_doubts_of_all_views(store: Store) -> Mapping[tuple[str, str], tuple[Doubt, ...]]:
    """Table, page, frame, `compare`, `show`, `status` and SQL say what `doubts_of` decides, and no more."""
    why = doubts_of(list(store.cells()), store)
    words = {key: in_words(found) for key, found in why.items()}
    for cell, stage, text in _doubts_of_the_frame(frame(store)):
        assert text == "; ".join(words.get((cell, stage), []))
    compared = measured_numbers(store, list(store.cells()), "last")
    for cell in store.cells():
        for one in compared[cell].values():
            assert one.doubts == why.get((cell, one.stage), ())
    for name, preset in sorted({(suite, str(preset)) for suite, preset, _ in store.count_trainings()}):
        suite = files.load(name)
        told_by_status = json.loads(_status(name, preset, store))
        own = {cell["id"] for cell in told_by_status["list"]}  # with stored seeds that are not planned
        assert told_by_status.get("doubts", {}) == doubts.cells_of({k: v for k, v in why.items() if k[0] in own})
        if suite.tables:
            grids = report.build_tables(suite, suite.plan(preset), store)
            for value in (value for grid in grids for value in grid.all() if value.behind):
                told = [re.sub(r" \(seeds? [\d, ]+\)$", "", text) for text in value.doubts]
                assert {*told} == {text for stage in value.behind for text in words.get(stage, [])}
            shown = [one for point in drilldown.points_of(grids).values() for _, _, one in point["shown"]]
            of_tables = {text for grid in grids for value in grid.all() for text in value.doubts}
            assert {text for one in shown for text in one.doubts} == of_tables
    for cell, stage in sorted(words, key=lambda key: (-len(words[key]), key))[:2]:
        said = CliRunner().invoke(app, ["show", cell, "--db", str(store.database.path), "--format", "json"])
        rows = [row for row in json.loads(said.stdout)["numbers"] if row["stage"] == stage and row["doubts"]]
        assert rows and all(row["doubts"] == words[cell, stage] for row in rows)
    sql_tables.judge(store, list(store.cells()))
    with store.database.reading() as connection:
        stored = connection.execute(select(DOUBTS.c.cell, DOUBTS.c.stage, DOUBTS.c.code)).all()
    assert {*map(tuple, stored)} == {(*key, one.code) for key, found in why.items() for one in found}
    return why


def _status(name: str, preset: str, store: Store) -> str:
    command = ["status", name, "--preset", preset, "--db", str(store.database.path), "--format", "json"]
    return CliRunner().invoke(app, command).stdout


def _doubts_of_the_frame(numbers: pandas.DataFrame) -> Iterator[tuple[str, str, str]]:
    """(cell, stage, doubts) of each evaluation; nothing else is doubted."""
    overall = numbers[numbers["client"] == -1]
    accuracy = overall["metric"] == overall["stage"].map(lambda stage: parsed(stage).metric)
    assert not overall[~accuracy]["doubts"].any()
    yield from overall[accuracy][["cell", "stage", "doubts"]].itertuples(index=False, name=None)


def test_a_training_that_diverged_is_said_to_have_wherever_its_numbers_stand(committed: Mapping[str, Store]) -> None:
    """The mean of updates with IPM 100 among them: 11.5 % in each of five seeds, which no test calls a method's."""
    store = committed["fat-byzantine-cpu"]
    plan = files.load("fat-byzantine").plan("cpu", None, "training=AT")
    cells = [one for one in pairs(plan, "mean", "multi-Krum") if dict(one.labels).get("adversary") == "IPM 100"]
    of = measured_numbers(store, [cell.id for cell in plan.cells], "last").__getitem__
    (natural,) = contrasts.compare(cells, of, of, ["natural"])
    mine, others = natural.doubts
    assert others == () and all(text.startswith("training diverged in round ") for text in mine) and mine
    assert f"A: {mine[0]}" in sentences.exploratory([natural], "mean", "multi-Krum", "last")
    numbers = frame(store, plan)
    doubted = numbers[(numbers["metric"] == "natural") & numbers["doubts"].str.contains("diverged")]
    assert len(doubted) == 5 and (numbers[numbers["metric"] == "prior_accuracy"]["doubts"] == "").all()


def test_every_committed_network_has_learned(committed: Mapping[str, Store]) -> None:
    """But for constant ones, those that the page on malicious clients says are destroyed (the mean with IPM 100),
    models of FedAvg on own images, on the page of personalised methods, heat maps of adversaries that destroy, and one
    row of the page on protocols.
    """
    stages = {}
    for file, store in committed.items():
        why = doubts_of(list(store.cells()), store)
        stages[file] = {stage for stage, found in why.items() if NOT_LEARNED & {doubt.code for doubt in found}}
    personal = committed["fat-personal-five"].cells()
    doubted = [(personal[cell], parsed(stage).metric) for cell, stage in stages.pop("fat-personal-five")]
    at_chance = {(s["algorithm"]["name"], s["seed"], metric) for s, metric in doubted if metric.endswith("natural")}
    assert at_chance == {("fedavg", 3, "own_natural"), ("fedavg", 4, "own_natural")}
    below = {file: {cell for cell, _ in found} for file, found in stages.items()}
    constant = {c for c, s in committed["fat-bounds-fmnist25"].cells().items() if s["model"]["name"] == "constant"}
    assert below.pop("fat-bounds-fmnist25") == constant and len(constant) == 30
    del below["fat-maps-jpeg-cpu"]
    few = {c for c, s in committed["privacy-protocols-cpu"].cells().items() if s["train"] == 80}
    assert below.pop("privacy-protocols-cpu") < few  # one step of 16 images a round
    assert len(below) > 10 and {file for file, found in below.items() if found} == {"fat-byzantine-cpu"}
    specs = [committed["fat-byzantine-cpu"].cells()[cell] for cell in sorted(below["fat-byzantine-cpu"])]
    assert [spec["malicious"]["attack"] for spec in specs] == [{"name": "ipm", "epsilon": 100.0}] * 5
    assert {spec["algorithm"]["aggregator"]["name"] for spec in specs} == {"uniform"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "preset", "page"),
    [
        ("sfat-audit", "jpeg75-cpu", "sfat"), ("sfat-fashion", "cpu", "sfat-fashion"),
        ("fat-baselines", "cpu", "baselines"), ("fat-transformers-trained-jpeg75", "cpu", "fat-transformers"),
        ("fat-byzantine", "skew", "byzantine"), ("fat-bounds", "fmnist25", "bounds"),
        ("fedvkd-robust", "cpu", "fedvkd-robust"), ("fedvkd-cifar10-jpeg75", None, "fedvkd"),
        ("fedaux-imagenet-jpeg75", "cpu", "fedaux"), ("fat-personal", "five", "personal"),
    ],
)  # fmt: skip
def test_a_suite_is_quoted_with_one_sentence(
    name: str, preset: str | None, page: str, committed: Mapping[str, Store]
) -> None:
    """Report, `compare` and the site say the same, and its digits stand on the page and in its index."""
    file, preset = PAGES["rows_of"](name, preset)
    store, suite = committed[file], files.load(name)
    plan = suite.plan(preset)
    of = measured_numbers(store, [cell.id for cell in plan.cells], "last").__getitem__
    found = contrasts.headline(suite.tests, plan, of)
    assert found is not None and found.test is not None
    said = sentences.finding(found)
    grids = report.build_tables(suite, plan, store)
    assert said in dict(grids[0].notes)["finding"]
    (tests,) = [tests for tests in suite.tests if contrasts.quoted(tests, [found])]
    assert said in sentences.family(contrasts.family(tests, plan, of), tests, plan, "last")
    assert said in {board.sentence for board in leaderboards.boards([(suite, plan)], grids, store, "last")}
    index = (RESULTS / "README.md").read_text(encoding="utf-8").splitlines()
    quoted = next(line for line in index if f"]({page}.md) |" in line)
    size = re.search(r"at most ([\d.]+) points|is ([\d.]+) points", said)
    sides = re.match(r"(.+) and (.+) are no better than", said)
    told = f"{size[1] or size[2]} points" if size else f"neither {sides[1]} nor {sides[2]} is above" if sides else said
    ends = sorted(f"{abs(100 * end):.1f}" for end in (found.test.low, found.test.high))
    for text in (quoted, (RESULTS / f"{page}.md").read_text(encoding="utf-8")):
        if page in ("fedvkd", "fedvkd-robust", "fedaux"):  # these give the interval, not its larger end by itself
            assert all(re.search(rf"\b{end}\b", text) for end in ends)
        else:
            assert told in " ".join(text.split())


FIGURES = sorted(file.stem for file in (RESULTS / "figures").glob("*.png") if "-forest-" not in file.stem)


def test_a_forest_says_what_made_it() -> None:
    for file in sorted((RESULTS / "figures").glob("*-forest-*.png")):
        with Image.open(file) as image:
            assert re.match(r"suite: [\w-]+, preset [\w-]+; commit: \w+", image.text["Description"]), file  # type: ignore[attr-defined]


@pytest.mark.nightly
@pytest.mark.parametrize("drawn", FIGURES)
def test_a_committed_figure_is_of_todays_suite_and_rows(drawn: str, committed: Mapping[str, Store]) -> None:
    """Title, seeds and commits in the file are those of the rows. If not: fatbench plot SUITE --format png.

    A figure of stored images can be drawn only where the images are; its title is today's.
    """
    suite = files.load(max((name for name in files.available() if drawn.startswith(f"{name}-")), key=len))
    pairs_of = itertools.product((*suite.figures, *suite.tables), suite.presets())
    figure, preset = next((f, preset) for f, preset in pairs_of if drawn == f"{suite.name}-{f.id}-{preset}")
    with Image.open(RESULTS / "figures" / f"{drawn}.png") as image:
        said = image.text
    assert said["Title"].startswith(figure.title)
    heat_map = figure in suite.tables
    if not heat_map and figure.kind in KEPT:
        return
    plan = suite.plan(preset)
    near = sorted(committed, key=lambda stem: stem.split("-")[0] != drawn.split("-")[0])
    store = next(committed[stem] for stem in near if {cell.id for cell in plan.cells} & {*committed[stem].cells()})
    if heat_map:
        (drawn_from,) = report.build_tables(suite.with_tables([figure.id]), plan, store, published=False)
    else:
        (drawn_from,) = report.build_figures(suite, plan, store, figure.id)
    notes = dict(drawn_from.notes)
    assert all(f"{what}: {notes[what]}" in said["Description"] for what in ("seeds", "code"))
