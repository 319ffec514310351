"""An honest-but-curious server inverts the defended gradients of single target clients. Nothing is learned.

| Sawada et al. 2024 | here | what |
|---|---|---|
| n | target | a client with one batch of its own, observed_rounds alone |
| m | observed_rounds | rounds in which the same target is observed_rounds, each with the defence's fresh randomness |
| B_n | defence's mask | |
| x, x* | original, reconstruction | |

    for each group of target_clients:
        for j = 0 .. m-1:   g <- defence(gradient of the target's batch at theta_j)        theta_0: the initial weights
                            theta_{j+1} <- theta_j (fixed) or theta_j - eta g of the first target (moving)
        reconstructions <- inversion(theta_0, g_0, theta_1, g_1, ...);   compare with the originals

Sawada et al. 2024, section IV: 16 images, one at a time (differences: masks-attacker). A round of the engine is
a group of `target_clients` target_clients, so that a run resumes; a round's numbers are those of the target_clients so
far, the last one's those of all. The closed form needs a network without norm and residuals in block 0 (differences:
april-block0):
`block0: bare` makes it so, and stands in the cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from fatbench.engine.inject import asks
from fatbench.engine.local import pixels
from fatbench.engine.randomness import generator
from fatbench.engine.rounds import Cost, Metrics, Problem, Round, State, Tensors
from fatbench.methods.defences import Upload
from fatbench.methods.inversions import image_measures, reads_of
from fatbench.methods.inversions.april import without_block0_norm
from fatbench.methods.inversions.upload import Observation, gradients, observe, recovered_labels
from fatbench.models import logit_parameters
from fatbench.suite.types import Count, Defence, Inversion, NonNegative, Objective

SMALL = 32  # the side at which reconstructions are compared besides their own, and candidates always


def gradient_inversion(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    objective: Objective,
    defence: Defence,
    inversion: Inversion,
    batch: Count = 1,
    target_clients: Count = 4,
    observed_rounds: Count = 1,
    weights: Literal["fixed", "moving"] = "fixed",
    lr: NonNegative = 1e-4,
    block0: Literal["ordinary", "bare"] = "ordinary",
    rounding: bool = False,
    candidates: Count = 1000,
) -> Iterator[Round]:
    """An inversion against defended gradients: rounds * target_clients target_clients of `batch` images each.

    Numbers, means over the target_clients so far with the half width of their 95 % interval (`psnr_ci`, ...): psnr
    (dB), ssim and mse at the images' size, ssim32 and correlation32 at 32 x 32, identification (is the reconstruction's
    original the likeliest of the first `candidates` training images, by correlation at 32 x 32), label_recovery; psnr,
    correlation32 and identification also per target. grey_psnr, grey_ssim, another_psnr, ... are baselines: what a flat
    grey reconstruction and another image score. Of a batch the best pair counts. Only the gradients that the inversion
    reads are computed. `rounding`: the images, once resized, have 256 levels again, as a file of that size has.
    `objective` counts work alone: the loss is the cross-entropy. ValueError: fewer images than target_clients.

    Example: {batch: 1, target_clients: 2, candidates: 4, inversion: patch_ls}
    Steps: 0
    Forward: rounds * target_clients * batch * (1 + (observed_rounds - 1) * (weights == "moving")) / images
    Backward: rounds * target_clients * batch * (1 + (observed_rounds - 1) * (weights == "moving")) / images
    Refuse if side < 11: reconstructions are compared by SSIM, whose window is 11 x 11; images are {side} x {side}

    Fractions: identification, identification_ci, label_recovery
    """
    model = without_block0_norm(problem.model) if block0 == "bare" else problem.model
    # The weights never change and follow from the seed, so no state carries them: 88 MB a cell for ViT-S/16.
    theta: Tensors = {name: state.model.get(name, value).clone() for name, value in model.state_dict().items()}
    shard = problem.shards[0]
    need = rounds * target_clients * batch
    if need > len(shard):
        raise ValueError(
            f"gradient_inversion: {rounds} rounds of {target_clients} target clients need {need} images, "
            f"there are {len(shard)}"
        )
    bias = [name for name in logit_parameters(model) if name.endswith("bias")][-1]
    ends = reads_of(inversion)
    reads = None if ends is None else (*ends, bias)
    names = None if weights == "moving" or asks(defence, "gradient") else reads
    known = torch.unique(torch.cat([shard[:need], torch.arange(min(candidates, len(problem.images))).to(shard)]))
    gallery = torch.cat(
        [image_measures.shrink(pixels(problem, problem.images[part]), SMALL) for part in known.split(250)]
    )
    for t in range(state.round, rounds):
        chosen = shard[t * target_clients * batch : (t + 1) * target_clients * batch]
        x = pixels(problem, problem.images[chosen]).contiguous().unflatten(0, (target_clients, batch))
        x = _bytes(x) / 255 if rounding else x
        y = problem.labels[chosen].view(target_clients, batch)
        observed: list[Observation] = []
        now = theta
        for j in range(observed_rounds):
            if j == 0 or weights == "moving":
                gradient = gradients(model, now, x, y, names)
            uploads = [Upload(problem.seed, t * target_clients + v, j) for v in range(target_clients)]
            sent = observe(now, gradient, y, defence, uploads)
            observed.append(_only(sent, reads))
            if weights == "moving":
                now = {k: w - lr * sent.gradient[k][0] if k in gradient else w for k, w in now.items()}
        with torch.no_grad():
            noise = generator(problem.seed, "inversion", t, device=problem.device)
            with torch.enable_grad():
                reconstructions = inversion(observed, model, tuple(x.shape[2:]), noise).detach()
            found = _compared(
                reconstructions, x, torch.searchsorted(known, chosen.view(target_clients, batch)), gallery
            )
        if batch == 1:
            found["label_recovery"] = (recovered_labels(observed[0].gradient[bias]) == y[:, 0]).double()
        sums = {name: _added(state.server.get(name), values) for name, values in found.items()}
        numbers: Metrics = {}
        for name, (count, total, squares) in ((name, s.tolist()) for name, s in sums.items()):
            numbers[name] = total / count
            if count > 1:
                variance = max(squares - total**2 / count, 0.0) / (count - 1)
                numbers[f"{name}_ci"] = 1.96 * math.sqrt(variance / count)
        for name in ("psnr", "correlation32", "identification"):
            numbers[f"{name}_client"] = dict(enumerate(found[name].tolist(), start=t * target_clients))
        state = State(t + 1, {}, sums)
        images = target_clients * batch * (observed_rounds if weights == "moving" else 1)
        cost = Cost(0, images, images, 0, 0)
        yield Round(
            t,
            theta,
            [],  # nobody trains, and what was sent has been looked at
            None,
            state,
            cost,
            metrics=numbers,
            artifacts={"original": _bytes(x[:, 0]), "reconstruction": _bytes(_nearest(reconstructions, x[:, 0]))},
        )


def _compared(reconstructions: Tensor, originals: Tensor, truth: Tensor, gallery: Tensor) -> Tensors:
    """name -> (V,): reconstructions (V, P, C, H, W) beside originals (V, B, C, H, W), and what guesses would score."""
    small = image_measures.shrink(reconstructions.flatten(0, 1), SMALL).unflatten(0, reconstructions.shape[:2])
    small_originals = image_measures.shrink(originals.flatten(0, 1), SMALL).unflatten(0, originals.shape[:2])
    hits = [
        image_measures.identified(small[:, p], gallery, truth[:, b])
        for p in range(reconstructions.shape[1])
        for b in range(originals.shape[1])
    ]
    found = {
        "psnr": image_measures.best_of(image_measures.psnr, reconstructions, originals),
        "ssim": image_measures.best_of(image_measures.ssim, reconstructions, originals),
        "mse": -image_measures.best_of(lambda a, b: -image_measures.mse(a, b), reconstructions, originals),
        "ssim32": image_measures.best_of(image_measures.ssim, small, small_originals),
        "correlation32": image_measures.best_of(image_measures.correlation, small, small_originals),
        "identification": torch.stack(hits).any(0),
    }
    first, first_small = originals[:, 0], small_originals[:, 0]
    grey, another = image_measures.grey(first), image_measures.another_image(first)
    found |= {
        "grey_psnr": image_measures.psnr(grey, first),
        "grey_ssim": image_measures.ssim(grey, first),
        "grey_ssim32": image_measures.ssim(image_measures.shrink(grey, SMALL), first_small),
        "another_psnr": image_measures.psnr(another, first),
        "another_ssim": image_measures.ssim(another, first),
        "another_ssim32": image_measures.ssim(image_measures.shrink(another, SMALL), first_small),
    }
    return {name: values.double().clamp(max=300) for name, values in found.items()}  # an exact reconstruction: 300 dB


def _only(observed: Observation, ends: tuple[str, ...] | None) -> Observation:
    """What the inversion reads of an upload: all of ViT-S/16 is 87 MB a target and round."""
    if ends is None:
        return observed
    kept = {name: g for name, g in observed.gradient.items() if name.endswith(ends)}
    mask = None if observed.mask is None else {name: m for name, m in observed.mask.items() if name in kept}
    return Observation(observed.weights, kept, observed.labels, mask)


def _nearest(reconstructions: Tensor, originals: Tensor) -> Tensor:
    """Of the reconstructions (V, P, C, H, W) of each target the one nearest to its original."""
    errors = [image_measures.mse(reconstructions[:, p], originals) for p in range(reconstructions.shape[1])]
    return reconstructions[
        torch.arange(len(reconstructions), device=reconstructions.device), torch.stack(errors).argmin(0)
    ]


def _added(before: Tensor | None, values: Tensor) -> Tensor:
    """(3,) float64: count, sum and sum of squares of what has been measured."""
    now = torch.stack(
        [torch.tensor(float(len(values)), dtype=torch.float64), values.sum().cpu(), (values**2).sum().cpu()]
    )
    return now if before is None else before.cpu() + now


def _bytes(images: Tensor) -> Tensor:
    return (images.clamp(0, 1) * 255).round().to(torch.uint8)
