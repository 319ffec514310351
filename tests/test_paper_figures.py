"""docs/papers.md is true: it lists each figure of the five papers, and each command finds its figure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fatbench.suite import files

ROOT = Path(__file__).parent.parent
FIGURES = {"SFAT": 12, "Federated": 25, "Random": 6, "FedVKD": 5, "AdFL": 6}  # how many each paper has


def listed() -> dict[str, list[tuple[list[int], str]]]:
    """Paper -> (numbers of figures, what draws them or why nothing does) of each line of docs/papers.md."""
    found: dict[str, list[tuple[list[int], str]]] = {}
    for part in (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        lines = found.setdefault(part.split()[0], [])
        for numbers, drawn in re.findall(r"^\| (\d[\d, -]*) \| .* \| (.*) \|$", part, re.MULTILINE):
            ends = [[int(end) for end in one.split("-")] for one in numbers.split(", ")]
            lines.append(([n for end in ends for n in range(end[0], end[-1] + 1)], drawn))
    return found


def test_every_figure_of_every_paper_is_listed() -> None:
    assert {paper: sorted({n for numbers, _ in lines for n in numbers}) for paper, lines in listed().items()} == {
        paper: list(range(1, count + 1)) for paper, count in FIGURES.items()
    }


@pytest.mark.parametrize(
    ("numbers", "drawn"), [line for lines in listed().values() for line in lines], ids=lambda value: str(value)[-40:]
)
def test_a_listed_figure_is_one_of_its_suites_or_says_why_not(numbers: list[int], drawn: str) -> None:
    """The command is one that `plot` takes, its suites have the figure, and the title names the number."""
    if drawn.startswith("not drawn: "):
        assert "without numbers" in drawn or "the paper does not state" in drawn
        return
    match = re.fullmatch(r"`fatbench plot ([a-z0-9 -]+) --figure (\S+)`", drawn)
    assert match is not None, drawn
    for name in match[1].split():
        suite = files.load(name)
        [figure] = [one for one in suite.figures if one.id == match[2]]
        if "in prose" in figure.title:
            continue
        said = re.findall(r"(\d+)(?:(?:-| to )(\d+))?", figure.title.split("Figure", 1)[1].split(":")[0])
        named = {n for first, last in said for n in range(int(first), int(last or first) + 1)}
        assert set(numbers) <= named, (figure.title, numbers)


def test_a_figure_that_names_a_number_is_listed() -> None:
    """So that a figure which somebody adds to a suite cannot be forgotten in the list."""
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    variants = ("-jpeg75", "-jpeg")
    for name in files.available():
        suite = files.load(name)
        for figure in suite.figures:
            if re.search(r"Figures? \d", figure.title) and not name.endswith(variants):
                assert f"--figure {figure.id}`" in text, (name, figure.id)
