"""The notes under a table: the meaning of its numbers, their provenance and their doubts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pandas import DataFrame

from fatbench.data.catalogue import CATALOGUE
from fatbench.methods.intervals import clopper_pearson, verdict
from fatbench.report.contrasts import Difference
from fatbench.report.numbers import statistics, table_facts
from fatbench.report.numbers.doubts import PRECISION, RULE, Doubt
from fatbench.report.numbers.long import columns
from fatbench.report.numbers.points import is_inside
from fatbench.report.numbers.published import Lookup
from fatbench.report.numbers.sources import OVER_OWN, quoted
from fatbench.report.sentences import p_equals, way_back
from fatbench.report.tables import number_format
from fatbench.report.tables.sheet import Column, Group, Sheet
from fatbench.report.tables.significance import UNTESTED
from fatbench.store.replicates import SIGN
from fatbench.store.rows import grouped
from fatbench.store.selection import WORDS
from fatbench.suite import format_call
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.external_models import SUITE as EVALUATED
from fatbench.suite.facts import role as role_of
from fatbench.suite.tables import Table
from fatbench.suite.types import seeds_text

NOT_COMPARED = "no difference shown: the settings are not the paper's"
PRIOR = (
    "a client's accuracy is the mean of the test set's accuracies by class, weighted by its own fraction of each class"
)
MEANINGS = {
    "all": "images that are classified correctly under every one of several evaluations",
    "pooled": "over the own images of all clients; without a word, the mean over clients",
    "worst": "the client with the least accuracy, chosen and judged on the same images",
    "worst_if_equal": "the least that is expected of as many clients if all were as accurate as the pooled images say",
    "tenth": "the mean of the worst tenth of the clients",
    "std": "the standard deviation over clients (ddof 0)",
    "not_above_chance": "the share of clients not above their own most frequent class (one-sided binomial test, .01)",
    "below_chance": "the share of clients below their own most frequent class",
    "unseen": "the mean over clients that never train",
}
FIELLER = "; in brackets Fieller's 95 % interval over seeds"
STUDENT = "; in brackets the 95 % interval of the mean, Student's t"
PRECISIONS_IN_WORDS = [Doubt(code).words for code in sorted(PRECISION)]
SYMBOLS = ("†", "‡", "§", "¶")


def footnotes(entries: DataFrame) -> tuple[DataFrame, list[tuple[str, str]]]:
    """Number the doubts: symbols for measured numbers, letters for published ones; the same words share a mark.

    Returns the entries with `marked`, `marks` and `published_mark`, and the footnotes. A precision that all numbers of
    a column have is said by a note alone.
    """
    measured = entries[entries["mean"].notna()]
    # a doubt that every number of the column has would mark them all and say nothing
    everywhere = {
        column: {text for text in PRECISIONS_IN_WORDS if all(text in doubts for doubts in of_column)}
        for column, of_column in measured.groupby("column")["doubts"]
    }
    marked = [
        tuple(doubt for doubt in doubts if doubt not in everywhere.get(column, PRECISIONS_IN_WORDS))
        for column, doubts in zip(entries["column"], entries["doubts"], strict=True)
    ]
    symbols = [SYMBOLS[i % 4] * (i // 4 + 1) for i in range(sum(map(len, marked)))]
    mark_by_doubt = dict(zip(dict.fromkeys(doubt for doubts in marked for doubt in doubts), symbols, strict=False))
    flags = entries["published_flag"].where(entries["published"].notna(), "")
    # after z comes aa, as after ¶ comes ††
    letters = [chr(ord("a") + i % 26) * (i // 26 + 1) for i in range(len(flags))]
    mark_by_flag = dict(zip(dict.fromkeys(filter(None, flags)), letters, strict=False))
    marks = [tuple(mark_by_doubt[doubt] for doubt in doubts) for doubts in marked]
    paper_marks = [mark_by_flag.get(flag, "") for flag in flags]
    rows = [*zip(marked, marks, paper_marks, strict=True)]
    entries = entries.assign(**columns(("marked", "marks", "published_mark"), rows))
    keys = [(mark, doubt) for doubt, mark in mark_by_doubt.items()]
    return entries, keys + [(mark, f"as published: {flag}") for flag, mark in mark_by_flag.items()]


def notes(
    grid: Sheet,
    plan: Plan,
    table: Table,
    cells: Sequence[Cell],
    absent: Mapping[str, str],  # heading -> why no cell has such a number
    lookup: Lookup | None,
    cells_at_chance: Sequence[tuple[Cell, tuple[float, int, float]]] = (),
) -> list[tuple[str, str]]:
    """(name, text) of each note under a table, always in this order; those that say nothing are left out.

    cells_at_chance: each with its natural accuracy, the images behind it, and chance.
    """
    values, facts, columns = grid.all(), grid.facts, grid.columns
    trained_here, planned = plan.suite != EVALUATED, sum(value.planned for value in values)
    hopeless = sum(value.never for value in values)
    unmeasured = sum(value.planned and value.mean is None for value in values) - hopeless
    never = f"neither evaluated nor logged in this preset ({number_format.NEVER})"
    measured = [value for value in values if value.mean is not None]
    partial = [value for value in values if value.partial]
    fewest = min(partial, key=lambda value: len(value.seeds), default=None)
    excluded = [reason for key, reason in plan.excluded if is_inside(key, table.where)]
    again = next((value.cells[0] for value in measured if value.cells), "") if trained_here else ""
    spread = "mean ± sample standard deviation over seeds (ddof 1)" if len(grid.seeds) > 1 else "one seed, no spread"
    attacks, corruptions = _calls(grid)
    published = "formula" if lookup is not None and lookup.formula else "published"
    of_stage = {stage: [quoted(one.heading) for one in columns if one.source.stage == stage] for stage in MEANINGS}
    priors = [quoted(one.heading) for one in columns if one.source.stage.startswith("prior")]
    verdicts = any(one.source.metric == "verdict" for one in columns)
    reasons = grouped((reason, quoted(heading)) for heading, reason in absent.items())
    found: list[tuple[str, Any]] = [
        ("suite", f"{plan.suite}, preset {plan.preset}. {plan.note}".removesuffix(". ") if trained_here else ""),
        ("tuning", plan.untuned and f"no row is tuned yet: {plan.untuned}"),
        ("tuning", plan.tuned),
        ("filter", plan.where and trained_here and f"{plan.where}; other cells are neither shown nor compared with"),
        ("data", data_note(facts, cells, grid.words)),
        ("checkpoint", grid.checkpoint),
        ("differences", _differences(grid)),
        ("shares", _shares(grid)),
        ("worst", _worst(grid)),
        ("clients", priors and f"{_columns(priors, grid)}: {PRIOR}"),
        *(("columns", of and f"{_columns(of, grid)}: {MEANINGS[stage]}") for stage, of in of_stage.items()),
        ("columns", _conditions(columns)),
        ("verdict", verdicts and _never_holds(cells)),
        ("chance", (chance := _chance(grid)) and f"random guesses reach {chance}"),
        ("seeds", grid.seeds and f"{seeds_text(grid.seeds)}; {spread}"),
        ("corruptions", corruptions),
        *(facts.notes(attacks, grid.words) if measured else [("attacks", attacks)]),
        ("marks", _marks(grid, table)),
        ("missing", unmeasured and f"{unmeasured} of {planned} numbers have not been measured yet (--)"),
        ("not there", hopeless and f"{hopeless} of {planned} numbers are {never}"),
        ("incomplete", fewest and f"{len(partial)} of {planned} numbers average fewer seeds than planned:"
            f" [{len(fewest.seeds)}/{fewest.wanted}] means {fewest.partial}"),
        *(("left out", f"{', '.join(headings)}: {reason}") for reason, headings in reasons.items()),
        ("not run", planned < len(values) and "; ".join(dict.fromkeys(excluded))),
        *((published, text) for text in _published_notes(grid, plan, cells, lookup)),
        ("checks", any("order" in value.codes for value in values) and RULE),
        ("at chance", cells_at_chance and _at_chance(table, cells, cells_at_chance)),
        *_paired_tests(grid.paired),
        ("again", again and f"the first cell: {way_back(again.partition(SIGN)[0])}"),
        ("note", table.note),
    ]  # fmt: skip
    return [(name, text) for name, text in found if text]


def _calls(grid: Sheet) -> tuple[str, str]:
    """(the attacks, the corruptions) of a table's metrics with all their settings, by their roles."""
    calls: dict[str, list[str]] = {}
    for metric, specs in grid.attacks.items():
        if specs and format_call.attack(metric, specs) != metric:  # "natural" says it all
            text = format_call.attack(grid.words.get(metric, metric), specs)
            calls.setdefault(role_of(specs[0]), []).append(text)
    corruptions = "; ".join(calls.pop("corruption", []))
    return "; ".join(call for of_role in calls.values() for call in of_role), corruptions


