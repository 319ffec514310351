"""Pages: every link leads somewhere, nothing is fetched, names are harmless; and in a real browser they work."""

from __future__ import annotations

import functools
import itertools
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import result_files
from stored import claimed, finished

from fatbench.cli import app as cli
from fatbench.engine.rounds import Number
from fatbench.report import contrasts
from fatbench.report.formats import html
from fatbench.report.pairs import measured_numbers, pairs
from fatbench.report.site import leaderboards, pages
from fatbench.runner import provenance
from fatbench.store import jsonl
from fatbench.store.stages import Store
from fatbench.suite import files
from fatbench.suite.asked import identity

ROOT = Path(__file__).parent.parent
LIMIT = 5_000_000  # bytes of a page
HOSTILE = "<script>window.pwned=1</script>\"'&amp;`"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

SUITE = """\
name: hostile
title: 'A title with {hostile} in it'
description: 'Described by {hostile}'
seeds: [0, 1]
base:
  data: {{name: digits}}
  train: 200
  partition: {{name: iid, clients: 2}}
  model: {{name: small_cnn, width: 2}}
  algorithm: {{name: fedavg, rounds: 3, aggregator: samples, local: {{batch: 32, lr: 0.1, objective: standard}}}}
axes:
  method:
    FedAvg: {{}}
    '{hostile}': {{algorithm: {{aggregator: {{name: uniform}}}}}}
    broken: {{algorithm: {{aggregator: {{name: sfat, alpha: 1/6, top: 1}}}}}}
evaluate:
  checkpoints: [last]
  attacks: {{natural: natural, pgd20: {{name: pgd, eps: 8/255, step: 2/255, steps: 20}}}}
presets: {{paper: {{}}}}
tables:
  - {{id: T, title: 'Table {hostile}', rows: [method], values: {{natural: natural, PGD-20: pgd20}},
     note: 'Noted by {hostile}'}}
figures:
  - {{id: curves, title: 'Curves {hostile}', lines: [method], series: {{loss: train:train_loss}}}}
  - {{id: chosen, title: Chosen, kind: raster, panels: [method], series: {{chosen: "train:selected[*]"}}}}
  - {{id: judged, title: Judged, kind: matrix, lines: [method], series: {{natural: natural, PGD-20: pgd20}}}}
  - id: told
    title: Told
    kind: bars
    lines: [method]
    series: {{PGD-20: pgd20}}
    published: {{file: told.csv, rows: {{method: method}}, values: {{PGD-20: pgd20}}}}
  - {{id: seen, title: Observation, kind: images, panels: [method], series: {{images: artifact:images}}}}
"""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Call the program in this process: its exit code."""
    monkeypatch.setattr(sys, "argv", ["fatbench", *arguments])
    try:
        cli.main()
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else 0
    return 0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of two committed files of results."""
    folder = tmp_path_factory.mktemp("pages") / "site"
    results = [str(ROOT / "results" / f"{name}.jsonl.xz") for name in ("sfat-jpeg75-cpu", "fedvkd-cifar10-jpeg75-cpu")]
    with pytest.MonkeyPatch.context() as patch:
        assert run(patch, "site", *results, "-o", str(folder)) == 0
    return folder


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of a suite whose every name is a script; one cell of it failed, one kept images."""
    import numpy as np
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("hostile")
    quoted = HOSTILE.replace("'", "''")
    (folder / "hostile.yaml").write_text(SUITE.format(hostile=quoted))
    (folder / "told.csv").write_text("method,pgd20\nFedAvg,44.5\n")
    suite = files.load(str(folder / "hostile.yaml"))
    plan = suite.plan()
    brought = [{"plugin": HOSTILE, "sha256": "0" * 64, "names": ["aggregator x"]}]
    of: dict[str, Any] = {"suite": "hostile", "preset": "paper", "device": HOSTILE, "host": HOSTILE}
    of |= {"precision": "fp32", "commit": "c" * 40, "dirty": True, "plugins": brought}
    with Store.open(str(folder / "test.db"), create=True) as store:
        for place, cell in enumerate(plan.cells):
            training = claimed(store, cell.id, "train", total=3, spec=cell.spec, **of)
            if cell.key["method"] == "broken":
                store.fail(training, f"Traceback\nValueError: {HOSTILE}")
                continue
            numbers = [Number("train_loss", 3.0 - round + place, round, 0) for round in (1, 2, 3)]
            for round, k in itertools.product((2, 3), (0, 1)):
                numbers.append(Number("selected", float(k == round % 2), round, 0, client=k))
            store.finish(training, [*numbers, Number("seconds", 60.0, 3, 0)], round=3)
            for one in cell.evaluations:
                value = Number(one.label, 0.5 + place / 100 - 0.2 * (one.label == "pgd20"), 3, 10)
                finished(store, cell.id, one.stage(3), [value], round=10, total=10, settings=one.attack, **of)
    kept = folder / "test-files" / plan.cells[0].id / "artifacts"
    kept.mkdir(parents=True)
    save_file({"images": np.full((2, 3, 8, 8), 99, np.uint8)}, kept / "round-000003.safetensors")
    log = folder / "test-files" / next(c.id for c in plan.cells if c.key["method"] == "broken") / "log.txt"
    log.parent.mkdir()
    log.write_text(f"begun\n{HOSTILE}\n")
    page = folder / "page.html"
    with pytest.MonkeyPatch.context() as patch:
        arguments = ("report", str(folder / "hostile.yaml"), "--format", "html", "-o", str(page))
        assert run(patch, *arguments, "--db", str(folder / "test.db")) == 0
    return page


# --- without a browser -------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page is made of."""

    VOID = ("meta", "link", "img", "br", "hr", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.scripts: list[str] = []
        self.images: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        said = dict(attrs)
        self.ids += [said["id"]] if "id" in said else []
        self.links += [said["href"]] if "href" in said else []
        self.scripts += [said.get("src") or said.get("type") or "inline"] if tag == "script" else []
        self.images += [said["src"]] if tag == "img" else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.nightly
def test_every_link_of_a_site_leads_to_a_place(site: Path) -> None:
    read = {file.name: Page(file.read_text()) for file in site.glob("*.html")}
    assert sorted(read) == ["fedvkd-cifar10-jpeg75-quick.html", "index.html", "sfat-audit-jpeg75-cpu.html"]
    for name, page in read.items():
        assert page.open == [] and len(page.ids) == len(set(page.ids))
        assert page.scripts == ["fatbench.js"]
        for link in page.links:
            if link.startswith(("https://", "data:,")):  # a paper; the favicon
                continue
            file, _, place = link.partition("#")
            assert not place or place in read[file or name].ids, link
            assert (site / (file or name)).is_file()
        assert (site / name).stat().st_size + (site / "fatbench.js").stat().st_size < LIMIT
    numbers = [link for link in read["index.html"].links if "#cell-" in link]
    assert len(numbers) > 60 and {link.partition("#")[0] for link in numbers} == set(read) - {"index.html"}


def test_a_page_shows_the_numbers_of_the_tables(site: Path) -> None:
    """Table and leaderboard from the committed rows, each with the published number; the seeds of the first cell."""
    page = (site / "sfat-audit-jpeg75-cpu.html").read_text()
    row = re.search(r'<th class="stub name" scope="row">FAT</th>\s*(.*?)</tr>', page, re.DOTALL)
    said = re.sub(r"\s+", " ", re.sub("<[^>]+>", " ", row[1])).strip()
    board = page[page.index('id="board-') :].split("</thead>")[0]
    heads = [re.sub("<[^>]+>", "", head).strip() for head in re.findall(r"<th[^>]*>(.*?)</th>", board, re.DOTALL)]
    assert {"natural", "PGD-20", "FGSM (released)", "AA"} <= set(heads)  # as the tables say, not as they are stored
    assert said.startswith("36.36 ±2.39 paper 58.13 ±0.68") and "23.00 ±1.85 paper 32.56 ±0.01" in said
    dialog = page[page.index('id="cell-cce98326b6ea"') :].split("</dialog>")[0]
    who = (
        "seed 6: cell <code>cce98326b6ea</code>",
        "a37ae4aee58ba2a220e0f20d404c4ff7f70bcaa2",
        "8deef4ac635349bf",
        "bf16",
    )
    what = ("small_cnn(width=16)", "FedAvg: w_k = N_k / N", "pgd(eps=8/255", "fatbench show cce98326b6ea --outcomes")
    for words in (*who, *what):
        assert words in dialog, words
    # the drawer shows the mark of the table, and bold nowhere else
    assert '<span class="shared">36.36</span> ±2.39' in dialog
    assert '<span class="worse">27.51</span> ±3.77<sup title="significantly worse than the best">↓' in page
    assert "<b>" not in dialog and 'class="best"' not in page
    curves = dialog[dialog.index("<figcaption>train loss</figcaption>") :].split("</figure>")[0]
    assert re.findall(r"<title>seed (\d+): [\d.]+</title>", curves) == ["6", "7", "8", "9", "10"]
    assert all(len(line.split()) == 20 for line in re.findall(r'points="(.*?)"', curves)) and "rounds 1 to 20" in curves


def test_one_file_holds_all_of_it_and_names_are_harmless(hostile: Path) -> None:
    text = hostile.read_text()
    page = Page(text)
    assert page.open == [] and len(text) < LIMIT
    assert page.scripts == ["inline"]  # and none of the names'
    assert len(page.images) == 2  # a figure of what rounds kept, and the cell's own
    assert all(image.startswith("data:image/png;base64,") for image in page.images)
    assert "<script>window" not in text and text.count("&lt;script&gt;window.pwned=1") > 15
    policy = re.search(r'Security-Policy" content="([^"]+)"', text)
    assert policy is not None and "default-src &#39;none&#39;" in policy[1] and "sha256-" in policy[1]


@pytest.mark.nightly
def test_results_of_a_suite_that_is_not_here_are_named_and_one_of_this_folder_is_found(
    hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "site", "-o", "out", "--db", str(hostile.parent / "test.db")) == 3
    said = capsys.readouterr().err
    assert said.startswith("fatbench: 6 cells of 'hostile' are not shown: no suite is named 'hostile'")
    suite = str(hostile.with_name("hostile.yaml"))
    assert run(monkeypatch, "site", suite, "-o", "out", "--db", str(hostile.parent / "test.db")) == 0
    assert (written := capsys.readouterr().out.split()) == ["out/index.html", "out/hostile.html", "out/fatbench.js"]
    monkeypatch.chdir(hostile.parent)
    assert run(monkeypatch, "site", "-o", str(tmp_path / "out"), "--db", "test.db") == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / file) for file in written]


