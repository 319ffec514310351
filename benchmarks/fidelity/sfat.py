"""SFAT's two training scripts, run whole, and its attacks, beside ours.

The scripts run as they are, with our batches, our draws for the attacks and our order of the clients in the place of
theirs, from the same weights, in float64: rounding would turn signs of gradients. Their data sets, their tests after
each round and their log are left out. The network inside is ours, narrow, under their names of its tensors; their own
networks are compared by themselves.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fidelity.measure import Row, difference, differs, equal, network
from benchmarks.fidelity.sources import Instead, imported, replaced
from fatbench.engine import local as engine_local
from fatbench.engine.cohort import draw_cohort
from fatbench.engine.local import LocalTraining, batches
from fatbench.engine.randomness import forked, generator
from fatbench.engine.rounds import Problem, State, Tensors
from fatbench.methods import aggregators, evasion, objectives
from fatbench.methods.algorithms.centralized import centralized
from fatbench.methods.algorithms.fedavg import fedavg
from fatbench.methods.algorithms.scaffold_sfat import scaffold_sfat
from fatbench.models.nin import nin
from fatbench.models.resnet import resnet18
from fatbench.models.small_cnn import small_cnn

MODELS: dict[str, tuple[str, str, Callable[..., nn.Module]]] = {  # theirs: as a word, as a function; ours
    "nin": ("NIN", "NIN", nin),
    "small_cnn": ("SmallCNN", "SmallCNN", small_cnn),
    "resnet18": ("resnet18", "ResNet18", resnet18),
}
RADII = {"cifar-10": (8 / 255, 2 / 255), "svhn": (4 / 255, 1 / 255), "cifar-100": (8 / 255, 2 / 255)}
ROUNDS, BATCH, STEPS = 3, 3, 2
SIZES = (
    6,
    7,
    9,
    12,
)  # unequal, and not all whole batches: clients' mean losses are then one thing, the release's another
SEED = 6
# The gradient of a bias before a normalisation is rounding, and FedProx's pull of constant length follows its sign.
ROUNDED = "not comparable: biases before a normalisation follow the sign of rounding"


@dataclass
class Turn:
    """Which client trains now, and where its attacks draw from."""

    noise: torch.Generator = field(default_factory=torch.Generator)


class Epochs:
    """A loader whose passes are those of `batches`: theirs reads it once an epoch."""

    def __init__(self, problem: Problem, client: int, round: int, local: LocalTraining) -> None:
        self.passes: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for batch in batches(problem, client, round, local):
            self.passes.setdefault(batch.epoch, []).append((batch.x, batch.y))
        self.count = 0
        self.dataset = problem.shards[client]

    def __len__(self) -> int:
        return len(self.passes[0])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.count += 1
        return iter(self.passes[self.count - 1])


def compare(folder: Path) -> list[Row]:
    """Every row of SFAT's program."""
    rows = networks(folder)
    torch.set_default_dtype(torch.float64)
    try:
        with replaced(engine_local, pixels=_pixels):
            return rows + evaluations(folder) + list(runs(folder))
    finally:
        torch.set_default_dtype(torch.float32)


def _pixels(problem: Problem, images: Tensor) -> Tensor:
    return images.double() / 255


def networks(folder: Path) -> list[Row]:
    """Their three networks and ours: outputs, gradients, starts and one-step changes."""
    draws = torch.Generator().manual_seed(0)
    x, y = torch.rand(8, 3, 32, 32, generator=draws), torch.arange(8)
    rows: list[Row] = []
    with imported(folder, "models") as (models,):
        for name, (_, theirs, ours) in MODELS.items():

            def made(ours: Callable[..., nn.Module] = ours) -> nn.Module:
                return ours((3, 32, 32), 100 if ours is resnet18 else 10)

            names = {"layers": "features"} if name == "nin" else {}
            rows += network(
                f"sfat.{name}", f"models.{theirs}", name, getattr(models, theirs), made, _named(names), x, y
            )
    return rows