def _marks(grid: Sheet, table: Table) -> str:
    """What bold means; empty where nothing was tested."""
    ranks = {value.rank for value in grid.all()} - {""}
    outside = any(UNTESTED in value.marks for value in grid.all())
    if not ranks and not outside:
        return ""
    compared = "tested" if outside and ranks else "measured"
    numbers = f"{compared} number of a {table.best_within}" + " under the same heading" * (table.best_within == "row")
    if grid.split and table.compare_across:
        numbers += f" on the same data that differs in {_enumeration(table.compare_across)} alone"
    elif grid.split:
        numbers += " with the same data, partition, clients, training objective and test attack"
    begin = "bold: " if "best" in ranks else "nothing is bold: no number is shown to be "
    return f"{begin}significantly better than every other {numbers}"


def as_published(plan: Plan, cells: Iterable[Cell]) -> bool:
    """Whether settings and images are those of the paper: its preset, and no data set variant."""
    return plan.preset == "paper" and not any(cell.spec["data"].get("variant") for cell in cells)


def _published_notes(grid: Sheet, plan: Plan, cells: Sequence[Cell], lookup: Lookup | None) -> Iterable[str]:
    """The notes on published numbers: their round, whether differences from them are shown, problems of their file."""
    if lookup is None or not grid.has_published:
        return
    text = ", ".join(filter(None, (lookup.name, grid.published_at)))
    published = [value for value in grid.all() if value.published is not None]
    others = [grid.columns[value.column] for value in published if not value.comparable]
    if not as_published(plan, cells):
        text += f"; {NOT_COMPARED}"
    else:
        if len(others) < len(published):
            origin = "formula" if lookup.formula else "published"
            text += f"; difference = measured - {origin}{_points(grid)}" + ", of the same round" * bool(others)
        else:
            text += "; no difference shown" + ": ours are of another round" * (lookup.select != "unknown")
        select_helps = lookup.select in plan.checkpoints and any(one.source.stage != "train" for one in others)
        text += f" (--select {lookup.select} shows it)" * select_helps
    yield from (text, *lookup.problems)