# --- in a browser ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium. Skipped where there is none: `.ci/run` installs it where apt is."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-extensions"]
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=quiet)
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page; at the end it must have said nothing to the console and asked for nothing but its script."""
    contexts, said, asked = [], [], []

    def open_(file: Path, place: str = "", **settings: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)  # of a machine with much else to do
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri() + place)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert said == []
    allowed = re.compile(r"file://.*/(\w[\w.-]*\.html|fatbench\.js)([?#].*)?$|blob:|images/\w+\.png$|data:image/png")
    assert [url for url in asked if not allowed.match(url)] == []


def column(page: Any, board: str, place: int) -> list[str]:
    """The first words of the shown cells of a column."""
    rows = page.locator(f"{board} >> tbody tr:visible")
    return [row.locator("td, th").nth(place).inner_text().split("\n")[0].split()[0] for row in rows.all()]


@pytest.mark.nightly
def test_a_leaderboard_is_sorted_and_filtered(site: Path, opened: Callable[..., Any]) -> None:
    page = opened(site / "fedvkd-cifar10-jpeg75-quick.html")
    board = "[data-board] >> nth=1"
    page.locator(board).scroll_into_view_if_needed()
    assert page.locator(f"{board} >> th[aria-sort]").inner_text().strip() == "CW"
    head = page.locator(f"{board} >> thead >> button", has_text="PGD-20")
    for order in ("descending", "ascending"):
        head.click()
        assert head.locator("..").get_attribute("aria-sort") == order
        shown = [float(value.rstrip("↓°")) for value in column(page, board, 4)]
        assert shown == sorted(shown, reverse=order == "descending") and len(set(shown)) > 3
    name = page.locator(f"{board} >> thead >> button", has_text="method")
    name.focus()
    page.keyboard.press("Enter")
    assert column(page, board, 0) == sorted(column(page, board, 0))
    before = page.locator(f"{board} >> output").inner_text()
    page.locator(f"{board} >> [data-filter]").fill("fedavg cnn")
    assert set(column(page, board, 0)) == {"FedAvg(CNN)"}
    assert page.locator(f"{board} >> output").inner_text() == f"1 of {before.split()[2]} rows"
    page.locator(f"{board} >> [data-filter]").fill("")
    page.locator(f"{board} >> [data-axis=training]").select_option("adversarial")
    assert set(column(page, board, 1)) == {"adversarial"}
    page.locator(f"{board} >> [data-axis=training]").select_option("")
    page.locator(f"{board} >> [data-show]").select_option("published")
    assert page.locator(f"{board} >> .number .std:visible").count() == 0
    assert page.locator(f"{board} >> .pub:visible").count() >= 3
    page.locator(f"{board} >> [data-show]").select_option("both")
    page.locator(f"{board} >> [data-filter]").fill("cnn")
    address = page.evaluate("location.href")  # page.url lags behind what a script writes there
    sent = opened(Path(address.removeprefix("file://").partition("?")[0]), f"?{address.partition('?')[2]}")
    assert column(sent, board, 0) == column(page, board, 0) == sorted(column(sent, board, 0))
    assert sent.locator(f"{board} >> th[aria-sort=ascending]").inner_text().strip() == "method"


@pytest.mark.nightly
def test_a_number_opens_by_click_and_by_keyboard_and_escape_closes_it(site: Path, opened: Callable[..., Any]) -> None:
    page = opened(site / "sfat-audit-jpeg75-cpu.html")
    number = page.locator("section.table a.number").first
    number.click()
    dialog = page.locator("dialog[open]")
    assert dialog.get_attribute("id") == "cell-cce98326b6ea" and page.evaluate("location.hash") == "#cell-cce98326b6ea"
    assert dialog.locator("figure", has_text="train loss").first.locator("polyline:visible").count() == 5  # seeds
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    page.wait_for_function("location.hash === ''")  # the browser says later that the dialog is closed
    assert page.evaluate("document.activeElement.className") == "number"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator("dialog[open]").get_by_role("button", name="Close").click()
    assert page.locator("dialog[open]").count() == 0
    sent = opened(site / "sfat-audit-jpeg75-cpu.html", "#cell-cce98326b6ea")  # an address that somebody sent
    assert sent.locator("dialog[open] h2").inner_text().endswith("FAT")
    index = opened(site / "index.html")
    for fold in range(2):  # all leaderboards, and the first of them
        index.locator("details.fold > summary").nth(fold).click()
    index.locator("a.number").first.click()
    index.locator("dialog[open]").wait_for()
    assert index.evaluate("location.pathname").rpartition("/")[2] != "index.html"


@pytest.mark.nightly
def test_it_fits_a_phone_a_dark_room_and_paper(site: Path, opened: Callable[..., Any]) -> None:
    ink = "getComputedStyle(document.body).color"
    for file in sorted(site.glob("*.html")):
        page = opened(file, viewport={"width": 360, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), file
    page = opened(site / "sfat-audit-jpeg75-cpu.html", color_scheme="dark")
    light, dark = "rgb(28, 29, 33)", "rgb(223, 225, 229)"
    assert page.evaluate(ink) == dark
    page.locator("#theme").click()
    assert page.evaluate(ink) == light
    page.locator("#theme").click()
    assert page.evaluate(ink) == dark
    page.emulate_media(media="print")
    assert page.evaluate(ink) == "rgb(0, 0, 0)"
    assert not page.locator(".top").is_visible() and not page.locator(".controls").first.is_visible()


@pytest.mark.nightly
def test_hostile_names_run_nothing_and_a_failure_is_told(hostile: Path, opened: Callable[..., Any]) -> None:
    page = opened(hostile)
    curves, chosen, judged, told, seen = page.locator("section.plot").all()
    lines = curves.locator("title").all_text_contents()
    assert lines == ["FedAvg: 0.5 ±0.707, round 3", f"{HOSTILE}: 2.5 ±0.707, round 3"]
    assert chosen.locator(".panel").count() == 2 and judged.locator(".chart svg image").count() >= 1
    assert told.locator("title").count() == 2  # bars
    assert judged.locator("text", has_text="50.5").count() == 1  # natural, the mean of two seeds
    seen.locator("img").scroll_into_view_if_needed()  # it is read when it comes into sight
    shown = "() => [...document.querySelectorAll('section.plot img')].at(-1).naturalWidth > 500"
    page.wait_for_function(shown)
    assert HOSTILE in page.locator("h1").inner_text()
    for link in page.locator("section.table a.number").all():
        link.click()
        page.locator("dialog[open]").wait_for()  # it opens when the address has changed, which is after the click
        page.keyboard.press("Escape")
        page.locator("dialog[open]").wait_for(state="hidden")
    assert page.evaluate("window.pwned") is None
    page.locator("section.table a.number", has_text="--").first.click()
    said = page.locator("dialog[open]").inner_text()
    assert f"ValueError: {HOSTILE}" in said and "train, seed 0 failed" in said.lower() and f"begun\n{HOSTILE}" in said


# --- pages that answer --------------------------------------------------------------------------------------------


def test_the_index_answers_first_then_leaderboards_then_suites_by_paper(site: Path) -> None:
    """A line a board: its question, what the suite declares, the difference and its interval; no best of equals."""
    page = (site / "index.html").read_text()
    answers = re.search(r'<table class="overview">(.*?)</table>', page, re.DOTALL)[1]  # type: ignore[index]
    groups = re.findall(r'scope="rowgroup" colspan="5">(.*?)<', answers)
    assert groups == [group for group in pages.GROUPS if group in groups] and len(groups) > 1
    first = re.sub(r"\s+", " ", re.sub("<[^>]+>", " ", answers.split("<tr ")[2].partition(">")[2])).strip()
    assert first.startswith("3 methods against FAT, CIFAR-10, as JPEG slack changes accuracy under PGD-20 by at most")
    assert "<b>" not in answers.split("<tr ")[2]  # where the declared comparison finds no difference
    # the difference and its interval are of what the sentence tells, and named
    most = re.search(r"at most (\S+) points", first)
    interval = re.search(r"slack, PGD-20 −(\S+) to \+(\S+)", first)
    assert most and interval
    assert 0 <= round(float(most[1]) - max(map(float, interval.groups())), 6) <= 0.1, "a bound is rounded up"
    titles = re.findall(r'<a href="#board-[^"]*">(.*?)</a>', answers)
    assert len(titles) == len(set(titles))
    days = [run["started"][:10] for cell in result_files.cells(ROOT / "results" / "sfat-jpeg75-cpu.jsonl.xz")
            for run in cell["runs"]]  # fmt: skip
    assert f"35 of 44 cells have run, the last on {max(days)}." in page
    assert f"commit {provenance.short_version()}" in page and f'href="{html.DOCUMENTATION}"' in page
    order = [page.index(part) for part in ('class="overview"', 'id="leaderboards"', 'id="suites"')]
    assert order == sorted(order) and page.count('<details class="fold">') == 1 + len(titles)
    papers = re.findall(r'scope="rowgroup" colspan="6">(.*?) <a href="(.*?)"', page[order[-1] :])
    assert papers == [
        ("SFAT (Zhu et al., ICLR 2023)", "https://github.com/ZFancy/SFAT"),
        ("FedVKD and FedAUX (Tao et al., Electronics 2022)", "https://doi.org/10.3390/electronics11172638"),
    ]


def test_a_leaderboard_has_the_difference_of_each_row_that_compare_finds(site: Path) -> None:
    """The column and the interval beside it say what `fatbench compare SFAT FAT` says."""
    page = (site / "sfat-audit-jpeg75-cpu.html").read_text()
    board = re.search(r'<section class="board" id="([\w-]+)".*?</section>', page, re.DOTALL)
    assert re.search(r"<th[^>]*>(AA: points from FAT \(95 %, not corrected\))</th>", board[0])
    suite = files.load("sfat-audit")
    file = ROOT / "results" / "sfat-jpeg75-cpu.jsonl.xz"
    with Store.open(str(site.parent / "compared.db"), create=True) as store:
        jsonl.import_(store, file, identify=identity)
        of = functools.cache(lambda cell: measured_numbers(store, [cell], "last")[cell])
        cells = pairs(suite.plan("jpeg75-cpu"), "SFAT", "FAT")
        (one,) = contrasts.compare(cells, of, of, ["autoattack"])
    assert one.test is not None
    row = next(row for row in re.findall(r"<tr>.*?</tr>", board[0], re.DOTALL) if 'class="stub name">SFAT</th>' in row)
    said = re.search(r'<td data-measured="([^"]+)">(\S+) <span class="std">\((\S+) to (\S+)\)', row)
    numbers = [float(text.replace("\u2212", "-")) for text in said.groups()]
    expected = [one.difference, 100 * one.difference, 100 * one.test.low, 100 * one.test.high]
    assert numbers == pytest.approx(expected, abs=0.0051)
    places = re.search(r'd="M([-\d.]+) 0V10"/><path class="range" d="M([-\d.]+) 5H([-\d.]+)"/>', row)
    zero, low, high = map(float, places.groups())  # the interval is drawn in the row, on the scale of the board
    assert (zero - low) / (high - zero) == pytest.approx(-numbers[2] / numbers[3], rel=0.02)


@pytest.mark.nightly
def test_a_privacy_board_has_the_strongest_attacker_of_each_defence_and_explains_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    results = (f"results/{name}-cpu.jsonl.xz" for name in ("april-jpeg75", "privacy-imprint"))
    assert run(monkeypatch, "site", *results, "-o", str(tmp_path)) == 0
    page = next(file for file in tmp_path.glob("april-masks*.html")).read_text()
    board = re.search(r'<section class="board".*?</section>', page, re.DOTALL)[0]  # type: ignore[index]
    rows = re.findall(r'<tr>\s*<th scope=row class="stub name">(.*?)</th>(.*?)</tr>', board, re.DOTALL)
    defences = [defence for defence, _ in rows]
    assert len(defences) == len(set(defences)) > 3 and "oracle" not in "".join(row for _, row in rows)
    assert re.search(r"strongest attacker identifies \d+ % of the clients .*; random guesses, at most [\d.]+ %", board)
    assert "<dt>SSIM, 32</dt><dd>structural similarity after both images were shrunk to 32x32 pixels</dd>" in page
    index = (tmp_path / "index.html").read_text()
    of = re.findall(r'role="region" aria-label="[^"]*\((april-masks|privacy-imprint)[^,]*, (?:jpeg75-)?cpu\)"', index)
    assert sorted(of) == ["april-masks", "privacy-imprint"]  # each has its threat model, and a board of its own
    assert index.count("top-1, best for the attacker first") == 2
    assert re.search(r'"axis"[^>]*>attacker</th>\s*<th[^>]*>top-1</th>', board)  # what is identified stands first


def measure(store: Store, preset: str, suite_file: Path, accuracies: dict[str, tuple[float, float]]) -> None:
    """Store natural and PGD-20 accuracies on 1,000 images of a suite's methods."""
    suite = files.load(str(suite_file))
    for cell in suite.plan(preset).cells:
        if cell.key["method"] not in accuracies:
            continue
        rounds = int(cell.spec["algorithm"]["rounds"])
        of: dict[str, Any] = {"suite": suite.name, "preset": preset, "host": "secret-machine", "device": "a chip"}
        loss = Number("train_loss", 1.0, rounds, 0)
        finished(store, cell.id, "train", [loss], round=rounds, total=rounds, spec=cell.spec, **of)
        for one, accuracy in zip(cell.evaluations, accuracies[cell.key["method"]], strict=True):
            number = Number(one.label, accuracy, rounds, 1000)
            finished(store, cell.id, one.stage(rounds), [number], round=1000, total=1000, settings=one.attack, **of)


