"""Equal tuning: every row of a suite tries the same values, on validation images, with seeds of its own.

    tune:
      settings: {algorithm.local.lr: [0.01, 0.02, 0.05], algorithm.local.momentum: [0, 0.9]}
      by: pgd20
      seeds: [100, 101]
      worst_over: {adversary: [none, ALIE]}      # these rows share a choice, made in the worst of these cases

A trial is an ordinary cell, of the suite "NAME-trials" that `trials` derives: it runs, resumes and is verified as any.
`choices` reads their accuracies, and the file of choices, which a person can review, comes after the suite's overrides.
"""

from __future__ import annotations

import functools
import itertools
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.errors import SpecError, did_you_mean
from fatbench.suite import folders
from fatbench.suite.cells import Cell, digest
from fatbench.suite.model import Key, Override, Tune
from fatbench.suite.trees import Keys, Tree, merge, nested
from fatbench.suite.types import number

if TYPE_CHECKING:
    from fatbench.suite.tables import Contents

SUFFIX = "-trials"
AXIS = "trial"
ENDING = ".tuned.yaml"
SETTINGS: Keys = ("tune", "settings")


# --- the trials -----------------------------------------------------------------------------------------------------


def settings_by_label(tune: Tune) -> dict[str, Tree]:
    """label -> settings of each trial: {"lr=0.01 momentum=0": {"algorithm": {"local": {...}}}}."""
    paths, found = [path.split(".") for path in tune.settings], {}
    for values in itertools.product(*tune.settings.values()):
        chosen = [*zip(paths, values, strict=True)]
        label = " ".join(f"{path[-1]}={value}" for path, value in chosen)
        found[label] = functools.reduce(merge, (nested(path, value) for path, value in chosen))
    return found


def trials(contents: Contents, tree: Tree) -> Tree:
    """The suite of a suite's trials. SpecError: it tunes nothing, or by what it does not measure.

    In place of test images, of which a trial has one, the monitor looks at the validation images in the last round.
    """
    if contents.tune is None:
        raise SpecError(f"suite '{contents.name}' has no section 'tune'")
    tune, labels = contents.tune, [*settings_by_label(contents.tune)]
    grid, axes = contents.grid, contents.axes
    of_trials = [{"when": {AXIS: label}, "set": settings} for label, settings in settings_by_label(tune).items()]
    presets = {}
    for name, preset in contents.presets.items():
        if shared := sorted({*tune.seeds} & {*(preset.seeds or contents.seeds)}):
            problem = f"seed {shared[0]} is also one of preset {name}: tune with others"
            raise SpecError(problem).below("seeds").below("tune")
        evaluate = merge(tree.get("evaluate") or {}, preset.evaluate)
        attacks = evaluate.get("attacks") or {}
        monitor = {"name": "natural"} if tune.by == "natural" else attacks.get(tune.by)
        if not isinstance(monitor, dict) or any(isinstance(value, list) for value in monitor.values()):
            hint = "" if tune.by in attacks else did_you_mean(tune.by, attacks)
            hint = hint or f": name an attack of preset {name} that has one radius"
            raise SpecError(f"cannot tune by '{tune.by}'{hint}").below("by").below("tune")
        asked = {"monitor": monitor, "monitor_every": 1_000_000, "monitor_n": tune.n, "test": 1, "diagnostic": None}
        written = (tree.get("presets") or {}).get(name) or {}
        kept = {axis: written["axes"].get(axis, list(axes[axis])) for axis in axes} if preset.axes is not None else {}
        presets[name] = {
            **{key: written[key] for key in ("note", "base", "set") if key in written},
            "axes": {**kept, **tune.worst_over},
            "evaluate": {key: evaluate[key] for key in ("unseen",) if key in evaluate},  # who trains
            "include": [{**item, AXIS: labels} for item in preset.include],
            "overrides": [*(written.get("overrides") or ()), {"set": asked}, *of_trials],
        }
    written_grid = tree.get("grid") or {}
    product = list(axes) if grid.product is None else grid.product
    return {
        **{key: tree[key] for key in ("plugins", "threat", "base", "variants") if key in tree},
        "name": f"{contents.name}{SUFFIX}",
        "title": f"{contents.title}: what was tried before",
        "description": f"Derived from the section 'tune' of {contents.name}.",
        "seeds": tune.seeds,
        "axes": {**tree.get("axes", {}), AXIS: {label: {} for label in labels}},
        "grid": {
            **written_grid,
            "product": [*product, AXIS] if product or not axes else [],
            "include": [{**item, AXIS: labels} for item in grid.include],
        },
        "presets": presets,
        "tables": [
            {
                "id": "trials",
                "title": f"Accuracy on validation images under {tune.by} (%)",
                "rows": list(axes),
                "across": [AXIS],
                "values": {"validation": f"train:{metric(tune)}"},
            }
        ],
    }


def place(contents: Contents, override: Override) -> Keys:
    """Where the settings of a trial's override, as `trials` writes it, stand in the file; of others nowhere: ()."""
    return SETTINGS if contents.name.endswith(SUFFIX) and [*override.when] == [AXIS] else ()


def command(name: str, file: Path, preset: str, what: str = "") -> str:
    """The command that runs a suite, by its file where no name leads to it."""
    base, *settings = name.split("+", 1)
    known = folders.available().get(base) or folders.own_files().get(base)
    word = base if known is not None and Path(known).resolve() == file.resolve() else str(file)
    return f"fatbench run {shlex.quote('+'.join([word, *settings]))} --preset {preset}{what}"


