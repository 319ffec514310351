"""The clients of a cohort trained as one program, for devices where launching kernels is the cost.

| one by one (`fatbench.engine.local`) | here | what |
|---|---|---|
| weights, state of one model | (K, ...) | those of K clients, one above the other |
| x, y of a batch | (K * B, ...) | the clients' batches one after the other |
| noise, order, views | one each per client | the same streams, hence the same draws |
| loss | (K,) | each client's mean |

    for every batch, the clients that have as many images left taken together:
        loss (K,) <- objective(stacked model, x, y)         one forward and backward for all of them
        weights (K, ...) <- SGD(weights, d sum(loss) / d weights)       no loss depends on another's weights

Both agree to rounding: grouped convolutions and batched products add up in another order. What was built for one client
at a time runs here unchanged, because attacks treat every image for itself and the model does the stacking:
`ChannelStack` where the network is one of convolutions, else `VmapStack`.

Several clients at once need several times the memory. What one takes is measured, and so many are stacked as fit. The
numbers of a client depend, in the last bits, on who is stacked with it: a run is reproduced bit for bit where the
stacks are the same, as they are whenever the whole cohort fits.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from fatbench.engine.fast.channels import ChannelStack, stacks_by_channels
from fatbench.engine.fast.draws import Streams, uniform
from fatbench.engine.footprint import footprint
from fatbench.engine.gradients import FRACTION, free_memory
from fatbench.engine.inject import granted
from fatbench.engine.local import (
    Client,
    LocalTraining,
    class_counts,
    copied,
    gradients_of,
    load,
    pixels,
    precision_context,
    stats,
    train_client,
    trainable,
)
from fatbench.engine.mapped import in_memory
from fatbench.engine.optimizers import clipped, sgd
from fatbench.engine.randomness import forked, generator
from fatbench.engine.rounds import Problem, Tensors, Update
from fatbench.models.dropout import Dropout

log = logging.getLogger("fatbench")


class CannotStack(RuntimeError):
    """What the clients of a problem are trained with needs them one at a time, as --path fast has them."""


class VmapStack(nn.Module):
    """K models of one architecture as one: images (K * B, C, H, W), client by client, to logits (K * B, classes).

    By vmap, so any architecture. `tensors`, `leaves`, `dropout` as for `ChannelStack`.
    """

    def __init__(self, model: nn.Module, tensors: Tensors, dropout: Sequence[Generator], names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.tensors = tensors
        self.leaves = [tensors[name].requires_grad_() for name in names]
        self.dropout = dropout
        self.masked = [module for module in model.modules() if isinstance(module, Dropout)]

    def forward(self, x: Tensor) -> Tensor:
        """(K * B, C, H, W) -> (K * B, classes)."""

        def one(tensors: Tensors, x: Tensor) -> Tensor:
            logits: Tensor = torch.func.functional_call(self.model, tensors, (x,))
            return logits

        for module in self.masked:
            module.streams = self.dropout
        try:
            with _ForVmap():
                every = torch.vmap(one, randomness="different")
                logits: Tensor = every(self.tensors, x.unflatten(0, (len(self.dropout), -1)))
        finally:
            for module in self.masked:
                module.streams = None
        return logits.flatten(0, 1)


class _ForVmap(TorchFunctionMode):
    """What vmap does not take as it is.

    Attention keeps its fused kernels, which take no further dimension: clients join the batch. Batch norm of bfloat16
    features is computed in float32: its statistics are, and under vmap a CPU mixes the two for no layer.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention and len(args) == 3 and kwargs.get("attn_mask") is None:
            return _Attention.apply(*args, kwargs)
        if function is F.batch_norm and args[0].dtype == torch.bfloat16:
            return function(args[0].float(), *args[1:], **kwargs).bfloat16()
        return function(*args, **kwargs)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, settings: dict[str, Any]) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        *qkv, settings = args
        joined = [
            (t.expand(info.batch_size, *t.shape) if at is None else t.movedim(at, 0)).flatten(0, 1)
            for t, at in zip(qkv, in_dims, strict=False)
        ]
        y: Tensor = F.scaled_dot_product_attention(*joined, **settings)
        return y.unflatten(0, (info.batch_size, -1)), 0


def train_cohort(clients: Sequence[Client], local: LocalTraining, broadcast_loss: bool = False) -> list[Update] | None:
    """All clients trained, in as few stacks as fit. None: they cannot be stacked, or there is nothing to stack."""
    most = size(clients, local, broadcast_loss)
    if most == 1:
        return None
    stacks = torch.arange(len(clients)).tensor_split(math.ceil(len(clients) / most))
    return [u for stack in stacks for u in train([clients[i] for i in stack.tolist()], local, broadcast_loss)]


