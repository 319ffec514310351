"""The metrics of a round.

Numbers of a round (stage `train`; those per client have `client` set):

| metric | what |
|---|---|
| train_loss | mean training loss over the last local epoch, clients weighted by examples; also per client |
| train_accuracy | accuracy on the training inputs (adversarial under AT), running over the round; also per client |
| holdout_accuracy | per client: accuracy under the monitor on the client's held-out fraction (client_holdout > 0) |
| holdout_natural | per client: clean accuracy on the same images |
| holdout_gap | per client that took part: train_accuracy minus holdout_accuracy |
| weight | per client: the weight w_k |
| mixed_loss | sum_k w_k L_k, the clients' training losses in the weights of the round |
| selected | per client: 1 where the aggregator singled the client out, else 0 |
| last_layer_cosine | per client: cosine between the layers of logits of theta^t and theta_k (FedWAvg) |
| fedwavg_weight | per client: FedWAvg's weight at q = 1, whether the aggregator uses it or not |
| drift_post, drift_pre | mean L2 distance of the clients' parameters from the new, and from the broadcast model |
| grad_var | (1/m) sum_k ||g_k - mean g||^2 with g_k = theta^t - theta_k |
| natural, monitor | test accuracy, clean and under the monitor (every `monitor_every` rounds, and the last) |
| natural_loss, monitor_loss | mean cross-entropy on the same images |
| natural_class, monitor_class | accuracy by class, the class in place of a client (per_class) |
| val_natural, val_monitor, ... | the same on the validation images |
| edge_natural | clean test accuracy of the small device's own classifier, mean over devices, where a model has one |
| label_clients | round 1, the class in place of a client: how many clients hold examples of it (per_class) |
| edge_parameters, edge_flops, edge_step_flops, edge_memory | round 1: what training costs a client (`footprint`) |
| gradient_steps, forward, backward | what the round cost: optimizer steps, image passes of training |
| took_part | with `availability`: clients of the round |
| bytes_up, bytes_down, seconds | bytes on the wire, wall time of training |

The algorithm, its aggregator and the diagnostic may add metrics. If an algorithm has no single global model, accuracies
are means over the clients' models, and also per client.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fatbench.engine.accuracy import Chunk, accuracy, edge_accuracy, models_of, natural, of_client, outcomes_of
from fatbench.engine.footprint import footprint
from fatbench.engine.local import trainable
from fatbench.engine.mixing import last_layer_cosines
from fatbench.engine.outcomes import ball
from fatbench.engine.rounds import Number, Problem, Round
from fatbench.engine.setup import Setup
from fatbench.models import logit_parameters


def metric_numbers(count: int, metrics: Mapping[str, float | dict[int, float]]) -> Iterator[Number]:
    """Metrics as numbers of a round."""
    for name, value in metrics.items():
        if isinstance(value, dict):
            yield from (Number(name, client_value, count, client=k) for k, client_value in value.items())
        else:
            yield Number(name, value, count)


def constant_numbers(ready: Setup, settings: Mapping[str, Any], per_class: bool) -> Iterator[Number]:
    """Numbers of the first round that are the same in every round."""
    problem = ready.problem
    local = settings.get("local")
    batch = settings.get("batch") if local is None else local.batch
    moments = 0 if local is None else 2 if local.optimizer != "sgd" else int(local.momentum > 0)
    if batch is not None:
        yield from metric_numbers(1, footprint(problem, batch, moments=moments))
    if per_class:
        client_has_class = torch.stack(
            [problem.labels[shard].bincount(minlength=ready.classes) > 0 for shard in problem.shards]
        )
        yield from metric_numbers(1, {"label_clients": dict(enumerate(client_has_class.sum(0).double().tolist()))})


def training(result: Round, problem: Problem) -> Iterator[Number]:
    """Losses, accuracies, weights and drift, from the round's updates."""
    count, updates = result.index + 1, result.updates
    if not updates:
        return
    total = sum(u.n for u in updates)
    yield Number("train_loss", sum(u.n * u.stats.loss for u in updates) / total, count, n=total)
    yield Number("train_accuracy", sum(u.n * u.stats.accuracy for u in updates) / total, count, n=total)
    for position, update in enumerate(updates):
        yield Number("train_loss", update.stats.loss, count, update.n, update.client)
        yield Number("train_accuracy", update.stats.accuracy, count, update.n, update.client)
        if result.mixing is not None:
            yield Number("weight", result.mixing.weights[position], count, client=update.client)
            yield Number("selected", float(position in result.mixing.selected), count, client=update.client)
    if result.mixing is not None:
        pairs = zip(result.mixing.weights, updates, strict=True)
        yield Number("mixed_loss", math.fsum(weight * u.stats.loss for weight, u in pairs), count, n=total)
    if not all(update.model for update in updates):
        return  # no client sent a model, so there is no drift
    cosines = last_layer_cosines(updates, result.broadcast, logit_parameters(problem.model))
    exponents = [math.exp(cosine) for cosine in cosines]
    for update, cosine, exponent in zip(updates, cosines, exponents, strict=True):
        yield Number("last_layer_cosine", cosine, count, client=update.client)
        yield Number("fedwavg_weight", exponent / sum(exponents), count, client=update.client)
    lengths = []
    for name in trainable(problem.model):  # one at a time: a model of each client may not fit into memory
        values = [update.model[name] for update in updates]
        references = [result.state.model[name], result.broadcast[name]]
        of_tensor = _distances(values, references)
        if not bool(of_tensor.isfinite().all()):  # the squares of a long upload overflow in float32
            of_tensor = _distances([value.double() for value in values], [value.double() for value in references])
        lengths.append(of_tensor.double())
    post, pre, mean = (
        [float(of_client.norm()) for of_client in of_reference] for of_reference in torch.stack(lengths, 2)
    )
    yield Number("drift_post", sum(post) / len(updates), count)
    yield Number("drift_pre", sum(pre) / len(updates), count)
    squares = [distance**2 if distance < 1e150 else math.inf for distance in mean]  # Python raises on overflow
    yield Number("grad_var", sum(squares) / len(updates), count)


