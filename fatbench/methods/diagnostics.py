"""Diagnostics: further measurements on the models of a round, made whenever the monitor runs.

    DIAGNOSTICS["svcca"](problem, result, images, labels, attack, generator, blocks="1,9")
    -> {"svcca_b1_c0_c3_clean": 0.71, ...}

`images` (n, C, H, W) uint8 and `labels` (n,) are the test set, `attack` is the monitor, `generator` its noise. A
diagnostic returns {name: a float, or one per client}; tensors among the values become artifacts of the round.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from fatbench.engine.accuracy import models_of
from fatbench.engine.gradients import logits_of
from fatbench.engine.local import load, pixels, precision_context
from fatbench.engine.outcomes import is_correct
from fatbench.engine.rounds import Metrics, Problem, Round
from fatbench.methods.adversaries import class_of_the_data, square_inside_the_image, with_square
from fatbench.methods.exposure import attackers_of_what_is_sent, candidates_of_the_data, exposure, passes_of_exposure
from fatbench.methods.inversions import image_measures
from fatbench.methods.inversions.decoder import feature_inversion, passes_of_decoder
from fatbench.methods.inversions.matching import every_step, matching
from fatbench.methods.inversions.upload import Observation, gradients
from fatbench.methods.membership import (
    calibration_for_the_rate,
    enough_outsiders,
    membership,
    models_and_others,
    passes_of_membership,
)
from fatbench.methods.svcca import activations
from fatbench.methods.svcca import svcca as correlation
from fatbench.methods.threat_models import of_exposure
from fatbench.suite.entry import Entry, Passes, PrivacyEntry
from fatbench.suite.facts import Facts
from fatbench.suite.types import Blocks, Count, Fraction, Natural, Pairs

EXPOSED = ("component", "initial", "surrogate", "known", "optimised", "update")  # attackers of `exposure`
SCORES = ("loss", "adversarial", "others")  # of `membership`
RATES = ("tpr", "tpr_low", "tpr_high", "clients_low", "clients_high", "fpr", "fpr_low", "fpr_high")


def svcca(
    problem: Problem,
    result: Round,
    images: Tensor,
    labels: Tensor,
    attack: Callable[..., Tensor],
    generator: Generator,
    *,
    blocks: Blocks = "1,9",
    pairs: Pairs = "0-3,0-1,0-server,3-server",
    n: Count = 2000,
    batch: Count = 100,
    variance: Fraction = 0.99,
) -> Metrics:
    """SV-CCA of client and server models: how similar their features are; 1 means the same up to rotation.

    For every block (1-based) and pair, on the first n test images, clean and as the monitor attacks the server's model:
    each image is the mean over its visual tokens; the directions that hold `variance` of the variance are kept; the
    number is the mean canonical correlation. It is named svcca_b<block>_<pair>_<clean|adv>, and left out if a client of
    the pair did not take part in the round or the activations have no variance. Raises ValueError if the model has
    fewer blocks, or n images are too few for its width.

    Source: Aldahdooh et al. 2022, Figures 3 and 20-25, where clients count from 1 (differences: svcca-clients);
    Raghu et al. 2017.
    """
    states = {"server": result.state.model, **{f"c{u.client}": u.model for u in result.updates}}
    side_pairs = [tuple(s if s == "server" else f"c{int(s)}" for s in pair.split("-")) for pair in pairs.split(",")]
    side_pairs = [(a, b) for a, b in side_pairs if a in states and b in states]  # who took part in this round
    block_numbers = [int(block) for block in blocks.split(",")]
    inputs: dict[str, list[Tensor]] = {"clean": [], "adv": []}
    model = load(problem, states["server"]).eval()
    for offset in range(0, min(n, len(labels)), batch):
        chunk_end = min(offset + batch, n)
        x = pixels(problem, images[offset:chunk_end])
        inputs["clean"].append(x)
        with precision_context(problem):
            inputs["adv"].append(attack(model, x, labels[offset:chunk_end], generator))
    activations_by_side: dict[tuple[str, int, str], Tensor] = {}
    for name in sorted({side for pair in side_pairs for side in pair}):
        model = load(problem, states[name]).eval()
        with torch.no_grad():
            for block in block_numbers:
                for kind, batches in inputs.items():
                    activations_by_side[name, block, kind] = torch.cat([activations(model, x, block) for x in batches])
    correlations = {
        f"svcca_b{block}_{a}_{b}_{kind}": correlation(
            activations_by_side[a, block, kind], activations_by_side[b, block, kind], variance
        )
        for block in block_numbers
        for a, b in side_pairs
        for kind in inputs
    }
    # no number where activations have no variance
    return {name: value for name, value in correlations.items() if math.isfinite(value)}


def enough_images(cell: Facts, *, n: int) -> str | None:
    width = cell.model.get("dim")
    if width is not None and n <= 2 * width:  # with so few images, random features correlate, too
        return f"n: {n} images are too few for a model of width {width}"
    return None


def blocks_of_the_model(cell: Facts, *, blocks: str) -> str | None:
    last_block, depth = max(_numbers(blocks)), cell.model.get("depth")
    if depth is not None and last_block > depth:
        return f"blocks: no block {last_block}: the model has {depth}"
    return None


def clients_of_the_cell(cell: Facts, *, pairs: str) -> str | None:
    last_client = max(_numbers(pairs), default=0)
    return f"pairs: client {last_client} of {cell.clients} (counted from 0)" if last_client >= cell.clients else None


def _numbers(text: str) -> list[int]:
    """The integers in a text such as "0-3,0-server"."""
    return [int(digits) for digits in re.findall(r"\d+", text)]


def leakage(
    problem: Problem,
    result: Round,
    images: Tensor,
    labels: Tensor,
    attack: Callable[..., Tensor],
    generator: Generator,
    *,
    target_clients: Count = 16,
    steps: Count = 1000,
    width: Count = 64,
    candidates: Count = 1000,
) -> Metrics:
    """What the round's first upload reveals about its client's first `target_clients` examples, one by one.

    Uploaded feature maps are inverted by a decoder (`fatbench.methods.inversions.decoder`, `steps` steps, `width`
    channels). The attacker trains it on images of its own, here the test images, through the client's extractor
    (leak_*: threat "bound", since it is not sent) and through the initial extractor, which the server knows
    (leak_initial_*: threat D). A server that trains an edge of its own is not among them, and finds more than the
    second (results/fedvkd.md). If the client uploads its model, gradient matching (`steps` steps) inverts the gradient
    of one example at the broadcast weights, in eval mode, its label given (leak_*: "bound"). No client sends such a
    gradient: `exposure` attacks what clients really send, with an interval over clients.

    Means over these examples: psnr (dB), ssim, correlation, identification (is the example the likeliest of the
    candidates, the first `candidates` training images and the examples themselves?) with identification_chance; and
    leak_grey_psnr, leak_grey_ssim of a flat grey reconstruction. leak_candidates_used: how many candidates there are.

    Source: ours; Tao et al. 2022 name the question as a limitation. Geiping et al. 2020 for the gradient.
    """
    update = result.updates[0]
    target_indices = problem.shards[update.client][:target_clients]
    x = pixels(problem, problem.images[target_indices]).contiguous()
    gallery_indices = image_measures.candidates_with(target_indices, candidates, len(problem.images))
    gallery = pixels(problem, problem.images[gallery_indices])
    truth = torch.searchsorted(gallery_indices, target_indices)
    reconstructions: dict[str, Tensor] = {}
    if "features" in update.extra:
        public_images = pixels(problem, images)
        sent_features = update.extra["features"][: len(target_indices)]
        # the client's extractor is a bound: it is not sent
        edges = {"leak": {**result.state.model, **result.own[update.client]}, "leak_initial": result.state.model}
        for name, edge in edges.items():
            extractor = load(problem, edge).get_submodule("extractor")
            reconstructions[name] = feature_inversion(
                extractor, public_images, sent_features, generator, steps=steps, width=width
            )
    elif update.model:
        y = problem.labels[target_indices]
        gradient = gradients(problem.model, result.broadcast, x[:, None], y[:, None])
        observed = [Observation(result.broadcast, gradient, y[:, None])]  # each example is a batch of one
        shape = (x.shape[1], x.shape[2], x.shape[3])
        reconstructions["leak"] = matching(observed, problem.model, shape, generator, steps=steps)[:, 0]
    reconstructions["leak_grey"] = image_measures.grey(x)
    metrics: Metrics = {"leak_candidates_used": float(len(gallery))}
    for name, reconstruction in reconstructions.items():
        metrics[f"{name}_psnr"] = float(image_measures.psnr(reconstruction, x).mean())
        metrics[f"{name}_ssim"] = float(image_measures.ssim(reconstruction, x).mean())
        if name != "leak_grey":
            metrics[f"{name}_correlation"] = float(image_measures.correlation(reconstruction, x).mean())
            metrics[f"{name}_identification"] = float(
                image_measures.identified(reconstruction, gallery, truth).double().mean()
            )
            metrics[f"{name}_identification_chance"] = 1 / len(gallery)
    return metrics


def passes_of_leakage(cell: Facts, *, target_clients: int, steps: int) -> Passes:
    """Of features two decoders, else the gradients of single images and `matching`."""
    if "edge" in cell.algorithm.parts:
        return 2 * passes_of_decoder(steps)
    return min(target_clients, cell.client_images) * (every_step(1, steps=steps) + 1)


def window_of_ssim(cell: Facts) -> str | None:
    if cell.side < 11:
        return f"reconstructions are compared by SSIM with a window of 11 x 11, images are {cell.side} x {cell.side}"
    return None


def boundaries(
    problem: Problem,
    result: Round,
    images: Tensor,
    labels: Tensor,
    attack: Callable[..., Tensor],
    generator: Generator,
    *,
    points: Count = 101,
) -> dict[str, Any]:
    """The decision boundaries of the new model and of each client's, for two classes of points in the plane.

    Artifacts: boundary_server and boundary_c<client>, (points, points), the logit of class 1 minus that of class 0 on a
    grid over the unit square, x to the right, y upwards: the first row is y = 1. boundary_c<client>_points (N_k, 3):
    the x, y and label of the client's examples. boundary_c<client>_adversarial (N_k, 3): where the monitor's attack on
    the client's model moves them. The number boundary_apart is the fraction of the grid on which clients disagree.

    Source: Zhu et al. 2023, Figure 5 (b, c); differences: sfat-toy.
    """
    steps = torch.linspace(0, 1, points, device=images.device)
    y, x = torch.meshgrid(steps.flip(0), steps, indexing="ij")
    grid = torch.stack([x, y], -1).reshape(-1, 2, 1, 1)  # each point is an image of 2 x 1 x 1
    results: dict[str, Any] = {}
    for name, state in {"server": result.state.model, **{f"c{u.client}": u.model for u in result.updates}}.items():
        model = load(problem, state).eval()
        with torch.no_grad(), precision_context(problem):
            logits = model(grid).float()
        results[f"boundary_{name}"] = (logits[:, 1] - logits[:, 0]).reshape(points, points).cpu()
    signs = torch.stack([results[f"boundary_c{u.client}"] > 0 for u in result.updates])
    # signs of a point agree with the first client's if they agree among all
    results["boundary_apart"] = float((signs != signs[0]).any(0).double().mean())
    for update in result.updates:
        shard = problem.shards[update.client]
        x, y = pixels(problem, problem.images[shard]), problem.labels[shard]
        model = load(problem, update.model).eval()
        with precision_context(problem):
            moved = attack(model, x, y, generator)
        for kind, points_shown in (("points", x), ("adversarial", moved)):
            results[f"boundary_c{update.client}_{kind}"] = (
                torch.cat([points_shown.flatten(1), y[:, None]], 1).float().cpu()
            )
    return results


def points_in_the_plane(cell: Facts) -> str | None:
    if (cell.channels, cell.side, cell.classes) != (2, 1, 2):
        return (
            f"boundaries: {cell.classes} classes of {cell.channels} x {cell.side} x {cell.side} images, not 2 classes "
            "of points in the plane (2 x 1 x 1)"
        )
    return None


def two_points_a_side(*, points: int) -> str | None:
    return f"points: a grid of {points} x {points}" if points < 2 else None


def backdoor(
    problem: Problem,
    result: Round,
    images: Tensor,
    labels: Tensor,
    attack: Callable[..., Tensor],
    generator: Generator,
    *,
    target: Natural,
    size: Count = 5,
) -> Metrics:
    """How often a backdoor of `badnets` works: the fraction of test images of other classes classified as `target`.

    backdoor_success with the white square of `size` pixels, backdoor_none without it. Means over the clients' models if
    there is no global one. Raises ValueError if every test image is of the target's class.

    Source: Gu et al. 2017 (BadNets).
    """
    other_images = images[labels != target]  # those of the target's class would count as successes
    if not len(other_images):
        raise ValueError(f"backdoor: every test image is of class {target}")
    rates_by_metric: dict[str, list[float]] = {"backdoor_success": [], "backdoor_none": []}
    for state in models_of(result.state.model, result.own).values():
        model = load(problem, state).eval()
        for name, test_images in (
            ("backdoor_success", with_square(other_images, size)),
            ("backdoor_none", other_images),
        ):
            logits = torch.cat([logits_of(model, pixels(problem, chunk)) for chunk in test_images.split(500)])
            rates_by_metric[name].append(
                float(is_correct(logits, torch.tensor(target, device=logits.device)).double().mean())
            )
    return {name: sum(values) / len(values) for name, values in rates_by_metric.items()}


DIAGNOSTICS: dict[str, Callable[..., Any]] = {
    "svcca": Entry(
        svcca,
        refuse=(enough_images, blocks_of_the_model, clients_of_the_cell),
        example={"blocks": "1", "pairs": "0-1,0-server", "n": 20},
        cites=("aldahdooh2022", "raghu2017"),
    ),
    "leakage": PrivacyEntry(
        leakage,
        passes=passes_of_leakage,
        threat="bound",
        labels=True,
        refuse=(window_of_ssim,),
        fractions=tuple(f"{name}_identification{end}" for name in ("leak", "leak_initial") for end in ("", "_chance")),
        example={"target_clients": 2, "steps": 2, "width": 2, "candidates": 4},
        cites=("geiping2020", "tao2022"),
    ),
    "exposure": PrivacyEntry(
        exposure,
        passes=passes_of_exposure,
        threat=of_exposure,
        refuse=(attackers_of_what_is_sent, candidates_of_the_data),
        fractions=tuple(f"exposed_{name}{end}" for name in EXPOSED for end in ("", "_low", "_high", "_chance")),
        example={"inversion": {"name": "matching", "steps": 2}, "clients": 2, "targets": 2, "candidates": 4},
        cites=("tao2022",),
    ),
    "membership": PrivacyEntry(
        membership,
        passes=passes_of_membership,
        threat="A",
        refuse=(calibration_for_the_rate, models_and_others, enough_outsiders),
        fractions=tuple(f"member_{score}_{what}" for score in SCORES for what in RATES),
        example={"members": 2, "calibration": 3, "outsiders": 3, "fpr": 0.5},
        cites=("carlini2022", "song2019", "yeom2018", "zhu2025"),
    ),
    "boundaries": Entry(
        boundaries, refuse=(points_in_the_plane, two_points_a_side), fractions=("boundary_apart",), cites=("zhu2023",)
    ),
    "backdoor": Entry(
        backdoor,
        refuse=(class_of_the_data, square_inside_the_image),
        fractions=("backdoor_success", "backdoor_none"),
        example={"target": 0},
        cites=("gu2017",),
    ),
}
