"""From updates to the next model: an aggregator returns weights, and `mix` applies them.

mixing = aggregate(aggregator, updates, context)          calls the aggregator with what it asks for
mix(updates, mixing, broadcast, model)                 -> the state_dict of theta^{t+1}
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fatbench.engine.inject import requested_arguments
from fatbench.engine.rounds import Context, Mixing, Tensors, Update


def aggregate(aggregator: Callable[..., Mixing], updates: Sequence[Update], context: Context) -> Mixing:
    """The aggregator's Mixing. It may ask for `broadcast_losses`: the loss of theta^t on each client's data.

    Raises TypeError if it returns something else.
    """
    updates = completed(updates, context.broadcast)
    extra_arguments = requested_arguments(aggregator, {"broadcast_losses": lambda: _broadcast_losses(updates)})
    mixing = aggregator(updates, context, **extra_arguments)
    if not isinstance(mixing, Mixing):
        raise TypeError(f"the aggregator returns {type(mixing).__name__}, not a Mixing")
    return mixing


def completed(updates: Sequence[Update], broadcast: Tensors) -> list[Update]:
    """Updates as the server sees them: what was not sent is that of theta^t; one without a model stays without."""
    seen = []
    for update in updates:
        kept = {} if update.sent is None else {name: broadcast[name] for name in broadcast.keys() - update.sent}
        if update.model and (kept or update.model.keys() < broadcast.keys()):
            update = replace(update, model=ChainMap(kept, update.model, broadcast))  # type: ignore[arg-type]
        seen.append(update)
    return seen


def _broadcast_losses(updates: Sequence[Update]) -> list[float]:
    losses = [update.stats.broadcast_loss for update in updates]
    clients_without = [update.client for update, loss in zip(updates, losses, strict=True) if loss is None]
    if clients_without:
        raise ValueError(f"the aggregator needs broadcast_losses, which client {clients_without[0]} did not measure")
    return [loss for loss in losses if loss is not None]


def mix(updates: Sequence[Update], mixing: Mixing, broadcast: Tensors, model: nn.Module) -> Tensors:
    """The state_dict of theta^{t+1}, with the device and types of `broadcast`; `model` tells parameters from buffers.

    - Trainable parameters: mixing.broadcast * theta^t + sum_k mixing.weights[k] * theta_k; those of batch
      normalisation with mixing.norm, if it is given.
    - Float buffers: the mean weighted by N_k. Integer buffers and frozen parameters: copied from the first update.
    - A tensor that no client sent: that of theta^t.
    - mixing.model, if it is given, is the next model; only mixing.broadcast of theta^t is mixed into it.
    - mixing.norm_match "substring" follows the SFAT release instead: every tensor is a weighted sum, also buffers and
      frozen parameters, with mixing.norm if its name contains "bn". Sums of integers are truncated, which is what
      loading such a sum into a counter does.

    Half precision is summed in float32. A client of weight 0 is left out, so that a model full of NaN does no harm.
    Raises ValueError unless there is one weight for each update and `broadcast` is a state of `model`.
    """
    for mixing_weights in (mixing.weights, mixing.norm):
        if mixing_weights is not None and len(mixing_weights) != len(updates):
            raise ValueError(f"mix: {len(mixing_weights)} weights for {len(updates)} updates")
    if unmatched_names := broadcast.keys() ^ model.state_dict().keys():
        raise ValueError(f"mix: model and broadcast weights differ in {', '.join(sorted(unmatched_names)[:3])}")
    unsent = broadcast.keys() - {name for u in updates for name in (u.model.keys() if u.sent is None else u.sent)}
    updates = completed(updates, broadcast)
    norm = mixing.weights if mixing.norm is None else mixing.norm
    first_model = updates[0].model
    if mixing.model is not None:
        stay = mixing.broadcast
        next_model = {key: broadcast[key] if key in unsent else mixing.model[key] for key in broadcast}
        return {
            k: torch.lerp(v, broadcast[k], stay) if stay and v.is_floating_point() else v for k, v in next_model.items()
        }
    result: Tensors = {}

    # [(tensors, weight)] of theta^t and of the clients that count
    def sources(weights: Sequence[float], stay: float) -> list[tuple[Tensors, float]]:
        pairs = [(broadcast, stay), *((u.model, w) for u, w in zip(updates, weights, strict=True))]
        return [(tensors, weight) for tensors, weight in pairs if weight != 0]

    with torch.no_grad():
        if mixing.norm_match == "substring":
            floats = [key for key, value in broadcast.items() if value.is_floating_point()]
            groups = [
                ([key for key in floats if "bn" in key], sources(norm, mixing.broadcast)),
                ([key for key in floats if "bn" not in key], sources(mixing.weights, mixing.broadcast)),
            ]
            for key in broadcast.keys() - set(floats):
                total = torch.zeros(broadcast[key].shape, dtype=torch.float64)
                for tensors, weight in sources(norm if "bn" in key else mixing.weights, mixing.broadcast):
                    total += weight * tensors[key].to("cpu", torch.float64)
                # 1e-6: weights that sum to 1 must not lose a whole count to rounding
                result[key] = torch.floor(total + 1e-6).to(broadcast[key])
        else:
            trainable = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
            buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
            normalisation = {
                f"{prefix}.{name}".removeprefix(".")
                for prefix, module in model.named_modules(remove_duplicate=False)
                if isinstance(module, _BatchNorm)
                for name, _ in module.named_parameters()
            }
            running = [key for key in broadcast if key in buffers and broadcast[key].is_floating_point()]
            fraction = normalised([float(update.n) for update in updates])
            groups = [
                ([k for k in broadcast if k in trainable - normalisation], sources(mixing.weights, mixing.broadcast)),
                ([k for k in broadcast if k in trainable & normalisation], sources(norm, mixing.broadcast)),
                (running, sources(fraction, 0.0)),
            ]
            for key in broadcast.keys() - trainable - set(running):
                result[key] = first_model[key].detach().clone()
        for keys, terms in groups:
            result.update(_weighted_sum(keys, terms, broadcast))
    return {key: broadcast[key].clone() if key in unsent else result[key] for key in broadcast}


def scaled(mixing: Mixing, rate: float) -> Mixing:
    """The mixing that gives theta^t + rate * (theta - theta^t), where theta is the result of `mixing`."""
    return replace(
        mixing,
        weights=[rate * weight for weight in mixing.weights],
        norm=None if mixing.norm is None else [rate * weight for weight in mixing.norm],
        broadcast=1 - rate + rate * mixing.broadcast,
    )


def _weighted_sum(keys: list[str], terms: list[tuple[Tensors, float]], like: Tensors) -> Tensors:
    """The weighted sum of the terms for every key, in float32 or, for float64 tensors, in float64."""
    by_type: dict[torch.dtype, list[str]] = {}
    for key in keys:
        by_type.setdefault(like[key].dtype, []).append(key)
    summed: Tensors = {}
    for dtype, names in by_type.items():
        sum_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        total = [torch.zeros_like(like[key], dtype=sum_dtype) for key in names]
        for tensors, weight in terms:
            torch._foreach_add_(total, [tensors[key].to(t) for key, t in zip(names, total, strict=True)], alpha=weight)
        summed.update(zip(names, [value.to(dtype) for value in total], strict=True))
    return summed


def normalised(values: Sequence[float]) -> list[float]:
    """The values divided by their sum."""
    total = math.fsum(values)
    return [value / total for value in values]


def middle(ordered: Tensor) -> Tensor:
    """The median over the first dimension of sorted values; torch.median returns the lower of the middle two."""
    low, high = (len(ordered) - 1) // 2, len(ordered) // 2
    return (ordered[low] + ordered[high]) / 2


def last_layer_cosines(updates: Sequence[Update], broadcast: Tensors, names: Sequence[str]) -> list[float]:
    """For each update, the cosine between theta^t and theta_k in the tensors `names`, flattened together.

    0 if either is all zeros. Raises ValueError without names.
    """
    if not names:
        raise ValueError("fedwavg: the model has no layer with parameters that emits logits")
    broadcast_vector = _flat(broadcast, names)
    cosines = []
    for update in updates:
        client_vector = _flat(update.model, names)
        norms = float(broadcast_vector.norm() * client_vector.norm())
        cosines.append(float(broadcast_vector @ client_vector) / norms if norms > 0 else 0.0)
    return cosines


def _flat(model: Tensors, names: Sequence[str]) -> Tensor:
    return torch.cat([model[name].detach().to("cpu", torch.float64).flatten() for name in names])
