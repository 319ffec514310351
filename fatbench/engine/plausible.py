"""Can a model that was not trained here be what its owner says? What its outputs give away.

Each doubt is a few words; the numbers of the model carry it as a flag.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fatbench.engine.local import load, pixels
from fatbench.engine.rounds import Problem, Tensors

CLOSE = 1e-4  # of the largest output: less is rounding, also of kernels that add in another order each time

RANDOM = "outputs are random"
PROBABILITIES = "outputs are probabilities"
NOT_PROBABILITIES = "outputs are no probabilities"
NOT_FINITE = "outputs are not finite"
ADVICE = {
    RANDOM: "two passes over the same images differ; an attack needs the expectation over them (Athalye et al. 2018)",
    PROBABILITIES: "they are not negative and add up to 1; say --outputs probabilities",
    NOT_PROBABILITIES: "they are negative or do not add up to 1; say --outputs logits",
    NOT_FINITE: "an attack that follows them is lost",
}


def doubts(problem: Problem, state: Tensors, images: Tensor, outputs: str, batch: int = 100) -> list[str]:
    """What is doubtful about the model's outputs on the first `batch` images (n, C, H, W) uint8.

    outputs: what its owner says that they are, "logits" or "probabilities".
    """
    model = load(problem, state).eval()
    x = pixels(problem, images[:batch])
    with torch.no_grad():
        first, second = model(x).double(), model(x).double()
    if not bool(torch.isfinite(first).all()):
        return [NOT_FINITE]
    found = []
    if float((first - second).abs().max()) > CLOSE * max(1.0, float(first.abs().max())):
        found.append(RANDOM)
    # Of a model that gives probabilities these are their logarithms.
    given = first.exp() if outputs == "probabilities" else first
    adds_up = bool((given >= -CLOSE).all() and ((given.sum(1) - 1).abs() < 1e-3).all())
    if outputs == "logits" and adds_up:
        found.append(PROBABILITIES)
    if outputs == "probabilities" and not adds_up:
        found.append(NOT_PROBABILITIES)
    return found
