"""Threat models of attacks on privacy whose settings decide which, without torch: a table of results shows them."""

from __future__ import annotations

from typing import Any

from fatbench.suite.entry import Threat


def of_patch_ls(*, decay: str, solver: str) -> Threat:
    """C: it undoes the client's weight decay. B: it has an image prior."""
    if decay == "corrected":
        return "C"
    return "B" if solver in ("box", "tv", "upsample") else "A"


def of_gradient_inversion(*, block0: str, observed_rounds: int, weights: str, labels_from: Any) -> Threat:
    """F: the server sends other weights than training gives. C: labels are recovered from the client's batch."""
    if block0 == "bare" or (observed_rounds > 1 and weights == "fixed"):
        return "F"
    return "C" if labels_from == "counts" else "A"
