"""From measurements to grids: one per table of a suite, every number with its seeds, its spread and the published one.

A grid holds fractions in [0, 1] and plain numbers, unrounded; renderers print them. Nothing here imports torch, numpy
or pandas: a report on 10,000 cells answers in two seconds.

    build(suite, plan, rows)    rows: dicts as `Store.measurements` returns them
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fatbench.data.catalogue import CATALOGUE
from fatbench.errors import SpecError
from fatbench.report import flags as checking
from fatbench.report import provenance
from fatbench.report.paired import Paired, paired
from fatbench.report.published import Lookup
from fatbench.store.selection import MONITORED, WORDS, Checkpoint, checkpoint_round
from fatbench.suite.cells import Cell, Evaluation, Plan
from fatbench.suite.files import Suite
from fatbench.suite.model import Condition, Key
from fatbench.suite.tables import SOURCE, Table

# Training numbers that are shares in [0, 1]; every other training number is plain.
FRACTIONS = (
    "train_accuracy", "holdout_accuracy", "holdout_gap", "natural", "monitor", "val_natural", "val_monitor",
    "natural_class", "monitor_class", "val_natural_class", "val_monitor_class", "edge_natural", "adfl_hit",
    "identification", "identification_ci", "label_recovery", "never_updated", "updated_share",
    "leak_identification",
    "leak_initial_identification",
)  # fmt: skip
EVERY = -2  # the client of a source "metric[*]": a line each


@dataclass(frozen=True)
class Source:
    """Where numbers come from: the parsed form of "pgd20", "train:drift_post@10", "gap:pgd20" or "train:weight[*]"."""

    text: str
    stage: str  # "evaluation", "train", "gap" or "artifact"
    metric: str
    client: int  # -1: not about one client; EVERY: of each
    round: int | None

    @classmethod
    def parse(cls, text: str) -> Source:
        match = SOURCE.match(text)
        assert match is not None, text  # checked when the suite was read
        client, round = match["client"], match["round"]
        return cls(
            text,
            match["stage"] or "evaluation",
            match["metric"],
            -1 if client is None else EVERY if client == "*" else int(client),
            None if round is None else int(round),
        )

    @property
    def fraction(self) -> bool:
        return self.stage != "train" or self.metric in FRACTIONS


@dataclass(frozen=True)
class Column:
    """A heading: what it shows and how its numbers are printed."""

    heading: str
    source: Source
    best: str  # "max", "min" or "none"
    unit: str  # "percent": fractions printed times 100; "plain": as they are
    digits: int  # after the point
    where: Condition = field(default_factory=dict)  # the points its numbers are of, where the heading says so


@dataclass
class Value:
    """What stands at one row and heading of a group. `mean` is None where nothing has been measured."""

    planned: bool = True  # False: the suite has no such cell, nothing is missing
    mean: float | None = None
    std: float | None = None  # over seeds, ddof 1; None below two seeds
    seeds: tuple[int, ...] = ()  # those measured
    wanted: int = 0  # how many the plan asks for
    n: tuple[int, ...] = ()  # examples behind each measurement; more than one number = mixed
    values: tuple[float, ...] = ()  # one a seed
    published: float | None = None
    published_std: float | None = None
    rank: str = ""  # "best" or "second" of its heading and group
    flags: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()  # footnote marks of the flags
    published_flag: str = ""
    published_mark: str = ""
    labels: Key = field(default_factory=dict)  # of the axes in the heading's condition

    @property
    def difference(self) -> float | None:
        """measured - published, both unrounded."""
        return None if self.mean is None or self.published is None else self.mean - self.published

    @property
    def partial(self) -> str:
        """ "2 of 3 seeds" where seeds are missing, else empty."""
        missing = self.mean is not None and len(self.seeds) < self.wanted
        return f"{len(self.seeds)} of {self.wanted} seeds" if missing else ""


@dataclass(frozen=True)
class Group:
    """A group of columns: one combination of labels of the `across` axes."""

    key: Key

    @property
    def label(self) -> str:
        return ", ".join(self.key.values())


@dataclass(frozen=True)
class Row:
    """A row: its labels and its values."""

    key: Key
    values: list[list[Value]]  # [group][column]


@dataclass(frozen=True)
class Comparison:
    """A label of the paired axis against another, under one heading: differences between runs of the same seed."""

    key: Key  # the labels of the other axes
    label: str
    against: str
    column: Column
    test: Paired


@dataclass(frozen=True)
class Grid:
    """One table, ready to print."""

    suite: str
    preset: str
    id: str
    name: str  # the title in the suite file
    label: str  # "SMOKE PRESET - not comparable with published numbers"; empty for the preset `paper`
    axes: list[str]  # that label the rows
    groups: list[Group]
    columns: list[Column]
    rows: list[Row]
    select: str
    seeds: list[int]
    facts: provenance.Facts
    notes: list[tuple[str, str]] = field(default_factory=list)  # (what, text), shown under the table
    footnotes: list[tuple[str, str]] = field(default_factory=list)  # (mark, text)
    points: list[tuple[str, str]] = field(default_factory=list)  # (labels, cell), one a point and seed
    paired: list[Comparison] = field(default_factory=list)  # the tests that the table asks for
    pictures: list[tuple[str, str]] = field(default_factory=list)  # (caption, data URI), for the page alone

    @property
    def title(self) -> str:
        return f"{self.name} [{self.label}]" if self.label else self.name

    @property
    def has_published(self) -> bool:
        return any(value.published is not None for value in self.all())

    def all(self) -> Iterable[Value]:
        return (value for row in self.rows for group in row.values for value in group)


def label(preset: str) -> str:
    """What keeps a reduced preset's numbers from being taken for a paper's; empty for `paper` itself."""
    return "" if preset == "paper" else f"{preset.upper()} PRESET - not comparable with published numbers"


# outcomes(cell, stage) -> (bits as one integer, number of examples) or None
Outcomes = Callable[[str, str], "tuple[int, int] | None"]


def build(
    suite: Suite,
    plan: Plan,
    rows: Iterable[Mapping[str, Any]],
    select: Checkpoint = "last",
    published: bool = True,
    *,
    rounds: Mapping[tuple[str, str], int] | None = None,
    runs: Iterable[Mapping[str, Any]] | None = None,
    outcomes: Outcomes | None = None,
    failed: frozenset[str] = frozenset(),
) -> list[Grid]:
    """The tables of a suite that the plan's cells have a row in.

    rows: measurements (cell, stage, metric, round, client, value, n; with device, precision, commit, ... or a
    `provenance` mapping). rounds: (cell, "best-test" or "best-val") -> round, where the caller knows it; otherwise it
    is found in the rows of stage "train". runs: what ran, with its provenance; default: what the rows say. failed:
    cells of which something failed, and was not run again since.
    SpecError: a table lumps together points of the grid that differ in an axis it does not name.
    """
    numbers = Numbers(plan, rows, select, rounds or {}, outcomes, runs)
    return [
        grid for table in suite.tables if (grid := _grid(suite, plan, table, numbers, published, failed)) is not None
    ]


@dataclass(slots=True)
class _Found:
    """One seed's number at one place of a table."""

    value: float
    n: int
    stages: tuple[str, ...]  # what was read
    flags: tuple[str, ...] = ()


