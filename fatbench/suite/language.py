"""The language of suite files: axes, grid, overrides, perturbation, weights and evaluations become cells of a preset.

    Expansion(suite, "quick").plan()

Every name, key and value is checked against the function that will receive it, before any GPU time is spent.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fatbench.errors import SpecError, did_you_mean
from fatbench.settings import in_variant
from fatbench.suite import (
    calls,
    cells,
    confounders,
    external_models,
    facts,
    model,
    standard_attacks,
    threats,
    trees,
    tuning,
    weights,
)
from fatbench.suite.cells import Cell, Evaluation, Plan, TransferOrigin
from fatbench.suite.model import PERTURBATION, Condition, Evaluate, Key, Override, Perturbation, Preset, Transfer
from fatbench.suite.trees import Keys, Layer, Tree, merge

if TYPE_CHECKING:
    from fatbench.suite.tables import Contents

CELLS = 200_000  # the most of a preset, and of all presets of a suite: points of the grid times seeds
Point = tuple[tuple[str, str], ...]  # (axis, label) of each axis

# --- the points of the grid -----------------------------------------------------------------------------------------


def most_cells(contents: Contents) -> int:
    """An upper bound of the number of cells of all presets, without expanding them."""
    presets = contents.presets.values()
    return sum(_most_points(contents, preset) * len(preset.seeds or contents.seeds) for preset in presets)


def demand_few(number: int, location: str) -> None:
    """SpecError for more cells than a preset, or all presets together, may have."""
    if number > CELLS:
        raise SpecError(f"{location}: {number} cells, at most {CELLS} are allowed: split the suite, or use fewer seeds")


def _kept_labels(contents: Contents, preset: Preset) -> dict[str, list[str]]:
    """axis -> the labels that the preset keeps."""
    return {axis: (preset.axes or {}).get(axis, list(labels)) for axis, labels in contents.axes.items()}


def _most_points(contents: Contents, preset: Preset) -> int:
    axes = _kept_labels(contents, preset)
    product = axes if contents.grid.product is None else contents.grid.product
    points = math.prod(len(axes[axis]) for axis in product)
    return points + sum(math.prod(map(len, item.values())) for item in [*contents.grid.include, *preset.include])


def points(contents: Contents, preset: Preset) -> list[Key]:
    """The points of a preset, each once: the product of the named axes, and those under `include`.

    They are sorted by axes and labels as these are ordered in the file.
    """
    grid, axes = contents.grid, _kept_labels(contents, preset)
    product = axes if grid.product is None else grid.product
    has_include = "include" in grid.model_fields_set
    if axes and not product and not has_include:
        problem = "the grid is empty: name an axis in 'product', or points in 'include'"
        raise SpecError(problem).below("product").below("grid")
    combinations = itertools.product(*(axes[axis] for axis in product)) if product or not has_include else ()
    of_suite = itertools.chain(
        (dict(zip(product, labels, strict=True)) for labels in combinations), _included(grid.include)
    )
    kept = {axis: set(labels) for axis, labels in axes.items()}
    of_suite_kept = (point for point in of_suite if all(label in kept[axis] for axis, label in point.items()))
    position = {axis: {label: i for i, label in enumerate(labels)} for axis, labels in contents.axes.items()}
    key_by_position = {
        tuple(position[axis][point[axis]] if axis in point else -1 for axis in axes): point
        for point in itertools.chain(of_suite_kept, _included(preset.include))
    }
    in_order = (key_by_position[place] for place in sorted(key_by_position))
    return [{axis: point[axis] for axis in axes if axis in point} for point in in_order]


def _included(include: Sequence[Condition]) -> Iterator[Key]:
    """The points of `include`, each item of which maps axes to lists of labels and stands for all combinations."""
    for item in include:
        for combination in itertools.product(*item.values()):
            yield dict(zip(item, combination, strict=True))


# --- the cells of a preset ------------------------------------------------------------------------------------------


class Suite(Protocol):
    """What an expansion needs of a `files.Suite`."""

    @property
    def name(self) -> str: ...
    @property
    def file(self) -> Path: ...
    @property
    def contents(self) -> Contents: ...
    @property
    def tree(self) -> Tree: ...
    @property
    def places(self) -> trees.Places: ...
    @property
    def settings(self) -> Tree: ...
    def beside(self, name: str) -> Suite: ...
    def preset(self, name: str) -> str: ...
    def trials(self) -> Suite: ...


class Expansion:
    """One preset of a suite, which `plan` turns into cells.

    attacks: further attacks for all cells. refuse: False to read results: then no method is imported to ask whether it
    can run in a cell. below: (suite, labels) of the cells that start from these cells, outermost first.
    """

    def __init__(
        self,
        suite: Suite,
        preset: str,
        attacks: Sequence[str] = (),
        refuse: bool = True,
        below: tuple[tuple[str, str], ...] = (),
    ) -> None:
        contents, preset = suite.contents, suite.preset(preset)
        if preset not in contents.presets:
            raise SpecError(f"suite '{suite.name}' has no preset '{preset}'{did_you_mean(preset, contents.presets)}")
        self.suite, self.contents, self.name, self.preset = suite, contents, preset, contents.presets[preset]
        self.attacks, self.refuse, self.below = external_models.described(attacks), refuse, below
        of_preset: Keys = ("presets", preset)
        variant, _ = in_variant(preset, contents.variants)
        of_variant: Layer = ("variants", variant), contents.variants.get(variant, {})
        self.base: list[Layer] = [(("base",), contents.base), of_variant, ((*of_preset, "base"), self.preset.base)]
        # a preset's word comes after the grid's: the last override of a setting holds
        self.overrides: list[tuple[Keys, Override]] = [
            *((("grid", "overrides", i, "set"), override) for i, override in enumerate(contents.grid.overrides)),
            ((*of_preset, "set"), Override(set=self.preset.set)),
            *(
                (tuning.place(contents, override) or (*of_preset, "overrides", i, "set"), override)
                for i, override in enumerate(self.preset.overrides)
            ),
            *self._tuned(),
            *([(("--set",), Override(set=suite.settings))] if suite.settings else ()),
        ]
        written = suite.tree.get("evaluate") or {}
        self.evaluate_layers: list[Layer] = [
            (("evaluate",), _without_nulls(written, self.attacks)),
            ((*of_preset, "evaluate"), _without_nulls(self.preset.evaluate, self.attacks)),
        ]
        self.evaluate = self._read_evaluate(self.evaluate_layers)
        named = [label for label, settings in self.attacks.items() if settings is None]
        if taken := next(
            (label for label in self.attacks if label in self.evaluate.attacks and label not in named), None
        ):
            problem = f"the suite has an attack '{taken}': name yours, NAME={{name: ...}}"
            raise SpecError(problem, option="attack")
        standard_attacks.demand_known(named, [*contents.evaluate.attacks, *self.evaluate.attacks])
        on = self.evaluate.on["clients"] if isinstance(self.evaluate.on, dict) else ()
        for key, label in [*(("limit", label) for label in self.evaluate.limit), *(("on", label) for label in on)]:
            if label not in {*self.evaluate.attacks, *self.evaluate.transfer, *self.attacks}:
                hint = did_you_mean(label, self.evaluate.attacks)
                error = SpecError(f"no attack is named '{label}'{hint}").below(label).below(key)
                raise self._placed(error, self.evaluate_layers)
        # points with the same first labels share the merged settings of these, and with the same overrides evaluations
        self._settings_of_labels = functools.cache(self._merged_labels)
        self._evaluations: dict[object, tuple[Evaluate, tuple[Evaluation, ...], list[Layer]]] = {}
        self._origin_cells: dict[tuple[str, str], list[Cell]] = {}  # (suite, labels) -> its cells

    def _tuned(self) -> Iterator[tuple[Keys, Override]]:
        """The choices of a suite that tunes its rows; none before its trials have run, as `untuned` then says."""
        self.tuned = self.untuned = ""
        if (tune := self.contents.tune) is None:
            return
        command = tuning.command(self.suite.name, self.suite.file, self.name, " --tune")
        file = tuning.tuned_file(self.suite.name, self.name, self.suite.file.parent)
        if not file.is_file():
            self.untuned = command
            return
        tuned = trees.read(file)[0]
        cells_of_trials = Expansion(self.suite.trials(), self.name, refuse=False).plan().cells
        for override in tuning.overrides(tune, tuned, cells_of_trials, file, command):
            yield tuning.SETTINGS, override
        self.tuned = tuning.sentence(tune, tuned)

    def plan(
        self,
        seeds: Sequence[int] | None = None,
        condition: Condition | None = None,
        points_wanted: Collection[Point] | None = None,
    ) -> Plan:
        """All points of the grid as checked cells, in the order of the file; see `files.Suite.plan`.

        condition: axis -> labels of the points to expand; none need match. points_wanted: the only points to expand.
        """
        suite, contents, preset = self.suite, self.contents, self.preset
        seeds = seeds if seeds is not None else preset.seeds or contents.seeds
        # before anything is expanded: a typing mistake may ask for a million cells
        demand_few(_most_points(contents, preset) * len(seeds), f"{suite.file}: preset '{self.name}'")
        planned: list[Cell] = []
        excluded: list[tuple[Key, str]] = []
        evaluate_by_cell: dict[int, tuple[Evaluate, list[Layer]]] = {}  # index of a cell that has transfers
        try:
            keys = points(contents, preset)
        except SpecError as error:
            raise error.at(suite.places) from None
        for key in keys:
            if condition is not None and not _matches(key, condition):
                continue
            if points_wanted is not None and tuple(key.items()) not in points_wanted:
                continue
            if reason := next((item.reason for item in contents.grid.exclude if _matches(key, item.when)), None):
                excluded.append((key, reason))
                continue
            cells_of_point, transferring = self._cells_of_point(key, seeds)
            if transferring is not None:
                evaluate_by_cell |= dict.fromkeys(range(len(planned), len(planned) + len(cells_of_point)), transferring)
            planned += cells_of_point
        if not planned and condition is None:
            raise SpecError(f"{suite.file}: preset '{self.name}' leaves the grid empty")
        if self.attacks and not any(cell.evaluations for cell in planned):
            where = f"suite '{suite.name}', preset '{self.name}',"
            raise SpecError(f"{where} evaluates no model on test images", option="attack")
        if evaluate_by_cell:
            planned = self._with_transfers(planned, evaluate_by_cell)
        checkpoints: list[str] = [*self.evaluate.checkpoints]
        return Plan(
            suite.name, self.name, preset.note, planned, checkpoints, excluded, tuple(self.attacks), contents.baseline,
            tuned=self.tuned, untuned=self.untuned,
        )  # fmt: skip

    def _cells_of_point(self, key: Key, seeds: Sequence[int]) -> tuple[list[Cell], tuple[Evaluate, list[Layer]] | None]:
        """(the cells of a point, one a seed; `evaluate` and its layers, if it has transfers)."""
        labels_text = ", ".join(f"{axis}={label}" for axis, label in key.items()) or "base"
        location = f"{self.suite.file}: {labels_text} ({self.name})"
        spec, layers = self._settings(key)
        try:
            task = model.read(Perturbation, spec.pop(PERTURBATION)) if PERTURBATION in spec else None
        except SpecError as error:
            raise self._placed(error.below(PERTURBATION), layers) from None
        overrides = tuple(i for i, item in enumerate(self.evaluate.overrides) if _matches(key, item.when))
        shared = overrides, task and task.of_evaluation()
        if shared not in self._evaluations:
            self._evaluations[shared] = self._evaluations_with(overrides, task, layers)
        evaluate, evaluations, evaluate_layers = self._evaluations[shared]
        if evaluate.unseen:  # it changes who trains, so the cell itself has it
            spec = {"unseen": evaluate.unseen, **spec}
        paths = confounders.written_paths(key, self.contents.axes, [override for _, override in self.overrides])
        planned = []
        for origin_cell, spec_with_weights, origin_seeds in self._with_weights(spec, layers, seeds):
            try:
                cell = calls.check_keys("Experiment", spec_with_weights, task)
            except SpecError as error:
                placed = self._placed(error, layers)
                if str(self.suite.file) not in str(placed):  # in a line of an extended suite: which point?
                    placed.args = (f"{placed} [{location}]",)
                raise placed from None
            if self.refuse:
                self._demand_possible(cell, evaluations, layers, location)
            _demand_numbers(self.evaluate.checkpoints, cell, location)
            if origin_cell is not None:
                _demand_same_network(origin_cell, cell, location)
            has_radius = any("eps" in call for call in (*cell.walk(), *(item.attack for item in evaluations)))
            of_task = str(task) if task and has_radius else ""
            short = calls.without_defaults(cell)
            for seed in origin_seeds:  # checked once: cells of a point differ by their seed alone
                seeded = calls.Call(cell.signature, {**cell, "seed": seed})
                id = cells.digest({**short, "seed": seed})[:12]
                planned.append(Cell(id, key, seeded, evaluations, origin_cell, perturbation=of_task, written=paths))
        return planned, (evaluate, evaluate_layers) if evaluate.transfer else None

    def _merged_labels(self, point: Point) -> tuple[Tree, tuple[Layer, ...]]:
        """The base with what the labels of a point set, and the layers that make it up."""
        if not point:
            return functools.reduce(merge, (tree for _, tree in self.base)), tuple(self.base)
        tree, layers = self._settings_of_labels(point[:-1])
        axis, label = point[-1]
        override = self.contents.axes[axis][label]
        return merge(tree, override), (*layers, (("axes", axis, label), override))

    def _settings(self, key: Key) -> tuple[Tree, list[Layer]]:
        """A point's settings with overrides and seed 0, and the layers that make them up."""
        spec, layers_of_labels = self._settings_of_labels(tuple(key.items()))
        layers = [*layers_of_labels]
        for keys, override in self.overrides:
            if override.set and override.holds(key, spec):
                spec = merge(spec, override.set)
                layers.append((keys, override.set))
        if "seed" in spec:
            error = SpecError("set seeds with 'seeds' at the top of the suite, not in a cell").below("seed")
            raise self._placed(error, layers)
        malicious = spec.get("malicious")
        if isinstance(malicious, dict) and malicious.get("attack", "") is None:
            return {**spec, "malicious": None, "seed": 0}, layers  # without an attack all clients are honest
        return {**spec, "seed": 0}, layers

    def _demand_possible(
        self, cell: calls.Call, evaluations: Sequence[Evaluation], layers: Sequence[Layer], location: str
    ) -> None:
        """SpecError if a function refuses the cell, or an attack needs more than the suite's threat model."""
        cells.demand_possible(cell, location)
        if self.contents.threat is not None:
            try:
                threats.refuse(cell, self.contents.threat)
            except SpecError as error:
                stated = self.suite.places(("threat",))
                raise SpecError(f"{self._placed(error, layers)} ({stated})") from None
        for item in evaluations:
            facts.refuse(calls.call("Attack", item.attack), cell, f"{location}: evaluate: {item.label}")
            cells.demand_own_images(cell, item, f"{location}: evaluate: {item.label}")

    def _placed(self, error: SpecError, layers: Sequence[Layer]) -> SpecError:
        """The error with the place of its keys in the layers of a cell, or of `evaluate`."""
        return error.at(lambda keys: self.suite.places.of_setting(layers, keys))

    # --- evaluations ---

    def _read_evaluate(self, layers: Sequence[Layer]) -> Evaluate:
        tree = functools.reduce(merge, (tree for _, tree in layers))
        try:
            return model.read(Evaluate, tree, axes=self.contents.axes)
        except SpecError as error:
            raise self._placed(error, layers) from None

    def _evaluations_with(
        self, overrides: tuple[int, ...], task: Perturbation | None, layers_of_point: Sequence[Layer]
    ) -> tuple[Evaluate, tuple[Evaluation, ...], list[Layer]]:
        """(`evaluate` with some of its overrides, the evaluations in it, the layers that make it up)."""
        evaluate, layers = self.evaluate, list(self.evaluate_layers)
        eps = task.eps if task is not None and task.norm == "Linf" else None
        section = self.evaluate_layers["overrides" in self.preset.evaluate][0]
        for i in overrides:
            override, removed = self.evaluate.overrides[i].set, self.evaluate.attacks
            if isinstance(attacks := override.get("attacks"), dict):  # without those that the preset removed with null
                attacks = {label: attack for label, attack in attacks.items() if removed.get(label, "") is not None}
                override = {**override, "attacks": attacks}
            override = _completed(override, evaluate.attacks, self.attacks, eps)
            layers.append(((*section, "overrides", i, "set"), override))
            evaluate = self._read_evaluate(layers)
        # a point without any attack, such as one of gradient inversion, gets none from `--attack`
        if self.attacks and any(attack is not None for attack in evaluate.attacks.values()):
            missing = _missing_attacks(evaluate.attacks, self.attacks, eps)
            layers.append((("--attack",), {"attacks": missing}))
            evaluate = self._read_evaluate(layers)
        evaluations = []
        for label, attack in evaluate.attacks.items():
            try:
                for metric, spec, swept in _sweep(label, attack, evaluate.attacks) if attack is not None else ():
                    call = calls.check_keys("Attack", spec, task)
                    sweep, is_own = label if swept else "", self.attacks.get(label) is not None
                    n, on = images_of(evaluate, label), evaluate.on_clients(label)
                    evaluations.append(
                        Evaluation(metric, call, n, evaluate.batch, sweep, swept=swept, added=is_own, on=on)
                    )
            except SpecError as error:
                raise self._placed(error.below(label).below("attacks"), [*layers_of_point, *layers]) from None
        return evaluate, tuple(evaluations), layers

    def _with_transfers(
        self, planned: Sequence[Cell], evaluate_by_cell: Mapping[int, tuple[Evaluate, list[Layer]]]
    ) -> list[Cell]:
        """The cells, those in `evaluate_by_cell` (by index) with the evaluations of their transfers added."""
        cell_by_point = {(frozenset(cell.key.items()), int(cell.spec["seed"])): cell for cell in planned}
        labels = _kept_labels(self.contents, self.preset)
        with_transfers = list(planned)
        for index, (evaluate, layers) in evaluate_by_cell.items():
            cell = planned[index]
            added = list[Evaluation]()
            for label, transfer in evaluate.transfer.items():
                try:
                    if transfer is not None:
                        origins = _origins_of_transfer(cell, transfer, cell_by_point, labels)
                        added += _transferred(label, transfer, evaluate, [*cell.evaluations, *added], origins)
                except SpecError as error:
                    raise self._placed(error.below(label).below("transfer"), layers) from None
            with_transfers[index] = replace(cell, evaluations=(*cell.evaluations, *added))
        return with_transfers

    # --- the weights of other cells ---

    def _with_weights(
        self, spec: Tree, layers: Sequence[Layer], seeds: Sequence[int]
    ) -> Iterator[tuple[Cell | None, Tree, list[int]]]:
        """(origin or None, settings that name it, seeds) for each cell whose weights cells of some seeds start from."""
        model = spec["model"] if isinstance(spec.get("model"), dict) else {}
        keys, node = next((found for found in weights.of_models(model) if isinstance(found[1], dict)), ((), None))
        if node is None:
            yield None, spec, list(seeds)
            return
        seeds_by_origin: dict[str, tuple[Cell, list[int]]] = {}
        try:
            for seed in seeds:
                origin_cell = self._origin(node, seed)
                seeds_by_origin.setdefault(origin_cell.id, (origin_cell, []))[1].append(seed)
        except SpecError as error:
            where = self.suite.places.of_setting(layers, ("model", *keys, "suite"))
            raise SpecError(f"{where}: weights: {error}") from None
        for origin_cell, origin_seeds in seeds_by_origin.values():
            origin: Any = f"{weights.CELL}{origin_cell.id}"
            for key in reversed(("model", *keys)):
                origin = {key: origin}
            yield origin_cell, merge(spec, origin), origin_seeds

    def _origin(self, node: Tree, seed: int) -> Cell:
        """The cell of this preset behind `{suite: NAME, axis: label, ...}` with this seed, or the only one."""
        labels = {axis: str(label) for axis, label in node.items() if axis != "suite"}
        origin_key = (str(node.get("suite")), ", ".join(f"{axis} {label}" for axis, label in labels.items()))
        if origin_key not in self._origin_cells:
            self._origin_cells[origin_key] = self._cells_behind(node, labels, origin_key)
        origin_cells = self._origin_cells[origin_key]
        of_seed = [cell for cell in origin_cells if len(origin_cells) == 1 or cell.spec["seed"] == seed]
        if not of_seed:
            raise SpecError(f"'{origin_key[0]}' has no cell of seed {seed} ({origin_key[1]})")
        return of_seed[0]

    def _cells_behind(self, node: Tree, labels: dict[str, str], origin_key: tuple[str, str]) -> list[Cell]:
        """The cells of one point, one a seed. SpecError unless labels, preset and suite lead to exactly one point."""
        if origin_key in self.below:
            chain = " -> ".join(f"{suite} ({label_text})" for suite, label_text in (*self.below, origin_key))
            raise SpecError(f"a cell cannot start from its own weights: {chain}")
        if "suite" not in node:
            raise SpecError("'suite' is missing: name the suite whose cell has the weights")
        origin_suite = self.suite.beside(origin_key[0])
        axes = origin_suite.contents.axes
        try:
            for axis, label in labels.items():
                model.known_label(model.known_axis(axis, axes), label, axes)
        except ValueError as error:
            raise SpecError(str(error)) from None
        condition = {axis: [label] for axis, label in labels.items()}
        expansion = Expansion(origin_suite, self.name, refuse=self.refuse, below=(*self.below, origin_key))
        origin_cells = expansion.plan(condition=condition).cells
        keys = list({tuple(cell.key.items()): cell.key for cell in origin_cells}.values())
        if len(keys) != 1:
            count_text = f"{len(keys)} cells, not one" if keys else "no cell"
            varying_axes = [axis for axis in axes if len({key.get(axis) for key in keys}) > 1]
            hint = f" (add {' and '.join(varying_axes)})" if varying_axes else ""
            label_text = f" with {origin_key[1]}" if origin_key[1] else ""
            raise SpecError(f"preset '{expansion.name}' of '{origin_suite.name}' has {count_text}{label_text}{hint}")
        return [replace(cell, evaluations=(), suite=origin_suite.name, preset=expansion.name) for cell in origin_cells]


