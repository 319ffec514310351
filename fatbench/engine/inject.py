"""Dependency injection: a function gets what its parameters name, and nothing else is computed.

    def q_ffl(updates, context, broadcast_losses): ...

    asks(q_ffl, "broadcast_losses")              True: have the clients measure their losses
    q_ffl(updates, context, **requested_arguments(q_ffl, {"broadcast_losses": lambda: losses}))

If the function is a setting of another, it asks through that one: `requested_arguments` binds the losses to the inner
function, and the outer one calls it with `(updates, context)`. `fatbench.suite.signatures` lists the names that each
kind of function may ask for, so that a suite is checked before anything runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fatbench.suite.signatures import FORMS


def asks(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a positional parameter called `name`, or one of the functions among its settings has."""
    if name in _parameters(getattr(function, "func", function)):
        return True
    return any(
        asks(inner, name)
        for inner, offered in _function_settings(function).values()
        if offered is None or name in offered
    )


def requested_arguments(function: Callable[..., Any], offers: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """The offers that a function asks for, computed, as keyword arguments, with those of its settings bound to them."""
    parameters = _parameters(getattr(function, "func", function))
    arguments = {name: offer() for name, offer in offers.items() if name in parameters}
    for setting, (inner, offered) in _function_settings(function).items():
        if bound := requested_arguments(
            inner, {name: offers[name] for name in offers if offered is None or name in offered}
        ):
            arguments[setting] = functools.partial(inner, **bound)
    return arguments


def _function_settings(function: Callable[..., Any]) -> dict[str, tuple[Callable[..., Any], tuple[str, ...] | None]]:
    """{setting: (function, names it may ask for)} for functions among bound settings; None: unknown kind."""
    bound_functions = {key: value for key, value in getattr(function, "keywords", {}).items() if callable(value)}
    return {key: (value, _offers_to_kind(function.func, key)) for key, value in bound_functions.items()}  # type: ignore[attr-defined]


@functools.cache
def _offers_to_kind(function: Callable[..., Any], setting: str) -> tuple[str, ...] | None:
    """The names that a function in this setting may ask for, by the kind that the setting's annotation names."""
    kind = str(getattr(inspect.unwrap(function), "__annotations__", {}).get(setting)).removesuffix(" | None")
    return tuple(name for _, offered in FORMS[kind] for name in offered) if kind in FORMS else None


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