class Stages:
    """Names of evaluation stages; an evaluation's hash is computed once, however many cells ask for it."""

    def __init__(self) -> None:
        self._by_content: dict[str, str] = {}
        self._by_object: dict[int, tuple[Evaluation, str]] = {}  # holds the object, so that its id stays its own
        self._names: dict[tuple[str, int], str] = {}

    def name(self, evaluation: Evaluation, round: int) -> str:
        """`evaluation.stage(round)`."""
        known = self._by_object.get(id(evaluation))
        if known is None:
            content = repr(evaluation)
            if content not in self._by_content:
                self._by_content[content] = evaluation.id
            known = self._by_object[id(evaluation)] = evaluation, self._by_content[content]
        name = self._names.get((known[1], round))
        if name is None:
            name = self._names[known[1], round] = evaluation.stage(round)
        return name


class Numbers:
    """The measurements of a plan, by cell, stage, metric, round and client."""

    def __init__(
        self,
        plan: Plan,
        rows: Iterable[Mapping[str, Any]],
        select: Checkpoint,
        rounds: Mapping[tuple[str, str], int],
        outcomes: Outcomes | None,
        runs: Iterable[Mapping[str, Any]] | None,
    ) -> None:
        self.select, self.known, self.outcomes = select, rounds, outcomes
        self.stages = Stages()
        self.by_key: dict[tuple[str, str, str, int, int], tuple[float, int]] = {}
        self.stored_flags: dict[tuple[str, str], list[str]] = {}
        self.series: dict[tuple[str, str], dict[int, float]] = {}
        self.last = {cell.id: int(cell.spec["protocol"]["rounds"]) for cell in plan.cells}
        self.evaluated: dict[tuple[str, str], dict[str, _Found]] = {}  # (cell, checkpoint) -> metric -> number
        origins = provenance.Origins()
        # (cell, stage), or (None, stage) where all cells share the origin -> an ordered set
        self.provenance: dict[tuple[str | None, str], dict[provenance.Origin, None]] = {}
        monitored = set(MONITORED.values())
        for row in rows:
            cell, stage, metric = row["cell"], row["stage"], row["metric"]
            round, client = row["round"], row.get("client", -1)
            self.by_key[cell, stage, metric, round, client] = (row["value"], row.get("n") or 0)
            if stage == "train":
                if metric in monitored and client == -1:
                    self.series.setdefault((cell, metric), {})[round] = row["value"]
            elif metric.startswith("flag_") and row["value"]:
                self.stored_flags.setdefault((cell, stage), []).append(metric.removeprefix("flag_").replace("_", " "))
            if runs is None:
                self.provenance.setdefault((cell, stage), {})[origins.of(row)] = None
        for run in runs or ():
            self.provenance.setdefault((run["cell"], run["stage"]), {})[origins.of(run)] = None

    def origins(self, cell: str, stage: str) -> Iterable[provenance.Origin]:
        """Where a stage of a cell was run."""
        return self.provenance.get((cell, stage)) or self.provenance.get((None, stage)) or ()

    def round(self, cell: str, checkpoint: str) -> int | None:
        """The round whose model a checkpoint is; None while it is not known."""
        if checkpoint == "last":
            return self.last[cell]
        if (known := self.known.get((cell, checkpoint))) is not None:
            return known
        return checkpoint_round(self.series.get((cell, MONITORED[checkpoint]), {}))

    def find(self, cell: Cell, source: Source) -> _Found | None:
        """One cell's number for a column; None: not measured."""
        if source.stage == "train":
            round = source.round or self.last[cell.id]
            row = self.by_key.get((cell.id, "train", source.metric, round, source.client))
            return None if row is None else _Found(row[0], row[1], ("train",))
        if source.stage == "gap":
            best = self._evaluations(cell, "best-test").get(source.metric)
            last = self._evaluations(cell, "last").get(source.metric)
            if best is None or last is None:
                return None
            return _Found(best.value - last.value, best.n, (*best.stages, *last.stages[1:]))
        return self._evaluations(cell, self.select).get(source.metric)

    def _evaluations(self, cell: Cell, checkpoint: str) -> dict[str, _Found]:
        """Every evaluation that has been made of a cell at a checkpoint, by metric, with its flags."""
        known = self.evaluated.get((cell.id, checkpoint))
        if known is not None:
            return known
        found: dict[str, _Found] = {}
        round = self.round(cell.id, checkpoint)
        if round is not None:
            for evaluation in cell.evaluations:
                stage = self.stages.name(evaluation, round)
                if row := self.by_key.get((cell.id, stage, evaluation.label, round, -1)):
                    found[evaluation.label] = _Found(row[0], row[1], ("train", stage))
            self._check(cell, round, found)
        self.evaluated[cell.id, checkpoint] = found
        return found

    def _check(self, cell: Cell, round: int, found: dict[str, _Found]) -> None:
        """Set the flags of one model's evaluations, in words without the seed."""
        chain = [metric for metric in checking.CHAIN if metric in found]
        raised: dict[str, list[str]] = {}
        attacks = {evaluation.label: evaluation.attack for evaluation in cell.evaluations}
        for weak, strong in itertools.combinations(chain, 2):
            easy, hard = found[weak], found[strong]
            if hard.value <= easy.value or not checking.same_ball(attacks[weak], attacks[strong]):
                continue
            paired = None
            if self.outcomes is not None and easy.n == hard.n:
                bits = [self.outcomes(cell.id, each.stages[-1]) for each in (easy, hard)]
                paired = checking.discordant(*bits)
            if checking.violated((easy.value, easy.n), (hard.value, hard.n), paired):
                raised.setdefault(strong, []).append(f"{strong} is above {weak} by more than 3 standard errors")
        if natural := found.get("natural"):
            dead = self.by_key.get((cell.id, natural.stages[-1], "zero_gradients", round, -1))
            if dead is not None and dead[0] > checking.ZERO_GRADIENTS:
                for metric in found:
                    if attacks[metric]["name"] != "natural":
                        raised.setdefault(metric, []).append(checking.NO_GRADIENT)
        for metric, one in found.items():
            stored = self.stored_flags.get((cell.id, one.stages[-1]), ()) if self.stored_flags else ()
            if not math.isfinite(one.value):
                raised.setdefault(metric, []).append("not a number")
            if stored or metric in raised:
                one.flags = (*stored, *raised.get(metric, ()))


