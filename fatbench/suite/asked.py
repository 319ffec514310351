"""What a stored stage was asked to do: its attack, how many images, which batch. Its name holds a hash of the three.

The attack stands beside the numbers; the other two are found by trying, since they are in the hash alone.
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

USUAL = (20, 32, 50, 64, 100, 128, 200, 250, 256, 500, 512, 1000, 1024, 2000, 2048, 2500, 4096, 5000, 8192, 10_000)
LARGEST = 2**14  # batches up to here are tried where all images were in one
BESIDE = ("implementation", "origin")  # what is stored with the settings of an attack and is none


def evaluation(stage: str, settings: Mapping[str, Any], n: int | None, chunk: int | None) -> Evaluation | None:
    """The evaluation that a stage's name is of; None: no evaluation with these settings has this name.

    n: test images of its number. chunk: images of its first outcomes. None: unknown. SpecError: no such attack.
    """
    name, label = _names(stage)
    attack = {key: value for key, value in settings.items() if key not in BESIDE}
    images_and_batch = _images_and_batch(name, json.dumps(_short_form(attack)), settings.get("origin"), n, chunk)
    if images_and_batch is None:
        return None
    return Evaluation(label, attack, *images_and_batch, origin=_origin(label, settings.get("origin")))


def contradiction(stage: Mapping[str, Any]) -> str | None:
    """In what the name of a stage contradicts its settings; stage: as in a line of an export. None: in nothing.

    The functions of a plug-in are its author's to change, so their settings are not asked.
    """
    settings, (name, label) = stage.get("settings"), _names(stage["stage"])
    if settings is None or stage["stage"] == "train":
        return None
    try:
        if any(plugins.used_plugins(calls.call("Attack", settings))):
            return None
        sizes = [number[4] for number in stage["numbers"] if number[2] == label]
        chunk = stage["outcomes"][0][1] if stage["outcomes"] else None
        if evaluation(stage["stage"], settings, sizes[0] if sizes else None, chunk) is not None:
            return None
    except FatbenchError:  # of a plug-in that is not loaded
        return None
    return f"{name} is the name of another attack, another number of images or another batch than it has"


def differs(settings: Mapping[str, Any], evaluation: Evaluation) -> str | None:
    """In what a stage's settings are not those of the evaluation that has its name; None: in nothing."""
    origin = None if evaluation.origin is None else evaluation.origin.said
    if settings.get("origin") != origin:
        return f"its attack was computed on {settings.get('origin') or 'the model itself'}, not as the suite says"
    suite_settings = _short_form(evaluation.attack)
    try:
        stored_settings = _short_form({key: value for key, value in settings.items() if key not in BESIDE})
    except FatbenchError:
        stored_settings = {"name": settings["name"]}
    if stored_settings == suite_settings:
        return None
    keys = [key for key in {**suite_settings, **stored_settings} if suite_settings.get(key) != stored_settings.get(key)]
    stored_text = ", ".join(f"{key} {settings.get(key, 'default')}" for key in keys)
    return f"its attack has other settings than the suite says: {stored_text}"


def _names(stage: str) -> tuple[str, str]:
    """The evaluation in the name of a stage, "pgd20-0a1b2c3d", and its label."""
    name = stage.rpartition("@")[0]
    for precision in PRECISIONS:
        name = name.removesuffix(f".{precision}")
    return name, name.rpartition("-")[0]


def _short_form(attack: Mapping[str, Any]) -> dict[str, Any]:
    short_form: dict[str, Any] = json.loads(json.dumps(calls.without_defaults(calls.call("Attack", attack))))
    return short_form


def _origin(metric: str, text: str | None) -> TransferOrigin | None:
    """Whose model an attack was computed on, of what is stored of it."""
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
    """(images, batch) that the name of an evaluation is of; None: of none."""
    wanted_digest, ending = name.rpartition("-")[2], [] if origin is None else [origin]
    short_attack = json.loads(attack)
    for images in dict.fromkeys([n, None, *(size for size in USUAL if size >= (n or 0))]):
        for batch in _batches(n, chunk):
            if digest([short_attack, images, batch, *ending])[:8] == wanted_digest:
                return images, batch
    return None


def _batches(n: int | None, chunk: int | None) -> Iterator[int]:
    """Batches that a first chunk of so many images can come from, the likely ones first."""
    if chunk is not None:
        yield chunk
    if chunk is None or chunk == n:  # all images at once, or the answer of a diverged network
        yield from USUAL
        yield from range(1, LARGEST)
