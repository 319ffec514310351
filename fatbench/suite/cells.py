"""Suite files: a base cell, axes over it, presets, tables and figures; YAML in, checked cells out.

The format is described in docs/suites.md. Nothing here imports torch: a suite is expanded and every name, key and
value checked against the source of the function it will reach, before a GPU second is spent.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError

from fatbench.errors import NothingMatched, SpecError, did_you_mean
from fatbench.suite import checks, signatures
from fatbench.suite.signatures import Map

PRESETS = ("paper", "quick", "smoke")
CHECKPOINTS = ("last", "best-val", "best-test")
SUITE_KEYS = (
    "name",
    "title",
    "description",
    "extends",
    "seeds",
    "base",
    "axes",
    "grid",
    "evaluate",
    "presets",
    "tables",
    "figures",
)
GRID_KEYS = ("product", "zip", "include", "exclude", "overrides")
PRESET_KEYS = ("note", "seeds", "base", "axes", "evaluate", "overrides")
EVALUATE_KEYS = ("n", "batch", "checkpoints", "attacks", "overrides")
TABLE_KEYS = (
    "id", "title", "where", "rows", "across", "values", "best", "compete", "paired", "published", "note",
)  # fmt: skip
SOURCE_KEYS = ("source", "where")
PAIRED_KEYS = ("axis", "against")
FIGURE_KEYS = ("id", "title", "kind", "where", "panels", "lines", "series", "scale", "note")
KINDS = ("lines", "bars", "heatmap", "images")  # of figures
SERIES = "series"  # among the panels of a figure: a panel for each heading
PUBLISHED_KEYS = ("file", "match", "rows", "labels", "values", "std", "unit")

Key = dict[str, str]
Condition = dict[str, list[str]]  # axis -> labels, one of which a point must have


@dataclass(frozen=True)
class Evaluation:
    """One evaluation attack of a suite; `id` names its stage together with the round it is run on."""

    label: str  # the metric's name: "pgd20"
    attack: dict[str, Any]
    n: int | None  # first n test examples; None = all the cell has
    batch: int

    @property
    def id(self) -> str:
        short = signatures.without_defaults("Attack", self.attack)
        return f"{self.label}-{digest([short, self.n, self.batch])[:8]}"

    def stage(self, round: int) -> str:
        return f"{self.id}@{round}"


@dataclass(frozen=True)
class Cell:
    """One fully specified experiment. `id` is the hash of its canonical spec less defaults."""

    id: str
    key: Key  # axis -> label, in the order of the suite
    spec: dict[str, Any]
    evaluations: tuple[Evaluation, ...]  # what the suite asks of the trained model; not part of the identity


@dataclass(frozen=True)
class Published:
    """Where the paper's numbers for a table are, and how its labels map to ours."""

    file: Path
    match: dict[str, str]
    rows: dict[str, str]  # axis -> CSV column
    labels: dict[str, str]  # our label -> the CSV's
    values: dict[str, str]  # heading -> CSV column; "{axis}" stands for the label of an `across` axis
    std: dict[str, str]
    unit: str  # "percent", or "plain" for distances and counts


@dataclass(frozen=True)
class Table:
    """One table of a paper (or of ours): which axes label rows and column groups, which numbers stand in them."""

    id: str
    title: str
    where: Condition
    rows: list[str]
    across: list[str]
    values: dict[str, str]  # heading -> source, see docs/suites.md
    best: dict[str, str]  # heading -> "max" | "min" | "none"
    published: Published | None
    note: str
    conditions: dict[str, Condition] = field(default_factory=dict)  # heading -> which points its numbers are of
    compete: str = "column"  # or "row": among what the best and the second are marked
    paired: tuple[str, str] | None = None  # (axis, label): each other label is tested against this one, by seed


@dataclass(frozen=True)
class Figure:
    """One figure: which axes make panels and which lines, and what is drawn over the rounds."""

    id: str
    title: str
    kind: str  # one of KINDS
    where: Condition
    panels: list[str]  # axes, and SERIES
    lines: list[str]
    series: dict[str, str]  # heading -> source, see docs/suites.md
    conditions: dict[str, Condition]
    scale: str  # of the vertical axis: "linear" or "log"
    note: str


