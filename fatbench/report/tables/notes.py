"""What is said under a table: what its numbers are, where they come from, and what is doubtful about them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from fatbench.data.catalogue import CATALOGUE
from fatbench.report.numbers import provenance, statistics
from fatbench.report.numbers.doubts import PRECISION, RULE, Doubt
from fatbench.report.numbers.measurements import quoted
from fatbench.report.numbers.published import Lookup
from fatbench.report.tables import number_format
from fatbench.report.tables.grid import Column, Grid, PairedComparison
from fatbench.report.tables.grid_points import is_inside
from fatbench.report.tables.significance import UNTESTED
from fatbench.store.selection import WORDS
from fatbench.suite import format_call
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.external_models import SUITE as EVALUATED
from fatbench.suite.facts import role as role_of
from fatbench.suite.tables import OVER, Table

NOT_COMPARED = "no difference shown: the settings are not the paper's"
PRIOR = (
    "a client's accuracy is the mean of the test set's accuracies by class, weighted by its own fraction of each class;"
    " tenth: mean of the worst (or best) tenth of the clients; std: over clients (ddof 0)"
)
MEANINGS = {
    "mean": "the mean over several evaluations",
    "all": "images that are classified correctly under every one of several evaluations",
}
PRECISIONS_IN_WORDS = [Doubt(code).words for code in sorted(PRECISION)]
SYMBOLS = ("†", "‡", "§", "¶")


def footnotes(grid: Grid) -> None:
    """Number the doubts: symbols for measured numbers, letters for published ones; the same words share a mark.

    A precision that all numbers of a column have is said by a note alone.
    """
    mark_by_doubt: dict[str, str] = {}
    published: dict[str, str] = {}
    columns = [[group[position] for row in grid.rows for group in row.values] for position in range(len(grid.columns))]
    for values in columns:
        doubts_by_value = [value.doubts for value in values if value.mean is not None]
        everywhere = {text for text in PRECISIONS_IN_WORDS if all(text in doubts for doubts in doubts_by_value)}
        for value in values:
            value.marked = tuple(doubt for doubt in value.doubts if doubt not in everywhere)
    for value in grid.all():
        for doubt in value.marked:
            index = len(mark_by_doubt)
            mark_by_doubt.setdefault(doubt, SYMBOLS[index % 4] * (index // 4 + 1))
        value.marks = tuple(mark_by_doubt[doubt] for doubt in value.marked)
        if value.published_flag and value.published is not None:
            index = len(published)
            mark = chr(ord("a") + index % 26) * (index // 26 + 1)
            value.published_mark = published.setdefault(value.published_flag, mark)
    grid.footnotes.extend((mark, doubt) for doubt, mark in mark_by_doubt.items())
    grid.footnotes.extend((mark, f"as published: {flag}") for flag, mark in published.items())


def notes(
    grid: Grid,
    plan: Plan,
    table: Table,
    cells: Sequence[Cell],
    absent: Mapping[str, str],
    lookup: Lookup | None,
    *,
    below: Sequence[tuple[Cell, tuple[float, int, float]]] = (),
) -> Iterable[tuple[str, str]]:
    """What the numbers are and where they come from, always in this order.

    below: the cells at chance, each with its natural accuracy, the images behind it, and chance.
    """
    facts = grid.facts
    trained_here = plan.suite != EVALUATED
    if trained_here:
        yield "suite", f"{plan.suite}, preset {plan.preset}. {plan.note}".removesuffix(". ")
    if plan.where and trained_here:
        yield "filter", f"{plan.where}; other cells are neither shown nor compared with"
    yield "data", data_note(facts, cells, grid.words)
    if grid.checkpoint:
        yield "checkpoint", grid.checkpoint
    if any(column.minus for column in grid.columns):
        yield "differences", _differences(grid)
    if any(column.share for column in grid.columns):
        yield "shares", _shares(grid)
    if priors := [quoted(c.heading) for c in grid.columns if c.source.stage.startswith("prior")]:
        yield "clients", f"{_columns(priors, grid)}: {PRIOR}"
    for stage, what in MEANINGS.items():
        if derived := [quoted(c.heading) for c in grid.columns if c.source.stage == stage]:
            yield "columns", f"{_columns(derived, grid)}: {what}"
    if conditions := _conditions(grid.columns):
        yield "columns", conditions
    seeds = ", ".join(map(str, grid.seeds))
    spread = "mean ± sample standard deviation over seeds (ddof 1)" if len(grid.seeds) > 1 else "one seed, no spread"
    if grid.seeds:
        yield "seeds", f"{seeds}; {spread}"
    named: dict[str, list[str]] = {}
    for metric, specs in grid.attacks.items():
        if specs and format_call.attack(metric, specs) != metric:  # "natural" says it all
            named.setdefault(role_of(specs[0]), []).append(format_call.attack(grid.words.get(metric, metric), specs))
    attacks = "; ".join(said for role, each in named.items() if role != "corruption" for said in each)
    if "corruption" in named:
        yield "corruptions", "; ".join(named["corruption"])
    if any(value.mean is not None for value in grid.all()):
        yield from facts.notes(attacks, grid.words)
    elif attacks:
        yield "attacks", attacks
    if any(value.rank or UNTESTED in value.marks for value in grid.all()):
        over = f"measured number of a {table.best_within}" + " under the same heading" * (table.best_within == "row")
        if grid.split and table.compare_across:
            over += f" on the same data that differs in {_listed(table.compare_across)} alone"
        elif grid.split:
            over += " with the same data, partition, clients, training objective and test attack"
        none = "" if any(value.rank == "best" for value in grid.all()) else "nothing is bold: no number is shown to be "
        yield "marks", f"{none or 'bold: '}significantly better than every other {over}"
    values = list(grid.all())
    never = sum(value.never for value in values)
    missing = sum(value.planned and value.mean is None for value in values) - never
    partial = [value for value in values if value.partial]
    planned = sum(value.planned for value in values)
    if missing:
        yield "missing", f"{missing} of {planned} numbers have not been measured yet (--)"
    if never:
        yield (
            "not there",
            f"{never} of {planned} numbers are neither evaluated nor logged in this preset ({number_format.NEVER})",
        )
    if partial:
        fewest = min(partial, key=lambda value: len(value.seeds))
        example = f"[{len(fewest.seeds)}/{fewest.wanted}] means {fewest.partial}"
        yield "incomplete", f"{len(partial)} of {planned} numbers average fewer seeds than planned: {example}"
    for why in dict.fromkeys(absent.values()):
        yield "left out", f"{', '.join(quoted(one) for one in absent if absent[one] == why)}: {why}"
    if any(not value.planned for value in values):
        holes = (why for key, why in plan.excluded if is_inside(key, table.where))
        if reasons := list(dict.fromkeys(holes)):
            yield "not run", "; ".join(reasons)
    if lookup is not None and grid.has_published:
        what = "formula" if lookup.formula else "published"
        yield what, _published(grid, plan, cells, lookup)
        for problem in lookup.problems:
            yield what, problem
    if any("order" in value.codes for value in values):
        yield "checks", RULE
    if below:
        yield "at chance", _below(table, cells, below)
    yield from _tests(grid.paired)
    if table.note:
        yield "note", table.note


def as_published(plan: Plan, cells: Iterable[Cell]) -> bool:
    """Whether the settings and the images are the paper's."""
    return plan.preset == "paper" and not any(cell.spec["data"].get("variant") for cell in cells)


