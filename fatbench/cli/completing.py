"""What a shell offers after TAB: suites, presets, cells, formats. Imports no torch, and little else before it must.

A completion that cannot be worked out offers nothing; it says no word, which would land in the command line.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import warnings
from collections.abc import Callable, Iterable
from typing import Any

Offer = Callable[[Any, str], list[str]]
MOST = 100  # cells


def one_of(*words: str) -> Offer:
    """Offers these words."""

    def offer(ctx: Any, incomplete: str) -> list[str]:
        return _begin(words, incomplete)

    return offer


def suites(ctx: Any, incomplete: str) -> list[str]:
    """Names of suites that are found by name."""
    from fatbench.suite import folders

    return _begin(folders.available(), incomplete)


def presets(ctx: Any, incomplete: str) -> list[str]:
    """Presets of the suite that is named before; the common ones where none is."""
    from fatbench.suite import folders

    words, suite_names = _words(), folders.available()
    named_suites = [word for word in words if word in suite_names or word.endswith((".yaml", ".yml"))]
    if not named_suites:
        return _begin(("paper", "quick", "smoke"), incomplete)
    matches: list[str] = []
    with _silent():
        from fatbench.suite import files

        matches = _begin(files.load(named_suites[0]).presets(), incomplete)
    return matches


def cells(ctx: Any, incomplete: str) -> list[str]:
    """Cells in the database."""
    words = _words()
    matches: list[str] = []
    db = next((next_word for word, next_word in itertools.pairwise(words) if word == "--db"), None)
    with _silent():
        from fatbench.store.opening import opened

        with opened(db) as store:
            matches = [] if store is None else store.ids_beginning_with(incomplete, MOST)
    return matches


def suites_and_cells(ctx: Any, incomplete: str) -> list[str]:
    """Suites, and after some letters of an id the cells in the database."""
    return suites(ctx, incomplete) + (cells(ctx, incomplete) if incomplete else [])


def _words() -> list[str]:
    """The command line so far: while an option lacks its value, Click has not read the others."""
    command_line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS") or ""
    try:
        return shlex.split(command_line)
    except ValueError:  # an open quotation mark
        return command_line.split()


def _begin(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


@contextlib.contextmanager
def _silent() -> Any:
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
