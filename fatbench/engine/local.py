"""Local training: what a client does between receiving theta^t and sending theta_k.

The loop in `train` reads like the papers'; named random streams draw its batches. `Problem.path` selects one of three
implementations. "loop" uses channels_last (see `memory_format`) and updates all tensors at once. "graphs" is "loop"
with recorded steps and gives the same bits. "reference" is for tests and for networks that were trained elsewhere:
contiguous NCHW, one tensor after the other, equal up to rounding. Nothing inside a step waits for the device.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fatbench.engine import precision
from fatbench.engine.graphs import Recordings
from fatbench.engine.inject import asks, requested_arguments
from fatbench.engine.optimizers import Descent, Moments, step
from fatbench.engine.randomness import forked, generator
from fatbench.engine.rounds import Problem, Stats, Tensors, Update
from fatbench.errors import SpecError, did_you_mean
from fatbench.suite.cost import epochs_in_round
from fatbench.suite.entry import Entry, entry_of
from fatbench.suite.types import Count, Fraction, Momentum, Natural, NonNegative, Objective, Positive, Proximal, Rate


@dataclass(frozen=True)
class LocalTraining:
    """What a client does in a round: `epochs` passes over its examples, one optimizer step for every batch.

    epochs: in round 0; multiplied by `epochs_factor` every `epochs_every` rounds, rounded down, at least 1.
    batch: examples in a step; the last of an epoch may have fewer. lr: learning rate in round 0, multiplied by lr_decay
    every round. momentum is SGD's; its buffer starts at zero in every round. weight_decay is added to the gradient (for
    AdamW, it shrinks the weights). clip: the gradient is scaled to at most this norm. proximal: a term added to the
    gradient that pulls towards the broadcast weights (FedProx). warmup: the objective of the first `warmup_rounds`
    rounds, such as fewer adversarial images, or AT before AWP.
    """

    batch: Count
    lr: Rate
    objective: Objective
    epochs: Count = 1
    epochs_factor: Fraction = 1.0
    epochs_every: Count = 1
    lr_decay: Positive = 1.0
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: Momentum = 0.0
    weight_decay: NonNegative = 0.0
    clip: Positive | None = None
    proximal: Proximal | None = None
    warmup: Objective | None = None
    warmup_rounds: Natural = 0

    def at(self, round: int) -> LocalTraining:
        """The settings of round `round`, counted from 0, with its learning rate, epochs and objective."""
        lr, epochs, objective = self.lr * self.lr_decay**round, self.epochs_in(round), self.objective_in(round)
        return replace(self, lr=lr, epochs=epochs, objective=objective)

    def epochs_in(self, round: int) -> int:
        """The number of epochs in a round."""
        return epochs_in_round(self.epochs, self.epochs_factor, self.epochs_every, round)

    def objective_in(self, round: int) -> Objective:
        """The objective of a round."""
        return self.warmup if self.warmup is not None and round < self.warmup_rounds else self.objective

    def descent(self, plain: bool = False) -> Descent:
        """The optimizer of a round."""
        return Descent(self.optimizer, self.lr, self.momentum, self.weight_decay, self.clip, plain)


def _warmup_has_an_objective(*, warmup_rounds: int, warmup: Objective | None) -> str | None:
    if warmup_rounds and warmup is None:
        return "warmup_rounds: set 'warmup', the objective of these rounds"
    return None


def _warmup_has_rounds(*, warmup_rounds: int, warmup: Objective | None) -> str | None:
    if not warmup_rounds and warmup is not None:
        return "warmup: set 'warmup_rounds', the number of its rounds"
    return None


LOCAL = Entry(LocalTraining, refuse=(_warmup_has_an_objective, _warmup_has_rounds))


def trainable(model: nn.Module) -> list[str]:
    """Names of the parameters that training changes."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def pixels(problem: Problem, images: Tensor) -> Tensor:
    """Stored images (B, C, H, W) uint8 as floats in [0, 1], at the problem's size and laid out for its path."""
    x = images.to(torch.float32).div_(255)
    if problem.size is not None and x.shape[-1] != problem.size:
        x = F.interpolate(x, size=(problem.size, problem.size), mode="bilinear", antialias=x.shape[-1] > problem.size)
    return x.contiguous(memory_format=memory_format(problem))


def memory_format(problem: Problem) -> torch.memory_format:
    """The memory layout of images and weights: contiguous for "reference", else channels_last, which is faster.

    On a CPU, networks with a strided 1x1 convolution of fewer than 16 input channels, such as a narrow ResNet, stay
    contiguous: oneDNN would write beyond its workspace, and the weight gradient be wrong or the process crash
    (github.com/uxlfoundation/oneDNN, issue 6035; torch 2.15 has it).
    """
    if problem.path == "reference" or (
        problem.device.type == "cpu" and any(map(_overruns_workspace, problem.model.modules()))
    ):
        return torch.contiguous_format
    return torch.channels_last