def _named(ours: dict[str, str]) -> Callable[[Any], Tensors]:
    """A renaming of their tensors: the first part of a name."""

    def named(state: Any) -> Tensors:
        back = {theirs: mine for mine, theirs in ours.items()}
        parts = {name: name.split(".", 1) for name in state}
        return {".".join([back.get(part[0], part[0]), *part[1:]]): state[name] for name, part in parts.items()}

    return named


def runs(folder: Path) -> Iterator[Row]:
    """Their scripts and our algorithms."""
    at, trades, mart = (getattr(objectives, name) for name in ("at", "trades", "mart"))
    plain: tuple[Any, dict[str, Any]] = (aggregators.AGGREGATORS["uniform"], {})
    slack: tuple[Any, dict[str, Any]] = (aggregators.sfat_released, {"r": 1.4, "top": 1})
    script = "SFAT.py, whole"
    for name, dataset in (("nin", "cifar-10"), ("small_cnn", "svhn"), ("resnet18", "cifar-100")):
        yield both(folder, f"sfat.slack.{name}", script, name, dataset, at, slack, {})
        yield both(folder, f"sfat.scaffold.{name}", script, name, dataset, at, slack, {"agg-opt": "Scaffold"})
    for name, dataset in (("nin", "cifar-10"), ("small_cnn", "svhn")):
        words = {"agg-opt": "Scaffold", "frac": "0.5"}
        yield both(folder, f"sfat.scaffold.half.{name}", script, name, dataset, at, slack, words)
    yield both(folder, "sfat.fat", script, "nin", "cifar-10", at, plain, {"agg-center": "FedAvg"})
    # ours averages the statistics of batch normalisation by the number of examples
    apart = both(folder, "sfat.fat.small_cnn", script, "small_cnn", "cifar-10", at, plain, {"agg-center": "FedAvg"})
    yield replace(apart, expected=False, note="running statistics by the number of examples")
    yield both(folder, "sfat.fedprox.nin", script, "nin", "cifar-10", at, slack, {"agg-opt": "FedProx"})
    yield both(folder, "sfat.fedprox.small_cnn", script, "small_cnn", "svhn", at, slack, {"agg-opt": "FedProx"})
    for name, objective in (("trades", trades), ("mart", mart)):
        words = {"train-method": name.upper()}
        yield both(folder, f"sfat.{name}", script, "small_cnn", "cifar-10", objective, slack, words)
    for name, dataset in (("nin", "cifar-10"), ("small_cnn", "svhn"), ("resnet18", "cifar-100")):
        yield central(folder, name, dataset)


def both(
    folder: Path,
    id: str,
    script: str,
    name: str,
    dataset: str,
    objective: Any,
    aggregator: tuple[Any, dict[str, Any]],
    words: dict[str, str],
) -> Row:
    """The federated script and our algorithm, three rounds from the same weights: the greatest difference."""
    problem, start = prepared(name)
    fraction = float(words.get("frac", "1.0"))
    local = training(objective, dataset, epochs=2)
    if words.get("agg-opt") == "FedProx":
        local = training(objective, dataset, epochs=2, proximal=_bound(objectives.norm_per_tensor, mu=0.01))
    call = _bound(aggregator[0], **aggregator[1])
    state = State(0, start)
    algorithm: Any = scaffold_sfat if words.get("agg-opt") == "Scaffold" else fedavg
    as_released = algorithm is scaffold_sfat and (
        name != "nin" or fraction < 1
    )  # NIN has no buffers, and all take part
    more = {"buffers": True, "copy_start": True} if as_released else {}
    for done in algorithm(problem, state, rounds=ROUNDS, aggregator=call, local=local, participation=fraction, **more):
        state = done.state
    arguments = {
        "epochs": ROUNDS, "num_users": len(SIZES), "local_ep": 2, "local_bs": BATCH, "num-steps": STEPS,
        "dataset": dataset, "modeltype": MODELS[name][0], "agg-center": "SFAT", "pri": 1.4, "topk": 1, "gpu": "",
        **words,
    }  # fmt: skip
    theirs = federated(folder, problem, start, local, fraction, arguments)
    said = " ".join(f"--{key} {value}" for key, value in words.items())
    how = f"{name}, {algorithm.__name__}" + (", buffers, copy_start" if more else "")
    ours = f"{how}, {aggregator[0].__name__}"
    if local.proximal is not None and name == "small_cnn":
        apart = difference(_without_biases(state.model), _without_biases(theirs))
        return differs(id, f"{script} {said}".strip(), ours, "run", apart, note=ROUNDED)
    value = difference(floats(state.model), floats(theirs))
    return equal(id, f"{script} {said}".strip(), ours, "run", value, note=finite(state.model))


