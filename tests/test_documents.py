"""The documents as a site: every page has a place, every command of every page is one, those of the papers run."""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main
from test_readme import examples

from fatbench.cli import app as cli
from fatbench.suite import files, signatures
from fatbench.suite.model import Node

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md"), *(ROOT / "results").glob("*.md")])
RUN = [DOCS / "review.md", DOCS / "papers.md"]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def commands(page: Path) -> list[list[str]]:
    """The arguments of each `fatbench ...` of a page's ```sh blocks, lines that end in a backslash joined."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    found = [shlex.split(command) for command, _ in examples(text) if command.startswith("fatbench ")]
    return [words[1:] for words in found]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+\s+(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", re.sub(r"`[^`]*`", "", text)):
        if link.startswith("../../actions/"):  # of the site that hosts the repository
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and (not anchor or anchor in anchors(target)), link


def parsed(arguments: list[str]) -> None:
    """Read a command line as the program does, and run nothing. Raises click's UsageError."""
    program: Any = typer.main.get_command(cli.app)
    root = program.make_context("fatbench", list(arguments))
    words = [*getattr(root, "_protected_args", ()), *root.args]
    program.commands[words[0]].make_context(words[0], words[1:], parent=root)


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name)
def test_every_command_of_every_page_is_one(page: Path) -> None:
    for arguments in commands(page):
        parsed(arguments)


FILES = [ROOT / "Makefile", ROOT / "Dockerfile", *(ROOT / ".github" / "workflows").glob("*.yml")]


@pytest.mark.parametrize("file", [*PAGES, *FILES, ROOT / "suites" / "README.md", ROOT / "paper.md"], ids=name)
def test_every_command_that_is_named_in_a_sentence_or_a_recipe_is_one(file: Path) -> None:
    """In code of one line, in ```console, and in what make, docker and workflows run; a command alone is its name."""
    text = file.read_text(encoding="utf-8").replace("\\\n", " ").replace('"$SEED"', "1").replace("$", "")
    found = re.findall(r"`(fatbench\s[^`]+)`", text) if file.suffix == ".md" else []
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        found += [line.split("#")[0] for line in block.splitlines() if line.startswith("fatbench ")]
    if file in FILES:
        found += re.findall(r"(?:\)/|run: |do |&& |/work\" |^ +)(fatbench [^;\n&|<>]+)", text, re.MULTILINE)
    for line in found:
        words = shlex.split(line.split(" | ")[0])[1:]
        if len(words) == 1:
            assert words[0].startswith("-") or words[0] in typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
        elif not {"...", "[WHAT]..."} & {*words} and "--help" not in words:
            parsed(words)
    assert found or file not in FILES[:2]


def test_images_are_small_and_name_their_command() -> None:
    """The page about results has four beside the commands that made them."""
    text = (DOCS / "review.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| !\[[^\]]+\]\(([^)]+)\) \| `fatbench ([^`]+)` \|$", text, re.MULTILINE)
    assert len(rows) == 4 == text.count("![")
    for file, command in rows:
        assert 5_000 < (DOCS / file).stat().st_size < 120_000
        parsed(shlex.split(command))


def test_every_page_that_the_contents_name_is_there() -> None:
    """A page that they do not name is added at their end, see docs/conf.py."""
    toctrees = re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(encoding="utf-8"), re.DOTALL)
    listed = [line for tree in toctrees for line in tree.splitlines() if line and not line.startswith(":")]
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")} - {"index"}
    assert set(listed) <= pages and len(listed) == len(set(listed))
    assert {page for page in pages if "/" in page} <= set(listed)


def kinds(node: type[Node]) -> list[type[Node]]:
    """The models of a suite file."""
    return [kind for sub in node.__subclasses__() for kind in (sub, *kinds(sub))]


def test_the_page_of_suite_files_names_every_key() -> None:
    """Those of the file itself, with families of tests on their own page, and a cell's settings."""
    assert files.load("sfat-cifar10").tables  # imports every model
    text = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("suites.md", "compare.md"))
    keys = {field.alias or name for kind in kinds(Node) for name, field in kind.model_fields.items()}
    keys |= {setting.name for setting in signatures.describe("Experiment").settings} - {"seed"}  # `seeds:` of a file
    assert len(keys) > 70
    assert sorted(key for key in keys if not re.search(rf"\b{key}:|`{key}`", text)) == []


def test_the_page_of_promises_is_what_the_tests_say() -> None:
    """If it fails: python docs/promises.py."""
    made = runpy.run_path(str(DOCS / "promises.py"))
    assert len(list(made["promises"]())) > 30
    assert (DOCS / "promises.md").read_text(encoding="utf-8") == made["page"]()


@pytest.mark.nightly
@pytest.mark.parametrize("page", RUN, ids=name)
def test_the_commands_of_a_paper_and_of_pages_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> None:
    """In order, in one folder, from the committed results; what trains is only planned."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    for file in (ROOT / "results").iterdir():
        (tmp_path / "results" / file.name).symlink_to(file)
    every = commands(page)
    assert len(every) >= 3
    for arguments in every:
        assert arguments[0] != "run" or "--dry-run" in arguments, arguments
        if arguments[0] in ("fetch", "verify"):  # a download; minutes of training, and test_verify trains on digits
            continue
        code, out, err = run(*arguments)
        assert not code, (arguments, err)
        assert out or "-o" in arguments, arguments
