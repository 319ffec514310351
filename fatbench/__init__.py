"""Federated adversarial training, benchmarked: suites, a database, tables beside the published ones.

    import fatbench

    fatbench.evaluate(module, (x, y), ["pgd20"])          a module of yours, on images of yours, attacked
    fatbench.attacks.pgd(module, x, y, eps="8/255", step="2/255", steps=20)
    fatbench.load_data("cifar10", "train")                images and labels, as suites split them
    fatbench.partition(y, "dirichlet", clients=5)         whose images are whose, for a loop of yours
    fatbench.aggregate("krum", uploads, byzantine=1)      the next model of what the clients sent
    fatbench.names("aggregator")                          what there is
    fatbench.register(my_function, "aggregator")          a method from a cell
    fatbench.Mixing([0.5, 0.5])                           what an aggregator gives: the weights of the updates
    fatbench.make_suite("sfat-cifar10", methods={...})    a suite with it beside the others

    fatbench.suites()                                     all suites
    fatbench.run("sfat-cifar10", preset="smoke")          what is not done yet
    fatbench.table("sfat-cifar10")                        measured beside published, in a notebook as HTML
    fatbench.results("sfat-cifar10")                      the same numbers as a pandas.DataFrame
    fatbench.outcomes("sfat-cifar10", "pgd20")            which images are classified right
    fatbench.compare("SFAT", "FAT", suite="sfat-cifar10") whether two rows differ; two arrays of outcomes, too
    fatbench.tests("fat-baselines")                       what a suite declares, corrected as a whole
    fatbench.audit("paper.csv")                           what a printed table can bear; a data frame, too
    fatbench.plot("sfat-cifar10", "F3")                   a figure
    fatbench.Table.from_frame(frame, "method", ["pgd20"]) a table of numbers of yours

    fatbench.list_models(), load_model(NAME)              networks of stored results
    fatbench.import_results(file), export_results(file)   results from and for other machines
    fatbench.dataset(x, y, x_test, y_test, name="mine")   arrays of yours, as a data set of a plug-in
    fatbench.FatbenchError                                a mistake: SpecError, Doubtful, MachineError, ...

docs/python.md shows them at work. Importing fatbench imports neither torch nor pandas.

    api          these functions
    attacks      attacks on a module and a batch of images
    cli          the command line
    runner       runs cells: workers, checkpoints, executors
    report       tables, figures and web pages
    methods      algorithms, aggregators, attacks, objectives: what a plug-in may add
    engine       trains and evaluates one cell
    models       networks
    data         data sets
    suite        turns a suite file into checked cells
    store        the database
    testing      the contract that every function of a table keeps
    settings     settings from flags, the environment and fatbench.toml
    errors       errors that a user can cause
    hub          files of the Hugging Face hub
    packed       compressed text files
    whole_file   files that are written completely or not at all
    version      the version of this release
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from fatbench.version import __version__

if TYPE_CHECKING:
    from fatbench import attacks as attacks
    from fatbench.api import Comparison as Comparison
    from fatbench.api import Evaluation as Evaluation
    from fatbench.api import Table as Table
    from fatbench.api import aggregate as aggregate
    from fatbench.api import audit as audit
    from fatbench.api import compare as compare
    from fatbench.api import evaluate as evaluate
    from fatbench.api import export_results as export_results
    from fatbench.api import import_results as import_results
    from fatbench.api import list_models as list_models
    from fatbench.api import load_data as load_data
    from fatbench.api import load_model as load_model
    from fatbench.api import make_suite as make_suite
    from fatbench.api import names as names
    from fatbench.api import partition as partition
    from fatbench.api import plan as plan
    from fatbench.api import plot as plot
    from fatbench.api import register as register
    from fatbench.api import results as results
    from fatbench.api import run as run
    from fatbench.api import suites as suites
    from fatbench.api import table as table
    from fatbench.api import tests as tests
    from fatbench.api.views import outcomes as outcomes
    from fatbench.data.own import dataset as dataset
    from fatbench.engine.rounds import Mixing as Mixing
    from fatbench.errors import DatabaseError as DatabaseError
    from fatbench.errors import Doubtful as Doubtful
    from fatbench.errors import FatbenchError as FatbenchError
    from fatbench.errors import MachineError as MachineError
    from fatbench.errors import NothingMatched as NothingMatched
    from fatbench.errors import SpecError as SpecError
    from fatbench.errors import Unavailable as Unavailable

_API = (
    "Comparison", "Evaluation", "Table", "aggregate", "audit", "compare", "evaluate", "export_results",
    "import_results", "list_models", "load_data", "load_model", "make_suite", "names", "outcomes", "partition", "plan",
    "plot", "register", "results", "run", "suites", "table", "tests",
)  # fmt: skip
_ERRORS = ("DatabaseError", "Doubtful", "FatbenchError", "MachineError", "NothingMatched", "SpecError", "Unavailable")
_ELSEWHERE = {
    "Mixing": "fatbench.engine.rounds", "dataset": "fatbench.data.own", **dict.fromkeys(_ERRORS, "fatbench.errors"),
}  # fmt: skip
__all__ = ["__version__", "attacks", *_ELSEWHERE, *_API]


@functools.cache
def __getattr__(name: str) -> Any:
    if name == "attacks":
        return importlib.import_module("fatbench.attacks")
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(_ELSEWHERE[name]), name)
    if name in _API:
        api = importlib.import_module("fatbench.api")
        return getattr(api, name)
    raise AttributeError(f"module 'fatbench' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
