"""Any member of any table for the tests: `fatbench.testing`, and what its types allow besides."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pyautoattack
import pytest
from hypothesis import strategies as st

from fatbench import testing
from fatbench.engine.inject import requested_arguments
from fatbench.errors import SpecError
from fatbench.methods import knowing_adversaries
from fatbench.suite import calls, cells, entry, signatures
from fatbench.testing import choices, limits, settings, spec

__all__ = [
    "allowed", "arguments", "given_what_it_asks", "member", "passes", "refusals", "settings", "short_autoattack",
    "short_search", "takes",
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


def refusal_of(cell: Mapping[str, Any]) -> str:
    """What is said of a cell that cannot be; empty: it can."""
    try:
        cells.canonical(cell, "here")
    except SpecError as error:
        return str(error)
    return ""


def given_what_it_asks(function: Any, **offers: Any) -> Any:
    """The function with what the engine would give it, out of `offers`."""
    asked = requested_arguments(function, {key: lambda v=v: v for key, v in offers.items()})
    return functools.partial(function, **asked)


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


def short_search(patch: pytest.MonkeyPatch) -> None:
    """`aimed`, whose search attacks the next model forty times an upload, looks at two factors."""
    patch.setattr(knowing_adversaries, "_best", lambda value, search, both=False: max((0.0, 1.0), key=value))
