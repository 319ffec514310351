"""A printed table as one long table, a row for each number.

    long = read(grid, "paper", Known(dataset="cifar10", radius="8/255"))
    long.numbers, long.notes

| column | content |
|---|---|
| paper, table, dataset, setting, method | labels as printed; setting: all others, such as "FedProx, Non-IID" |
| role | undefended, baseline, proposed, ablation; empty: not known |
| attack, steps, radius | natural, fgsm, pgd, ...; a number or missing; text as printed, or "unprinted" |
| value, decimals, deviation | per cent, the digits printed after its point, per cent |
| runs, n, classes | how many trainings, test images and classes; missing: not known |
| head, place | the column's head as printed, and the row's number |
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas

from fatbench.data.catalogue import CATALOGUE, DatasetFacts
from fatbench.errors import SpecError, did_you_mean
from fatbench.report.audit.grids import Grid
from fatbench.suite import publish

LONG = (
    "paper", "table", "dataset", "setting", "method", "role", "attack", "steps", "radius", "value", "decimals",
    "deviation", "runs", "n", "classes", "head", "place",
)  # fmt: skip
UNPRINTED = "unprinted"
ATTACKS = (  # the first that a head contains
    ("autoattack", r"\bauto[ -]?attack\b|\baa\b"),
    ("zo-fgsm", r"\bzoo?[ -]?fgsm"),
    ("zo-pgd", r"\bzoo?[ -]?pgd"),
    ("apgd", r"\b(?:apgd|auto[ -]?pgd)(?:[ -]?(?:ce|dlr|t))?"),
    ("bim", r"\bbim|\bi-?fgsm"),
    ("mim", r"\bmim|\bmi-?fgsm"),
    ("fgsm", r"\bfgs?m"),
    ("pgd", r"\bpgd"),
    ("cw", r"\bc ?& ?w|\bcw|\bcarlini"),
    ("square", r"\bsquare\b"),
    ("fab", r"\bfab\b"),
    ("deepfool", r"\bdeep ?fool\b"),
    ("robust", r"\brobust\w*(?: acc\w*)?|\badversarial(?: acc\w*)?|\b(?:adv|rob)\b(?: acc\w*)?|\ba rob\b|^ra$"),
    ("natural", r"\b(?:clean|cln|natural|nat|benign|standard|std)\b(?: acc\w*)?|\bno attack\b|\bw/o attack\b|^sa$"),
    ("natural", r"\bacc(?:\.|uracy)?\b"),
)
LABELS = {  # field -> the names that papers give its column
    "method": r"methods?|algorithms?|aggregators?|aggregation|defen[cs]es?|approach|frameworks?|verfahren|training",
    "dataset": r"datasets?|data|data set|benchmark|datensatz",
    "attack": r"attacks?|metrics?|evaluation|angriff",
    "radius": r"eps(?:ilon)?|ε|radius|attack radius|budget|attack eps",
    "n": r"n|(?:test )?(?:images|samples|size)",
    "runs": r"runs|seeds|trials|repetitions",
    "classes": r"classes",
    "role": r"role",
    "steps": r"steps|iterations",
    "table": r"table",
    "paper": r"paper",
}
VALUE = re.compile(r"value|mean|result|(?:test |robust )?acc(?:uracy|\.)?(?: %)?|genauigkeit|.*\bacc(?:uracy)?")
NOTES = re.compile(r"flags?|notes?|comments?|remarks?|source.*|venue.*|year|ref(?:erence)?s?|citation")
SPREAD = re.compile(r"[ (]*(?:std(?:ev)?\.?|sd|deviation|±)[ )]*$")
RADIUS = re.compile(
    r"(?:ε|\beps(?:ilon)?\b|\bradius\b) ?[=:]? ?(\d*\.?\d+(?: ?/ ?\d+)?)|(\d*\.?\d+ ?/ ?255)", re.IGNORECASE
)
STEPS = r"(?:(?P<before>\d+)[ -]?steps? )?(?:{})(?:[ (^-]*(?P<after>\d+)(?: ?steps?)?\)?)?[ -]*(?:∞|inf\b|linf|l2)?"
IGNORED = re.compile(
    r"\b(?:white[ -]?box|attacks?|acc(?:uracy)?\.?|test|robust\w*|metrics?|evaluation|under|steps?)\b|%|\(\)|[|:,]",
    re.IGNORECASE,
)
UNDEFENDED = re.compile(
    r"none|clean(?: vfl)?|(?:standard|natural)(?: training)?|undefended|no defen[cs]e|plain|vanilla|st|nt|erm|w/o at"
)
PROPOSED = re.compile(r"\b(?:ours?|proposed)\b")
TITLES = {  # letters and digits of a name -> data set
    **{publish.normalise(title): name for name, facts in CATALOGUE.items() for title in (name, facts.title)},
    "fmnist": "fashion_mnist", "fashion": "fashion_mnist", "cifar": "cifar10",
}  # fmt: skip


@dataclass(frozen=True)
class Known:
    """What a person, or the paper's file, says of a table: see the options of `fatbench audit`."""

    paper: str = ""
    table: str = ""
    dataset: str = ""
    setting: str = ""
    method: str = ""  # the column with the methods
    baseline: Collection[str] = ()
    proposed: Collection[str] = ()
    undefended: Collection[str] = ()
    ablation: Collection[str] = ()
    classes: int | Mapping[str, int] | None = None  # of all data sets, or of each
    images: int | Mapping[str, int] | None = None  # test images
    radius: str | float | Mapping[str, str] = ""  # of all attacks, or of each attack or data set
    runs: int | None = None
    attack: str = "unnamed"  # of heads that name none
    attacks: Collection[str] = ()  # further heads that are attacks
    columns: Mapping[str, str] = field(default_factory=dict)  # head in the file -> the head to read


