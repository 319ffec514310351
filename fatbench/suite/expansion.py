"""Expands a preset of a suite into cells: the base, the labels of each point and the overrides, merged and checked.

Every name, key and value is checked against the function that will receive it, before any GPU time is spent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fatbench.errors import SpecError, did_you_mean
from fatbench.suite import (
    calls,
    confounders,
    facts,
    grid,
    input_limits,
    model,
    perturbation,
    standard_attacks,
    threats,
    transfers,
    weights,
)
from fatbench.suite.cells import Cell, Evaluation, Plan, canonical, identity
from fatbench.suite.contents import Contents
from fatbench.suite.located import LocatedMap, merge
from fatbench.suite.model import Condition, Evaluate, Key, Preset

Origin = Callable[[LocatedMap, str, int], Cell]  # (node of `weights`, preset, seed) -> the cell whose weights these are
AxisOverrides = Mapping[str, Mapping[str, LocatedMap]]  # axis -> label -> override


def expand(
    name: str,
    contents: Contents,
    file: Path,
    preset: str,
    seeds: Sequence[int] | None = None,
    origin: Origin | None = None,
    *,
    condition: Condition | None = None,
    points: Collection[tuple[tuple[str, str], ...]] | None = None,
    attacks: Sequence[str] = (),
    refuse: bool = True,
) -> Plan:
    """All grid points of a suite's preset as checked cells, in the order of the file; see `files.Suite.plan`.

    condition: axis -> labels of the points to expand; none need match. points: the keys of the points to expand, None
    for all.
    """
    if preset not in contents.presets:
        raise SpecError(f"suite '{name}' has no preset '{preset}'{did_you_mean(preset, contents.presets)}")
    chosen_preset = contents.presets[preset]
    base = merge(contents.base, chosen_preset.base)
    # a preset's word comes after the grid's: the last override of a setting holds
    overrides = [*contents.grid.overrides, model.Override(set=chosen_preset.set), *chosen_preset.overrides]
    axes = contents.axes
    lay = functools.partial(_with_override, file=file, axes=axes)
    evaluate = _evaluate_of_preset(contents, chosen_preset, attacks, lay, file)
    seeds = seeds if seeds is not None else chosen_preset.seeds or contents.seeds
    labels = grid.labels_of(axes, chosen_preset)
    # before anything is expanded: a typing mistake may ask for a million cells
    input_limits.check_cells(grid.upper_bound(contents, chosen_preset) * len(seeds), f"{file}: preset '{preset}'")
    cells: list[Cell] = []
    excluded: list[tuple[Key, str]] = []
    transfers_of: dict[int, Evaluate] = {}  # index of a cell -> its `evaluate`, if that has transfers

    @functools.cache  # points with the same first labels share the merged settings of these
    def settings_of_labels(point: tuple[tuple[str, str], ...]) -> LocatedMap:
        if not point:
            return base
        axis, label = point[-1]
        return merge(settings_of_labels(point[:-1]), axes[axis][label])

    for key in grid.points(contents, chosen_preset):
        if condition is not None and not grid.matches(key, condition):
            continue
        if points is not None and tuple(key.items()) not in points:
            continue
        if reason := next((item.reason for item in contents.grid.exclude if grid.matches(key, item.when)), None):
            excluded.append((key, reason))
            continue
        location = f"{file}: {', '.join(f'{a}={v}' for a, v in key.items()) or 'base'} ({preset})"
        spec, cell_perturbation = _settings_at(key, settings_of_labels(tuple(key.items())), overrides)
        evaluate_of_point, evaluations = _evaluations(evaluate, key, lay, attacks, cell_perturbation)
        paths = confounders.written_paths(key, axes, overrides)
        for origin_cell, spec_with_weights, origin_seeds in _with_weights(spec, seeds, origin, preset):
            checked_cell = _canonical_at(spec_with_weights, location, file, refuse)
            if refuse and contents.threat is not None:
                threats.refuse(checked_cell, contents.threat, spec_with_weights, contents.place("threat"))
            for item in evaluations if refuse else ():
                facts.refuse(calls.call("Attack", item.attack), checked_cell, f"{location}: evaluate: {item.label}")
            _demand_numbers(evaluate.checkpoints, checked_cell, location)
            if origin_cell is not None:
                _demand_same_network(origin_cell, checked_cell, location)
            task = (
                str(cell_perturbation)
                if cell_perturbation is not None and _has_radius(checked_cell, evaluations)
                else ""
            )
            for seed in origin_seeds:  # checked once: cells of a point differ by their seed alone
                if evaluate_of_point.transfer:
                    transfers_of[len(cells)] = evaluate_of_point
                seeded = calls.Call(checked_cell.signature, {**checked_cell, "seed": seed})
                cells.append(
                    Cell(identity(seeded), key, seeded, evaluations, origin_cell, perturbation=task, written=paths)
                )
    if not cells and condition is None:
        raise SpecError(f"{file}: preset '{preset}' leaves the grid empty")
    if attacks and not any(cell.evaluations for cell in cells):
        raise SpecError(f"--attack: suite '{name}', preset '{preset}', evaluates no model on test images")
    if transfers_of:
        cells = transfers.with_transfers(cells, transfers_of, labels)
    return Plan(
        name, preset, chosen_preset.note, cells, [*evaluate.checkpoints], excluded, tuple(attacks), contents.baseline
    )


def _evaluate_of_preset(
    contents: Contents,
    preset: Preset,
    attacks: Sequence[str],
    lay: Callable[[Evaluate, LocatedMap], Evaluate],
    file: Path,
) -> Evaluate:
    """The preset's `evaluate`, before the overrides of points. SpecError for a limit of an unknown attack."""
    evaluate = contents.evaluate if not preset.evaluate else lay(contents.evaluate, preset.evaluate)
    if attacks:  # of --attack; they are added to what the preset has kept
        standard_attacks.demand_known(attacks, [*contents.evaluate.attacks, *evaluate.attacks])
        completed = standard_attacks.without_removed(contents.evaluate.node, attacks)
        base = model.read(Evaluate, completed, str(file), axes=contents.axes)
        evaluate = lay(base, standard_attacks.without_removed(preset.evaluate, attacks))
    for label in evaluate.limit:
        if label not in {*evaluate.attacks, *evaluate.transfer, *attacks}:
            raise SpecError(
                f"{evaluate.limit.place(label)}: no attack is named '{label}'{did_you_mean(label, evaluate.attacks)}"
            )
    return evaluate