def _grid(
    suite: Suite, plan: Plan, table: Table, numbers: Numbers, with_published: bool, failed: frozenset[str]
) -> Grid | None:
    found = places_of(plan, table)
    if not found:
        return None
    sources = {heading: Source.parse(text) for heading, text in table.values.items()}
    absent = _absent(sources, found)
    headings = [heading for heading in sources if heading not in absent] or list(sources)
    row_keys = list(dict.fromkeys(row for row, _ in found))
    group_keys = list(dict.fromkeys(group for _, group in found))
    lookup = Lookup(table.published) if with_published and table.published else None

    facts = provenance.Facts()
    rows: list[Row] = []
    for row_key in row_keys:
        values = []
        for group_key in group_keys:
            here = found.get((row_key, group_key), {})
            shown = {h: [] if h in absent else here.get(h, []) for h in headings}
            values.append([_value(cells, sources[h], numbers, facts) for h, cells in shown.items()])
            for heading, value in zip(headings, values[-1], strict=True):
                if not value.planned:
                    continue
                point = here[heading][0].key
                value.labels = {axis: point[axis] for axis in table.conditions.get(heading, ())}
                if lookup:
                    value.published, value.published_std, value.published_flag = lookup.find(point, heading)
        rows.append(Row(dict(row_key), values))

    columns = []
    for position, heading in enumerate(headings):
        printed = [v for row in rows for group in row.values for v in (group[position].mean, group[position].published)]
        source = sources[heading]
        plain_published = table.published is not None and table.published.unit == "plain"
        plain = not source.fraction or (plain_published and heading in table.published.values)  # type: ignore[union-attr]
        unit, digits = ("plain", _digits(printed)) if plain else ("percent", 2)
        columns.append(Column(heading, source, table.best[heading], unit, digits, table.conditions.get(heading, {})))
    for position, column in enumerate(columns):
        # an accuracy on one data set is not better than on another
        contests: dict[tuple[Names, str], list[Value]] = {}
        for row_key, row in zip(row_keys, rows, strict=True):
            for group, group_key in enumerate(group_keys):
                for cell in found.get((row_key, group_key), {}).get(column.heading, ())[:1]:
                    side = row_key if table.compete == "row" else group_key
                    contests.setdefault((side, repr(cell.spec["data"])), []).append(row.values[group][position])
        for contest in contests.values():
            _rank(contest, column.best)

    bucket = [cell for here in found.values() for cells in here.values() for cell in cells]
    cells = list({cell.id: cell for cell in bucket}.values())
    grid = Grid(
        suite=suite.name,
        preset=plan.preset,
        id=table.id,
        name=table.title,
        label=label(plan.preset),
        axes=table.rows,
        groups=[Group(dict(key)) for key in group_keys],
        columns=columns,
        rows=rows,
        select=numbers.select,
        seeds=sorted({int(cell.spec["seed"]) for cell in cells}),
        facts=facts,
        points=list(dict.fromkeys((", ".join(cell.key.values()), cell.id) for cell in bucket)),
    )
    _footnotes(grid)
    if table.paired is not None:
        grid.paired.extend(_comparisons(grid, *table.paired))
    grid.notes.extend(_notes(grid, suite, plan, table, cells, absent, lookup, failed))
    return grid


