"""fatbench from Python: what the commands do, as functions; tables that a notebook shows, numbers as data frames.

    import fatbench

    fatbench.run("sfat-cifar10", preset="smoke")
    fatbench.table("sfat-cifar10", preset="smoke")

Names are those of the command line; a mistake raises the `FatbenchError` whose message the command would print. Nothing
here imports torch until something is trained or attacked. `plugins` are files, as after `--plugin`; those that a suite,
FATBENCH_PLUGIN, fatbench.toml or an installed package names are there without it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.errors import FatbenchError, SpecError, UnknownName, did_you_mean
from fatbench.report import build_tables, left_out, render
from fatbench.report.tables import external_suite as reporting_evaluated
from fatbench.report.tables.combined import combine
from fatbench.report.tables.common_images import WHICH as IMAGES
from fatbench.report.tables.grid import Grid
from fatbench.report.tables.notes import LEVELS, shortened
from fatbench.runner.run_options import RunOptions, with_keywords
from fatbench.store.opening import opened
from fatbench.store.stages import Store
from fatbench.suite import cost, external_models, files, sizes
from fatbench.suite import plugins as naming
from fatbench.suite.model import CHECKPOINTS

if TYPE_CHECKING:
    from types import FrameType

    import pandas
    from torch import nn

    from fatbench.runner.jobs import Event, Job, Summary
    from fatbench.store.selection import Checkpoint
    from fatbench.suite.cells import Plan
    from fatbench.suite.files import Suite

__all__ = ["Table", "evaluate", "load_model", "plan", "results", "run", "suites", "table"]


# --- looking up ---------------------------------------------------------------------------------------------------


Plugins = Sequence[str | Path]


@contextlib.contextmanager
def _with(plugins: Plugins, db: str | None = None) -> Iterator[None]:
    """These plug-ins, and those that are named elsewhere; an unknown name is answered as the commands do."""
    naming.load([Path(file) for file in plugins])
    try:
        yield
    except UnknownName as error:
        from fatbench.runner import versions

        raise SpecError(versions.explain(error, db)) from None


def suites(*, plugins: Plugins = ()) -> pandas.DataFrame:
    """Every suite that can be run by name: its title, and its number of cells in each preset (NaN: no such preset).

    >>> import fatbench
    >>> bool(fatbench.suites().loc["sfat-cifar10", "smoke"] > 0)
    True
    """
    import pandas

    with _with(plugins):
        found = [row for row in sizes.listing() if "error" not in row]
    rows = {row["name"]: {"title": row["title"], **row["presets"]} for row in found}
    return pandas.DataFrame.from_dict(rows, orient="index")


def plan(
    name: str,
    *,
    preset: str = "paper",
    where: str | None = None,
    seeds: Sequence[int] | None = None,
    override: Sequence[str] = (),
    attacks: Sequence[str] = (),
    plugins: Plugins = (),
    db: str | None = None,
) -> pandas.DataFrame:
    """What a run would do: one row a cell, with its labels, its seed and its work; runs nothing.

    name: of a suite, or the path of a file. where: a filter as of `-k`. override: settings in all cells, as after
    `--set`: ["algorithm.local.lr=0.02"]; their suite is called "NAME+algorithm.local.lr=0.02". attacks: added where the
    preset has none. Columns gradient_steps and image_passes are NaN where the work cannot be told before.
    SpecError: no such suite, preset, setting or attack; NothingMatched: the filter leaves nothing.

    >>> import fatbench
    >>> set(fatbench.plan("sfat-cifar10", preset="smoke", seeds=[6])["seed"].tolist())
    {6}
    """
    import pandas

    with _with(plugins, db):
        chosen = files.load(files.named(name, override)).plan(preset, seeds, where, attacks)
    rows = []
    for cell in chosen.unique():
        work = cost.cell_work(cell, chosen)
        counted = {} if work is None else {"gradient_steps": work.gradient_steps, "image_passes": work.image_passes}
        rows.append({"cell": cell.id, **cell.key, "seed": cell.spec["seed"], **counted})
    return pandas.DataFrame(rows)


# --- doing --------------------------------------------------------------------------------------------------------


@functools.partial(with_keywords, without={"dry_run"})
def run(
    name: str,
    *,
    preset: str = "paper",
    where: str | None = None,
    seeds: Sequence[int] | None = None,
    override: Sequence[str] = (),
    attacks: Sequence[str] = (),
    plugins: Plugins = (),
    quiet: bool = False,
    options: RunOptions,
) -> pandas.DataFrame:
    """Run what is not done of a suite; the same call again goes on. One row a cell: labels, seed, status, error.

    Cells run in other processes, so a script calls this below `if __name__ == "__main__":`. A cell that fails leaves
    the others to run; its status is "failed", its error the last line of the traceback. One that was computed with
    other data, models or plug-ins than those of now is "changed"; `rerun_changed` begins it again. Arguments are the
    options of `fatbench run
    suite`. quiet: without a line on stderr for every cell. SpecError, NothingMatched, MachineError:
    nothing was run. KeyboardInterrupt: what was done is stored.

    >>> import fatbench
    >>> done = fatbench.run("sfat-cifar10", preset="smoke", where="optimizer=FedAvg and method=SFAT", quiet=True)
    >>> set(done["status"])
    {'done'}
    """
    import pandas

    from fatbench.report.numbers import sql_tables
    from fatbench.runner import live_log, progress, start

    if options.executor == "local":
        _guarded()
    with _with(plugins, options.db):
        chosen = files.load(files.named(name, override)).plan(preset, seeds, where, attacks)
    said = _Lines(f"suite {chosen.suite}, preset {chosen.preset}", quiet)
    try:
        cells = [cell.id for cell in chosen.to_run()]
        with live_log.logged(said, options) as observer, sql_tables.judged(options.db, cells):
            start.run(start.jobs_of(chosen), observer, options)
    except SystemExit as over:
        if over.code != 1:  # 1: some cells failed, as the rows say
            raise KeyboardInterrupt from None
    with opened(options.db) as store:
        rows = progress.cells_of(chosen, store)
    return pandas.DataFrame(
        [
            {"cell": r.cell.id, **r.cell.key, "seed": r.cell.spec["seed"], "status": r.status, "error": r.error}
            for r in rows
        ]
    )


def _guarded() -> None:
    """SpecError: a script got here from its top level; each process that runs cells would begin the script again."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_name == "<module>":
            file, line = Path(frame.f_code.co_filename), frame.f_lineno
            tree = ast.parse(file.read_bytes() if file.is_file() else b"")  # none: typed at a prompt, or in a notebook
            for node in tree.body:
                if node.lineno <= line <= (node.end_lineno or line) and not isinstance(node, ast.If):
                    raise SpecError(
                        f'{file}:{line}: call fatbench under `if __name__ == "__main__":`, because worker '
                        "processes import the script again"
                    )
        frame = frame.f_back


