"""Any member of any table for the tests: `fatbench.testing`, and what its types allow besides."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pyautoattack
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from fatbench import testing
from fatbench.engine.fast.draws import Streams
from fatbench.engine.inject import asks, granted
from fatbench.suite import calls, entry, signatures
from fatbench.testing import choices, limits, settings, spec

__all__ = [
    "allowed", "arguments", "given_what_it_asks", "member", "passes", "refusals", "settings", "short_autoattack",
    "stacks", "takes",
]  # fmt: skip


def allowed(annotation: str, most: int) -> st.SearchStrategy[Any]:
    """Any value that a type allows, of the whole numbers at most `most`."""
    if annotation.endswith(" | None"):
        return st.none() | allowed(annotation.removesuffix(" | None"), most)
    if annotation.startswith("Literal"):
        return st.sampled_from(choices(annotation))
    if annotation == "bool":
        return st.booleans()
    kind, low, high = limits(annotation)
    return st.integers(int(low), most) if kind is int else st.floats(low, high)


def arguments(kind: str, name: str) -> dict[str, Any]:
    """The settings of `spec` as the function takes them: fractions as numbers, calls as functions."""
    return calls.bind(calls.check(kind, spec(kind, name)))


def member(kind: str, name: str, **more: Any) -> functools.partial[Any]:
    """The function with its settings, and with `more` of them, as it takes them, where it has such settings."""
    bound = testing.member(kind, name)
    return functools.partial(bound, **{key: value for key, value in more.items() if takes(kind, name, key)})


def passes(kind: str, call: Any) -> tuple[float, float]:
    """(forward, backward) of an image, as the entry of a canonical call's function says."""
    said = entry.passes(calls.call(kind, call).bound)
    return said.forward, said.backward


def refusals(kind: str, name: str) -> set[str]:
    """The names of what refuses a cell with a function."""
    return {one.__name__ for one in calls.entry(signatures.describe(kind, name)).refuse}


def takes(kind: str, name: str, setting: str) -> bool:
    return setting in {one.name for one in signatures.describe(kind, name).settings}


def given_what_it_asks(function: Any, **offers: Any) -> Any:
    """The function with what the engine would give it, out of `offers`."""
    return functools.partial(function, **granted(function, {key: lambda v=v: v for key, v in offers.items()}))


def short_autoattack(patch: pytest.MonkeyPatch, steps: int = 10, queries: int = 100) -> None:
    """Every AutoAttack that is made from now on takes so many steps, and means over at most two draws."""
    begin = pyautoattack.AutoAttack.__init__

    def short(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.apgd.n_iter = self.apgd_targeted.n_iter = self.fab.n_iter = steps
        self.square.n_queries = queries
        for attack in (self.apgd, self.apgd_targeted):
            attack.eot_iter = min(attack.eot_iter, 2)

    patch.setattr(pyautoattack.AutoAttack, "__init__", short)


@functools.cache
def stacks(name: str) -> bool:
    """Whether clients with this objective may train as one program: it gives the loss of each, whichever they are."""
    if asks(calls.function(signatures.describe("Objective", name)), "client"):
        return False
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    offers = {"class_counts": torch.ones(1, 4), "broadcast": copy.deepcopy(model)}
    objective = given_what_it_asks(member("Objective", name), **offers)
    noise = Streams([torch.Generator(), torch.Generator()])
    losses, _ = objective(model, torch.full((4, 3, 2, 2), 0.5), torch.tensor([0, 1, 2, 3]), noise)
    return losses.shape == (2,)