def train(clients: Sequence[Client], local: LocalTraining, broadcast_loss: bool = False) -> list[Update]:
    """What `cohort.train_cohort` does, for clients that are all stacked; updates in their order.

    They may be of several problems, each with its own data, seed and initial model: of one architecture, and
    alike in all that a batch goes through (precision, size, augmentation).
    CannotStack: the objective gives no loss per client, or something drew from a stream that is no client's.
    """
    by_size = sorted(range(len(clients)), key=lambda at: -clients[at].n)  # those of one batch length are neighbours
    clients = [clients[at] for at in by_size]
    problem = replace(clients[0].problem, path="reference")  # tensors as they come: channels are not innermost
    sizes = [client.n for client in clients]
    images, labels, shards = pool = _pooled(clients)
    before = _broadcast_losses(clients, pool, local) if broadcast_loss else [None] * len(clients)

    def streams(name: str, device: torch.device | str = problem.device) -> list[Generator]:
        return [client.stream(name, device) for client in clients]

    model = load(problem, clients[0].broadcast)
    names = trainable(model)
    masks = streams("dropout")
    form, state = _form(problem, model), _columns([client.broadcast for client in clients])
    shifts = _columns([client.gradient_shift for client in clients])
    added = [shifts[name] for name in names] if shifts else []
    weight_shifts = _columns([client.weight_shift for client in clients])
    if local.optimizer != "sgd":
        raise CannotStack(f"{local.optimizer} counts the steps of one client; use --path loop")
    clip, unclipped = local.clip, replace(local.descent(), clip=None)
    velocity = [torch.zeros_like(state[name]) for name in names]  # momentum starts at zero every round
    noise, order, views = streams("attack"), streams("order", "cpu"), streams("augment")
    correct = torch.zeros(len(clients), device=problem.device)
    losses: list[Tensor] = []
    parts: list[tuple[int, int, int]] = []  # of the last epoch: batch length and clients of every loss

    def pull(own: list[Tensor], client: Client) -> Sequence[Tensor]:
        assert local.proximal is not None
        pulled: list[Tensor] = local.proximal(own, [client.broadcast[name] for name in names], client.round)
        return pulled

    @cache
    def part(i: int, j: int) -> tuple[VmapStack | ChannelStack, list[Tensor], list[Tensor], Streams]:
        own = {name: tensor[i:j] for name, tensor in state.items()}
        weights = [state[name][i:j] for name in names]
        return form(model, own, masks[i:j], names), weights, [v[i:j] for v in velocity], Streams(noise[i:j])

    asked = _asked(clients, model, form, masks, local)

    def step(i: int, j: int, batch: Tensor) -> Tensor:
        """A step of clients i to j - 1 on the images `batch`, (j - i) * B of them; their losses (j - i,)."""
        together, weights, v, from_each = part(i, j)
        length = len(batch) // (j - i)
        x, y = pixels(problem, images[batch]), labels[batch]
        if problem.augment is not None:
            x = torch.cat([problem.augment(own, g) for own, g in zip(x.split(length), views[i:j], strict=True)])
        with precision_context(problem):
            loss, hits = _objective(local, together, x, y, from_each, asked(i, j, length))
        gradients = gradients_of(problem, loss.sum(), together.leaves)
        gradients = [g.reshape(w.shape) for g, w in zip(gradients, weights, strict=True)]
        with torch.no_grad():
            if local.proximal is not None:
                gradients = list(torch._foreach_add(gradients, _each(pull, weights, clients[i:j])))
            if added:
                gradients = list(torch._foreach_add(gradients, [a[i:j] for a in added]))
            if clip is not None:
                gradients = _each(lambda own, _: clipped(own, clip), gradients, clients[i:j])
            sgd(weights, gradients, {"velocity": v}, unclipped)
            for name, tensor in weight_shifts.items():
                state[name][i:j].sub_(tensor[i:j])
            correct[i:j] += hits.unflatten(0, (j - i, length)).sum(1)
        return loss.detach()

    with forked(problem.seed, "dropout", clients[0].round, device=problem.device):
        for epoch in range(local.epochs):
            last = epoch == local.epochs - 1
            orders = pad_sequence(
                [shard[torch.randperm(n, generator=g).to(shard.device)]
                 for shard, n, g in zip(shards, sizes, order, strict=True)], batch_first=True,
            )  # fmt: skip
            for start, length, i, j in groups(sizes, local.batch):
                loss = step(i, j, orders[i:j, start : start + length].flatten())
                if last:
                    losses.append(loss)
                    parts.append((length, i, j))
    found = _per_client(losses, parts, len(clients))
    rows = zip(by_size, clients, found, correct.tolist(), before, strict=True)
    updates = {}
    for at, (position, client, (means, lengths), right, first) in enumerate(rows):
        own = {name: tensor[at].detach().clone() for name, tensor in state.items()}
        said = stats(local, client.n, means, lengths, right)
        said = replace(said, broadcast_loss=first, stack=len(clients))
        updates[position] = Update(client.k, client.n, own, said)
    return [updates[position] for position in range(len(clients))]


