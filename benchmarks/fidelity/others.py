"""FedNova's normaliser, FedGKT's loss and edge network, FedAUX's scores and teacher, FedSoftBetter's weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from benchmarks.fidelity.measure import Row, difference, differs, equal, network
from benchmarks.fidelity.sources import imported
from fatbench.engine.local import LocalTraining
from fatbench.engine.rounds import Context, Problem, Stats, Update
from fatbench.methods import aggregators, objectives
from fatbench.methods.algorithms.auxiliary import separator
from fatbench.methods.algorithms.distillation import divergence
from fatbench.methods.algorithms.fedaux import ensemble
from fatbench.methods.algorithms.fednova import travelled_distance
from fatbench.models.edge import edge_resnet8

STEPS = 7


def fednova(folder: Path) -> list[Row]:
    """How far a client's steps count: the optimizer's own counter after seven steps, beside `travelled_distance`."""
    rows = []
    with imported(folder, "distoptim.FedNova", stubs={"comm_helpers": _COMMUNICATION}) as (module,):
        for momentum, mu in ((0.0, 0.0), (0.9, 0.0), (0.0, 0.5), (0.9, 0.5)):
            weight = nn.Parameter(torch.zeros(1))
            optimizer = module.FedNova([weight], ratio=1.0, gmf=0, mu=mu, lr=0.1, momentum=momentum)
            for _ in range(STEPS):
                weight.grad = torch.ones(1)
                optimizer.step()
            proximal: Any = functools.partial(objectives.squared, mu=mu) if mu else None
            local = LocalTraining(batch=1, lr=0.1, objective=objectives.standard, momentum=momentum, proximal=proximal)
            counted, ours = float(optimizer.local_normalizing_vec), travelled_distance(STEPS, local)
            moved = -float(weight) / 0.1
            said = f"momentum {momentum}, mu {mu}"
            name = f"fednova.{'momentum' if momentum else 'plain'}{'.proximal' if mu else ''}"
            row = differs if momentum and mu else equal
            note = "its counter is not how far its own steps move" if momentum and mu else ""
            rows.append(
                row(name, f"FedNova.step, {said}", "travelled_distance", "output", _apart(ours, counted), 1e-6, note)
            )
            rows.append(
                equal(f"{name}.moved", f"the weight after FedNova.step, {said}", "travelled_distance",
                      "one-step change",
                      _apart(ours, moved), 1e-5)
            )  # fmt: skip
    return rows


_COMMUNICATION: dict[str, Any] = {"communicate": None, "flatten_tensors": None, "unflatten_tensors": None}


def _apart(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-12)


def fedgkt(folder: Path) -> list[Row]:
    """FedML's distillation loss with its gradient, and FedGKT's ResNet-8 of the edge."""
    draws = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(16, 10, generator=draws) for _ in range(2))
    rows = []
    with imported(folder / "python/fedml/simulation/mpi/fedgkt", "utils") as (utils,):
        for temperature in (1.0, 3.0):
            found = []
            for loss in (utils.KL_Loss(temperature), functools.partial(divergence, temperature=temperature)):
                z = student.clone().requires_grad_()
                value = loss(z, teacher)
                found.append((value.detach(), torch.autograd.grad(value, z)[0]))
            (theirs, slope), (ours, our_slope) = found
            named = f"fedgkt.kl.{temperature:g}"
            said = f"KL_Loss({temperature:g})"
            rows.append(equal(f"{named}.output", said, "divergence", "output", difference(ours, theirs)))
            rows.append(equal(f"{named}.gradient", said, "divergence", "gradient", difference(our_slope, slope)))
    images, labels = torch.rand(8, 3, 32, 32, generator=draws), torch.arange(8)
    with imported(folder / "python/fedml/model/cv/resnet56", "resnet_client") as (client,):

        def theirs_made() -> nn.Module:
            return _First(client.resnet8_56(10))

        def ours_made() -> nn.Module:
            model = edge_resnet8((3, 32, 32), 10, start="kaiming")
            return nn.Sequential(model.get_submodule("extractor"), model.get_submodule("classifier"))

        positions = list(ours_made().state_dict())

        def names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
            mapped = dict(zip(theirs_made().state_dict(), positions, strict=True))
            return {mapped[name]: value for name, value in state.items()}

        rows += network(
            "fedgkt.edge",
            "resnet8_56",
            "edge_resnet8, start: kaiming, the edge",
            theirs_made,
            ours_made,
            names,
            images,
            labels,
        )
    return rows


class _First(nn.Module):
    """A network that returns features too, without them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x)[0]
        return logits


