"""Suite files: finding them, reading YAML with line numbers, and merging a suite over the one that it extends.

The format is described in docs/suites.md. `load` checks the structure of a file; `Suite.plan` checks the cells of a
preset, against the functions that will receive their settings.
"""

from __future__ import annotations

import difflib
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
    plain: Suite | None = None  # the same suite without the settings of `--set`; None if there are none

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
        """The margin of equivalence in points, if all families that declare one agree; else None."""
        margins = {family.margin for family in self.tests if family.margin is not None}
        return margins.pop() if len(margins) == 1 else None

    def with_tables(self, ids: Sequence[str]) -> Suite:
        """The same suite with only these tables."""
        tables = [table for table in self.tables if table.id in ids]
        return replace(self, contents=self.contents.model_copy(update={"tables": tables}))

    def presets(self) -> list[str]:
        """The names of the presets; SpecError if all together have too many cells."""
        input_limits.check_cells(grid_size(self.contents), f"{self.file}: all presets together")
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
        """The cells and evaluations of a preset.

        where: a filter. attacks: further attacks for all cells, by their names in `standard_attacks.TITLES` or in the
        suite. refuse: False to read results: then no method is imported to ask whether it can run in a cell.
        SpecError for an unknown preset or an invalid cell, NothingMatched if `where` selects no cell.
        """
        origin = _Origins(self, refuse=refuse).cell
        arguments = self.name, self.contents, self.file, preset, seeds, origin
        cells = functools.partial(expand, *arguments, attacks=attacks, refuse=refuse)
        try:
            plan = cells()
        except SpecError:
            if self.plain is None or not where:
                raise
            # a setting of `--set` may suit only the selected cells: find them without it, then expand them alone
            wanted_cells = self.plain.plan(preset, seeds, where, attacks, refuse).cells
            plan = cells(points={tuple(cell.key.items()) for cell in wanted_cells})
        return select(plan, where) if where else plan


class _Origins:
    """Finds the cells behind `weights: {suite: NAME, axis: label, ...}`, and expands each only once."""

    def __init__(self, suite: Suite, below: tuple[tuple[str, str], ...] = (), *, refuse: bool) -> None:
        self.refuse = refuse  # see `Suite.plan`
        self.suite = suite
        self.below = below  # (suite, labels) of the cells that start from these, outermost first
        self.cells_by_key: dict[tuple[str, str, str], list[Cell]] = {}  # (suite, labels, preset) -> cells

    def cell(self, node: LocatedMap, preset: str, seed: int) -> Cell:
        """The cell of this preset with these labels and this seed, or the only one with these labels."""
        labels = {axis: str(label) for axis, label in node.items() if axis != "suite"}
        origin_key = (str(node.get("suite")), ", ".join(f"{axis} {label}" for axis, label in labels.items()))
        if (*origin_key, preset) not in self.cells_by_key:
            self.cells_by_key[(*origin_key, preset)] = self._cells(node, preset, origin_key, labels)
        cells = self.cells_by_key[(*origin_key, preset)]
        if len(cells) == 1:
            return cells[0]
        if (cell_of_seed := next((cell for cell in cells if cell.spec["seed"] == seed), None)) is None:
            raise SpecError(
                f"{node.place('suite')}: weights: '{origin_key[0]}' has no cell of seed {seed} ({origin_key[1]})"
            )
        return cell_of_seed

    def _cells(self, node: LocatedMap, preset: str, origin_key: tuple[str, str], labels: dict[str, str]) -> list[Cell]:
        """The cells of one point, one per seed. SpecError unless labels, preset and suite lead to exactly one point."""
        location = f"{node.place('suite')}: weights"
        if origin_key in self.below:
            chain = " -> ".join(f"{suite} ({label_text})" for suite, label_text in (*self.below, origin_key))
            raise SpecError(f"{location}: a cell cannot start from its own weights: {chain}")
        if "suite" not in node:
            raise SpecError(f"{location}: 'suite' is missing: name the suite whose cell has the weights")
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
            varying_axes = [axis for axis in origin_suite.axes() if len({key.get(axis) for key in keys}) > 1]
            hint = f" (add {' and '.join(varying_axes)})" if varying_axes else ""
            label_text = f" with {origin_key[1]}" if origin_key[1] else ""
            raise SpecError(f"{location}: preset '{preset}' of '{origin_key[0]}' has {count_text}{label_text}{hint}")
        return [replace(cell, evaluations=(), suite=origin_suite.name) for cell in cells]

    def _file(self, name: str) -> str:
        """The path of a suite file beside this one, else the name as it is."""
        neighbour = self.suite.file.parent / name
        return str(neighbour) if is_path(name) and neighbour.is_file() else name


