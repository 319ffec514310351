"""Files of earlier versions: their names become today's, and a finished stage without a digest becomes unverified.

| written | what differs |
|---|---|
| 21 November 2026 | settings of local training stand in the algorithm; attacks have no settings in their stages |
| 22 to 23 November | other names of settings and metrics, as in the tables below |
| 23 November | today's names, no digests |
| 24 to 27 November | a row for each number (schema_version 1); doubts are sentences; images and batch are unknown |
| before 29 November | suites in a variant have names of their own, see `current_names` |

All are read for ever. A digest is compared with what the file says before anything is translated. A stage without one
is marked by a number, "doubt_unverified": nobody can know whether it was edited.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fatbench.errors import FatbenchError
from fatbench.settings import IN_VARIANT, PRECISIONS, of_variant
from fatbench.store import doubt_names
from fatbench.store.document import Cell, ExchangeError, Numbers, Run, Stage, blocks_of, document, sealed
from fatbench.store.problems import Identify
from fatbench.store.stage_names import parsed

UNVERIFIED = doubt_names.name("unverified")
SETTINGS = {  # names of 21 to 23 November -> today's
    "protocol": "algorithm", "rule": "aggregator", "optimiser": "optimizer", "server_optimiser": "server_optimizer",
    "probe": "diagnostic", "probe_every": "diagnostic_every", "victims": "target_clients",
    "watched": "observed_rounds", "own_share": "own_fraction",
}  # fmt: skip
METRICS = {"updated_share": "updated_fraction", "fgsm_p001": "fgsm_sfat"}
EVALUATIONS = {"fgsm_p001-ba523b48": "fgsm_sfat-4a4b9107"}  # whose hash has the attack's name
RELEASE = "release "  # begins a commit that is none: of a program outside a checkout
LOCAL = ("batch", "clip", "epochs", "lr", "lr_decay", "momentum", "objective", "optimizer", "proximal", "weight_decay")
SERVER = ("batch", "epochs", "lr", "lr_decay", "momentum", "optimizer", "weight_decay")


def is_old(text: str, version: int) -> bool:
    """Whether a line may have something that is translated."""
    parts = (f'"commit":"{RELEASE}', '"flag_', *(f'"suite":"{name}' for name in IN_VARIANT))
    return version == 1 or any(part in text for part in parts)


def translated(cell: Cell, version: int, identify: Identify | None, location: str) -> Cell:
    """A document in today's names, with the digests of its finished stages.

    identify: computes the identity of a spec, which becomes the cell's id if its names have changed. ExchangeError:
    they have, and without `identify` there is no id.
    """
    names = Names(cell, version)
    if names.are_old and identify is None:
        raise ExchangeError(f"{location}: settings of before 24 November 2026: import it first (fatbench import FILE)")
    spec = cell.spec
    is_current = False
    if identify is not None:
        with suppress(FatbenchError, LookupError, TypeError, ValueError):
            is_current = identify(cell.spec) == cell.cell
        spec = cell.spec if is_current else _spec(cell.spec)
    value = {
        **dict(cell),
        "cell": cell.cell if spec == cell.spec or identify is None else identify(spec),
        "spec": spec,
        "points": [point.model_dump() | current_names(point.suite, point.preset) for point in cell.points],
        "runs": [_run(run, names) for run in cell.runs],
        "stages": [_stage(stage, cell, version, names) for stage in cell.stages],
    }
    return sealed(document(value, location))


class Names:
    """Today's names of a document's stages and metrics."""

    def __init__(self, cell: Cell, version: int):
        self.are_old = "protocol" in cell.spec
        self.stages = {stage.stage: self._stage(stage.stage) for stage in cell.stages} if self.are_old else {}
        if version == 1 and not any(stage.digest for stage in cell.stages):  # before names had the precision
            for stage in cell.stages:
                precision = None if stage.run is None else cell.runs[stage.run].precision
                name = self.stages.get(stage.stage, stage.stage)
                evaluation, sign, round = name.rpartition("@")
                if precision in PRECISIONS[1:] and sign and not evaluation.endswith(PRECISIONS):
                    suffix = "" if evaluation.startswith("natural-") else f".{precision}"  # always in float32
                    self.stages[stage.stage] = f"{evaluation}{suffix}@{round}"

    def _stage(self, stage: str) -> str:
        evaluation, sign, round = stage.rpartition("@")
        label, hyphen, rest = evaluation.rpartition("-")
        return f"{EVALUATIONS.get(evaluation, f'{METRICS.get(label, label)}{hyphen}{rest}')}{sign}{round}"

    def metric(self, metric: str) -> str:
        if self.are_old and metric.endswith("_victim"):
            return metric.removesuffix("_victim") + "_client"
        return METRICS.get(metric, metric) if self.are_old else metric


def current_names(suite: str, preset: str | None) -> dict[str, str | None]:
    """Today's names of the suite and the preset of a run or a point."""
    name, plus, overrides = suite.partition("+")
    name, variant = IN_VARIANT.get(name, (name, ""))
    return {"suite": f"{name}{plus}{overrides}", "preset": preset and of_variant(variant, preset)}


