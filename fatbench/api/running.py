"""Suites, plans and runs from Python."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType

import pandas

from fatbench import report
from fatbench.api.asking import Overrides, Plugins, Seeds, Where, filter_text, names, plugged, seed_list, suite_of
from fatbench.api.lines import Lines
from fatbench.errors import MachineError, SpecError
from fatbench.runner.run_options import run_options
from fatbench.store.opening import opened
from fatbench.suite import cost, files
from fatbench.suite.files import Suite
from fatbench.suite.tuning import demand_validation


def suites(*, plugins: Plugins = ()) -> pandas.DataFrame:
    """Every suite that can be run by name: its title, and its number of cells in each preset (NaN: no such preset).

    >>> import fatbench
    >>> bool(fatbench.suites().loc["sfat-cifar10", "smoke"] > 0)
    True
    """
    with plugged(plugins):
        listed = [row for row in files.listing() if "error" not in row]
    rows = {row["name"]: {"title": row["title"], **row["presets"]} for row in listed}
    return pandas.DataFrame.from_dict(rows, orient="index")


def plan(
    suite: str | Path | Suite,
    *,
    preset: str = "paper",
    where: Where = None,
    seeds: Seeds = None,
    override: Overrides = (),
    attacks: str | Sequence[str] = (),
    plugins: Plugins = (),
    db: str | Path | None = None,
) -> pandas.DataFrame:
    """What a run would do: one row a cell, with its labels, its seed and its work; runs nothing.

    suite: a name, the path of a file, or what `make_suite` made. where: {"method": "FAT"}, or text as of `-k`. seeds:
    one or several. override: settings in all cells, {"algorithm.local.lr": 0.02}; their suite is called
    "NAME+algorithm.local.lr=0.02". attacks: added where the preset has none. Columns gradient_steps and image_passes
    are NaN where the work cannot be told before.
    SpecError: no such suite, preset, setting or attack; NothingMatched: the filter leaves nothing.

    >>> import fatbench
    >>> set(fatbench.plan("sfat-cifar10", preset="smoke", seeds=6)["seed"].tolist())
    {6}
    """
    with plugged(plugins, db):
        chosen_suite = suite_of(suite, override)
        suite_plan = chosen_suite.plan(preset, seed_list(seeds), filter_text(where), names(attacks))
        report.check(chosen_suite, suite_plan)
    rows = []
    for cell in suite_plan.unique():
        work = cost.cell_work(cell, suite_plan)
        work_counts = {} if work is None else {"gradient_steps": work.gradient_steps, "image_passes": work.image_passes}
        rows.append({"cell": cell.id, **cell.key, "seed": cell.spec["seed"], **work_counts})
    return pandas.DataFrame(rows)


def run(
    suite: str | Path | Suite,
    *,
    preset: str = "paper",
    where: Where = None,
    seeds: Seeds = None,
    override: Overrides = (),
    attacks: str | Sequence[str] = (),
    tune: bool = False,
    plugins: Plugins = (),
    quiet: bool = False,
    jobs: int | None = None,
    device: str | None = None,
    per_gpu: int | None = None,
    executor: str | None = None,
    precision: str | None = None,
    attack_precision: str | None = None,
    path: str | None = None,
    microbatch: int | None = None,
    retry_failed: bool = False,
    rerun_changed: bool = False,
    fail_fast: bool | None = None,
    time_limit: str | None = None,
    wait: bool | None = None,
    log: str | None = None,
    db: str | Path | None = None,
    data_folder: str | Path | None = None,
) -> pandas.DataFrame:
    """Run what is not done of a suite; the same call again goes on. One row a cell: labels, seed, status, error.

    Cells run in other processes, so a script calls this below `if __name__ == "__main__":`; a notebook, a thread and
    `asyncio.to_thread` need nothing. A cell that fails leaves the others to run; its status is "failed", its error the
    last line of the traceback. One that was computed with other data, models or plug-ins than those of now is
    "changed".

    suite, preset, where, seeds, override, attacks: which cells, as for `plan`. tune: the trials of the suite's section
    `tune` instead; once all are done, the choices are written.
    quiet: without a line on stderr for every cell.
    jobs: cells side by side. device: "cpu", "cuda" or "cuda:0,1". per_gpu: cells side by side on a GPU; default: what
    fits. executor: "local", "ray" or "slurm". precision: "fp32", "tf32" or "bf16"; attack_precision: of the evaluation.
    path: how local training is computed, "auto", "loop" or "graphs". microbatch: images at once.
    retry_failed: begin failed cells again; rerun_changed: changed ones. fail_fast: end with the first that fails.
    time_limit: of a cell, "45m". wait: for cells that another process has in hand.
    log: who else writes learning curves, "tensorboard", "wandb" or "mlflow".
    db: the database; default results/fatbench.db below the working directory. data_folder: of the data sets. Of what is
    not given, the table [run] of fatbench.toml decides.
    SpecError, NothingMatched, MachineError: nothing was run, or no worker could start. KeyboardInterrupt: what was done
    is stored.

    >>> import fatbench
    >>> done = fatbench.run("sfat-cifar10", preset="smoke", where="optimizer=FedAvg and method=SFAT", quiet=True)
    >>> set(done["status"])
    {'done'}
    """
    from fatbench.report.numbers import sql_tables
    from fatbench.runner import cell_labels, live_log, progress, start
    from fatbench.runner.choosing import write_choices

    options = run_options(
        jobs=jobs, device=device, per_gpu=per_gpu, executor=executor, precision=precision,
        attack_precision=attack_precision, path=path, microbatch=microbatch,
        retry_failed=retry_failed, rerun_changed=rerun_changed, fail_fast=fail_fast, time_limit=time_limit, wait=wait,
        log=log, db=None if db is None else str(db), data=data_folder,
    )  # fmt: skip
    if options.executor == "local":  # the others' workers are started by a command, which imports no script
        _guarded()
    with plugged(plugins, options.db):
        tuned_suite = chosen_suite = suite_of(suite, override)
        if tune:
            chosen_suite = tuned_suite.trials()
        suite_plan = chosen_suite.plan(preset, seed_list(seeds), filter_text(where), names(attacks))
        report.check(chosen_suite, suite_plan)
        if tune:
            demand_validation(suite_plan.cells, chosen_suite.file)
    lines, has_failures = Lines(f"suite {suite_plan.suite}, preset {suite_plan.preset}", quiet), False
    try:
        cells = [cell.id for cell in suite_plan.to_run()]
        mark = partial(cell_labels.mark_current, chosen_suite, suite_plan.preset)
        with live_log.add_writer(lines, options) as observer, sql_tables.judged(options.db, cells, mark):
            start.run(start.jobs_of(suite_plan), observer, options)
    except SystemExit as exit_request:
        if exit_request.code != 1:  # 1: some cells failed, as the rows say
            raise KeyboardInterrupt from None  # a notebook must not end by an exit
        has_failures = True
    finally:
        lines.close()
    with opened(options.db) as store:
        rows = progress.cells_of(suite_plan, store)
        if tune and store is not None and not options.dry_run:
            write_choices(tuned_suite, preset, store)
    # workers that died at once have stored nothing that a row could show
    if has_failures and lines.died and not {row.status for row in rows} & {"done", "failed"}:
        why = "worker processes import the program again, which must be a file"
        raise MachineError(f"no cell was computed: {lines.died} ({why})")
    return pandas.DataFrame(
        [
            {"cell": r.cell.id, **r.cell.key, "seed": r.cell.spec["seed"], "status": r.status, "error": r.error}
            for r in rows
        ]
    )


def _guarded() -> None:
    """Raise SpecError if a script calls this at its top level: each worker process would begin the script again."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_name == "<module>":
            file, line = Path(frame.f_code.co_filename), frame.f_lineno
            tree = ast.parse(file.read_bytes() if file.is_file() else b"")  # none: typed at a prompt, or in a notebook
            for node in tree.body:
                if not node.lineno <= line <= (node.end_lineno or line):
                    continue
                condition = ast.walk(node.test) if isinstance(node, ast.If) else ()
                if not any(isinstance(part, ast.Name) and part.id == "__name__" for part in condition):
                    why = "because worker processes import the script again"
                    raise SpecError(f'{file}:{line}: call fatbench under `if __name__ == "__main__":`, {why}')
        frame = frame.f_back
