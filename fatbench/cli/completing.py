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

    words, known = _words(), folders.available()
    said = [word for word in words if word in known or word.endswith((".yaml", ".yml"))]
    if not said:
        return _begin(("paper", "quick", "smoke"), incomplete)
    found: list[str] = []
    with _silent():
        from fatbench.suite import files

        found = _begin(files.load(said[0]).presets(), incomplete)
    return found


def cells(ctx: Any, incomplete: str) -> list[str]:
    """Cells in the database."""
    words = _words()
    found: list[str] = []
    db = next((after for word, after in itertools.pairwise(words) if word == "--db"), None)
    with _silent():
        from fatbench.store.opening import opened

        with opened(db) as store:
            found = [] if store is None else store.begins(incomplete, MOST)
    return found


def _words() -> list[str]:
    """The command line so far: while an option lacks its value, Click has not read the others."""
    said = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS") or ""
    try:
        return shlex.split(said)
    except ValueError:  # an open quotation mark
        return said.split()


def _begin(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


@contextlib.contextmanager
def _silent() -> Any:
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
