"""The evaluation behind a stored stage: its attack, its number of images, its batch.

The name of a stage holds a hash of the three. The attack is stored with the numbers, the images and the batch that were
asked for in the stage's record, under "requested". Files of before 28 November 2026 lack these two, which nobody knows
then; of the evaluations of our suites, listing.json has the settings themselves.

The hash has 32 bits, so whoever tries long enough finds weak settings for a name. The listing holds for these, too.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fatbench.errors import FatbenchError, SpecError
from fatbench.settings import PRECISIONS
from fatbench.suite import calls, cells, external_models, plugins
from fatbench.suite.cells import Evaluation, TransferOrigin

LISTING = Path(__file__).with_name("listing.json")  # see `fatbench.suite.files`
NOT_OF_ATTACK = ("implementation", "origin", "on")  # keys of stored settings that are not settings of the attack


def evaluation(stage: str, settings: Mapping[str, Any], requested: Mapping[str, Any]) -> Evaluation | None:
    """The evaluation that a stage is named after; None if none with these settings has this name.

    requested: the images and the batch in its record. SpecError for an unknown attack.
    """
    name, label = _names(stage)
    origin = _origin(label, settings.get("origin"))
    named = Evaluation(
        label, attack_of(settings), requested["n"], requested["batch"], origin=origin, on=settings.get("on", "")
    )
    is_named = named.id == name and _is_listed(named.id, settings)
    return named if is_named and (origin is None) == ("origin" not in settings) else None


def contradiction(stage: Any) -> str | None:
    """The contradiction between a stage's name and its settings, in words; None if they agree.

    stage: of a document (`fatbench.store.document`).
    """
    if stage.settings is None or stage.stage == "train":
        return None
    label, chunk = _names(stage.stage)[1], stage.outcomes[0][1] if stage.outcomes else None
    n = next((n for _, _, metric, _, n, *_ in stage.rows if metric == label), None)
    if not is_another(stage.stage, stage.settings, n, chunk, stage.record.get("requested")):
        return None
    return "its settings do not give the hash in its name: its number may be of another attack or of other images"


def is_another(
    stage: str, settings: Mapping[str, Any], n: int | None, chunk: int | None, requested: Mapping[str, Any] | None
) -> bool:
    """Whether a stage is known to be of another evaluation than its name says.

    n: test images behind its number. chunk: images in its first outcomes. Both None if unknown. requested: the images
    and the batch in its record; None in those of older versions, where only the listing tells.

    Attacks of plug-ins are left out: their authors may change the settings.
    """
    try:
        if any(plugins.used_plugins(calls.call("Attack", settings))):
            return False
        if requested is None:
            return not _is_listed(_names(stage)[0], settings)
        images, batch = requested["n"], requested["batch"]
        fits = bool(settings.get("on")) or (
            (images is None or images >= (n or 0)) and (n is None or chunk in (None, n, batch))
        )
        return not fits or evaluation(stage, settings, requested) is None
    except FatbenchError:  # the attack is of a plug-in that is not loaded
        return False


def attack_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The attack of a stage's settings, which also say whose code computed it, and on which model."""
    return {key: value for key, value in settings.items() if key not in NOT_OF_ATTACK}


def short_form(attack: Mapping[str, Any], origin: str | None, on: str = "") -> dict[str, Any]:
    """An attack without defaults, with the model that it is computed on where that is another, and with its images."""
    without_defaults = json.loads(json.dumps(calls.without_defaults(calls.call("Attack", attack))))
    return {**without_defaults, **({} if origin is None else {"origin": origin}), **({"on": on} if on else {})}


def _names(stage: str) -> tuple[str, str]:
    """("pgd20-0a1b2c3d", "pgd20") of the stage "pgd20-0a1b2c3d.bf16@50"."""
    name = stage.rpartition("@")[0]
    for precision in PRECISIONS:
        name = name.removesuffix(f".{precision}")
    return name, name.rpartition("-")[0]


def _is_listed(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether settings are those of the evaluation of our suites with this name; True if they have none."""
    listed = _shipped_attacks().get(name)
    return listed is None or listed == short_form(attack_of(settings), settings.get("origin"), settings.get("on", ""))


@functools.cache
def _shipped_attacks() -> Mapping[str, Mapping[str, Any]]:
    """Evaluation of one of our suites -> its `short_form`."""
    attacks: dict[str, dict[str, Any]] = json.loads(LISTING.read_text(encoding="utf-8"))["attacks"]
    return attacks


def _origin(metric: str, text: str | None) -> TransferOrigin | None:
    """The origin behind its stored text: "cell 0a1b2c3d4e5f" or "client 0 of 5"; None for any other."""
    if text is None:
        return None
    kind, _, subject = text.partition(" ")
    if kind == "cell":
        return TransferOrigin(metric, subject)
    client, _, clients = subject.partition(" of ")
    if kind == "client" and client.isdecimal() and clients.isdecimal():
        return TransferOrigin(f"client {client}", client=int(client), clients=int(clients))
    return None


# --- specs of imported cells, checked like those of a suite before their identity is computed ------------------------

_MODEL = TypeAdapter(external_models.Model)


def identity(spec: Mapping[str, Any]) -> str:
    """The identity of a cell's spec; SpecError if no suite and no `fatbench evaluate` can have made the spec."""
    if "evaluated" in spec:
        _check_external_model(spec)
    else:
        calls.check("Experiment", spec, "spec")
    return cells.identity(spec)


def _check_external_model(spec: Mapping[str, Any]) -> None:
    """SpecError if `external_models.cell` would not make this spec."""
    try:
        model = _MODEL.validate_python(spec["evaluated"])
    except ValidationError as error:
        problem = error.errors()[0]
        path = ".".join(str(path_part) for path_part in problem["loc"])
        raise SpecError(f"spec: evaluated: {path}: {problem['msg']}") from None
    for key in ("test", "size"):
        if spec.get(key) is not None and not (type(spec[key]) is int and 0 < spec[key] < 2**31):
            raise SpecError(f"spec: {key}: expected a number, got {str(spec[key])[:60]!r}")
    expected_cell = external_models.cell(model, spec.get("data"), spec.get("test"), spec.get("size"))
    if expected_cell != dict(spec):
        key = next(key for key in {**expected_cell, **spec} if expected_cell.get(key) != spec.get(key))
        raise SpecError(f"spec: {key}: not what 'fatbench evaluate' writes")