def groups(sizes: Sequence[int], batch: int) -> Iterator[tuple[int, int, int, int]]:
    """The steps of one epoch of clients with `sizes` examples, falling: (start, length, i, j).

    Clients i to j - 1 have `length` images in their batch that begins at `start`. Nothing is padded: batch norm takes
    its statistics from whole batches.
    """
    for start in range(0, sizes[0], batch):
        i = 0
        for length, same in itertools.groupby(min(batch, n - start) for n in sizes if n > start):
            j = i + len(list(same))
            yield start, length, i, j
            i = j


def _broadcast_losses(clients: Sequence[Client], pool: Pool, local: LocalTraining) -> list[float]:
    """The mean objective of each client's theta^t on its data, of `_pooled`; clients by falling size."""
    problem = replace(clients[0].problem, path="reference")
    model = load(problem, clients[0].broadcast)
    form, state = _form(problem, model), _columns([client.broadcast for client in clients])
    masks, noise = ([client.stream("broadcast_loss") for client in clients] for _ in range(2))
    sizes = [client.n for client in clients]
    images, labels, shards = pool
    orders = pad_sequence(shards, batch_first=True)

    @cache
    def part(i: int, j: int) -> tuple[VmapStack | ChannelStack, Streams]:
        own = {name: tensor[i:j] for name, tensor in state.items()}
        return form(model, own, masks[i:j], trainable(model)), Streams(noise[i:j])

    losses, parts = [], []
    asked = _asked(clients, model, form, masks, local)
    with forked(problem.seed, "broadcast_loss", clients[0].round, device=problem.device):
        for start, length, i, j in groups(sizes, local.batch):
            together, from_each = part(i, j)
            batch = orders[i:j, start : start + length].flatten()
            with precision_context(problem):
                x, y = pixels(problem, images[batch]), labels[batch]
                loss, _ = _objective(local, together, x, y, from_each, asked(i, j, length))
            losses.append(loss.detach())
            parts.append((length, i, j))
    found = _per_client(losses, parts, len(clients))
    return [
        sum(mean * length for mean, length in zip(means, lengths, strict=True)) / n
        for n, (means, lengths) in zip(sizes, found, strict=True)
    ]


Pool = tuple[Tensor, Tensor, list[Tensor]]


def _pooled(clients: Sequence[Client]) -> Pool:
    """The images and labels of all problems, each data set once, and every client's indices into them."""
    first: dict[tuple[int, int], int] = {}  # id of a data set -> where it begins
    sets: list[Problem] = []
    for client in clients:
        if _data(client.problem) not in first:
            first[_data(client.problem)] = sum(len(other.labels) for other in sets)
            sets.append(client.problem)
    shards = [client.problem.shards[client.k] + first[_data(client.problem)] for client in clients]
    if len(sets) == 1:
        return sets[0].images, sets[0].labels, shards
    return torch.cat([in_memory(one.images) for one in sets]), torch.cat([one.labels for one in sets]), shards


def _data(problem: Problem) -> tuple[int, int]:
    """What tells data sets apart: malicious clients may have other labels for the same images."""
    return id(problem.images), id(problem.labels)


def _form(problem: Problem, model: nn.Module) -> type[VmapStack] | type[ChannelStack]:
    """How the problem's model is stacked: by channels if that gives the same, else by vmap."""
    if model not in _BY_CHANNELS:
        x = pixels(problem, problem.images[:1]).expand(4, -1, -1, -1)
        x = uniform(x, 0.0, 1.0, generator(0, "folds", device=x.device))
        with forked(0, "folds", device=x.device):
            _BY_CHANNELS[model] = stacks_by_channels(model, copied(model), x, VmapStack)
    return ChannelStack if _BY_CHANNELS[model] else VmapStack


