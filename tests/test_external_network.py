"""Networks and attacks in the forms that users have them: objects, methods, partials, other types, lazy layers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import members
import numpy
import pytest
import torch
from torch import nn

import fatbench
from fatbench.engine.setup import Runtime, network_of
from fatbench.errors import FatbenchError, SpecError
from fatbench.models import external_network as networks

LINEAR = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


class Classifier:
    """A network as an object that is called."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class Rescales(nn.Module):
    """Changes its images in place, or not."""

    def __init__(self, in_place: bool, linear: nn.Module) -> None:
        super().__init__()
        self.linear, self.in_place = linear, in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.sub_(0.1).div_(0.9) if self.in_place else (x - 0.1) / 0.9)


FORMS: dict[str, Callable[[], Any]] = {
    "a function": lambda: lambda x: LINEAR(x),
    "an object": lambda: Classifier(LINEAR),
    "a bound method": lambda: Classifier(LINEAR).logits,
    "its forward": lambda: LINEAR.forward,
    "a partial": lambda: functools.partial(lambda module, x: module(x), LINEAR),
    "TorchScript": lambda: torch.jit.script(LINEAR),
    "float64": lambda: copy.deepcopy(LINEAR).double(),
}


@pytest.mark.filterwarnings("ignore")  # of TorchScript
@pytest.mark.parametrize("name", ["fgsm", "autoattack", "torchattacks", "exact_linear"])
@pytest.mark.parametrize("form", FORMS)
def test_every_attack_takes_what_is_called_with_images(form: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    members.short_autoattack(monkeypatch)
    x, y = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3])
    settings = {"attack": "FGSM", "eps": 0.1} if name == "torchattacks" else {"eps": 0.1}
    models = LINEAR, FORMS[form]()
    expected, found = (fatbench.attacks.attack(name, model, x, y, seed=0, **settings) for model in models)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_images_of_another_type_than_the_weights_are_attacked(dtype: torch.dtype) -> None:
    x, y = torch.full((2, 1, 8, 8), 0.5, dtype=dtype), torch.tensor([0, 1])
    found = fatbench.attacks.fgsm(LINEAR, x, y, eps=0.25)
    assert found.dtype == dtype and torch.equal(found.float(), fatbench.attacks.fgsm(LINEAR, x.float(), y, eps=0.25))


def test_a_network_that_changes_its_images_is_attacked_on_its_own_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    members.short_autoattack(monkeypatch)
    x, y = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3])
    kept = x.clone()
    models = Rescales(True, LINEAR), Rescales(False, LINEAR)
    for name, settings in {"pgd": {"step": 0.02, "steps": 2}, "autoattack": {}}.items():
        settings |= {"eps": 0.05, "seed": 0}
        found, expected = (fatbench.attacks.attack(name, model, x, y, **settings) for model in models)
        torch.testing.assert_close(found, expected)
        assert torch.equal(x, kept)


def test_modules_that_a_callable_holds_are_evaluated_in_eval_mode_and_left_as_they_are() -> None:
    with_dropout = nn.Sequential(nn.Dropout(0.5), LINEAR).train()
    x, y = torch.rand(20, 1, 8, 8), torch.zeros(20, dtype=torch.int64)
    expected = (LINEAR((x * 255).round() / 255).argmax(1) == 0).double().mean()
    for model in (with_dropout.forward, functools.partial(lambda m, x: m(x), with_dropout), Classifier(with_dropout)):
        result = fatbench.evaluate(model, (x, y), [])
        assert result.accuracy == {"natural": pytest.approx(expected)} and with_dropout.training


class Threshold:
    """An attack that is an object."""

    def __init__(self, step: float) -> None:
        self.step = step

    def __call__(self, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + self.step).clamp(0, 1)

    def in_numpy(self, model: Any, x: torch.Tensor, y: torch.Tensor) -> numpy.ndarray:
        return (x + self.step).clamp(0, 1).double().numpy()

    def epsilons(self, model: Any, x: Any, y: Any, *, epsilons: Any) -> Any:
        raise AssertionError