class _Lines:
    """Tells a person how a run goes on, by a line for every cell that is over."""

    def __init__(self, what: str, quiet: bool) -> None:
        self.what, self.quiet = what, quiet

    def begin(self, jobs: Sequence[Job], before: Mapping[str, str], slots: Sequence[str]) -> None:
        done = sum(state == "done" for state in before.values())
        self._say(f"{self.what}: {len(jobs)} cell{'s' * (len(jobs) != 1)}, {done} done, {len(jobs) - done} to go")

    def work_in(self, slots: Sequence[str]) -> None:
        """Lines name no slots."""

    def see(self, slot: int, event: Event) -> None:
        if event.stage == "cell" or event.kind == "failed":
            self._say(f"{event.cell} {event.kind}{f': {event.message}' if event.message else ''}")

    def note(self, text: str) -> None:
        self._say(text)

    def summary(self, end: Summary) -> None:
        self._say(f"{self.what}: {end.done} of {end.cells} cells done")
        if end.changed:
            from fatbench.runner import versions

            self._say("\n".join(versions.lines(end.changed)))

    def _say(self, text: str) -> None:
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)


def evaluate(
    module: nn.Module | str | Path,
    *,
    dataset: str | Mapping[str, Any] | None = None,
    like: str | None = None,
    attacks: Sequence[str] | None = None,
    network: str | None = None,
    eps: str = "8/255",
    n: int | None = None,
    batch: int = 500,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    outputs: external_models.Outputs = "logits",
    channels: external_models.Channels = "rgb",
    size: int | None = None,
    name: str | None = None,
    entry: str | None = None,
    preset: str = "paper",
    where: str | None = None,
    device: str | None = None,
    precision: str | None = None,
    plugins: Plugins = (),
    db: str | None = None,
    data: str | Path | None = None,
    quiet: bool = True,
) -> Table:
    """Attack a model that was trained anywhere: a table of one row, with what is doubtful about it.

    module: a module in memory, which is left as it was; or the file of a state dict, and then `network` names what it
    belongs to, "timm/NAME" or "FILE.py:FUNCTION". The first n test images of `dataset` are attacked; `attacks` as after
    `--attack`: names, or "{name: pgd, eps: 8/255, step: 2/255, steps: 50}". like: a suite, whose images and attacks are
    taken (of `preset`, and of the cells in `where`), so that `table(..., with_evaluated=True)` has a row of it. mean,
    std, outputs, channels, size: the preprocessing of the network, see docs/evaluate.md. entry: which state of a
    file with several, such as "state_dict_ema". db: where the numbers are
    stored; None: nowhere.
    SpecError: the network does not fit its file, or the images; MachineError: data missing, file unreadable.

    >>> import torch, fatbench
    >>> module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> fatbench.evaluate(module, dataset="digits", attacks=["fgsm"], n=50).frame()["metric"].tolist()
    ['natural', 'fgsm']
    """
    from fatbench.runner import evaluate_external

    preprocessing: dict[str, Any] = {"mean": tuple(mean), "std": tuple(std), "outputs": outputs, "channels": channels}
    if not isinstance(module, (str, Path)):
        found = evaluate_external.from_module(module, name, **preprocessing)
    elif network is None:
        raise SpecError(f"{module}: name its network: timm/NAME or FILE.py:FUNCTION")
    else:
        found = evaluate_external.from_file(Path(module), network, name, entry, **preprocessing)
        if found.note:
            print(f"fatbench: {found.note}", file=sys.stderr)
    with _with(plugins, db):
        chosen = None if like is None else files.load(like).plan(preset, None, where)
        task = evaluate_external.task(chosen, dataset, attacks, eps=eps, n=n, batch=batch, size=size)
    with tempfile.TemporaryDirectory() as nowhere:
        url = db or str(Path(nowhere) / "evaluate.db")
        said = _Lines("", quiet)
        options = RunOptions(device=device, precision=precision, db=url, data=data)

        def notify(event: Event) -> None:
            if event.stage == "cell" and quiet:  # the name is not the one that was asked for
                print(event.message, file=sys.stderr)
            said.see(0, event)

        cell, status = evaluate_external.evaluate(found, task, options, notify)
        with opened(url) as store:
            assert store is not None
            if status != "done":
                errors = [row.error.strip().splitlines()[-1] for row in store.stages([cell]).values() if row.error]
                raise FatbenchError(f"{found.model.name}: {status}: {'; '.join(errors)}")
            return Table(build_tables(*reporting_evaluated.suite_and_plan(store, f"id={cell}"), store))