Names = tuple[tuple[str, str], ...]


Places = dict[tuple[Names, Names], dict[str, list[Cell]]]


def places_of(plan: Plan, table: Table) -> Places:
    """(labels of the row, labels of the group) -> heading -> its cells, one a seed; only what some heading shows."""
    words = ("table", "a row holds", "'rows', 'across' or 'where'")
    return places(plan, table.id, table.where, table.rows, table.across, list(table.values), table.conditions, words)


def places(
    plan: Plan,
    id: str,
    where: Condition,
    first: Sequence[str],
    second: Sequence[str],
    headings: Sequence[str],
    conditions: Mapping[str, Condition],
    words: tuple[str, str, str],
) -> Places:
    """The cells of a table or a figure: (labels of the first axes, of the second) -> heading -> cells, one a seed.

    words: what it is, what may hold only one point of the grid, and where to say which. SpecError: it holds several.
    """
    kinds: list[Condition] = []
    for heading in headings:
        if conditions.get(heading, {}) not in kinds:
            kinds.append(conditions.get(heading, {}))
    points: dict[tuple[Names, Names, int], Key] = {}
    cells: dict[tuple[Names, Names], dict[int, list[Cell]]] = {}
    for cell in plan.cells:
        key = cell.key
        if not _inside(key, where):
            continue
        a, b = tuple((axis, key.get(axis, "")) for axis in first), tuple((axis, key.get(axis, "")) for axis in second)
        for kind, condition in enumerate(kinds):
            if condition and not _inside(key, condition):
                continue
            known = points.setdefault((a, b, kind), key)
            if known is not key and known != key:
                axes = sorted(axis for axis in {*known, *key} if known.get(axis) != key.get(axis))
                what, holds, say = words
                if condition:
                    heading = next(h for h in headings if conditions.get(h) == condition)
                    holds, say = f"{holds} under '{heading}'", f"{say.replace(' or', ',')} or that of the heading"
                raise SpecError(
                    f"{what} {id}: {holds} more than one point of the grid: name the axis {' and '.join(axes)} in {say}"
                )
            cells.setdefault((a, b), {}).setdefault(kind, []).append(cell)
    at = {heading: kinds.index(conditions.get(heading, {})) for heading in headings}
    return {place: {h: here[k] for h, k in at.items() if k in here} for place, here in cells.items()}


