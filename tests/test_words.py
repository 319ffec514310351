"""The documents: short sentences, no translated phrases, links that lead somewhere, commands that run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "suites/README.md")),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "results").glob("*.md"),
    ]
)
LONGEST = 25  # words
UNBOUNDED = {"docs/methods.md", "docs/differences.md"}  # formulas and symbol tables in running text
BANNED = ("where there is", "where there are", "of its own", "of their own", "nobody", "what there is")
ABBREVIATIONS = ("et al.", "e.g.", "i.e.", "vs.", "Eq.", "Fig.", "cf.", "pub.")


def paragraphs(text: str) -> list[str]:
    """The prose of a Markdown text: no code blocks, tables, headings; one string a paragraph or list item."""
    text = re.sub(r"^ *(```|~~~).*?^ *\1", "", text, flags=re.MULTILINE | re.DOTALL)
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if not line.strip() or re.match(r"\s*(\||#|<!--)", line):
            found.append([])
            continue
        item = re.match(r"\s*(?:[*+-]|\d+\.)\s+(.*)", line)
        if item:
            found.append([item[1]])
        else:
            found[-1].append(line.strip())
    return [" ".join(lines) for lines in found if lines]


def sentences(text: str) -> list[str]:
    """Sentences of the prose. Inline code is one word, a link its text."""
    found = []
    for prose in paragraphs(text):
        prose = re.sub(r"`[^`]*`", "CODE", prose)
        prose = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", prose)
        prose = re.sub(r"[*_]{1,3}(?=\S)|(?<=\S)[*_]{1,3}", "", prose)
        for short in ABBREVIATIONS:
            prose = prose.replace(short, short.replace(".", "\0"))
        found += [part.replace("\0", ".") for part in re.split(r"(?<=[.!?])[)\"']?\s+", prose)]
    return [sentence for sentence in found if words(sentence)]


def words(sentence: str) -> int:
    """Tokens with a letter or a digit in them."""
    return sum(any(c.isalnum() for c in token) for token in sentence.split())


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_sentences_are_found_and_counted():
    text = (
        "# A heading is no sentence\n\nZhu et al. wrote `a b c` (see [one page](x.md)). **Two** words.\n\n"
        "```sh\nfatbench run\n```\n\n| a | b |\n|---|---|\n| 1. x | 2 |\n\n* first item\n  goes on\n* second - item\n"
        "1. third\n"
    )
    found = sentences(text)
    assert found == [
        "Zhu et al. wrote CODE (see one page).", "Two words.", "first item goes on", "second - item", "third"
    ]  # fmt: skip
    assert [words(sentence) for sentence in found] == [8, 2, 4, 2, 1]


@pytest.mark.parametrize("page", [p for p in PAGES if name(p) not in UNBOUNDED], ids=name)
def test_no_sentence_is_long(page):
    long = [f"{words(s)}: {s}" for s in sentences(page.read_text(encoding="utf-8")) if words(s) > LONGEST]
    assert not long, "\n" + "\n".join(long)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_phrase_sounds_translated(page):
    text = " ".join(page.read_text(encoding="utf-8").lower().split())
    assert [phrase for phrase in BANNED if re.search(rf"\b{phrase}\b", text)] == []


def anchors(page: Path) -> set[str]:
    """The anchors that a renderer makes of a page's headings."""
    headings = re.findall(r"^#+\s+(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", re.sub(r"`[^`]*`", "", text)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link