@pytest.mark.nightly
def test_a_board_has_the_rows_of_its_headline(committed: Mapping[str, Store]) -> None:
    """Pooled training has another split than FAT, and what is said is the difference of both."""
    suite = files.load("fat-bounds")
    plan = suite.plan("fmnist25")
    boards = leaderboards.boards([(suite, plan)], [], committed["fat-bounds-fmnist25"], "last")
    told = [board for board in boards if board.answer is not None]
    for board in told:
        assert board.answer is not None
        assert {*board.answer.sides} <= {row.key["method"] for row in board.grid.rows}
    (headline,) = [board for board in told if board.answer and board.answer.sides == ("pooled", "FAT")]
    shown = pages._overview(headline)
    assert shown["best"] == "pooled" and shown["number"] == "72.83 % under AutoAttack"
    said = [bool(board.sentence) for board in boards]
    assert said == sorted(said, reverse=True)


@pytest.mark.parametrize(
    ("name", "preset", "why"),
    [("fedaux-imagenet-jpeg75", "cpu", "too few for a claim"), ("fat-byzantine", "skew", "IPM 0.5 is")],
)
def test_nothing_is_best_at_too_few_seeds_or_beside_the_question(
    committed: Mapping[str, Store], name: str, preset: str, why: str
) -> None:
    """Both find a declared difference: one at three seeds, one of an attack where rows are aggregators."""
    suite = files.load(name)
    boards = leaderboards.boards([(suite, suite.plan(preset))], [], committed[f"{name}-{preset}"], "last")
    told = [board for board in boards if board.declared and board.answer and board.answer.significant]
    assert any(why in board.sentence for board in told)
    assert {pages._overview(board)["best"] for board in told} == {""}