def _absent(sources: Mapping[str, Source], found: Places) -> dict[str, str]:
    """Heading -> why none of the cells can have such a number: a reduced preset lacks the attack, or ends before."""
    absent = {}
    for heading, source in sources.items():
        cells = [cell for here in found.values() for cell in here.get(heading, ())[:1]]
        rounds = max((int(cell.spec["protocol"]["rounds"]) for cell in cells), default=0)
        if not cells:
            absent[heading] = "not in the grid of this preset"
        elif source.stage == "train":
            if (source.round or 0) > rounds:
                absent[heading] = f"training ends after round {rounds} in this preset"
        elif not any(evaluation.label == source.metric for cell in cells for evaluation in cell.evaluations):
            absent[heading] = "not evaluated in this preset"
    return absent


def _inside(key: Key, where: Condition) -> bool:
    return all(key.get(axis) in labels for axis, labels in where.items())


def _value(cells: Sequence[Cell], source: Source, numbers: Numbers, facts: provenance.Facts) -> Value:
    """Mean and spread over the seeds of one place."""
    if not cells:
        return Value(planned=False)
    measured: list[tuple[int, _Found]] = []
    flagged: dict[str, list[int]] = {}
    for cell in cells:
        found = numbers.find(cell, source)
        if found is None:
            continue
        seed = int(cell.spec["seed"])
        for flag in found.flags:
            flagged.setdefault(flag, []).append(seed)
        if math.isfinite(found.value):
            measured.append((seed, found))
            what = source.metric if source.stage != "train" else ""
            origins = [(stage, numbers.origins(cell.id, stage)) for stage in found.stages]
            facts.add(cell.id, cell.spec["data"]["name"], what, found.n, origins)
    flags = tuple(
        text if len(cells) == 1 else f"{text} (seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))})"
        for text, seeds in flagged.items()
    )
    if not measured:
        return Value(wanted=len(cells), flags=flags)
    values = tuple(found.value for _, found in measured)
    mean = math.fsum(values) / len(values)
    std = None
    if len(values) > 1:
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return Value(
        mean=mean,
        std=std,
        seeds=tuple(seed for seed, _ in measured),
        wanted=len(cells),
        n=tuple(sorted({found.n for _, found in measured})),
        values=values,
        flags=flags,
    )


