"""Local training: what a client does between receiving theta^t and sending theta_k.

One loop that reads like the papers' (`train`), over batches that are drawn by named streams. `Problem.path` says how:
"loop" has channels_last (see `memory_format`) and steps all tensors at once; "graphs" is "loop" with recorded steps, to
the last bit; "reference", for tests and the networks of others, has contiguous NCHW and one tensor after the other, and
agrees to rounding. Nothing inside a step waits for the device.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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
from fatbench.suite.cost import epochs_in_round
from fatbench.suite.entry import Entry, entry_of
from fatbench.suite.types import Count, Fraction, Momentum, Natural, NonNegative, Objective, Positive, Proximal, Rate


@dataclass(frozen=True)
class LocalTraining:
    """What a client does in a round: `epochs` passes over its examples, a step of the optimizer for every batch.

    epochs: of round 0; every `epochs_every` rounds times `epochs_factor`, cut to whole ones, at least 1.
    batch: examples of a step, the last one of an epoch may have fewer. lr: the rate of round 0, times lr_decay every
    round. momentum is SGD's; its buffer starts at zero every round. weight_decay is added to the gradient (AdamW
    shrinks the weights). clip: the gradient is scaled to at most this norm. proximal: a term added to the gradient that
    pulls towards the broadcast weights (FedProx). warmup: the objective of the first `warmup_rounds` rounds, such as
    fewer adversarial images, or AT before AWP.
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
        """The settings of round `round`, counted from 0: the rate has fallen, and the number of epochs."""
        lr, epochs, objective = self.lr * self.lr_decay**round, self.epochs_in(round), self.objective_in(round)
        return replace(self, lr=lr, epochs=epochs, objective=objective)

    def epochs_in(self, round: int) -> int:
        """How many epochs a round has."""
        return epochs_in_round(self.epochs, self.epochs_factor, self.epochs_every, round)

    def objective_in(self, round: int) -> Objective:
        """What a round trains on."""
        return self.warmup if self.warmup is not None and round < self.warmup_rounds else self.objective

    def descent(self, plain: bool = False) -> Descent:
        """The optimizer of a round."""
        return Descent(self.optimizer, self.lr, self.momentum, self.weight_decay, self.clip, plain)


def _warmup_has_an_objective(*, warmup_rounds: int, warmup: Objective | None) -> str | None:
    if warmup_rounds and warmup is None:
        return "warmup_rounds: 'warmup' does not say on which objective"
    return None


def _warmup_has_rounds(*, warmup_rounds: int, warmup: Objective | None) -> str | None:
    if not warmup_rounds and warmup is not None:
        return "warmup: 'warmup_rounds' does not say for how many rounds"
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
    """How the path lays images and weights out: contiguous for "reference", else channels_last, which is faster.

    On a CPU, channels_last is not for a network with a strided 1x1 convolution of fewer than 16 input channels, such as
    a narrow ResNet: its weight gradient would be wrong, or the process would crash, because oneDNN writes beyond its
    workspace (github.com/uxlfoundation/oneDNN, issue 6035; torch 2.15 has it).
    """
    if problem.path == "reference" or (problem.device.type == "cpu" and any(map(_overruns, problem.model.modules()))):
        return torch.contiguous_format
    return torch.channels_last


def _overruns(layer: nn.Module) -> bool:
    return (
        isinstance(layer, nn.Conv2d)
        and layer.kernel_size == (1, 1)
        and layer.stride != (1, 1)
        and layer.in_channels // layer.groups < 16
    )


def precision_context(problem: Problem) -> contextlib.AbstractContextManager[Any]:
    """bfloat16 or TF32 where asked for; weights and the optimizer stay in float32."""
    if problem.precision == "fp32":
        return contextlib.nullcontext()
    return precision.forward(problem.device, problem.precision)


