"""A function is given what it asks for: a parameter named `broadcast_losses` is given the losses, under any name.

    def shy(updates, context, broadcast_losses): ...

    asks(shy, "broadcast_losses")                                   True: have the clients measure them
    shy(updates, context, **granted(shy, {"broadcast_losses": measured}))

What a function does not name is not computed. Which names exist for which kind stands in `fatbench.suite.signatures`,
where a suite is checked before anything runs; what each of them is, at the place that offers it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any


def asks(function: Callable[..., Any], name: str) -> bool:
    """Whether a function, its settings bound or not, has a parameter called `name` before the `*` of its settings."""
    return name in _parameters(getattr(function, "func", function))


def granted(function: Callable[..., Any], offers: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """The offers that a function asks for, computed, as keyword arguments."""
    return {name: offer() for name, offer in offers.items() if asks(function, name)}


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