def _rank(values: Sequence[Value], best: str) -> None:
    """Mark the best and the second of one heading; ties share a rank. Nothing is best where all are the same."""
    order = sorted({value.mean for value in values if value.mean is not None}, reverse=best == "max")
    if best == "none" or len(order) < 2:
        return
    for value in values:
        if value.mean is not None and value.mean in order[:2]:
            value.rank = "best" if value.mean == order[0] else "second"


def _digits(numbers: Iterable[float | None]) -> int:
    """Digits after the point that a column of plain numbers needs: about four that matter in its largest number."""
    largest = max((abs(x) for x in numbers if x is not None), default=0.0)
    for bound, digits in ((1000, 0), (10, 2), (1, 3), (0.1, 4)):
        if largest >= bound:
            return digits
    return 6 if largest else 2


def _comparisons(grid: Grid, axis: str, against: str) -> Iterable[Comparison]:
    """Each label of an axis against one of them, at the same labels of all others, under each heading."""
    values: dict[tuple[tuple[Names, int], str], Value] = {}  # (the other labels, heading), label
    for row in grid.rows:
        for group, here in zip(grid.groups, row.values, strict=True):
            key = {**row.key, **group.key}
            rest = tuple((other, label) for other, label in key.items() if other != axis)
            values |= {((rest, position), key[axis]): value for position, value in enumerate(here)}
    for (place, label), value in values.items():
        base = values.get((place, against))
        if label == against or base is None:
            continue
        mine, theirs = (dict(zip(one.seeds, one.values, strict=True)) for one in (value, base))
        if (test := paired(mine, theirs)) is not None:
            yield Comparison(dict(place[0]), label, against, grid.columns[place[1]], test)