def load_model(
    name: str, *, results: Sequence[str | Path] = (), places: Sequence[str | Path] = (), plugins: Plugins = ()
) -> nn.Module:
    """The network of stored results by its name in `fatbench models`, in eval mode: images in [0, 1] to logits.

    results: files that `fatbench export` wrote; default results/*.jsonl. places: folders, or addresses that have
    ADDRESS/SHA256.safetensors. The file must have the SHA-256 that is stored with its numbers. SpecError: no such
    network; MachineError: its file is nowhere, or is another.

        fatbench.load_model("sfat-fashion/Non-IID/FAT/6")
    """
    from fatbench.errors import MachineError
    from fatbench.runner import zoo

    with _with(plugins):
        known = zoo.names(zoo.entries(map(Path, results) if results else sorted(Path("results").glob("*.jsonl"))))
        network = zoo.choose(name, known)
        file = zoo.find(network, places)
        if file is None:
            raise MachineError(
                f"the file of {name} is not here: {network.sha256}.safetensors (places=[folder or address]);"
                f" 'fatbench run cell {network.cell}{network.how}' trains it again, and"
                " 'fatbench export' writes a file for results= that knows the new one"
            )
        return zoo.module(file, network.sha256, network.trained_with)


# --- reading ------------------------------------------------------------------------------------------------------