def _overruns_workspace(layer: nn.Module) -> bool:
    return (
        isinstance(layer, nn.Conv2d)
        and layer.kernel_size == (1, 1)
        and layer.stride != (1, 1)
        and layer.in_channels // layer.groups < 16
    )


def precision_context(problem: Problem) -> contextlib.AbstractContextManager[Any]:
    """A context for bfloat16 or TF32, if asked for; weights and the optimizer stay in float32."""
    if problem.precision == "fp32":
        return contextlib.nullcontext()
    return precision.forward(problem.device, problem.precision)


def gradients_of(problem: Problem, loss: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of a training step's loss with respect to the weights, in the precision of its forward pass.

    It is zero for weights that the loss does not use, such as a second head.
    """
    with precision.backward(problem.precision) if problem.precision == "tf32" else contextlib.nullcontext():
        return list(torch.autograd.grad(loss, weights, materialize_grads=True))


def load(problem: Problem, state: Tensors) -> nn.Module:
    """Load a copy of `state` into the problem's model, in the path's memory layout, and return the model."""
    model = problem.model
    model.load_state_dict(state)
    model.to(memory_format=memory_format(problem))
    return model


def copy_state(model: nn.Module, prefix: str | tuple[str, ...] = "") -> Tensors:
    """Contiguous copies of the parameters and buffers whose names begin with `prefix`."""
    return {
        name: value.detach().clone(memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
        if name.startswith(prefix)
    }


# --- one client ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Client:
    """One client's training in one round: its data, the model it starts from, and what the algorithm adds to a step."""

    problem: Problem
    broadcast: Tensors
    k: int
    round: int
    gradient_shift: Tensors = field(default_factory=dict)  # as in `cohort.train_cohort`, of this client
    weight_shift: Tensors = field(default_factory=dict)
    only: Collection[str] | None = None  # names of the parameters that it trains (None: all)
    sent: Collection[str] | None = None  # names of the tensors that it uploads (None: all but frozen parameters)

    @property
    def n(self) -> int:
        return len(self.problem.shards[self.k])

    def stream(self, name: str, device: torch.device | str | None = None) -> Generator:
        problem = self.problem
        return generator(problem.seed, name, self.round, self.k, device=device or problem.device)


@dataclass(frozen=True)
class Batch:
    """One step's examples."""

    epoch: int
    rows: Tensor  # (B,) int64: positions in the client's shard
    x: Tensor  # (B, C, H, W) in [0, 1], augmented
    y: Tensor  # (B,) int64


def orders(problem: Problem, k: int, round: int, local: LocalTraining) -> Iterator[tuple[int, Tensor]]:
    """(epoch, positions in the shard) of every batch of client k's round, drawn from the stream "order"."""
    shard = problem.shards[k]
    order = generator(problem.seed, "order", round, k)
    for epoch in range(local.epochs):
        for rows in torch.randperm(len(shard), generator=order).to(shard.device).split(local.batch):
            yield epoch, rows


def batches(problem: Problem, k: int, round: int, local: LocalTraining) -> Iterator[Batch]:
    """All batches of client k's round, drawn from the streams "order" and "augment"."""
    views = generator(problem.seed, "augment", round, k, device=problem.device)
    for epoch, rows in orders(problem, k, round, local):
        yield Batch(epoch, rows, *examples(problem, problem.shards[k][rows], views))


def examples(problem: Problem, index: Tensor, views: Generator) -> tuple[Tensor, Tensor]:
    """The images at `index` (B,), augmented, (B, C, H, W) in [0, 1], and their labels (B,)."""
    x = pixels(problem, problem.images[index])
    return x if problem.augment is None else problem.augment(x, views), problem.labels[index]


def train(
    client: Client,
    network: nn.Module,
    weights: list[Tensor],
    local: LocalTraining,
    *,
    moments: Moments | None = None,
    gradient: Callable[[list[Tensor]], list[Tensor]] = lambda gradients: gradients,
    after_step: Callable[[], None] = lambda: None,
    loss_of: Callable[[Batch], Tensor] | None = None,
    broadcast: Callable[[], nn.Module] | None = None,
    recordings: Recordings | None = None,
) -> tuple[Moments, Stats]:
    """Train `weights` in place; return the optimizer's moments and the statistics that the client reports.

    `network` maps images (B, C, H, W) to logits (B, classes) with these weights. gradient: transforms the gradients
    before a step. after_step: changes the weights after it. loss_of: a loss to add to the objective's, after its last
    forward pass. The objective may ask for what `offers` names. recordings: where the step is recorded and replayed;
    all that the functions read must then be held there, and the moments start at zero.
    """
    problem, k, round = client.problem, client.k, client.round
    shard, step_settings = problem.shards[k], local.descent(plain=problem.path == "reference")
    noise, views = client.stream("attack"), client.stream("augment")
    offered = offers(problem, k, broadcast)
    correct = torch.zeros((), device=problem.device)
    new_moments: Moments = moments or {}
    if recordings is not None:
        noise, views = recordings.stream("attack", noise), recordings.stream("augment", views)
        offered = hold_offers(offered, recordings)
        [correct] = recordings.hold("correct", [correct])
        new_moments = {"velocity": recordings.hold("velocity", [torch.zeros_like(w) for w in weights])}
    extra_arguments = requested_arguments(local.objective, offered)

    def train_step(index: Tensor, epoch: int = 0, rows: Tensor | None = None) -> Tensor:
        """Take one step on the images at `index` (B,) and return its loss."""
        nonlocal new_moments
        x, y = examples(problem, index, views)
        with precision_context(problem):
            loss, hits = local.objective(network, x, y, noise, **extra_arguments)
        if loss_of is not None:
            assert rows is not None
            loss = loss + loss_of(Batch(epoch, rows, x, y))
        gradients = gradients_of(problem, loss, weights)
        with torch.no_grad():
            new_moments = step(weights, gradient(gradients), new_moments, step_settings)
            after_step()
            correct.add_(hits.sum())  # in place, so that a recorded step finds it
        return loss.detach()

    take: Callable[[Tensor], Tensor] = train_step
    if recordings is not None:
        changed = [correct, *new_moments["velocity"], *network.state_dict().values()]
        take = recordings.step(_recording_key(client, local, network, weights, step_settings), train_step, changed)
    with forked(problem.seed, "dropout", round, k, device=problem.device):
        losses: list[Tensor] = []
        sizes: list[int] = []
        for epoch, rows in orders(problem, k, round, local):
            loss = train_step(shard[rows], epoch, rows) if recordings is None else take(shard[rows])
            if epoch == local.epochs - 1:  # `Stats.loss` is that of the last epoch
                losses.append(loss)
                sizes.append(len(rows))
    means = torch.stack(losses).double().tolist()  # the only wait for the device in the round
    return new_moments, stats(local, client.n, means, sizes, float(correct))


def _recording_key(
    client: Client, local: LocalTraining, network: nn.Module, weights: Sequence[Tensor], descent: Descent
) -> Hashable:
    """What a recorded step depends on: a step that differs in any of these needs its own recording."""
    problem = client.problem
    problem_parts = (id(problem.images), id(problem.labels), problem.precision, problem.size, problem.augment)
    addresses = (network, *(tensor.data_ptr() for tensor in weights))
    shifted = (tuple(client.gradient_shift), tuple(client.weight_shift))
    pulled = (
        None if local.proximal is None else (local.proximal, client.round)
    )  # a proximal term may depend on the round
    return problem_parts, addresses, shifted, pulled, local.objective, descent


def hold_offers(offered: Mapping[str, Callable[[], Any]], recordings: Recordings) -> Mapping[str, Callable[[], Any]]:
    """The offers, with tensors that keep their addresses for every client."""
    return {
        **offered,
        "class_counts": lambda: recordings.hold("class_counts", [offered["class_counts"]()])[0],
        "broadcast": lambda: recordings.copy("broadcast", offered["broadcast"]()),
    }


def offers(
    problem: Problem, k: int, broadcast: Callable[[], nn.Module] | None = None
) -> Mapping[str, Callable[[], Any]]:
    """What an objective may ask for: {name: a function that computes it}.

    class_counts: the number of the client's examples of every class, float, (1, C). broadcast: the model theta^t that
    the round began with, in eval mode; raises ValueError if no model is broadcast. client: the client's number.
    """

    def no_broadcast() -> nn.Module:
        raise ValueError("the objective needs the broadcast model, but this algorithm broadcasts none")

    return {
        "class_counts": functools.partial(class_counts, problem, k),
        "broadcast": broadcast or no_broadcast,
        "client": lambda: k,
    }


def frozen_copy(model: nn.Module) -> Callable[[], nn.Module]:
    """A function that copies the model when it is called, in eval mode and without gradients."""
    return lambda: copy.deepcopy(model).eval().requires_grad_(False)


def class_counts(problem: Problem, k: int) -> Tensor:
    """The number of client k's examples of every class, (1, C) float."""
    return problem.labels[problem.shards[k]].bincount(minlength=problem.classes).float().unsqueeze(0)


def train_client(client: Client, local: LocalTraining) -> Update:
    """Train a client and return its update."""
    model = load(client.problem, client.broadcast)
    can_train = trainable(model)
    only = can_train if client.only is None else client.only
    if name := min({*only} - {*can_train}, default="" if only else "nothing"):
        raise SpecError(f"train_cohort: only: client {client.k} is to train {name}{did_you_mean(name, can_train)}")
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in only}
    frozen = {name for name, _ in model.named_parameters()} - parameters.keys()
    weights: list[Tensor] = list(parameters.values())
    theta = [client.broadcast[name] for name in parameters] if local.proximal is not None else []
    gradient_shifts = [client.gradient_shift[name] for name in parameters] if client.gradient_shift else []
    entries = model.state_dict() if client.weight_shift else {}  # shares storage with the model
    shifted = [name for name in client.weight_shift if name not in frozen]
    shifts = [client.weight_shift[name] for name in shifted]
    recordings = recordings_for(client.problem, local)
    if recordings is not None:
        theta, gradient_shifts = recordings.hold("theta", theta), recordings.hold("added", gradient_shifts)
        shifts = recordings.hold("shifts", shifts)

    def gradient(gradients: list[Tensor]) -> list[Tensor]:
        if local.proximal is not None:
            gradients = list(torch._foreach_add(gradients, local.proximal(weights, theta, client.round)))
        return list(torch._foreach_add(gradients, gradient_shifts)) if gradient_shifts else gradients

    def after_step() -> None:
        for name, shift in zip(shifted, shifts, strict=True):
            entries[name].sub_(shift)

    _, client_stats = train(
        client,
        model,
        weights,
        local,
        gradient=gradient,
        after_step=after_step,
        broadcast=frozen_copy(model),
        recordings=recordings,
    )
    trained, sent = copy_state(model), client.sent
    if sent is None and frozen:
        sent = trained.keys() - frozen
    return Update(client.k, client.n, trained, client_stats, sent=None if sent is None else frozenset(sent))