class Head(NamedTuple):
    """What a column's head says."""

    attack: str = ""
    steps: float = math.nan
    radius: str = ""
    dataset: str = ""
    rest: str = ""


@dataclass
class Long:
    """The numbers of a table, and what was not understood."""

    numbers: pandas.DataFrame
    unread: list[str] = field(default_factory=list)


def dataset_facts(name: str) -> DatasetFacts | None:
    """What is known of a data set as a paper writes it."""
    return CATALOGUE.get(TITLES.get(publish.normalise(re.sub(r"\(.*", "", name)), ""))


def _title(name: str) -> str:
    facts = dataset_facts(name)
    return facts.title if facts and "(" not in name else name


def printed(text: str) -> tuple[float, float | None, int] | None:
    """(value, deviation, digits after the point) of a cell; None: empty. ValueError: no number."""
    text = re.sub(r"(?<=\d),(?=\d)", ".", text).replace("−", "-")
    parsed = publish.number(text)
    if parsed is None:
        return None
    first = re.search(r"\d*\.?\d+", text)
    return (*parsed, len(first[0].partition(".")[2]) if first else 0)


def head_of(text: str, attacks: Collection[str] = ()) -> Head:
    """The attack, its steps and radius, the data set, and what else a head says."""
    rest = re.sub(r"\s+", " ", text.replace("_", " ")).strip()
    attack, steps, radius = "", math.nan, ""
    if found := RADIUS.search(rest):
        radius = radius_text(found[1] or found[2])
        rest = rest.replace(found[0], " ")
    own = next((name for name in attacks if publish.normalise(name) == publish.normalise(rest)), None)
    if own is not None:
        return Head(own, steps, radius)
    for name, pattern in ATTACKS:
        whole = f"(?:{pattern})" if name in ("natural", "robust") else STEPS.replace("{}", pattern)
        if found := re.search(whole, rest, re.IGNORECASE):
            groups = found.groupdict()
            attack, steps = name, float(groups.get("before") or groups.get("after") or math.nan)
            if re.search(r"(?i)black[ -]?box", rest):
                attack, rest = f"black-box {attack}", re.sub(r"(?i)black[ -]?box", " ", rest)
            rest = rest.replace(found[0], " ")
            break
    rest = re.sub(r"\s+", " ", IGNORED.sub(" ", rest)).strip(" -()/")
    dataset = ""
    for words in (rest, *rest.split(" ")):
        if dataset_facts(words):
            dataset, rest = words, rest.replace(words, "").strip(" -")
            break
    return Head(attack, steps, radius, dataset, rest)