def _at_chance(
    table: Table, cells: Sequence[Cell], cells_at_chance: Sequence[tuple[Cell, tuple[float, int, float]]]
) -> str:
    """The note on cells at chance, named by the labels in which the table's rows and groups differ."""
    in_headings = (axis for condition in table.conditions.values() for axis in condition)
    table_axes = dict.fromkeys((*table.rows, *table.across, *in_headings))
    axes = [axis for axis in table_axes if len({cell.key.get(axis) for cell in cells}) > 1]
    accuracies: dict[str, dict[tuple[int, float], dict[int, float]]] = {}  # labels -> (images, chance) -> by seed
    chance = cells_at_chance[0][1][2]
    for cell, (value, n, fraction) in cells_at_chance:
        labels = ", ".join(cell.key[axis] for axis in axes if axis in cell.key) or "all"
        accuracies.setdefault(labels, {}).setdefault((n, fraction), {})[cell.spec["seed"]] = 100 * value
    texts = []
    for labels, by_images in accuracies.items():
        parts = []
        for (n, fraction), by_seed in by_images.items():
            least, most = min(by_seed.values()), max(by_seed.values())
            values_text = f"{least:.1f}" + f" to {most:.1f}" * (f"{least:.1f}" != f"{most:.1f}")
            other_chance = f", chance {100 * fraction:.4g}%" * (fraction != chance)
            parts.append(f"seed{'s' * (len(by_seed) > 1)} {seeds_text(by_seed)}: {values_text}% of {n}{other_chance}")
        texts.append(f"{labels} ({', '.join(parts)})")
    accuracy_list = "; ".join(texts)
    return (
        f"{len(cells_at_chance)} of {len(cells)} cells {'is' if len(cells_at_chance) == 1 else 'are'} at chance; ignore"
        f" {'its' if len(cells_at_chance) == 1 else 'their'} robust accuracy;"
        f" natural accuracy, chance {100 * chance:.4g}%: {accuracy_list}"
    )