def fedaux(folder: Path) -> list[Row]:
    """Certainty scores without noise, and the teacher that the server distils."""
    draws = torch.Generator().manual_seed(0)
    own, negatives, asked = (
        torch.randn(n, 6, generator=draws) + shift for n, shift in ((20, 1.0), (30, 0.0), (9, 0.5))
    )
    with imported(folder / "code", "fl_devices", stubs={"tqdm": {"tqdm": iter}}) as (devices,):
        client: Any = devices.Client.__new__(devices.Client)
        client.model = SimpleNamespace(eval=lambda: None, extract_features=lambda x: x)
        loaders = [(own, None)], [(negatives, None)], [((asked, None), torch.arange(9))]
        theirs = client.extract_features_and_compute_scores(*loaders, lambda_reg=0.01, eps_delt=None)
        weights, row_of = separator(own, negatives, 0.01, True)
        ours = torch.sigmoid(-row_of(asked) @ weights).float() + 1e-8
        rows = [
            equal("fedaux.scores", "extract_features_and_compute_scores", "separator, privacy: released", "output",
                  difference(ours, theirs))
        ]  # fmt: skip
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
        images = torch.randint(0, 256, (9, 3, 2, 2), generator=draws, dtype=torch.uint8)
        problem = Problem(
            model, images, torch.zeros(9, dtype=torch.int64), [torch.arange(9)], 4, 0, torch.device("cpu")
        )
        states = [{n: torch.randn(v.shape, generator=draws) for n, v in model.state_dict().items()} for _ in range(3)]
        scores = torch.rand(3, 9, generator=draws) + 0.1
        updates = [Update(k, 1, state, _stats(1.0, 1)) for k, state in enumerate(states)]
        teacher = ensemble(problem, updates, scores, images, 9, True).softmax(1)
        rows.append(equal("fedaux.teacher", "Server.distill, weighted_logits_precomputed", "ensemble", "output",
                          difference(teacher, _distilled(devices, model, images, states, scores))))  # fmt: skip
    return rows


def _distilled(
    devices: Any, model: nn.Module, images: Tensor, states: list[dict[str, Tensor]], scores: Tensor
) -> Tensor:
    """The target of the loss that the server's distillation reads."""
    seen: list[Tensor] = []

    class Heard(nn.KLDivLoss):
        def forward(self, student: Tensor, target: Tensor) -> Tensor:
            seen.append(target)
            return super().forward(student, target)

    clients = []
    for state, score in zip(states, scores, strict=True):
        client: Any = devices.Client.__new__(devices.Client)
        network: Any = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
        network.load_state_dict(state)
        client.model, client.scores = network, score
        clients.append(client)
    server: Any = devices.Server.__new__(devices.Server)
    server.model_dict, server.optimizer_dict = {"x": model}, {"x": torch.optim.SGD(model.parameters(), 0.0)}
    server.distill_loader = [((images.float() / 255, None), torch.arange(9))]
    from benchmarks.fidelity.sources import Instead, replaced

    zeros = functools.partial(_zeros)
    with replaced(torch.nn, KLDivLoss=Heard), replaced(devices, torch=Instead(torch, zeros=zeros), tqdm=iter):
        server.distill(clients, mode="weighted_logits_precomputed", num_classes=4)
    return seen[0]


def _zeros(shape: list[int], device: str = "cpu") -> Tensor:
    return torch.zeros(shape)


def fedsoftbetter(folder: Path) -> list[Row]:
    """Their merger of three clients, beside `fedsoftbetter_released`, with batches of one length."""
    draws = numpy.random.default_rng(0)
    sizes, batch = [64, 128, 192], 32
    losses = [float(x) for x in draws.uniform(0.5, 2.0, 3)]
    updates = [
        Update(k, n, {}, _stats(loss, n // batch)) for k, (n, loss) in enumerate(zip(sizes, losses, strict=True))
    ]
    context: Any = SimpleNamespace(round=1)
    rows = []
    with imported(folder / "src", "soft_mergers") as (mergers,):
        for temperature in (-20.0, -5.0, 15.0):
            outputs = [
                SimpleNamespace(
                    client_id=k, round=1, size=n, weight={"w": torch.eye(3)[k]}, losses=[loss * (n // batch) / n]
                )
                for k, (n, loss) in enumerate(zip(sizes, losses, strict=True))
            ]
            merged, _ = mergers.Merger_FedSoft(temperature)(outputs, None)
            ours = aggregators.fedsoftbetter_released(updates, _context(context), temperature=temperature).weights
            said = f"Merger_FedSoft({temperature:g})"
            value = difference(torch.tensor(ours), merged["w"])
            rows.append(equal(f"fedsoftbetter.{temperature:g}", said, "fedsoftbetter_released", "output", value))
    return rows


def _context(any: Any) -> Context:
    found: Context = any
    return found


def _stats(loss: float, batches: int) -> Stats:
    return Stats(loss=loss, loss_released=loss, accuracy=0.0, steps=1, momentum_steps=1.0, batches=batches)