def radius_text(text: str) -> str:
    """A radius as it is printed: 8 and "8 / 255" are "8/255"; what is no number stays as it is."""
    text = text.replace(" ", "") if re.fullmatch(r"[\d. /]+", text) else text.strip()
    return f"{text}/255" if re.fullmatch(r"\d+", text) and int(text) >= 1 else text


@functools.cache
def radius_value(text: str) -> float:
    """A radius as a number; NaN: unprinted, or of another norm."""
    part = re.fullmatch(r"(\d*\.?\d+)(?:/(\d+))?", text)
    return float(part[1]) / float(part[2] or 1) if part and float(part[2] or 1) else math.nan


# --- a grid -------------------------------------------------------------------------------------------------------


def read(grid: Grid, name: str, known: Known) -> Long:
    """The numbers of a grid. SpecError: no column is understood as an accuracy."""
    as_printed, body = _heads(_halved(grid.cells, known.attacks))
    heads = [known.columns.get(head, head) for head in as_printed]
    columns = [tuple(row[column] for row in body) for column in range(len(heads))]
    labels = _label_columns(heads, columns, known, name)
    caption = head_of(re.sub(r"(?i)table [\w.]+[:.]?", "", grid.caption))
    caption_data = caption.dataset or next(filter(dataset_facts, re.split(r"[^\w-]+", grid.caption)), "")
    number = re.match(r"(?i)\W*tab(?:le|\.|elle) +([\w.]*\w)", grid.caption)
    long = Long(pandas.DataFrame())
    values = _value_columns(heads, columns, labels, known, long)
    if not values:
        raise SpecError(
            f"{name}: no column is understood as an accuracy (the columns: {', '.join(filter(None, heads)) or 'none'});"
            " name them natural, fgsm, pgd20, cw, aa, or robust"
        )
    rows: list[dict[str, Any]] = []
    section, above = Head(), [""] * len(heads)
    spanning = {column for column in labels if body[0][column]}  # a label of several rows stands in the first
    for place, line in enumerate(body, 1):
        filled = {cell for cell in line if cell}
        if (
            len(filled) == 1
            and not _is_number(*filled)
            and (line.count(*filled) > 1 or not any(line[c] for c in values))
        ):
            section, above = head_of(*filled), [""] * len(heads)
            continue
        above = [
            cell or (old if column in spanning else "")
            for column, (cell, old) in enumerate(zip(line, above, strict=True))
        ]
        said = _labels(labels, heads, above)
        for column, (head, spread) in values.items():
            try:
                parsed = printed(line[column])
                deviation = printed(line[spread]) if spread is not None else None
            except ValueError as error:
                long.unread.append(f"row {place}, {heads[column]}: {str(error)[:40]!r}")
                continue
            if parsed is None:
                continue
            by_row = head_of(said["attack"], known.attacks) if "attack" in said else Head()
            attack, steps = (head.attack, head.steps) if head.attack else (by_row.attack, by_row.steps)
            method = said.get("method") or (head.rest if "attack" in said else "") or known.paper or name
            settings = [section.rest, *said["setting"], head.rest if method != head.rest else "", known.setting]
            dataset = head.dataset or said.get("dataset") or section.dataset or known.dataset or caption_data
            rows.append({
                "paper": said.get("paper") or known.paper or name,
                "table": said.get("table") or known.table or (number[1] if number else ""),
                "dataset": dataset, "setting": ", ".join(dict.fromkeys(filter(None, settings))), "method": method,
                "role": said.get("role", ""), "attack": attack or known.attack,
                "steps": _number(said.get("steps", "")) if "steps" in said and attack != "natural" else steps,
                "radius": _radius(attack, _title(dataset), head, by_row, said.get("radius", ""), known, caption.radius),
                "value": parsed[0], "decimals": parsed[2],
                "deviation": deviation[0] if deviation else math.nan if parsed[1] is None else parsed[1],
                "runs": _number(said.get("runs", "")), "n": _number(said.get("n", "")),
                "classes": _number(said.get("classes", "")), "head": as_printed[column], "place": place,
            })  # fmt: skip
    numbers = pandas.DataFrame(rows, columns=LONG).drop_duplicates(
        ["paper", "table", "dataset", "setting", "method", "attack", "steps", "radius", "value", "place"]
    )
    long.numbers = completed(_in_per_cent(numbers, long.unread), known)
    return long


