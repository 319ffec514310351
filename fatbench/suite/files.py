"""Suite files: where they are found, YAML read with its lines, and the suite that one extends.

The format is described in docs/suites.md. `load` checks a file's own structure; the cells of a preset are checked by
`Suite.plan`, against the source of the functions that they will reach.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.composer import Composer
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError

from fatbench.errors import CONTROL, SpecError, did_you_mean
from fatbench.suite import input_limits, model, plugins, signatures
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.contents import Axes, Contents
from fatbench.suite.contrasts import Tests
from fatbench.suite.expansion import expand
from fatbench.suite.filters import select
from fatbench.suite.folders import available as available
from fatbench.suite.folders import folders as folders
from fatbench.suite.folders import own_files
from fatbench.suite.grid import grid_size
from fatbench.suite.located import LocatedMap, merge
from fatbench.suite.tables import Figure, Table, distinct


@dataclass(frozen=True)
class Suite:
    """A checked suite file."""

    file: Path
    contents: Contents
    plain: Suite | None = None  # without the settings of `--set`; None: it has none

    @property
    def name(self) -> str:
        return self.contents.name

    @property
    def title(self) -> str:
        return self.contents.title

    @property
    def description(self) -> str:
        return self.contents.description

    @property
    def tables(self) -> list[Table]:
        return self.contents.tables

    @property
    def figures(self) -> list[Figure]:
        return self.contents.figures

    @property
    def tests(self) -> list[Tests]:
        return self.contents.tests

    @property
    def margin(self) -> float | None:
        """Of equivalence, in points, if all families that declare one declare the same."""
        margins = {family.margin for family in self.tests if family.margin is not None}
        return margins.pop() if len(margins) == 1 else None

    def with_tables(self, ids: Sequence[str]) -> Suite:
        """The same suite with these tables alone."""
        tables = [table for table in self.tables if table.id in ids]
        return replace(self, contents=self.contents.model_copy(update={"tables": tables}))

    def presets(self) -> list[str]:
        """The names of the presets. SpecError: all of them together have too many cells to look at each."""
        input_limits.cells(grid_size(self.contents), f"{self.file}: all presets together")
        return list(self.contents.presets)

    def axes(self) -> dict[str, list[str]]:
        return {axis: list(labels) for axis, labels in self.contents.axes.items()}

    def plan(
        self,
        preset: str = "paper",
        seeds: Sequence[int] | None = None,
        where: str | None = None,
        attacks: Sequence[str] = (),
        refuse: bool = True,
    ) -> Plan:
        """The cells and evaluations of a preset. SpecError: no such preset, invalid cell; NothingMatched: `where`.

        attacks: names of `standard_attacks.TITLES`, or of the suite, that every cell is evaluated with as well.
        refuse: False where results are read: no function is asked whether it can run in a cell, so none is imported.
        """
        origin = _Origins(self, refuse=refuse).cell
        arguments = self.name, self.contents, self.file, preset, seeds, origin
        cells = functools.partial(expand, *arguments, attacks=attacks, refuse=refuse)
        try:
            plan = cells()
        except SpecError:
            if self.plain is None or not where:
                raise
            wanted_cells = self.plain.plan(preset, seeds, where, attacks, refuse).cells  # a setting may fit these alone
            plan = cells(points={tuple(cell.key.items()) for cell in wanted_cells})
        return select(plan, where) if where else plan


class _Origins:
    """The cells that the weights of a suite's cells come from: {suite: NAME, axis: label, ...}, each planned once."""

    def __init__(self, suite: Suite, below: tuple[tuple[str, str], ...] = (), *, refuse: bool) -> None:
        self.refuse = refuse  # see `Suite.plan`
        self.suite, self.below = suite, below  # below: (suite, labels) of what asks for the weights of what asks ...
        self.known: dict[tuple[str, str, str], list[Cell]] = {}

    def cell(self, node: LocatedMap, preset: str, seed: int) -> Cell:
        """The one cell of this preset with these labels: of the seed, or its only one. SpecError: see `_cells`."""
        labels = {axis: str(label) for axis, label in node.items() if axis != "suite"}
        origin_key = (str(node.get("suite")), ", ".join(f"{axis} {label}" for axis, label in labels.items()))
        if (*origin_key, preset) not in self.known:
            self.known[(*origin_key, preset)] = self._cells(node, preset, origin_key, labels)
        cells = self.known[(*origin_key, preset)]
        if len(cells) == 1:
            return cells[0]
        if (cell_of_seed := next((cell for cell in cells if cell.spec["seed"] == seed), None)) is None:
            raise SpecError(
                f"{node.place('suite')}: weights: '{origin_key[0]}' has no cell of seed {seed} ({origin_key[1]})"
            )
        return cell_of_seed

    def _cells(self, node: LocatedMap, preset: str, origin_key: tuple[str, str], labels: dict[str, str]) -> list[Cell]:
        """The cells of a point, one a seed. SpecError: not one point, no such suite, label or preset, a circle."""
        location = f"{node.place('suite')}: weights"
        if origin_key in self.below:
            chain = " -> ".join(f"{suite} ({label_text})" for suite, label_text in (*self.below, origin_key))
            raise SpecError(f"{location}: a cell cannot begin with its own weights: {chain}")
        if "suite" not in node:
            raise SpecError(f"{location}: 'suite' is missing: weights of which suite's cell?")
        try:
            origin_suite = self.suite if origin_key[0] == self.suite.name else load(self._file(origin_key[0]))
            for axis, label in labels.items():
                model.known_label(model.known_axis(axis, origin_suite.axes()), label, origin_suite.axes())
            condition = {axis: [label] for axis, label in labels.items()}
            nested_origins = _Origins(origin_suite, (*self.below, origin_key), refuse=self.refuse).cell
            arguments = origin_suite.name, origin_suite.contents, origin_suite.file, preset, None, nested_origins
            cells = expand(*arguments, condition=condition, refuse=self.refuse).cells
        except (SpecError, ValueError) as error:
            raise SpecError(f"{location}: {error}") from None
        keys = list({tuple(cell.key.items()): cell.key for cell in cells}.values())
        if len(keys) != 1:
            count_text = f"{len(keys)} cells, not one" if keys else "no cell"
            vary = [axis for axis in origin_suite.axes() if len({key.get(axis) for key in keys}) > 1]
            hint = f" (say which {' and which '.join(vary)})" if vary else ""
            label_text = f" with {origin_key[1]}" if origin_key[1] else ""
            raise SpecError(f"{location}: preset '{preset}' of '{origin_key[0]}' has {count_text}{label_text}{hint}")
        return [replace(cell, evaluations=(), suite=origin_suite.name) for cell in cells]

    def _file(self, name: str) -> str:
        """A suite beside this one, or any known one."""
        neighbour = self.suite.file.parent / name
        return str(neighbour) if is_path(name) and neighbour.is_file() else name