def _without_biases(state: Tensors) -> Tensors:
    """Without SmallCNN's biases before a normalisation, and the running means that hold them."""
    return {
        name: value
        for name, value in floats(state).items()
        if "running" not in name and not (name.startswith("block") and name.endswith("bias"))
    }


def central(folder: Path, name: str, dataset: str) -> Row:
    """Centralized_AT.py and our algorithm, three epochs."""
    problem, start = prepared(name, (sum(SIZES),))
    local = training(objectives.at, dataset, epochs=1)
    state = State(0, start)
    for done in centralized(problem, state, rounds=ROUNDS, local=local, moments="released"):
        state = done.state
    words = {
        "epochs": ROUNDS, "local_bs": BATCH, "num-steps": STEPS, "dataset": dataset,
        "modeltype": MODELS[name][0], "gpu": "",
    }  # fmt: skip
    turn = Turn()
    rounds = [Epochs(problem, 0, t, local) for t in range(ROUNDS)]

    class Loader:
        def __init__(self, *_: Any, shuffle: bool, **__: Any) -> None:
            self.shuffle, self.count = shuffle, 0
            self.dataset = problem.shards[0]

        def __len__(self) -> int:
            return len(rounds[0])

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            if not self.shuffle:
                return iter([])
            t, self.count = self.count, self.count + 1
            turn.noise = generator(SEED, "attack", t, 0)
            forks.enter_context(forked(SEED, "dropout", t, 0))
            return iter(rounds[t])

    with (
        scripts(folder, problem, start, turn),
        replaced(torch.utils.data, DataLoader=Loader),
        contextlib.ExitStack() as forks,
    ):
        theirs = ran(folder / "Centralized_AT.py", words)
    return equal(
        f"sfat.centralized.{name}", "Centralized_AT.py, whole", f"{name}, centralized, moments: released", "run",
        difference(floats(state.model), floats(theirs)), note=finite(state.model),
    )  # fmt: skip


def training(objective: Any, dataset: str, epochs: int, proximal: Any = None) -> LocalTraining:
    """The release's local training: SGD 0.01, momentum 0.9, no weight decay, the inner attack of each objective."""
    eps, step = RADII[dataset]
    inner: Any = _bound(evasion.pgd, eps=eps, step=step, steps=STEPS)
    if objective is objectives.trades:
        inner = _bound(evasion.pgd_kl, eps=eps, step=step, steps=STEPS)
    if objective is objectives.mart:
        inner = _bound(evasion.pgd, eps=eps, step=step, steps=STEPS, start="gaussian")
    return LocalTraining(
        batch=BATCH, lr=0.01, objective=_bound(objective, attack=inner), epochs=epochs, momentum=0.9, proximal=proximal
    )


def prepared(name: str, sizes: tuple[int, ...] = SIZES) -> tuple[Problem, Tensors]:
    """Random images and labels in shards of these sizes, and a network at a start of ours."""
    torch.manual_seed(SEED)
    model = MODELS[name][2]((3, 32, 32), 10, **({"width": 6, "init": "he"} if name == "nin" else {"width": 4}))
    start = {key: value.detach().clone() for key, value in model.state_dict().items()}
    draws = torch.Generator().manual_seed(SEED)
    n = sum(sizes)
    images = torch.randint(0, 256, (n, 3, 32, 32), generator=draws, dtype=torch.uint8)
    labels = torch.randint(0, 10, (n,), generator=draws)
    shards = list(torch.arange(n).split(list(sizes)))
    problem = Problem(model, images, labels, shards, 10, SEED, torch.device("cpu"), path="reference")
    return problem, start