def _distances(values: list[Tensor], references: list[Tensor]) -> Tensor:
    """The distances of the clients' tensors from each reference and from their own mean, (references + 1, m)."""
    centres = [*references, torch.stack(values).mean(0)]
    return torch.stack(
        [torch.stack(torch._foreach_norm(torch._foreach_sub(values, [centre] * len(values)))) for centre in centres]
    )


def monitored(
    ready: Setup, result: Round, count: int, monitor: Any, n: int | None, per_class: bool
) -> Iterator[Number]:
    """Accuracies and losses on test and validation images, and on the clients' held-out examples."""
    problem = ready.problem
    models = models_of(result.state.model, result.own)
    clean_only = getattr(monitor, "func", monitor) is natural
    attack_ball, doubt_kinds = ball(monitor), dict[str, None]()  # a set that keeps its order
    for prefix, held_out in (("", ready.test), ("val_", ready.validation)):
        if held_out is None:
            continue
        images, labels = held_out[0][:n], held_out[1][:n]
        judgements: dict[str, list[Chunk]] = {}
        for metric, attack in (("natural", natural), ("monitor", monitor)):
            if metric == "monitor" and clean_only:
                judgements[metric] = judgements["natural"]
                continue
            judgements[metric] = [
                outcomes_of(problem, model, images, labels, attack, ("monitor", prefix + metric, count, *of_client(k)))
                for k, model in models.items()
            ]
        for metric, results in judgements.items():
            bits = torch.stack([judgement.correct for judgement in results]).double()
            doubt_kinds |= {kind: None for judgement in results for kind in judgement.seen.doubts(attack_ball)}
            yield Number(prefix + metric, float(bits.mean()), count, n=len(labels))
            loss = sum(float(judgement.losses.mean()) for judgement in results) / len(results)
            if math.isfinite(loss):
                yield Number(f"{prefix}{metric}_loss", loss, count, n=len(labels))
            if result.own:
                yield from (
                    Number(prefix + metric, float(judgement.mean()), count, len(labels), k)
                    for k, judgement in zip(models, bits, strict=True)
                )
            if per_class:
                for c in range(ready.classes):
                    of_class = labels.cpu() == c
                    if class_size := int(of_class.sum()):
                        yield Number(f"{prefix}{metric}_class", float(bits[:, of_class].mean()), count, class_size, c)
    yield from (Number(f"doubt_monitored: {kind}".replace(" ", "_"), 1.0, count) for kind in doubt_kinds)
    if hasattr(problem.model, "edge_logits"):
        images, labels = ready.test[0][:n], ready.test[1][:n]
        edges = [edge_accuracy(problem, model, images, labels) for model in models.values()]
        yield Number("edge_natural", sum(edges) / len(edges), count, n=len(labels))
    trained = {update.client: update.stats.accuracy for update in result.updates}
    for k, held_indices in enumerate(ready.held[: len(problem.shards)]):
        if len(held_indices):
            images, labels = problem.images[held_indices], problem.labels[held_indices]
            model = models.get(k, result.state.model)
            correct, _ = accuracy(problem, model, images, labels, monitor, ("monitor", "holdout", count, k))
            value = float(correct.double().mean())
            yield Number("holdout_accuracy", value, count, n=len(held_indices), client=k)
            if not clean_only:
                correct, _ = accuracy(problem, model, images, labels, natural, ("monitor", "holdout_natural", count, k))
            yield Number("holdout_natural", float(correct.double().mean()), count, n=len(held_indices), client=k)
            if k in trained:
                yield Number("holdout_gap", trained[k] - value, count, n=len(held_indices), client=k)
