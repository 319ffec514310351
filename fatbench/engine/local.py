"""Local training: what a client does between receiving theta^t and sending theta_k.

`train_cohort` is the one door; behind it one loop that reads like the papers' and can lay tensors out in two ways
(`Problem.path`): "loop", contiguous NCHW and one tensor after the other; "fast", channels_last and all tensors at once.
"stacked" trains as many clients at once as fit, by `fatbench.engine.fast.clients`, and is "fast" in all else. They agree to
rounding. Nothing inside a step waits for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fatbench.engine.randomness import forked, generator, numpy_generator
from fatbench.engine.rounds import Cost, Problem, Stats, Tensors, Update


@dataclass(frozen=True)
class LocalSGD:
    """The settings of one round's local training, as the protocol was given them."""

    epochs: int
    batch: int
    lr: float
    momentum: float
    weight_decay: float
    clip: float | None
    objective: Any
    proximal: Any = None


def draw_cohort(problem: Problem, round: int, participation: float) -> list[int]:
    """m = max(1, int(C K)) clients in random order; the released SFAT depends on the order, so it is always drawn."""
    clients = len(problem.shards)
    m = max(1, int(participation * clients + 1e-9))
    return numpy_generator(problem.seed, "cohort", round).permutation(clients)[:m].tolist()


def trainable(model: nn.Module) -> list[str]:
    """Names of the parameters that training changes."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def pixels(problem: Problem, images: Tensor) -> Tensor:
    """Stored images (B, C, H, W) uint8 as floats in [0, 1], at the problem's size and laid out for its path."""
    x = images.to(torch.float32).div_(255)
    if problem.size is not None and x.shape[-1] != problem.size:
        x = F.interpolate(x, size=(problem.size, problem.size), mode="bilinear", antialias=x.shape[-1] > problem.size)
    return x.contiguous(memory_format=torch.contiguous_format if problem.path == "loop" else torch.channels_last)


def precision_context(problem: Problem) -> contextlib.AbstractContextManager[Any]:
    """autocast to bfloat16 where asked for; weights and the optimiser stay in float32."""
    if problem.precision == "bf16":
        return torch.autocast(problem.device.type, torch.bfloat16)
    return contextlib.nullcontext()


def load(problem: Problem, state: Tensors) -> nn.Module:
    """The problem's model holding a copy of `state`, laid out for the path."""
    model = problem.model
    model.load_state_dict(state)
    if problem.path != "loop":
        model.to(memory_format=torch.channels_last)
    return model