def _published(grid: Grid, plan: Plan, cells: Sequence[Cell], lookup: Lookup) -> str:
    """Of which round the paper's numbers are, and where a difference is shown: from the same round alone."""
    said = ", ".join(filter(None, (lookup.name, grid.published_at)))
    if not as_published(plan, cells):
        return f"{said}; {NOT_COMPARED}"
    select = lookup.select
    shown = [
        (value, column)
        for row in grid.rows
        for group in row.values
        for value, column in zip(group, grid.columns, strict=True)
        if value.published is not None
    ]
    apart = [column for value, column in shown if not value.comparable]
    if len(apart) < len(shown):
        said += (
            f"; difference = measured - {'formula' if lookup.formula else 'published'}{_points(grid)}"
            + ", of the same round" * bool(apart)
        )
    else:
        said += "; no difference shown" + ": ours are of another round" * (select != "unknown")
    helps = select in plan.checkpoints and any(column.source.stage != "train" for column in apart)
    return said + f" (--select {select} shows it)" * helps


def _below(table: Table, cells: Sequence[Cell], below: Sequence[tuple[Cell, tuple[float, int, float]]]) -> str:
    """Which cells are at chance, by the labels that tell the table's rows and groups apart."""
    shown = dict.fromkeys((*table.rows, *table.across, *(a for where in table.conditions.values() for a in where)))
    axes = [axis for axis in shown if len({cell.key.get(axis) for cell in cells}) > 1]
    named: dict[str, list[str]] = {}
    chance = below[0][1][2]
    for cell, (value, n, fraction) in below:
        who = ", ".join(cell.key[axis] for axis in axes if axis in cell.key) or "all"
        said = f"seed {cell.spec['seed']}: {100 * value:.1f}% of {n}"
        named.setdefault(who, []).append(said if fraction == chance else f"{said}, chance {100 * fraction:.4g}%")
    listed = "; ".join(f"{who} ({', '.join(said)})" for who, said in named.items())
    return (
        f"{len(below)} of {len(cells)} cells {'is' if len(below) == 1 else 'are'} at chance; ignore"
        f" {'its' if len(below) == 1 else 'their'} robust accuracy;"
        f" natural accuracy, chance {100 * chance:.4g}%: {listed}"
    )