# --- running their scripts ----------------------------------------------------------------------------------------


def federated(
    folder: Path, problem: Problem, start: Tensors, local: LocalTraining, fraction: float, arguments: dict[str, Any]
) -> Tensors:
    """The weights that SFAT.py saves at the end."""
    turn = Turn()
    cohorts = iter([draw_cohort(problem, t, fraction) for t in range(ROUNDS)])
    with scripts(folder, problem, start, turn) as update:
        original = update.LocalUpdate

        class LocalUpdate(original):  # type: ignore[misc, valid-type]
            """Theirs, reading our batches and drawing from our streams."""

            def train_test(self, dataset: Any, idxs: list[int]) -> tuple[Any, Any]:
                self.client = idxs[0]
                return [], []

            def begin(self, t: int) -> None:
                self.trainloader = Epochs(problem, self.client, t, local)
                turn.noise = generator(SEED, "attack", t, self.client)

            def update_weights_at(self, model: nn.Module, global_round: int) -> Any:
                self.begin(global_round)
                with forked(SEED, "dropout", global_round, self.client):
                    return super().update_weights_at(model, global_round)

            def update_weights_scaffold(self, *models: nn.Module, global_round: int) -> Any:
                self.begin(global_round)
                with forked(SEED, "dropout", global_round, self.client):
                    return super().update_weights_scaffold(*models, global_round)

            def inference(self, model: nn.Module) -> tuple[float, float]:
                return 0.0, 0.0

        import numpy

        groups = {k: [k] for k in range(len(problem.shards))}
        utils = sys.modules["utils"]
        with (
            replaced(update, LocalUpdate=LocalUpdate),
            replaced(utils, get_dataset=lambda args: (None, [], groups)),
            replaced(numpy.random, choice=lambda *_, **__: next(cohorts)),
        ):
            return ran(folder / "SFAT.py", arguments)


@contextlib.contextmanager
def scripts(folder: Path, problem: Problem, start: Tensors, turn: Turn) -> Iterator[Any]:
    """Their modules, with our weights, our draws, and no tests of their own; yields the module `update`."""

    class Writer:
        def __init__(self, *_: Any) -> None: ...

        def add_scalar(self, *_: Any) -> None: ...

    def network() -> nn.Module:
        model = copy.deepcopy(problem.model)
        model.load_state_dict(start)
        return model

    def uniform(low: float, high: float, shape: Any) -> Any:
        return torch.empty(tuple(shape)).uniform_(low, high, generator=turn.noise).numpy()

    stubs = {"tensorboardX": {"SummaryWriter": Writer}}
    names = ("models", "attack_generator", "update", "utils")
    with imported(folder, *names, stubs=stubs) as (models, attack, update, utils):
        import numpy

        random = Instead(numpy.random, uniform=uniform)
        nothing: Any = lambda *_, **__: (0.0, 0.0)  # noqa: E731
        networks = {theirs: network for _, theirs, _ in MODELS.values()}
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(models, **networks))
            stack.enter_context(replaced(update, test_inference=nothing))
            stack.enter_context(replaced(utils, get_dataset=lambda args: ([], [], {})))
            drawn = Instead(
                torch,
                randn=lambda shape: torch.randn(shape, generator=turn.noise),
                from_numpy=lambda array: SimpleNamespace(float=lambda: torch.from_numpy(array)),  # stays float64
            )
            stack.enter_context(
                replaced(attack, np=Instead(numpy, random=random), torch=drawn, eval_clean=nothing, eval_robust=nothing)
            )
            yield update