def _paired_tests(paired: Sequence[tuple[Column, Difference]]) -> Iterable[tuple[str, str]]:
    """The notes on paired tests: a line about the method, then one line for each test."""
    if paired:
        count = f"{len(paired)} comparison{'s' * (len(paired) > 1)}"
        content = "differences between runs of the same seed, mean ± sample standard deviation (ddof 1)"
        tests = "p of the paired t test and of Wilcoxon's signed-rank test, two-sided, not corrected for"
        yield "paired", f"{content}; {tests} {count}"
    for column, one in paired:
        test, unit = one.over_seeds, " points" * (column.unit == "percent")
        assert test is not None  # a table has no others
        mean, std = number_format.signed(test.mean, column), number_format.number(test.std, column)
        contrast = f"{one.row + ': ' if one.row else ''}{one.name}, {column.heading}"
        equal = "undefined: all differences are equal"
        t_test, wilcoxon = (equal if p is None else p_equals(p) for p in (test.t_p, test.wilcoxon_p))
        yield "paired", f"{contrast}: {mean} ± {std}{unit}, n = {len(one.seeds)}, t test {t_test}, Wilcoxon {wilcoxon}"


LEVELS = ("full", "short", "none")
# notes whose words the caption of a LaTeX table says
IN_CAPTION = ("checkpoint", "seeds", "missing", "not there", "marks")
SHORT = {  # the lines of "short", and the notes that each is made of
    "numbers": (
        "filter", "data", "images", "checkpoint", "seeds", "differences", "worst", "columns", "verdict", "chance",
        "marks", "published", "formula",
    ),
    "attacks": ("attacks", "attack precision"),
    "doubt": (
        "MIXED", "OLDER", "failed", "missing", "not there", "incomplete", "at chance", "replicates", "not compared",
        "left out", "not run", "not measured",
    ),
}  # fmt: skip


def shortened(grid: Sheet, level: str, captioned: Collection[str] = ()) -> Sheet:
    """The grid with fewer notes: "short" keeps a line each on its numbers, its attacks and its doubts;
    "none" keeps what is mixed and what the marks mean.

    Short, many paired tests are one sentence: how many of them stay significant. captioned: the notes whose words the
    caption of the short form says.
    """
    if level == "full":
        return grid
    if level == "none":
        ranks = {value.rank for value in grid.all()}
        keys = {"MIXED": True, "marks": "best" in ranks, "not compared": not ranks.isdisjoint(("best", "worse"))}
        return replace(grid, notes=[(name, note) for name, note in grid.notes if keys.get(name)])
    lines = []
    for line, note_names in SHORT.items():
        names = [name for name in note_names if name not in captioned]
        notes = (_brief(name, note, grid) for wanted in names for name, note in grid.notes if name == wanted)
        if text := "; ".join(dict.fromkeys(filter(None, notes))):
            lines.append((line, text))
    lines += [("paired", _summary(grid.paired))] * bool(grid.paired)
    return replace(grid, notes=lines)


OF_REPORT = (  # notes that several tables of a suite have in common; a doubt or a key of a mark stays at its table
    "suite", "filter", "data", "checkpoint", "seeds", "machine", "code", "attacks", "attack code",
)  # fmt: skip


def share_notes(grids: Sequence[Sheet]) -> tuple[list[Sheet], list[tuple[str, str]]]:
    """(the grids without the facts that several of them state in the same words, these facts once).

    A fact that not all of them state names its tables: ("seeds (T1, T2)", "6, 7").
    """
    stated = ((note, grid.id) for grid in grids for note in dict.fromkeys(grid.notes) if note[0] in OF_REPORT)
    tables = grouped(stated)  # note -> ids of the tables that have it
    common_notes = {note: ids for note, ids in tables.items() if len(ids) > 1}
    grids_without = [replace(grid, notes=[note for note in grid.notes if note not in common_notes]) for grid in grids]
    order = sorted(common_notes, key=lambda note: OF_REPORT.index(note[0]))
    table_suffix = {note: f" ({', '.join(ids)})" * (len(ids) < len(grids)) for note, ids in common_notes.items()}
    return grids_without, [(note[0] + table_suffix[note], note[1]) for note in order]


def _brief(name: str, note: str, grid: Sheet) -> str:
    """A note in a few words; empty where the short form leaves it out."""
    if name == "MIXED":
        mixed = grid.facts.mixed(grid.words).items()
        counts = (f"{text.count('; ') + 1} {PLURAL[fact]}" if fact in PLURAL else fact for fact, text in mixed)
        return f"mixed: {', '.join(counts)}"
    if name in ("seeds", "attack precision"):
        return f"{name} {note}"
    if name == "marks":
        return "bold: significantly better than all others" if note.startswith("bold") else ""
    if name == "at chance":
        return note.partition("; natural accuracy")[0]
    return f"{name}: {note}" if name in NAMED else note