def _settings_at(
    key: Key, spec: LocatedMap, overrides: Sequence[model.Override]
) -> tuple[LocatedMap, perturbation.Perturbation | None]:
    """A point's settings with overrides, seed 0 and the radius of its perturbation, and this perturbation."""
    for override in overrides:
        if override.holds(key, spec):
            spec = merge(spec, override.set)
    if "seed" in spec:
        raise SpecError(f"{spec.place('seed')}: set seeds with 'seeds' at the top of the suite, not in a cell")
    spec, cell_perturbation = perturbation.split(_without_idle(merge(spec, LocatedMap({"seed": 0}))))
    return (spec if cell_perturbation is None else perturbation.of_cell(spec, cell_perturbation)), cell_perturbation


def _has_radius(cell: calls.Call, evaluations: Sequence[Evaluation]) -> bool:
    """Whether any attack of a cell, in training or evaluation, has an epsilon."""
    trained = any(path.endswith(".eps") for path, _ in confounders.leaves(cell))
    return trained or any(
        "eps" in path for evaluation in evaluations for path, _ in confounders.leaves(evaluation.attack)
    )


def _without_idle(spec: LocatedMap) -> LocatedMap:
    """The settings without `malicious` where its attack is null: then all clients are honest."""
    malicious = spec.get("malicious")
    idle = isinstance(malicious, LocatedMap) and "attack" in malicious and malicious["attack"] is None
    return merge(spec, LocatedMap({"malicious": None})) if idle else spec


def _with_weights(
    spec: LocatedMap, seeds: Sequence[int], origin: Origin | None, preset: str
) -> Iterator[tuple[Cell | None, LocatedMap, list[int]]]:
    """(origin or None, settings that name it, seeds): seeds are grouped by the cell whose weights they start from."""
    weights_node = spec["model"].get("weights") if isinstance(spec.get("model"), LocatedMap) else None
    if not isinstance(weights_node, LocatedMap) or origin is None:
        yield None, spec, list(seeds)
        return
    seeds_by_origin: dict[str, tuple[Cell, list[int]]] = {}
    for seed in seeds:
        origin_cell = origin(weights_node, preset, seed)
        seeds_by_origin.setdefault(origin_cell.id, (origin_cell, []))[1].append(seed)
    for origin_cell, origin_seeds in seeds_by_origin.values():
        weights_setting = LocatedMap({"weights": f"{weights.CELL}{origin_cell.id}"}, at=weights_node.at)
        yield origin_cell, merge(spec, LocatedMap({"model": weights_setting})), origin_seeds


def _demand_same_network(origin_cell: Cell, spec: Mapping[str, Any], location: str) -> None:
    """SpecError if an origin's weights do not fit the network; the head may differ, a new one starts at random."""
    origin_model, own_model = origin_cell.spec["model"], spec["model"]
    for key in dict.fromkeys([*origin_model, *own_model]):
        # a head of another kind or width starts at random
        if key in ("weights", "head") or key.startswith("head_") or origin_model.get(key) == own_model.get(key):
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