def _matches(key: Key, condition: Mapping[str, Sequence[str]]) -> bool:
    """Whether a point has, on each axis of a condition, one of its labels."""
    return all(key.get(axis) in labels for axis, labels in condition.items())


def _demand_same_network(origin_cell: Cell, spec: Mapping[str, Any], location: str) -> None:
    """SpecError if an origin's weights do not fit the network; the head may differ, a new one starts at random."""
    origin_model, own_model = origin_cell.spec["model"], spec["model"]
    origin = f"{weights.CELL}{origin_cell.id}"
    for key in next(keys[:-1] for keys, text in weights.of_models(own_model) if text == origin):  # in a network in it
        own_model = own_model[key]
    if origin_model.get("lora"):
        raise SpecError(
            f"{location}: model: weights: cell {origin_cell.id} of '{origin_cell.suite}' trained changes of low rank"
            f" (lora: {origin_model['lora']}), which no other network takes: name a cell without lora"
        )
    for key in dict.fromkeys([*origin_model, *own_model]):
        # a head of another kind or width starts at random
        if key in ("weights", "head") or key.startswith("head_") or origin_model.get(key) == own_model.get(key):
            continue
        if key == "lora" and not origin_model.get(key):  # changes begin at 0 beside the weights
            continue
        raise SpecError(
            f"{location}: model: weights: cell {origin_cell.id} of '{origin_cell.suite}'"
            f" ({', '.join(origin_cell.key.values())}) has another network:"
            f" its {key} is {origin_model.get(key)}, that of this cell {own_model.get(key)}"
        )
    origin_channels, own_channels = (facts.of_data(cell["data"]).channels for cell in (origin_cell.spec, spec))
    # None: only reading the data tells
    if origin_channels and own_channels and origin_channels != own_channels:
        raise SpecError(
            f"{location}: model: weights: cell {origin_cell.id} was trained on images of "
            f"{origin_channels} channels, this cell has {own_channels}"
        )