def copied(model: nn.Module, prefix: str | tuple[str, ...] = "") -> Tensors:
    """Copies of the parameters and buffers whose names begin with `prefix`, contiguous whatever the path."""
    return {
        name: value.detach().clone(memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
        if name.startswith(prefix)
    }


def step_divisor(update: Update, lr: float, divisor: str) -> float:
    """S_k of SCAFFOLD and FedGATE: lr ||a_k||_1, which counts momentum, or with "literal" lr tau_k, which does not."""
    return lr * (update.stats.momentum_steps if divisor == "momentum" else update.stats.steps)


def train_cohort(
    problem: Problem,
    broadcast: Tensors,
    cohort: Sequence[int],
    round: int,
    local: LocalSGD,
    *,
    gradient_shift: Mapping[int, Tensors] | None = None,
    weight_shift: Mapping[int, Tensors] | None = None,
    broadcast_loss: bool = False,
) -> list[Update]:
    """Every client of the cohort trained from `broadcast`; updates in the order of the cohort.

    gradient_shift[k] is added to every gradient of client k (SCAFFOLD: c - c_k); weight_shift[k] is subtracted from
    its weights after every step (the released SCAFFOLD). broadcast_loss: also the loss of theta^t on the client's data.
    """
    shifts = {k: (gradient_shift[k] if gradient_shift else {}, weight_shift[k] if weight_shift else {}) for k in cohort}
    if problem.path == "stacked":
        from fatbench.engine.fast import clients as stacked  # here, because it is made of what is in this module

        clients = [stacked.Client(problem, broadcast, k, round, *shifts[k]) for k in cohort]
        at_once = stacked.train_cohort if problem.together is None else problem.together.train_cohort
        if (trained := at_once(clients, local, broadcast_loss)) is not None:
            return trained
    updates = []
    for k in cohort:
        loss = _broadcast_loss(problem, broadcast, k, round, local) if broadcast_loss else None
        updates.append(_train_client(problem, broadcast, k, round, local, *shifts[k], loss))
    return updates


def _train_client(
    problem: Problem,
    broadcast: Tensors,
    k: int,
    round: int,
    local: LocalSGD,
    gradient_shift: Tensors,
    weight_shift: Tensors,
    broadcast_loss: float | None,
) -> Update:
    model = load(problem, broadcast)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    weights: list[Tensor] = list(named.values())
    theta = [broadcast[name] for name in named]
    added = [gradient_shift[name] for name in named] if gradient_shift else []
    entries = model.state_dict() if weight_shift else {}  # shares storage with the model
    velocity: list[Tensor] = []  # momentum starts at zero every round
    shard = problem.shards[k]
    n = len(shard)
    noise = generator(problem.seed, "attack", round, k, device=problem.device)
    order = generator(problem.seed, "order", round, k)
    views = generator(problem.seed, "augment", round, k, device=problem.device)
    correct = torch.zeros((), device=problem.device)
    with forked(problem.seed, "dropout", round, k, device=problem.device):
        for epoch in range(local.epochs):
            last = epoch == local.epochs - 1
            losses, sizes = [], []
            for batch in shard[torch.randperm(n, generator=order).to(shard.device)].split(local.batch):
                x, y = pixels(problem, problem.images[batch]), problem.labels[batch]
                if problem.augment is not None:
                    x = problem.augment(x, views)
                with precision_context(problem):
                    loss, hits = local.objective(model, x, y, noise)
                gradients = torch.autograd.grad(loss, weights)
                with torch.no_grad():
                    if local.proximal is not None:
                        gradients = torch._foreach_add(gradients, local.proximal(weights, theta, round))
                    if added:
                        gradients = torch._foreach_add(gradients, added)
                    velocity = sgd_step(weights, gradients, velocity, local, problem.path)
                if weight_shift:
                    with torch.no_grad():
                        for name, shift in weight_shift.items():
                            entries[name].sub_(shift)
                correct += hits.sum()
                if last:
                    losses.append(loss.detach())
                    sizes.append(len(batch))
    means = torch.stack(losses).double().tolist()
    return Update(
        k, n, copied(model), stats(local.epochs, local.momentum, n, means, sizes, float(correct), broadcast_loss)
    )


def stats(
    epochs: int,
    momentum: float,
    n: int,
    means: Sequence[float],
    sizes: Sequence[int],
    correct: float,
    broadcast_loss: float | None = None,
    stack: int = 1,
) -> Stats:
    """What a client with `n` examples reports; `means` and `sizes` are those of the batches of its last epoch."""
    total = sum(mean * size for mean, size in zip(means, sizes, strict=True))
    steps = epochs * len(sizes)
    effective, horizon = 0.0, 0.0
    for _ in range(steps):
        horizon = momentum * horizon + 1.0
        effective += horizon
    return Stats(
        loss=total / n,
        loss_released=total / len(sizes),
        accuracy=correct / (n * epochs),
        steps=steps,
        momentum_steps=effective,
        batches=len(sizes),
        broadcast_loss=broadcast_loss,
        stack=stack,
    )


def clipped(gradients: Sequence[Tensor], bound: float) -> list[Tensor]:
    """The gradients of one client, scaled to a joint norm of at most `bound`."""
    norm = torch.stack(torch._foreach_norm(list(gradients))).norm()
    factor = (bound / (norm + 1e-6)).clamp(max=1.0)
    return [gradient * factor for gradient in gradients]


def sgd_step(
    weights: list[Tensor],
    gradients: Sequence[Tensor],
    velocity: list[Tensor],
    local: LocalSGD,
    path: str = "fast",
) -> list[Tensor]:
    """One step of SGD on `weights`, in place, and the velocity after it. `velocity` is empty before the first step.

    g is clipped to norm `clip`; d = g + weight_decay w; v = momentum v + d; w = w - lr v, as torch.optim.SGD does it.
    Written out because making that optimiser imports torch's compiler, which costs every worker seconds.
    """
    if local.clip is not None:
        gradients = clipped(gradients, local.clip)
    if path == "loop":
        after = []
        for position, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            d = g.add(w, alpha=local.weight_decay) if local.weight_decay else g
            v = velocity[position].mul(local.momentum).add(d) if velocity and local.momentum else d
            w.sub_(v, alpha=local.lr)
            after.append(v)
        return after
    change = list(gradients)
    if local.weight_decay:
        change = list(torch._foreach_add(change, weights, alpha=local.weight_decay))
    if velocity and local.momentum:
        torch._foreach_mul_(velocity, local.momentum)
        torch._foreach_add_(velocity, change)
        change = list(velocity)
    torch._foreach_add_(weights, change, alpha=-local.lr)
    return change


def _broadcast_loss(problem: Problem, broadcast: Tensors, k: int, round: int, local: LocalSGD) -> float:
    """The mean objective of theta^t on client k's data: one pass without a step (AFL, q-FFL)."""
    model = load(problem, broadcast)
    shard = problem.shards[k]
    noise = generator(problem.seed, "broadcast_loss", round, k, device=problem.device)
    losses, sizes = [], []
    with forked(problem.seed, "broadcast_loss", round, k, device=problem.device):
        for batch in shard.split(local.batch):
            with precision_context(problem):
                x = pixels(problem, problem.images[batch])
                losses.append(local.objective(model, x, problem.labels[batch], noise)[0].detach())
            sizes.append(len(batch))
    means = torch.stack(losses).double().tolist()
    return sum(mean * size for mean, size in zip(means, sizes, strict=True)) / len(shard)


def cost(updates: Sequence[Update], local: LocalSGD, broadcast: Tensors, up: int = 1, down: int = 1) -> Cost:
    """What the round cost; `up` and `down` count models on the wire per participant.

    Image passes are those of the objective, counted by the registry from the suite's settings, so they are added by
    the experiment, which knows them.
    """
    size = sum(value.numel() * value.element_size() for value in broadcast.values())
    return Cost(
        gradient_steps=sum(u.stats.steps for u in updates),
        forward=sum(u.n for u in updates) * local.epochs,
        backward=sum(u.n for u in updates) * local.epochs,
        bytes_up=up * size * len(updates),
        bytes_down=down * size * len(updates),
    )