def _run(run: Run, names: Names) -> dict[str, Any]:
    named = {**dict(run), **current_names(run.suite, run.preset), "stage": names.stages.get(run.stage, run.stage)}
    if (run.commit or "").startswith(RELEASE):
        versions = {**(run.versions or {}), "fatbench": str(run.commit).removeprefix(RELEASE)}
        named |= {"commit": None, "dirty": None, "versions": versions}
    return named


def _stage(stage: Stage, cell: Cell, version: int, names: Names) -> dict[str, Any]:
    blocks = []
    for round, clients, n, metrics, run, created in stage.numbers:
        current: dict[str, list[float]] = {}
        for metric, values in metrics.items():
            forms = [doubt_names.current_form(names.metric(metric), value) for value in values]
            current[forms[0][0]] = [value for _, value in forms]
        blocks.append((round, clients, n, current, run, created))
    if version == 1 and stage.status == "done" and stage.digest is None and stage.run is not None:
        round = stage.round if stage.stage == "train" else parsed(stage.stage).round
        doubt = (round, [-1], 0, {UNVERIFIED: [1.0]}, stage.run, cell.runs[stage.run].ended or cell.created)
        in_order = sorted([*blocks, doubt], key=lambda block: block[0])
        blocks = blocks_of(row for rows in Numbers(in_order).rounds() for row in rows)
    settings = _renamed(stage.settings) if names.are_old and stage.settings else stage.settings
    name = names.stages.get(stage.stage, stage.stage)
    return {**dict(stage), "stage": name, "numbers": blocks, "settings": settings}


def _spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A cell's settings in today's names and places; equal to `spec` if no name of it has changed."""
    current = _renamed(spec)
    if "protocol" not in spec:
        return current
    algorithm = current["algorithm"]
    defence = algorithm.get("defence") or {}
    if "rate" in defence:
        defence["fraction" if defence["name"] == "pruning" else "mask_probability"] = defence.pop("rate")
    if algorithm["name"] == "eavesdrop":
        algorithm["name"] = "gradient_inversion"
    if isinstance(algorithm.get("server"), str):
        algorithm["optimizer"] = algorithm.pop("server")
    if "server_lr" in algorithm and "server_epochs" in algorithm:
        values = {name: algorithm.pop(f"server_{name}") for name in SERVER if f"server_{name}" in algorithm}
        algorithm["server"] = values
    if "epochs" in algorithm:
        algorithm["local"] = {name: algorithm.pop(name) for name in LOCAL if name in algorithm}
        if algorithm.get("validators"):
            algorithm["name"] = "fedavg_validated"
        else:
            algorithm.pop("validators", None)
    return current


def _renamed(value: Any) -> Any:
    """Settings with today's names, at every depth."""
    if isinstance(value, list):
        return [_renamed(member) for member in value]
    if not isinstance(value, Mapping):
        return value
    current = {SETTINGS.get(name, name): _renamed(member) for name, member in value.items()}
    if "verdict" in current:
        current["early_stop"] = current.pop("verdict") == "any"
    if current.get("rank_by") == "mean_loss":
        current["rank_by"] = "nk_weighted"
    if current.get("name") == "fgsm_p001":
        current["name"] = "fgsm_sfat"
    return current
