"""Federated adversarial training, benchmarked: suites, a database, tables beside the published ones.

    import fatbench

    fatbench.suites()                              all suites
    fatbench.run("sfat-cifar10", preset="smoke")   what is not done yet
    fatbench.table("sfat-cifar10")                 measured beside published, in a notebook as HTML
    fatbench.results("sfat-cifar10")               the same numbers as a pandas.DataFrame
    fatbench.evaluate(module, dataset="cifar10")   a module of yours, attacked
    fatbench.load_model("sfat-fashion/Non-IID/FAT/6")     a network of stored results
    fatbench.dataset(x, y, x_test, y_test, name="mine")   arrays of yours, as a data set of a plug-in
    fatbench.attacks.pgd(module, x, y, eps="8/255", step="2/255", steps=20)

docs/python.md shows each of them. Importing fatbench imports neither torch nor pandas.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fatbench.version import __version__

if TYPE_CHECKING:
    from fatbench import attacks as attacks
    from fatbench.api import Table as Table
    from fatbench.api import evaluate as evaluate
    from fatbench.api import load_model as load_model
    from fatbench.api import plan as plan
    from fatbench.api import results as results
    from fatbench.api import run as run
    from fatbench.api import suites as suites
    from fatbench.api import table as table
    from fatbench.data.own import dataset as dataset

__all__ = [
    "Table",
    "__version__",
    "attacks",
    "dataset",
    "evaluate",
    "load_model",
    "plan",
    "results",
    "run",
    "suites",
    "table",
]

_API = ("Table", "evaluate", "load_model", "plan", "results", "run", "suites", "table")


def __getattr__(name: str) -> Any:
    if name == "attacks":
        return importlib.import_module("fatbench.attacks")
    if name == "dataset":
        return importlib.import_module("fatbench.data.own").dataset
    if name in _API:
        return getattr(importlib.import_module("fatbench.api"), name)
    raise AttributeError(f"module 'fatbench' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