@dataclass(frozen=True)
class Plan:
    """What one preset of a suite asks for."""

    suite: str
    preset: str
    note: str
    cells: list[Cell]
    checkpoints: list[str]
    excluded: list[tuple[Key, str]] = field(default_factory=list)

    def unique(self) -> list[Cell]:
        """The cells to run: grid points that come to the same experiment are run once, with the evaluations of all."""
        cells: dict[str, Cell] = {}
        for cell in self.cells:
            first = cells.get(cell.id)
            if first is not None and first.evaluations != cell.evaluations:
                both = {evaluation.id: evaluation for evaluation in (*first.evaluations, *cell.evaluations)}
                cell = replace(first, evaluations=tuple(both.values()))
            cells[cell.id] = cell if first is None or cell.evaluations != first.evaluations else first
        return list(cells.values())

    def metrics(self) -> list[str]:
        """The names of all evaluation metrics, in the order of the suite."""
        return list(dict.fromkeys(evaluation.label for cell in self.cells for evaluation in cell.evaluations))


@dataclass(frozen=True)
class Suite:
    """A checked suite file."""

    name: str
    title: str
    description: str
    file: Path
    raw: Map
    tables: list[Table]
    figures: list[Figure] = field(default_factory=list)

    def presets(self) -> list[str]:
        return list(self.raw["presets"])

    def axes(self) -> dict[str, list[str]]:
        return {axis: list(values) for axis, values in self.raw.get("axes", {}).items()}

    def plan(self, preset: str = "paper", seeds: Sequence[int] | None = None, where: str | None = None) -> Plan:
        """The cells and evaluations of a preset. SpecError: no such preset, invalid cell; NothingMatched: `where`."""
        plan = expand(self, preset, seeds)
        return select(plan, where) if where else plan


def digest(value: Any) -> str:
    """The hex SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def identity(spec: Mapping[str, Any]) -> str:
    """The identity of a canonical cell: 12 hex digits of the hash of its JSON, settings at their default left out."""
    return _identity(signatures.without_defaults("Experiment", {"name": "cell", **spec}))


def _identity(short: Mapping[str, Any]) -> str:
    return digest(short)[:12]


def canonical(spec: Mapping[str, Any], place: str = "cell") -> dict[str, Any]:
    """The canonical form of one cell, every default filled in and checked. SpecError names file, line and key."""
    signature = signatures.describe("Experiment", "cell")
    full = signatures.check_settings(signature, spec if isinstance(spec, Map) else Map(spec), place)
    checks.check(full, place)
    return full


# --- finding and reading -----------------------------------------------------------------------------------------


def folders() -> list[Path]:
    """Where suites are looked for by name: ./suites, then those that came with the program."""
    package = Path(__file__).parent.parent
    return [Path("suites"), package.parent / "suites", package / "suites"]


def available() -> dict[str, Path]:
    """Name -> file of every suite that can be run by name."""
    found: dict[str, Path] = {}
    for folder in folders():
        if folder.is_dir():
            for file in sorted(folder.glob("*.yaml")):
                found.setdefault(file.stem, file)
    return dict(sorted(found.items()))


def locate(name: str) -> Path:
    """The file of a suite given by name or by path. SpecError: there is none."""
    if name.endswith((".yaml", ".yml")) or os.sep in name:
        path = Path(name)
        if not path.is_file():
            raise SpecError(f"{name}: no such suite file")
        return path
    known = available()
    if name not in known:
        raise SpecError(f"no suite is named '{name}'{did_you_mean(name, known)}")
    return known[name]


def load(name: str) -> Suite:
    """Read and check a suite by name or path; the cells of a preset are checked by `plan`. SpecError on any mistake."""
    file = locate(name)
    raw = _resolve(file, ())
    place = str(file)
    _keys(raw, SUITE_KEYS, place)
    for key in ("name", "title", "base", "presets"):
        if key not in raw:
            raise SpecError(f"{place}: '{key}' is missing")
    _mapping(raw, "base", place)
    axes = _mapping(raw, "axes", place)
    for axis in axes:
        labels = _mapping(axes, axis, place)
        if not labels:
            raise SpecError(f"{axes.place(axis)}: an axis needs at least one label")
        for label in labels:
            _mapping(labels, label, place)
    _keys(_mapping(raw, "grid", place), GRID_KEYS, place)
    _keys(_mapping(raw, "evaluate", place), EVALUATE_KEYS, place)
    presets = _mapping(raw, "presets", place)
    for preset in presets:
        _keys(_mapping(presets, preset, place), PRESET_KEYS, place)
    if "paper" not in presets:
        raise SpecError(f"{raw.place('presets')}: a preset named 'paper' is missing")
    return Suite(
        name=_text(raw, "name", place),
        title=_text(raw, "title", place),
        description=str(raw.get("description", "")).strip(),
        file=file,
        raw=raw,
        tables=[_read_table(node, raw, file) for node in raw.get("tables", [])],
        figures=_read_figures(raw, file),
    )


def _resolve(file: Path, below: tuple[Path, ...]) -> Map:
    """The suite's mapping with what it extends merged under it."""
    resolved = file.resolve()
    if resolved in below:
        chain = " -> ".join(p.stem for p in (*below, resolved))
        raise SpecError(f"{file}: a suite cannot extend itself ({chain})")
    raw = read_yaml(file)
    if "extends" not in raw:
        return raw
    name = _text(raw, "extends", str(file))
    try:
        beside = file.parent / name
        parent = beside if beside.is_file() else locate(name)
    except SpecError as error:
        raise SpecError(f"{raw.place('extends')}: {error}") from None
    merged = _resolve(parent, (*below, resolved))
    for key, value in raw.items():
        if key in ("base", "axes", "evaluate", "presets") and key in merged and isinstance(value, Map):
            value = merge(merged[key], value)
        merged[key] = value
        merged.where[key] = raw.where[key]
    return merged


