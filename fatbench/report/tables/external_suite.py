"""The suite "evaluate": models that were not trained here, as the cells and the table of a suite without a file."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.data import catalogue
from fatbench.errors import NothingMatched
from fatbench.store.replicates import SIGN
from fatbench.store.rows import grouped
from fatbench.store.stage_names import parsed
from fatbench.suite import external_models, model, standard_attacks
from fatbench.suite.cells import Cell, Evaluation, Plan
from fatbench.suite.external_models import SUITE
from fatbench.suite.files import Suite
from fatbench.suite.filters import select
from fatbench.suite.tables import Contents
from fatbench.suite.types import number

if TYPE_CHECKING:
    from fatbench.store.stages import StageRow, Store


@dataclass(frozen=True)
class StoredEvaluation(Evaluation):
    """An evaluation that the database holds, called by its stage's name."""

    name: str = ""

    @property
    def id(self) -> str:
        return self.name


def suite_and_plan(
    store: Store | None, filter_text: str | None = None, evaluation_ids: Collection[str] | None = None
) -> tuple[Suite, Plan]:
    """The suite of all evaluated models in a database and its only plan. NothingMatched: the database has none.

    evaluation_ids: these evaluations, by their ids.
    """
    models = [] if store is None else _models(store)
    if evaluation_ids is not None:
        kept = [tuple(one for one in item.evaluations if one.id in evaluation_ids) for item in models]
        models = [replace(item, evaluations=some) for item, some in zip(models, kept, strict=True) if some]
    plan = Plan(SUITE, "paper", "", [row for item in models for row in _rows(item)], ["last"])
    if not plan.cells:
        raise NothingMatched("the database holds no evaluated model yet: fatbench evaluate FILE --model ...")
    plan = select(plan, filter_text) if filter_text else plan
    cells = plan.cells
    several = [axis for axis in cells[0].key if len({cell.key[axis] for cell in cells}) > 1]
    metrics = dict.fromkeys(evaluation.label for cell in cells for evaluation in cell.evaluations)
    ordered_metrics = sorted(metrics, key=standard_attacks.strength)
    labels = {axis: list(dict.fromkeys(cell.key[axis] for cell in cells)) for axis in cells[0].key}
    notes = dict.fromkeys(external_models.describe_model(cell.spec) for cell in cells)
    notes |= dict.fromkeys(filter(None, (split_note(cell.spec["data"]["name"]) for cell in cells)))
    table = {
        "id": "evaluated",
        "title": "External models",
        "rows": list(dict.fromkeys(["model", *several])),
        "values": standard_attacks.headings(ordered_metrics),
        "note": "; ".join(notes),
        "ties": min(Counter(tuple(cell.key.items()) for cell in cells).values()) > 1,  # else nothing can be tested
    }
    axes: dict[str, Any] = {axis: {label: {} for label in of_axis} for axis, of_axis in labels.items()}
    raw = {
        "name": SUITE,
        "title": table["title"],
        "base": {},
        "axes": axes,
        "presets": {"paper": {}},
        "tables": [table],
    }
    return Suite(Path(SUITE), model.read(Contents, raw, axes={}, folders=[])), plan


def split_note(dataset: str) -> str:
    """A warning about a data set whose test images fatbench chooses; empty for other data sets."""
    facts = catalogue.CATALOGUE.get(dataset)
    if facts is None or not facts.split_here:
        return ""
    return (
        f"the test images of {facts.title} are chosen by fatbench: a network trained on another split than"
        f" load_data('{dataset}', 'train') may have seen them"
    )


def external_cells(plan: Plan, store: Store | None) -> list[Cell]:
    """The evaluated models on a plan's data sets, each with the evaluations of the plan, of which some are stored.

    So a row of the plan's tables can be filled from them: only numbers of the same attacks on the same images count.
    Where cells of the plan face different attacks under one name, the one that was measured stands for it.
    """
    if store is None:
        return []
    cells = []
    for cell in _models(store):
        stages = {evaluation.id for evaluation in cell.evaluations}
        evaluation_by_label: dict[str, Evaluation] = {}
        for planned_cell in plan.cells:
            if all(planned_cell.spec[key] == cell.spec[key] for key in ("data", "test", "size")):
                for evaluation in planned_cell.evaluations:
                    chosen = evaluation_by_label.get(evaluation.label)
                    if chosen is None or (evaluation.id in stages and chosen.id not in stages):
                        evaluation_by_label[evaluation.label] = evaluation
        if any(evaluation.id in stages for evaluation in evaluation_by_label.values()):
            cells.append(replace(cell, evaluations=tuple(evaluation_by_label.values())))
    return cells


