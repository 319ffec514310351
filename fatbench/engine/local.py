"""Local training: what a client does between receiving theta^t and sending theta_k.

One loop that reads like the papers' (`train`), over batches that are drawn by named streams. It can lay tensors out in
two ways (`Problem.path`): "reference", contiguous NCHW and one tensor after the other; "loop", channels_last (see
`memory_format`) and all tensors at once. They agree to rounding. "fast" trains many clients as one program
(`fatbench.engine.fast`) and is "loop" in all else; "graphs" is "fast" with recorded steps. Nothing inside a step waits
for the device.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fatbench.engine import precision
from fatbench.engine.inject import granted
from fatbench.engine.optimizers import Descent, Moments, step
from fatbench.engine.randomness import forked, generator
from fatbench.engine.rounds import Problem, Stats, Tensors, Update
from fatbench.suite.cost import epochs_in_round
from fatbench.suite.entry import Entry
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


def batches(problem: Problem, k: int, round: int, local: LocalTraining) -> Iterator[Batch]:
    """All batches of client k's round, by the streams "order" and "augment"."""
    shard = problem.shards[k]
    order = generator(problem.seed, "order", round, k)
    views = generator(problem.seed, "augment", round, k, device=problem.device)
    for epoch in range(local.epochs):
        for rows in torch.randperm(len(shard), generator=order).to(shard.device).split(local.batch):
            chosen = shard[rows]
            x, y = pixels(problem, problem.images[chosen]), problem.labels[chosen]
            if problem.augment is not None:
                x = problem.augment(x, views)
            yield Batch(epoch, rows, x, y)


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
) -> tuple[Moments, Stats]:
    """A client's training of `weights`, in place; the optimizer's moments after it, and what the client reports.

    `network` maps images (B, C, H, W) to logits (B, classes) by these weights. gradient: what is done to the gradients
    before a step; after_step: what is done to the weights after it; loss_of: added to the objective's loss, after its
    last forward pass. The objective may ask for what `offers` names.
    """
    problem, k, round = client.problem, client.k, client.round
    moments = moments or {}
    how = local.descent(plain=problem.path == "reference")
    noise = client.stream("attack")
    asked = granted(local.objective, offers(problem, k, broadcast))
    correct = torch.zeros((), device=problem.device)
    with forked(problem.seed, "dropout", round, k, device=problem.device):
        losses: list[Tensor] = []
        sizes: list[int] = []
        for batch in batches(problem, k, round, local):
            with precision_context(problem):
                loss, hits = local.objective(network, batch.x, batch.y, noise, **asked)
            if loss_of is not None:
                loss = loss + loss_of(batch)
            gradients = gradients_of(problem, loss, weights)
            with torch.no_grad():
                moments = step(weights, gradient(gradients), moments, how)
                after_step()
            correct += hits.sum()
            if batch.epoch == local.epochs - 1:
                losses.append(loss.detach())
                sizes.append(len(batch.y))
    means = torch.stack(losses).double().tolist()
    return moments, stats(local, client.n, means, sizes, float(correct))


def offers(
    problem: Problem, k: int, broadcast: Callable[[], nn.Module] | None = None
) -> Mapping[str, Callable[[], Any]]:
    """What an objective may ask for, each as a function that makes it.

    class_counts: how many examples of every class the client has, float, (1, C) (on the fast path (B, C): a row for
    every image). broadcast: the model theta^t that the round began with, in eval mode. client: the client's number.
    ValueError, when asked: no model is broadcast.
    """

    def nothing() -> nn.Module:
        raise ValueError("the objective needs the broadcast model, and this algorithm does not broadcast one")

    return {
        "class_counts": functools.partial(class_counts, problem, [k]),
        "broadcast": broadcast or nothing,
        "client": lambda: k,
    }


def frozen(model: nn.Module) -> Callable[[], nn.Module]:
    """A copy of the model as it is when asked for, in eval mode and without gradients."""
    return lambda: copy.deepcopy(model).eval().requires_grad_(False)


def class_counts(problem: Problem, clients: Sequence[int]) -> Tensor:
    """(len(clients), C) float: how many examples of every class each of the clients has."""
    of_each = [problem.labels[problem.shards[k]].bincount(minlength=problem.classes) for k in clients]
    return torch.stack(of_each).float()


def train_client(client: Client, local: LocalTraining) -> Update:
    """What a client uploads after its training."""
    model = load(client.problem, client.broadcast)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    weights: list[Tensor] = list(named.values())
    theta = [client.broadcast[name] for name in named]
    added = [client.gradient_shift[name] for name in named] if client.gradient_shift else []
    entries = model.state_dict() if client.weight_shift else {}  # shares storage with the model

    def gradient(gradients: list[Tensor]) -> list[Tensor]:
        if local.proximal is not None:
            gradients = list(torch._foreach_add(gradients, local.proximal(weights, theta, client.round)))
        return list(torch._foreach_add(gradients, added)) if added else gradients

    def after_step() -> None:
        for name, shift in client.weight_shift.items():
            entries[name].sub_(shift)

    _, said = train(client, model, weights, local, gradient=gradient, after_step=after_step, broadcast=frozen(model))
    return Update(client.k, client.n, copied(model), said)


def broadcast_loss(client: Client, local: LocalTraining) -> float:
    """The mean objective of theta^t on a client's data: one pass without a step (AFL, q-FFL)."""
    problem, k, round = client.problem, client.k, client.round
    model = load(problem, client.broadcast)
    shard = problem.shards[k]
    noise = client.stream("broadcast_loss")
    asked = granted(local.objective, offers(problem, k, frozen(model)))
    losses, sizes = [], []
    with forked(problem.seed, "broadcast_loss", round, k, device=problem.device):
        for batch in shard.split(local.batch):
            with precision_context(problem):
                x = pixels(problem, problem.images[batch])
                losses.append(local.objective(model, x, problem.labels[batch], noise, **asked)[0].detach())
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
