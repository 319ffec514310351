"""fatbench from Python: what the commands do, as functions; tables that a notebook shows, numbers as data frames.

    import fatbench

    fatbench.run("sfat-cifar10", preset="smoke")
    fatbench.table("sfat-cifar10", preset="smoke")

Names are those of the command line; a mistake raises the `FatbenchError` whose message the command would print, with
the names of arguments for those of options where `fatbench` is called. Nothing here imports torch until something is
trained or attacked. `plugins` are files, as after `--plugin`; those that a suite, FATBENCH_PLUGIN, fatbench.toml or an
installed package names are there without it.
"""

from __future__ import annotations

from fatbench.api.asking import in_python, known_choice, spoken
from fatbench.api.comparing import Comparison, compare
from fatbench.api.evaluating import CHECK, Evaluation, evaluate, judged
from fatbench.api.making import make_suite, register
from fatbench.api.parts import aggregate, load_data, partition
from fatbench.api.reading import (
    export_results,
    grids_of,
    import_results,
    list_models,
    load_model,
    outcomes,
    planned_suite,
    plot,
    results,
    table,
    take_in,
    to_read,
    with_table,
)
from fatbench.api.running import plan, run, suites
from fatbench.api.tables import Table
from fatbench.store.opening import opened

__all__ = [
    "CHECK", "Comparison", "Evaluation", "Table", "aggregate", "compare", "evaluate", "export_results",
    "grids_of", "import_results", "in_python", "judged", "known_choice", "list_models", "load_data", "load_model",
    "make_suite", "opened", "outcomes", "partition", "plan", "planned_suite", "plot", "register", "results", "run",
    "spoken", "suites", "table", "take_in", "to_read", "with_table",
]  # fmt: skip
