"""Sanity checks of printed accuracies, from the printed numbers alone: no training, no database.

    found = audit([read(grid, "paper", Known())])
    found.text("markdown"), found.answers, found.numbers

    grids         tables in CSV, Markdown, LaTeX or pasted lines, as grids of text
    read_tables   a grid as one long table
    measured      stored results as such a long table
    papers        papers' tables, described by YAML files beside them
    questions     what is asked of the numbers
    leads         leads between rows, and deviations over runs
    question      what a question found

What is printed are questions to the authors of a table. None says how a number came about, or that it is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas

from fatbench.errors import SpecError
from fatbench.report.audit.leads import deviations
from fatbench.report.audit.papers import all_papers, description_of, load
from fatbench.report.audit.question import Answer, Question
from fatbench.report.audit.questions import QUESTIONS, equal
from fatbench.report.audit.read_tables import UNPRINTED, Long

MARKED = ("order", "grain", "equal", "radius")  # a number below a constant is marked wherever it stands
SHOWN = 12  # rows of an answer in a terminal and on a page; JSON has all


@dataclass(frozen=True)
class Audit:
    """What was understood of some tables, and the answers to every question.

    numbers: the long table (`fatbench.report.audit.read_tables`). answers: a list of (question, answer).
    """

    numbers: pandas.DataFrame
    understood: list[str]
    answers: list[tuple[Question, Answer]]
    replies: Mapping[str, str]  # name of a question -> what the authors say to it

    def __str__(self) -> str:
        return self.text()

    def _repr_markdown_(self) -> str:
        return self.text("markdown")

    def text(self, format: str = "text", understood: bool = True) -> str:
        """As a terminal ("text") or a Markdown page shows it: questions that were raised, and a line on the others."""
        silent = [question.name for question, answer in self.answers if not answer.asked]
        unraised = [(question, answer) for question, answer in self.answers if answer.asked and not answer.raised]
        sections = ["\n".join(self.understood)] if understood else []
        if self.numbers["paper"].nunique() > 1:
            sections.append(table(overview(self.numbers), format))
        sections += [self._section(*pair, format) for pair in self.answers if pair[1].raised]
        if unraised:
            bullet = "- " if format == "markdown" else "  "
            lines = [f"{bullet}{question.name}: {answer.says}" for question, answer in unraised]
            sections.append("\n".join(["Nothing to ask:" + "\n" * (format == "markdown"), *lines]))
        if silent:
            sections.append(f"The table does not allow: {', '.join(silent)}.")
        return "\n\n".join(sections)

    def _section(self, question: Question, answer: Answer, format: str) -> str:
        heading = f"### {question.title}\n\n" if format == "markdown" else f"{question.title}\n  "
        parts = [f"{heading}{answer.says}"]
        if not answer.rows.empty:
            parts.append(table(answer.rows.head(SHOWN), format))
            if len(answer.rows) > SHOWN:
                parts.append(f"and {len(answer.rows) - SHOWN} more rows")
        words = (("Could explain it", question.explained), ("Would settle it", question.settled),
                 ("The authors say", self.replies.get(question.name, "")))  # fmt: skip
        said = [f"{label}: {text}." for label, text in words if text]
        return "\n\n".join([*parts, *([" ".join(said)] if said else [])])

    def record(self) -> dict[str, Any]:
        """As JSON: what was understood, and every question with all its rows."""
        return {
            "understood": self.understood,
            "checks": [
                {
                    "name": question.name, "question": question.title, "asked": answer.asked, "raised": answer.raised,
                    "answer": answer.says, "explained": question.explained, "settled": question.settled,
                    "rows": answer.rows.astype(object).where(answer.rows.notna(), None).to_dict("records"),
                }
                for question, answer in self.answers
            ],
        }  # fmt: skip


def table(rows: pandas.DataFrame, format: str = "markdown") -> str:
    """Rows as a terminal or a page shows them."""
    from tabulate import tabulate

    rows = rows.astype(object)
    style = "github" if format == "markdown" else "simple"
    return tabulate(
        rows.where(rows.notna(), "-").values.tolist(), [*map(str, rows.columns)], tablefmt=style, floatfmt=".4g",
        disable_numparse=[0, 1],
    )  # fmt: skip


def audit(longs: Iterable[Long], spread: float | None = None, replies: Mapping[str, str] | None = None) -> Audit:
    """Ask every question of the numbers of some tables together.

    spread: the standard deviation over seeds of a difference, in points, in place of the printed ones.
    SpecError: the spread is not positive, or there is no number.
    """
    if spread is not None and not 0 < spread < float("inf"):
        raise SpecError(f"expected a positive number of points, got {spread:g}", option="spread")
    longs = list(longs)
    numbers = pandas.concat([long.numbers for long in longs], ignore_index=True)
    if numbers.empty:
        raise SpecError("no accuracy is printed in these tables")
    answers = [(one, deviations(numbers, spread) if one.ask is deviations else one.ask(numbers)) for one in QUESTIONS]
    understood = [line for long in longs for line in _understood(long)]
    return Audit(numbers, understood, answers, replies or {})


def _understood(long: Long) -> list[str]:
    """One line each on what was understood of a table, what was not, and what would help."""
    numbers = long.numbers
    if numbers.empty:
        return [f"not understood: {'; '.join(long.unread)}"]
    attacks = dict.fromkeys(numbers["attack"] + numbers["steps"].map(lambda n: "" if pandas.isna(n) else f"-{n:.0f}"))
    robust = numbers[~numbers["attack"].isin(["natural", "unnamed"])]
    sizes = " or ".join(f"{n:,.0f}" for n in numbers["n"].dropna().unique())
    radii = ", ".join(radius for radius in robust["radius"].unique() if radius != UNPRINTED)
    roles = [
        f"{role} {', '.join(numbers.loc[numbers['role'] == role, 'method'].unique())}"
        for role in ("undefended", "proposed") if (numbers["role"] == role).any()
    ]  # fmt: skip
    of = ", ".join(filter(None, dict.fromkeys(numbers["paper"])))
    lines = [
        f"{of}: {len(numbers)} accuracies of {numbers['method'].nunique()} methods under {', '.join(attacks)}; "
        + "; ".join(filter(None, (sizes and f"test images {sizes}", radii and f"radius {radii}", *roles)))
    ]
    lines[0] = lines[0].removesuffix("; ")
    if long.unread:
        lines.append(f"not understood: {'; '.join(long.unread[:6])}" + " ..." * (len(long.unread) > 6))
    helps = [
        option for option, missing in (
            ("--classes N", len(robust) and robust["classes"].isna().any()), ("--images N", numbers["n"].isna().any()),
            ("--radius R", len(robust) and (robust["radius"] == UNPRINTED).any()),
            ("--baseline NAME", not (numbers["role"] == "proposed").any()),
        ) if missing
    ]  # fmt: skip
    return [*lines, *([f"would help: {', '.join(helps)}"] if helps else [])]


def overview(numbers: pandas.DataFrame) -> pandas.DataFrame:
    """A row a paper, a column a question: "raised of asked"; "-" where the tables do not allow it."""
    rows = []
    for name, of_paper in numbers.groupby("paper", sort=False):
        answers = {question.name: question.ask(of_paper) for question in QUESTIONS}
        counts = {key: f"{answer.raised} of {answer.asked}" if answer.asked else "-" for key, answer in answers.items()}
        rows.append({"paper": name, "numbers": len(of_paper), **counts})
    return pandas.DataFrame(rows)


def shared() -> Answer:
    """Equal numbers between two papers."""
    answer = equal(pandas.concat([paper.numbers for paper in all_papers()], ignore_index=True))
    names = [[str(at).partition(":")[0].rpartition(" ")[0] for at in answer.rows[side]] for side in ("column", "and")]
    rows = answer.rows[[one != other for one, other in zip(*names, strict=True)]].reset_index(drop=True)
    return Answer(answer.asked, len(rows), f"{len(rows)} pairs of columns of two papers have equal numbers", rows)


def of_papers(spread: float | None = None, name: str | None = None) -> Audit:
    """The audit of all papers beside the suites, or of the one of this name."""
    chosen = [paper for paper in all_papers() if name in (None, paper.name)]
    longs = [Long(paper.numbers, list(paper.unread)) for paper in chosen]
    return audit(longs, spread, {key: reply for paper in chosen for key, reply in paper.answers.items()})


def marks(file: Path) -> Mapping[tuple[int, str], str]:
    """(line, column) of a paper's CSV file -> what is asked about its number; empty: no paper's YAML names the file."""
    description = description_of(file)
    if description is None:
        return {}
    return _marks(file, description, file.stat().st_mtime_ns, description.stat().st_mtime_ns)


@functools.cache  # the tables of a suite show one paper's file again and again
def _marks(file: Path, description: Path, *_: int) -> Mapping[tuple[int, str], str]:
    paper = load(description)
    of_file = paper.numbers["file"] == file.name
    lines_and_heads = zip(paper.numbers["place"] + 1, paper.numbers["head"], strict=True)
    where = dict(zip(paper.numbers.index, lines_and_heads, strict=True))
    words: dict[tuple[int, str], str] = {}
    for question in QUESTIONS:
        places = question.ask(paper.numbers).places if question.name in MARKED else {}
        for at, text in places.items():
            if of_file[at]:
                words[where[at]] = f"{words[where[at]]}; {text}" if where[at] in words else text
    return words