_BY_CHANNELS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _columns(tensors: Sequence[Tensors]) -> Tensors:
    """Every client's tensors as one (K, ...) by name."""
    return {name: torch.stack([own[name] for own in tensors]) for name in tensors[0]}


def _each(
    function: Callable[[list[Tensor], Client], Sequence[Tensor]], stacks: Sequence[Tensor], clients: Sequence[Client]
) -> list[Tensor]:
    """`function` of every client's own tensors, what it gives stacked again."""
    owns = zip(*(stack.unbind() for stack in stacks), strict=True)
    results = [function(list(own), client) for own, client in zip(owns, clients, strict=True)]
    return [torch.stack(parts) for parts in zip(*results, strict=True)]


def _asked(
    clients: Sequence[Client],
    model: nn.Module,
    form: type[VmapStack] | type[ChannelStack],
    masks: Sequence[Generator],
    local: LocalTraining,
) -> Callable[[int, int, int], dict[str, Any]]:
    """What the objective asks for, of clients i to j - 1 with `length` images each; see `local.offers`."""

    @cache
    def frozen(i: int, j: int) -> nn.Module:
        state = _columns([client.broadcast for client in clients[i:j]])
        return form(copy.deepcopy(model), state, masks[i:j], []).eval().requires_grad_(False)

    @cache
    def counts(i: int, j: int, length: int) -> Tensor:
        of_each = [class_counts(client.problem, [client.k]) for client in clients[i:j]]
        return torch.cat(of_each).repeat_interleave(length, 0)

    def one_client() -> Any:
        raise CannotStack("the objective asks for `client`; use --path loop")

    def asked(i: int, j: int, length: int) -> dict[str, Any]:
        offers: dict[str, Callable[[], Any]] = {
            "class_counts": lambda: counts(i, j, length),
            "broadcast": lambda: frozen(i, j),
            "client": one_client,
        }
        return granted(local.objective, offers)

    return asked


