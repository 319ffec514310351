"""Checks on the outputs of a model that was trained elsewhere: is it what its owner says?

Each doubt is a few words that mark the model's numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fatbench.engine.gradients import logits_of
from fatbench.engine.local import load, pixels
from fatbench.engine.rounds import Problem, Tensors

CLOSE = 1e-4  # of the largest output: less is rounding, also of kernels that sum in another order each time
APART = 1e-3  # of the largest output: batches of other sizes use other kernels

NOT_FINITE = "outputs on clean images are not finite"
RANDOM = "outputs are random"
BATCH = "outputs depend on the other images of the batch"
PROBABILITIES = "outputs are probabilities"
NOT_PROBABILITIES = "outputs are no probabilities"
ADVICE = {
    RANDOM: "two passes over the same images differ; an attack needs the expectation over them (Athalye et al. 2018)",
    BATCH: "the same images in another order and in smaller batches give other outputs",
    PROBABILITIES: "they are not negative and add up to 1; say --outputs probabilities",
    NOT_PROBABILITIES: "they are negative or do not add up to 1; say --outputs logits",
    NOT_FINITE: "gradient attacks cannot follow them",
}


def doubts(problem: Problem, state: Tensors, images: Tensor, outputs: str | None = None, batch: int = 100) -> list[str]:
    """Doubts about the model's outputs on the first `batch` images (n, C, H, W) uint8.

    outputs: what its owner declares them to be, "logits" or "probabilities"; None: not declared.
    """
    model = load(problem, state).eval()
    x = pixels(problem, images[:batch])
    if len(x) == 1:
        x = torch.cat([x, 1 - x])
    first_outputs, second_outputs = logits_of(model, x).double(), logits_of(model, x).double()
    # in another order and in other batches, but none of one image, which some networks refuse
    reordered_batches = x.flip(0).chunk(2) if len(x) > 3 else [torch.cat([x.flip(0), 1 - x[:1]])]
    reordered_outputs = torch.cat([logits_of(model, batch_images).double() for batch_images in reordered_batches])[
        : len(x)
    ].flip(0)
    if not bool(torch.isfinite(first_outputs).all()):
        return [NOT_FINITE]
    doubt_names = []
    largest = max(1.0, float(first_outputs.abs().max()))
    if float((first_outputs - second_outputs).abs().max()) > CLOSE * largest:
        doubt_names.append(RANDOM)
    elif float((first_outputs - reordered_outputs).abs().max()) > APART * largest:
        doubt_names.append(BATCH)
    # a model that outputs probabilities was wrapped to return their logarithms
    probabilities = first_outputs.exp() if outputs == "probabilities" else first_outputs
    adds_up = bool((probabilities >= -CLOSE).all() and ((probabilities.sum(1) - 1).abs() < 1e-3).all())
    if outputs == "logits" and adds_up:
        doubt_names.append(PROBABILITIES)
    if outputs == "probabilities" and not adds_up:
        doubt_names.append(NOT_PROBABILITIES)
    return doubt_names
