"""A server inverts the defended updates of single target clients. Nothing is learned.

| Sawada et al. 2024 | here | what |
|---|---|---|
| n | target | a client with one batch, observed alone |
| m | observed_rounds | rounds in which the same target is observed, each with the defence's fresh randomness |
| B_n | defence's mask | |
| x, x* | original, reconstruction | |

    for each group of target clients:
        theta_0, secret <- manipulation(theta_0)            (an honest server changes nothing)
        for j = 0 .. m-1:   u <- gradient of the target's batch at theta_j, or theta_j - (theta_j after local training)
                            u <- wire(defence(u));   secure aggregation: the mean over the target and other clients
                            theta_{j+1} <- theta_j (fixed) or theta_j - eta u of the first target (moving)
        reconstructions <- inversion(theta_0, u_0, theta_1, u_1, ...);   compare with the originals

Sawada et al. 2024, section IV: 16 images, one at a time (differences: masks-attacker). A round of the engine is a group
of `target_clients` clients, so that a run can resume; its numbers cover all clients so far. The closed form needs a
network without norm and residuals in block 0 (differences: april-block0), which `block0: bare` builds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from fatbench.engine.inject import asks
from fatbench.engine.local import LocalTraining, pixels
from fatbench.engine.randomness import generator
from fatbench.engine.rounds import Cost, Metrics, Problem, Round, State, Tensors
from fatbench.methods.defences import Upload, none
from fatbench.methods.intervals import clopper_pearson, verdict, wilson
from fatbench.methods.inversions import image_measures, lpips, reads_of
from fatbench.methods.inversions.april import without_block0_norm
from fatbench.methods.inversions.batch_statistics import local_steps
from fatbench.methods.inversions.labels import head_of, label_counts, restored
from fatbench.methods.inversions.target_client import ClientImages, TargetClient, observed_upload, update
from fatbench.methods.inversions.upload import Observation, recovered_labels
from fatbench.methods.manipulations import Manipulated
from fatbench.methods.threat_models import of_gradient_inversion
from fatbench.models import logit_parameters
from fatbench.suite.entry import AlgorithmEntry, Passes, Work, entry_of, passes
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count, Defence, Inversion, Local, Manipulation, NonNegative, Objective

SMALL = 32  # side in pixels of a second comparison, and of that with the candidates
VERDICTS = {"leaks": 1.0, "holds": -1.0, "open": 0.0}  # at 5 % of clients, of identified_first
ENDS = ("", "_ci", "_low", "_high", "_exact_low", "_exact_high", "_chance")
IDENTIFIED = ("identification", "identified_first")  # of a batch: any image, the first one


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
    local: Local | None = None,
    wire: Literal["float64", "float32", "float16"] = "float32",
    labels_from: Literal["client", "ilrg", "llg", "counts"] = "client",
    manipulation: Manipulation | None = None,
    aggregate: Count = 1,
    surrogates: Count = 200,
    interval: Literal["normal", "t"] = "normal",
    mode: Literal["eval", "train"] = "eval",
    buffers: Literal["kept", "sent"] = "kept",
    attacker: Literal["informed", "eval"] = "informed",
) -> Iterator[Round]:
    """An inversion against defended updates: rounds * target_clients clients of `batch` images each.

    `local` null: a client sends the gradient of its images. Else it trains on them as in FedAvg, and the difference of
    the weights is inverted. `mode`: how batch normalisation computes at the client. An upload with `buffers` tells the
    number of local steps, and after one step the batch's statistics. The `attacker` simulates the client's mode, or
    eval mode whatever it does. `wire`: the type of the numbers that are sent, in which the client also computes
    (float16: in float32). `labels_from`: the attacker is told the labels ("client") or restores them from the update
    (`fatbench/methods/inversions/labels.py`). `manipulation`: what a malicious server does to the model; it may use
    `surrogates` images that no target has. `aggregate`: with secure aggregation, the server sees only the mean of the
    updates of the target and of `aggregate` - 1 other clients.

    Numbers are means over the clients so far, with the half width of their 95 % interval (`psnr_ci`, ...; `interval`:
    from the normal or from Student's t distribution): psnr (dB), ssim and mse at the images' size, ssim32 and
    correlation32 at 32 x 32, lpips if its weights are installed, identification (is the original the likeliest of the
    candidates, by correlation at 32 x 32?), label_recovery (batch of 1) and label_counts (the fraction of correct
    counts, if labels are not told); psnr, correlation32 and identification also per target. For a batch, they describe
    the best pair. identified_first: does any reconstruction name the client's first image? It compares batches of other
    sizes. Both have Wilson's interval (..._low, ..._high), Clopper-Pearson's (..._exact_low) and ..._chance, that of as
    many random guesses. The candidates are the first `candidates` training images and those of all clients;
    candidates_used is their number. verdict: 1 if more, -1 if fewer than 5 % of clients are shown to be so identified,
    else 0. steps_told: the number of local steps, if buffers are sent. matched_psnr, matched_ssim and recovered cover
    all pairs: reconstructions assigned to originals one to one, and the fraction of originals above 19 dB. grey_psnr,
    another_psnr, ... are baselines: scores of a flat grey reconstruction and of another image. Only the gradients that
    the inversion reads are computed. `rounding`: the resized images have 256 levels again, as in a file of that size.
    `objective` only counts work: the loss is the cross-entropy, or that of `local`.

    Raises ValueError if there are too few images, or for a batch of one where batch normalisation needs two.
    """
    model = without_block0_norm(problem.model) if block0 == "bare" else problem.model
    # The weights never change and follow from the seed, so no state carries them: 88 MB a cell for ViT-S/16.
    theta: Tensors = {name: state.model.get(name, value).clone() for name, value in model.state_dict().items()}
    shard = problem.shards[0]
    group = target_clients * aggregate * batch  # images of a round
    image_count = rounds * group
    if image_count > len(shard):
        raise ValueError(f"gradient_inversion: {_too_few(image_count, len(shard), rounds, target_clients)}")
    client = TargetClient(problem, defence, local, wire, mode, buffers)
    # the server's own images come after those of all clients
    server_indices = shard[image_count:][:surrogates]
    change = None if manipulation is None else _bound_manipulation(problem, manipulation, server_indices)
    bias = [name for name in logit_parameters(model) if name.endswith("bias")][-1]  # its gradient tells the label
    read_suffixes = reads_of(inversion)
    reads = (
        None if read_suffixes is None else (*read_suffixes, bias, *(() if labels_from == "client" else head_of(model)))
    )
    gallery_indices = image_measures.candidates_with(shard[:image_count], candidates, len(problem.images))
    gallery = torch.cat(
        [
            image_measures.shrink(pixels(problem, problem.images[index_chunk]), SMALL)
            for index_chunk in gallery_indices.split(250)
        ]
    )
    for t in range(state.round, rounds):
        target_indices = shard[t * group : (t + 1) * group].view(target_clients, aggregate, batch)
        x = pixels(problem, problem.images[target_indices.flatten()]).contiguous()
        x = (_bytes(x) / 255 if rounding else x).unflatten(0, target_indices.shape)
        y = problem.labels[target_indices]
        originals, labels = x[:, 0], y[:, 0]  # the target is the first of each aggregate
        # [observed round][target]: the stream of the defence's randomness
        uploads = [
            [Upload(problem.seed, t * target_clients + v, j) for v in range(target_clients)]
            for j in range(observed_rounds)
        ]
        guess = functools.partial(_labelled, labels_from, problem, model, t)
        knows = functools.partial(_known, problem, server_indices, attacker)
        network = model
        observed: list[list[Observation]] = []  # for each group of targets that share weights: one Observation a round
        if change is None and aggregate == 1:
            round_observations, current_weights, computed = [], theta, {}
            targets = ClientImages(target_indices[:, 0], originals, labels)
            for j in range(observed_rounds):
                if j == 0 or weights == "moving":  # at fixed weights only the defence's randomness is new
                    # weights that move, and defences that look at all of it, need the whole gradient
                    names = None if weights == "moving" or client.needs_all else reads
                    computed = update(client, model, current_weights, targets, names, t)
                observation = observed_upload(client, model, current_weights, computed, targets, uploads[j])
                round_observations.append(_only_read_tensors(observation, reads))
                if weights == "moving":
                    current_weights = {
                        k: w - lr * observation.gradient[k][0] if k in observation.gradient else w
                        for k, w in current_weights.items()
                    }
            observed.append(guess(knows(round_observations)))
        else:
            for v in range(target_clients):
                round_clients = ClientImages(target_indices[v], x[v], y[v])
                sums = functools.partial(
                    sums_of_clients, client, round_clients, [of_round[v] for of_round in uploads], t
                )
                honest = Manipulated(model, theta, theta)
                if change is None:
                    observed.append(guess(knows(sums(honest, reads))))
                    continue
                # a malicious server is told the labels, or restores them from an honest round first
                target_labels = (
                    labels[v] if labels_from == "client" else guess(knows(sums(honest, head_of(model))))[0].labels[0]
                )
                changed = change(model, theta, generator(problem.seed, "manipulation", t), target_labels)
                network = changed.model
                seen = knows(sums(changed, reads))
                observed.append([replace(s, labels=target_labels[None], clients=1) for s in seen])
        noise = generator(problem.seed, "inversion", t, device=problem.device)
        shape = (x.shape[3], x.shape[4], x.shape[5])
        reconstructions = torch.cat([inversion(unit, network, shape, noise) for unit in observed]).detach()
        with torch.no_grad():
            scores = _scores(
                reconstructions,
                originals,
                torch.searchsorted(gallery_indices, target_indices[:, 0].contiguous()),
                gallery,
            )
        if batch == 1 and change is None and aggregate == 1:
            scores["label_recovery"] = (recovered_labels(observed[0][0].gradient[bias]) == labels[:, 0]).double()
        if labels_from != "client":
            attacker_labels = torch.cat([unit[0].labels for unit in observed])
            scores["label_counts"] = label_counts(attacker_labels, y.flatten(1), problem.classes)
        moments = {
            name: _accumulated(state.server.get(name), values)
            for name, values in scores.items()
            if not state.server or name in state.server  # else of later clients alone: an earlier version began the run
        }
        numbers = _summary(moments, interval)
        numbers |= _chances(len(gallery), reconstructions.shape[1], batch) | {"candidates_used": float(len(gallery))}
        if (sent := observed[0][0].buffers) is not None:
            numbers["steps_told"] = float(local_steps(theta, {name: value[0] for name, value in sent.items()}) or 0)
            if entry_of(defence).function is not none:
                numbers["doubt_buffers_are_sent_without_the_defence"] = 1.0
        for name in ("psnr", "correlation32", *(one for one in IDENTIFIED if one in moments)):
            numbers[f"{name}_client"] = dict(enumerate(scores[name].tolist(), start=t * target_clients))
        state = State(t + 1, {}, moments)  # sums over all clients so far, from which a resumed run goes on
        sent_by_all = group * _client_passes(objective, local, observed_rounds, weights)
        spent = sent_by_all + target_clients * batch * _inversion_passes(inversion, local, observed_rounds)
        yield Round(
            t,
            theta,
            [],  # no client trains, and what was sent has been inverted
            None,
            state,
            Cost(aggregate * target_clients * _client_steps(local, batch), spent.forward, spent.backward, 0, 0),
            metrics=numbers,
            artifacts=_best_pair(reconstructions, originals),
        )


def work(
    cell: Facts,
    *,
    rounds: int,
    objective: Objective,
    inversion: Inversion,
    batch: int,
    target_clients: int,
    observed_rounds: int,
    weights: str,
    local: LocalTraining | None,
    aggregate: int,
) -> Work:
    """The clients' updates and the inversion of each target's images. Nothing is stored."""
    client_passes = aggregate * _client_passes(objective, local, observed_rounds, weights)
    spent = rounds * target_clients * batch * (client_passes + _inversion_passes(inversion, local, observed_rounds))
    steps = rounds * target_clients * aggregate * _client_steps(local, batch)
    return Work(steps, spent.forward, spent.backward)


def _inversion_passes(inversion: Inversion, local: LocalTraining | None, observed_rounds: int) -> Passes:
    """The passes of the inversion for one image."""
    return passes(inversion, observed_rounds, 1 if local is None else local.epochs)


def _client_steps(local: LocalTraining | None, batch: int) -> int:
    """Steps of a client's local training on `batch` images; 0 if it sends a gradient."""
    return 0 if local is None else local.epochs * math.ceil(batch / local.batch)


def _client_passes(objective: Objective, local: LocalTraining | None, observed_rounds: int, weights: str) -> Passes:
    """The passes of the client for one image."""
    if local is not None:
        return local.epochs * passes(local.objective)
    return (observed_rounds if weights == "moving" else 1) * passes(objective)


def window_of_ssim(cell: Facts) -> str | None:
    """Refuse images smaller than the window of SSIM."""
    if cell.side < 11:
        return f"reconstructions are compared by SSIM with a window of 11 x 11, images are {cell.side} x {cell.side}"
    return None


def moving_and_honest(*, weights: str, local: LocalTraining | None, manipulation: Manipulation | None) -> str | None:
    """Refuse moving weights unless honest gradients move them."""
    if weights == "moving" and (local or manipulation):
        return "weights: moving needs gradients at the honest weights; leave out local and manipulation"
    return None


def rounding_of_gradients(*, rounding: bool, local: LocalTraining | None) -> str | None:
    """Refuse rounding with local training."""
    if rounding and local:
        return "rounding applies to gradients only; leave out local"
    return None


def one_mode(cell: Facts, *, local: LocalTraining | None, mode: str, buffers: str, attacker: str) -> str | None:
    """Refuse modes that do not differ or cannot be simulated, and buffers that do not change."""
    if mode == "eval":
        if local and cell.batch_norm:
            return (
                "local training of this model changes its batch normalisation, and mode is eval: set mode: train, "
                "leave out 'local', or take a model without it"
            )
        if buffers == "sent":
            return "buffers: sent needs mode: train: in eval mode no buffer changes"
        return "attacker: eval is the informed one in mode: eval" if attacker == "eval" else None
    if cell.dropout:
        return "mode: train: the client's masks of dropout are unknown; take a model without dropout"
    if not cell.batch_norm:
        return f"mode: train: {cell.model.name} computes the same in both modes: it has no batch normalisation"
    return None


def examples_of_last_batch(*, local: LocalTraining | None, batch: int, mode: str) -> int | None:
    """The examples in a client's last batch, in train mode."""
    return (batch if local is None else (batch - 1) % local.batch + 1) if mode == "train" else None


def local_batch_of_the_client(*, local: LocalTraining | None, batch: int) -> str | None:
    """Refuse local batches larger than the client's images."""
    if local and local.batch > batch:
        return f"local: batch {local.batch} is more than the {batch} images of a client (batch)"
    return None


def one_sum(*, aggregate: int, manipulation: Manipulation | None, observed_rounds: int) -> str | None:
    """Refuse several observed rounds of a sum, unless the server silences the other clients."""
    if aggregate > 1 and not manipulation and observed_rounds > 1:
        return "aggregate: needs observed_rounds: 1"
    return None


def images_for_all(cell: Facts, *, rounds: int, target_clients: int, aggregate: int, batch: int) -> str | None:
    """Refuse fewer images than those of all targets."""
    needed = rounds * target_clients * aggregate * batch
    return _too_few(needed, cell.images, rounds, target_clients) if needed > cell.images else None


def _too_few(needed: int, available: int, rounds: int, target_clients: int) -> str:
    return f"{rounds} rounds of {target_clients} target clients need {needed} images, there are {available}"


def _bound_manipulation(
    problem: Problem, manipulation: Callable[..., Manipulated], server_indices: Tensor
) -> Callable[..., Manipulated]:
    """A manipulation with what it asks for bound: change(model, weights, generator, labels).

    server_indices: the server's images. Raises ValueError if it needs some and has none.
    """
    images: dict[str, Tensor] = {}
    if asks(manipulation, "images"):
        if not len(server_indices):
            raise ValueError(
                "gradient_inversion: the manipulation needs images of the server's own, and every training image is a "
                "target's: take more images or fewer targets"
            )
        images["images"] = pixels(problem, problem.images[server_indices])

    def change(model: nn.Module, weights: Tensors, generator: Generator, labels: Tensor) -> Manipulated:
        label_argument = {"labels": labels} if asks(manipulation, "labels") else {}
        return manipulation(model, weights, generator, **label_argument, **images)

    return change


def sums_of_clients(
    client: TargetClient,
    round_clients: ClientImages,
    uploads: Sequence[Upload],
    t: int,
    changed: Manipulated,
    reads: tuple[str, ...] | None,
) -> list[Observation]:
    """What the server sees of one target: in each round the mean over the updates of the target and the others.

    round_clients: the images of the target (0) and of the others. The labels are those of all whose update is in the
    mean.
    """
    names = None if client.needs_all else reads
    count = len(round_clients.x)
    observations = []
    for upload in uploads:
        client_observations = []
        for weights, client_slice in ((changed.target, slice(0, 1)), (changed.others, slice(1, count))):
            images = ClientImages(
                round_clients.indices[client_slice], round_clients.x[client_slice], round_clients.y[client_slice]
            )
            if len(images.x):
                part_uploads = (
                    [upload] if client_slice.start == 0 else [replace(upload, step=i) for i in range(1, count)]
                )
                computed = update(client, changed.model, weights, images, names, t)
                client_observations.append(
                    _only_read_tensors(
                        observed_upload(client, changed.model, weights, computed, images, part_uploads), reads
                    )
                )
        if count == 1:
            mean, mask = client_observations[0].gradient, client_observations[0].mask
        else:
            mean, mask = _over_contributors(client_observations), None
        observations.append(
            Observation(
                changed.target, mean, round_clients.y.view(1, -1), mask, client.local, changed.secret, client.mode,
                _mean_buffers(client_observations), count,
            )
        )  # fmt: skip
    return observations


def _over_contributors(observations: Sequence[Observation]) -> Tensors:
    """The mean (1, ...) of uploads, each entry over the clients that sent it, as in fedsgd."""
    mean_gradient = {}
    for name in observations[0].gradient:
        total = torch.cat([p.gradient[name] for p in observations]).sum(0, keepdim=True)
        masks = [(p.mask or {}).get(name, torch.ones_like(p.gradient[name]).bool()) for p in observations]
        mean_gradient[name] = total / torch.cat(masks).sum(0, keepdim=True).clamp(min=1)
    return mean_gradient


def _mean_buffers(observations: Sequence[Observation]) -> Tensors | None:
    """The mean (1, ...) of the clients' buffers; counts are equal, and stay whole."""
    sent = [s.buffers for s in observations if s.buffers is not None]
    if not sent:
        return None
    stacked = {name: torch.cat([buffers[name] for buffers in sent]) for name in sent[0]}
    return {name: v.mean(0, keepdim=True) if v.is_floating_point() else v[:1] for name, v in stacked.items()}


def _known(
    problem: Problem, server_indices: Tensor, attacker: str, observations: Sequence[Observation]
) -> list[Observation]:
    """Observations as the attacker takes them: of its mode, with images of the server's own."""
    images = (lambda: pixels(problem, problem.images[server_indices])) if len(server_indices) else None
    known = [replace(s, own_images=images) for s in observations]
    return [replace(s, mode="eval", buffers=None) for s in known] if attacker == "eval" else known


def _labelled(
    labels_from: str, problem: Problem, model: nn.Module, t: int, observations: list[Observation]
) -> list[Observation]:
    """Observations with the attacker's labels: the clients' own, or those restored from the first round."""
    if labels_from == "client":
        return observations
    shape = tuple(pixels(problem, problem.images[:1]).shape[1:])
    labels = restored(
        labels_from,
        observations[0],
        model,
        observations[0].labels.shape[1],
        shape,
        generator(problem.seed, "labels", t),
    )
    return [replace(s, labels=labels) for s in observations]


def _scores(reconstructions: Tensor, originals: Tensor, truth: Tensor, gallery: Tensor) -> Tensors:
    """{measure: (V,)} of reconstructions (V, P, C, H, W) and originals (V, B, C, H, W), and those of baselines."""
    small = image_measures.shrink(reconstructions.flatten(0, 1), SMALL).unflatten(0, reconstructions.shape[:2])
    small_originals = image_measures.shrink(originals.flatten(0, 1), SMALL).unflatten(0, originals.shape[:2])
    hits = [
        image_measures.identified(small[:, p].repeat_interleave(truth.shape[1], 0), gallery, truth.flatten())
        for p in range(reconstructions.shape[1])
    ]
    named = torch.stack(hits).any(0).view(truth.shape)  # (V, B): by any reconstruction
    scores = {
        "psnr": image_measures.best_of(image_measures.psnr, reconstructions, originals),
        "ssim": image_measures.best_of(image_measures.ssim, reconstructions, originals),
        "mse": image_measures.least_of(image_measures.mse, reconstructions, originals),
        "ssim32": image_measures.best_of(image_measures.ssim, small, small_originals),
        "correlation32": image_measures.best_of(image_measures.correlation, small, small_originals),
        "identification": named.any(1),
        "identified_first": named[:, 0],
    }
    if perceptual := lpips.measure(originals.shape[-1]):
        scores["lpips"] = image_measures.least_of(perceptual, reconstructions, originals)
    scores |= image_measures.matched(reconstructions, originals)
    first_originals, first_small = originals[:, 0], small_originals[:, 0]
    grey, another = image_measures.grey(first_originals), image_measures.another_image(first_originals)
    scores |= {
        "grey_psnr": image_measures.psnr(grey, first_originals),
        "grey_ssim": image_measures.ssim(grey, first_originals),
        "grey_ssim32": image_measures.ssim(image_measures.shrink(grey, SMALL), first_small),
        "another_psnr": image_measures.psnr(another, first_originals),
        "another_ssim": image_measures.ssim(another, first_originals),
        "another_ssim32": image_measures.ssim(image_measures.shrink(another, SMALL), first_small),
    }
    return {
        name: values.double().clamp(max=300) for name, values in scores.items()
    }  # an exact reconstruction has infinite PSNR


def _only_read_tensors(observed: Observation, suffixes: tuple[str, ...] | None) -> Observation:
    """An upload without the tensors that the inversion does not read: ViT-S/16 takes 87 MB a target and round."""
    if suffixes is None:
        return observed
    read_gradient = {name: g for name, g in observed.gradient.items() if name.endswith(suffixes)}
    mask = None if observed.mask is None else {name: m for name, m in observed.mask.items() if name in read_gradient}
    return replace(observed, gradient=read_gradient, mask=mask)


def _best_pair(reconstructions: Tensor, originals: Tensor) -> Tensors:
    """For each target, the nearest reconstruction (V, P, C, H, W) and original (V, B, C, H, W), as bytes."""
    errors = image_measures.of_pairs(image_measures.mse, reconstructions, originals)
    best = errors.flatten(1).argmin(1)
    rows, batch = torch.arange(len(best), device=best.device), originals.shape[1]
    return {
        "original": _bytes(originals[rows, best % batch]),
        "reconstruction": _bytes(reconstructions[rows, best // batch]),
    }


def _summary(moments: Tensors, interval: str) -> Metrics:
    """Mean and half width of the 95 % interval of each measure; for identified clients also Wilson's interval."""
    numbers: Metrics = {}
    # moments: {measure: (3,)}, as `_accumulated` sums them
    for name, (count, total, squares) in ((name, s.tolist()) for name, s in moments.items()):
        numbers[name] = total / count
        if count > 1:
            variance = max(squares - total**2 / count, 0.0) / (count - 1)
            quantile = 1.96
            if interval == "t":
                from scipy.special import stdtrit

                quantile = float(stdtrit(count - 1, 0.975))
            numbers[f"{name}_ci"] = quantile * math.sqrt(variance / count)
    for name in (name for name in IDENTIFIED if name in moments):
        count, hits = moments[name][:2].tolist()
        for kind, limits in (("", wilson(hits, count)), ("_exact", clopper_pearson(round(hits), round(count)))):
            numbers |= dict(zip((f"{name}{kind}_low", f"{name}{kind}_high"), limits, strict=True))
        if name == "identified_first":
            numbers["verdict"] = VERDICTS[verdict(round(hits), round(count))]
    return numbers


def _chances(candidates: int, guesses: int, batch: int) -> Metrics:
    """The chance that one of so many random guesses names an image of the batch, and its first image."""
    return {
        f"{name}_chance": 1 - (1 - named / candidates) ** guesses
        for name, named in zip(IDENTIFIED, (batch, 1), strict=True)
    }


def _accumulated(earlier_sums: Tensor | None, values: Tensor) -> Tensor:
    """(3,) float64: count, sum and sum of squares of all values so far."""
    new_sums = torch.stack(
        [torch.tensor(float(len(values)), dtype=torch.float64), values.sum().cpu(), (values**2).sum().cpu()]
    )
    return new_sums if earlier_sums is None else earlier_sums.cpu() + new_sums


def _bytes(images: Tensor) -> Tensor:
    return (images.clamp(0, 1) * 255).round().to(torch.uint8)


GRADIENT_INVERSION = AlgorithmEntry(
    gradient_inversion,
    work=work,
    refuse=(
        window_of_ssim,
        moving_and_honest,
        rounding_of_gradients,
        one_mode,
        local_batch_of_the_client,
        one_sum,
        images_for_all,
    ),
    aggregates=False,
    last_batch=examples_of_last_batch,
    threat=of_gradient_inversion,
    fractions=(
        *(f"{name}{end}" for name in IDENTIFIED for end in ENDS),
        "label_recovery",
        "label_counts",
        "recovered",
        "recovered_ci",
    ),
    example={"batch": 1, "target_clients": 2, "candidates": 4, "inversion": "patch_ls"},
    cites=("sawada2024",),
)