def _demand_numbers(checkpoints: Sequence[str], spec: Mapping[str, Any], location: str) -> None:
    """SpecError if a checkpoint is chosen by numbers that the cell does not measure."""
    if "best-val" in checkpoints and not spec["validation"]:
        raise SpecError(f"{location}: checkpoint best-val needs held-out images: set 'validation: N'")
    # all others are the best by a monitored number
    if set(checkpoints) - {"last"} and spec["monitor"] is None:
        raise SpecError(
            f"{location}: checkpoints {', '.join(checkpoints)} need 'monitor', an attack run during training"
        )


# --- evaluations ----------------------------------------------------------------------------------------------------


def metric_of(label: str, value_name: str) -> str:
    """The metric for one value or origin of several: "pgd20_2_255", "moved_fedavg"."""
    return f"{label}_{re.sub('[^0-9a-z]+', '_', value_name.lower()).strip('_')}"


def images_of(evaluate: Evaluate, label: str) -> int | None:
    """The number of test images for an attack; None for all of the cell."""
    numbers = [number for number in (evaluate.n, evaluate.limit.get(label)) if number is not None]
    return min(numbers, default=None)


def _without_nulls(evaluate: Tree, added_labels: Collection[str]) -> Tree:
    """The `evaluate` of a file without the nulls that would remove one of these attacks."""
    kept = dict(evaluate)
    if isinstance(attacks := evaluate.get("attacks"), dict):
        kept["attacks"] = {k: v for k, v in attacks.items() if v is not None or k not in added_labels}
    if isinstance(overrides := evaluate.get("overrides"), list):
        kept["overrides"] = [
            {**override, "set": _without_nulls(override["set"], added_labels)}
            if isinstance(override, dict) and isinstance(override.get("set"), dict)
            else override
            for override in overrides
        ]
    return kept


