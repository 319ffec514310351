"""Checks on a model: are its outputs what its owner says, and do its gradients say how they change?

Each doubt is a few words that mark the model's numbers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fatbench.engine.gradients import NoGradient, gradient_of, in_parts, logits_of, part_of
from fatbench.engine.local import load, pixels
from fatbench.engine.outcomes import is_correct
from fatbench.engine.randomness import forked, generator
from fatbench.engine.rounds import Problem, Tensors
from fatbench.models.external_network import HALF_A_UNIT, TINY

CLOSE = 1e-4  # of the largest output: less is rounding, also of kernels that sum in another order each time
CLEAN = 100  # images that must be answered as before
APART = 1e-3  # of the largest output: batches of other sizes use other kernels

CEILING = 0.01  # of the range of all outputs: below the largest of them, where those of a tanh or a sigmoid lie

NOT_FINITE = "outputs on clean images are not finite"
RANDOM = "outputs are random"
BATCH = "outputs depend on the other images of the batch"
ASKED = "outputs are others where a gradient is asked for"
CHANGED = "clean images are answered otherwise"
PROBABILITIES = "outputs are probabilities"
NOT_PROBABILITIES = "outputs are no probabilities"
SIGMOID = "outputs are between 0 and 1"
NOT_SIGMOID = "outputs are not between 0 and 1"
SQUEEZED = "outputs are squeezed"
ADVICE = {
    RANDOM: "two passes over the same images differ; an attack needs the expectation over them (Athalye et al. 2018)",
    BATCH: "the same images in another order and in smaller batches give other outputs",
    ASKED: "gradient attacks see another network than the one that is judged",
    PROBABILITIES: "they are not negative and add up to 1; say outputs: probabilities",
    NOT_PROBABILITIES: "they are negative or do not add up to 1; say outputs: logits",
    SIGMOID: "attacks take them for logits; say outputs: sigmoid if they are one of each class, or return the logits",
    NOT_SIGMOID: "they are no sigmoid of each class; say outputs: logits",
    SQUEEZED: "the network is right more often than they are sure, or they end at a ceiling, and the cross-entropy has"
    " little to follow; return the logits before a tanh, a scale or a temperature, or rely on cw and autoattack",
    NOT_FINITE: "gradient attacks cannot follow them",
}


def doubts(
    problem: Problem, state: Tensors, images: Tensor, labels: Tensor, outputs: str | None = None, batch: int = 100
) -> list[str]:
    """Doubts about the model's outputs on the first `batch` images (n, C, H, W) uint8, labels (n,).

    outputs: what its owner declares them to be, "logits", "probabilities" or "sigmoid"; None: not declared.
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
    elif (asked_outputs := _asked(model, x)) is not None and float((first_outputs - asked_outputs).abs().max()) > (
        APART * largest
    ):
        doubt_names.append(ASKED)
    y = labels[:batch]
    return doubt_names + _of_form(first_outputs[: len(y)], y, outputs)


def _of_form(logits: Tensor, y: Tensor, outputs: str | None) -> list[str]:
    """The doubt whether a model returns what is declared. logits (B, classes): as `Preprocessed` makes them of it."""
    # a model that outputs probabilities was wrapped to return their logarithms, and so on
    given = {"probabilities": logits.exp(), "sigmoid": logits.sigmoid()}.get(outputs or "", logits)
    adds_up = bool((given >= -CLOSE).all() and ((given.sum(1) - 1).abs() < 1e-3).all())
    if outputs == "probabilities":
        return [] if adds_up else [NOT_PROBABILITIES]
    if outputs == "sigmoid":
        # clipped at both ends, beyond which other outputs lie; two classes may be one sigmoid and its rest
        lowest, highest = math.log(TINY), -math.log(HALF_A_UNIT)
        if bool(((logits < lowest - CLOSE) | (logits > highest + CLOSE)).any()):
            return [NOT_SIGMOID]
        return [PROBABILITIES] if adds_up and logits.shape[1] > 2 else []
    if outputs is None or adds_up:
        return [PROBABILITIES] if outputs else []
    right = float((logits.argmax(1) == y).double().mean())
    are_logarithms = bool((logits.logsumexp(1).abs() < 1e-3).all())  # whose ceiling is 0
    if are_logarithms or not _above(right, len(y), float(y.bincount().max()) / len(y)):
        return []  # nothing follows from a network at chance
    if bool(((logits > 0) & (logits <= 1)).all()):
        return [SIGMOID]
    height = logits.max() - logits.min()
    at_the_ceiling = float((logits.amax(1) >= logits.max() - CEILING * height).double().mean())
    surest = float(logits.softmax(1).max())
    return [SQUEEZED] if at_the_ceiling >= 0.5 or _above(right, len(y), surest) else []