def _canonical_at(spec: LocatedMap, location: str, file: Path, refuse: bool) -> calls.Call:
    """The canonical cell of a point; an error in a line of an extended suite also names the point."""
    try:
        return canonical(spec, location, refuse)
    except SpecError as error:
        if str(file) not in str(error):
            error.args = (f"{error} [{location}]",)
        raise


def _evaluations(
    evaluate_node: Evaluate,
    key: Key,
    lay: Callable[[Evaluate, LocatedMap], Evaluate],
    added_attacks: Sequence[str],
    cell_perturbation: perturbation.Perturbation | None,
) -> tuple[Evaluate, tuple[Evaluation, ...]]:
    """The `evaluate` of a point, its overrides applied, and the evaluations in it."""
    radius = cell_perturbation.eps if cell_perturbation is not None and cell_perturbation.norm == "Linf" else None
    evaluate = evaluate_node
    for override in evaluate_node.overrides:
        if grid.matches(key, override.when):
            overriding = _without_removed(override.set, evaluate_node.attacks)
            evaluate = lay(
                evaluate, standard_attacks.completed_override(overriding, evaluate.attacks, added_attacks, radius)
            )
    # a point without any attack, such as one of gradient inversion, gets none from `--attack`
    if added_attacks and any(attack is not None for attack in evaluate.attacks.values()):
        missing_attacks = standard_attacks.missing_attacks(evaluate.attacks, added_attacks, radius)
        evaluate = lay(evaluate, LocatedMap({"attacks": LocatedMap(missing_attacks)}))
    attacks = evaluate.attacks
    if cell_perturbation is not None:
        filled = {label: perturbation.of_attack(attack, cell_perturbation) for label, attack in attacks.items()}
        attacks = LocatedMap(filled, attacks.where, attacks.at)
    evaluations = []
    for label, attack in attacks.items():
        if attack is None:
            continue
        n = transfers.images_of(evaluate, label)
        for metric, attack_spec, swept in _sweep(label, attack, attacks):
            call = calls.check("Attack", attack_spec, attacks.place(label))
            evaluations.append(Evaluation(metric, call, n, evaluate.batch, label if swept else "", swept=swept))
    return evaluate, tuple(evaluations)


def _demand_numbers(checkpoints: Sequence[str], spec: Mapping[str, Any], location: str) -> None:
    """SpecError if a checkpoint is chosen by numbers that the cell does not measure."""
    if "best-val" in checkpoints and not spec["validation"]:
        raise SpecError(f"{location}: checkpoint best-val needs held-out images: set 'validation: N'")
    # all others are the best by a monitored number
    if set(checkpoints) - {"last"} and spec["monitor"] is None:
        raise SpecError(
            f"{location}: checkpoints {', '.join(checkpoints)} need 'monitor', an attack run during training"
        )


def _with_override(evaluate: Evaluate, override: LocatedMap, file: Path, axes: AxisOverrides) -> Evaluate:
    """`evaluate` merged with an override, read and checked again."""
    return model.read(Evaluate, merge(evaluate.node, override), str(file), axes=axes)


def _sweep(label: str, attack: Any, attacks: LocatedMap) -> list[tuple[str, Any, str]]:
    """(metric, attack, setting) of each value of a list such as `eps: [2/255, 4/255]`: pgd20_2_255, pgd20_4_255.

    The attack itself, if none of its settings is a list.
    """
    lists = [key for key, value in attack.items() if isinstance(value, list)] if isinstance(attack, LocatedMap) else []
    if not lists:
        return [(label, attack, "")]
    swept, *further_lists = lists
    location = attack.place(swept)
    if further_lists:
        raise SpecError(
            f"{attack.place(further_lists[0])}: '{swept}' already has a list: only one setting of an attack may"
        )
    if not attack[swept]:
        raise SpecError(f"{location}: the list is empty: give one, such as eps: [2/255, 4/255, 8/255]")
    swept_attacks: list[tuple[str, Any, str]] = []
    for value in attack[swept]:
        name = transfers.metric_of(label, str(value))
        if name in attacks or name in [metric_name for metric_name, _, _ in swept_attacks]:
            raise SpecError(f"{location}: two metrics have the same name, '{name}'")
        value_node = LocatedMap({swept: value}, {swept: attack.where.get(swept, "")})
        swept_attacks.append((name, merge(attack, value_node), swept))
    return swept_attacks


def _without_removed(override: LocatedMap, attacks: LocatedMap) -> LocatedMap:
    """An override of `evaluate` without attacks that the preset has removed with null."""
    attack_overrides = override.get("attacks")
    if not isinstance(attack_overrides, LocatedMap):
        return override
    kept_attacks = LocatedMap(
        {k: v for k, v in attack_overrides.items() if k not in attacks or attacks[k] is not None},
        attack_overrides.where,
        attack_overrides.at,
    )
    return LocatedMap({**override, "attacks": kept_attacks}, override.where, override.at)
