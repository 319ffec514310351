"""Threat models by their letters: what an attacker must know or do, as each attack declares it.

The entry of a function says by a letter what it takes for granted, `threat="B"`, or by a function of its settings.
"bound" marks what no attacker can do, such as choosing by the original. A cell needs what its algorithm and all that it
calls need together.

Letters: Carletti et al. 2025 (SoK: Gradient Inversion Attacks in Federated Learning, USENIX Security). Everybody sees
the update, the architecture, the weights that were sent and the number of examples.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any, Literal

from fatbench.errors import SpecError
from fatbench.suite import calls
from fatbench.suite.calls import Call, call
from fatbench.suite.located import LocatedMap

Letter = Literal["A", "B", "C", "D", "E", "F", "G", "H"]
PRIOR, TRAINING, IMAGES = "an image prior", "the client's rate, steps and batch size", "images of its own"
STATISTICS, MODEL, CLIENTS = "the client's statistics", "a changed model", "a choice of clients"
KNOWS: dict[str, frozenset[str]] = {
    "A": frozenset(),
    "B": frozenset({PRIOR}),
    "C": frozenset({PRIOR, TRAINING}),
    "D": frozenset({PRIOR, TRAINING, IMAGES}),
    "E": frozenset({PRIOR, TRAINING, IMAGES, STATISTICS}),
    "F": frozenset({PRIOR, TRAINING, MODEL}),
    "G": frozenset({PRIOR, TRAINING, IMAGES, MODEL}),
    "H": frozenset({PRIOR, TRAINING, IMAGES, MODEL, CLIENTS}),
}
NAMES = {
    "A": "eavesdropper", "B": "informed eavesdropper", "C": "parameter-aware eavesdropper",
    "D": "data-enhanced eavesdropper", "E": "statistical-informed eavesdropper", "F": "active manipulator",
    "G": "data-enhanced manipulator", "H": "active client manipulator",
}  # fmt: skip
BOUND = "bound"  # no attacker: it uses what only the client has
AXES = ("threat", "labels")  # what tables and filters may ask of a cell beside its axes


def letter(part: Call) -> str | None:
    """What one call needs, by the entry of its function; None: no threat model."""
    said = part.signature.entry.get("threat")
    if isinstance(said, str) and ":" in said:
        plugin = part.signature.plugin is not None  # the module of one of ours imports no method
        said = getattr(calls.entry(part.signature), "threat", None) if plugin else pkgutil.resolve_name(said)
    return said(**{name: part[name] for name in inspect.signature(said).parameters}) if callable(said) else said


def uses_labels(part: Call) -> bool:
    """Whether an inversion reads the labels of the images."""
    return bool(part.signature.entry.get("labels"))


def _needed(spec: Mapping[str, Any]) -> list[tuple[Call, str]]:
    """The calls of a cell's algorithm and diagnostic that declare a threat model, and which."""
    if "evaluated" in spec:  # a model that was trained elsewhere
        return []
    parts = call("Algorithm", spec["algorithm"]).walk()
    return [(part, needs) for part in parts if (needs := letter(part)) is not None]


def of_cell(spec: Mapping[str, Any]) -> dict[str, str]:
    """ "threat" and "labels" of a cell with an attack on privacy; empty for any other.

    threat: the first letter that covers all that its parts need, "bound", or "custom" where no letter does. labels:
    "given", "recovered" (from the update) or "unused".
    """
    needed = _needed(spec)
    if not needed:
        return {}
    used = any(uses_labels(part) for part, _ in needed)
    source = spec["algorithm"].get("labels_from", "client")
    labels = ("given" if source == "client" else "recovered") if used else "unused"
    return {"threat": covering([letter for _, letter in needed]), "labels": labels}


def covering(letters: list[str]) -> str:
    """The first letter whose attacker knows and does all that these do."""
    if BOUND in letters:
        return BOUND
    wanted = frozenset[str]().union(*(KNOWS[letter] for letter in letters))
    return next((letter for letter, known in KNOWS.items() if wanted <= known), "custom")


def refuse(cell: Call, stated: str, written: Mapping[str, Any], place: str) -> None:
    """SpecError: a cell's attack needs more than the threat model that its suite states.

    written: the cell as it stands in the suite, for the line of the attack; place: of the statement.
    """
    for part, letter in _needed(cell):
        lacks = {"the original images"} if letter == BOUND else KNOWS[letter] - KNOWS[stated]
        if lacks:
            at = written.get("algorithm")
            key = "name" if part.kind == "Algorithm" else part.kind.lower()
            where = at.place(key) if isinstance(at, LocatedMap) and key in at else place
            raise SpecError(
                f"{where}: {part.signature.name} needs {' and '.join(sorted(lacks))} (threat model {letter}), and the "
                f"suite states {stated}, the {NAMES[stated]} ({place})"
            )