def _objective(
    local: LocalTraining,
    model: VmapStack | ChannelStack,
    x: Tensor,
    y: Tensor,
    noise: Streams,
    asked: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """The objective's loss (K,) and hits (K * B,). CannotStack: as for `train`."""
    before = _positions(noise)
    loss, hits = local.objective(model, x, y, noise, **asked)
    if loss.shape != (len(noise.clients),):
        raise CannotStack(f"the objective gives a loss of shape {tuple(loss.shape)}, not one per client")
    if before != _positions(noise):
        raise CannotStack("model, attack or objective draw from a generator shared by clients; use --path loop")
    return loss, hits


def _positions(noise: Streams) -> list[bytes]:
    """Where the generators stand that belong to no client. Their states are on the host, nothing waits."""
    cuda = [torch.cuda.get_rng_state(noise.device)] if noise.device.type == "cuda" else []
    return [state.numpy().tobytes() for state in (noise.get_state(), torch.get_rng_state(), *cuda)]


def _per_client(
    losses: Sequence[Tensor], parts: Sequence[tuple[int, int, int]], clients: int
) -> list[tuple[list[float], list[int]]]:
    """Losses of parts sorted by client: (means of its batches, their lengths). The one place that waits."""
    found: list[tuple[list[float], list[int]]] = [([], []) for _ in range(clients)]
    values = iter(torch.cat(list(losses)).double().tolist())
    for length, i, j in parts:
        for at in range(i, j):
            found[at][0].append(next(values))
            found[at][1].append(length)
    return found


# --- how many fit -------------------------------------------------------------------------------------------------

# model -> what is known of training it: bytes a client takes, None where it cannot be stacked; the last size of a stack
_KNOWN: WeakKeyDictionary[nn.Module, dict[Any, int | None]] = WeakKeyDictionary()


def size(clients: Sequence[Client], local: LocalTraining, broadcast_loss: bool = False) -> int:
    """The largest number of clients that fit into one stack: at most all of them, 1 where they cannot be stacked.

    What a client takes is found once per model, by training one on one batch, and whether it may be stacked by
    `_check_company`; how much is free is asked every time.
    """
    if len(clients) == 1:
        return 1
    problem = clients[0].problem
    known = _KNOWN.setdefault(problem.model, {})
    key = (local.objective, local.proximal, local.batch)
    if key not in known:
        known[key] = _bytes_of_one(clients, local, broadcast_loss)
    each, free = known[key], _free(problem.device)
    if each is None:
        return 1
    model = sum(value.numel() * value.element_size() for value in clients[0].broadcast.values())
    most = max(
        1, min(len(clients), int(FRACTION * (free - len(clients) * model) / each))
    )  # the updates are there at last
    if known.get("last") != most:
        known["last"] = most
        log.info("stacks of at most %d of %d clients: one takes %.4g MB, %.4g MB free", most, len(clients),
                 each / 1e6, free / 1e6)  # fmt: skip
    return most


def _bytes_of_one(clients: Sequence[Client], local: LocalTraining, broadcast_loss: bool = False) -> int | None:
    """Bytes that training takes per client of a stack; None, and a line in the log, where it cannot be stacked.

    On a GPU measured: the peak while the client with most images trains on its first batch as a stack of one. On a CPU
    counted by `footprint`: a CPU does not report the peak of a process.
    """
    client = max(clients, key=lambda client: client.n)
    problem = client.problem
    first = replace(problem, shards=[shard[: local.batch] for shard in problem.shards])
    cuda = problem.device.type == "cuda"
    try:
        _form(problem, load(problem, client.broadcast))  # first, because it holds memory that training does not
        if cuda:
            torch.cuda.reset_peak_memory_stats(problem.device)
            before = torch.cuda.memory_allocated(problem.device)
        train([replace(client, problem=first)], replace(local, epochs=1), broadcast_loss)
        peak = torch.cuda.max_memory_allocated(problem.device) if cuda else 0
        _check_company(client, local)
    except Exception as error:  # whatever it is, the clients can be trained one by one, or fail there with more reason
        log.warning("clients are not vectorised: %s", str(error).partition("\n")[0] or type(error).__name__)
        return None
    if cuda:
        return peak - before
    counted = footprint(problem, min(local.batch, client.n), moments=int(local.momentum > 0))
    return 2 * math.ceil(counted["edge_memory"])  # TRADES and MART keep two forward passes for their backward pass


def _check_company(client: Client, local: LocalTraining) -> None:
    """CannotStack: a step of the client depends on who is stacked with it.

    An objective may read weights or gradients of the whole stack, such as the norm of a layer. So one step at rate 1 in
    float32 is taken with another client, with a copy of the client, and alone. The first two run the same kernels and
    agree exactly, as the copies do. The last differs by rounding, which a sign or a normalisation may magnify: by as
    much as weights moved by 1e-6 of themselves say.
    """
    draws = torch.Generator().manual_seed(0)

    def moved(factor: float) -> Tensors:
        def other(value: Tensor) -> Tensor:
            noise = torch.rand(value.shape, generator=draws, dtype=torch.float32).to(value.device, value.dtype)
            return value * (1 + factor * noise)

        return {name: other(value) if value.is_floating_point() else value for name, value in client.broadcast.items()}

    def step_of(update: Update) -> Tensor:
        steps = [update.model[n] - b for n, b in client.broadcast.items() if b.is_floating_point()]
        return torch.cat([step.double().flatten() for step in steps])

    def alone(weights: Tensors) -> Tensor:
        return step_of(train_client(Client(replace(two, path="loop"), weights, 0, client.round), how))

    def far(a: Tensor, b: Tensor, noise: Tensor, least: float) -> bool:
        rounding = 1e-7 * a.numel() ** 0.5  # of probabilities, where the gradient is nothing else
        return not (a - b).norm() <= max(least * float(b.norm()), 10 * float(noise.norm()), rounding)

    problem = client.problem
    own = problem.shards[client.k][: local.batch]
    other = torch.cat(problem.shards).flip(0)[: len(own)]
    two = replace(problem, shards=[own, other], precision="fp32", path="fast")
    how = replace(local, epochs=1, lr=1.0, momentum=0.0, weight_decay=0.0, clip=None, proximal=None)
    first = Client(two, client.broadcast, 0, client.round)
    with_other = step_of(train([first, Client(two, moved(0.2), 1, client.round)], how)[0])
    with_itself, copy = map(step_of, train([first, first], how))
    if far(with_other, with_itself, with_itself - copy, 1e-4):
        raise CannotStack("what the objective gives a client depends on the clients stacked with it")
    by_itself = alone(client.broadcast)
    if far(with_itself, by_itself, alone(moved(1e-6)) - by_itself, 1e-3):
        raise CannotStack("what the objective gives a stacked client is not what it gives the client alone")


def _free(device: torch.device) -> int:
    """Bytes of the device's memory that can be had."""
    if device.type == "cuda":
        return free_memory(device)
    pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else os.sysconf("SC_PHYS_PAGES") // 4
    return pages * os.sysconf("SC_PAGE_SIZE")
