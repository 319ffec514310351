"""Threat models by letter: what an attacker must know or do, as each attack declares it.

The entry of a function states the threat model that it assumes, `threat="B"`, or a function of its settings that gives
one. "bound" marks what no attacker can do, such as choosing by the original image. A cell assumes everything that its
algorithm, its diagnostic and all nested calls assume.

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
BOUND = "bound"  # no attacker: only the client has what it uses
AXES = ("threat", "labels")  # facts of a cell that tables and filters may use like axes


def letter(part_call: Call) -> str | None:
    """The threat model of one call, from the entry of its function, or None."""
    declared = part_call.signature.entry.get("threat")
    if isinstance(declared, str) and ":" in declared:
        # a threat function of ours can be imported without its method, and so without torch
        is_plugin = part_call.signature.plugin is not None
        declared = (
            getattr(calls.entry(part_call.signature), "threat", None) if is_plugin else pkgutil.resolve_name(declared)
        )
    return (
        declared(**{name: part_call[name] for name in inspect.signature(declared).parameters})
        if callable(declared)
        else declared
    )


def uses_labels(part_call: Call) -> bool:
    """Whether an inversion reads the labels of the images."""
    return bool(part_call.signature.entry.get("labels"))


def _threat_calls(spec: Mapping[str, Any]) -> list[tuple[Call, str]]:
    """(call, letter) for the calls of a cell's algorithm and diagnostic that declare a threat model."""
    if "evaluated" in spec:  # a model that was trained elsewhere
        return []
    attacking = [call(kind, spec[kind.lower()]) for kind in ("Algorithm", "Diagnostic") if spec.get(kind.lower())]
    all_calls = (part_call for attack_call in attacking for part_call in attack_call.walk())
    return [(part_call, letter_needed) for part_call in all_calls if (letter_needed := letter(part_call)) is not None]


def of_cell(spec: Mapping[str, Any]) -> dict[str, str]:
    """{"threat": ..., "labels": ...} of a cell with an attack on privacy; empty for any other cell.

    threat: the first letter that covers all its parts, "bound", or "custom" if no letter does. labels: "given",
    "recovered" (from the update) or "unused".
    """
    threat_calls = _threat_calls(spec)
    if not threat_calls:
        return {}
    reads_labels = any(uses_labels(part_call) for part_call, _ in threat_calls)
    restores = "inversion" in (spec.get("diagnostic") or {})  # from what clients really send
    source = spec["algorithm"].get("labels_from", "ilrg" if restores else "client")
    labels = ("given" if source == "client" else "recovered") if reads_labels else "unused"
    return {"threat": covering([letter for _, letter in threat_calls]), "labels": labels}


def covering(letters: list[str]) -> str:
    """The first letter whose attacker can do all that the attackers of these letters can."""
    if BOUND in letters:
        return BOUND
    needed_knowledge = frozenset[str]().union(*(KNOWS[letter] for letter in letters))
    return next((letter for letter, attacker_knows in KNOWS.items() if needed_knowledge <= attacker_knows), "custom")


def refuse(cell: Call, stated_letter: str) -> None:
    """SpecError if a cell's attack needs more than the threat model that its suite states."""
    for part_call, letter in _threat_calls(cell):
        missing_knowledge = {"what only the client has"} if letter == BOUND else KNOWS[letter] - KNOWS[stated_letter]
        if missing_knowledge:
            outer = "Diagnostic" if part_call.kind == "Diagnostic" else "Algorithm"
            key = "name" if part_call.kind == outer else part_call.kind.lower()
            needs = f"{part_call.signature.name} needs {' and '.join(sorted(missing_knowledge))}"
            error = SpecError(
                f"{needs} (threat model {letter}), but the suite states {stated_letter}, the {NAMES[stated_letter]}"
            )
            raise error.below(key).below(outer.lower())
