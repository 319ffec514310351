"""Tables: shown by a notebook as HTML, printed as Markdown or LaTeX, kept as a file; made of anybody's numbers too."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas

from fatbench import settings, whole_file
from fatbench.api.asking import names
from fatbench.errors import SpecError, did_you_mean
from fatbench.report import render
from fatbench.report.differences import Differences, as_data, records
from fatbench.report.formats import html
from fatbench.report.numbers.long import OWN
from fatbench.report.numbers.sources import Source
from fatbench.report.numbers.table_facts import Facts
from fatbench.report.site import pages
from fatbench.report.site.pages import Part
from fatbench.report.tables.entries import entries_of
from fatbench.report.tables.notes import shortened
from fatbench.report.tables.number_format import with_texts
from fatbench.report.tables.sheet import LABEL, Column, Sheet, any_number
from fatbench.store.opening import Db, listed_databases, opened

DATA_FORMATS = ("csv", "json")  # for programs, which count on every table
ENDINGS = {".md": "markdown", ".tex": "latex", ".html": "html", ".csv": "csv", ".json": "json"}


@dataclass(frozen=True)
class Table:
    """Tables, ready to be shown: a notebook shows them as HTML."""

    grids: list[Sheet]
    notes: str | None = None  # "none", "short" or "full"; None: what the format has by itself
    parts: tuple[Part, ...] = ()  # the tables by suites
    chosen: bool = False  # by their ids: a text shows them also where nothing is measured
    db: Db = None  # that they were read from

    def __post_init__(self) -> None:
        if not all(isinstance(grid, Sheet) for grid in self.grids):
            raise SpecError("a Table of numbers of one's own is made by Table.from_frame(frame, rows=, columns=)")

    @classmethod
    def from_frame(
        cls,
        numbers: pandas.DataFrame,
        rows: str | Sequence[str],
        columns: str | Sequence[str],
        *,
        seed: str = "seed",
        title: str = "",
        digits: int = 2,
    ) -> Table:
        """A table of numbers of one's own: mean and spread over the seeds of each row.

        numbers: one line a run, or a frame such as `results` returns. rows: the columns whose labels name a row.
        columns: either columns of numbers, ["natural", "pgd20"], each a heading; or one column of labels, "metric",
        whose numbers are in the column "value". seed: the column that tells runs apart, if there is one. Numbers in
        [0, 1] are printed as per cent. SpecError: no such column, or two numbers of one seed at one place.

        >>> import pandas, fatbench
        >>> runs = pandas.DataFrame({"method": ["A", "A", "B"], "seed": [0, 1, 0], "pgd20": [0.5, 0.7, 0.4]})
        >>> fatbench.Table.from_frame(runs, "method", "pgd20").frame()["mean"].round(3).tolist()
        [0.6, 0.4]
        """
        row_names, headings = names(rows), names(columns)
        for name in (*row_names, *headings):
            if name not in numbers:
                raise SpecError(f"the frame has no column '{name}'{did_you_mean(name, map(str, numbers.columns))}")
        tidy = numbers
        if len(headings) == 1 and numbers[headings[0]].dtype.kind not in "fiub":  # labels, not numbers
            if "value" not in numbers:
                raise SpecError(f"'{headings[0]}' holds no numbers, and the frame has no column 'value'")
            tidy = numbers.rename(columns={headings[0]: "heading"})
        else:
            id_columns = [*row_names, *([seed] if seed in numbers else [])]
            tidy = numbers.melt(id_vars=id_columns, value_vars=headings, var_name="heading", value_name="value")
        # without seeds, the lines of a row are its runs, in their order
        tidy = tidy.assign(run=tidy[seed] if seed in tidy else tidy.groupby([*row_names, "heading"]).cumcount())
        duplicates = tidy[tidy.duplicated([*row_names, "heading", "run"])]
        if len(duplicates):
            duplicate_key = ", ".join(str(value) for value in duplicates.iloc[0][[*row_names, "heading", "run"]])
            raise SpecError(f"two numbers of {duplicate_key}: name what tells them apart in rows, or choose some")
        return cls([_sheet(tidy, row_names, title, digits)])

    def __repr__(self) -> str:
        return self.markdown()

    def _repr_html_(self) -> str:
        return self.html()

    def html(self) -> str:
        """A piece of HTML, as a notebook shows it."""
        return html.fragment([shortened(grid, self.notes or "full") for grid in self.grids])

    def markdown(self) -> str:
        """As `fatbench report --format markdown`."""
        return self.text("markdown")

    @functools.cached_property
    def unmeasured(self) -> list[Sheet]:
        """The tables that texts leave out beside others: nothing of them is measured, published or failed."""
        without = [
            grid for grid in self.grids if not (any(map(any_number, grid.all())) or "failed" in dict(grid.notes))
        ]
        return [] if self.chosen else without

    def text(self, format: str, **how: Any) -> str:
        """As `fatbench report --format`; csv and json have every table. how: see `latex`."""
        left_out = [] if format in DATA_FORMATS else self.unmeasured
        return render([grid for grid in self.grids if grid not in left_out], format, self.notes, **how)

    def page(self) -> str:
        """A web page of its own, with the runs behind each number."""
        from fatbench.runner import provenance

        with opened(self.db) as store:
            if store is None:
                return self.text("html")
            linked = {*store.known_cells(cell.id for part in self.parts for cell in part.plan.cells)}
            left_out = [grid for grid in self.unmeasured if linked.isdisjoint(cell for _, cell in grid.points)]
            parts = [
                replace(
                    part, grids=[shortened(grid, self.notes or "full") for grid in part.grids if grid not in left_out]
                )
                for part in self.parts
            ]
            folder = settings.files_folder(settings.database(next(iter(listed_databases(self.db)), None)))
            select: Any = next((grid.select for grid in self.grids), "last")
            return pages.page(parts, store, select=select, files=folder, commit=provenance.short_version())

    def latex(self, *, width: str | float = "article") -> str:
        """As `fatbench report --format latex`. width: as `--width`, or points. SpecError: no such width."""
        return self.text("latex", width=str(width))

    def save(self, path: str | Path, **options: Any) -> Path:
        """Write a file: its ending, .md, .tex, .html, .csv or .json, says what. options: of .tex, as `latex` takes it.

        SpecError: another ending; MachineError: the file cannot be written.
        """
        file = Path(path)
        format = ENDINGS.get(file.suffix)
        if format is None:
            raise SpecError(f"{file}: expected a name that ends in {', '.join(ENDINGS)}")
        text = self.latex(**options) if format == "latex" else self.text(format)
        whole_file.write(file, text, file)
        return file

    def frame(self) -> pandas.DataFrame:
        """One row a number that the tables show: labels, metric, mean, std, n, published, doubts; fractions."""
        from fatbench.report.formats.records import frame

        return frame(self.grids)


@dataclass(frozen=True, repr=False)
class DifferenceTable(Table):
    """Methods, each with its difference from the suite's baseline, interval and p: `fatbench report --differences`."""

    tables: tuple[Differences, ...] = ()

    def text(self, format: str, **how: Any) -> str:
        """As `fatbench report --differences --format`."""
        if format not in DATA_FORMATS:
            return super().text(format, **how)
        return "\n".join(as_data(table, format) for table in self.tables)

    def page(self) -> str:
        """As `html`."""
        return self.html()

    def frame(self) -> pandas.DataFrame:
        """One row a method: labels, accuracies, difference, low, high, at_most and p after Holm; fractions."""
        return pandas.DataFrame([row for table in self.tables for row in records(table)])


