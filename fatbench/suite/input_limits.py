"""Limits on the size of user input, checked before it is expanded so that a mistake costs neither time nor memory.

A few lines can stand for more than fits into memory: aliases of aliases, the product of seven axes, seeds up to a
billion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fatbench.errors import SpecError

CHARACTERS = 16 * 2**20  # of a file
LEVELS = 100  # of a file: a list in a mapping in a list ...
VALUES = 1_000_000  # of a file, every alias written out
DIGITS = 40  # of a whole number
CELLS = 200_000  # of a preset, and of all presets of a suite: points of the grid times seeds
SEEDS = 100_000  # of a list


def check_characters(text: str, location: str) -> None:
    """SpecError for a file that is too long."""
    if len(text) > CHARACTERS:
        raise SpecError(f"{location}: {len(text)} characters; at most {CHARACTERS} are allowed")


def too_deep(location: str) -> SpecError:
    """The error for a file that is nested too deeply."""
    return SpecError(f"{location}: nested more than {LEVELS} levels deep")


def check_values(root: Any, children: Callable[[Any], Iterable[Any]], location: str) -> None:
    """SpecError for a tree that is too large once its aliases are expanded, or that contains itself.

    children: gives the children of a node. A node behind several aliases is one object and is measured once.
    """
    size_by_node: dict[int, tuple[int, int]] = {}  # id of a node -> (values, levels); (0, 0) while it is measured

    def measure(node: Any, level: int) -> tuple[int, int]:
        size = size_by_node.get(id(node))
        if size == (0, 0):
            raise SpecError(f"{location}: an alias refers to the node that contains it")
        if size is None:
            if level > LEVELS:
                raise too_deep(location)
            size_by_node[id(node)] = (0, 0)
            child_sizes = [measure(child, level + 1) for child in children(node)]
            size = 1 + sum(n for n, _ in child_sizes), 1 + max((depth for _, depth in child_sizes), default=0)
            size_by_node[id(node)] = size
        if size[0] > VALUES:
            raise SpecError(f"{location}: more than {VALUES} values once its aliases are expanded")
        if size[1] > LEVELS:
            raise too_deep(location)
        return size

    measure(root, 1)


def check_digits(text: str, location: str) -> None:
    """SpecError for a whole number too long for any setting."""
    if len(text) > DIGITS:
        raise SpecError(f"{location}: a number of {len(text)} digits; at most {DIGITS} are allowed")


def check_cells(number: int, location: str) -> None:
    """SpecError for more cells than a preset, or all presets together, may have."""
    if number > CELLS:
        raise SpecError(f"{location}: {number} cells, at most {CELLS} are allowed: split the suite, or use fewer seeds")
