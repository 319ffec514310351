"""Threat models of attacks on privacy that depend on their settings. Without torch, because tables show them."""

from __future__ import annotations

from typing import Any

from fatbench.suite.entry import Threat


def of_patch_ls(*, decay: str, solver: str) -> Threat:
    """C if it undoes the client's weight decay, B with an image prior, else A."""
    if decay == "corrected":
        return "C"
    return "B" if solver in ("box", "tv", "upsample") else "A"


def of_matching(*, statistics: float, statistics_from: str) -> Threat:
    """B; with statistics of the client E, with those of images of its own D."""
    return {"sent": "E", "images": "D"}.get(statistics_from, "B") if statistics else "B"  # type: ignore[return-value]


def of_simulated(*, statistics: float) -> Threat:
    """C; E with the client's statistics."""
    return "E" if statistics else "C"


def of_exposure(*, attackers: str | None) -> Threat:
    """The letter that covers its attackers of features; an inversion has its own."""
    names = {name.strip() for name in (attackers or "").split(",")}
    if names & {"known", "optimised"}:
        return "bound"
    return "D" if names & {"initial", "surrogate"} else "A"


def of_gradient_inversion(*, block0: str, observed_rounds: int, weights: str, labels_from: Any) -> Threat:
    """F if the server sends other weights than training gives, C if it knows the batch's class counts, else A."""
    if block0 == "bare" or (observed_rounds > 1 and weights == "fixed"):
        return "F"
    return "C" if labels_from == "counts" else "A"