def _missing_attacks(attacks: Tree, added: Mapping[str, Tree | None], radius: Any) -> dict[str, Tree]:
    """label -> settings of the added attacks that a suite does not describe, at its radius.

    added: label -> settings, where they are written out. radius: of the suite's perturbation; None for that of its
    other attacks.
    """
    with_radius = [one for one in attacks.values() if isinstance(one, Mapping) and "eps" in one]
    radii = [attack["eps"] for attack in with_radius if "norm" not in attack]
    eps = radius if radius is not None else radii[0] if radii else standard_attacks.DEFAULT_RADIUS
    eps = str(eps[-1] if isinstance(eps, list) else eps)
    settings_by_name = standard_attacks.settings(eps)
    found: dict[str, Tree | None] = {}
    for label, settings in added.items():
        found[label] = settings_by_name.get(label) if settings is None else settings
        if settings is not None and "norm" not in settings:
            found[label] = external_models.with_radius(settings, eps, is_bare=False)
    return {label: settings for label, settings in found.items() if settings and attacks.get(label) is None}


def _completed(override: Tree, suite_attacks: Tree, added: Mapping[str, Tree | None], radius: Any) -> Tree:
    """An override of `evaluate`, in which partial settings of an added attack are completed by the standard ones."""
    attacks = override.get("attacks")
    if not isinstance(attacks, dict):
        return override
    incomplete = {
        label: settings
        for label, settings in added.items()
        if suite_attacks.get(label) is None and "name" not in (attacks.get(label) or {"name": ""})
    }
    missing = _missing_attacks(suite_attacks, incomplete, radius)
    completed = {label: merge(attack, attacks[label]) for label, attack in missing.items()}
    return {**override, "attacks": {**attacks, **completed}} if completed else override