def results(
    name: str | None = None,
    *,
    preset: str | None = None,
    where: str | None = None,
    plugins: Plugins = (),
    db: str | None = None,
) -> pandas.DataFrame:
    """Every number in the database, one row each, with what produced it; of one suite with the labels of its axes.

    Columns: cell, the axes, seed, stage ("train", or an evaluation), metric, round, client (-1: of none), value, n, and
    suite, preset, commit, dirty, device, precision, created and run of what measured it, attack (all its settings),
    outcomes (how many of single images are stored), replicate, and doubts (such as that the training diverged; in the
    words of the tables, separated by "; "). Values are fractions, not per cent. An axis with the name of another column
    is called "axis:NAME". preset: default the first that was run. An experiment that stands at several points of the
    grid has a row for each. SpecError: no such suite. DatabaseError: an accuracy is not the mean of its outcomes.

    >>> import fatbench
    >>> found = fatbench.results("sfat-cifar10", preset="smoke")
    >>> accuracies = found[found["stage"] != "train"].pivot_table(index="method", columns="metric", values="value")
    """
    from fatbench.report.numbers.frame import frame

    with _with(plugins, db), opened(db) as store:
        if name is None:
            return frame(store)
        suite, plan = planned(name, preset, None, where, store)
        return frame(store, plan if store is None else to_read(suite, plan, store))


def table(
    name: str | Sequence[str],
    id: str | None = None,
    *,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    preset: str | None = None,
    select: Checkpoint = "last",
    published: bool = True,
    where: str | None = None,
    seeds: Sequence[int] | None = None,
    with_evaluated: bool = False,
    runs: str = "",
    notes: str | None = None,
    digits: int = 2,
    images: str = "all",
    plugins: Plugins = (),
    db: str | None = None,
) -> Table:
    """The tables of a suite or of several, or the one called `id`: measured beside published.

    rows, columns: one table of all these suites, as `fatbench report --rows --columns` makes it. preset: default the
    first that was run. with_evaluated: also rows of models that `fatbench evaluate --like NAME` judged. runs: of a
    cell that was run more than once, such as "precision=fp32". notes: "none",
    "short" or "full"; default: short in LaTeX, else full. digits: after the point of percentages. images: "common"
    takes every attack on the images that all attacks of a table have. The name "evaluate" is the table of all evaluated
    models.
    SpecError: no such suite, preset, table, axis or choice.

    >>> import fatbench
    >>> print(fatbench.table("sfat-cifar10", "T3", preset="smoke").markdown().splitlines()[0])
    ### T3: SFAT Table 3, CIFAR-10, Non-IID: accuracy (%) [SMOKE PRESET - not comparable with published numbers]
    """
    known_choice("select", select, CHECKPOINTS)
    if notes is not None:
        known_choice("notes", notes, LEVELS)
    known_choice("images", images, IMAGES)
    with _with(plugins, db), opened(db) as store:
        names = [name] if isinstance(name, str) else name
        parts = [planned(one, preset, seeds, where, store) for one in names]
        parts = [(suite, plan if store is None else to_read(suite, plan, store, runs)) for suite, plan in parts]
        if rows or columns:
            parts = [combine(parts, rows, columns)]
        if id is not None:
            parts = with_table(parts, [id])
        how = {"select": select, "published": published, "digits": digits, "images": images}
        made = grids_of(parts, store, with_evaluated, **how)
    return Table([grid for _, _, grids in made for grid in grids], notes)