def ran(script: Path, words: dict[str, Any]) -> Tensors:
    """The state that a script's last checkpoint holds."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "here").mkdir()
        (folder / "save" / "objects").mkdir(parents=True)
        argv, cwd = sys.argv, os.getcwd()
        sys.argv = [str(script), *(f"--{key}={value}" for key, value in words.items()), "--out-dir=out"]
        os.chdir(folder / "here")
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            sys.argv = argv
            os.chdir(cwd)
        saved = folder / "here" / "out"
        last = saved / "lastpoint.pth.tar"
        found = torch.load(last if last.exists() else saved / "bestpoint.pth.tar", weights_only=False)
    state: Tensors = found["state_dict"]
    return state


# --- attacks ------------------------------------------------------------------------------------------------------


def evaluations(folder: Path) -> list[Row]:
    """What eval_pgd.py calls on CIFAR-10 and SVHN, beside the attacks of our suites: the greatest pixel."""
    suites = {
        "cifar10": {"fgsm_sfat": {"step": 8 / 255}, "pgd": {"steps": 20, "step": 2 / 255}, "cw": {"step": 2 / 255}},
        "svhn": {"fgsm_sfat": {"step": 1 / 255}, "pgd": {"steps": 20, "step": 1 / 255}, "cw": {"step": 1 / 255}},
    }
    rows = []
    for dataset, ours in suites.items():
        problem, start = prepared("small_cnn", (sum(SIZES),))
        turn = Turn()
        calls: list[dict[str, Any]] = []
        with scripts(folder, problem, start, turn):
            attack = sys.modules["attack_generator"]
            import torchvision

            def noted(model: Any, loader: Any, calls: list[Any] = calls, **words: Any) -> tuple[float, float]:
                calls.append(words)
                return 0.0, 0.0

            data = Instead(torchvision.datasets, CIFAR10=lambda **_: [], SVHN=lambda **_: [])
            saved = {"state_dict": start, "epoch": 1}
            argv = sys.argv
            sys.argv = ["eval_pgd.py", "--net", "SmallCNN", "--dataset", dataset]
            try:
                with (
                    replaced(attack, eval_robust=noted),
                    replaced(torchvision, datasets=data),
                    replaced(torch, load=functools.partial(_given, saved)),
                    replaced(torch.utils.data, DataLoader=lambda *_, **__: []),
                ):
                    runpy.run_path(str(folder / "eval_pgd.py"), run_name="__main__")
            finally:
                sys.argv = argv
            x, y = problem.images[:8].double() / 255, problem.labels[:8]
            model = problem.model.eval()
            model.load_state_dict(start)
            for words, (name, settings) in zip(calls, ours.items(), strict=True):
                turn.noise = torch.Generator().manual_seed(1)
                theirs, _ = attack.PGD(
                    model, x, y, words["epsilon"], words["step_size"], words["perturb_steps"], words["loss_fn"],
                    words["category"], words["random"],
                )  # fmt: skip
                eps = 8 / 255 if dataset == "cifar10" else 4 / 255
                made = evasion.ATTACKS[name](model, x, y, torch.Generator().manual_seed(1), eps=eps, **settings)
                value = float((made - theirs).abs().max())
                said = f"eval_pgd.py --dataset {dataset}, {words['loss_fn']}, {words['perturb_steps']} steps"
                rows.append(equal(f"sfat.attack.{dataset}.{name}", said, name, "output", value, 1e-6))
    return rows


def _given(value: Any, *_: Any, **__: Any) -> Any:
    return value


def floats(state: Tensors) -> Tensors:
    """The tensors that training moves; not the counters of batches, which both sides only carry along."""
    return {name: value for name, value in state.items() if value.is_floating_point()}


def finite(state: Tensors) -> str:
    """What a reader should know of the weights at the end, if anything."""
    bad = sorted(name for name, value in floats(state).items() if not value.isfinite().all())
    below = sorted(name for name, value in state.items() if name.endswith("running_var") and bool((value < 0).any()))
    said = [f"not finite on both sides: {bad[0]}"] if bad else []
    return "; ".join(said + ([f"running variance below zero: {below[0]}"] if below else []))


def _bound(function: Callable[..., Any], **settings: Any) -> Any:
    return functools.partial(function, **settings)