def read_yaml(file: Path) -> Map:
    """A YAML 1.2 file as Maps that know their lines. SpecError: unreadable, not a mapping, a key given twice."""
    try:
        tree = YAML(typ="rt", pure=True).load(file.read_text(encoding="utf-8"))
    except DuplicateKeyError as error:
        mark = error.problem_mark
        key = re.search(r'duplicate key "?([^"\s]+)"?', str(error.problem or ""))
        raise SpecError(f"{file}:{mark.line + 1}: the key '{key[1] if key else '?'}' is given twice") from None
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise SpecError(f"{file}{line}: not readable as YAML: {getattr(error, 'problem', None) or error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(tree, CommentedMap):
        raise SpecError(f"{file}: expected a mapping at the top level")
    return _plain(tree, file)


def _plain(node: Any, file: Path) -> Any:
    """ruamel's tree as Maps, lists and plain Python values."""
    if isinstance(node, CommentedMap):
        items = {str(key): _plain(value, file) for key, value in node.items()}
        lines = node.lc.data or {}  # a key that came with a merge (<<) has no line of its own
        where = {str(key): f"{file}:{lines[key][0] + 1 if key in lines else node.lc.line + 1}" for key in node}
        return Map(items, where, at=f"{file}:{node.lc.line + 1}")
    if isinstance(node, CommentedSeq):
        return [_plain(item, file) for item in node]
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node


def merge(under: Any, over: Any) -> Any:
    """`over` laid on `under`: mappings key by key, but a mapping that names another function replaces the whole."""
    if not (isinstance(under, Map) and isinstance(over, Map)):
        return copy.copy(over)
    if "name" in over and over["name"] != under.get("name"):
        return copy.copy(over)
    merged = Map(under, under.where, under.at)
    for key, value in over.items():
        merged[key] = merge(under[key], value) if key in under else value
        if key in over.where:
            merged.where[key] = over.where[key]
    return merged


# --- from a suite to cells ---------------------------------------------------------------------------------------


def expand(suite: Suite, preset: str, seeds: Sequence[int] | None = None) -> Plan:
    """All grid points of a preset as checked cells, in the order of the file; see `Suite.plan`."""
    raw, file = suite.raw, suite.file
    if preset not in raw["presets"]:
        raise SpecError(f"suite '{suite.name}' has no preset '{preset}'{did_you_mean(preset, raw['presets'])}")
    chosen = raw["presets"][preset]
    chosen = chosen if isinstance(chosen, Map) else Map()
    grid = raw.get("grid") or Map()
    every = raw.get("axes") or Map()
    axes = _restricted(every, chosen)
    base = merge(raw["base"], chosen["base"]) if "base" in chosen else raw["base"]
    overrides = [*_overrides(grid, every, file), *_overrides(chosen, every, file)]
    excludes = [
        (_condition(item, "when", every, file), _text(item, "reason", str(file)), item)
        for item in _list_of_maps(grid, "exclude", file)
    ]
    if seeds is None:
        seeds = _seeds(chosen if "seeds" in chosen else raw, file)
    evaluate = raw.get("evaluate") or Map()
    if "evaluate" in chosen:
        evaluate = merge(evaluate, chosen["evaluate"])
    checkpoints = _checkpoints(evaluate)
    by_point = _overrides(evaluate, every, file)
    cells, excluded = [], []
    for key in _points(grid, axes, every, file):
        if reason := next((why for when, why, _ in excludes if _matches(key, when)), None):
            excluded.append((key, reason))
            continue
        spec = base
        for axis, label in key.items():
            spec = merge(spec, _patch(axes[axis][label]))
        for when, patch in overrides:
            if _matches(key, when):
                spec = merge(spec, patch)
        place = f"{file}: {', '.join(f'{a}={v}' for a, v in key.items()) or 'base'} ({preset})"
        if "seed" in spec:
            raise SpecError(f"{spec.place('seed')}: seeds are given by 'seeds' of the suite, not in a cell")
        first = canonical(merge(spec, Map({"seed": 0})), place)
        asked = evaluate
        for when, patch in by_point:
            if _matches(key, when):
                asked = merge(asked, _without_removed(patch, evaluate))
        evaluations = _evaluations(asked, file)
        for evaluation in evaluations:
            checks.check_attack(evaluation.attack, first, f"{place}: evaluate: {evaluation.label}")
        if "best-val" in checkpoints and not first["validation"]:
            raise SpecError(f"{place}: checkpoint best-val needs 'validation: N' held-out images")
        if set(checkpoints) - {"last"} and first["monitor"] is None:
            raise SpecError(
                f"{place}: checkpoints {', '.join(checkpoints)} need 'monitor', an attack run during training"
            )
        short = signatures.without_defaults("Experiment", {"name": "cell", **first})
        for seed in seeds:
            cells.append(Cell(_identity({**short, "seed": seed}), key, {**first, "seed": seed}, evaluations))
    if not cells:
        raise SpecError(f"{file}: preset '{preset}' leaves an empty grid")
    return Plan(suite.name, preset, str(chosen.get("note", "")).strip(), cells, checkpoints, excluded)


def _patch(node: Any) -> Map:
    return node if isinstance(node, Map) else Map()


def _without_removed(patch: Map, evaluate: Map) -> Map:
    """A patch of `evaluate` less the attacks that the preset has taken out (attack: null)."""
    removed = {label for label, attack in (evaluate.get("attacks") or {}).items() if attack is None}
    if not removed or not isinstance(patch.get("attacks"), Map):
        return patch
    attacks = patch["attacks"]
    kept = Map({k: v for k, v in attacks.items() if k not in removed}, attacks.where, attacks.at)
    return Map({**patch, "attacks": kept}, patch.where, patch.at)


def _restricted(axes: Map, preset: Map) -> Map:
    """The axes with only the labels that the preset keeps."""
    if "axes" not in preset:
        return axes
    kept = Map(axes, axes.where, axes.at)
    for axis, labels in _patch(preset["axes"]).items():
        place = preset["axes"].place(axis)
        if axis not in axes:
            raise SpecError(f"{place}: no axis is named '{axis}'{did_you_mean(axis, axes)}")
        labels = [str(label) for label in (labels if isinstance(labels, list) else [labels])]
        for label in labels:
            if label not in axes[axis]:
                raise SpecError(f"{place}: axis '{axis}' has no label '{label}'{did_you_mean(label, axes[axis])}")
        if not labels:
            raise SpecError(f"{place}: no label is left on axis '{axis}': the grid is empty")
        kept[axis] = Map({label: axes[axis][label] for label in labels}, axes[axis].where, axes[axis].at)
    return kept


def _points(grid: Map, axes: Map, every: Map, file: Path) -> list[Key]:
    """Grid points: the product of the named axes and zipped groups, and the points to include, each once.

    In the order of the axes and their labels in the file. `axes` are those of the preset, `every` those of the suite.
    """
    groups: list[list[Key]] = []
    zipped = grid.get("zip", [])
    if not (isinstance(zipped, list) and all(isinstance(group, list) and group for group in zipped)):
        raise SpecError(f"{grid.place('zip')}: expected a list of lists of axes, such as [[dataset, model]]")
    in_zip = {axis for group in zipped for axis in group}
    product = grid.get("product", [axis for axis in axes if axis not in in_zip])
    for axis in product:
        if axis not in axes:
            raise SpecError(f"{grid.place('product')}: no axis is named '{axis}'{did_you_mean(str(axis), axes)}")
        groups.append([{axis: label} for label in axes[axis]])
    for group in zipped:
        for axis in group:
            if axis not in axes:
                raise SpecError(f"{grid.place('zip')}: no axis is named '{axis}'{did_you_mean(str(axis), axes)}")
        lengths = {axis: len(axes[axis]) for axis in group}
        if len(set(lengths.values())) > 1:
            raise SpecError(f"{grid.place('zip')}: zipped axes differ in length: {lengths}")
        groups.append(
            [dict(zip(group, labels, strict=True)) for labels in zip(*(axes[axis] for axis in group), strict=True)]
        )
    found: dict[tuple[int, ...], Key] = {}
    if axes and not groups and "include" not in grid:
        raise SpecError(
            f"{grid.place('product')}: no axis is in the product and there is no include: the grid is empty"
        )
    combinations = itertools.product(*groups) if groups or "include" not in grid else ()
    points = (dict(itertools.chain(*(part.items() for part in parts))) for parts in combinations)
    for point in itertools.chain(points, _included(grid, every, file)):
        if all(label in axes[axis] for axis, label in point.items()):  # else: a label that this preset leaves out
            place = tuple(list(every[axis]).index(point[axis]) if axis in point else -1 for axis in every)
            found[place] = {axis: point[axis] for axis in every if axis in point}
    return [found[place] for place in sorted(found)]


def _included(grid: Map, axes: Map, file: Path) -> Iterator[Key]:
    """The points of `include`: each item maps axes to labels or lists of them, and stands for all combinations."""
    for item in _list_of_maps(grid, "include", file):
        labels = _known_labels(item, axes)
        for combination in itertools.product(*labels.values()):
            yield dict(zip(labels, combination, strict=True))


def _overrides(node: Map, axes: Map, file: Path) -> list[tuple[dict[str, list[str]], Map]]:
    return [
        (_condition(item, "when", axes, file), _mapping(item, "set", str(file)))
        for item in _list_of_maps(node, "overrides", file)
    ]


def _condition(item: Map, key: str, axes: Map, file: Path) -> dict[str, list[str]]:
    """A `when:` mapping axis -> label or list of labels."""
    return _known_labels(_mapping(item, key, str(file)), axes)


def _known_labels(node: Map, axes: Map) -> dict[str, list[str]]:
    """axis -> labels, each of them checked."""
    for axis in node:
        if axis not in axes:
            raise SpecError(f"{node.place(axis)}: no axis is named '{axis}'{did_you_mean(axis, axes)}")
        for label in _labels(node[axis]):
            if label not in axes[axis]:
                raise SpecError(
                    f"{node.place(axis)}: axis '{axis}' has no label '{label}'{did_you_mean(label, axes[axis])}"
                )
    return {axis: _labels(value) for axis, value in node.items()}


def _labels(value: Any) -> list[str]:
    return [str(item) for item in (value if isinstance(value, list) else [value])]


def _matches(key: Key, condition: Mapping[str, Sequence[str]]) -> bool:
    return all(key.get(axis) in labels for axis, labels in condition.items())


def _seeds(node: Map, file: Path) -> list[int]:
    seeds = node.get("seeds", [0])
    if isinstance(seeds, str):
        return parse_seeds(seeds, node.place("seeds"))
    if not (isinstance(seeds, list) and seeds and all(type(s) is int and s >= 0 for s in seeds)):
        raise SpecError(f'{node.place("seeds")}: expected seeds such as [6, 7] or "0-4", got {seeds!r}')
    if len(set(seeds)) != len(seeds):
        raise SpecError(f"{node.place('seeds')}: a seed is given twice: {seeds!r}")
    return seeds


def parse_seeds(text: str, place: str = "--seeds") -> list[int]:
    """ "0-4", "6,7" or "3" as a list of seeds. SpecError otherwise."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise SpecError(f"{place}: expected seeds such as 0-4 or 6,7, got '{text}'")
        seeds += range(int(match[1]), int(match[2] or match[1]) + 1)
    return list(dict.fromkeys(seeds))


def _checkpoints(node: Map) -> list[str]:
    checkpoints = [str(c) for c in node.get("checkpoints", ["last"])]
    for checkpoint in checkpoints:
        if checkpoint not in CHECKPOINTS:
            place = node.place("checkpoints")
            raise SpecError(f"{place}: no checkpoint is named '{checkpoint}'{did_you_mean(checkpoint, CHECKPOINTS)}")
    return checkpoints


def _evaluations(node: Map, file: Path) -> tuple[Evaluation, ...]:
    n, batch = node.get("n"), node.get("batch", 500)
    for key, value in (("n", n), ("batch", batch)):
        if not (value is None and key == "n") and (type(value) is not int or value < 1):
            raise SpecError(f"{node.place(key)}: expected a number of test images, got {value!r}")
    attacks = _mapping(node, "attacks", str(file))
    for label in attacks:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", label):
            raise SpecError(f"{attacks.place(label)}: a metric's name is lower case letters, digits and _")
    return tuple(
        Evaluation(label, signatures.check("Attack", attack, attacks.place(label)), n, batch)
        for label, attack in attacks.items()
        if attack is not None
    )


# --- tables and figures ------------------------------------------------------------------------------------------

SOURCE = re.compile(
    r"(?:(?P<stage>train|gap|artifact):)?(?P<metric>[a-z_][a-z0-9_]*)(?:\[(?P<client>\d+|\*)\])?(?:@(?P<round>\d+))?\Z"
)


def _read_table(node: Any, raw: Map, file: Path) -> Table:
    if not isinstance(node, Map):
        raise SpecError(f"{raw.place('tables')}: a table is a mapping")
    place = node.at
    _keys(node, TABLE_KEYS, place)
    for key in ("id", "title", "rows", "values"):
        if key not in node:
            raise SpecError(f"{place}: the table's '{key}' is missing")
    axes = raw.get("axes") or Map()
    where = _read_where(node, axes, place)
    rows, across = _read_axes(node, "rows", axes), _read_axes(node, "across", axes)
    values, conditions = _read_sources(node, "values", axes, place)
    for heading, source in values.items():
        match = SOURCE.match(source)
        if not match or match["stage"] == "artifact" or match["client"] == "*":
            raise SpecError(f"{node['values'].place(heading)}: cannot read the source '{source}' (see docs/suites.md)")
    best = node.get("best", "max")
    best = {heading: str(best.get(heading, "max") if isinstance(best, Map) else best) for heading in values}
    for heading, which in best.items():
        if which not in ("max", "min", "none"):
            raise SpecError(f"{node.place('best')}: {heading}: expected max, min or none, got '{which}'")
    compete = _choice(node, "compete", ("column", "row"))
    if compete == "row" and not across:
        raise SpecError(f"{node.place('compete')}: row: a row competes over the axes of 'across', and there are none")
    published = None
    if "published" in node:
        paper = _mapping(node, "published", place)
        _keys(paper, PUBLISHED_KEYS, place)
        csv = next(
            (
                p
                for p in (file.parent / str(paper.get("file")), *(f / str(paper.get("file")) for f in folders()))
                if p.is_file()
            ),
            None,
        )
        if csv is None:
            raise SpecError(f"{paper.place('file')}: no such file: {paper.get('file')}")
        maps = {
            k: {a: str(v) for a, v in _mapping(paper, k, place).items()}
            for k in ("match", "rows", "labels", "values", "std")
        }
        unit = str(paper.get("unit", "percent"))
        if unit not in ("percent", "plain"):
            raise SpecError(f"{paper.place('unit')}: expected percent or plain, got '{unit}'")
        for heading in (*maps["values"], *maps["std"]):
            if heading not in values:
                raise SpecError(
                    f"{paper.place('values')}: the table has no column '{heading}'{did_you_mean(heading, values)}"
                )
        published = Published(csv, unit=unit, **maps)
    return Table(
        _text(node, "id", place), _text(node, "title", place), where, rows, across, values, best, published,
        str(node.get("note", "")).strip(), conditions, compete, _read_paired(node, [*rows, *across], axes, place),
    )  # fmt: skip


def _read_figures(raw: Map, file: Path) -> list[Figure]:
    figures = [_read_figure(node, raw) for node in _list_of_maps(raw, "figures", file)]
    for position, figure in enumerate(figures):
        if figure.id in [other.id for other in figures[:position]]:  # it is the name of a file
            raise SpecError(f"{raw['figures'][position].place('id')}: two figures have the id '{figure.id}'")
    return figures


def _read_figure(node: Map, raw: Map) -> Figure:
    place = node.at
    _keys(node, FIGURE_KEYS, place)
    for key in ("id", "title", "series"):
        if key not in node:
            raise SpecError(f"{place}: the figure's '{key}' is missing")
    axes = raw.get("axes") or Map()
    where, lines = _read_where(node, axes, place), _read_axes(node, "lines", axes)
    panels = _read_axes(node, "panels", Map({**axes, SERIES: Map()}))
    id, kind = _text(node, "id", place), _choice(node, "kind", KINDS)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", id):
        raise SpecError(f"{node.place('id')}: it names a file: letters, digits, '.', '_' and '-', not '{id}'")
    series, conditions = _read_sources(node, "series", axes, place)
    if not series:
        raise SpecError(f"{node.place('series')}: a figure needs at least one series")
    for heading, source in series.items():
        if wrong := _not_drawn(source, kind):
            raise SpecError(f"{node['series'].place(heading)}: {wrong}")
    if kind == "bars" and len({source.endswith("[*]") for source in series.values()}) > 1:
        raise SpecError(f"{node.place('series')}: bars are either all over an index, [*], or none of them")
    return Figure(
        id, _text(node, "title", place), kind, where, panels, lines, series, conditions,
        _choice(node, "scale", ("linear", "log")), str(node.get("note", "")).strip(),
    )  # fmt: skip


def _not_drawn(source: str, kind: str) -> str:
    """Why a figure of this kind cannot show a source; empty where it can."""
    match = SOURCE.match(source)
    stage = "artifact" if kind in ("heatmap", "images") else "train"
    if match is None:
        near = did_you_mean(source.split(":")[0], ("train", "artifact")) if ":" in source else ""
        return f"cannot read the source '{source}'{near or ' (see docs/suites.md)'}"
    if match["stage"] != stage:
        shows = "a tensor kept of a round" if stage == "artifact" else "a number logged during training"
        return f"a figure of kind {kind} shows {shows}, not '{source}' (did you mean '{stage}:{match['metric']}'?)"
    if match["round"]:
        which = "shows all rounds" if kind == "lines" else "shows the last round"
        return f"a figure of kind {kind} {which}: leave '@{match['round']}' out of '{source}'"
    if stage == "artifact" and match["client"]:
        return f"a tensor is shown whole: leave '[{match['client']}]' out of '{source}'"
    return ""


def _read_where(node: Map, axes: Map, place: str) -> Condition:
    """The `where` of a table, a figure or a heading: only these points."""
    where = {axis: _labels(value) for axis, value in _mapping(node, "where", place).items()}
    for axis, labels in where.items():
        if axis not in axes:
            raise SpecError(f"{node.place('where')}: no axis is named '{axis}'{did_you_mean(axis, axes)}")
        for label in labels:
            if label not in axes[axis]:
                raise SpecError(
                    f"{node.place('where')}: axis '{axis}' has no label '{label}'{did_you_mean(label, axes[axis])}"
                )
    return where


def _read_axes(node: Map, key: str, axes: Map) -> list[str]:
    names = _labels(node.get(key, []))
    for axis in names:
        if axis not in axes:
            raise SpecError(f"{node.place(key)}: no axis is named '{axis}'{did_you_mean(axis, axes)}")
    return names


def _read_sources(node: Map, key: str, axes: Map, place: str) -> tuple[dict[str, str], dict[str, Condition]]:
    """(heading -> source, heading -> condition where it has one): a heading is a source, or {source, where}."""
    sources: dict[str, str] = {}
    conditions: dict[str, Condition] = {}
    headings = _mapping(node, key, place)
    for heading, value in headings.items():
        if isinstance(value, Map):
            _keys(value, SOURCE_KEYS, value.at)
            if "source" not in value:
                raise SpecError(f"{headings.place(heading)}: the heading's 'source' is missing")
            if where := _read_where(value, axes, value.at):
                conditions[heading] = where
            value = value["source"]
        sources[heading] = str(value)
    return sources, conditions


def _read_paired(node: Map, axes_shown: Sequence[str], axes: Map, place: str) -> tuple[str, str] | None:
    if "paired" not in node:
        return None
    paired = _mapping(node, "paired", place)
    _keys(paired, PAIRED_KEYS, place)
    axis, against = _text(paired, "axis", paired.at), str(paired.get("against"))
    if axis not in axes_shown:
        raise SpecError(
            f"{paired.place('axis')}: the table has no axis '{axis}' in 'rows' or 'across'"
            f"{did_you_mean(axis, axes_shown)}"
        )
    if against not in axes[axis]:
        raise SpecError(
            f"{paired.place('against')}: axis '{axis}' has no label '{against}'{did_you_mean(against, axes[axis])}"
        )
    return axis, against


def _choice(node: Map, key: str, known: Sequence[str]) -> str:
    """One of the known words; the first where none is given."""
    chosen = str(node.get(key, known[0]))
    if chosen not in known:
        words = f"{', '.join(known[:-1])} or {known[-1]}"
        raise SpecError(f"{node.place(key)}: expected {words}, got '{chosen}'{did_you_mean(chosen, known)}")
    return chosen


# --- filters -----------------------------------------------------------------------------------------------------

_TOKEN = re.compile(r"\s*(?:(?P<op>!=|==|=|<=|>=|<|>|\(|\))|(?P<quoted>'[^']*'|\"[^\"]*\")|(?P<word>[^\s()=!<>]+))")


def select(plan: Plan, where: str) -> Plan:
    """The plan with only the cells that a filter such as "model=nin and rule=sfat" keeps.

    A name is an axis, a setting by its dotted path, or a call of the cell (`model`, `rule`: compared with its name).
    SpecError: cannot be read, or an unknown name; NothingMatched: no cell is left.
    """
    test = _parse_filter(where)
    known = set()
    for cell in plan.cells:
        known |= set(_facts(cell))
    cells = [cell for cell in plan.cells if test(_facts(cell), known)]
    if not cells:
        raise NothingMatched(f"-k '{where}' matches none of the {len(plan.unique())} cells of '{plan.suite}'")
    return replace(plan, cells=cells)


def _facts(cell: Cell) -> dict[str, str]:
    """Everything a filter can ask of a cell: name -> value as text."""
    facts: dict[str, str] = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, Mapping):
            if "name" in node:
                facts[".".join(path)] = facts.setdefault(path[-1], str(node["name"]))
                facts[".".join(path)] = str(node["name"])
            for key, value in node.items():
                walk(value, (*path, key))
        elif path[-1] != "name":
            facts[".".join(path)] = str(node)
            facts.setdefault(path[-1], str(node))

    for key, value in cell.spec.items():
        walk(value, (key,))
    facts |= {"id": cell.id, **{axis.lower(): label for axis, label in cell.key.items()}, **cell.key}
    return facts


def _parse_filter(text: str) -> Any:
    tokens: list[str] = []
    position = 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if not match:
            raise SpecError(f"-k: cannot read '{text[position:].strip()}' in '{text}'")
        tokens.append(match.group().strip())
        position = match.end()
    tokens.append("")

    def fail(what: str) -> SpecError:
        return SpecError(f"-k: {what} in '{text}' (write for example: model=nin and not rule=sfat)")

    def either() -> Any:
        left = both()
        while tokens[0].lower() == "or":
            tokens.pop(0)
            left = functools.partial(lambda a, b, f, k: a(f, k) or b(f, k), left, both())
        return left

    def both() -> Any:
        left = negation()
        while tokens[0].lower() == "and":
            tokens.pop(0)
            left = functools.partial(lambda a, b, f, k: a(f, k) and b(f, k), left, negation())
        return left

    def negation() -> Any:
        if tokens[0].lower() == "not":
            tokens.pop(0)
            return functools.partial(lambda a, f, k: not a(f, k), negation())
        if tokens[0] == "(":
            tokens.pop(0)
            inside = either()
            if tokens.pop(0) != ")":
                raise fail("a ')' is missing")
            return inside
        return comparison()

    def comparison() -> Any:
        name = tokens.pop(0)
        if not name or tokens[0] not in ("=", "==", "!=", "<", ">", "<=", ">="):
            raise fail(f"expected name=value at '{name}'")
        op, value = tokens.pop(0), tokens.pop(0).strip("'\"")

        def test(facts: dict[str, str], known: set[str]) -> bool:
            if name not in known:
                plain = [k for k in known if "." not in k]
                raise SpecError(f"-k: no cell has '{name}'{did_you_mean(name, plain)}")
            if name not in facts:
                return op == "!="
            return _compare(facts[name], op, value)

        return test

    result = either()
    if tokens[0]:
        raise fail(f"unexpected '{tokens[0]}'")
    return result


def _compare(have: str, op: str, want: str) -> bool:
    if op in ("=", "=="):
        return have.lower() == want.lower()
    if op == "!=":
        return have.lower() != want.lower()
    try:
        from fatbench.suite.types import number

        a, b = float(number(have)), float(number(want))
    except ValueError:
        return False
    return {"<": a < b, ">": a > b, "<=": a <= b, ">=": a >= b}[op]


# --- small checks of the file's own structure --------------------------------------------------------------------


def _keys(node: Map, known: Iterable[str], place: str) -> None:
    for key in node:
        if key not in known:
            raise SpecError(f"{node.place(key)}: unknown key '{key}'{did_you_mean(key, known)}")


def _mapping(node: Map, key: str, place: str) -> Map:
    value = node.get(key)
    if value is None:
        return Map(at=place)
    if not isinstance(value, Map):
        raise SpecError(f"{node.place(key)}: expected a mapping, got {value!r}")
    return value


def _list_of_maps(node: Map, key: str, file: Path) -> list[Map]:
    value = node.get(key, [])
    if not (isinstance(value, list) and all(isinstance(item, Map) for item in value)):
        raise SpecError(f"{node.place(key)}: expected a list of mappings")
    return value


def _text(node: Map, key: str, place: str) -> str:
    value = node.get(key)
    if not isinstance(value, str) or not value.strip():
        raise SpecError(f"{node.place(key) if key in node else place + ': ' + key}: expected a text, got {value!r}")
    return value.strip()