def _tests(comparisons: Sequence[PairedComparison]) -> Iterable[tuple[str, str]]:
    """What the paired tests are, and one line for each."""
    if comparisons:
        count = f"{len(comparisons)} comparison{'s' * (len(comparisons) > 1)}"
        what = "differences between runs of the same seed, mean ± sample standard deviation (ddof 1)"
        tests = "p of the paired t test and of Wilcoxon's signed-rank test, two-sided, not corrected for"
        yield "paired", f"{what}; {tests} {count}"
    for one in comparisons:
        test, column, unit = one.test, one.column, " points" * (one.column.unit == "percent")
        where = ", ".join(one.key.values())
        who = f"{where + ': ' if where else ''}{one.label} - {one.against}, {column.heading}"
        mean, std = number_format.signed(test.mean, column), number_format.number(test.std, column)
        difference = f"{mean} ± {std}{unit}, n = {len(test.seeds)}"
        yield "paired", f"{who}: {difference}, t test {_p(test.t_p)}, Wilcoxon {_p(test.wilcoxon_p)}"


def _p(value: float | None) -> str:
    return "undefined: all differences are equal" if value is None else f"p = {p_value(value)}"


def p_value(value: float | None) -> str:
    """A p value with two digits that matter; "--" where it is not defined."""
    return "--" if value is None else f"{value:.2g}"


LEVELS = ("full", "short", "none")
IN_CAPTION = (
    "checkpoint",
    "seeds",
    "missing",
    "not there",
    "marks",
)  # notes whose words the caption of a LaTeX table says
SHORT = {  # the lines of "short", and the notes that each is made of
    "numbers": (
        "filter", "data", "images", "checkpoint", "seeds", "differences", "columns", "marks", "published", "formula",
    ),
    "attacks": ("attacks", "attack precision"),
    "doubt": (
        "MIXED", "OLDER", "failed", "missing", "not there", "incomplete", "at chance", "replicates", "not compared",
        "left out", "not run",
    ),
}  # fmt: skip