def _models(store: Store) -> list[Cell]:
    """Every evaluated model in the database with all its evaluations, oldest first, in the order of names."""
    specs = {id: spec for id, spec in store.cells().items() if "evaluated" in spec and SIGN not in id}
    rows: dict[str, list[StageRow]] = {id: [] for id in specs}  # cell -> its evaluations
    for (id, stage), row in store.stages(list(specs)).items():
        if stage != "train":
            rows[id].append(row)
    by_name = sorted(specs.items(), key=lambda item: (external_models.label(item[1]), item[0]))
    groups = grouped((_row(id, spec), id) for id, spec in by_name)
    cells, used_names = [], set[str]()
    for ids in groups.values():
        text = external_models.label(specs[ids[0]])
        text = text if text not in used_names else f"{text} {ids[0][:6]}"  # another preprocessing is another model
        used_names.add(text)
        ids.sort(key=lambda id: (specs[id]["seed"], min((row.run or 0 for row in rows[id]), default=0)))
        seeds = [specs[id]["seed"] for id in ids]
        seeds = seeds if len({*seeds}) == len(seeds) else list(range(len(seeds)))  # trainings that all say seed 0
        for id, seed in zip(ids, seeds, strict=True):
            labels = {"model": text, "data": specs[id]["data"]["name"]}
            cells.append(Cell(id, labels, {**specs[id], "seed": seed}, _evaluations(rows[id])))
    return cells


def _row(id: str, spec: Mapping[str, Any]) -> tuple[str, ...]:
    """The key of a model's row: networks of one chosen name are trainings of one method, others stand alone."""
    evaluated = spec["evaluated"]
    if not evaluated.get("named"):
        return (id,)
    shared_fields = ("name", "network", "mean", "std", "outputs", "channels")
    return (*(str(evaluated[key]) for key in shared_fields), *(str(spec[key]) for key in ("data", "test", "size")))


def _evaluations(rows: list[StageRow]) -> tuple[Evaluation, ...]:
    """The evaluations of a cell's stages, in the order of their runs."""
    evaluations = []
    for row in sorted(rows, key=lambda row: row.run or 0):
        label, name, *_ = parsed(row.stage)
        settings = row.settings or {"name": label}
        attack = {key: value for key, value in settings.items() if key != "implementation"}
        evaluations.append(StoredEvaluation(label, attack, row.total or None, 0, name=name))
    return tuple(evaluations)


def _rows(model: Cell) -> Iterator[Cell]:
    """Copies of a model, one for each radius and number of images; evaluations without a radius stand in each.

    Of each metric the last number counts; they go from weak to strong where the field has an order.
    """
    for n in sorted({evaluation.n or 0 for evaluation in model.evaluations}):
        of_size = [(evaluation, _radius(evaluation)) for evaluation in model.evaluations if (evaluation.n or 0) == n]
        for norm, eps in sorted({radius for _, radius in of_size if radius}, key=_size) or [("", "")]:
            by_label = {one.label: one for one, radius in of_size if radius in ((norm, eps), None)}
            ordered = sorted(by_label.values(), key=lambda item: standard_attacks.strength(item.label))
            radius_text = eps if norm in ("", "Linf") else f"{eps} in {norm}"
            yield replace(model, key={**model.key, "radius": radius_text, "images": str(n)}, evaluations=tuple(ordered))


def _radius(evaluation: Evaluation) -> tuple[str, str] | None:
    """(norm, eps as it was written) of an attack; None without a radius."""
    settings = evaluation.attack
    return (str(settings.get("norm", "Linf")), str(settings["eps"])) if "eps" in settings else None


def _size(radius: tuple[str, str]) -> tuple[str, float]:
    """The sort key of a radius; an imported radius may be no number and goes last."""
    with contextlib.suppress(ValueError):
        return radius[0], float(number(radius[1]))
    return radius[0], math.inf
