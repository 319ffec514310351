"""What each protocol shows: the fraction of a client's images that the server identifies from one round's uploads.

| attacker | knows | what |
|---|---|---|
| `component` | no weights at all (A) | the first principal component of the feature vectors, in both signs |
| `initial` | also images of its own (D) | a decoder for the extractor that all clients began with |
| `surrogate` | the same (D) | a decoder for the extractor of `server_client`, an edge that the server runs itself |
| `known` | the client's extractor (bound) | a decoder for it |
| `optimised` | the same (bound) | searches the image with these features |
| `inversion` | as its entry says | any inversion of what is sent of a network, or of a gradient |

An upload of features has a row for each image, so an image is named by its own row. An update or a gradient is one
vector for all images of the client: any of its reconstructions may name an image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fatbench.engine.local import LocalTraining, load, pixels, trainable
from fatbench.engine.optimizers import Descent, Moments, step
from fatbench.engine.rounds import Metrics, Problem, Round, Tensors, Update
from fatbench.methods.intervals import student, wilson
from fatbench.methods.inversions import image_measures
from fatbench.methods.inversions.batch_statistics import layers_of
from fatbench.methods.inversions.decoder import feature_inversion, passes_of_decoder
from fatbench.methods.inversions.labels import head_of, restored
from fatbench.methods.inversions.upload import Observation
from fatbench.suite.entry import Passes, passes
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count, FeatureAttackers, Inversion, Local, Natural

SMALL = 32  # side in pixels at which images are compared
TV = 0.01  # of `optimised`


def exposure(
    problem: Problem,
    result: Round,
    images: Tensor,
    labels: Tensor,
    attack: Callable[..., Tensor],
    generator: Generator,
    *,
    attackers: FeatureAttackers | None = None,
    inversion: Inversion | None = None,
    local: Local | None = None,
    clients: Count = 4,
    targets: Count = 16,
    candidates: Count = 1000,
    steps: Count = 2000,
    width: Count = 64,
    surrogate_images: Count = 500,
    server_client: Natural | None = None,
) -> Metrics:
    """The share of a client's first `targets` images that the server names first among the candidates, by attacker.

    Of a gradient (FedSGD), the images are those of its batch; a client that sends nothing in the last step is left out.
    `attackers` of features, `inversion` of updates and gradients; the latter restores the labels. `local`: what the
    attacker knows of the client's training. The first `clients` of the round are attacked, without `server_client`.
    Decoders train `steps` steps with `width` channels on `surrogate_images` test images. Candidates are the first
    `candidates` training images, if these are fewer also test images, and all targets.

    exposed_<attacker>: the mean over clients with Student's interval (of one target a client: Wilson's), _chance, that
    of as many random guesses, and the share of each client. exposed_candidates: their number. The clients' own
    extractors are read by `known` and `optimised` alone.

    Source: ours; Tao et al. 2022, section 6, ask for the comparison.
    """
    behind = [(u, problem.shards[u.client] if u.batch is None else u.batch) for u in result.updates
              if (u.upload or u.extra) and u.client != server_client]  # fmt: skip
    attacked = [update for update, of_upload in behind if len(of_upload)][:clients]
    rows = [of_upload[:targets] for _, of_upload in behind if len(of_upload)][:clients]
    if not attacked:  # chance drew nobody's image
        return {}
    gallery_indices = image_measures.candidates_with(torch.cat(rows), candidates, len(problem.images))
    pictures = [problem.images[gallery_indices], images[: max(0, candidates - len(problem.images))]]
    gallery = torch.cat([small(pixels(problem, chunk)) for part in pictures for chunk in part.split(250)])
    truth = [torch.searchsorted(gallery_indices, of_client.contiguous()) for of_client in rows]
    public = pixels(problem, images[:surrogate_images])
    named: dict[str, list[tuple[Tensor, int]]] = {}  # attacker: for each client, (which images are named, guesses)

    def decoded(edge: Tensors, features: Tensor) -> Tensor:
        extractor = load(problem, {**result.state.model, **edge}).get_submodule("extractor")
        return feature_inversion(extractor, public, features, generator, steps=steps, width=width)

    both: list[tuple[Tensor, ...]]
    for name in attackers.replace(" ", "").split(",") if attackers else ():
        sent = [update.extra["features"][:targets].float() for update in attacked]
        if name == "component":
            guesses = [component(update.extra["features"].float(), problem, images)[:targets] for update in attacked]
            both = [(one, 1 - one) for one in guesses]
        elif name in ("initial", "surrogate"):
            edge = {} if name == "initial" else result.own[server_client]  # type: ignore[index]
            both = [(one,) for one in decoded(edge, torch.cat(sent)).split([len(features) for features in sent])]
        elif name == "known":
            both = [(decoded(result.own[u.client], h),) for u, h in zip(attacked, sent, strict=True)]
        else:
            both = []
            for u, h in zip(attacked, sent, strict=True):
                extractor = load(problem, {**result.state.model, **result.own[u.client]}).get_submodule("extractor")
                both.append((optimised(extractor, h, tuple(public.shape[1:]), generator, steps),))
        named[name] = [
            (
                torch.stack([image_measures.identified(small(guess), gallery, right) for guess in signs]).any(0),
                len(signs),
            )
            for signs, right in zip(both, truth, strict=True)
        ]
    if inversion is not None:
        shape = (public.shape[1], public.shape[2], public.shape[3])
        for update, right in zip(attacked, truth, strict=True):
            sent_by = observation(problem, result, update, local, shape, generator)
            observed = replace(sent_by, own_images=lambda: public)
            made = small(inversion([observed], problem.model, shape, generator)[0].detach())
            hits = [image_measures.identified(one.expand(len(right), *one.shape), gallery, right) for one in made]
            named.setdefault("update", []).append((torch.stack(hits).any(0), len(made)))
    metrics: Metrics = {"exposed_candidates": float(len(gallery))}
    numbers = [update.client for update in attacked]
    for name, of_clients in named.items():
        shares = [float(hit.double().mean()) for hit, _ in of_clients]
        mean, half = sum(shares) / len(shares), student(shares)
        of_one = all(len(of_client) == 1 for of_client in rows)
        limits = wilson(sum(shares), len(shares)) if of_one else (max(0.0, mean - half), min(1.0, mean + half))
        metrics |= {f"exposed_{name}": mean, f"exposed_{name}_client": dict(zip(numbers, shares, strict=True))}
        metrics[f"exposed_{name}_chance"] = 1 - (1 - 1 / len(gallery)) ** max(count for _, count in of_clients)
        if len(shares) > 1 or of_one:
            metrics |= {f"exposed_{name}_low": limits[0], f"exposed_{name}_high": limits[1]}
    return metrics


def small(images: Tensor) -> Tensor:
    return image_measures.shrink(images, SMALL) if images.shape[-1] > SMALL else images


def component(features: Tensor, problem: Problem, images: Tensor) -> Tensor:
    """(n, C, H, W): the first principal component of features (n, c, h, w) over positions and images, 0.5 +- 0.2.

    The sign is unknown; a constant stays grey.
    """
    vectors = features.permute(0, 2, 3, 1).double()
    centred = vectors - vectors.flatten(0, 2).mean(0)
    flat = centred.flatten(0, 2)
    first = centred @ torch.linalg.eigh(flat.T @ flat)[1][:, -1]
    scale = first.std()
    picture = 0.5 + (0.2 * first / scale if bool(scale > 1e-12) else 0 * first)
    side = pixels(problem, images[:1]).shape[-1]
    upsampled = F.interpolate(picture.float().unsqueeze(1), size=(side, side), mode="bilinear")
    return upsampled.expand(-1, images.shape[1], -1, -1)


def optimised(
    extractor: nn.Module, features: Tensor, shape: tuple[int, ...], generator: Generator, steps: int
) -> Tensor:
    """(n, C, H, W): images whose features are these, by Adam on the relative squared distance and total variation."""
    extractor.eval()
    x = torch.rand(len(features), *shape, generator=generator, device=generator.device).to(features.device)
    moments: Moments = {}
    for _ in range(steps):
        x.requires_grad_()
        gap = (extractor(x) - features).square().flatten(1).mean(1) / features.square().flatten(1).mean(1).clamp(1e-12)
        roughness = x.diff(dim=-1).abs().flatten(1).mean(1) + x.diff(dim=-2).abs().flatten(1).mean(1)
        (slope,) = torch.autograd.grad((gap + TV * roughness).sum(), x)
        moments = step([x := x.detach()], [slope], moments, Descent("adam", 0.05))
        x.clamp_(0, 1)
    return x


def observation(
    problem: Problem,
    result: Round,
    update: Update,
    local: LocalTraining | None,
    shape: tuple[int, int, int],
    generator: Generator,
) -> Observation:
    """What one client has sent: its gradient, or broadcast less upload; labels restored.

    Where the rate is unknown, LLG restores them, which needs no scale. Raises ValueError if the last layer is not sent.
    """
    model, weights = problem.model, result.broadcast
    if "gradient" in update.extra:
        gradient, buffers = update.extra["gradient"], {}
        count = round(update.n / update.stats.steps) if update.batch is None else len(update.batch)
    else:
        sent, count = update.upload, update.n
        gradient = {name: weights[name] - sent[name] for name in trainable(model) if name in sent}
        buffers = {name: value[None] for name, value in sent.items() if name in dict(model.named_buffers())}
    if absent := [name for name in head_of(model) if name not in gradient]:
        raise ValueError(f"exposure: {absent[0]} is not sent, and labels are restored from it")
    seen = Observation(
        weights,
        {name: value[None] for name, value in gradient.items()},
        torch.zeros(1, count, dtype=torch.int64, device=problem.device),
        local=local,
        mode="train" if layers_of(model) else "eval",
        buffers=buffers or None,
    )
    method = "ilrg" if local is not None or "gradient" in update.extra else "llg"
    return replace(seen, labels=restored(method, seen, model, count, shape, generator))


def passes_of_exposure(
    cell: Facts, *, attackers: str | None, inversion: Inversion | None, local: Local | None, clients: int, targets: int,
    steps: int, server_client: int | None,
) -> Passes:  # fmt: skip
    """Of updates, the inversion of all images behind them; of features, passes through extractors."""
    attacked = min(clients, cell.cohort - (server_client is not None))
    behind = min(cell.algorithm.get("batch") or cell.client_images, cell.client_images)
    spent = Passes()
    if inversion is not None:
        spent += attacked * behind * passes(inversion, 1, 1 if local is None else local.epochs)
    for name in attackers.replace(" ", "").split(",") if attackers else ():
        if name == "optimised":
            spent += attacked * min(targets, behind) * steps * Passes(1, 1)
        elif name != "component":
            spent += (attacked if name == "known" else 1) * passes_of_decoder(steps)
    return spent


def attackers_of_what_is_sent(
    cell: Facts, *, attackers: str | None, inversion: object, server_client: int | None
) -> str | None:
    """Refuse attackers of what the algorithm does not send, and a surrogate without an edge of the server's."""
    if attackers is None and inversion is None:
        return "exposure: set attackers (of features) or inversion (of updates)"
    splits = "edge" in cell.algorithm.parts
    if attackers and not splits:
        return f"attackers: {cell.algorithm.name} sends no features; set inversion"
    if attackers and cell.algorithm.get("features") == "recompute":
        return "attackers: features: recompute keeps no features; set features: float32"
    if inversion is not None and splits:
        return f"inversion: {cell.algorithm.name} sends features alone; set attackers"
    if attackers and "surrogate" in attackers and server_client is None:
        return "attackers: surrogate needs server_client, the client that is the server's own edge"
    if server_client is not None and server_client >= cell.clients:
        return f"server_client: client {server_client} of {cell.clients} (counted from 0)"
    return None


def candidates_of_the_data(cell: Facts, *, candidates: int) -> str | None:
    """Refuse more candidates than images."""
    available = cell.images + (cell.spec.get("test") or candidates)
    return f"candidates: {candidates} of {available} training and test images" if candidates > available else None