def gradients_of(problem: Problem, loss: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of a training step's loss by the weights, in the precision of its forward pass.

    It is zero for a weight that the loss does not use, such as a second head.
    """
    with precision.backward(problem.precision) if problem.precision == "tf32" else contextlib.nullcontext():
        return list(torch.autograd.grad(loss, weights, materialize_grads=True))


def load(problem: Problem, state: Tensors) -> nn.Module:
    """The problem's model holding a copy of `state`, laid out for the path."""
    model = problem.model
    model.load_state_dict(state)
    model.to(memory_format=memory_format(problem))
    return model


def copied(model: nn.Module, prefix: str | tuple[str, ...] = "") -> Tensors:
    """Copies of the parameters and buffers whose names begin with `prefix`, contiguous whatever the path."""
    return {
        name: value.detach().clone(memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
        if name.startswith(prefix)
    }


# --- one client ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Client:
    """A client to be trained: whose data, from which model, in which round, and what its algorithm adds to a step."""

    problem: Problem
    broadcast: Tensors
    k: int
    round: int
    gradient_shift: Tensors = field(default_factory=dict)  # as in `cohort.train_cohort`, of this client
    weight_shift: Tensors = field(default_factory=dict)

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
    """(epoch, positions in the shard) of every batch of client k's round, by the stream "order"."""
    shard = problem.shards[k]
    order = generator(problem.seed, "order", round, k)
    for epoch in range(local.epochs):
        for rows in torch.randperm(len(shard), generator=order).to(shard.device).split(local.batch):
            yield epoch, rows


def batches(problem: Problem, k: int, round: int, local: LocalTraining) -> Iterator[Batch]:
    """All batches of client k's round, by the streams "order" and "augment"."""
    views = generator(problem.seed, "augment", round, k, device=problem.device)
    for epoch, rows in orders(problem, k, round, local):
        yield Batch(epoch, rows, *examples(problem, problem.shards[k][rows], views))


def examples(problem: Problem, index: Tensor, views: Generator) -> tuple[Tensor, Tensor]:
    """The images `index` (B,) as training sees them, (B, C, H, W) in [0, 1], and their labels (B,)."""
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
    """A client's training of `weights`, in place; the optimizer's moments after it, and what the client reports.

    `network` maps images (B, C, H, W) to logits (B, classes) by these weights. gradient: what is done to the gradients
    before a step; after_step: what is done to the weights after it; loss_of: added to the objective's loss, after its
    last forward pass. The objective may ask for what `offers` names. recordings: the step is recorded there and
    replayed; then all that the functions read is held there, and moments begin at zero.
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
        """A step on the images `chosen` (B,); its loss."""
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
            correct.add_(hits.sum())
        return loss.detach()

    take: Callable[[Tensor], Tensor] = train_step
    if recordings is not None:
        changed = [correct, *new_moments["velocity"], *network.state_dict().values()]
        take = recordings.step(_recorded_as(client, local, network, weights, step_settings), train_step, changed)
    with forked(problem.seed, "dropout", round, k, device=problem.device):
        losses: list[Tensor] = []
        sizes: list[int] = []
        for epoch, rows in orders(problem, k, round, local):
            loss = train_step(shard[rows], epoch, rows) if recordings is None else take(shard[rows])
            if epoch == local.epochs - 1:
                losses.append(loss)
                sizes.append(len(rows))
    means = torch.stack(losses).double().tolist()
    return new_moments, stats(local, client.n, means, sizes, float(correct))


def _recorded_as(
    client: Client, local: LocalTraining, network: nn.Module, weights: Sequence[Tensor], descent: Descent
) -> Hashable:
    """What a recorded step has in it: whoever differs in one of these needs another recording."""
    problem = client.problem
    problem_parts = (id(problem.images), id(problem.labels), problem.precision, problem.size, problem.augment)
    addresses = (network, *(tensor.data_ptr() for tensor in weights))
    shifted = (tuple(client.gradient_shift), tuple(client.weight_shift))
    pulled = None if local.proximal is None else (local.proximal, client.round)  # it may ask which round it is
    return problem_parts, addresses, shifted, pulled, local.objective, descent


def hold_offers(offered: Mapping[str, Callable[[], Any]], recordings: Recordings) -> Mapping[str, Callable[[], Any]]:
    """The offers, each in the same place for every client."""
    return {
        **offered,
        "class_counts": lambda: recordings.hold("class_counts", [offered["class_counts"]()])[0],
        "broadcast": lambda: recordings.copy("broadcast", offered["broadcast"]()),
    }


def offers(
    problem: Problem, k: int, broadcast: Callable[[], nn.Module] | None = None
) -> Mapping[str, Callable[[], Any]]:
    """What an objective may ask for, each as a function that makes it.

    class_counts: how many examples of every class the client has, float, (1, C). broadcast: the model theta^t that the
    round began with, in eval mode. client: the client's number. ValueError, when asked: no model is broadcast.
    """

    def no_broadcast() -> nn.Module:
        raise ValueError("the objective needs the broadcast model, and this algorithm does not broadcast one")

    return {
        "class_counts": functools.partial(class_counts, problem, k),
        "broadcast": broadcast or no_broadcast,
        "client": lambda: k,
    }


def frozen(model: nn.Module) -> Callable[[], nn.Module]:
    """A copy of the model as it is when asked for, in eval mode and without gradients."""
    return lambda: copy.deepcopy(model).eval().requires_grad_(False)


def class_counts(problem: Problem, k: int) -> Tensor:
    """(1, C) float: how many examples of every class client k has."""
    return problem.labels[problem.shards[k]].bincount(minlength=problem.classes).float().unsqueeze(0)


def train_client(client: Client, local: LocalTraining) -> Update:
    """What a client uploads after its training."""
    model = load(client.problem, client.broadcast)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    weights: list[Tensor] = list(parameters.values())
    theta = [client.broadcast[name] for name in parameters] if local.proximal is not None else []
    gradient_shifts = [client.gradient_shift[name] for name in parameters] if client.gradient_shift else []
    entries = model.state_dict() if client.weight_shift else {}  # shares storage with the model
    shifts = list(client.weight_shift.values())
    recordings = recordings_for(client.problem, local)
    if recordings is not None:
        theta, gradient_shifts = recordings.hold("theta", theta), recordings.hold("added", gradient_shifts)
        shifts = recordings.hold("shifts", shifts)

    def gradient(gradients: list[Tensor]) -> list[Tensor]:
        if local.proximal is not None:
            gradients = list(torch._foreach_add(gradients, local.proximal(weights, theta, client.round)))
        return list(torch._foreach_add(gradients, gradient_shifts)) if gradient_shifts else gradients

    def after_step() -> None:
        for name, shift in zip(client.weight_shift, shifts, strict=True):
            entries[name].sub_(shift)

    _, client_stats = train(
        client,
        model,
        weights,
        local,
        gradient=gradient,
        after_step=after_step,
        broadcast=frozen(model),
        recordings=recordings,
    )
    return Update(client.k, client.n, copied(model), client_stats)


def recordings_for(problem: Problem, local: LocalTraining) -> Recordings | None:
    """Where the steps of this training are recorded; None: they are not.

    A replay repeats kernels and nothing that the host did: Adam counts its steps there, what asks for `client` has a
    number from there, and what else a function from outside fatbench does there is unknown.
    """
    functions = [function for function in (local.objective, local.proximal, problem.augment) if function is not None]
    if problem.path != "graphs" or local.optimizer != "sgd" or asks(local.objective, "client"):
        return None
    if not all(map(_is_ours, functions)):
        return None
    return problem.recordings or Recordings()


def _is_ours(function: Callable[..., Any]) -> bool:
    """Whether a function, and every function among its settings, is in this package."""
    settings = getattr(function, "keywords", {}).values()
    module = inspect.getmodule(entry_of(function).function)  # an entry itself is ours, whose function may be not
    return (
        module is not None
        and module.__name__.startswith("fatbench.")
        and all(_is_ours(f) for f in settings if callable(f))
    )


def broadcast_loss(client: Client, local: LocalTraining) -> float:
    """The mean objective of theta^t on a client's data: one pass without a step (AFL, q-FFL)."""
    problem, k, round = client.problem, client.k, client.round
    model = load(problem, client.broadcast)
    shard = problem.shards[k]
    noise = client.stream("broadcast_loss")
    extra_arguments = requested_arguments(local.objective, offers(problem, k, frozen(model)))
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
    """What a client with `n` examples reports; `means` and `sizes` are those of the batches of its last epoch."""
    total = sum(mean * size for mean, size in zip(means, sizes, strict=True))
    steps = local.epochs * len(sizes)
    effective, horizon = 0.0, 0.0
    for _ in range(steps):
        horizon = local.momentum * horizon + 1.0
        effective += horizon
    return Stats(
        loss=total / n,
        loss_released=total / len(sizes),
        accuracy=correct / (n * local.epochs),
        steps=steps,
        momentum_steps=effective,
        batches=len(sizes),
    )