def test_attacks_are_objects_bound_methods_and_partials_and_may_return_arrays() -> None:
    x, y = torch.rand(20, 1, 8, 8), torch.zeros(20, dtype=torch.int64)
    one = Threshold(0.1)
    attacks = [one, one.in_numpy, functools.partial(Threshold.__call__, one)]
    accuracies = [fatbench.evaluate(LINEAR, (x, y), [attack]).accuracy for attack in attacks]
    assert len({value for found in accuracies for name, value in found.items() if name != "natural"}) == 1
    names = ("threshold", "in_numpy", "__call__")
    assert [list(found) for found in accuracies] == [["natural", name] for name in names]


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        (Threshold(0.1).epsilons, r"epsilons is one of \(model, x, y, epsilons=\): give a function that calls it"),
        (max, "max does not say of what"),
        (object(), r"expected names, mappings or functions \(model, x, y\), got an object$"),
        (lambda model, x, y: None, "the attack returns a NoneType, not images"),
        (lambda model, x, y: x[:1], r"the attack returns torch.float32 \(1, 1, 8, 8\), not images \(20, 1, 8, 8\)"),
        (lambda model, x, y: (255 * x).byte(), "the attack returns torch.uint8"),
        (3, "attacks: .* got 3"),
    ],
)
def test_what_is_no_attack_is_named(attack: Any, said: str) -> None:
    with pytest.raises(FatbenchError, match=said):
        fatbench.evaluate(LINEAR, (torch.rand(20, 1, 8, 8), torch.zeros(20, dtype=torch.int64)), [attack])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_of_another_type_are_evaluated(dtype: torch.dtype) -> None:
    """Images are given to them in their type."""
    x, y = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 10
    expected = fatbench.evaluate(LINEAR, (x, y), ["fgsm"]).accuracy
    found = fatbench.evaluate(copy.deepcopy(LINEAR).to(dtype), (x, y), ["fgsm"]).accuracy
    assert found == (expected if dtype == torch.float64 else pytest.approx(expected, abs=0.1))


LAZY = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.Dropout(0.5), nn.LazyLinear(10))
"""


def test_lazy_layers_of_a_file_take_their_sizes_from_the_images(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(LAZY)
    trained = networks.network(f"{tmp_path}/net.py:make", (1, 8, 8), 10)
    assert trained.training and trained[1].in_features == 64
    torch.save(trained.state_dict(), tmp_path / "lazy.pt")
    built = networks.network(f"{tmp_path}/net.py:make", (1, 8, 8), 10)
    networks.load(built, "lazy.pt", torch.load(tmp_path / "lazy.pt"))
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(built.eval()(x), trained.eval()(x))
    with pytest.raises(SpecError, match=r"holds another network's weights: 1\.weight is 16x64, 16x81 needed"):
        networks.load(networks.network(f"{tmp_path}/net.py:make", (1, 9, 9), 10), "lazy.pt", built.state_dict())


def test_a_network_of_a_suite_that_changes_its_images_gets_its_own_copy() -> None:
    """TRADES passes the same images twice, and an attack asks for their gradient."""
    runtime, x = Runtime(Path(), torch.device("cpu")), torch.rand(3, 1, 8, 8)

    def network(in_place: bool) -> nn.Module:
        return network_of(runtime, 0, lambda shape, classes: Rescales(in_place, LINEAR), (1, 8, 8), 10)

    changing, other = network(True), network(False)
    kept = x.clone()
    assert torch.equal(changing(x), other(x)) and torch.equal(x, kept) and changing.training
    gradients = [torch.autograd.grad(m(leaf := x.clone().requires_grad_()).sum(), leaf)[0] for m in (changing, other)]
    assert torch.equal(*gradients)
    assert not other._forward_pre_hooks
