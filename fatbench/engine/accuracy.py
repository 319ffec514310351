"""Accuracy under attack, kept per example: which of n images a model still classifies correctly.

Bits are True where the model classifies the attacked image correctly (`outcomes.is_correct`). This is decided in
float32, whatever the precision of the attack, so a success that float32 does not confirm is not counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fatbench.engine.gradients import NoGradient, cross_entropy, gradient_of, logits_of, part_of
from fatbench.engine.inject import requested_arguments
from fatbench.engine.local import load, pixels, precision_context
from fatbench.engine.outcomes import Seen, attacked_images, ball, is_correct
from fatbench.engine.randomness import generator
from fatbench.engine.rounds import Problem, Tensors


def natural(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    """No attack: the images (B, C, H, W) as they are."""
    return x


class Chunk(NamedTuple):
    """The outcomes of consecutive images, on the CPU."""

    first: int  # position of the first image
    correct: Tensor  # (b,) bool
    losses: Tensor  # (b,) float64, cross-entropy
    seen: Seen


def attack_in_chunks(
    problem: Problem,
    state: Tensors,
    images: Tensor,
    labels: Tensor,
    attack: Callable[..., Tensor],
    key: tuple[str | int, ...],
    *,
    batch: int,
    start: int = 0,
    origin: tuple[Problem, Tensors] | None = None,
) -> Iterator[Chunk]:
    """Attack the images from `start` on, `batch` at a time, and yield the outcomes of each chunk.

    images (n, C, H, W) uint8, labels (n,). The attack's randomness is keyed by `key` and the chunk's first image, so
    an interrupted stage continues as if it had never stopped. origin: the model that the attack is computed on, if it
    is another; its problem has its own network. An attack may ask for `index` (B,) int64, the positions of its images
    among `images`. It may switch the model to another mode, in which the model then predicts.
    """
    model = load(problem, state).eval()
    computed_on = model if origin is None else load(*origin).eval()
    attack_ball = ball(attack)
    for offset in range(start, len(labels), batch):
        x, y = pixels(problem, images[offset : offset + batch]), labels[offset : offset + batch]
        noise = generator(problem.seed, *key, offset, device=problem.device)
        with precision_context(problem):
            positions = functools.partial(torch.arange, offset, offset + len(y), device=y.device)
            returned = attack(computed_on, x, y, noise, **requested_arguments(attack, {"index": positions}))
        adversarial = attacked_images(returned, x)
        with torch.no_grad():
            logits = logits_of(model, adversarial).double()
        losses = F.cross_entropy(logits, y, reduction="none").cpu()
        yield Chunk(offset, is_correct(logits, y).cpu(), losses, Seen.of(logits, x, adversarial, attack_ball))


def outcomes_of(
    problem: Problem,
    state: Tensors,
    images: Tensor,
    labels: Tensor,
    attack: Callable[..., Tensor],
    key: tuple[str | int, ...],
    *,
    batch: int = 500,
) -> Chunk:
    """The outcomes of all images (n, C, H, W) uint8 under the attack, `batch` at a time."""
    _, correct, losses, observations = zip(
        *attack_in_chunks(problem, state, images, labels, attack, key, batch=batch), strict=True
    )
    return Chunk(0, torch.cat(correct), torch.cat(losses), functools.reduce(Seen.__add__, observations))


def accuracy(
    problem: Problem,
    state: Tensors,
    images: Tensor,
    labels: Tensor,
    attack: Callable[..., Tensor],
    key: tuple[str | int, ...],
    *,
    batch: int = 500,
) -> tuple[Tensor, float]:
    """(which images are classified correctly under the attack, (n,) bool on the CPU; their mean cross-entropy)."""
    judgement = outcomes_of(problem, state, images, labels, attack, key, batch=batch)
    return judgement.correct, float(judgement.losses.mean())


def most_frequent(labels: Tensor) -> Tensor:
    """Which labels (n,) are the most frequent one, (n,) bool on the CPU: the outcome of a model that always says it."""
    return (labels == labels.bincount().argmax()).cpu()


def models_of(model: Tensors, client_tensors: Mapping[int, Tensors]) -> dict[int, Tensors]:
    """{client: its model} of a round; {-1: model} if there is one global model."""
    return {k: {**model, **tensors} for k, tensors in sorted(client_tensors.items())} or {-1: model}


def of_client(k: int) -> tuple[int, ...]:
    """A client of `models_of` as part of a random stream's key; empty for the global model."""
    return (k,) if k >= 0 else ()