def _sheet(tidy: pandas.DataFrame, rows: list[str], title: str, digits: int) -> Sheet:
    """The table of numbers with the columns of `rows`, heading, run and value."""
    headings = list(dict.fromkeys(tidy["heading"].astype(str)))
    sources = [Source(heading, "evaluation", heading, -1, None) for heading in headings]
    runs = {run: position for position, run in enumerate(dict.fromkeys(tidy["run"]))}
    numbered = all(isinstance(run, int) or str(run).isdecimal() for run in runs)
    tidy = tidy.dropna(subset=["value"])
    keys = [*zip(*(tidy[name].astype(str) for name in rows), strict=True)]
    row_keys = list(dict.fromkeys(keys))
    at = [headings.index(heading) for heading in tidy["heading"].astype(str)]
    numbers = pandas.DataFrame(
        {
            "row": [row_keys.index(key) for key in keys], "group": 0, "column": at, "side": OWN, "cell": None,
            "source": [sources[i] for i in at], "seed": [int(run) if numbered else runs[run] for run in tidy["run"]],
            "value": tidy["value"].astype(float).tolist(), "n": 0, "stages": [()] * len(at), "doubts": [()] * len(at),
            "outcomes": [(0, 0)] * len(at), "never": False, "chance": None,
        }
    ).sort_values("seed", kind="stable")  # fmt: skip
    entries = entries_of(numbers, len(row_keys), 1, [None] * len(headings))
    entries.loc[~entries["planned"].astype(bool), "wanted"] = len(runs)
    labels = {LABEL + name: [row_keys[i][at] for i in entries["row"]] for at, name in enumerate(rows)}
    entries = entries.assign(planned=True, own=False, **labels)
    columns = []
    for i, source in enumerate(sources):
        fractions = numbers.loc[numbers["column"] == i, "value"].between(0, 1).all()
        columns.append(Column(headings[i], source, headings[i], "none", "percent" if fractions else "plain", digits))
    return Sheet(
        suite="own", preset="paper", id="own", name=title or "Own numbers", label="", axes=rows, across=[],
        columns=columns, entries=with_texts(entries, columns), select="last", checkpoint="",
        seeds=sorted({*numbers["seed"].tolist()}), facts=Facts(),
    )  # fmt: skip
