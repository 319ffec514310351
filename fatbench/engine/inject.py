"""A function is given what it asks for: a parameter named `broadcast_losses` is given the losses, under any name.

    def shy(updates, context, broadcast_losses): ...

    asks(shy, "broadcast_losses")                                   True: have the clients measure them
    shy(updates, context, **granted(shy, {"broadcast_losses": measured}))

A function that is a setting of another asks through it: `requested_arguments` binds the losses to the inner
function, and the outer
one calls it with `(updates, context)`. What no parameter names is not computed. `fatbench.suite.signatures` has the
names of each kind, by which a suite is checked before anything runs; the function that offers one says what it is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fatbench.suite.signatures import OFFERS, TABLES


def asks(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter called `name` before the `*` of its settings, or one of its settings asks."""
    if name in _parameters(getattr(function, "func", function)):
        return True
    return any(asks(inner, name) for inner, offered in _inner(function).values() if offered is None or name in offered)


def requested_arguments(function: Callable[..., Any], offers: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """The offers that a function asks for, computed, as keyword arguments; settings that ask, with theirs bound."""
    parameters = _parameters(getattr(function, "func", function))
    arguments = {name: offer() for name, offer in offers.items() if name in parameters}
    for setting, (inner, offered) in _inner(function).items():
        if bound := requested_arguments(
            inner, {name: offers[name] for name in offers if offered is None or name in offered}
        ):
            arguments[setting] = functools.partial(inner, **bound)
    return arguments


def _inner(function: Callable[..., Any]) -> dict[str, tuple[Callable[..., Any], tuple[str, ...] | None]]:
    """The functions among the settings bound to a function, and what each may ask for; None: its kind is not known."""
    bound_functions = {key: value for key, value in getattr(function, "keywords", {}).items() if callable(value)}
    return {key: (value, _offered(function.func, key)) for key, value in bound_functions.items()}  # type: ignore[attr-defined]


@functools.cache
def _offered(function: Callable[..., Any], setting: str) -> tuple[str, ...] | None:
    """What a function of the kind that the annotation of a setting names may ask for."""
    kind = str(getattr(inspect.unwrap(function), "__annotations__", {}).get(setting)).removesuffix(" | None")
    return OFFERS.get(kind, ()) if kind in TABLES else None


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