def _halved(cells: list[list[str]], attacks: Collection[str]) -> list[list[str]]:
    """Columns "Clean / PGD-20" of cells "80.1 / 31.0" as two columns."""
    for column in reversed(range(len(cells[0]))):
        parts = re.split(r" ?/ ?(?!255)", cells[0][column])
        if len(parts) > 1 and all(head_of(part, attacks).attack for part in parts):
            for row in cells:
                split = re.split(r" ?/ ?(?!255)", row[column])
                row[column : column + 1] = split if len(split) == len(parts) else [row[column]] * len(parts)
    return cells


def _heads(cells: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """One head for each column, from the rows before the first number, and the other rows."""
    last = 0
    while last + 1 < len(cells) - 1 and not any(_is_number(cell) for cell in cells[last + 1][1:]):
        if len({cell for cell in cells[last + 1] if cell}) < 2:  # a section
            break
        last += 1
    rows = [row[:] for row in cells[: last + 1]]
    for row in rows[:-1]:
        for column in range(1, len(row)):
            row[column] = row[column] or row[column - 1]
    heads = [" | ".join(dict.fromkeys(filter(None, parts))) for parts in zip(*rows, strict=True)]
    return heads, cells[last + 1 :]


def _is_number(text: str) -> bool:
    """Whether a cell has a number, or stands for a missing one."""
    try:
        return bool(text) and (printed(text) is not None or text.lower() in publish.MISSING)
    except ValueError:
        return False


def _field(head: str) -> str:
    """The field that a column of this head has; empty: none."""
    text = re.sub(r"\s+", " ", head.replace("_", " ").lower()).strip(" :|")
    return next((name for name, pattern in LABELS.items() if re.fullmatch(pattern, text)), "")


def _label_columns(heads: list[str], columns: list[tuple[str, ...]], known: Known, name: str) -> dict[int, str]:
    """Column -> its field; "setting" for labels of no other field."""
    if known.method and known.method not in heads:
        raise SpecError(f"{name} has no column '{known.method}'{did_you_mean(known.method, heads)}", option="method")
    accuracies = [
        column for column, head in enumerate(heads)
        if not _field(head) and (parsed := head_of(head, known.attacks)) and (parsed.attack or parsed.dataset)
    ]  # fmt: skip
    labels: dict[int, str] = {}
    for column, head in enumerate(heads):
        own_field, cells = _field(head), [cell for cell in columns[column] if cell]
        texts = sum(not _is_number(cell) for cell in cells)
        if head == known.method and head:
            labels[column] = "method"
        elif own_field:
            taken = own_field == "method" and (known.method or "method" in labels.values())
            labels[column] = "setting" if taken else own_field
        elif NOTES.fullmatch(head.lower().replace("_", " ")):
            labels[column] = "note"
        elif texts == len(cells) > 0 or (
            column not in accuracies and (texts > len(cells) / 2 or column < min(accuracies, default=0))
        ):
            labels[column] = "setting"
    for column, kind in labels.items():  # a column of attacks may have any name, and that of a metric other values
        cells = [cell for cell in columns[column] if cell]
        named = bool(cells) and all(head_of(cell, known.attacks).attack for cell in cells)
        if kind == "attack" and not named:
            labels[column] = "setting"
        elif kind in ("setting", "method") and named and not accuracies and "attack" not in labels.values():
            labels[column] = "attack"
    free = [column for column in labels if labels[column] == "setting" and not all(map(_is_number, columns[column]))]
    if "method" not in labels.values() and free:
        labels[max(free, key=lambda column: (len({*columns[column]}), column))] = "method"
    return labels


def _value_columns(
    heads: list[str], columns: list[tuple[str, ...]], labels: Mapping[int, str], known: Known, long: Long
) -> dict[int, tuple[Head, int | None]]:
    """Column of accuracies -> (its head, the column of its deviations)."""
    values: dict[int, tuple[Head, int | None]] = {}
    by_row, unused = "attack" in labels.values(), []
    for column, head in enumerate(heads):
        if column in labels or not any(columns[column]):
            continue
        text = head.lower().replace("_", " ")
        base = SPREAD.sub("", text).strip()
        if base != text and values:
            same = [other for other in values if heads[other].lower().replace("_", " ").strip() == base]
            owner = (same or [max(values)])[0]
            values[owner] = (values[owner][0], column)
            continue
        parsed = head_of(head, known.attacks)
        if by_row:
            rest = "" if VALUE.fullmatch(text) else head
            values[column] = (parsed._replace(attack="", rest=rest if not parsed.dataset else parsed.rest), None)
        elif head and (parsed.attack or parsed.dataset):
            values[column] = (parsed, None)
        elif head:
            unused.append(head)
    long.unread += [f"columns {', '.join(unused)}"] if unused else []
    return values


def _labels(labels: Mapping[int, str], heads: list[str], line: list[str]) -> dict[str, Any]:
    """Field -> text of a row; "setting": a list, numbers with their names."""
    said: dict[str, Any] = {"setting": []}
    for column, kind in labels.items():
        text = line[column].strip()
        if kind == "setting" and text:
            said["setting"].append(f"{heads[column]}={text}" if _is_number(text) else text)
        elif text:
            said[kind] = text
    return said


def _radius(attack: str, dataset: str, head: Head, by_row: Head, of_row: str, known: Known, of_caption: str) -> str:
    """The radius of a number, from what is nearest to it."""
    if attack in ("natural", "", "unnamed"):
        return UNPRINTED
    given = known.radius
    if isinstance(given, Mapping):
        given = given.get(attack) or given.get(dataset) or ""
    found = head.radius or by_row.radius or of_row or str(given) or of_caption
    return radius_text(found) if found else UNPRINTED


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _in_per_cent(numbers: pandas.DataFrame, unread: list[str]) -> pandas.DataFrame:
    """Values in per cent, without those that no accuracy can have. Fractions: none is above 1 and one is below."""
    if len(numbers) and (numbers["value"] <= 1).all() and (numbers["value"] % 1 > 0).any():
        numbers = numbers.assign(
            value=(100 * numbers["value"]).round(10), deviation=100 * numbers["deviation"],
            decimals=(numbers["decimals"] - 2).clip(lower=0),
        )  # fmt: skip
    possible = numbers["value"].between(0, 100)
    unread += [f"row {row.place}, {row.head}: no accuracy is {row.value:g}" for row in numbers[~possible].itertuples()]
    return numbers[possible]


def completed(numbers: pandas.DataFrame, known: Known) -> pandas.DataFrame:
    """The numbers with roles, and with sizes and classes of public data sets."""
    numbers = numbers.assign(dataset=numbers["dataset"].map(_title))
    facts = {text: dataset_facts(text) for text in numbers["dataset"].unique()}

    def filled(column: str, given: int | Mapping[str, int] | None, fact: str) -> pandas.Series:
        public = {
            text: getattr(one, fact) if one and (one.exact or fact == "classes") else None
            for text, one in facts.items()
        }
        said = given if isinstance(given, Mapping) else dict.fromkeys(facts, given)
        first, second = (numbers["dataset"].map(of).astype(float) for of in (said, public))
        return first.fillna(numbers[column]).fillna(second)

    return numbers.assign(
        n=filled("n", known.images, "test"), classes=filled("classes", known.classes, "classes"),
        runs=numbers["runs"].fillna(known.runs or math.nan),
        role=[_role(method, role, known) for method, role in zip(numbers["method"], numbers["role"], strict=True)],
    ).reset_index(drop=True)  # fmt: skip


def _role(method: str, said: str, known: Known) -> str:
    """The role of a method: as the table or the person says, or by the names that papers use."""
    if said:
        return said.lower()
    for role in ("undefended", "ablation", "proposed", "baseline"):
        if method in getattr(known, role):
            return role
    name = method.lower().strip(" *†‡")
    if UNDEFENDED.fullmatch(name):
        return "undefended"
    if PROPOSED.search(name):
        return "proposed"
    return "baseline" if known.proposed else "proposed" if known.baseline else ""