def name_of_trials(suite: str) -> str:
    """The name, or the file, of a suite's trials: "fat-tuned-trials+train=60", "mine-trials.yaml"."""
    base, plus, settings = suite.partition("+")
    path = Path(base)
    return f"{path.with_name(f'{path.stem}{SUFFIX}{path.suffix}')}{plus}{settings}"


def metric(tune: Tune) -> str:
    """The metric of a trial's training by which it is judged."""
    return "val_natural" if tune.by == "natural" else "val_monitor"


def demand_validation(cells: Iterable[Cell], file: Path) -> None:
    """SpecError for a trial without validation images."""
    for cell in cells:
        if not cell.spec["validation"]:
            labels = ", ".join(cell.key.values())
            raise SpecError(f"{file}: {labels}: tuning needs images that no client has: set 'validation: N'")


# --- the choices ----------------------------------------------------------------------------------------------------


def choices(tune: Tune, cells: Sequence[Cell], accuracies: Mapping[str, float]) -> list[Tree]:
    """A row's labels, its choice and the value of each trial, for each row; what `tuned_file` holds.

    cells: all trials of a preset. accuracies: cell -> fraction of the validation images; 0 of one that diverged. The
    value of a trial is the worst, over `worst_over`, of the means over seeds. The largest is chosen; of those within
    half an image of it, the first.
    """
    of_row: dict[tuple[tuple[str, str], ...], dict[str, dict[Any, list[float]]]] = {}
    images = min(one for one in (cells[0].spec["validation"], tune.n) if one is not None)
    for cell in cells:
        row = tuple((axis, label) for axis, label in cell.key.items() if axis not in (AXIS, *tune.worst_over))
        case = tuple(cell.key.get(axis) for axis in tune.worst_over)
        of_case = of_row.setdefault(row, {}).setdefault(cell.key[AXIS], {})
        of_case.setdefault(case, []).append(accuracies[cell.id])
    found = []
    for row, of_trial in of_row.items():
        values = {trial: min(math.fsum(one) / len(one) for one in of_trial[trial].values()) for trial in of_trial}
        chosen = next(trial for trial, value in values.items() if value >= max(values.values()) - 1 / (2 * images))
        rounded = {trial: round(value, 6) for trial, value in values.items()}
        found.append({"when": dict(row), "trial": chosen, "accuracy": rounded})
    return found


def trials_digest(cells: Iterable[Cell]) -> str:
    """What a file of choices was made from: a hash of the ids of all its trials."""
    return digest(sorted(cell.id for cell in cells))[:16]


def tuned_file(suite: str, preset: str, folder: Path) -> Path:
    """The file of a preset's choices: beside the suite if it is there, else in the working directory."""
    name = f"{suite}.{preset}{ENDING}"
    return folder / name if (folder / name).is_file() else Path(name)


def suite_of(file: str) -> str:
    """The file of the suite whose choices a file holds, beside it; any other name is itself."""
    return f"{file.removesuffix(ENDING).rpartition('.')[0]}.yaml" if file.endswith(ENDING) else file


def overrides(tune: Tune, tuned: Tree, cells: Sequence[Cell], file: Path, remedy: str) -> list[Override]:
    """The choices of a file as overrides. SpecError: they were made from other trials than those of the suite."""
    if tuned.get("trials") != trials_digest(cells):
        asked = tune.model_dump(mode="json")
        other = next((key for key, value in asked.items() if (tuned.get("tune") or {}).get(key) != value), "")
        what = f"with other {other}" if other else "from cells with other settings"
        raise SpecError(f"{file}: chosen {what} than those of the suite: {remedy}")
    by_label = settings_by_label(tune)
    try:
        return [Override.model_construct(when=_labels(row["when"]), having={}, set=by_label[row["trial"]])
                for row in tuned["rows"]]  # fmt: skip
    except (KeyError, TypeError, AttributeError):
        raise SpecError(f"{file}: not a file of choices: {remedy}") from None


def _labels(key: Key) -> dict[str, list[str]]:
    return {axis: [str(label)] for axis, label in key.items()}


def _edges(values: Sequence[Any]) -> list[Any]:
    """The least and the largest of three numbers or more, in whichever order they stand; words have none."""
    numbers = [number(value) for value in values]
    if len(values) < 3 or not all(isinstance(one, int | float) for one in numbers):
        return []
    return [values[numbers.index(min(numbers))], values[numbers.index(max(numbers))]]


def sentence(tune: Tune, tuned: Tree) -> str:
    """What was tried and chosen, for the notes of a table."""
    tried = ", ".join(f"{path.removeprefix('algorithm.')} {values}" for path, values in tune.settings.items())
    by_label = dict(zip(settings_by_label(tune), itertools.product(*tune.settings.values()), strict=True))
    chosen = []
    for row in tuned["rows"]:
        values = by_label[row["trial"]]
        at_edge = any(one in _edges(listed) for one, listed in zip(values, tune.settings.values(), strict=True))
        edge = " (at the edge of the grid)" if at_edge else ""
        chosen.append(f"{', '.join(row['when'].values()) or 'all rows'}: {row['trial']}{edge}")
    cases = sum(1 for _ in itertools.product(*tune.worst_over.values()))
    worst = f", the worst of {cases} cases" if cases > 1 else ""
    count = len(by_label) * len(tune.seeds) * cases
    return (
        f"each row was tuned by {count} trials ({tried}; {len(tune.seeds)} seeds of their own; by {tune.by} on "
        f"validation images{worst}): {'; '.join(chosen)}"
    )
