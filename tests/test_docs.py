"""The documents: every citation in the code leads to a place in docs/, and every function that docs/ names exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from fatbench.suite import signatures

ROOT = Path(__file__).parent.parent
CODE = [*sorted((ROOT / "fatbench").rglob("*.py")), *sorted((ROOT / "suites").rglob("*.yaml"))]
CITING = [*CODE, ROOT / "suites" / "README.md"]
DOCUMENTS = [ROOT / "docs" / "methods.md", ROOT / "docs" / "differences.md"]

KEY = r"[a-z0-9]+(?:-[a-z0-9]+)+"
DIFFERENCES = re.compile(rf"\bdifferences: ({KEY}(?:,\s+{KEY})*)")
METHODS = re.compile(r"(?<![A-Za-z] )\bmethods: (?!\w+\[)([^.,;:()\n\"]+)")
PRIVATE = re.compile(r"\bP00\d\b|\bA-\d\d\b|\bmethods\.md \d")
AUTHORS = re.compile(r"\b((?:Ben |de |El )?[A-Z][\w'-]+(?:(?:, [A-Z]\w+)*,? and [A-Z]\w+| et al\.)),? (\d{4})\b")
NAMED = re.compile(r"`([A-Za-z_]\w*)(?:\(([a-z0-9_, ]+)\))?`")


def headings(document: Path) -> set[str]:
    return set(re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE))


def entries() -> list[tuple[str, str]]:
    """(key, functions) of each row of the tables of docs/differences.md."""
    return re.findall(r"^\| \*\*(.+?)\*\* \|.*\| ([^|]*) \|$", DOCUMENTS[1].read_text(encoding="utf-8"), re.MULTILINE)


def differences(text: str) -> list[str]:
    return [key for cited in DIFFERENCES.findall(text) for key in re.split(r",\s+", cited)]


def methods(text: str) -> list[str]:
    return [cited.strip() for cited in METHODS.findall(text)]


@cache
def definitions() -> dict[str, set[str]]:
    """Each function and class of the package, with the names of its parameters; read from the source."""
    found: dict[str, set[str]] = {}
    for file in (ROOT / "fatbench").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set())
            elif isinstance(node, ast.FunctionDef):
                arguments = node.args
                every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                found.setdefault(node.name, set()).update(a.arg for a in every)
    return found


def code_of(text: str) -> list[tuple[str, list[str]]]:
    """The functions that a text names, each with its settings in parentheses."""
    return [(name, settings.split(", ") if settings else []) for name, settings in NAMED.findall(text)]


def test_a_citation_is_read_as_written() -> None:
    """What the patterns find and what they leave: lists over two lines, punctuation, plain words."""
    code = "`sfat(rank_by, top)`,\nrule `mix`"
    text = "(methods: SFAT; differences: sfat-normaliser,\n    sfat-ranking). FedVKD methods: costs. Paper A-32, P002"
    assert differences(text) == ["sfat-normaliser", "sfat-ranking"]
    assert methods(text) == ["SFAT"]
    assert PRIVATE.findall(text) == ["A-32", "P002"]
    assert not PRIVATE.findall("fgsm_sfat, SHA-256, docs/methods.md")
    assert code_of(code) == [("sfat", ["rank_by", "top"]), ("mix", [])]


@pytest.mark.parametrize("file", CITING, ids=lambda file: str(file.relative_to(ROOT)))
def test_citations_lead_to_a_place(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert not PRIVATE.findall(text), "cites a document that no reader has"
    assert set(differences(text)) <= {key for key, _ in entries()}
    assert set(methods(text)) <= headings(DOCUMENTS[0])


def test_the_code_cites_both_documents() -> None:
    """So that a pattern which matches nothing cannot pass for citations that are all right."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in CODE)
    assert len(set(differences(text))) >= 20
    assert len(set(methods(text))) >= 3


def test_every_paper_that_is_cited_is_in_the_references() -> None:
    """By the first author's name and the year; two papers of one year are told apart by the title alone."""
    references = (ROOT / "docs" / "references.md").read_text(encoding="utf-8")
    known = {(re.split(r",| and | et al", key)[0], year) for key, year in re.findall(r"\*\*(.+?) (\d{4})", references)}
    found = [one for file in CITING for one in AUTHORS.findall(file.read_text(encoding="utf-8"))]
    cited = {(re.split(r",| and | et al", authors)[0], year) for authors, year in found}
    assert len(cited) > 50
    assert sorted(cited - known) == []


def test_the_page_of_methods_names_functions_that_exist() -> None:
    """Its table of the papers' names; the reference is made of the tables themselves (docs/conf.py)."""
    table = DOCUMENTS[0].read_text(encoding="utf-8").split("## Names\n\n")[1].split("\n\n")[0]
    known = {name for kind in signatures.TABLES for name in signatures.names(kind)} | {"validation"}
    named = re.findall(r"`(\w+)`", table)
    assert len(named) > 30
    assert sorted(set(named) - known) == []


def test_the_differences_name_functions_that_exist() -> None:
    named = [one for _, functions in entries() for one in code_of(functions)]
    assert len(named) > 50
    for name, settings in named:
        assert name in definitions(), f"no function or class is called `{name}`"
        assert set(settings) <= definitions()[name], f"`{name}` has no such setting: {settings}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.stem)
def test_the_documents_cite_each_other_and_themselves(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert set(differences(text)) <= {key for key, _ in entries()}
    anchors = {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings(document)}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors


def test_a_difference_has_one_entry() -> None:
    """Keys are unique, and of a form that the short citation finds."""
    keys = [key for key, _ in entries()]
    rows = re.findall(r"^\| \*\*.*$", DOCUMENTS[1].read_text(encoding="utf-8"), re.MULTILINE)
    assert len(keys) == len(rows) and {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {7}
    assert len(keys) == len(set(keys))
    assert [key for key in keys if not re.fullmatch(KEY, key)] == []
