"""FedSGD: every batch is a step of the server, on the mean of what the clients contribute to each entry.

| Sawada et al. 2024 | here | what |
|---|---|---|
| n, N | k, len(problem.shards) | clients, all of which take part |
| m | step | step of the server, one batch of each client |
| g_n | gradient | gradient of client n's batch at the server's weights |
| B_n | mask | what of it client n contributes, drawn by the defence |
| R | defence's rate | probability that an entry of B_n is 0 |
| eta | lr | learning rate |

    for step = 0, 1, 2, ...:
        each: (g_k, B_k) <- defence(gradient of the next batch of client k)
        theta <- theta - eta (sum_k g_k) / (sum_k B_k)      entry by entry; where the sum of B is 0, theta stays

Sawada et al. 2024, Eq. 10-12. The defence is applied before the update exists: the gradient of a client is in no
Update, only what it sends. A round here holds many steps (one epoch, or `steps`), so that a checkpoint is not written
for every batch; Round.updates are the uploads of its last step, each with the gradient and the mask that crossed the
wire, and Round.broadcast the weights they were taken at, as an eavesdropper sees them; with `steps: 1` every batch is a
round, as in the paper.

paper: silent on clients with fewer batches than others / here: they pause until the next epoch begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fatbench.engine.asks import granted
from fatbench.engine.local import frozen, load, offers, pixels, precision_context, trainable
from fatbench.engine.optimisers import Descent, Moments, masked_adam, packed, unpacked
from fatbench.engine.randomness import forked, generator
from fatbench.engine.rounds import Cost, Memory, Metrics, Mixing, Problem, Round, State, Stats, Tensors, Update
from fatbench.methods.defences import Upload
from fatbench.suite.types import Count, Defence, Objective, Positive


def fedsgd(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    batch: Count,
    lr: Positive,
    objective: Objective,
    defence: Defence,
    steps: Count | None = None,
    optimiser: Literal["sgd", "adam"] = "sgd",
    count: Literal["mask", "nonzero"] = "mask",
) -> Iterator[Round]:
    """One step of the server per batch, averaging each entry over the clients that contribute to it.

    `steps`: steps of the server in a round; null: one epoch of the client with the most batches. `count`: who
    contributes to an entry is read from the masks, which cost a bit an entry on the wire, or inferred from what is not
    zero (then a genuine zero does not count). `optimiser`: Eq. 10's SGD, of the server, or Adam on the averaged
    gradient (the paper's rate of 1e-4 does not train from scratch with SGD); an entry that no client sent keeps its
    weight and its moments, whose bias is corrected by the number of steps.

    Numbers of a round: never_updated, the share of entries that no round so far has moved; updated_rounds, the mean
    number of rounds that moved one; updated_share, the share that 0, 1, ... rounds moved (with `steps` null that is
    Fig. 6: epochs). Artifact update_counts: the same as numbers of entries. ValueError: the model has batch
    normalisation, whose statistics are no gradient.

    Forward: rounds * objective
    Backward: rounds * objective
    Up: batches
    Down: batches
    Fractions: never_updated, updated_share
    """
    if any(isinstance(module, _BatchNorm) for module in problem.model.modules()):
        raise ValueError("fedsgd: clients upload gradients only, and this model has batch normalisation")
    names = trainable(problem.model)
    clients = range(len(problem.shards))
    per_epoch = max(-(-len(shard) // batch) for shard in problem.shards)
    length = per_epoch if steps is None else steps
    for t in range(state.round, rounds):
        theta = {name: value.clone() for name, value in state.model.items()}
        moments = unpacked(state.server.get("optimiser", {}), names)
        moved = {name: torch.zeros_like(theta[name], dtype=torch.bool) for name in names}
        sums: dict[int, list[Tensor]] = {}
        uploads: list[Update] = []
        cost = Cost()
        for step in range(t * length, (t + 1) * length):
            epoch, place = divmod(step, per_epoch)
            uploads = []
            for k in clients:
                indices = batch_indices(problem, k, epoch, place, batch)
                if len(indices):
                    upload, loss, hits = _upload(problem, theta, k, indices, epoch, place, objective, defence, count)
                    uploads.append(upload)
                    one = torch.stack([loss * len(indices), hits, torch.ones_like(loss) * len(indices)])
                    sums.setdefault(k, []).append(one)
            sent = theta
            descent = Descent(optimiser, lr)
            theta, moments = _server_step(theta, moments, names, uploads, descent, count, moved)
            cost = _add(cost, uploads, sent, names)
        rounds_moved = dict(state.server.get("rounds", {}))
        for name in names:
            before = rounds_moved.get(name, torch.zeros_like(moved[name], dtype=torch.int16))
            rounds_moved[name] = before + moved[name]
        histogram = torch.stack([torch.bincount(r.flatten().long(), minlength=t + 2) for r in rounds_moved.values()])
        histogram = histogram.sum(0)
        last = {upload.client: upload.extra for upload in uploads}  # a client that paused sent nothing
        updates = [_with_stats(k, torch.stack(parts), last.get(k, {})) for k, parts in sorted(sums.items())]
        share = histogram.double() / histogram.sum()
        numbers: Metrics = {
            "never_updated": float(share[0]),
            "updated_rounds": float((share * torch.arange(t + 2, device=share.device)).sum()),
            "updated_share": dict(enumerate(share.tolist())),
        }
        mixing = Mixing([1 / len(updates)] * len(updates), artifacts={"update_counts": histogram})
        after = State(t + 1, theta, {"optimiser": packed(moments, names), "rounds": rounds_moved})
        yield Round(t, sent, updates, mixing, after, cost, metrics=numbers)
        state = after


def batch_indices(problem: Problem, k: int, epoch: int, place: int, batch: int) -> Tensor:
    """Indices (b,) into problem.images of batch number `place` of client k in an epoch; empty: it pauses."""
    shard = problem.shards[k]
    order = torch.randperm(len(shard), generator=generator(problem.seed, "order", epoch, k)).to(shard.device)
    return shard[order[place * batch : (place + 1) * batch]]


def _upload(
    problem: Problem, theta: Tensors, k: int, indices: Tensor, epoch: int, place: int, objective: Any, defence: Any,
    count: str,
) -> tuple[Update, Tensor, Tensor]:  # fmt: skip
    """What client k sends for one batch, its loss, and the number of examples it got right."""
    model = load(problem, theta)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    key = (epoch, place, k)
    with forked(problem.seed, "dropout", *key, device=problem.device):
        x, y = pixels(problem, problem.images[indices]), problem.labels[indices]
        if problem.augment is not None:
            x = problem.augment(x, generator(problem.seed, "augment", *key, device=problem.device))
        with precision_context(problem):
            noise = generator(problem.seed, "attack", *key, device=problem.device)
            loss, hits = objective(model, x, y, noise, **granted(objective, offers(problem, k, frozen(model))))
        gradient = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    with torch.no_grad():
        sent, mask = defence(gradient, Upload(problem.seed, k, epoch, place))
    wire: Memory = {"gradient": sent}
    if count == "mask" and mask is not None:
        wire["mask"] = mask
    return Update(k, len(indices), {}, Stats(0.0, 0.0, 0.0, 1, 1.0, 1), wire), loss.detach(), hits.sum()


def _server_step(
    theta: Tensors, moments: Moments, names: list[str], uploads: list[Update], how: Descent, count: str, moved: Tensors
) -> tuple[Tensors, Moments]:
    """One step on what was sent; `moved` notes the entries that had a contribution."""
    means, some = [], []
    for name in names:
        total = torch.zeros_like(theta[name])
        contributors = torch.zeros_like(total)
        for upload in uploads:
            g = upload.extra["gradient"][name]
            total = total + g
            mask = g != 0 if count == "nonzero" else upload.extra.get("mask", {}).get(name)
            contributors = contributors + (1 if mask is None else mask.to(total))
        here = contributors > 0
        moved[name] |= here
        some.append(here)
        means.append(total / contributors.clamp(min=1))
    weights = [theta[name].clone() for name in names]
    with torch.no_grad():
        if how.name == "adam":
            moments = masked_adam(weights, means, moments, how, some)
        else:
            for w, mean in zip(weights, means, strict=True):
                w.sub_(how.lr * mean)
    return {**theta, **dict(zip(names, weights, strict=True))}, moments


def _add(cost: Cost, uploads: list[Update], sent: Tensors, names: list[str]) -> Cost:
    """The cost of one more step: the whole gradient up, a bit an entry for a mask, the weights down."""
    down = sum(value.numel() * value.element_size() for value in sent.values()) * len(uploads)
    gradients = sum(sent[name].numel() * sent[name].element_size() for name in names) * len(uploads)
    bits = sum(m.numel() for u in uploads for m in u.extra.get("mask", {}).values())
    images = sum(u.n for u in uploads)
    return Cost(
        cost.gradient_steps + len(uploads),
        cost.forward + images,
        cost.backward + images,
        cost.bytes_up + gradients + -(-bits // 8),
        cost.bytes_down + down,
    )


def _with_stats(k: int, sums: Tensor, wire: Memory) -> Update:
    """What client k sent in the last step, with its numbers over the whole round: sums (steps, 3), loss, right, n."""
    loss, right, n = sums.double().sum(0).tolist()
    steps = len(sums)
    return Update(k, int(n), {}, Stats(loss / n, loss / steps, right / n, steps, float(steps), steps), wire)