def edge_accuracy(problem: Problem, state: Tensors, images: Tensor, labels: Tensor, batch: int = 500) -> float:
    """The accuracy of the small device's own classifier, `edge_logits` of the model, on images (n, C, H, W) uint8."""
    model = load(problem, state).eval()
    hits = 0
    with torch.no_grad():
        for offset in range(0, len(labels), batch):
            logits = model.edge_logits(pixels(problem, images[offset : offset + batch]))  # type: ignore[operator]
            hits += int(is_correct(logits, labels[offset : offset + batch]).sum())
    return hits / len(labels)


def zero_gradients(problem: Problem, state: Tensors, images: Tensor, labels: Tensor, batch: int = 500) -> float:
    """The fraction of images (n, C, H, W) uint8 whose loss has no gradient: gradient attacks cannot move them.

    NIN ends in a ReLU, so images whose logits are all zero have none. Such images inflate robust accuracy (Athalye et
    al. 2018). 1.0 if the network cuts its gradient.
    """
    model = load(problem, state).eval()
    immovable = 0
    for offset in range(0, len(labels), batch):
        x = pixels(problem, images[offset : offset + batch])
        try:
            _, gradient = gradient_of(model, cross_entropy, x, labels[offset : offset + batch], part_of(x, model))
        except NoGradient:
            return 1.0
        immovable += int((~(gradient.flatten(1).abs().amax(1) > 0)).sum())  # so that NaN counts, too
    return immovable / len(labels)


def prior_accuracy(
    correct_by_client: Mapping[int, Tensor], labels: Tensor, labels_by_client: Sequence[Tensor], classes: int
) -> dict[int, float]:
    """{client: sum over classes c of pi_c a_c}: its fraction of class c times the test accuracy on class c.

    This estimates the accuracy on the client's own distribution if clients differ in their labels alone.
    correct_by_client: which of the n test images each client's model classifies correctly, (n,) bool; {-1: ...} is the
    one global model. labels (n,); labels_by_client: the labels of each client's training examples. Clients without
    examples are left out. Empty if the test images lack a class that some client has.
    """
    labels = labels.cpu()
    test_counts = torch.bincount(labels, minlength=classes)
    accuracy_by_client = {}
    for k, client_labels in enumerate(labels_by_client):
        if len(client_labels) == 0 or (bits := correct_by_client.get(k, correct_by_client.get(-1))) is None:
            continue
        fractions = torch.bincount(client_labels.cpu(), minlength=classes).double() / len(client_labels)
        if bool(((fractions > 0) & (test_counts == 0)).any()):
            return {}
        hits = torch.bincount(labels[bits.cpu()], minlength=classes).double()
        accuracy_by_client[k] = float((fractions * hits / test_counts.clamp(min=1)).sum())
    return accuracy_by_client


def packed(bits: Tensor) -> bytes:
    """Bits (b,) bool as bytes, eight to a byte, the first in the highest bit."""
    import numpy

    return numpy.packbits(bits.numpy()).tobytes()


def unpacked(data: bytes, n: int) -> Any:
    """The first n bits of `packed` bytes as a numpy bool array."""
    import numpy

    return numpy.unpackbits(numpy.frombuffer(data, dtype=numpy.uint8), count=n).astype(bool)