def _sweep(label: str, attack: Any, attacks: Tree) -> list[tuple[str, Any, str]]:
    """(metric, attack, setting) of each value of a list such as `eps: [2/255, 4/255]`: pgd20_2_255, pgd20_4_255.

    The attack itself, if none of its settings is a list.
    """
    lists = [key for key, value in attack.items() if isinstance(value, list)] if isinstance(attack, dict) else []
    if not lists:
        return [(label, attack, "")]
    swept, *further_lists = lists
    if further_lists:
        problem = f"'{swept}' already has a list: only one setting of an attack may"
        raise SpecError(problem).below(further_lists[0])
    if not attack[swept]:
        raise SpecError("the list is empty: give one, such as eps: [2/255, 4/255, 8/255]").below(swept)
    swept_attacks: list[tuple[str, Any, str]] = []
    for value in attack[swept]:
        name = metric_of(label, str(value))
        if name in attacks or name in [metric for metric, _, _ in swept_attacks]:
            raise SpecError(f"two metrics have the same name, '{name}'").below(swept)
        swept_attacks.append((name, {**attack, swept: value}, swept))
    return swept_attacks


# An attack computed on one model and evaluated on another:
#     moved: {attack: pgd20, axis: method}     on the cells that differ from this one in `method` alone
#     among: {attack: pgd20, clients: 5}       on five clients of the round, before averaging, and evaluated on all five
# There is one evaluation per model on which the attack is computed. Both models must take the same images.


