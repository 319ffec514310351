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
wire, and Round.broadcast the weights they were taken at, as an honest-but-curious server sees them; with `steps: 1`
every batch is a round, as in the paper.

paper: silent on clients with fewer batches than others / here: they pause until the next epoch begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fatbench.engine.inject import granted
from fatbench.engine.local import frozen, gradients_of, load, offers, pixels, precision_context, trainable
from fatbench.engine.optimizers import Descent, Moments, masked_adam, packed, unpacked
from fatbench.engine.randomness import forked, generator
from fatbench.engine.rounds import Cost, Memory, Metrics, Mixing, Problem, Round, State, Stats, Tensors, Update
from fatbench.methods.defences import Examples, Guarantee, Spent, Upload, guarantee
from fatbench.suite.entry import AlgorithmEntry, Passes, Work, passes
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count, Defence, Fraction, Objective, Rate


def fedsgd(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    batch: Count,
    lr: Rate,
    objective: Objective,
    defence: Defence,
    steps: Count | None = None,
    optimizer: Literal["sgd", "adam"] = "sgd",
    count: Literal["mask", "nonzero"] = "mask",
    sampling: Literal["shuffled", "poisson"] = "shuffled",
    delta: Fraction = 1e-5,
) -> Iterator[Round]:
    """One step of the server per batch, averaging each entry over the clients that contribute to it.

    `steps`: steps of the server in a round; null: one epoch of the client with the most batches. `count`: who
    contributes to an entry is read from the masks, which cost a bit an entry on the wire, or inferred from what is not
    zero (then a genuine zero does not count). `optimizer`: Eq. 10's SGD, of the server, or Adam on the averaged
    gradient (the paper's rate of 1e-4 does not train from scratch with SGD); an entry that no client sent keeps its
    weight and its moments, whose bias is corrected by the number of steps.

    `sampling`: an epoch goes through all examples, or each step draws every example with probability batch / N_k.

    Numbers of a round: epsilon and delta, what a client's uploads so far give away of one of its examples, the most
    over the clients, where the defence has a guarantee (Laplace noise has one at delta 0); never_updated, the fraction
    of entries that no round so far has moved; updated_rounds, the mean number of rounds that moved one;
    updated_fraction, the fraction that 0, 1, ... rounds moved (with `steps` null that is Fig. 6: epochs). Artifact
    update_counts: the same as numbers of entries. ValueError: the model has batch normalisation, whose statistics are
    no gradient.
    """
    if any(isinstance(module, _BatchNorm) for module in problem.model.modules()):
        raise ValueError("fedsgd: clients upload gradients only, and this model has batch normalisation")
    names = trainable(problem.model)
    clients = range(len(problem.shards))
    per_epoch = max(-(-len(shard) // batch) for shard in problem.shards)
    length = per_epoch if steps is None else steps
    for t in range(state.round, rounds):
        theta = {name: value.clone() for name, value in state.model.items()}
        weights = _flat(theta, names)
        moments = {what: _joined(parts) for what, parts in unpacked(state.server.get("optimizer", {}), names).items()}
        moved = torch.zeros_like(weights, dtype=torch.bool)
        sums: dict[int, list[Tensor]] = {}
        uploads: list[Update] = []
        cost = Cost()
        for step in range(t * length, (t + 1) * length):
            epoch, place = divmod(step, per_epoch)
            if place == 0 or step == t * length:
                todo = {k: epoch_batches(problem, k, epoch, batch, sampling) for k in clients}
            uploads = []
            model = load(problem, theta)
            for k in clients:
                for indices in todo[k][place : place + 1]:
                    at = Upload(problem.seed, k, epoch, place)
                    drawn = batch if sampling == "poisson" else len(indices)
                    upload, loss, hits = _upload(
                        problem, model, at, indices, drawn, objective=objective, defence=defence, count=count
                    )
                    uploads.append(upload)
                    one = torch.stack([loss * len(indices), hits, torch.ones_like(loss) * len(indices)])
                    sums.setdefault(k, []).append(one)
            sent = theta
            weights, moments, here = _server_step(weights, moments, names, uploads, Descent(optimizer, lr), count)
            moved |= here
            theta = {**theta, **_named(weights, theta, names)}
            cost = _add(cost, uploads, sent, names, passes(objective))
        rounds_moved = dict(state.server.get("rounds", {}))
        for name, here in _named(moved, theta, names).items():
            before = rounds_moved.get(name, torch.zeros_like(here, dtype=torch.int16))
            rounds_moved[name] = before + here
        histogram = torch.stack([torch.bincount(r.flatten().long(), minlength=t + 2) for r in rounds_moved.values()])
        histogram = histogram.sum(0)
        last = {upload.client: upload.extra for upload in uploads}  # a client that paused sent nothing
        updates = [_with_stats(k, torch.stack(parts), last.get(k, {})) for k, parts in sorted(sums.items())]
        fraction = histogram.double() / histogram.sum()
        numbers: Metrics = {
            "never_updated": float(fraction[0]),
            "updated_rounds": float((fraction * torch.arange(t + 2, device=fraction.device)).sum()),
            "updated_fraction": dict(enumerate(fraction.tolist())),
        }
        spent = _spent(problem, defence, sampling, batch, (t + 1) * length, delta)
        if spent is not None and math.isfinite(spent[0]):
            numbers["epsilon"], numbers["delta"] = spent
        mixing = Mixing([1 / len(updates)] * len(updates), artifacts={"update_counts": histogram})
        theta = {name: value.clone() for name, value in theta.items()}  # each with its own memory, as files have it
        after = State(t + 1, theta, {"optimizer": packed(_apart(moments, theta, names), names), "rounds": rounds_moved})
        yield Round(t, sent, updates, mixing, after, cost, metrics=numbers)
        del uploads, updates, last  # before the next round sends as much
        state = after


def work(cell: Facts, *, rounds: int, batch: int, objective: Objective, steps: int | None, optimizer: str) -> Work:
    """A gradient crosses for every batch; the server keeps the moments of Adam and counts of updates."""
    one, batches = passes(objective), math.ceil(cell.client_images / batch)
    taken = batches if steps is None else steps
    images = rounds * cell.clients * (cell.client_images if steps is None else steps * min(batch, cell.client_images))
    each = rounds * cell.clients * taken * cell.size
    kept = cell.size * (2 + 2 * (optimizer == "adam"))
    return Work(rounds * cell.clients * taken, images * one.forward, images * one.backward, each, each, kept)


def _spent(problem: Problem, defence: Any, sampling: str, batch: int, steps: int, delta: float) -> Guarantee | None:
    """The most that the uploads of `steps` steps of the server give away of an example of any client."""
    longest = max(-(-len(shard) // batch) for shard in problem.shards)
    found = []
    for shard in problem.shards:
        own = -(-len(shard) // batch)
        whole, rest = divmod(steps, longest)
        rate = min(1.0, batch / len(shard)) if sampling == "poisson" else None
        found.append(guarantee(defence, Spent(whole + (rest > 0), whole * own + min(rest, own), rate), delta))
    return None if found[0] is None else max(value for value in found if value is not None)


def epoch_batches(problem: Problem, k: int, epoch: int, batch: int, sampling: str = "shuffled") -> Sequence[Tensor]:
    """Indices (b,) into problem.images of each of client k's batches of an epoch; after them it pauses."""
    shard = problem.shards[k]
    if sampling == "poisson":
        draws = generator(problem.seed, "poisson", epoch, k)
        chosen = torch.rand(-(-len(shard) // batch), len(shard), generator=draws) < batch / len(shard)
        return [shard[row.to(shard.device)] for row in chosen]
    order = torch.randperm(len(shard), generator=generator(problem.seed, "order", epoch, k)).to(shard.device)
    return shard[order].split(batch)


def _upload(
    problem: Problem,
    model: nn.Module,
    at: Upload,
    indices: Tensor,
    drawn: int,
    *,
    objective: Any,
    defence: Any,
    count: str,
) -> tuple[Update, Tensor, Tensor]:
    """What a client sends for one batch at the model's weights, its loss, and how many examples it got right."""
    k = at.client
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    key = (at.epoch, at.step, k)
    with forked(problem.seed, "dropout", *key, device=problem.device):
        x, y = pixels(problem, problem.images[indices]), problem.labels[indices]
        if problem.augment is not None:
            x = problem.augment(x, generator(problem.seed, "augment", *key, device=problem.device))
        asked = granted(objective, offers(problem, k, frozen(model)))

        def computed(x: Tensor, y: Tensor, noise: Generator) -> tuple[Tensor, Tensor, Tensors]:
            with precision_context(problem):
                loss, hits = objective(model, x, y, noise, **asked)
            return loss, hits, dict(zip(named, gradients_of(problem, loss, list(named.values())), strict=True))

        noise = generator(problem.seed, "attack", *key, device=problem.device)
        if len(y):
            loss, hits, gradient = computed(x, y, noise)
        else:  # a draw may be empty
            loss, hits = torch.zeros(2, 1, device=problem.device).unbind()
            loss, gradient = loss.sum(), {name: torch.zeros_like(weight) for name, weight in named.items()}

        def each() -> Tensors:
            with torch.enable_grad():
                parts = [computed(x[i : i + 1], y[i : i + 1], noise)[2] for i in range(len(y))]
            return {name: torch.stack([p[name] for p in parts]) if parts else w[None][:0] for name, w in named.items()}

        examples = Examples(model, dict(model.state_dict()), x, y, each, drawn)
        with torch.no_grad():
            sent, mask = defence(gradient, at, **granted(defence, {"examples": lambda: examples}))
    wire: Memory = {"gradient": sent}
    if count == "mask" and mask is not None:
        wire["mask"] = mask
    return Update(k, len(indices), {}, Stats(0.0, 0.0, 0.0, 1, 1.0, 1), wire), loss.detach(), hits.sum()


def _server_step(
    weights: Tensor, moments: Moments, names: list[str], uploads: list[Update], how: Descent, count: str
) -> tuple[Tensor, Moments, Tensor]:
    """One step of all weights (P,) on what was sent; the moments after it, and which entries had a contribution (P,).

    All tensors of a model lie one after the other: a transformer has 150 of them, and a GPU that is given every one by
    itself waits for the host.
    """
    total, contributors = torch.zeros_like(weights), torch.zeros_like(weights)
    for upload in uploads:
        gradient = _flat(upload.extra["gradient"], names)
        total += gradient
        mask = upload.extra.get("mask")
        if count == "nonzero":
            contributors += gradient != 0
        elif mask is None:
            contributors += 1
        else:
            masks = [mask[name] if name in mask else torch.ones_like(upload.extra["gradient"][name]).bool()
                     for name in names]  # fmt: skip
            contributors += _joined(masks)[0]
    here = contributors > 0
    mean = total / contributors.clamp(min=1)
    if how.name != "adam":
        return weights - how.lr * mean, moments, here
    after = [weights.clone()]
    with torch.no_grad():
        moments = masked_adam(after, [mean], moments, how, [here])
    return after[0], moments, here


def _flat(tensors: Tensors, names: Sequence[str]) -> Tensor:
    """The named tensors one after the other (P,)."""
    return _joined([tensors[name] for name in names])[0]


def _joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    """One flat tensor in place of several; of a count, that."""
    return [torch.cat([tensor.flatten() for tensor in tensors])]


def _named(flat: Tensor, like: Tensors, names: Sequence[str]) -> Tensors:
    """The named tensors that lie in `flat` (P,), in the shapes of `like`."""
    parts = flat.split([like[name].numel() for name in names])
    return {name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)}


def _apart(moments: Moments, like: Tensors, names: Sequence[str]) -> Moments:
    """Moments of one flat tensor as those of its parts."""
    return {
        what: parts if what == "steps" else list(_named(parts[0], like, names).values())
        for what, parts in moments.items()
    }


def _add(cost: Cost, uploads: list[Update], sent: Tensors, names: list[str], one: Passes) -> Cost:
    """The cost of one more step, `one` of an image: the gradient up, a bit an entry for a mask, the weights down."""
    down = sum(value.numel() * value.element_size() for value in sent.values()) * len(uploads)
    gradients = sum(sent[name].numel() * sent[name].element_size() for name in names) * len(uploads)
    bits = sum(m.numel() for u in uploads for m in u.extra.get("mask", {}).values())
    images = sum(u.n for u in uploads)
    return Cost(
        cost.gradient_steps + len(uploads),
        cost.forward + images * one.forward,
        cost.backward + images * one.backward,
        cost.bytes_up + gradients + -(-bits // 8),
        cost.bytes_down + down,
    )


def _with_stats(k: int, sums: Tensor, wire: Memory) -> Update:
    """What client k sent in the last step, with its numbers over the whole round: sums (steps, 3), loss, right, n."""
    loss, right, n = sums.double().sum(0).tolist()
    steps = len(sums)
    return Update(k, int(n), {}, Stats(loss / n, loss / steps, right / n, steps, float(steps), steps), wire)


FEDSGD = AlgorithmEntry(fedsgd, work=work, aggregates=False, fractions=("never_updated", "updated_fraction"))
