"""What training costs, counted before it runs: building blocks for the `work` of algorithms' entries.

    def work(cell: Facts, *, rounds: int, local: LocalTraining) -> Work:
        return clients_train(cell, local, rounds) + models_cross(cell, rounds)

Clients have the average number of images, and cohorts their usual size. Tests compare every `work` with what hooks on
the network and the optimizer count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fatbench.engine.inject import asks
from fatbench.engine.local import LocalTraining
from fatbench.engine.optimizers import ServerTraining
from fatbench.suite.entry import Work, passes
from fatbench.suite.facts import Facts

INT64 = 8  # bytes of a label


def clients_train(
    cell: Facts,
    local: LocalTraining,
    rounds: int,
    *,
    cohort: float | None = None,
    aggregator: Callable[..., Any] | None = None,
) -> Work:
    """Local training of `cohort` clients in each round (default: those who are there), and the stored model.

    If the aggregator asks for `broadcast_losses`, each client computes its objective once more, without a step.
    """
    m = cell.present if cohort is None else cohort
    measures_broadcast = aggregator is not None and asks(aggregator, "broadcast_losses")
    total, images = Work(disk=cell.size), m * cell.client_images
    rounds_by_settings = Counter((local.epochs_in(t), local.objective_in(t)) for t in range(rounds))
    for (epochs, objective), times in rounds_by_settings.items():
        example_passes = passes(objective)
        steps = m * epochs * math.ceil(cell.client_images / local.batch)
        total += times * Work(
            steps, images * epochs * example_passes.forward, images * epochs * example_passes.backward
        )
        if measures_broadcast:  # the loss itself has no backward pass
            total += times * Work(
                forward=images * example_passes.forward, backward=images * (example_passes.backward - 1)
            )
    return total


def adversarial_and_standard_train(
    cell: Facts,
    local: LocalTraining,
    standard: Callable[..., Any],
    adversarial: int,
    rounds: int,
    aggregator: Callable[..., Any],
) -> Work:
    """Clients 0 to `adversarial` - 1 train on the objective of `local`, the others on `standard`."""
    adversarial_cohort = cell.present * adversarial / cell.clients
    standard_local = replace(local, objective=standard, warmup=None, warmup_rounds=0)
    adversarial_work = clients_train(cell, local, rounds, cohort=adversarial_cohort, aggregator=aggregator)
    standard_work = clients_train(
        cell, standard_local, rounds, cohort=cell.present - adversarial_cohort, aggregator=aggregator
    )
    return adversarial_work + replace(standard_work, disk=0.0)


def models_cross(cell: Facts, rounds: int, *, models_up: float = 1, models_down: float = 1, part: float = 1) -> Work:
    """Models sent up and down by every client of each round; part: the share of a model's weights that is sent."""
    bytes_each = rounds * cell.present * part * cell.size
    return Work(bytes_up=models_up * bytes_each, bytes_down=models_down * bytes_each)


def federated(cell: Facts, *, rounds: int, local: LocalTraining, aggregator: Callable[..., Any]) -> Work:
    """FedAvg: the clients of a round train, and each receives and sends one model."""
    return clients_train(cell, local, rounds, aggregator=aggregator) + models_cross(cell, rounds)


def server_trains(images: float, epochs: int, batch: int, rounds: int) -> Work:
    """Training of a network on the server, on `images` images in each epoch."""
    image_passes = rounds * epochs * images
    return Work(rounds * epochs * math.ceil(images / batch), image_passes, image_passes)


def moments_of(training: LocalTraining | ServerTraining) -> int:
    """The number of moments that an optimizer keeps for each weight."""
    return 1 if training.optimizer == "sgd" else 2


# --- distillation between edges and a server ----------------------------------------------------------------------


def distillation(
    cell: Facts,
    rounds: int,
    local: LocalTraining,
    server: ServerTraining,
    attack: Callable[..., Any] | None,
    *,
    further: int,
    features: str,
    answer: float,
) -> Work:
    """FedGKT and FedVKD: the edges train and send features, predictions and labels; the server trains on them.

    further: the server's passes over all examples beside its training. An attack passes the server's images through
    both networks.
    answer: bytes of an edge's prediction for one image.
    """
    images = cell.clients * cell.client_images
    edge, sent_numbers = cell.edge
    feature_bytes = sent_numbers * (2 if features == "bfloat16" else 4)
    edges = clients_train(cell, local, rounds, cohort=cell.clients)
    transfer_work = Work(
        forward=rounds * images,
        bytes_up=rounds * images * (feature_bytes + answer + INT64),
        bytes_down=rounds * images * 4 * cell.classes,
    )
    taught = server_trains(images, server.epochs, server.batch, rounds) + Work(forward=rounds * images * further)
    if attack is not None:
        attack_passes, attack_images = passes(attack), rounds * server.epochs * images
        taught += Work(
            forward=attack_images * (attack_passes.forward + 1), backward=attack_images * attack_passes.backward
        )
    knowledge = images * (INT64 + 4 * cell.classes)
    state_bytes = (
        cell.clients * 4 * edge * (1 + moments_of(local))
        + knowledge
        + 4 * (cell.parameters - edge) * moments_of(server)
    )
    return edges + transfer_work + taught + Work(disk=state_bytes)


# --- refusals that several share ----------------------------------------------------------------------------------


def no_more_than_clients(cell: Facts, *, adversarial: int) -> str | None:
    """Refuse more adversarial clients than there are clients."""
    return f"adversarial: {adversarial} of {cell.clients} clients" if adversarial > cell.clients else None


def edge_and_server(cell: Facts) -> str | None:
    """Refuse models without an edge and a server."""
    if "edge" not in cell.model.parts:
        return f"{cell.algorithm.name} trains a model of an edge and a server (edge_vit, ...), not {cell.model.name}"
    return None


def nothing_is_broadcast(*, local: LocalTraining) -> str | None:
    """Refuse proximal terms, because no edge receives broadcast weights."""
    if local.proximal is not None:
        return "local: proximal: no edge receives broadcast weights to pull towards"
    return None