def is_path(name: str) -> bool:
    """Whether a suite is named by its file."""
    name = split_settings(name)[0]
    return name.endswith((".yaml", ".yml")) or os.sep in name


def locate(name: str) -> Path:
    """The file of a suite given by path or by name; suites in the working directory count too."""
    if is_path(name):
        path = Path(name)
        if not path.is_file():
            neighbour = _suite_file(str(path.with_suffix("")))
            raise SpecError(f"{name}: no such suite file{did_you_mean(name, [neighbour] if neighbour else [])}")
        return path
    known_suites = available()
    if name not in known_suites:
        own_suites = own_files()
        if name in own_suites:
            return Path(own_suites[name])
        neighbour = _suite_file(name)
        hint = f" (did you mean '{neighbour}'?)" if neighbour else did_you_mean(name, [*known_suites, *own_suites])
        if os.path.isfile(name) and (how_to_read := _how_to_read(Path(name))):
            raise SpecError(f"{name} is not a suite file{how_to_read}")
        if re.fullmatch("[0-9a-f]{12}", name):
            raise SpecError(f"no suite is named '{name}' (fatbench show {name} shows a cell)")
        raise SpecError(f"no suite is named '{name}'{hint}")
    return known_suites[name]


def _suite_file(stem: str) -> str | None:
    """The file of this name, without its ending; None if there is none."""
    return next((f"{stem}{ending}" for ending in (".yaml", ".yml") if os.path.isfile(f"{stem}{ending}")), None)


def load(name: str) -> Suite:
    """Read and check a suite by name or path, and add its plug-ins; `plan` checks the cells later.

    "NAME+model.width=8+train=600" is the suite with these settings in every cell. SpecError for any mistake.
    """
    name, settings = split_settings(name)
    file = locate(name)
    raw = _resolve(file, ())
    for plugin in raw.get("plugins", ()):
        plugins.add(Path(plugin), raw.place("plugins"))
    suite = read_suite(raw, file)
    return override_settings(suite, settings) if settings else suite


SETTING = re.compile(r"\+(?=[a-z_][\w.]*=)")


def split_settings(name: str) -> tuple[str, list[str]]:
    """("tiny", ["train=60"]) from "tiny+train=60": a suite's name or path, and its settings."""
    base, *settings = SETTING.split(name)
    return base, settings


def override_settings(suite: Suite, settings: Sequence[str]) -> Suite:
    """The suite with these settings in all cells, over all other overrides, and with their text in its name."""
    cell_settings = {setting.name for setting in signatures.describe("Experiment").settings}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in cell_settings and (
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
    """The paths of all settings of a mapping, as `--set` takes them: "algorithm.local.lr"."""
    for key, value in base.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")


def _nested(setting: str) -> LocatedMap:
    """{algorithm: {local: {lr: 0.02}}} from "algorithm.local.lr=0.02"."""
    path, _, text = setting.partition("=")
    value: Any = parse(f"value: {text}", Path("--set")).get("value")
    for key in reversed(path.split(".")):
        if not key:
            raise SpecError(f"--set: expected a setting such as algorithm.local.lr=0.02, got '{setting}'")
        value = LocatedMap({key: value}, {key: "--set"}, "--set")
    assert isinstance(value, LocatedMap)
    return value


def name_with_settings(name: str, settings: Sequence[str] | None) -> str:
    """A suite's name with the texts of `--set`: "tiny+train=60". SpecError for a text that is no setting."""
    for setting in settings or ():
        if not SETTING.match(f"+{setting}"):
            raise SpecError(f"--set: expected a setting such as algorithm.local.lr=0.02, got '{setting}'")
    return "+".join([name, *(settings or ())])


def read_suite(raw: LocatedMap, file: Path) -> Suite:
    """The suite of a mapping that is already merged over the suite it extends."""
    # first the axes alone: the other sections are checked against their names and labels
    axes = model.read(Axes, LocatedMap({"axes": raw.get("axes")}, raw.where, raw.at), str(file)).axes
    contents = model.read(Contents, raw, str(file), axes=axes, folders=[file.parent, *folders()])
    distinct(contents.figures)
    return Suite(file, contents)


def _resolve(file: Path, children: tuple[Path, ...]) -> LocatedMap:
    """The mapping of a suite file, merged over that of the suite it extends."""
    resolved = file.resolve()
    if resolved in children:
        chain = " -> ".join(p.stem for p in (*children, resolved))
        raise SpecError(f"{file}: a suite cannot extend itself ({chain})")
    raw = read_yaml(file)
    if "plugins" in raw:
        plugin_paths = [str(file.resolve().parent / plugin) for plugin in _plugin_files(raw)]
        raw = LocatedMap({**raw, "plugins": plugin_paths}, raw.where, raw.at)  # a copy: `parse` shares its result
    if "extends" not in raw:
        return raw
    name = str(raw["extends"])
    try:
        neighbour = file.parent / name
        parent = neighbour if neighbour.is_file() else locate(name)
        if parent.suffix not in (".yaml", ".yml"):  # messages would repeat the keys of any other file
            raise SpecError(f"{name} is not a suite file: its name must end in .yaml")
    except SpecError as error:
        raise SpecError(f"{raw.place('extends')}: {error}") from None
    parent_map = _resolve(parent, (*children, resolved))
    merged = LocatedMap(parent_map, parent_map.where, parent_map.at)  # a copy: several suites may extend the same one
    for key, value in raw.items():
        if key in ("base", "axes", "evaluate", "presets") and key in merged and isinstance(value, LocatedMap):
            if key == "axes":
                _refuse_misspelt_axes(value, merged[key])
            value = merge(merged[key], value)
        if key == "grid" and isinstance(value, LocatedMap) and isinstance(merged.get(key), LocatedMap):
            value = _grid(merged[key], value)
        if key == "plugins":
            value = list(dict.fromkeys([*merged.get(key, ()), *value]))
        merged[key] = value
        merged.where[key] = raw.where[key]
    for key in ("tables", "figures"):  # a parent without a name is only a fragment, whose tables stay as they are
        if key not in raw and "name" in parent_map and isinstance(merged.get(key), list):
            merged[key] = [_with_new_rows(node, parent_map, merged) for node in merged[key]]
    return merged


def _refuse_misspelt_axes(axes: LocatedMap, parent_axes: LocatedMap) -> None:
    """SpecError for a new axis that is called almost as one of the parent: its label would be in every cell."""
    for axis in axes:
        near = difflib.get_close_matches(axis, parent_axes, n=1, cutoff=0.8)
        if axis not in parent_axes and near:
            raise SpecError(
                f"{axes.place(axis)}: no axis of the suite that this one extends (did you mean '{near[0]}'?)"
            )


def _with_new_rows(node: Any, parent_map: LocatedMap, merged: LocatedMap) -> Any:
    """An inherited table or figure; one that shows the baseline among other labels also shows the new labels."""
    baseline = str(merged.get("baseline"))
    condition = node.get("where") if isinstance(node, LocatedMap) else None
    if not isinstance(condition, LocatedMap):
        return node
    for axis, shown_labels in condition.items():
        parent_labels, labels = (suite.get(axis) for suite in (parent_map.get("axes") or {}, merged.get("axes") or {}))
        if not (isinstance(parent_labels, LocatedMap) and isinstance(labels, LocatedMap)):
            continue
        if isinstance(shown_labels, list) and baseline in map(str, shown_labels):
            new_labels = [label for label in labels if label not in parent_labels]
            wider = LocatedMap({**condition, axis: [*shown_labels, *new_labels]}, condition.where, condition.at)
            return LocatedMap({**node, "where": wider}, node.where, node.at)
    return node


POINTS = ("product", "include")


def _grid(parent_grid: LocatedMap, child_grid: LocatedMap) -> LocatedMap:
    """The grid of a suite that extends another: its own points, and the overrides of both unless it replaces them.

    A grid that names no points has those of the parent.
    """
    has_points = any(key in child_grid for key in POINTS)
    inherited = () if has_points else (*POINTS, "exclude")
    inherited_keys = [key for key in parent_grid if key in inherited and key not in child_grid]
    merged = LocatedMap(
        {**{key: parent_grid[key] for key in inherited_keys}, **child_grid},
        {**parent_grid.where, **child_grid.where},
        child_grid.at,
    )
    if child_grid.get("replace_overrides") is not True:
        override_lists = [parent_grid.get("overrides") or [], child_grid.get("overrides") or []]
        if any(override_lists) and all(isinstance(overrides, list) for overrides in override_lists):
            merged["overrides"] = [*override_lists[0], *override_lists[1]]
    return merged


def _plugin_files(raw: LocatedMap) -> list[str]:
    """The plug-in files that a suite file names."""
    plugin_names = raw["plugins"]
    if not (isinstance(plugin_names, list) and all(isinstance(plugin, str) and plugin for plugin in plugin_names)):
        raise SpecError(f"{raw.place('plugins')}: expected a list of files such as [mine.py], got {plugin_names!r}")
    return plugin_names


def read_yaml(file: Path) -> LocatedMap:
    """A YAML 1.2 file as LocatedMaps. SpecError if it is unreadable, no mapping, or gives a key twice."""
    try:
        return parse(file.read_text(encoding="utf-8"), file)
    except UnicodeDecodeError:
        raise SpecError(f"{file} is not a suite file: it is not UTF-8 text{_how_to_read(file)}") from None
    except OSError as error:
        raise SpecError(f"{file}: {error.strerror or error}") from None


def _how_to_read(file: Path) -> str:
    """The end of a message about a file that is no suite: what it is for, as far as its name tells."""
    if file.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.xz")):
        return f" (results are read by fatbench import {file}, and then by the name of their suite)"
    return f" (a database is named with --db {file})" if file.suffix in (".db", ".sqlite") else ""


@functools.lru_cache(maxsize=256)
def parse(text: str, file: Path) -> LocatedMap:
    """The mapping of a file's text; errors as for `read_yaml`. The result is cached and must not be changed."""
    input_limits.check_characters(text, str(file))
    root = _parse(text, file)
    if "\\" in text or CONTROL.search(text):  # an escape such as "\\e" is a control character once it is read
        _demand_printable(root, str(file))
    return root


def _demand_printable(node: Any, location: str) -> None:
    """SpecError for a key or text with a control character other than tab and line end: a terminal would obey it."""
    keys = list(node) if isinstance(node, LocatedMap) else []
    for key in keys:
        _demand_printable(node[key], node.place(key))
    for item in node if isinstance(node, list) else ():
        _demand_printable(item, location)
    if character := CONTROL.search(node if isinstance(node, str) else "".join(keys)):
        raise SpecError(f"{location}: a control character (U+{ord(character[0]):04X})")


class _Composer(Composer):
    """ruamel's composer, stopped where a file is nested too deeply: its scanner takes the square of the depth."""

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
        error_mark = error.problem_mark
        key = re.search(r'duplicate key "?([^"\s]+)"?', str(error.problem or ""))
        raise SpecError(f"{file}:{error_mark.line + 1}: the key '{key[1] if key else '?'}' is given twice") from None
    except YAMLError as error:
        error_mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = f":{error_mark.line + 1}" if error_mark is not None else ""
        problem = getattr(error, "problem", None) or error
        hint = " (a value with a colon needs quotes)" if "mapping values are not allowed" in str(problem) else ""
        raise SpecError(f"{file}{line}: invalid YAML: {problem}{hint}") from None
    except Exception as error:  # a number of 5000 digits, the 45th of a month, !!int x: each its own kind of exception
        raise SpecError(f"{file}: invalid YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(tree, CommentedMap):
        raise SpecError(f"{file}: expected a mapping at the top level")
    input_limits.check_values(tree, _children, str(file))
    return _located(tree, file)


def _children(node: Any) -> list[Any]:
    if isinstance(node, CommentedMap):
        return list(node.values())
    return list(node) if isinstance(node, CommentedSeq) else []


def _located(node: Any, file: Path) -> Any:
    """ruamel's tree as LocatedMaps, lists and plain Python values."""
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
                input_limits.check_digits(str(node), str(file))
            return kind(node)
    return node
