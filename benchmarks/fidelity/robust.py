"""CalFAT's clients, AWP's perturbation, FedRBN's, and the aggregators of two Byzantine libraries, beside ours."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.fidelity.measure import Row, difference, differs, equal
from benchmarks.fidelity.sources import imported, replaced
from fatbench.engine.local import Client, LocalTraining, batches, class_counts, copy_state, train_client
from fatbench.engine.mixing import mix
from fatbench.engine.randomness import generator
from fatbench.engine.rounds import Context, Mixing, Problem, Stats, Update
from fatbench.methods import evasion, objectives, robust_aggregators
from fatbench.methods.aggregators import uniform
from fatbench.methods.algorithms.fedbn import normalisation
from fatbench.methods.algorithms.fedrbn import propagate
from fatbench.models.small_cnn import small_cnn

CPU = torch.device("cpu")
BATCH = 4


def _clients() -> Problem:
    """Three clients with twelve images each, of three, three and four of the ten classes."""
    draws = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (36, 3, 8, 8), generator=draws, dtype=torch.uint8)
    labels = torch.cat([torch.arange(12) % count + 3 * k for k, count in enumerate((3, 3, 4))])
    torch.manual_seed(0)
    model = small_cnn((3, 8, 8), 10, width=4)
    return Problem(model, images, labels, list(torch.arange(36).split(12)), 10, 0, CPU, "fp32", "reference")


def calfat(folder: Path) -> list[Row]:
    """A round of three clients by `LocalUpdate.pgd_train` and `average_weights`, on our network, batches and noise."""
    problem = _clients()
    start = copy_state(problem.model)
    attack = functools.partial(evasion.pgd_kl, eps=8 / 255, step=2 / 255, steps=10)
    local = LocalTraining(
        batch=BATCH, lr=0.1, momentum=0.9, weight_decay=2e-3, epochs=2,
        objective=functools.partial(objectives.calfat_released, attack=attack),
    )  # fmt: skip
    ours = [train_client(Client(problem, start, k, 0), local) for k in range(3)]
    stubs: dict[str, dict[str, Any]] = {"tensorboardX": {"SummaryWriter": None}, "tqdm": {"tqdm": iter}}
    with replaced(sys, argv=["fat.py", "--dataset", "cifar10", "--lr", "0.1", "--local_ep", "1"]):  # noqa: SIM117
        with imported(folder, "fat", "utils", stubs=stubs) as (fat, utils):
            theirs = [_trained(fat, utils, problem, start, k, local) for k in range(3)]
            mean = utils.average_weights([dict(state) for state in theirs])
    counted = {name for name in start if name.endswith("num_batches_tracked")}
    rows = []
    for k, (update, state) in enumerate(zip(ours, theirs, strict=True)):
        rows.append(
            equal(f"calfat.client.{k}", "LocalUpdate.pgd_train, two epochs", "calfat_released, pgd_kl", "run",
                  difference(_without(update.model, counted), _without(state, counted)))
        )  # fmt: skip
    context: Any = None
    mixed = mix(ours, uniform(ours, context), start, problem.model)
    rows.append(
        equal("calfat.round", "average_weights after pgd_train", "fedavg, uniform, calfat_released", "run",
              difference(_without(mixed, counted), _without(mean, counted)))
    )  # fmt: skip
    plain = functools.partial(objectives.calfat, attack=attack)
    scaled = [objective(*_step(problem), class_counts(problem, 0))[0]
              for objective in (plain, functools.partial(objectives.calfat_released, attack=attack))]  # fmt: skip
    rows.append(
        differs("calfat.temperature", "maxMarginLoss, s=10", "calfat", "output", difference(*scaled), 1e-4,
                "without the temperature of its code")
    )  # fmt: skip
    return rows


def _step(problem: Problem) -> tuple[nn.Module, Tensor, Tensor, torch.Generator]:
    return problem.model, problem.images[:4].float() / 255, problem.labels[:4], generator(0, "attack")


def _trained(fat: Any, utils: Any, problem: Problem, start: Any, k: int, local: LocalTraining) -> dict[str, Tensor]:
    """Client k by their training loop: our batches, and the noise of its attack from our stream."""
    problem.model.load_state_dict(start)
    held = utils.record_net_data_stats(problem.labels.numpy(), {0: problem.shards[k].numpy()}, "")
    (fat.args.cls_num_list,) = fat.get_cls_num_list(held)
    client: Any = fat.LocalUpdate.__new__(fat.LocalUpdate)
    client.args = fat.args
    client.train_loader = [(batch.x, batch.y) for batch in batches(problem, k, 0, local)]
    noise = generator(problem.seed, "attack", 0, k)
    with replaced(torch, randn=lambda shape: torch.empty(shape).normal_(generator=noise)):
        client.pgd_train(problem.model, None)
    return copy_state(problem.model)


def _without(state: Any, names: set[str]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name not in names}


def awp(folder: Path) -> list[Row]:
    """Loss and gradient at the weights that `AdvWeightPerturb` perturbs, beside those of `awp_at`."""
    gamma = 0.01
    rows: list[Row] = []
    problem = _clients()
    x, y, start = problem.images[:8].float() / 255, problem.labels[:8], copy_state(problem.model)
    with imported(folder / "AT_AWP", "utils_awp") as (module,):
        theirs, proxy = small_cnn((3, 8, 8), 10, width=4), small_cnn((3, 8, 8), 10, width=4)
        theirs.load_state_dict(start)
        theirs.train()
        adversary = module.AdvWeightPerturb(theirs, proxy, torch.optim.SGD(proxy.parameters(), lr=0.01), gamma)
        found = adversary.calc_awp(x, y)
        adversary.perturb(found)
        loss = F.cross_entropy(theirs(x), y)
        loss.backward()
        adversary.restore(found)
    ours = problem.model
    ours.load_state_dict(start)
    value, _ = objectives.awp_at(ours, x, y, torch.Generator(), attack=lambda m, x, y, g: x, gamma=gamma)
    value.backward()
    slopes = [{n: w.grad for n, w in model.named_parameters() if w.grad is not None} for model in (ours, theirs)]
    statistics = [dict(model.named_buffers()) for model in (ours, theirs)]
    said = "AdvWeightPerturb, perturb"
    rows.append(equal("awp.loss", said, "awp_at", "output", difference(value, loss)))
    # Biases before batch normalisation have no gradient but rounding.
    kept = [{n: g for n, g in slope.items() if not n.endswith("conv1.bias") and not n.endswith("conv2.bias")}
            for slope in slopes]  # fmt: skip
    rows.append(equal("awp.gradient", said, "awp_at", "gradient", difference(*kept)))
    rows.append(equal("awp.statistics", said, "awp_at", "output", difference(*statistics), note="running statistics"))
    return rows


def fedrbn(folder: Path) -> list[Row]:
    """Two AT users and an ST user by `train`, then the ST user's statistics by `copy_multi_dual_noise_bn`."""
    problem = replace(_clients(), model=_dual())
    start = copy_state(problem.model)
    attack = functools.partial(evasion.pgd, eps=8 / 255, step=2 / 255, steps=7)
    at = LocalTraining(batch=BATCH, lr=0.01, objective=functools.partial(objectives.dual_at, attack=attack))
    locals = [at, at, replace(at, objective=objectives.standard)]
    ours = [train_client(Client(problem, start, k, 0), local).model for k, local in enumerate(locals)]

    @contextlib.contextmanager
    def in_eval_mode(model: nn.Module) -> Iterator[None]:
        model.eval()
        yield
        model.train()

    stubs: dict[str, dict[str, Any]] = {
        "advertorch": {}, "advertorch.context": {"ctx_noparamgrad_and_eval": in_eval_mode},
        "advertorch.attacks": {"LinfPGDAttack": None}, "federated.core": {"ModelAccumulator": None},
        "federated.baselines": {"train_free": None}, "utils.attack": {"FreeAttack": _Never, "AffineAttack": _Never},
    }  # fmt: skip
    names = ("federated.learning", "federated.aggregation", "nets.dual_bn")
    with imported(folder, *names, stubs=stubs) as (learning, aggregation, layers):
        theirs = []
        for k, local in enumerate(locals):
            network = _dual(layers)
            network.load_state_dict(_as_theirs(start))
            noise = generator(problem.seed, "attack", 0, k)
            perturb = functools.partial(_perturbed, network, attack, noise)
            seen = [(batch.x, batch.y) for batch in batches(problem, k, 0, local)]
            learning.train(
                network, seen, torch.optim.SGD(network.parameters(), lr=0.01), F.cross_entropy, CPU,
                adversary=_Instead(perturb) if k < 2 else None, att_BNn=True,
            )  # fmt: skip
            theirs.append(copy_state(network))
        said = "train, one epoch"
        rows = [
            equal(f"fedrbn.client.{k}", said, "dual_at" if k < 2 else "standard", "run",
                  difference(_counted(_as_theirs(own)), _counted(state)))
            for k, (own, state) in enumerate(zip(ours, theirs, strict=True))
        ]  # fmt: skip
        aggregation.copy_multi_dual_noise_bn(theirs[:2], theirs[2], src_weight_mode="cos")
    kept = [{name: own[name] for name in normalisation(problem.model)} for own in ours]
    moved = _as_theirs(propagate(dict(enumerate(kept)), [0, 1])[2])
    rows.append(
        equal("fedrbn.propagation", "copy_multi_dual_noise_bn, cos", "propagate", "output",
              difference(_counted(moved), {name: theirs[2][name] for name in _counted(moved)}))
    )  # fmt: skip
    return rows


