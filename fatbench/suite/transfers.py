"""Attacks computed on one model and evaluated on another: the evaluations that `transfer` adds to the cells.

    moved: {attack: pgd20, axis: method}     on the cells that differ from this one in `method` alone
    among: {attack: pgd20, clients: 5}       on five clients of the round, before averaging, and evaluated on all five

There is one evaluation per model on which the attack is computed. Both models must take the same images.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fatbench.errors import SpecError, did_you_mean
from fatbench.suite import facts
from fatbench.suite.cells import Cell, Evaluation, TransferOrigin
from fatbench.suite.model import Evaluate, Transfer

CellByPoint = Mapping[tuple[frozenset[tuple[str, str]], int], Cell]  # (labels of a point, seed) -> its cell


def with_transfers(
    cells: Sequence[Cell], evaluate_by_cell: Mapping[int, Evaluate], axes: Mapping[str, Sequence[str]]
) -> list[Cell]:
    """The cells, those in `evaluate_by_cell` (by index) with the evaluations of their transfers added.

    axes: axis -> labels of the preset. SpecError for an unknown attack, one with a list of radii, models that take
    different images, too few clients, or a metric name that is taken.
    """
    cell_by_point = {(frozenset(cell.key.items()), int(cell.spec["seed"])): cell for cell in cells}
    return [
        replace(
            cell, evaluations=(*cell.evaluations, *_of_cell(cell, evaluate_by_cell[cell_index], cell_by_point, axes))
        )
        if cell_index in evaluate_by_cell
        else cell
        for cell_index, cell in enumerate(cells)
    ]


def _of_cell(
    cell: Cell, evaluate: Evaluate, cell_by_point: CellByPoint, axes: Mapping[str, Sequence[str]]
) -> Iterator[Evaluation]:
    used_names = {evaluation.label for evaluation in cell.evaluations}
    for label, transfer in evaluate.transfer.items():
        if transfer is None or (direct := _evaluation_of_attack(label, transfer, evaluate, cell)) is None:
            continue  # the preset removes the transfer, or its attack
        n = images_of(evaluate, label) if label in evaluate.limit else direct.n
        for origin in _origins(cell, transfer, cell_by_point, axes):
            name = metric_of(label, origin.name)
            if name in used_names:
                raise SpecError(f"{transfer.node.at}: two metrics have the same name, '{name}'")
            used_names.add(name)
            yield Evaluation(name, direct.attack, n, direct.batch, label, origin)


def _evaluation_of_attack(label: str, transfer: Transfer, evaluate: Evaluate, cell: Cell) -> Evaluation | None:
    """The direct evaluation of the attack that is transferred; None if the preset removes it."""
    location, name = transfer.place("attack"), transfer.attack
    if label in evaluate.attacks:
        raise SpecError(f"{transfer.node.at}: '{label}' is also an attack: rename the transfer")
    if name not in evaluate.attacks:
        raise SpecError(f"{location}: no attack is named '{name}'{did_you_mean(name, evaluate.attacks)}")
    if any(evaluation.sweep == name for evaluation in cell.evaluations):
        raise SpecError(f"{location}: '{name}' has a list of radii: a transfer needs an attack with one radius")
    return next((evaluation for evaluation in cell.evaluations if evaluation.label == name), None)


def _origins(
    cell: Cell, transfer: Transfer, cell_by_point: CellByPoint, axes: Mapping[str, Sequence[str]]
) -> Iterator[TransferOrigin]:
    if transfer.axis is None:
        yield from _clients(cell, transfer)
        return
    if transfer.axis not in cell.key:
        return
    for label in axes[transfer.axis]:
        if transfer.labels is not None and label not in transfer.labels:
            continue
        origin_cell = cell_by_point.get((frozenset({**cell.key, transfer.axis: label}.items()), int(cell.spec["seed"])))
        if origin_cell is None:
            continue  # the grid leaves this point out
        for key in ("data", "size"):
            if origin_cell.spec[key] != cell.spec[key]:
                origin_value, own_value = (_setting_text(c.spec[key]) for c in (origin_cell, cell))
                raise SpecError(
                    f"{transfer.place('axis')}: both models must be attacked on the same images:"
                    f" {label} has {key} {origin_value}, {cell.key[transfer.axis]} has {own_value}"
                )
        yield TransferOrigin(label, origin_cell.id, origin_cell.spec)


def _clients(cell: Cell, transfer: Transfer) -> Iterator[TransferOrigin]:
    if not cell.spec["algorithm"].get("local"):
        raise SpecError(
            f"{transfer.place('clients')}: {cell.spec['algorithm']['name']} does not train models on clients"
        )
    is_known = cell.spec["partition"].get("clients") is not None
    if is_known and (cohort := facts.cohort(cell.spec)) < transfer.clients:
        raise SpecError(f"{transfer.place('clients')}: {transfer.clients} clients, but {cohort} take part in a round")
    yield from (TransferOrigin(f"client {k}", client=k, clients=transfer.clients) for k in range(transfer.clients))


def _setting_text(value: Any) -> str:
    return str(value["name"] if isinstance(value, Mapping) else value or "as stored")


def metric_of(label: str, value_name: str) -> str:
    """The metric for one value or origin of several: "pgd20_2_255", "moved_fedavg"."""
    return f"{label}_{re.sub('[^0-9a-z]+', '_', value_name.lower()).strip('_')}"


def images_of(evaluate: Evaluate, label: str) -> int | None:
    """The number of test images for an attack; None for all of the cell."""
    numbers = [number for number in (evaluate.n, evaluate.limit.get(label)) if number is not None]
    return min(numbers, default=None)