def is_path(name: str) -> bool:
    """Whether a suite is given by its file."""
    name = with_settings(name)[0]
    return name.endswith((".yaml", ".yml")) or os.sep in name


def locate(name: str) -> Path:
    """The file of a suite given by path, or by name: one that is known, or in the working directory. SpecError."""
    if is_path(name):
        path = Path(name)
        if not path.is_file():
            raise SpecError(f"{name}: no such suite file")
        return path
    known_suites = available()
    if name not in known_suites:
        own_suites = own_files()
        if name in own_suites:
            return Path(own_suites[name])
        neighbour = next((f"{name}{end}" for end in (".yaml", ".yml") if os.path.isfile(f"{name}{end}")), None)
        hint = f" (did you mean '{neighbour}'?)" if neighbour else did_you_mean(name, [*known_suites, *own_suites])
        raise SpecError(f"no suite is named '{name}'{hint}")
    return known_suites[name]


def load(name: str) -> Suite:
    """Read and check a suite by name or path, its plug-ins added; `plan` checks the cells. SpecError on any mistake.

    "NAME+model.width=8+train=600" is the suite with these settings in every cell.
    """
    name, settings = with_settings(name)
    file = locate(name)
    raw = _resolve(file, ())
    for plugin in raw.get("plugins", ()):
        plugins.add(Path(plugin), raw.place("plugins"))
    suite = checked(raw, file)
    return overridden(suite, settings) if settings else suite


SETTING = re.compile(r"\+(?=[a-z_][\w.]*=)")


def with_settings(name: str) -> tuple[str, list[str]]:
    """A suite's name or path, and what follows it: "tiny+train=60" is ("tiny", ["train=60"])."""
    base, *settings = SETTING.split(name)
    return base, settings


def overridden(suite: Suite, settings: Sequence[str]) -> Suite:
    """The suite with settings in all cells of all presets, over every other override, and their text in its name."""
    of_cells = {setting.name for setting in signatures.describe("Experiment").settings}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in of_cells and (
            paths := [path for path in _paths(suite.contents.base) if path.endswith(f".{key}")]
        ):
            raise SpecError(f"--set {setting}: a cell has no setting '{key}' (did you mean '{paths[0]}={value}'?)")
    override = model.Override(set=functools.reduce(merge, map(_nested, settings)))
    presets = {
        name: preset.model_copy(update={"overrides": [*preset.overrides, override]})
        for name, preset in suite.contents.presets.items()
    }
    naming = {"name": "+".join([suite.name, *settings]), "title": f"{suite.title}, {', '.join(settings)}"}
    return replace(suite, contents=suite.contents.model_copy(update={**naming, "presets": presets}), plain=suite)


