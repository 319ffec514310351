"""The evaluation behind a stored stage: its attack, its number of images, its batch.

The name of a stage holds a hash of the three. The attack is stored with the numbers; images and batch are in the hash
alone, so they are found by trying likely values.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from fatbench.errors import FatbenchError
from fatbench.settings import PRECISIONS
from fatbench.suite import calls, plugins
from fatbench.suite.cells import Evaluation, TransferOrigin, digest

SIZES = (20, 32, 50, 64, 100, 128, 200, 250, 256, 500, 512, 1000, 1024, 2000, 2048, 2500, 4096, 5000, 8192, 10_000)
LARGEST_BATCH = 2**14  # tried where one batch held all images, so that its size is unknown
NOT_OF_ATTACK = ("implementation", "origin")  # keys of stored settings that are not settings of the attack


def evaluation(stage: str, settings: Mapping[str, Any], n: int | None, chunk: int | None) -> Evaluation | None:
    """The evaluation that a stage is named after; None if none with these settings has this name.

    n: test images behind its number. chunk: images in its first outcomes. Both None if unknown. SpecError for an
    unknown attack.
    """
    name, label = _names(stage)
    attack = {key: value for key, value in settings.items() if key not in NOT_OF_ATTACK}
    images_and_batch = _images_and_batch(name, json.dumps(_short_form(attack)), settings.get("origin"), n, chunk)
    if images_and_batch is None:
        return None
    return Evaluation(label, attack, *images_and_batch, origin=_origin(label, settings.get("origin")))


def contradiction(stage: Mapping[str, Any]) -> str | None:
    """The contradiction between a stage's name and its settings, in words; None if they agree.

    stage: as in a line of an export. Attacks of plug-ins are left out: their authors may change the settings.
    """
    settings, (name, label) = stage.get("settings"), _names(stage["stage"])
    if settings is None or stage["stage"] == "train":
        return None
    try:
        if any(plugins.used_plugins(calls.call("Attack", settings))):
            return None
        sizes = [number[4] for number in stage["numbers"] if number[2] == label]  # [round, client, metric, value, n]
        chunk = stage["outcomes"][0][1] if stage["outcomes"] else None
        if evaluation(stage["stage"], settings, sizes[0] if sizes else None, chunk) is not None:
            return None
    except FatbenchError:  # the attack is of a plug-in that is not loaded
        return None
    return f"the name {name} stands for another attack, number of images or batch than its settings"


def difference(settings: Mapping[str, Any], evaluation: Evaluation) -> str | None:
    """The difference between a stage's settings and the evaluation of its name, in words; None if they agree."""
    origin = None if evaluation.origin is None else evaluation.origin.stored_text
    if settings.get("origin") != origin:
        return f"its attack was computed on {settings.get('origin') or 'the model itself'}, not as the suite says"
    suite_settings = _short_form(evaluation.attack)
    try:
        stored_settings = _short_form({key: value for key, value in settings.items() if key not in NOT_OF_ATTACK})
    except FatbenchError:
        stored_settings = {"name": settings["name"]}
    if stored_settings == suite_settings:
        return None
    keys = [key for key in {**suite_settings, **stored_settings} if suite_settings.get(key) != stored_settings.get(key)]
    differing_settings = ", ".join(f"{key} {settings.get(key, 'default')}" for key in keys)
    return f"its attack has other settings than the suite says: {differing_settings}"


def _names(stage: str) -> tuple[str, str]:
    """("pgd20-0a1b2c3d", "pgd20") of the stage "pgd20-0a1b2c3d.bf16@50"."""
    name = stage.rpartition("@")[0]
    for precision in PRECISIONS:
        name = name.removesuffix(f".{precision}")
    return name, name.rpartition("-")[0]


def _short_form(attack: Mapping[str, Any]) -> dict[str, Any]:
    short_form: dict[str, Any] = json.loads(json.dumps(calls.without_defaults(calls.call("Attack", attack))))
    return short_form


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


@functools.lru_cache(4096)
def _images_and_batch(
    name: str, attack: str, origin: str | None, n: int | None, chunk: int | None
) -> tuple[int | None, int] | None:
    """(images, batch) whose hash is in the name of an evaluation; None if no likely ones have it."""
    name_digest, origin_part = name.rpartition("-")[2], [] if origin is None else [origin]
    short_attack = json.loads(attack)
    for images in dict.fromkeys([n, None, *(size for size in SIZES if size >= (n or 0))]):
        for batch in _batches(n, chunk):
            if digest([short_attack, images, batch, *origin_part])[:8] == name_digest:
                return images, batch
    return None


def _batches(n: int | None, chunk: int | None) -> Iterator[int]:
    """The batches that can have given a first chunk of so many images, likely ones first."""
    if chunk is not None:
        yield chunk
    if chunk is None or chunk == n:  # all images at once, or the answer of a diverged network
        yield from SIZES
        yield from range(1, LARGEST_BATCH)