# notes that keep their name in the short form
NAMED = {"failed", "left out", "not run", "not measured", "not compared", "OLDER", "published", "formula", "filter"}
PLURAL = {"device": "devices", "precision": "precisions", "code": "commits"}  # facts that `MIXED` lists with cells


def _summary(paired: Sequence[tuple[Column, Difference]]) -> str:
    """The paired t tests in a sentence: how many are below 0.05 after Holm's correction, and the largest difference."""
    tested = [(p, column, one) for column, one in paired if one.over_seeds and (p := one.over_seeds.t_p) is not None]
    corrected = statistics.holm([p for p, _, _ in tested])
    significant = [(column, one) for (_, column, one), p in zip(tested, corrected, strict=True) if p < 0.05]
    summary = f"{len(significant)} of {len(paired)} paired t tests over seeds have p < 0.05 after Holm's correction"
    if not significant:
        return summary
    column, top = max(significant, key=lambda item: abs(item[1].difference or 0.0))
    location = ", ".join((*top.labels.values(), column.heading))
    return f"{summary}, most {location}: {top.name} = {number_format.signed(top.difference or 0.0, column)}"


def _headings(pairs: Iterable[tuple[str, Column]], written: Callable[[str], str] = quoted) -> dict[str, list[str]]:
    """Text -> the headings of its columns."""
    return grouped((text, written(column.heading)) for text, column in pairs)


def _shares(grid: Sheet) -> str:
    """The note on shares: the two labels between which each heading places its numbers."""
    ways = ((f"from {low} (0 %) to {high} (100 %)", one) for one in grid.columns for low, high in one.share.values())
    text = "; ".join(f"{', '.join(headings)}: {way}" for way, headings in _headings(ways).items())
    interval = any(value.interval for value in grid.all())
    return text and f"{text}, of means over the same seeds" + FIELLER * interval


def _worst(grid: Sheet) -> str:
    """The note on worst cases: the labels over which each heading takes the least."""
    worst = ((", ".join(labels), column) for column in grid.columns for labels in column.worst.values())
    text = "; ".join(f"{_enumeration(names)}: the least over {labels}" for labels, names in _headings(worst).items())
    holds = "in brackets its 95 % interval, which holds for all of them at once"
    return text and f"{text}, chosen on other seeds and images; {holds}"


def _differences(grid: Sheet) -> str:
    """The note on differences: the baseline that each heading subtracts."""
    labels = [", ".join(f"{axis} {chosen[0]}" for axis, chosen in column.minus.items()) for column in grid.columns]
    by_baseline = _headings(zip(labels, grid.columns, strict=True)).items()
    text = "; ".join(f"{', '.join(headings)}: minus {baseline}" for baseline, headings in by_baseline if baseline)
    interval = any(value.interval for value in grid.all())
    return text and f"{text}, seed by seed" + STUDENT * interval


def _never_holds(cells: Iterable[Cell]) -> str:
    """How many clients of a cell can never show that it holds, with no hit at all; empty: there are none so few."""
    algorithms = [cell.spec["algorithm"] for cell in cells if "target_clients" in cell.spec["algorithm"]]
    counts = sorted({int(one["rounds"]) * int(one["target_clients"]) for one in algorithms})
    few = [n for n in counts if verdict(0, n) == "open"]
    texts = [f"{n} clients (upper limit {100 * clopper_pearson(0, n)[1]:.1f} % with no hit)" for n in few]
    return f"{' or '.join(texts)} can never show that something holds; 'open' is no safety" if few else ""


def _chance(grid: Sheet) -> str:
    """ "0.1 % (top-1), 0.8 % (first: images 8)": the chance of each heading without a column of it, and the labels on
    which it depends.
    """
    with_column = {(column.source.metric, str(column.where)) for column in grid.columns}
    headings_by_chance: dict[tuple[str, str], list[str]] = {}  # (chance, labels) -> headings
    for position, column in enumerate(grid.columns):
        chance_by_point = [
            ({**row.key, **group.key}, f"{100 * value.chance:.2g} %")
            for row in grid.rows
            for group, values in zip(grid.groups, row.values, strict=True)
            if (value := values[position]).chance is not None
        ]
        if not chance_by_point or (column.source.chance.metric, str(column.where)) in with_column:
            continue
        axes = [*grid.axes, *(axis for group in grid.groups[:1] for axis in group.key)]
        for axis in tuple(axes):
            others = [other for other in axes if other != axis]
            labelled = {(tuple(key.get(other) for other in others), chance) for key, chance in chance_by_point}
            if len({labels for labels, _ in labelled}) == len(labelled):  # the axis makes no difference
                axes = others
        names: dict[str, dict[str, None]] = {}
        for key, chance in chance_by_point:
            names.setdefault(chance, {})[Group({axis: key[axis] for axis in axes if key.get(axis)}).label] = None
        most = max(names, key=lambda chance: len(names[chance]))
        for chance, labels in names.items():
            others_too = len(names) > 1 and chance == most and len(labels) > 3
            text = "all others" if others_too else "; ".join(labels)
            headings_by_chance.setdefault((chance, text), []).append(quoted(column.heading))
    return ", ".join(
        f"{chance} ({_enumeration(headings)}{f': {labels}' if labels else ''})"
        for (chance, labels), headings in headings_by_chance.items()
    )


