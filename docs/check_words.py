"""The English that `make lint` checks: old words, translated phrases, long sentences, links that lead nowhere.

Documents are read as text. Suites are read whole, comments too. Of the program it reads docstrings, comments, public
names (modules, classes, functions, parameters) and the help of every command. Prints file and line; exit code 1 if
something is found. docs/glossary.md says which words to use instead.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        *(
            ROOT / name
            for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "paper.md", "suites/README.md")
        ),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "results").glob("*.md"),
    ]
)
SUITES = sorted((ROOT / "suites").rglob("*.yaml"))
CODE = sorted((ROOT / "fatbench").rglob("*.py"))

# One word for one thing: pattern -> what to write instead. Each is matched from the start of a word, in any case.
OLD = {
    r"protocols?\b": "algorithm",
    r"rules?\b": "aggregator; of imports: contract",
    r"verdicts?\b": "outcome",
    r"probes?\b": "diagnostic",
    r"forg(e|o)t(s|ten|ting)?\b": "delete",
    r"fewer:": "limit:",
    r"rivals?\b": "comparison group",
    r"compet(e|es|ed|ing|itors?)\b": "comparison group",
    r"(league|contest)s?\b": "comparison group",
    r"lanes?\b": "worker",
    r"pictures?\b": "image, figure or reconstruction",
    r"victims?\b": "target client",
    r"eavesdrop(?!per)\w*": "honest-but-curious server",
    r"told from\b": "significantly different from",
    r"tell apart\b": "distinguish",
    r"share of\b": "fraction of",
    r"(other|both|two) readings\b": "interpretations",
}
EXEMPT = {"docs/glossary.md": OLD.keys()}  # lists the words that are not used
# Places that are not clean yet, by how they begin: reported with --all only. Take one out when it is.
PENDING: tuple[str, ...] = ()

# Phrases that read as translated, and what no English README says.
BANNED = (
    "where there is", "where there are", "of its own", "of their own", "nobody", "what there is", "be told so",
    "what is done is not done again", "there are two ways on", "does not do", "do not do", "how many that is",
    "say nothing", "says nothing", "as said at", "beside much other work", "did other work", "of somebody",
    "what is behind", "to begin with", "what was seen of", "without a word", "no longer than needed",
)  # fmt: skip
LONGEST = 25  # words of a sentence
UNBOUNDED = {"docs/methods.md", "docs/differences.md", "CHANGELOG.md"}  # formulas and symbol tables in running text
ABBREVIATIONS = ("et al.", "e.g.", "i.e.", "vs.", "Eq.", "Fig.", "cf.", "pub.")


def name(file: Path) -> str:
    """A file's path in the repository."""
    return file.relative_to(ROOT).as_posix()


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


def old_words(text: str, exempt: Any = ()) -> Iterator[tuple[int, str]]:
    """(line, message) of each old word of a text."""
    for pattern, instead in OLD.items():
        if pattern not in exempt:
            for match in re.finditer(rf"(?i)(?<![\w.`/-]){pattern}", text):
                yield text.count("\n", 0, match.start()) + 1, f"'{match[0]}': write {instead}"


def banned(text: str) -> Iterator[str]:
    """Messages about phrases that read as translated."""
    flat = " ".join(text.lower().split())
    return (f"reads as translated: '{phrase}'" for phrase in BANNED if re.search(rf"\b{phrase}\b", flat))


def long_sentences(text: str) -> Iterator[str]:
    """Messages about sentences of more than LONGEST words."""
    return (f"{words(s)} words: {s}" for s in sentences(text) if words(s) > LONGEST)


def anchors(page: Path) -> set[str]:
    """The anchors that a renderer makes of a page's headings."""
    headings = re.findall(r"^#+\s+(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> Iterator[str]:
    """Relative links of a page whose file or heading does not exist."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", re.sub(r"`[^`]*`", "", text)):
        if link.startswith("../../actions/"):  # of the site that hosts the repository
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield f"leads nowhere: {link}"


def remarks(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of a module's comments and docstrings."""
    text = file.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string[1:]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            yield node.body[0].lineno, ast.get_docstring(node, clean=False) or ""


def public_names(file: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of a module's classes, functions and parameters without an underscore, and of the module itself."""
    yield 1, file.stem
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield node.lineno, node.name
            if isinstance(node, ast.FunctionDef):
                for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                    yield node.lineno, argument.arg


def split(identifier: str) -> str:
    """The words of a name: "ImageOutcomes" and "image_outcomes" are "Image Outcomes" and "image outcomes"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", identifier).replace("_", " ")


def helps(command: Any, path: str = "fatbench") -> Iterator[tuple[str, str]]:
    """(command, text) of each help text and option name under a command of click's."""
    yield path, command.help or ""
    for parameter in command.params:
        yield path, f"{' '.join(parameter.opts)} {getattr(parameter, 'help', None) or ''}"
    for sub, one in getattr(command, "commands", {}).items():
        yield from helps(one, f"{path} {sub}")


def found() -> Iterator[tuple[str, str]]:
    """(place, message) of everything that is wrong."""
    for page in PAGES:
        text, here = page.read_text(encoding="utf-8"), name(page)
        yield from ((f"{here}:{line}", message) for line, message in old_words(text, EXEMPT.get(here, ())))
        yield from ((here, message) for message in banned(text))
        if here not in UNBOUNDED:
            yield from ((here, message) for message in long_sentences(text))
        yield from ((here, message) for message in dead_links(page))
    for suite in SUITES:
        text = suite.read_text(encoding="utf-8")
        yield from ((f"{name(suite)}:{line}", message) for line, message in old_words(text))
    for file in CODE:
        for first, text in remarks(file):
            yield from ((f"{name(file)}:{first + line - 1}", message) for line, message in old_words(text))
            yield from ((f"{name(file)}:{first}", message) for message in banned(text))
        for line, identifier in public_names(file):
            yield from ((f"{name(file)}:{line}", f"{identifier}: {m}") for _, m in old_words(split(identifier)))
    import typer.main

    from fatbench.cli import app

    for command, text in helps(typer.main.get_command(app.app)):
        yield from ((f"fatbench --help: {command}", message) for _, message in old_words(text))
        yield from ((f"fatbench --help: {command}", message) for message in banned(text))


def main() -> None:
    """Print what is wrong."""
    wrong = [(place, message) for place, message in found()]
    if "--all" not in sys.argv:
        wrong = [one for one in wrong if not one[0].startswith(PENDING)]
    for place, message in wrong:
        print(f"{place}: {message}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