SYMBOLS = ("†", "‡", "§", "¶")


def _footnotes(grid: Grid) -> None:
    """Number the flags: symbols for measured numbers, letters for published ones; the same words share a mark."""
    measured: dict[str, str] = {}
    published: dict[str, str] = {}
    for value in grid.all():
        for text in value.flags:
            index = len(measured)
            measured.setdefault(text, SYMBOLS[index % 4] * (index // 4 + 1))
        value.marks = tuple(measured[text] for text in value.flags)
        if value.published_flag and value.published is not None:
            index = len(published)
            mark = chr(ord("a") + index % 26) * (index // 26 + 1)
            value.published_mark = published.setdefault(value.published_flag, mark)
    grid.footnotes.extend((mark, text) for text, mark in measured.items())
    grid.footnotes.extend((mark, f"as published: {text}") for text, mark in published.items())


def _notes(
    grid: Grid,
    suite: Suite,
    plan: Plan,
    table: Table,
    cells: Sequence[Cell],
    absent: Mapping[str, str],
    lookup: Lookup | None,
    failed: frozenset[str],
) -> Iterable[tuple[str, str]]:
    """What the numbers are and where they come from, always in this order."""
    facts = grid.facts
    preset = f"{suite.name}, preset {plan.preset}"
    if grid.label:
        preset += f": {grid.label}"
    yield "suite", f"{preset}. {plan.note}".removesuffix(". ")
    yield "data", data_note(facts, cells)
    yield "checkpoint", "; ".join(_checkpoint(grid, plan, cells))
    if text := _conditions(grid.columns):
        yield "columns", text
    seeds = ", ".join(map(str, grid.seeds))
    spread = "mean ± sample standard deviation over seeds (ddof 1)" if len(grid.seeds) > 1 else "one seed, no spread"
    yield "seeds", f"{seeds}; {spread}"
    if any(value.mean is not None for value in grid.all()):
        yield from facts.notes()
    if any(value.rank for value in grid.all()):
        several = len({repr(cell.spec["data"]) for cell in cells}) > 1
        over = f"of a {table.compete}" + " under the same heading" * (table.compete == "row")
        over += " on the same data" * several
        yield "marks", f"bold: best, underlined: second {over}; measured numbers only"
    values = list(grid.all())
    missing = sum(value.planned and value.mean is None for value in values)
    partial = [value for value in values if value.partial]
    planned = sum(value.planned for value in values)
    if missing:
        yield "missing", f"{missing} of {planned} numbers are not measured yet (--)"
    if partial:
        fewest = min(partial, key=lambda value: len(value.seeds))
        example = f"[{len(fewest.seeds)}/{fewest.wanted}] is {fewest.partial}"
        yield "incomplete", f"{len(partial)} of {planned} numbers lack seeds, as said at them: {example}"
    for why in dict.fromkeys(absent.values()):
        yield "left out", f"{', '.join(heading for heading in absent if absent[heading] == why)}: {why}"
    if any(not value.planned for value in values):
        holes = (why for key, why in plan.excluded if _inside(key, table.where))
        if reasons := list(dict.fromkeys(holes)):
            yield "not run", "; ".join(reasons)
    if lookup is not None and grid.has_published:
        yield "published", f"{lookup.name}; difference = measured - published{_points(grid)}"
        for problem in lookup.problems:
            yield "published", problem
    if any(value.marks for value in values):
        yield "checks", checking.RULE
    yield from _tests(grid.paired)
    if table.note:
        yield "note", table.note
    if broken := failed & {cell.id for cell in cells}:
        count = f"{len(broken)} cell{'s' * (len(broken) > 1)}"
        yield "failed", f"{count}: {', '.join(sorted(broken))} (see fatbench logs)"


def _tests(comparisons: Sequence[Comparison]) -> Iterable[tuple[str, str]]:
    """What the paired tests are, and one line for each."""
    from fatbench.report import text

    if comparisons:
        count = f"{len(comparisons)} comparison{'s' * (len(comparisons) > 1)}"
        what = "differences between runs of the same seed, mean ± sample standard deviation (ddof 1)"
        tests = "p of the paired t test and of Wilcoxon's signed-rank test, two-sided, not corrected for"
        yield "paired", f"{what}; {tests} {count}"
    for one in comparisons:
        test, column, unit = one.test, one.column, " points" * (one.column.unit == "percent")
        where = ", ".join(one.key.values())
        who = f"{where + ': ' if where else ''}{one.label} - {one.against}, {column.heading}"
        difference = f"{text.signed(test.mean, column)} ± {text.number(test.std, column)}{unit}, n = {len(test.seeds)}"
        yield "paired", f"{who}: {difference}, t test {_p(test.t_p)}, Wilcoxon {_p(test.wilcoxon_p)}"


def _p(value: float | None) -> str:
    return "undefined: no difference varies" if value is None else f"p = {value:.2g}"


def _conditions(columns: Iterable[Column]) -> str:
    """ "'NT': training NT; 'Acc' and 'Robust': training AT": which points the headings show, where they say so."""
    shown: dict[str, list[str]] = {}
    for column in columns:
        if column.where:
            said = ", ".join(f"{axis} {' or '.join(labels)}" for axis, labels in column.where.items())
            shown.setdefault(said, []).append(f"'{column.heading}'")
    return "; ".join(f"{_listed(headings)}: {said}" for said, headings in shown.items())


def _checkpoint(grid: Grid, plan: Plan, cells: Sequence[Cell]) -> Iterable[str]:
    """Which round's model the numbers are of."""
    stages = {column.source.stage for column in grid.columns}
    last = f"{WORDS['last']} ({_listed({str(cell.spec['protocol']['rounds']) for cell in cells})})"
    if "evaluation" in stages:
        yield last if grid.select == "last" else WORDS[grid.select]
        if grid.select not in plan.checkpoints:
            yield f"this preset evaluates {_listed(plan.checkpoints)} only"
    if "gap" in stages:
        yield f"gap: {WORDS['best-test']}, minus {last}"
    if "train" in stages:
        ends = any(column.source.stage == "train" and column.source.round is None for column in grid.columns)
        yield f"training numbers: after the {last if ends else 'round that the column names'}"


def _points(grid: Grid) -> str:
    return ", in points" if all(column.unit == "percent" for column in grid.columns) else ""


def data_note(facts: provenance.Facts, cells: Sequence[Cell]) -> str:
    """Data sets with their variant, and on how many test images each metric was measured."""
    shown = []
    said = facts.data
    for name in dict.fromkeys(cell.spec["data"]["name"] for cell in cells):
        specs = [cell.spec["data"] for cell in cells if cell.spec["data"]["name"] == name]
        variants = [variant for variant, _ in said.get(name, [])] or [spec.get("variant") for spec in specs]
        text = CATALOGUE[name].title if name in CATALOGUE else name
        text += "".join(f", variant {v}: not the published files" for v in dict.fromkeys(variants) if v)
        by_size: dict[str, list[str]] = {}
        for (dataset, metric), sizes in facts.sizes.items():
            if dataset == name:
                by_size.setdefault(" and ".join(map(str, sorted(sizes))), []).append(metric)
        if len(by_size) == 1:
            text += f"; n = {next(iter(by_size))} test images"
        elif by_size:
            text += "; test images: " + ", ".join(f"{n} for {', '.join(metrics)}" for n, metrics in by_size.items())
        shown.append(text)
    return ". ".join(shown)


def _listed(items: Iterable[str]) -> str:
    """ "a, b and c", in the order given; sets are sorted as numbers where they are numbers."""
    if isinstance(items, (set, frozenset)):
        items = sorted(items, key=lambda item: (len(item), item))
    parts = list(items)
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""