def _above(share: float, n: int, expected: float) -> bool:
    """Whether a share of n is above the expected one by more than three standard deviations."""
    return share - expected > 3 * math.sqrt(expected * (1 - expected) / n)


def changed_answers(problem: Problem, state: Tensors | None, images: Tensor, labels: Tensor, right: Tensor) -> int:
    """How many of the first images are classified otherwise than `right` says, beyond rounding.

    images (n, C, H, W) uint8, labels (n,), right (n,) bool: whether each was classified right. state: None for the
    network as an attack left it. Also looked at with a gradient asked for, as an attack does. 0 for a network that
    draws, which has its own doubt.
    """
    model = (problem.model if state is None else load(problem, state)).eval()
    count = min(len(right), len(labels), CLEAN)
    x, y, right = pixels(problem, images[:count]), labels[:count], right[:count].to(labels.device)
    changed = torch.zeros_like(right)
    for logits in (logits_of(model, x), _asked(model, x)):
        if logits is not None:
            first, second = logits.topk(2, dim=1).values.T
            is_close = first - second <= APART * logits.abs().amax()  # NaN is not
            changed |= (is_correct(logits, y) != right) & ~is_close
    if bool(changed.any()):
        one, two = logits_of(model, x), logits_of(model, x)
        if not torch.allclose(one, two, rtol=0, atol=CLOSE * max(1.0, float(one.abs().max())), equal_nan=True):
            return 0
    return int(changed.sum())


