"""FedSGD: every batch is a step of the server, on the mean over the clients that contribute to each entry.

| Sawada et al. 2024 | here | what |
|---|---|---|
| n, N | k, len(problem.shards) | clients, all of which take part |
| m | step | step of the server, one batch of each client |
| g_n | gradient | gradient of client n's batch at the server's weights |
| B_n | mask | the entries that client n contributes, drawn by the defence |
| R | defence's rate | probability that an entry of B_n is 0 |
| eta | lr | learning rate |

    for step = 0, 1, 2, ...:
        each: (g_k, B_k) <- defence(gradient of the next batch of client k)
        theta <- theta - eta (sum_k g_k) / (sum_k B_k)      entry by entry; where the sum of B is 0, theta stays

Sawada et al. 2024, Eq. 10-12. An Update holds only what a client sends, after its defence. A round here has many steps
(one epoch, or `steps`), so that not every batch writes a checkpoint. Round.updates are the uploads of its last step,
each with the gradient and the mask that were sent, and Round.broadcast the weights at which they were computed, as an
honest-but-curious server sees them. With `steps: 1` every batch is a round, as in the paper.

paper: silent about clients with fewer batches than others / here: they pause until the next epoch begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fatbench.engine.inject import requested_arguments
from fatbench.engine.local import frozen_copy, gradients_of, load, offers, pixels, precision_context, trainable
from fatbench.engine.optimizers import Descent, Moments, masked_adam, packed, unpacked
from fatbench.engine.randomness import forked, generator
from fatbench.engine.rounds import Cost, Memory, Metrics, Mixing, Problem, Round, State, Stats, Tensors, Update
from fatbench.methods.defences import Examples, Guarantee, Spent, Upload, guarantee
from fatbench.suite.entry import AlgorithmEntry, Passes, Work, passes
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count, Defence, Fraction, Objective, Rate

NO_STATISTICS = "fedsgd: clients upload gradients only, but this model has batch normalisation"


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

    `steps`: steps of the server in a round; null: one epoch of the client with the most batches. `count`: contributors
    to an entry are read from the masks, which cost one bit an entry, or are those whose entry is not zero (then a
    genuine zero does not count). `optimizer`: the server's SGD of Eq. 10, or Adam on the averaged gradient (with SGD,
    the paper's rate of 1e-4 does not train from scratch). An entry that no client sent keeps its weight and moments,
    whose bias is corrected by the number of steps.

    `sampling`: an epoch goes through all examples, or each step draws every example with probability batch / N_k.

    Numbers of a round: epsilon and delta of one example in a client's uploads so far, the largest over the clients, if
    the defence has a guarantee (Laplace noise has one at delta 0); never_updated, the fraction of entries that no round
    so far has moved; updated_rounds, the mean number of rounds that moved an entry; updated_fraction, the fraction that
    0, 1, ... rounds moved (with `steps` null, these are the epochs of Fig. 6). Artifact update_counts: the same as
    numbers of entries. Raises ValueError if the model has batch normalisation, whose statistics are no gradient.
    """
    if any(isinstance(module, _BatchNorm) for module in problem.model.modules()):
        raise ValueError(NO_STATISTICS)
    names = trainable(problem.model)
    clients = range(len(problem.shards))
    per_epoch = max(-(-len(shard) // batch) for shard in problem.shards)
    length = per_epoch if steps is None else steps
    for t in range(state.round, rounds):
        theta = {name: value.clone() for name, value in state.model.items()}
        weights = _flat(theta, names)
        moments = {
            moment_name: _concatenate(tensors)
            for moment_name, tensors in unpacked(state.server.get("optimizer", {}), names).items()
        }
        moved = torch.zeros_like(weights, dtype=torch.bool)
        sums: dict[int, list[Tensor]] = {}
        uploads: list[Update] = []
        cost = Cost()
        for step in range(t * length, (t + 1) * length):
            epoch, batch_index = divmod(step, per_epoch)
            if batch_index == 0 or step == t * length:  # a new epoch, or a round that begins within one
                batches_by_client = {k: epoch_batches(problem, k, epoch, batch, sampling) for k in clients}
            uploads = []
            model = load(problem, theta)
            for k in clients:
                for indices in batches_by_client[k][batch_index : batch_index + 1]:  # none: the client pauses
                    upload_key = Upload(problem.seed, k, epoch, batch_index)
                    # a Poisson draw's own size would tell the server something about its examples
                    expected_batch = batch if sampling == "poisson" else len(indices)
                    upload, loss, hits = _upload(
                        problem,
                        model,
                        upload_key,
                        indices,
                        expected_batch,
                        objective=objective,
                        defence=defence,
                        count=count,
                    )
                    uploads.append(upload)
                    batch_sums = torch.stack([loss * len(indices), hits, torch.ones_like(loss) * len(indices)])
                    sums.setdefault(k, []).append(batch_sums)
            sent_weights = theta
            weights, moments, moved_entries = _server_step(
                weights, moments, names, uploads, Descent(optimizer, lr), count
            )
            moved |= moved_entries
            theta = {**theta, **_tensors_by_name(weights, theta, names)}
            cost = _add(cost, uploads, sent_weights, names, passes(objective))
        rounds_moved = dict(state.server.get("rounds", {}))
        for name, moved_entries in _tensors_by_name(moved, theta, names).items():
            old_count = rounds_moved.get(name, torch.zeros_like(moved_entries, dtype=torch.int16))
            rounds_moved[name] = old_count + moved_entries
        histogram = torch.stack([torch.bincount(r.flatten().long(), minlength=t + 2) for r in rounds_moved.values()])
        histogram = histogram.sum(0)
        last = {upload.client: upload for upload in uploads}  # a client that pauses sends nothing
        updates = [
            _with_stats(k, torch.stack(batch_sums_list), last.get(k)) for k, batch_sums_list in sorted(sums.items())
        ]
        fraction = histogram.double() / histogram.sum()
        numbers: Metrics = {
            "never_updated": float(fraction[0]),
            "updated_rounds": float((fraction * torch.arange(t + 2, device=fraction.device)).sum()),
            "updated_fraction": dict(enumerate(fraction.tolist())),
        }
        spent = _spent(problem, defence, sampling, batch, (t + 1) * length, delta)
        if spent is not None and math.isfinite(spent[0]):  # infinite: there is no guarantee to record
            numbers["epsilon"], numbers["delta"] = spent
        mixing = Mixing([1 / len(updates)] * len(updates), artifacts={"update_counts": histogram})
        theta = {
            name: value.clone() for name, value in theta.items()
        }  # slices of `weights` would be saved with all of its memory
        next_state = State(
            t + 1, theta, {"optimizer": packed(_split_moments(moments, theta, names), names), "rounds": rounds_moved}
        )
        yield Round(t, sent_weights, updates, mixing, next_state, cost, metrics=numbers)
        del uploads, updates, last  # frees the memory before the next round needs as much
        state = next_state


def work(cell: Facts, *, rounds: int, batch: int, objective: Objective, steps: int | None, optimizer: str) -> Work:
    """A gradient is sent for every batch; the server stores Adam's moments and counts of updates."""
    example_passes, batches = passes(objective), math.ceil(cell.client_images / batch)
    steps_taken = batches if steps is None else steps
    images = rounds * cell.clients * (cell.client_images if steps is None else steps * min(batch, cell.client_images))
    bytes_each_way = rounds * cell.clients * steps_taken * cell.size
    server_bytes = cell.size * (2 + 2 * (optimizer == "adam"))
    return Work(
        rounds * cell.clients * steps_taken,
        images * example_passes.forward,
        images * example_passes.backward,
        bytes_each_way,
        bytes_each_way,
        server_bytes,
    )


def _spent(problem: Problem, defence: Any, sampling: str, batch: int, steps: int, delta: float) -> Guarantee | None:
    """The weakest guarantee of any client for one example after `steps` steps of the server."""
    longest = max(-(-len(shard) // batch) for shard in problem.shards)  # steps of an epoch
    guarantees = []
    for shard in problem.shards:
        batches_per_epoch = -(-len(shard) // batch)
        full_epochs, remaining_steps = divmod(steps, longest)  # a client with fewer batches pauses in each
        rate = min(1.0, batch / len(shard)) if sampling == "poisson" else None
        guarantees.append(
            guarantee(
                defence,
                Spent(
                    full_epochs + (remaining_steps > 0),
                    full_epochs * batches_per_epoch + min(remaining_steps, batches_per_epoch),
                    rate,
                ),
                delta,
            )
        )
    return None if guarantees[0] is None else max(value for value in guarantees if value is not None)


def epoch_batches(problem: Problem, k: int, epoch: int, batch: int, sampling: str = "shuffled") -> Sequence[Tensor]:
    """Client k's batches of an epoch, as indices (b,) into problem.images."""
    shard = problem.shards[k]
    if sampling == "poisson":
        draws = generator(problem.seed, "poisson", epoch, k)
        is_drawn = torch.rand(-(-len(shard) // batch), len(shard), generator=draws) < batch / len(shard)
        return [shard[row.to(shard.device)] for row in is_drawn]
    order = torch.randperm(len(shard), generator=generator(problem.seed, "order", epoch, k)).to(shard.device)
    return shard[order].split(batch)


def _upload(
    problem: Problem,
    model: nn.Module,
    upload_key: Upload,
    indices: Tensor,
    expected_batch: int,
    *,
    objective: Any,
    defence: Any,
    count: str,
) -> tuple[Update, Tensor, Tensor]:
    """(a client's upload for one batch at the model's weights, its loss, the number of correct examples)."""
    k = upload_key.client
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    key = (upload_key.epoch, upload_key.step, k)
    with forked(problem.seed, "dropout", *key, device=problem.device):
        x, y = pixels(problem, problem.images[indices]), problem.labels[indices]
        if problem.augment is not None:
            x = problem.augment(x, generator(problem.seed, "augment", *key, device=problem.device))
        extra_arguments = requested_arguments(objective, offers(problem, k, frozen_copy(model)))

        def compute(x: Tensor, y: Tensor, noise: Generator) -> tuple[Tensor, Tensor, Tensors]:
            with precision_context(problem):
                loss, hits = objective(model, x, y, noise, **extra_arguments)
            return (
                loss,
                hits,
                dict(zip(parameters, gradients_of(problem, loss, list(parameters.values())), strict=True)),
            )

        noise = generator(problem.seed, "attack", *key, device=problem.device)
        if len(y):
            loss, hits, gradient = compute(x, y, noise)
        else:  # a draw may be empty
            loss, hits = torch.zeros(2, 1, device=problem.device).unbind()
            loss, gradient = loss.sum(), {name: torch.zeros_like(weight) for name, weight in parameters.items()}

        def example_gradients() -> Tensors:
            with torch.enable_grad():  # the defence that asks for them runs without
                gradients = [compute(x[i : i + 1], y[i : i + 1], noise)[2] for i in range(len(y))]
            return {
                name: torch.stack([p[name] for p in gradients]) if gradients else w[None][:0]
                for name, w in parameters.items()
            }

        examples = Examples(model, dict(model.state_dict()), x, y, example_gradients, expected_batch)
        with torch.no_grad():
            sent_gradient, mask = defence(
                gradient, upload_key, **requested_arguments(defence, {"examples": lambda: examples})
            )
    wire: Memory = {"gradient": sent_gradient}
    if count == "mask" and mask is not None:
        wire["mask"] = mask
    upload = Update(k, len(indices), {}, Stats(0.0, 0.0, 0.0, 1, 1.0, 1), wire, batch=indices)
    return upload, loss.detach(), hits.sum()


def _server_step(
    weights: Tensor, moments: Moments, names: list[str], uploads: list[Update], descent: Descent, count: str
) -> tuple[Tensor, Moments, Tensor]:
    """One step of the weights (P,) on what was sent: (new weights, new moments, entries with a contribution (P,)).

    All tensors of a model are one flat vector: a transformer has 150 of them, and separate operations for each would
    make the GPU wait for the host.
    """
    total, contributors = torch.zeros_like(weights), torch.zeros_like(weights)
    for upload in uploads:
        gradient = _flat(upload.extra["gradient"], names)
        total += gradient
        mask = upload.extra.get("mask")
        if count == "nonzero":
            contributors += gradient != 0
        elif mask is None:  # the defence withholds nothing
            contributors += 1
        else:
            masks = [mask[name] if name in mask else torch.ones_like(upload.extra["gradient"][name]).bool()
                     for name in names]  # fmt: skip
            contributors += _concatenate(masks)[0]
    has_contribution = contributors > 0
    mean = total / contributors.clamp(min=1)  # 0 where nobody contributes, so that SGD leaves the weight
    if descent.name != "adam":
        return weights - descent.lr * mean, moments, has_contribution
    new_weights = [weights.clone()]
    with torch.no_grad():
        moments = masked_adam(new_weights, [mean], moments, descent, [has_contribution])
    return new_weights[0], moments, has_contribution


def _flat(tensors: Tensors, names: Sequence[str]) -> Tensor:
    """The named tensors, flattened and concatenated (P,)."""
    return _concatenate([tensors[name] for name in names])[0]


def _concatenate(tensors: Sequence[Tensor]) -> list[Tensor]:
    """[one flat tensor of all]."""
    return [torch.cat([tensor.flatten() for tensor in tensors])]


def _tensors_by_name(flat: Tensor, like: Tensors, names: Sequence[str]) -> Tensors:
    """The inverse of `_flat`: the named tensors in `flat` (P,), with the shapes of `like`."""
    pieces = flat.split([like[name].numel() for name in names])
    return {name: piece.view(like[name].shape) for name, piece in zip(names, pieces, strict=True)}


def _split_moments(moments: Moments, like: Tensors, names: Sequence[str]) -> Moments:
    """The moments of one flat tensor, split into those of the named tensors."""
    return {
        moment_name: flat_moments
        if moment_name == "steps"
        else list(_tensors_by_name(flat_moments[0], like, names).values())
        for moment_name, flat_moments in moments.items()
    }


def _add(cost: Cost, uploads: list[Update], sent_weights: Tensors, names: list[str], example_passes: Passes) -> Cost:
    """The cost after one more step: the gradient and one bit an entry of its mask up, the weights down."""
    bytes_down = sum(value.numel() * value.element_size() for value in sent_weights.values()) * len(uploads)
    gradients = sum(sent_weights[name].numel() * sent_weights[name].element_size() for name in names) * len(uploads)
    bits = sum(m.numel() for u in uploads for m in u.extra.get("mask", {}).values())  # one an entry
    images = sum(u.n for u in uploads)
    return Cost(
        cost.gradient_steps + len(uploads),
        cost.forward + images * example_passes.forward,
        cost.backward + images * example_passes.backward,
        cost.bytes_up + gradients + -(-bits // 8),
        cost.bytes_down + bytes_down,
    )


def _with_stats(k: int, sums: Tensor, last: Update | None) -> Update:
    """What client k sent in the last step, with statistics of the round from `sums` (steps, 3): loss, correct, n."""
    loss, correct, n = sums.double().sum(0).tolist()
    steps = len(sums)
    stats = Stats(loss / n, loss / steps, correct / n, steps, float(steps), steps)
    wire, batch = ({}, None) if last is None else (last.extra, last.batch)
    return Update(k, int(n), {}, stats, wire, batch=batch)


def gradients_alone(cell: Facts) -> str | None:
    """Refuse networks with batch normalisation."""
    return NO_STATISTICS if cell.batch_norm else None


FEDSGD = AlgorithmEntry(
    fedsgd,
    work=work,
    refuse=(gradients_alone,),
    aggregates=False,
    fractions=("never_updated", "updated_fraction"),
    cites=("sawada2024",),
)