def _conditions(columns: Iterable[Column]) -> str:
    """ "'NT': training NT; 'Acc' and 'Robust': training AT": the condition of each heading that has one."""
    conditions = (
        (", ".join(f"{axis} {' or '.join(labels)}" for axis, labels in column.where.items()), column)
        for column in columns
        if column.where
    )
    by_condition = _headings(conditions, "'{}'".format).items()
    return "; ".join(f"{_enumeration(headings)}: {condition}" for condition, headings in by_condition)


def checkpoint(columns: Sequence[Column], select: str, plan: Plan, cells: Sequence[Cell]) -> str:
    """The checkpoint note: the round whose model the numbers are of."""
    return "; ".join(_checkpoint(columns, select, plan, cells))


def _checkpoint(columns: Sequence[Column], select: str, plan: Plan, cells: Sequence[Cell]) -> Iterable[str]:
    stages = {column.source.stage for column in columns}
    if plan.suite == EVALUATED:
        return
    last_round = f"{WORDS['last']} ({_enumeration({str(cell.spec['algorithm']['rounds']) for cell in cells})})"
    if any(stage in ("evaluation", "all", *OVER_OWN) or stage.startswith("prior") for stage in stages):
        yield last_round if select == "last" else WORDS[select]
        if select not in plan.checkpoints:
            yield f"this preset evaluates {_enumeration(plan.checkpoints)} only"
    if "gap" in stages:
        yield f"gap: {WORDS['best-test']}, minus {last_round}"
    if "train" in stages:
        ends = any(column.source.stage == "train" and column.source.round is None for column in columns)
        yield f"training numbers: after the {last_round if ends else 'round that the column names'}"


def _columns(headings: Sequence[str], grid: Sheet) -> str:
    """The headings, or "all columns" where these are several."""
    return "all columns" if 1 < len(headings) == len(grid.columns) else _enumeration(headings)


def _points(grid: Sheet) -> str:
    return ", in points" if all(column.unit == "percent" for column in grid.columns) else ""


def data_note(facts: table_facts.Facts, cells: Sequence[Cell], words: Mapping[str, str]) -> str:
    """The note on data: each data set with its variant, and the number of test images of each metric.

    words: metric -> its heading.
    """
    dataset_texts = []
    files = facts.data
    for name in dict.fromkeys(cell.spec["data"]["name"] for cell in cells):
        specs = [cell.spec["data"] for cell in cells if cell.spec["data"]["name"] == name]
        variants = [variant for variant, _ in files.get(name, [])] or [spec.get("variant") for spec in specs]
        text = CATALOGUE[name].title if name in CATALOGUE else name
        text += "".join(f", variant {v}: not the published files" for v in dict.fromkeys(variants) if v)
        sizes = ((" and ".join(map(str, of)), at[1]) for at, of in facts.sizes.items() if at[0] == name)
        by_size = grouped((size, words.get(metric, metric)) for size, metric in sizes)  # "10000" -> headings
        if len(by_size) == 1:
            text += f"; n = {next(iter(by_size))} test images"
        elif by_size:
            text += "; test images: " + ", ".join(f"{n} for {', '.join(metrics)}" for n, metrics in by_size.items())
        dataset_texts.append(text)
    return ". ".join(dataset_texts)


def _enumeration(items: Iterable[str]) -> str:
    """Join items as "a, b and c", in the order given; a set is sorted, numbers by size."""
    if isinstance(items, (set, frozenset)):
        items = sorted(items, key=lambda item: (len(item), item))  # "9" before "10"
    texts = list(items)
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}" if texts else ""
