"""Attacks on privacy of the package breaching, and iLRG's counts of labels, beside ours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.fidelity.measure import Row, difference, differs, equal
from benchmarks.fidelity.sources import imported
from fatbench.engine.local import LocalTraining
from fatbench.methods import objectives
from fatbench.methods.inversions import labels
from fatbench.methods.inversions.april import april, without_block0_norm
from fatbench.methods.inversions.imprint import imprint
from fatbench.methods.inversions.matching import matching
from fatbench.methods.inversions.simulated import simulate_steps
from fatbench.methods.inversions.upload import Observation, gradients
from fatbench.methods.manipulations import MANIPULATIONS
from fatbench.models.small_cnn import small_cnn
from fatbench.models.vit import vit

SHAPE, CLASSES = (3, 12, 12), 10
PRECISE = {"device": torch.device("cpu"), "dtype": torch.float64}


@contextmanager
def _breaching(folder: Path, *names: str) -> Iterator[tuple[Any, ...]]:
    """Modules of the package without those that load data, text models and hydra."""
    inside = ("", "/attacks", "/attacks/auxiliaries", "/cases", "/cases/models", "/analysis")
    stubs: dict[str, dict[str, Any]] = {
        f"breaching{part.replace('/', '.')}": {"__path__": [str(folder / f"breaching{part}")]} for part in inside
    }
    with imported(folder, *(f"breaching.{name}" for name in names), stubs=stubs) as modules:
        yield modules


def _images(count: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    x = F.interpolate(torch.rand(count, 3, 6, 6, generator=draws), SHAPE[1:], mode="bilinear")
    return x, torch.randint(CLASSES, (count,), generator=draws)


def _observed(model: nn.Module, x: Tensor, y: Tensor, **more: Any) -> Observation:
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    return Observation(weights, gradients(model, weights, x[None], y[None]), y[None], **more)


def breaching(folder: Path) -> list[Row]:
    """Gradient matching, simulated steps, APRIL, the readout of an imprint block, and labels by LLG."""
    torch.set_default_dtype(torch.float64)  # rounding would turn signs of gradients
    try:
        return [*_matching(folder), *_steps(folder), *_april(folder), *_imprint(folder), *_labels(folder)]
    finally:
        torch.set_default_dtype(torch.float32)


def _matching(folder: Path) -> list[Row]:
    """Eleven steps of the attack "invertinggradients" from our start, without and with total variation."""
    torch.manual_seed(0)
    model = vit(SHAPE, CLASSES, patch=4, dim=32, depth=1, heads=2, normalise="none").eval()
    (x, y), count = _images(2), 11  # both sides round the steps at which the rate falls alike
    observed, rows = _observed(model, x, y), []
    sent = [observed.gradient[name][0] for name, _ in model.named_parameters()]
    start = torch.rand(x.shape, generator=torch.Generator().manual_seed(1))
    shared = [{"gradients": sent, "metadata": {"local_hyperparams": None, "num_data_points": len(x)}}]
    with _breaching(folder, "attacks.optimization_based_attack") as (module,):
        for tv in (0.0, 0.01):
            attacker: Any = module.OptimizationBasedAttacker(model, F.cross_entropy, _settings(count, tv))
            attacker.dm, attacker.ds, attacker.data_shape = torch.tensor(0.0), torch.tensor(1.0), SHAPE
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
                theirs = attacker._run_trial([model], shared, y, defaultdict(list), 0, start)
            ours = matching([observed], model, SHAPE, torch.Generator().manual_seed(1), steps=count, tv=tv)[0]
            said, apart = "invertinggradients, 11 steps", difference(ours, theirs)
            if tv:
                rows.append(differs("breaching.matching.tv", said, "matching", "run", apart,
                                    note="its total variation counts the step to zeros around the image"))  # fmt: skip
            else:
                rows.append(equal("breaching.matching", said, "matching, tv: 0", "run", apart,
                                  altered="starts where ours starts, on images in [0, 1]"))  # fmt: skip
    return rows


def _settings(simulate_steps: int, tv: float) -> Any:
    """Their configuration "invertinggradients", but for the steps and the weight of the variation."""
    return SimpleNamespace(
        type="invertinggradients",
        objective=_Settings(type="cosine-similarity", scale=1.0),
        regularization={"total_variation": _Settings(scale=tv, inner_exp=1, outer_exp=1)},
        augmentations=None,
        differentiable_augmentations=False,
        optim=SimpleNamespace(
            optimizer="adam", signed="hard", step_size=0.1, boxed=True, max_iterations=simulate_steps, warmup=0,
            step_size_decay="step-lr", langevin_noise=0.0, grad_clip=None, callback=1000,
        ),
        impl=SimpleNamespace(dtype="double", mixed_precision=False),
        init="zeros",
    )  # fmt: skip


class _Settings(dict[str, Any]):
    """A mapping whose entries are attributes too, as their configuration library has it."""

    __getattr__ = dict.__getitem__


def _steps(folder: Path) -> list[Row]:
    """What three local steps of two images change, by `_grad_fn_multi_step`, beside `simulated.steps`."""
    torch.manual_seed(0)
    model = small_cnn(SHAPE, CLASSES, width=4).eval()
    (x, y), rate = _images(6), 0.1
    with _breaching(folder, "attacks.auxiliaries.objectives") as (module,):
        loss: Any = module.CosineSimilarity()
        told = {"steps": 3, "data_per_step": 2, "lr": rate, "labels": list(y.split(2))}
        loss.initialize(F.cross_entropy, SimpleNamespace(mixed_precision=False), told)
        moved, _ = loss._grad_fn(model, x, y)
    names = [name for name, _ in model.named_parameters()]
    theirs = {name: change.detach() for name, change in zip(names, moved, strict=True)}
    local = LocalTraining(batch=2, lr=rate, epochs=1, objective=objectives.standard)
    ours = simulate_steps(model, dict(model.state_dict()), x[None], y, local, names)
    scaled = {name: -rate * change.detach() for name, change in ours.items()}
    return [equal("breaching.steps", "GradientLoss._grad_fn_multi_step, three steps", "simulated, steps", "run",
                  difference(scaled, theirs))]  # fmt: skip


def _april(folder: Path) -> list[Row]:
    """The patches of one image, from a transformer whose first block has neither normalisation nor residuals."""
    torch.manual_seed(0)
    model = without_block0_norm(vit(SHAPE, CLASSES, patch=4, dim=64, depth=2, heads=4)).eval()
    x, y = _images(1)
    observed = _observed(model, x, y)
    sent = [observed.gradient[name][0] for name, _ in model.named_parameters()]
    with _breaching(folder, "attacks.analytic_attack") as (module,):
        attacker = module.AprilAttacker
        patches = attacker.closed_form_april(SimpleNamespace(model=model.backbone), {"gradients": sent}, "gelsd")
        theirs = (attacker.recover_patch(patches) * 0.5 + 0.5).clamp(0, 1)
    ours = april([observed], model, SHAPE, torch.Generator())[0, 0]
    return [equal("breaching.april", "AprilAttacker.closed_form_april, recover_patch", "april", "output",
                  difference(ours, theirs), altered="our network in the place of its ImageNet ViT")]  # fmt: skip


def _imprint(folder: Path) -> list[Row]:
    """Their readout of the gradient of our block, with the images that lie alone in a bin."""
    torch.manual_seed(0)
    honest = small_cnn(SHAPE, CLASSES, width=4).eval()
    weights = {name: value.detach() for name, value in honest.state_dict().items()}
    x, y = torch.stack([torch.full(SHAPE, level) for level in (0.2, 0.45, 0.9)]), torch.tensor([1, 2, 3])
    x = x + 0.05 * torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
    own = torch.linspace(0, 1, 33).view(-1, 1, 1, 1).expand(-1, *SHAPE)
    changed = MANIPULATIONS["imprint"](honest, weights, torch.Generator(), own, bins=8)
    model = changed.model.eval()
    sent = gradients(model, changed.target, x[None], y[None], ("imprint.weight", "imprint.bias"))
    observed = Observation(changed.target, sent, y[None], secret=changed.secret)
    ours = imprint([observed], model, SHAPE, torch.Generator())[0]
    shared = [{"gradients": [sent[f"imprint.{end}"][0] for end in ("weight", "bias")],
               "metadata": {"num_data_points": len(x)}}]  # fmt: skip
    secret = {"ImprintBlock": {"weight_idx": 0, "bias_idx": 1, "structure": "cumulative", "shape": SHAPE}}
    payload = [{"metadata": SimpleNamespace(modality="vision")}]
    with _breaching(folder, "attacks.analytic_attack") as (module,):
        attacker: Any = module.ImprintAttacker.__new__(module.ImprintAttacker)
        attacker.cfg = SimpleNamespace(sort_by_bias=False, breach_padding=False, breach_reduction=None)
        attacker.setup, attacker.data_shape = PRECISE, SHAPE
        attacker.dm, attacker.ds = torch.tensor(0.0), torch.tensor(1.0)
        attacker.prepare_attack = lambda *_: ([model], y, {})
        theirs = attacker.reconstruct(payload, shared, secret)[0]["data"]
    nearest = [min(difference(found, image[None][0]) for found in theirs) for image in ours[_by_level(ours)]]
    said = "ImprintAttacker.reconstruct"
    return [
        equal("breaching.imprint", said, "imprint", "output", max(nearest[:2]), 1e-3,
              "images below the last threshold"),
        differs("breaching.imprint.last", said, "imprint", "output", nearest[2], 1e-3,
                "the image above the last threshold is not among theirs"),
    ]  # fmt: skip


def _by_level(images: Tensor) -> Tensor:
    return images.flatten(1).mean(1).argsort()


def _labels(folder: Path) -> list[Row]:
    """Labels by LLG: one image a class, and a class with several images."""
    rows = []
    with _breaching(folder, "attacks.base_attack") as (module,):
        for name, y in (("alone", [3, 1, 7, 4]), ("several", [3, 3, 3, 1, 1, 1, 7, 7])):
            torch.manual_seed(0)
            model = small_cnn(SHAPE, CLASSES, width=4).eval()
            x, _ = _images(len(y))
            observed = _observed(model, x, torch.tensor(y))
            weight, bias = labels.head_of(model)
            g, G = observed.gradient[bias][0], observed.gradient[weight][0]
            attacker: Any = module._BaseAttacker.__new__(module._BaseAttacker)
            attacker.cfg, attacker.setup = SimpleNamespace(label_strategy="wainakh-simple"), PRECISE
            shared = [{"gradients": [G, g], "metadata": {"num_data_points": len(y)}}]
            found = attacker._recover_label_information(shared, None, None)
            theirs = torch.bincount(found, minlength=CLASSES)
            ours = labels.llg(G.sum(1), G, G, g, len(y), _unused)
            row = equal if name == "alone" else differs
            note = "" if name == "alone" else "its second stage corrects another class than it picks"
            rows.append(row(f"breaching.llg.{name}", "label_strategy: wainakh-simple", "llg, of the weight's gradient",
                            "output", difference(ours.double(), theirs.double()), 1e-6, note))  # fmt: skip
    return rows


def _unused() -> Tensor:
    raise AssertionError("neither asks for mean probabilities")


def ilrg(folder: Path) -> list[Row]:
    """Counts of labels from mean probabilities, and where rounding leaves them short."""
    rows = []
    with imported(folder, "methods") as (module,):
        for name, y in (("several", [3, 3, 3, 1, 1, 7, 0, 9]), ("one", [2] * 8)):
            torch.manual_seed(0)
            model = small_cnn(SHAPE, CLASSES, width=4).eval()
            x, _ = _images(len(y))
            observed = _observed(model, x, torch.tensor(y))
            weight, bias = labels.head_of(model)
            g, G = observed.gradient[bias][0].double(), observed.gradient[weight][0].double()
            W, b = observed.weights[weight].double(), observed.weights[bias].double()
            features = torch.stack([module.get_emb(G[c], g[c]) for c in range(CLASSES)]).double()
            theirs, _ = module.iLRG((features @ W.T + b).softmax(1), g.numpy(), CLASSES, len(y))
            ours = labels.ilrg(g, G, W, b, len(y), _unused)
            rows.append(equal(f"ilrg.{name}", "get_emb, iLRG", "ilrg", "output",
                              difference(ours.double(), torch.as_tensor(theirs).double()), 1e-6))  # fmt: skip
    return rows
