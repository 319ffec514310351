"""fatbench from Python: what the commands do, as functions; tables that a notebook shows, numbers as data frames.

    import fatbench

    fatbench.run("sfat-cifar10", preset="smoke")
    fatbench.table("sfat-cifar10", preset="smoke")

    running        suites, plans, runs
    needs          what cells need: data sets, weights, functions
    views          stored results as tables, frames and figures
    exchanging     results between machines, and cells that are half done
    shown_tables   the class Table
    outcome_rows   which test images a cell classified right
    sites          what a site shows
    comparing      whether two rows, cells, files or arrays differ, and what a suite declares
    verifying      runs a sample of exported cells again
    auditing       sanity checks of printed tables
    evaluating     attacks models that were trained anywhere
    inverted       what stands beside the attacks on an update
    making         methods and suites from a notebook
    beside         a suite with a row of one's own
    deleting       which cells a deletion takes
    parts          data, partitions and aggregation for a user's own training loop
    machine        this machine in facts
    asking         what these functions share
    lines          progress as lines of text

Names are those of the command line. A mistake raises the `FatbenchError` whose message the command would print, with
the names of arguments in place of those of options. Nothing here imports torch until something is trained or attacked.
`plugins` are files, as after `--plugin`; those that a suite, FATBENCH_PLUGIN, fatbench.toml or an installed package
names are there without it.
"""

from __future__ import annotations

from fatbench.api.asking import known_choice
from fatbench.api.auditing import audit
from fatbench.api.comparing import Comparison, compare, tests
from fatbench.api.evaluating import CHECK, Evaluation, attack_and_store, evaluate
from fatbench.api.exchanging import export_results, half_done, import_results, take_in
from fatbench.api.making import make_suite, names, register
from fatbench.api.parts import aggregate, load_data, partition
from fatbench.api.running import plan, run, suites
from fatbench.api.shown_tables import Table
from fatbench.api.views import (
    existing_store,
    list_models,
    load_model,
    outcomes,
    plan_read,
    planned_suite,
    plot,
    plots_of,
    results,
    table,
    to_read,
    why_empty,
)
from fatbench.store.opening import opened

__all__ = [
    "CHECK",
    "Comparison",
    "Evaluation",
    "Table",
    "aggregate",
    "attack_and_store",
    "audit",
    "compare",
    "evaluate",
    "existing_store",
    "export_results",
    "half_done",
    "import_results",
    "known_choice",
    "list_models",
    "load_data",
    "load_model",
    "make_suite",
    "names",
    "opened",
    "outcomes",
    "partition",
    "plan",
    "plan_read",
    "planned_suite",
    "plot",
    "plots_of",
    "register",
    "results",
    "run",
    "suites",
    "table",
    "take_in",
    "tests",
    "to_read",
    "why_empty",
]  # fmt: skip
