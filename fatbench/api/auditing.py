"""Sanity checks of printed tables, of files, data frames or stored results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas

from fatbench import whole_file
from fatbench.api.views import results
from fatbench.errors import SpecError, did_you_mean
from fatbench.report.audit import Audit
from fatbench.report.audit import audit as of_longs
from fatbench.report.audit.grids import grids, of_frame
from fatbench.report.audit.read_tables import Known, Long, radius_text, radius_value
from fatbench.store.opening import is_export

SQLITE = b"SQLite format 3\x00"


def audit(
    *tables: str | Path | pandas.DataFrame,
    method: str | None = None,
    baseline: str | None = None,
    classes: int | None = None,
    images: int | None = None,
    radius: str | None = None,
    spread: float | None = None,
) -> Audit:
    """Ask printed accuracies what they can bear: questions to the authors of a table, without any training.

    tables: files in CSV, Markdown, LaTeX or pasted lines ("-": stdin), exported results, databases, data frames.
    method: the column with the methods. baseline: the method that others are compared with. classes, images: of the
    test set. radius: of every attack, such as "8/255". spread: deviation over seeds of a difference, in points.
    The result has `answers`, `numbers` (one long table) and `text()`.
    SpecError: a table is not understood, or an argument is impossible.

    >>> import fatbench
    >>> import pandas
    >>> printed = pandas.DataFrame({"Method": ["FedAvg", "Ours"], "Clean": [61.05, 64.10], "PGD-20": [28.0, 36.0]})
    >>> len(fatbench.audit(printed, baseline="FedAvg", radius="8/255").numbers)
    4
    """
    for option, value, least in (("classes", classes, 2), ("images", images, 1)):
        if value is not None and value < least:
            raise SpecError(f"expected a whole number of at least {least}, got {value}", option=option)
    if radius is not None and not radius_value(radius_text(radius)) > 0:
        raise SpecError(f"expected a number such as 8/255 or 0.03, got '{radius}'", option="radius")
    if not tables:
        raise SpecError("no table was given: a file, - for stdin, or a data frame")
    known = Known(
        method=method or "", baseline=(baseline,) if baseline else (), classes=classes, images=images,
        radius=radius or "",
    )  # fmt: skip
    longs = [long for table in tables for long in _longs(table, known)]
    methods = [str(name) for long in longs for name in long.numbers["method"].unique()]
    if baseline and baseline not in methods:
        raise SpecError(f"no method is called '{baseline}'{did_you_mean(baseline, methods)}", option="baseline")
    return of_longs(longs, spread)


def _longs(table: str | Path | pandas.DataFrame, known: Known) -> Iterator[Long]:
    """The long tables of a source, by what it is."""
    from fatbench.report.audit.measured import is_measured, of_results
    from fatbench.report.audit.read_tables import read

    if isinstance(table, pandas.DataFrame):
        yield of_results(table, known) if is_measured(table) else read(of_frame(table), "table", known)
        return
    if "://" in str(table) or is_export(str(table)) or _content(Path(table), SQLITE) == SQLITE:
        yield of_results(_with_labels(str(table)), known)
        return
    name = "stdin" if str(table) == "-" else Path(table).stem
    if _content(Path(table), b"PAR1") == b"PAR1":
        frame = pandas.read_parquet(whole_file.regular(Path(table)))
        yield of_results(frame, known) if is_measured(frame) else read(of_frame(frame), name, known)
        return
    try:
        text = whole_file.regular(Path(table)).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{table}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    for grid in grids(text, str(table)):
        frame = pandas.DataFrame(grid.cells[1:], columns=grid.cells[0])
        if is_measured(frame):
            counted = ("seed", "round", "client", "value", "n", "outcomes")
            numeric = {name: pandas.to_numeric(frame[name]) for name in counted}
            yield of_results(frame.assign(**numeric), known)
        else:
            yield read(grid, name, known)


def _content(file: Path, beginning: bytes) -> bytes:
    """As many first bytes of a file as `beginning` has; none of what cannot be read."""
    try:
        with whole_file.regular(file).open("rb") as stream:
            return stream.read(len(beginning))
    except OSError:
        return b""


def _with_labels(database: str) -> pandas.DataFrame:
    """The results of a database, with the labels of each suite that is still there."""
    stored: Any = results(db=database)
    frames = []
    for (suite, preset), numbers in stored.groupby(["suite", "preset"], sort=False):
        try:
            frames.append(results(suite, preset=preset, db=database))
        except SpecError:  # a suite of another version, or of somebody else
            frames.append(numbers)
    return pandas.concat(frames, ignore_index=True) if frames else stored