def _asked(model: nn.Module, x: Tensor) -> Tensor | None:
    """The outputs where a gradient by the images x is asked for; None if the network's code then raises."""

    def at_once(part: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return (model(part.requires_grad_()).detach(),)

    try:
        return in_parts(model, part_of(x, model), at_once, x.detach().clone())[0]
    except Exception:  # an attack will say so
        return None


# --- whether gradients follow the loss ----------------------------------------------------------------------------

FOLLOWED = 8  # images whose gradients are tried
SMALL = 8 / 255 / 512  # a step along which networks change as their gradient says, trained or not
LARGE = (2 / 255, 4 / 255, 8 / 255)  # steps of attacks, over which rounding to 16 levels or more evens out
NEAR = 0.1  # of the change that the gradient says: how far a small step may be off
FAR = 0.5  # the same of a large step, over which losses bend
BENT = 10.0  # times less than the gradient says may a large step along it bring
NEARLY = 0.9  # of the change along random signs: the least that a large step along the gradient's must bring
ROUNDING = 16  # units of rounding of the largest output, by which a change may be off besides
NOISE = 2 / 255  # added to the images: flat backgrounds sit on the kinks of pooling, data on the levels of rounding


def not_followed(problem: Problem, state: Tensors, images: Tensor, labels: Tensor) -> tuple[float, int]:
    """(share of images whose loss does not change as its gradient says, of how many that have a gradient).

    images (n, C, H, W) uint8, labels (n,); the first `FOLLOWED` are tried, in float64 where the network takes it. A
    network that cuts its gradient and adds another, however small, withstands gradient attacks (Athalye et al. 2018).

    The loss is the log odds against the label, whose gradient has the direction of the cross-entropy's and does not
    vanish where the network is sure. A small step must change it as the gradient says, along the gradient's signs and
    along random signs, which also find the gradient of a part of the pixels. Large steps along the gradient's signs
    must raise it, and more than those along random signs do: it may oscillate, or jump between plateaus. A loss that is
    no smooth function of small steps, as with rounding and a straight-through gradient, must change as the gradient
    says over one of the large steps.
    """
    model, x = load(problem, state).eval(), pixels(problem, images[:FOLLOWED])
    y, draws = labels[:FOLLOWED], generator(problem.seed, "not_followed")
    room = LARGE[-1] + NOISE  # so that no step leaves the pixel range
    x = x * (1 - 2 * room) + room + NOISE * (2 * torch.rand(x.shape, generator=draws).to(x) - 1)
    model, x = _in_float64(model, x)

    def losses(moved: Tensor) -> Tensor:
        with forked(problem.seed, "not_followed", device=x.device):  # the same draws in each pass
            return _log_odds(logits_of(model, moved), y)

    try:
        with forked(problem.seed, "not_followed", device=x.device):
            limit = part_of(x, model)
            logits, gradient = gradient_of(model, lambda logits, y: _log_odds(logits, y).sum(), x.clone(), y, limit)
    except NoGradient:
        return 0.0, 0
    signs = [gradient.sign(), *(2 * torch.randint(2, x.shape, generator=draws).to(x) - 1 for _ in range(2))]
    said = torch.stack([(gradient * direction).flatten(1).sum(1) for direction in signs])  # the slopes by the gradient
    # the slope along random signs is about as large as the gradient's length, and may itself be zero
    sizes = torch.stack([said[0], *[gradient.flatten(1).norm(dim=1)] * 2])
    rounding = ROUNDING * torch.finfo(x.dtype).eps * logits.detach().abs().amax(1).clamp(min=1)

    def slopes(step: float, directions: Sequence[Tensor] = signs) -> Tensor:
        """The slopes of the loss (directions, B) over a step to either side."""
        return torch.stack([(losses(x + step * d) - losses(x - step * d)) / (2 * step) for d in directions])

    def close(found: Tensor, expected: Tensor, tolerance: float, step: float) -> Tensor:
        return ((found - expected).abs() <= tolerance * sizes + rounding / step).all(0)

    fine = slopes(SMALL)
    used = (sizes > 0).all(0) & sizes.isfinite().all(0) & fine.isfinite().all(0)
    follows = close(fine, said, NEAR, SMALL)
    for step in LARGE:
        follows &= slopes(step, signs[:1])[0] >= said[0] / BENT - rounding / step
    own, *others = slopes(LARGE[0])
    follows &= own >= NEARLY * torch.stack(others).square().mean(0).sqrt() - rounding / LARGE[0]
    if bool((used & ~follows).any()):
        is_flat = (fine.abs() <= rounding / SMALL).all(0)
        is_smooth = close(fine, slopes(SMALL / 2), NEAR, SMALL / 2) & ~is_flat
        for step in LARGE:
            follows |= ~is_smooth & close(slopes(step), said, FAR, step)
    return int((used & ~follows).sum()) / max(1, int(used.sum())), int(used.sum())


def _log_odds(logits: Tensor, y: Tensor) -> Tensor:
    """log((1 - p) / p) of each image (B,), with p the probability of its label."""
    label = y.unsqueeze(1)
    return logits.scatter(1, label, -torch.inf).logsumexp(1) - logits.gather(1, label).squeeze(1)


def _in_float64(model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """The model and the images x in float64, where the model computes the same in it; else as they are."""
    try:
        model_copy = copy.deepcopy(model).double()
        logits, exact_logits = logits_of(model, x), logits_of(model_copy, x.double())
        if torch.allclose(exact_logits.float(), logits.float(), rtol=0, atol=1e-2 * float(logits.abs().max())):
            return model_copy, x.double()
    except Exception:  # the network's own code; it may not be copied, or names a type
        pass
    return model, x