def _transferred(
    label: str,
    transfer: Transfer,
    evaluate: Evaluate,
    evaluations: Sequence[Evaluation],
    origins: Iterator[TransferOrigin],
) -> Iterator[Evaluation]:
    """The evaluations of a transfer; none if the preset removes its attack. evaluations: those that the cell has."""
    name = transfer.attack
    if label in evaluate.attacks:
        raise SpecError(f"'{label}' is also an attack: rename the transfer")
    if name not in evaluate.attacks:
        raise SpecError(f"no attack is named '{name}'{did_you_mean(name, evaluate.attacks)}").below("attack")
    if any(evaluation.sweep == name and evaluation.origin is None for evaluation in evaluations):
        raise SpecError(f"'{name}' has a list of radii: a transfer needs an attack with one radius").below("attack")
    direct = next((item for item in evaluations if item.label == name and item.origin is None), None)
    if direct is None:
        return
    if direct.on:
        raise SpecError(f"'{name}' is on the clients' own images: a transfer needs an attack on test images").below(
            "attack"
        )
    n = images_of(evaluate, label) if label in evaluate.limit else direct.n
    used_names = {evaluation.label for evaluation in evaluations}
    for origin in origins:
        metric = metric_of(label, origin.name)
        if metric in used_names:
            raise SpecError(f"two metrics have the same name, '{metric}'")
        used_names.add(metric)
        yield Evaluation(metric, direct.attack, n, direct.batch, label, origin)