class _Never:
    """A class of attacks that is not compared."""


class _Instead:
    """An adversary of theirs with our attack."""

    def __init__(self, perturb: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.perturb = perturb


def _perturbed(network: nn.Module, attack: Any, noise: torch.Generator, x: Tensor, y: Tensor) -> Tensor:
    found: Tensor = attack(network, x, y, noise)
    return found


def _dual(layers: Any = None) -> nn.Module:
    """Our network with our layers of two statistics, or with theirs and the switch that their networks have."""
    if layers is None:
        torch.manual_seed(0)
        return small_cnn((3, 8, 8), 10, width=4, norm="dual")
    network = small_cnn((3, 8, 8), 10, width=4)
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            setattr(network, name, layers.DualBatchNorm2d(module.num_features))

    def set_bn_mode(attacked: bool) -> None:
        for module in network.modules():
            if isinstance(module, layers.DualNormLayer):
                module.clean_input = not attacked

    network.set_bn_mode = set_bn_mode  # type: ignore[assignment]
    return network


def _as_theirs(state: Any) -> dict[str, Tensor]:
    """Our tensors under their names."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        layer, _, own = name.rpartition(".")
        kind, _, what = own.partition("_")
        if kind == "attacked":
            found[f"{layer}.noise_bn.running_{what}"] = value
        elif kind in ("running", "num"):
            found[f"{layer}.clean_bn.{own}"] = value
            found.setdefault(f"{layer}.noise_bn.{own}", value)
        else:
            found[name] = value
    return found


def _counted(state: Any) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}


# --- aggregators --------------------------------------------------------------------------------------------------


def _uploads(seed: int) -> list[Tensor]:
    """Ten vectors around a common one, two of them far away."""
    draws = torch.Generator().manual_seed(seed)
    uploads = 1 + torch.randn(10, 40, generator=draws)
    uploads[[3, 7]] = 8 * torch.randn(2, 40, generator=draws) - 5
    return list(uploads)


def _ours(name: str, uploads: Sequence[Tensor], memory: Any = None, **settings: Any) -> tuple[Tensor, Mixing]:
    """One of our aggregators on vectors, from a model of zeros."""
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(len(uploads[0])))
    stats = Stats(1.0, 1.0, 0.5, 1, 1.0, 1)
    updates = [Update(k, 1, {"w": u}, stats) for k, u in enumerate(uploads)]
    problem = Problem(model, torch.empty(0), torch.empty(0), [torch.empty(0)] * len(updates), 2, 0, CPU)
    broadcast = {"w": torch.zeros(len(uploads[0]))}
    mixing = getattr(robust_aggregators, name)(
        updates, Context(0, 1, problem, broadcast, memory or {}, 0.1), **settings
    )
    return mix(updates, mixing, broadcast, model)["w"], mixing


def _compared(prefix: str, pairs: Sequence[tuple[str, str, Callable[..., Any], dict[str, Any], str]]) -> list[Row]:
    """(what theirs is called, ours, theirs, our settings, why they differ or "") on three sets of uploads."""
    rows: list[Row] = []
    for said, name, theirs, settings, why in pairs:
        apart = max(
            difference(_ours(name, uploads, **settings)[0], theirs(uploads)) for uploads in map(_uploads, range(3))
        )
        row = differs if why else equal
        rows.append(row(f"{prefix}.{name}.{len(rows)}", said, name, "output", apart, 1e-4, why))
    return rows


def blades(folder: Path) -> list[Row]:
    """Median, trimmed mean, RFA, multi-Krum and centred clipping of Blades."""
    with imported(folder / "fllib/aggregators", "aggregators", "multikrum", "centeredclipping") as (
        rules,
        krum,
        clipping,
    ):
        rows = _compared(
            "blades",
            [
                ("Median", "coordinate_median", rules.Median(), {}, ""),
                ("Trimmedmean(2)", "trimmed_mean", rules.Trimmedmean(2), {"byzantine": 2}, ""),
                ("GeoMed(maxiter=4, eps=1e-5)", "rfa", rules.GeoMed(4, 1e-5), {}, ""),
                ("Multikrum(2)", "krum", krum.Multikrum(2), {"byzantine": 2}, ""),
            ],
        )
        line = [torch.tensor([u]) for u in (0.0, 1.0, 5.0, 8.0, 11.0)]
        theirs, (ours, _) = krum.Multikrum(1)(line), _ours("krum", line, byzantine=1)
        rows.append(
            differs("blades.krum.powers", "Multikrum(1) of 0, 1, 5, 8, 11", "krum", "output", difference(ours, theirs),
                    1e-4, "squares squared distances")
        )  # fmt: skip
        rows.append(_two_rounds("blades", clipping.Centeredclipping(5.0, 5), 5.0, 5))
    return rows


def _two_rounds(prefix: str, theirs: Any, radius: float, iterations: int) -> Row:
    """Centred clipping in two rounds, the second from the centre of the first."""
    first, second = _uploads(0), _uploads(1)
    one, mixing = _ours("centred_clipping", first, radius=radius, iterations=iterations)
    two, _ = _ours("centred_clipping", second, mixing.memory, radius=radius, iterations=iterations)
    apart = max(difference(one, theirs(first)), difference(two, theirs(second)))
    said = f"{type(theirs).__name__}({radius:g}, {iterations}), two rounds"
    return equal(f"{prefix}.centred_clipping", said, "centred_clipping", "output", apart)


def byzantine(folder: Path) -> list[Row]:
    """The same of the authors of centred clipping."""
    names = ("coordinatewise_median", "trimmed_mean", "krum", "rfa", "clipping")
    quiet = {"codes.utils": {"log": lambda *_: None, "log_dict": lambda *_: None}}
    with imported(folder, *(f"codes.aggregator.{name}" for name in names), stubs=quiet) as (
        median,
        mean,
        krum,
        rfa,
        clip,
    ):
        rows = _compared(
            "byzantine",
            [
                ("CM", "coordinate_median", median.CM(), {}, ""),
                ("TM(2)", "trimmed_mean", mean.TM(2), {"byzantine": 2}, ""),
                ("Krum(10, 2, 1)", "krum", krum.Krum(10, 2, 1), {"byzantine": 2}, ""),
                ("Krum(10, 2, 4)", "multi_krum", krum.Krum(10, 2, 4), {"byzantine": 2, "keep": 4}, "gives a sum"),
                ("RFA(T=4, nu=1e-5)", "rfa", rfa.RFA(4, 1e-5), {}, "starts at 0, not at the mean"),
                (
                    "RFA(T=200, nu=1e-5)",
                    "rfa",
                    rfa.RFA(200, 1e-5),
                    {"iterations": 200},
                    "steps end where the sum falls by a millionth",
                ),
                ("RFA(T=200, nu=1e-5)", "geometric_median", rfa.RFA(200, 1e-5), {}, ""),
            ],
        )
        rows.append(_two_rounds("byzantine", clip.Clipping(5.0, 3), 5.0, 3))
    return rows