@dataclass(frozen=True)
class Table:
    """Tables of a suite, ready to be shown: a notebook shows them as HTML."""

    grids: list[Grid]
    notes: str | None = None  # "none", "short" or "full"; None: what the format has by itself

    def __repr__(self) -> str:
        return self.markdown()

    def _repr_html_(self) -> str:
        from fatbench.report.formats import html

        return html.fragment([shortened(grid, self.notes or "full") for grid in self.grids])

    def markdown(self) -> str:
        """As `fatbench report --format markdown`."""
        return render(self.grids, "markdown", self.notes)

    def latex(self) -> str:
        """As `fatbench report --format latex`."""
        return render(self.grids, "latex", self.notes)

    def frame(self) -> pandas.DataFrame:
        """One row a number that the tables show: labels, metric, mean, std, n, published, doubts; fractions."""
        from fatbench.report.formats import records

        return records.frame(self.grids)


# --- what the commands share --------------------------------------------------------------------------------------


def known_choice(option: str, given: str, known: Sequence[str]) -> None:
    """SpecError: what is given is none of the choices."""
    if given not in known:
        raise SpecError(f"--{option}: expected {', '.join(known)}, got '{given}'{did_you_mean(given, known)}")


def with_table(parts: Sequence[tuple[Suite, Plan]], ids: Sequence[str]) -> list[tuple[Suite, Plan]]:
    """The suites with these tables alone. SpecError: none of them has one."""
    known = [table.id for suite, _ in parts for table in suite.tables]
    for id in ids:
        if id not in known:
            raise SpecError(f"--table: no table is named '{id}'{did_you_mean(id, known)}")
    return [(suite.with_tables(ids), plan) for suite, plan in parts if any(t.id in ids for t in suite.tables)]


def grids_of(
    parts: Sequence[tuple[Suite, Plan]], store: Store | None, with_evaluated: bool, **how: Any
) -> list[tuple[Suite, Plan, list[Grid]]]:
    """The tables of each suite, `how`: see `build_tables`; what is asked for and not there is said on stderr."""
    made = []
    for suite, chosen in parts:
        for line in left_out(suite, chosen):
            print(f"fatbench: {line}", file=sys.stderr)
        more = reporting_evaluated.external_cells(chosen, store) if with_evaluated else []
        if with_evaluated and not more:
            like = f"fatbench evaluate FILE --model ... --like {chosen.suite} --preset {chosen.preset}"
            print(
                f"fatbench: no model has been evaluated with the attacks of '{chosen.suite}': {like}", file=sys.stderr
            )
        made.append((suite, chosen, build_tables(suite, chosen, store, evaluated=more, **how)))
    return made


def to_read(suite: Suite, plan: Plan, store: Store, runs: str = "") -> Plan:
    """The plan whose cells' ids are those of the runs that every view reads, see `shown_runs`; runs: "precision=fp32".

    A filter of the plan never changes which run of a cell that is. SpecError: no such runs can be asked for.
    """
    from fatbench.report.numbers import shown_runs

    whole = None if suite.name == external_models.SUITE else functools.partial(suite.plan, plan.preset)
    return shown_runs.shown(plan, store, runs, whole)


def planned(
    name: str, preset: str | None, seeds: Sequence[int] | None, where: str | None, store: Store | None
) -> tuple[Suite, Plan]:
    """A suite and the plan to look at: the preset asked for, else the first that has been run, else paper."""
    from fatbench.runner import progress

    if name == external_models.SUITE and name not in files.available():
        return reporting_evaluated.suite_and_plan(store, where)
    chosen = files.load(name)
    if preset is None and store is not None:
        preset = progress.preset_run(chosen, store)
    plan = chosen.plan(preset or "paper", seeds, where)
    return chosen, plan if store is None else progress.with_stored_attacks(chosen, plan, store)