def _origins_of_transfer(
    cell: Cell,
    transfer: Transfer,
    cell_by_point: Mapping[tuple[frozenset[tuple[str, str]], int], Cell],
    axes: Mapping[str, Sequence[str]],
) -> Iterator[TransferOrigin]:
    """The models on which the attack is computed. cell_by_point: (labels of a point, seed) -> its cell."""
    if transfer.axis is None:
        if not cell.spec["algorithm"].get("local"):
            raise SpecError(f"{cell.spec['algorithm']['name']} does not train models on clients").below("clients")
        is_known = cell.spec["partition"].get("clients") is not None
        if is_known and (cohort := facts.cohort(cell.spec)) < transfer.clients:
            problem = f"{transfer.clients} clients, but {cohort} take part in a round"
            raise SpecError(problem).below("clients")
        yield from (TransferOrigin(f"client {k}", client=k, clients=transfer.clients) for k in range(transfer.clients))
        return
    labels = axes[transfer.axis] if transfer.axis in cell.key else ()
    for label in labels if transfer.labels is None else [label for label in labels if label in transfer.labels]:
        point = frozenset({**cell.key, transfer.axis: label}.items())
        if (origin_cell := cell_by_point.get((point, int(cell.spec["seed"])))) is None:
            continue  # the grid leaves this point out
        for key in ("data", "size"):
            if origin_cell.spec[key] != cell.spec[key]:
                values = (one.spec[key] or "as stored" for one in (origin_cell, cell))
                origin_value, own_value = (value["name"] if isinstance(value, Mapping) else value for value in values)
                problem = (
                    f"both models must be attacked on the same images:"
                    f" {label} has {key} {origin_value}, {cell.key[transfer.axis]} has {own_value}"
                )
                raise SpecError(problem).below("axis")
        yield TransferOrigin(label, origin_cell.id, origin_cell.spec)