def test_nothing_is_best_without_a_declared_comparison_and_each_preset_has_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A published number is no row's own; a file of the user is kept; the page that an earlier call made is named."""
    monkeypatch.chdir(tmp_path)
    text = SUITE.format(hostile="other").partition("figures:")[0].replace("seeds: [0, 1]", "seeds: [0]")
    text = text.replace("hostile", "few").replace("{paper: {}}", "{paper: {}, short: {base: {algorithm: {rounds: 2}}}}")
    published = "published: {file: told.csv, rows: {method: method}, values: {PGD-20: pgd20}}"
    Path("few.yaml").write_text(text.replace("by other'}", f"by other', {published}}}"))
    Path("told.csv").write_text("method,pgd20\nother,0.99\nbroken,0.98\n")
    with Store.open("few.db", create=True) as store:
        measure(store, "paper", Path("few.yaml"), {"FedAvg": (0.5, 0.3), "other": (0.8, 0.2)})
        measure(store, "short", Path("few.yaml"), {"FedAvg": (0.5, 0.05), "other": (0.5, 0.11)})
    arguments = ("site", "few.yaml", "--db", "few.db", "-o")
    Path("mine").mkdir()
    for name in ("index.html", "few-short.html"):
        Path("mine", name).write_text("mine")
        assert run(monkeypatch, *arguments, "mine") == 2
        assert f"mine/{name} was not written by fatbench" in capsys.readouterr().err
        assert [file.name for file in Path("mine").iterdir()] == [name]
        Path("mine", name).unlink()
    Path("mine", "earlier.html").write_text(pages.GENERATOR)
    Path("mine", "notes.html").write_text("mine")
    assert run(monkeypatch, *arguments, "mine") == 0
    output = capsys.readouterr()
    assert output.out.split() == [f"mine/{name}" for name in ("index.html", "few.html", "few-short.html", pages.SCRIPT)]
    assert "earlier.html" in output.err and "notes.html" not in output.err and Path("mine/notes.html").exists()
    index = Path("mine/index.html").read_text()
    orders = re.findall(r'data-head="best first"><span>(.*?)</span>', index)
    assert len(orders) == 2 and "<b>" not in "".join(orders)  # without a declared comparison
    assert re.findall(r'scope="rowgroup" colspan="5">(.*?)<', index) == ["not compared"]
    page = Path("mine/few.html").read_text()
    board = re.search(r'<section class="board".*?</section>', page, re.DOTALL)[0]  # type: ignore[index]
    assert re.findall(r'class="stub name">(.*?)<', board) == ["FedAvg", "other", "broken"]
    assert "secret-machine" not in page and "a chip" in page
    # what another preset holds is not denied
    assert run(monkeypatch, "export", "few.yaml", "-k", "method=broken", "--format", "csv", "--db", "few.db") == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "no results yet" not in line and "few" in line


@pytest.mark.nightly
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")])
def test_axe_finds_nothing(site: Path, opened: Callable[..., Any], width: int, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    for file, place in [("index.html", ""), ("sfat-audit-jpeg75-cpu.html", ""),
                        ("sfat-audit-jpeg75-cpu.html", "#cell-cce98326b6ea")]:  # fmt: skip
        size = {"width": width, "height": 900}
        page = opened(site / file, place, viewport=size, color_scheme=scheme, bypass_csp=True)
        # axe does not judge the contrast of text before a gradient, nor of text scrolled away
        page.add_style_tag(content=".scroll { background: none !important; overflow: visible !important }")
        found = axe.run(page).response["violations"]
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == []
