"""Eavesdropping: what an inversion makes of the defended gradients of single victims. Nothing is learned.

| Sawada et al. 2024 | here | what |
|---|---|---|
| n | victim | a client with one batch of its own, watched alone |
| m | watched | rounds in which the same victim is watched, each with the defence's fresh randomness |
| B_n | defence's mask | |
| x, x* | original, picture | |

    for each group of victims:
        for j = 0 .. m-1:   g <- defence(gradient of the victim's batch at theta_j)        theta_0: the initial weights
                            theta_{j+1} <- theta_j (fixed) or theta_j - eta g of the first victim (moving)
        pictures <- inversion(theta_0, g_0, theta_1, g_1, ...);   compare with the originals

Sawada et al. 2024, section IV: 16 images, one at a time (differences: masks-attacker). A round of the engine is
a group of `victims` victims, so that a run resumes; a round's numbers are those of the victims so far, the last one's
those of all. The closed form needs a network without norm and residuals in block 0 (differences: april-block0):
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
from fatbench.methods.inversions.upload import Seen, gradients, recovered_labels
from fatbench.methods.inversions.upload import eavesdrop as overheard
from fatbench.models import logit_parameters
from fatbench.suite.types import Count, Defence, Inversion, NonNegative, Objective

SMALL = 32  # the side at which pictures are compared besides their own, and candidates always


def eavesdrop(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    objective: Objective,
    defence: Defence,
    inversion: Inversion,
    batch: Count = 1,
    victims: Count = 4,
    watched: Count = 1,
    weights: Literal["fixed", "moving"] = "fixed",
    lr: NonNegative = 1e-4,
    block0: Literal["ordinary", "bare"] = "ordinary",
    rounding: bool = False,
    candidates: Count = 1000,
) -> Iterator[Round]:
    """An inversion against defended gradients: rounds * victims victims of `batch` images each.

    Numbers, means over the victims so far with the half width of their 95 % interval (`psnr_ci`, ...): psnr (dB), ssim
    and mse at the images' size, ssim32 and correlation32 at 32 x 32, identification (is the picture's original the
    likeliest of the first `candidates` training images, by correlation at 32 x 32), label_recovery; psnr,
    correlation32 and identification also per victim. grey_psnr, grey_ssim, another_psnr, ... are baselines: what a flat
    grey picture and another image score. Of a batch the best pair counts. Only the gradients that the inversion reads
    are computed. `rounding`: the images, once resized, have 256 levels again, as a file of that size has. `objective`
    counts work alone: the loss is the cross-entropy. ValueError: fewer images than victims.

    Steps: 0
    Forward: rounds * victims * batch * (1 + (watched - 1) * (weights == "moving")) / images
    Backward: rounds * victims * batch * (1 + (watched - 1) * (weights == "moving")) / images
    Refuse if side < 11: pictures are compared by SSIM, whose window is 11 x 11; images are {side} x {side}

    Fractions: identification, identification_ci, label_recovery
    """
    model = without_block0_norm(problem.model) if block0 == "bare" else problem.model
    # The weights never change and follow from the seed, so no state carries them: 88 MB a cell for ViT-S/16.
    theta: Tensors = {name: state.model.get(name, value).clone() for name, value in model.state_dict().items()}
    shard = problem.shards[0]
    need = rounds * victims * batch
    if need > len(shard):
        raise ValueError(f"eavesdrop: {rounds} rounds of {victims} victims need {need} images, there are {len(shard)}")
    bias = [name for name in logit_parameters(model) if name.endswith("bias")][-1]
    ends = reads_of(inversion)
    reads = None if ends is None else (*ends, bias)
    names = None if weights == "moving" or asks(defence, "gradient") else reads
    known = torch.unique(torch.cat([shard[:need], torch.arange(min(candidates, len(problem.images))).to(shard)]))
    gallery = torch.cat(
        [image_measures.shrink(pixels(problem, problem.images[part]), SMALL) for part in known.split(250)]
    )
    for t in range(state.round, rounds):
        chosen = shard[t * victims * batch : (t + 1) * victims * batch]
        x = pixels(problem, problem.images[chosen]).contiguous().unflatten(0, (victims, batch))
        x = _bytes(x) / 255 if rounding else x
        y = problem.labels[chosen].view(victims, batch)
        seen: list[Seen] = []
        now = theta
        for j in range(watched):
            if j == 0 or weights == "moving":
                gradient = gradients(model, now, x, y, names)
            uploads = [Upload(problem.seed, t * victims + v, j) for v in range(victims)]
            sent = overheard(now, gradient, y, defence, uploads)
            seen.append(_only(sent, reads))
            if weights == "moving":
                now = {k: w - lr * sent.gradient[k][0] if k in gradient else w for k, w in now.items()}
        with torch.no_grad():
            noise = generator(problem.seed, "inversion", t, device=problem.device)
            with torch.enable_grad():
                pictures = inversion(seen, model, tuple(x.shape[2:]), noise).detach()
            found = _compared(pictures, x, torch.searchsorted(known, chosen.view(victims, batch)), gallery)
        if batch == 1:
            found["label_recovery"] = (recovered_labels(seen[0].gradient[bias]) == y[:, 0]).double()
        sums = {name: _added(state.server.get(name), values) for name, values in found.items()}
        numbers: Metrics = {}
        for name, (count, total, squares) in ((name, s.tolist()) for name, s in sums.items()):
            numbers[name] = total / count
            if count > 1:
                variance = max(squares - total**2 / count, 0.0) / (count - 1)
                numbers[f"{name}_ci"] = 1.96 * math.sqrt(variance / count)
        for name in ("psnr", "correlation32", "identification"):
            numbers[f"{name}_victim"] = dict(enumerate(found[name].tolist(), start=t * victims))
        state = State(t + 1, {}, sums)
        images = victims * batch * (watched if weights == "moving" else 1)
        cost = Cost(0, images, images, 0, 0)
        yield Round(
            t,
            theta,
            [],  # nobody trains, and what was sent has been looked at
            None,
            state,
            cost,
            metrics=numbers,
            artifacts={"original": _bytes(x[:, 0]), "reconstruction": _bytes(_nearest(pictures, x[:, 0]))},
        )


def _compared(pictures: Tensor, originals: Tensor, truth: Tensor, gallery: Tensor) -> Tensors:
    """name -> (V,): pictures (V, P, C, H, W) beside originals (V, B, C, H, W), and what guesses would score."""
    small = image_measures.shrink(pictures.flatten(0, 1), SMALL).unflatten(0, pictures.shape[:2])
    small_originals = image_measures.shrink(originals.flatten(0, 1), SMALL).unflatten(0, originals.shape[:2])
    hits = [
        image_measures.identified(small[:, p], gallery, truth[:, b])
        for p in range(pictures.shape[1])
        for b in range(originals.shape[1])
    ]
    found = {
        "psnr": image_measures.best_of(image_measures.psnr, pictures, originals),
        "ssim": image_measures.best_of(image_measures.ssim, pictures, originals),
        "mse": -image_measures.best_of(lambda a, b: -image_measures.mse(a, b), pictures, originals),
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
    return {name: values.double().clamp(max=300) for name, values in found.items()}  # an exact picture: 300 dB


def _only(seen: Seen, ends: tuple[str, ...] | None) -> Seen:
    """What the inversion reads of an upload: all of ViT-S/16 is 87 MB a victim and round."""
    if ends is None:
        return seen
    kept = {name: g for name, g in seen.gradient.items() if name.endswith(ends)}
    mask = None if seen.mask is None else {name: m for name, m in seen.mask.items() if name in kept}
    return Seen(seen.weights, kept, seen.labels, mask)


def _nearest(pictures: Tensor, originals: Tensor) -> Tensor:
    """Of the pictures (V, P, C, H, W) of each victim the one nearest to its original."""
    errors = [image_measures.mse(pictures[:, p], originals) for p in range(pictures.shape[1])]
    return pictures[torch.arange(len(pictures), device=pictures.device), torch.stack(errors).argmin(0)]


def _added(before: Tensor | None, values: Tensor) -> Tensor:
    """(3,) float64: count, sum and sum of squares of what has been measured."""
    now = torch.stack(
        [torch.tensor(float(len(values)), dtype=torch.float64), values.sum().cpu(), (values**2).sum().cpu()]
    )
    return now if before is None else before.cpu() + now


def _bytes(images: Tensor) -> Tensor:
    return (images.clamp(0, 1) * 255).round().to(torch.uint8)
