"""The evaluation behind a stored stage: its attack, its number of images, its batch.

The name of a stage holds a hash of the three. The attack is stored with the numbers, the images and the batch that were
asked for in the stage's record, under "requested". Stages of older versions have these two in the hash alone, so they
are found by trying likely values.

The hash has 32 bits, so whoever tries long enough finds weak settings for a name. Of the evaluations of our suites
listing.json has the settings themselves.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fatbench.errors import FatbenchError
from fatbench.settings import PRECISIONS
from fatbench.suite import calls, plugins
from fatbench.suite.cells import Evaluation, TransferOrigin, json_text

LISTING = Path(__file__).with_name("listing.json")  # see `fatbench.suite.sizes`
SIZES = (20, 32, 50, 64, 100, 128, 200, 250, 256, 500, 512, 1000, 1024, 2000, 2048, 2500, 4096, 5000, 8192, 10_000)
LARGEST_BATCH = 2**14  # tried where one batch held all images, so that its size is unknown
MORE_IMAGES = (*range(1, 10_000), *range(10_000, 100_001, 500))  # tried as well, where there may have been fewer
Request = tuple[int | None, int]  # (images, batch)
NOT_OF_ATTACK = ("implementation", "origin")  # keys of stored settings that are not settings of the attack


def evaluation(
    stage: str,
    settings: Mapping[str, Any],
    n: int | None,
    chunk: int | None,
    requested: Mapping[str, Any] | None = None,
) -> Evaluation | None:
    """The evaluation that a stage is named after; None if none with these settings has this name.

    n: test images behind its number. chunk: images in its first outcomes. Both None if unknown. requested: the images
    and the batch in its record; None in those of older versions. SpecError for an unknown attack.
    """
    name, label = _names(stage)
    attack = attack_of(settings)
    recorded = None if requested is None else (requested["n"], requested["batch"])
    attack_text = json_text(_short_attack(attack))
    images_and_batch = _images_and_batch(name, attack_text, settings.get("origin"), n, chunk, recorded)
    if images_and_batch is None:
        return None
    named = Evaluation(label, attack, *images_and_batch, origin=_origin(label, settings.get("origin")))
    return named if short_form(named) == _shipped_attacks().get(name, short_form(named)) else None


def contradiction(stage: Mapping[str, Any]) -> str | None:
    """The contradiction between a stage's name and its settings, in words; None if they agree.

    stage: as in a line of an export.
    """
    settings, (_, label) = stage.get("settings"), _names(stage["stage"])
    if settings is None or stage["stage"] == "train":
        return None
    sizes = [number[4] for number in stage["numbers"] if number[2] == label]  # [round, client, metric, value, n]
    chunk = stage["outcomes"][0][1] if stage["outcomes"] else None
    requested = stage["record"].get("requested")
    if not is_another(stage["stage"], settings, sizes[0] if sizes else None, chunk, requested):
        return None
    return "its settings do not give the hash in its name: its number may be of another attack or of other images"


def is_another(
    stage: str,
    settings: Mapping[str, Any],
    n: int | None,
    chunk: int | None,
    requested: Mapping[str, Any] | None = None,
) -> bool:
    """Whether a stage is named after another evaluation than one with these settings, all as for `evaluation`.

    Attacks of plug-ins are left out: their authors may change the settings.
    """
    try:
        return not any(plugins.used_plugins(calls.call("Attack", settings))) and (
            evaluation(stage, settings, n, chunk, requested) is None
        )
    except FatbenchError:  # the attack is of a plug-in that is not loaded
        return False


def attack_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The attack of a stage's settings, which also say whose code computed it, and on which model."""
    return {key: value for key, value in settings.items() if key not in NOT_OF_ATTACK}


def short_form(evaluation: Evaluation) -> dict[str, Any]:
    """The attack of an evaluation without defaults, and the model that it is computed on where that is another."""
    origin = {} if evaluation.origin is None else {"origin": evaluation.origin.stored_text}
    return {**_short_attack(evaluation.attack), **origin}


def _names(stage: str) -> tuple[str, str]:
    """("pgd20-0a1b2c3d", "pgd20") of the stage "pgd20-0a1b2c3d.bf16@50"."""
    name = stage.rpartition("@")[0]
    for precision in PRECISIONS:
        name = name.removesuffix(f".{precision}")
    return name, name.rpartition("-")[0]


def _short_attack(attack: Mapping[str, Any]) -> dict[str, Any]:
    attack_without_defaults: dict[str, Any] = json.loads(
        json.dumps(calls.without_defaults(calls.call("Attack", attack)))
    )
    return attack_without_defaults


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


@functools.lru_cache(4096)
def _images_and_batch(
    name: str,
    attack: str,
    origin: str | None,
    n: int | None,
    chunk: int | None,
    recorded: Request | None,
) -> Request | None:
    """(images, batch) whose hash is in the name of an evaluation; None if it is that of no possible ones.

    attack: canonical JSON.
    """
    name_digest, origin_text = name.rpartition("-")[2], "" if origin is None else f",{json_text(origin)}"
    for images, batch in _requests(n, chunk, recorded):
        identity_text = f"[{attack},{'null' if images is None else images},{batch}{origin_text}]"  # as `Evaluation.id`
        if hashlib.sha256(identity_text.encode()).hexdigest()[:8] == name_digest:
            return images, batch
    return None


def _requests(n: int | None, chunk: int | None, recorded: Request | None) -> Iterator[Request]:
    """The requests that can have given n images and such a first chunk, likely ones first; of a recorded one itself."""
    if recorded is not None:
        images, batch = recorded
        if (images is None or images >= (n or 0)) and (n is None or chunk in (None, n, batch)):
            yield recorded
        return
    for images in dict.fromkeys([n, None, *(size for size in SIZES if size >= (n or 0))]):
        for batch in _batches(n, chunk):
            yield images, batch
    likely_batches = list(itertools.islice(_batches(n, chunk), 1 + len(SIZES)))
    for images in MORE_IMAGES:
        for batch in likely_batches if images >= (n or 0) else ():
            yield images, batch


def _batches(n: int | None, chunk: int | None) -> Iterator[int]:
    """The batches that can have given a first chunk of so many images, likely ones first."""
    if chunk is not None:
        yield chunk
    # all images at once, or the answer of a diverged network; an interrupted stage has no number yet
    if chunk is None or n in (None, chunk):
        yield from SIZES
        yield from range(1, LARGEST_BATCH)