def recordings_for(problem: Problem, local: LocalTraining) -> Recordings | None:
    """Where to record the steps of this training; None if they cannot be recorded.

    A replay repeats kernels, but nothing that the host did. There Adam counts its steps, an objective that asks for
    `client` reads its number, and a function from outside fatbench may do anything.
    """
    functions = [function for function in (local.objective, local.proximal, problem.augment) if function is not None]
    if problem.path != "graphs" or local.optimizer != "sgd" or asks(local.objective, "client"):
        return None
    if not all(map(_is_ours, functions)):
        return None
    return problem.recordings or Recordings()


def _is_ours(function: Callable[..., Any]) -> bool:
    """Whether a function and all functions among its settings belong to fatbench."""
    settings = getattr(function, "keywords", {}).values()
    module = inspect.getmodule(entry_of(function).function)  # an Entry is ours even if its function is not
    return (
        module is not None
        and module.__name__.startswith("fatbench.")
        and all(_is_ours(f) for f in settings if callable(f))
    )


def broadcast_loss(client: Client, local: LocalTraining) -> float:
    """The mean objective of theta^t on a client's data, in one pass without steps (for AFL and q-FFL)."""
    problem, k, round = client.problem, client.k, client.round
    model = load(problem, client.broadcast)
    shard = problem.shards[k]
    noise = client.stream("broadcast_loss")
    extra_arguments = requested_arguments(local.objective, offers(problem, k, frozen_copy(model)))
    losses, sizes = [], []
    with forked(problem.seed, "broadcast_loss", round, k, device=problem.device):
        for batch in shard.split(local.batch):
            with precision_context(problem):
                x = pixels(problem, problem.images[batch])
                losses.append(local.objective(model, x, problem.labels[batch], noise, **extra_arguments)[0].detach())
            sizes.append(len(batch))
    means = torch.stack(losses).double().tolist()
    return sum(mean * size for mean, size in zip(means, sizes, strict=True)) / len(shard)


def stats(local: LocalTraining, n: int, means: Sequence[float], sizes: Sequence[int], correct: float) -> Stats:
    """The statistics of a client with `n` examples; `means` and `sizes` are those of the last epoch's batches."""
    total = sum(mean * size for mean, size in zip(means, sizes, strict=True))
    steps = local.epochs * len(sizes)
    momentum_steps, step_weight = 0.0, 0.0  # ||a||_1 of FedNova: with momentum, a step lives on in later ones
    for _ in range(steps):
        step_weight = local.momentum * step_weight + 1.0
        momentum_steps += step_weight
    return Stats(
        loss=total / n,
        loss_released=total / len(sizes),
        accuracy=correct / (n * local.epochs),
        steps=steps,
        momentum_steps=momentum_steps,
        batches=len(sizes),
    )
