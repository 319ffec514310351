"""Suite files: finding them by name or path, and reading them.

The format is described in docs/suites.md. `load` checks the structure of a file; `Suite.plan` checks the cells of a
preset, against the functions that will receive their settings.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fatbench.errors import SpecError, did_you_mean
from fatbench.settings import IN_VARIANT, in_variant, of_variant
from fatbench.suite import asked, language, model, plugins, signatures, trees, tuning
from fatbench.suite.cells import Plan
from fatbench.suite.declared_contrasts import Tests
from fatbench.suite.filters import select
from fatbench.suite.folders import available as available
from fatbench.suite.folders import folders as folders
from fatbench.suite.folders import own_files
from fatbench.suite.tables import Contents, Figure, Table
from fatbench.suite.trees import Keys, Places, Source, Tree, merge


@dataclass(frozen=True)
class Suite:
    """A checked suite file."""

    file: Path
    contents: Contents
    tree: Tree = field(default_factory=dict, repr=False)  # the file as written, merged over the suite that it extends
    places: Places = field(default_factory=Places)
    settings: Tree = field(default_factory=dict)  # of `--set`, over all other overrides of every cell
    variant: str = ""  # that its name stands for, see `IN_VARIANT`

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
        language.demand_few(language.most_cells(self.contents), f"{self.file}: all presets together")
        variants = [self.variant] if self.variant else []
        return [name for name in self.contents.presets if in_variant(name, variants)[0] == self.variant]

    def preset(self, name: str) -> str:
        """The preset of this name in the variant of the suite."""
        own = of_variant(self.variant, name)
        return own if own in self.contents.presets else name

    def axes(self) -> dict[str, list[str]]:
        return {axis: list(labels) for axis, labels in self.contents.axes.items()}

    def node(self, section: str, name: str) -> tuple[Keys, Tree]:
        """(keys, mapping as written) of the table, figure or family of tests of this name."""
        nodes = self.tree.get(section)
        if isinstance(nodes, dict):
            return (section,), nodes
        items = enumerate(nodes or ())
        return next(((section, i), node) for i, node in items if name in (node.get("id"), node.get("family")))

    def plan(
        self,
        preset: str = "paper",
        seeds: Sequence[int] | None = None,
        where: str | None = None,
        attacks: Sequence[str] = (),
        refuse: bool = True,
    ) -> Plan:
        """The cells and evaluations of a preset.

        where: a filter. attacks: further attacks for all cells, as text {name: pgd, ...}, or by their names in the
        suite. refuse: False to read results: then no method is imported to ask whether it can run in a cell.
        SpecError for an unknown preset or an invalid cell, NothingMatched if `where` selects no cell.
        """
        expansion = language.Expansion(self, preset, attacks, refuse)
        try:
            plan = expansion.plan(seeds)
        except SpecError:
            if not (self.settings and where):
                raise
            # a setting of `--set` may suit only the selected cells: find them without it, then expand them alone
            wanted_cells = replace(self, settings={}).plan(preset, seeds, where, attacks, refuse).cells
            plan = expansion.plan(seeds, points_wanted={tuple(cell.key.items()) for cell in wanted_cells})
        return select(plan, where) if where else plan

    def trials(self) -> Suite:
        """The suite of the cells that its section `tune` tries. SpecError: it has none."""
        try:
            tree = tuning.trials(self.contents, self.tree)
        except SpecError as error:
            raise error.at(self.places) from None
        of_trials = read_suite(tree, self.file, self.places)
        settings = split_settings(self.name)[1]
        return override_settings(of_trials, settings) if settings else of_trials

    def beside(self, name: str) -> Suite:
        """The suite that this one names by its file, which may lie beside this one, or by its name."""
        neighbour = self.file.parent / name
        return self if name == self.name else load(str(neighbour) if is_path(name) and neighbour.is_file() else name)


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
        if name in IN_VARIANT:
            return locate(IN_VARIANT[name][0])
        neighbour = _suite_file(name)
        hint = f" (did you mean '{neighbour}'?)" if neighbour else did_you_mean(name, [*known_suites, *own_suites])
        if os.path.isfile(name) and (how_to_read := trees.how_to_read(Path(name))):
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
    try:
        file = locate(name)
    except SpecError:
        path = Path(name)
        tuned = path.with_name(f"{path.stem.removesuffix(tuning.SUFFIX)}{path.suffix}")
        if tuned == path:
            raise
        return load("+".join([str(tuned), *settings])).trials()
    tree, sources = _resolve(file)
    if len(by_variant := _by_variant(tree)) > 1:
        named = [{of_variant(v, key): one for key, one in it["presets"].items()} for v, it in by_variant.items()]
        tree = {**tree, "presets": functools.reduce(merge, named)}
    places = Places(str(file), tuple(sources))
    for plugin in tree.get("plugins", ()):
        plugins.add(Path(plugin), places(("plugins",)))
    suite = read_suite(tree, file, places)
    suite = replace(suite, variant="" if name == suite.name else IN_VARIANT.get(name, ("", ""))[1])
    return override_settings(suite, settings) if settings else suite


def read_suite(tree: Tree, file: Path, places: Places | None = None) -> Suite:
    """The suite of a mapping that is already merged over the suite it extends."""
    places = places or Places(str(file))
    try:
        contents = model.read(Contents, tree, axes={}, folders=[file.parent, *folders()])
    except SpecError as error:
        raise error.at(places) from None
    return Suite(file, contents, tree, places)


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
            raise SpecError(
                f"a cell has no setting '{key}' (did you mean '{paths[0]}={value}'?)", option=f"set {setting}"
            )
    contents = suite.contents.model_copy(
        update={"name": "+".join([suite.name, *settings]), "title": f"{suite.title}, {', '.join(settings)}"}
    )
    return replace(suite, contents=contents, settings=functools.reduce(merge, map(_nested, settings)))


def _paths(base: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The paths of all settings of a mapping, as `--set` takes them: "algorithm.local.lr"."""
    for key, value in base.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")


def _nested(setting: str) -> Tree:
    """{algorithm: {local: {lr: 0.02}}} from "algorithm.local.lr=0.02"."""
    path, _, text = setting.partition("=")
    value: Any = trees.parse(f"value: {text}", Path("--set")).get("value")
    if not all(path.split(".")):
        raise SpecError(f"expected a setting such as algorithm.local.lr=0.02, got '{setting}'", option="set")
    return dict(trees.nested(path.split("."), value))


def name_with_settings(name: str, settings: Sequence[str] | None) -> str:
    """A suite's name with the texts of `--set`: "tiny+train=60". SpecError for a text that is no setting."""
    for setting in settings or ():
        if not SETTING.match(f"+{setting}"):
            raise SpecError(f"expected a setting such as algorithm.local.lr=0.02, got '{setting}'", option="set")
    return "+".join([name, *(settings or ())])


# --- a file, merged over the one that it extends --------------------------------------------------------------------


def _resolve(file: Path, children: tuple[Path, ...] = ()) -> tuple[Tree, list[Source]]:
    """The mapping of a suite file merged over that of the suite it extends, and the sources of both."""
    resolved = file.resolve()
    if resolved in children:
        chain = " -> ".join(path.stem for path in (*children, resolved))
        raise SpecError(f"{file}: a suite cannot extend itself ({chain})")
    child, source = trees.read(file)
    place = Places(str(file), (source,))
    if "plugins" in child:
        plugins = child["plugins"]
        if not (isinstance(plugins, list) and all(isinstance(plugin, str) and plugin for plugin in plugins)):
            problem = f"expected a list of files such as [mine.py], got {plugins!r}"
            raise SpecError(problem).below("plugins").at(place)
        child = {**child, "plugins": [str(resolved.parent / plugin) for plugin in plugins]}
    if "extends" not in child:
        return child, [source]
    name, variant = IN_VARIANT.get(str(child["extends"]), (str(child["extends"]), ""))
    try:
        neighbour = file.parent / name
        parent_file = neighbour if neighbour.is_file() else locate(name)
        if parent_file.suffix not in (".yaml", ".yml"):  # messages would repeat the keys of any other file
            raise SpecError(f"{name} is not a suite file: its name must end in .yaml")
    except SpecError as error:
        raise error.below("extends").at(place) from None
    parent, sources = _resolve(parent_file, (*children, resolved))
    try:
        tree, inherited = _extended(_by_variant(parent).get(variant, parent), child)
    except SpecError as error:
        raise error.at(place) from None
    return tree, [replace(source, inherited=inherited), *sources]


def _by_variant(tree: Tree) -> dict[str, Tree]:
    """A suite as others extend it: in none of its variants (""), and in each, whose presets have plain names."""
    variants, presets = tree.get("variants"), tree.get("presets")
    if not (isinstance(variants, dict) and isinstance(presets, dict)):
        return {"": tree}
    named: dict[str, Tree] = {"": {}, **{variant: {} for variant in variants}}
    for name, preset in presets.items():
        variant, plain = in_variant(name, variants)
        named[variant][plain] = preset
    bare = {**tree, "variants": {}, "presets": named[""]}
    of_variants = {
        variant: {**bare, "base": merge(tree.get("base"), settings), "presets": merge(named[""], named[variant])}
        for variant, settings in variants.items()
    }
    return {"": bare, **of_variants}