def shortened(grid: Grid, level: str, captioned: Collection[str] = ()) -> Grid:
    """The grid with fewer notes: "short" says in a line each what its numbers are, its attacks, and what to doubt;
    "none" what is mixed and what the marks mean.

    Short, many paired tests are one sentence: how many of them stay significant. captioned: the notes whose words the
    caption of the short form says.
    """
    if level == "full":
        return grid
    if level == "none":
        ranks = {value.rank for value in grid.all()}
        keys = {"MIXED": True, "marks": "best" in ranks, "not compared": not ranks.isdisjoint(("best", "worse"))}
        return replace(grid, notes=[(what, note) for what, note in grid.notes if keys.get(what)])
    lines = []
    for line, kept in SHORT.items():
        notes = ((what, note) for name in kept for what, note in grid.notes if what == name and what not in captioned)
        if said := "; ".join(dict.fromkeys(filter(None, (_brief(what, note, grid) for what, note in notes)))):
            lines.append((line, said))
    lines += [("paired", _summary(grid.paired))] * bool(grid.paired)
    return replace(grid, notes=lines)


OF_REPORT = (  # notes that several tables of a suite have in common; a doubt or a key of a mark stays at its table
    "suite", "filter", "data", "checkpoint", "seeds", "machine", "code", "attacks", "attack code",
)  # fmt: skip


def gathered(grids: Sequence[Grid]) -> tuple[list[Grid], list[tuple[str, str]]]:
    """(the grids without the facts that several of them state in the same words, these facts once).

    A fact that not all of them state names its tables: ("seeds (T1, T2)", "6, 7").
    """
    tables: dict[tuple[str, str], list[str]] = {}
    for grid in grids:
        for note in dict.fromkeys(grid.notes):
            if note[0] in OF_REPORT:
                tables.setdefault(note, []).append(grid.id)
    common = {note: ids for note, ids in tables.items() if len(ids) > 1}
    rest = [replace(grid, notes=[note for note in grid.notes if note not in common]) for grid in grids]
    order = sorted(common, key=lambda note: OF_REPORT.index(note[0]))
    of = {note: f" ({', '.join(ids)})" * (len(ids) < len(grids)) for note, ids in common.items()}
    return rest, [(note[0] + of[note], note[1]) for note in order]


def _brief(what: str, note: str, grid: Grid) -> str:
    """A note in a few words; empty where the short form does without."""
    if what == "MIXED":
        mixed = grid.facts.mixed(grid.words).items()
        return "mixed: " + ", ".join(
            f"{text.count('; ') + 1} {PLURAL[fact]}" if fact in PLURAL else fact for fact, text in mixed
        )
    if what in ("seeds", "attack precision"):
        return f"{what} {note}"
    if what == "marks":
        return "bold: significantly better than all others" if note.startswith("bold") else ""
    if what == "at chance":
        return note.partition("; natural accuracy")[0]
    return (
        f"{what}: {note}"
        if what in ("failed", "left out", "not run", "not compared", "OLDER", "published", "formula", "filter")
        else note
    )


PLURAL = {"device": "devices", "precision": "precisions", "code": "commits"}  # facts that `MIXED` lists with cells


def _summary(comparisons: Sequence[PairedComparison]) -> str:
    """How many of the paired t tests stay below 0.05 after Holm's correction, and the largest of these differences."""
    tested = [one for one in comparisons if one.test.t_p is not None]
    corrected = statistics.holm([float(one.test.t_p or 0.0) for one in tested])
    left = [one for one, p in zip(tested, corrected, strict=True) if p < 0.05]
    said = f"{len(left)} of {len(comparisons)} paired t tests over seeds have p < 0.05 after Holm's correction"
    if not left:
        return said
    most = max(left, key=lambda one: abs(one.test.mean))
    where = ", ".join((*most.key.values(), most.column.heading))
    return f"{said}, most {where}: {most.label} - {most.against} = {number_format.signed(most.test.mean, most.column)}"


def _shares(grid: Grid) -> str:
    """Between which labels the headings with `share` place their numbers."""
    ways: dict[str, list[str]] = {}
    for column in grid.columns:
        for low, high in column.share.values():
            ways.setdefault(f"from {low} (0 %) to {high} (100 %)", []).append(quoted(column.heading))
    said = "; ".join(f"{', '.join(headings)}: {way}" for way, headings in ways.items())
    interval = any(value.interval for value in grid.all())
    return f"{said}, of means over the same seeds" + "; in brackets Fieller's 95 % interval over seeds" * interval