def _paths(base: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The settings of a mapping as `--set` writes them: "algorithm.local.lr"."""
    for key, value in base.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")


def _nested(setting: str) -> LocatedMap:
    """What "algorithm.local.lr=0.02" overrides: {algorithm: {local: {lr: 0.02}}}. SpecError: no such thing."""
    path, _, text = setting.partition("=")
    value: Any = parse(f"value: {text}", Path("--set")).get("value")
    for key in reversed(path.split(".")):
        if not key:
            raise SpecError(f"--set: expected a setting such as algorithm.local.lr=0.02, got '{setting}'")
        value = LocatedMap({key: value}, {key: "--set"}, "--set")
    assert isinstance(value, LocatedMap)
    return value


def name_with_settings(name: str, settings: Sequence[str] | None) -> str:
    """A suite's name with what `--set` says. SpecError: it says no setting."""
    for setting in settings or ():
        if not SETTING.match(f"+{setting}"):
            raise SpecError(f"--set: expected a setting such as algorithm.local.lr=0.02, got '{setting}'")
    return "+".join([name, *(settings or ())])


def checked(raw: LocatedMap, file: Path) -> Suite:
    """The suite of what a file says, with what it extends merged under it."""
    axes = model.read(
        Axes, LocatedMap({"axes": raw.get("axes")}, raw.where, raw.at), str(file)
    ).axes  # others name them
    contents = model.read(Contents, raw, str(file), axes=axes, folders=[file.parent, *folders()])
    distinct(contents.figures)
    return Suite(file, contents)


def _resolve(file: Path, children: tuple[Path, ...]) -> LocatedMap:
    """The suite's mapping with what it extends merged under it."""
    resolved = file.resolve()
    if resolved in children:
        chain = " -> ".join(p.stem for p in (*children, resolved))
        raise SpecError(f"{file}: a suite cannot extend itself ({chain})")
    raw = read_yaml(file)
    if "plugins" in raw:
        plugin_paths = [str(file.resolve().parent / plugin) for plugin in _listed(raw)]
        raw = LocatedMap({**raw, "plugins": plugin_paths}, raw.where, raw.at)  # what was read is shared
    if "extends" not in raw:
        return raw
    name = str(raw["extends"])
    try:
        neighbour = file.parent / name
        parent = neighbour if neighbour.is_file() else locate(name)
        if parent.suffix not in (".yaml", ".yml"):  # messages about a file repeat its keys
            raise SpecError(f"{name} is no suite file: its name must end in .yaml")
    except SpecError as error:
        raise SpecError(f"{raw.place('extends')}: {error}") from None
    parent_map = _resolve(parent, (*children, resolved))
    merged = LocatedMap(parent_map, parent_map.where, parent_map.at)  # several suites may extend it
    for key, value in raw.items():
        if key in ("base", "axes", "evaluate", "presets") and key in merged and isinstance(value, LocatedMap):
            value = merge(merged[key], value)
        if key == "grid" and isinstance(value, LocatedMap) and isinstance(merged.get(key), LocatedMap):
            value = _grid(merged[key], value)
        if key == "plugins":
            value = list(dict.fromkeys([*merged.get(key, ()), *value]))
        merged[key] = value
        merged.where[key] = raw.where[key]
    for key in ("tables", "figures"):
        if key not in raw and "name" in parent_map and isinstance(merged.get(key), list):  # none: only a part of suites
            merged[key] = [_with_new_rows(one, parent_map, merged) for one in merged[key]]
    return merged


def _with_new_rows(shown: Any, under: LocatedMap, merged: LocatedMap) -> Any:
    """An inherited table or figure; one that lists the baseline among others also lists new labels of its axis."""
    baseline = str(merged.get("baseline"))
    where = shown.get("where") if isinstance(shown, LocatedMap) else None
    if not isinstance(where, LocatedMap):
        return shown
    for axis, listed in where.items():
        before, now = (node.get(axis) for node in (under.get("axes") or {}, merged.get("axes") or {}))
        if not (isinstance(before, LocatedMap) and isinstance(now, LocatedMap)):
            continue
        if isinstance(listed, list) and baseline in map(str, listed):
            new = [label for label in now if label not in before]
            wider = LocatedMap({**where, axis: [*listed, *new]}, where.where, where.at)
            return LocatedMap({**shown, "where": wider}, shown.where, shown.at)
    return shown


POINTS = ("product", "include")


def _grid(parent_grid: LocatedMap, child_grid: LocatedMap) -> LocatedMap:
    """The grid of a suite that extends another: its points, and the overrides of both unless it replaces them.

    A grid that names no points has those of the other.
    """
    points = any(key in child_grid for key in POINTS)
    kept_keys = [key for key in parent_grid if not points and key in (*POINTS, "exclude") and key not in child_grid]
    merged = LocatedMap(
        {**{key: parent_grid[key] for key in kept_keys}, **child_grid},
        {**parent_grid.where, **child_grid.where},
        child_grid.at,
    )
    if child_grid.get("replace_overrides") is not True:
        override_lists = [parent_grid.get("overrides") or [], child_grid.get("overrides") or []]
        if any(override_lists) and all(isinstance(overrides, list) for overrides in override_lists):
            merged["overrides"] = [*override_lists[0], *override_lists[1]]
    return merged


def _listed(raw: LocatedMap) -> list[str]:
    """The plug-ins that one file names."""
    plugin_names = raw["plugins"]
    if not (isinstance(plugin_names, list) and all(isinstance(plugin, str) and plugin for plugin in plugin_names)):
        raise SpecError(f"{raw.place('plugins')}: expected a list of files such as [mine.py], got {plugin_names!r}")
    return plugin_names


def read_yaml(file: Path) -> LocatedMap:
    """A YAML 1.2 file as Maps that know their lines. SpecError: unreadable, not a mapping, a key given twice."""
    try:
        return parse(file.read_text(encoding="utf-8"), file)
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{file}: {getattr(error, 'strerror', None) or error}") from None


@functools.lru_cache(maxsize=256)
def parse(text: str, file: Path) -> LocatedMap:
    """What a file says; SpecError as for `read_yaml`. The result is shared: it is read, never changed."""
    input_limits.characters(text, str(file))
    root = _parse(text, file)
    if "\\" in text or CONTROL.search(text):
        _demand_printable(root, str(file))
    return root


def _demand_printable(node: Any, location: str) -> None:
    """SpecError: a key or a text with a character that a terminal obeys; a tab and the end of a line are allowed."""
    keys = list(node) if isinstance(node, LocatedMap) else []
    for key in keys:
        _demand_printable(node[key], node.place(key))
    for item in node if isinstance(node, list) else ():
        _demand_printable(item, location)
    if character := CONTROL.search(node if isinstance(node, str) else "".join(keys)):
        raise SpecError(f"{location}: a control character (U+{ord(character[0]):04X})")


class _Composer(Composer):
    """ruamel's, which ends where a file is nested too deeply: its scanner takes the square of the depth."""

    level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.level += 1
        if self.level > input_limits.LEVELS + 1:
            raise RecursionError
        node = super().compose_node(parent, index)
        self.level -= 1
        return node


def _parse(text: str, file: Path) -> LocatedMap:
    try:
        reader = YAML(typ="rt", pure=True)
        reader.Composer = _Composer
        tree = reader.load(text)
    except RecursionError:
        raise input_limits.too_deep(str(file)) from None
    except DuplicateKeyError as error:
        mark = error.problem_mark
        key = re.search(r'duplicate key "?([^"\s]+)"?', str(error.problem or ""))
        raise SpecError(f"{file}:{mark.line + 1}: the key '{key[1] if key else '?'}' is given twice") from None
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise SpecError(f"{file}{line}: invalid YAML: {getattr(error, 'problem', None) or error}") from None
    except Exception as error:  # a number of 5000 digits, the 45th of a month, !!int x: each its own kind of exception
        raise SpecError(f"{file}: invalid YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(tree, CommentedMap):
        raise SpecError(f"{file}: expected a mapping at the top level")
    input_limits.values(tree, _children, str(file))
    return _located(tree, file)


def _children(node: Any) -> list[Any]:
    if isinstance(node, CommentedMap):
        return list(node.values())
    return list(node) if isinstance(node, CommentedSeq) else []


def _located(node: Any, file: Path) -> Any:
    """ruamel's tree as Maps, lists and plain Python values."""
    if isinstance(node, CommentedMap):
        items = {str(key): _located(value, file) for key, value in node.items()}
        lines = node.lc.data or {}  # a key that came with a merge (<<) has no line
        location_by_key = {
            str(key): f"{file}:{lines[key][0] + 1 if key in lines else node.lc.line + 1}" for key in node
        }
        return LocatedMap(items, location_by_key, at=f"{file}:{node.lc.line + 1}")
    if isinstance(node, CommentedSeq):
        return [_located(item, file) for item in node]
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            if kind is int:
                input_limits.digits(str(node), str(file))
            return kind(node)
    return node