def _extended(parent: Tree, child: Tree) -> tuple[Tree, int]:
    """(the parent with the sections of the child, the number of inherited overrides of the grid)."""
    tree, inherited = {**parent, **child}, 0
    for key in parent.keys() & child.keys() & {"base", "axes", "evaluate", "presets"}:
        if isinstance(child[key], dict):
            tree[key] = merge(parent[key], child[key])
    if "plugins" in parent and "plugins" in child:
        tree["plugins"] = list(dict.fromkeys([*parent["plugins"], *child["plugins"]]))
    parent_axes, axes = (dict(axes) if isinstance(axes := suite.get("axes"), dict) else {} for suite in (parent, child))
    for axis in axes if parent_axes else ():  # else the label of a misspelt axis would be in every cell
        near = difflib.get_close_matches(axis, parent_axes, n=1, cutoff=0.8)
        if axis not in parent_axes and near:
            problem = f"no axis of the suite that this one extends (did you mean '{near[0]}'?)"
            raise SpecError(problem).below(axis).below("axes")
    parent_grid, grid = parent.get("grid"), child.get("grid")
    if isinstance(parent_grid, dict) and isinstance(grid, dict):  # one that names no points has those of the parent
        kept = () if {"product", "include"} & grid.keys() else ("product", "include", "exclude")
        tree["grid"] = {**{key: parent_grid[key] for key in kept if key in parent_grid}, **grid}
        above, own = (overrides or [] for overrides in (parent_grid.get("overrides"), grid.get("overrides")))
        if grid.get("replace_overrides") is not True and isinstance(above, list) and isinstance(own, list):
            tree["grid"]["overrides"], inherited = [*above, *own], len(above)
    for key in ("tables", "figures"):  # a parent without a name is only a fragment, whose tables stay as they are
        if key not in child and "name" in parent and isinstance(tree.get(key), list):
            tree[key] = [_with_new_rows(node, parent_axes, tree) for node in tree[key]]
    return tree, inherited


def _with_new_rows(node: Any, parent_axes: Tree, tree: Tree) -> Any:
    """An inherited table or figure; one that shows the baseline among other labels also shows the new labels."""
    condition = node.get("where") if isinstance(node, dict) else None
    for axis, shown_labels in condition.items() if isinstance(condition, dict) else ():
        parent_labels, labels = parent_axes.get(axis), (tree.get("axes") or {}).get(axis)
        if not (isinstance(parent_labels, dict) and isinstance(labels, dict) and isinstance(shown_labels, list)):
            continue
        if str(tree.get("baseline")) in map(str, shown_labels):
            new_labels = [label for label in labels if label not in parent_labels]
            return {**node, "where": {**node["where"], axis: [*shown_labels, *new_labels]}}
    return node


# --- the number of cells in each preset: of our suites from listing.json (`make settings`), of others by counting -----


def listing() -> Iterator[dict[str, Any]]:
    """{"name", "title", "presets": {preset: cells}} for each valid suite file, {"name", "error"} for an invalid one."""
    shipped_listing = json.loads(asked.LISTING.read_text(encoding="utf-8"))["suites"]
    for name in available():
        shipped = shipped_listing.get(name)
        if shipped is not None and shipped["sha256"] == _digest(name):
            yield {"name": name, "title": shipped["title"], "presets": shipped["presets"]}
            continue
        try:
            yield {"name": name, **_preset_sizes(name, _plans(name))}
        except SpecError as error:
            yield {"name": name, "error": error}


def shipped() -> str:
    """The content that listing.json should have, one line for each suite and each evaluation."""
    suites: dict[str, Any] = {}
    attacks: dict[str, Any] = {}
    for name in available():
        plans = _plans(name)
        suites[name] = {"sha256": _digest(name), **_preset_sizes(name, plans)}
        by_point = {id(cell.evaluations): cell.evaluations for plan in plans.values() for cell in plan.cells}
        evaluations = (evaluation for of_point in by_point.values() for evaluation in of_point)
        attacks |= {
            evaluation.id: asked.short_form(
                evaluation.attack, getattr(evaluation.origin, "stored_text", None), evaluation.on
            )
            for evaluation in evaluations
        }
    sections = {"suites": suites, "attacks": dict(sorted(attacks.items()))}
    texts = {
        section: ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())
        for section, entries in sections.items()
    }
    return "{\n" + ",\n".join(f" {json.dumps(section)}: {{\n{text}\n }}" for section, text in texts.items()) + "\n}\n"


def _plans(name: str) -> dict[str, Plan]:
    suite = load(name)
    return {preset: suite.plan(preset, refuse=False) for preset in suite.presets()}


def _preset_sizes(name: str, plans: Mapping[str, Plan]) -> dict[str, Any]:
    return {"title": load(name).title, "presets": {preset: len(plan.to_run()) for preset, plan in plans.items()}}


def _digest(name: str) -> str:
    return hashlib.sha256(locate(name).read_bytes()).hexdigest()