def _differences(grid: Grid) -> str:
    """From what the headings with `minus` take their differences."""
    of: dict[str, list[str]] = {}
    for column in grid.columns:
        said = ", ".join(f"{axis} {chosen[0]}" for axis, chosen in column.minus.items())
        of.setdefault(said, []).append(quoted(column.heading))
    listed = "; ".join(f"{', '.join(headings)}: minus {said}" for said, headings in of.items() if said)
    interval = any(value.interval for value in grid.all())
    return f"{listed}, seed by seed" + "; in brackets the 95 % interval of the mean, Student's t" * interval


def _conditions(columns: Iterable[Column]) -> str:
    """ "'NT': training NT; 'Acc' and 'Robust': training AT": which points the headings show, where they say so."""
    shown: dict[str, list[str]] = {}
    for column in columns:
        if column.where:
            said = ", ".join(f"{axis} {' or '.join(labels)}" for axis, labels in column.where.items())
            shown.setdefault(said, []).append(f"'{column.heading}'")
    return "; ".join(f"{_listed(headings)}: {said}" for said, headings in shown.items())


def checkpoint(columns: Sequence[Column], select: str, plan: Plan, cells: Sequence[Cell]) -> str:
    """Which round's model the numbers are of."""
    return "; ".join(_checkpoint(columns, select, plan, cells))


def _checkpoint(columns: Sequence[Column], select: str, plan: Plan, cells: Sequence[Cell]) -> Iterable[str]:
    stages = {column.source.stage for column in columns}
    if plan.suite == EVALUATED:
        return
    last = f"{WORDS['last']} ({_listed({str(cell.spec['algorithm']['rounds']) for cell in cells})})"
    if any(stage in ("evaluation", *OVER) or stage.startswith("prior") for stage in stages):
        yield last if select == "last" else WORDS[select]
        if select not in plan.checkpoints:
            yield f"this preset evaluates {_listed(plan.checkpoints)} only"
    if "gap" in stages:
        yield f"gap: {WORDS['best-test']}, minus {last}"
    if "train" in stages:
        ends = any(column.source.stage == "train" and column.source.round is None for column in columns)
        yield f"training numbers: after the {last if ends else 'round that the column names'}"


def _columns(headings: Sequence[str], grid: Grid) -> str:
    """The headings, or "all columns" where these are several."""
    return "all columns" if 1 < len(headings) == len(grid.columns) else _listed(headings)


def _points(grid: Grid) -> str:
    return ", in points" if all(column.unit == "percent" for column in grid.columns) else ""


def data_note(facts: provenance.TableFacts, cells: Sequence[Cell], words: Mapping[str, str]) -> str:
    """Data sets with their variant, and on how many test images each metric (words: its heading) was measured."""
    shown = []
    files = facts.data
    for name in dict.fromkeys(cell.spec["data"]["name"] for cell in cells):
        specs = [cell.spec["data"] for cell in cells if cell.spec["data"]["name"] == name]
        variants = [variant for variant, _ in files.get(name, [])] or [spec.get("variant") for spec in specs]
        said = CATALOGUE[name].title if name in CATALOGUE else name
        said += "".join(f", variant {v}: not the published files" for v in dict.fromkeys(variants) if v)
        by_size: dict[str, list[str]] = {}
        for (dataset, metric), sizes in facts.sizes.items():
            if dataset == name:
                by_size.setdefault(" and ".join(map(str, sorted(sizes))), []).append(words.get(metric, metric))
        if len(by_size) == 1:
            said += f"; n = {next(iter(by_size))} test images"
        elif by_size:
            said += "; test images: " + ", ".join(f"{n} for {', '.join(metrics)}" for n, metrics in by_size.items())
        shown.append(said)
    return ". ".join(shown)


def _listed(items: Iterable[str]) -> str:
    """ "a, b and c", in the order given; sets are sorted as numbers where they are numbers."""
    if isinstance(items, (set, frozenset)):
        items = sorted(items, key=lambda item: (len(item), item))
    parts = list(items)
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""
