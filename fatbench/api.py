"""fatbench from Python: what the commands do, as functions; tables that a notebook shows, numbers as data frames.

    import fatbench

    fatbench.run("sfat-cifar10", preset="smoke")
    fatbench.table("sfat-cifar10", preset="smoke")

Names are those of the command line; a mistake raises the `FatbenchError` whose message the command would print. Nothing
here imports torch until something is trained or attacked.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.errors import FatbenchError, SpecError, did_you_mean
from fatbench.report import evaluated as reporting_evaluated
from fatbench.report import render, tables
from fatbench.report.grid import Grid
from fatbench.store.opening import opened
from fatbench.store.stages import Store
from fatbench.suite import cost, evaluated, files
from fatbench.suite.sizes import Sizes

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from fatbench.run.worker import Event, Job
    from fatbench.store.selection import Checkpoint
    from fatbench.suite.cells import Plan
    from fatbench.suite.files import Suite

__all__ = ["Table", "evaluate", "plan", "results", "run", "suites", "table"]


# --- what there is ------------------------------------------------------------------------------------------------


def suites() -> pandas.DataFrame:
    """Every suite that can be run by name: its title, and its number of cells in each preset (NaN: no such preset).

    >>> import fatbench
    >>> bool(fatbench.suites().loc["sfat-cifar10", "smoke"] > 0)
    True
    """
    import pandas

    rows = {row["name"]: {"title": row["title"], **row["presets"]} for row in listing()}
    return pandas.DataFrame.from_dict(rows, orient="index")


def listing() -> Iterator[dict[str, Any]]:
    """{"name", "title", "presets": {preset: cells}} of each valid suite file; of an invalid one {"name", "error"}."""
    counted = Sizes()
    for name in files.available():
        try:
            found = files.load(name)
            presets = counted.of(found)
        except SpecError as error:
            yield {"name": name, "error": error}
        else:
            yield {"name": name, "title": found.title, "presets": presets}
    counted.keep()


def plan(
    name: str, *, preset: str = "paper", where: str | None = None, seeds: Sequence[int] | None = None
) -> pandas.DataFrame:
    """What a run would do: one row a cell, with its labels, its seed and its work; runs nothing.

    name: of a suite, or the path of a file. where: a filter as of `-k`. Columns gradient_steps and image_passes are NaN
    where the work cannot be told before. SpecError: no such suite or preset; NothingMatched: the filter leaves nothing.

    >>> import fatbench
    >>> set(fatbench.plan("sfat-cifar10", preset="smoke", seeds=[6])["seed"].tolist())
    {6}
    """
    import pandas

    chosen = files.load(name).plan(preset, seeds, where)
    rows = []
    for cell in chosen.unique():
        work = cost.cell_work(cell, chosen)
        counted = {} if work is None else {"gradient_steps": work.gradient_steps, "image_passes": work.image_passes}
        rows.append({"cell": cell.id, **cell.key, "seed": cell.spec["seed"], **counted})
    return pandas.DataFrame(rows)


# --- doing --------------------------------------------------------------------------------------------------------


def run(
    name: str,
    *,
    preset: str = "paper",
    where: str | None = None,
    seeds: Sequence[int] | None = None,
    jobs: int | None = None,
    device: str | None = None,
    path: str = "loop",
    precision: str | None = None,
    retry_failed: bool = False,
    db: str | None = None,
    data: str | Path | None = None,
    quiet: bool = False,
) -> pandas.DataFrame:
    """Run what is not done of a suite; the same call again goes on. One row a cell: labels, seed, status, error.

    Cells run in other processes, so a script calls this below `if __name__ == "__main__":`. A cell that fails leaves
    the others to run; its status is "failed", its error the last line of the traceback. Arguments are the options of
    `fatbench run suite`. quiet: without a line on stderr for every cell. SpecError, NothingMatched, MachineError:
    nothing was run. KeyboardInterrupt: what was done is stored.

    >>> import fatbench
    >>> done = fatbench.run("sfat-cifar10", preset="smoke", where="optimizer=FedAvg and method=SFAT", quiet=True)
    >>> set(done["status"])
    {'done'}
    """
    import pandas

    from fatbench.run import progress, start

    chosen = files.load(name).plan(preset, seeds, where)
    said = _Lines(f"suite {chosen.suite}, preset {chosen.preset}", quiet)
    folder = None if data is None else Path(data)
    try:
        start.run(
            start.jobs_of(chosen), said, jobs_at_once=jobs, device=device, path=path, precision=precision,
            retry_failed=retry_failed, db=db, data=folder,
        )  # fmt: skip
    except SystemExit as over:
        if over.code != 1:  # 1: some cells failed, as the rows say
            raise KeyboardInterrupt from None
    with opened(db) as store:
        rows = progress.of(chosen, store)
    return pandas.DataFrame(
        [
            {"cell": r.cell.id, **r.cell.key, "seed": r.cell.spec["seed"], "status": r.status, "error": r.error}
            for r in rows
        ]
    )


class _Lines:
    """Tells a person how a run goes on, by a line for every cell that is over."""

    def __init__(self, what: str, quiet: bool) -> None:
        self.what, self.quiet = what, quiet

    def begin(self, jobs: Sequence[Job], before: Mapping[str, str], lanes: Sequence[str]) -> None:
        done = sum(state == "done" for state in before.values())
        self._say(f"{self.what}: {len(jobs)} cells, {done} done, {len(jobs) - done} to go")

    def see(self, lane: int, event: Event) -> None:
        if event.stage == "cell" or event.kind == "failed":
            self._say(f"{event.cell} {event.kind}{f': {event.message}' if event.message else ''}")

    def summary(
        self,
        cells: int,
        failed: Sequence[str],
        interrupted: Sequence[str],
        elsewhere: Sequence[str],
        changed: Mapping[str, Mapping[str, str]],
    ) -> None:
        left = len(failed) + len(interrupted) + len(elsewhere) + len(changed)
        self._say(f"{self.what}: {cells - left} of {cells} cells done")

    def _say(self, text: str) -> None:
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)


def evaluate(
    module: nn.Module | str | Path,
    *,
    dataset: str | Mapping[str, Any],
    attacks: Sequence[str] = evaluated.DEFAULT_ATTACKS,
    network: str | None = None,
    eps: str = "8/255",
    n: int | None = None,
    batch: int = 500,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    outputs: evaluated.Outputs = "logits",
    channels: evaluated.Channels = "rgb",
    size: int | None = None,
    name: str | None = None,
    device: str | None = None,
    db: str | None = None,
    data: str | Path | None = None,
    quiet: bool = True,
) -> Table:
    """Attack a model that was trained anywhere: a table of one row, with what is doubtful about it.

    module: a module in memory, which is left as it was; or the file of a state dict, and then `network` names what it
    belongs to, "timm/NAME" or "FILE.py:FUNCTION". The first n test images of `dataset` are attacked; `attacks` as after
    `--attack`: names, or "{name: pgd, eps: 8/255, step: 2/255, steps: 50}". mean, std, outputs, channels, size: the
    preprocessing of the network, see docs/evaluate.md. db: where the numbers are stored; None: nowhere.
    SpecError: the network does not fit its file, or the images; MachineError: data missing, file unreadable.

    >>> import torch, fatbench
    >>> module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> fatbench.evaluate(module, dataset="digits", attacks=["fgsm"], n=50).frame()["metric"].tolist()
    ['natural', 'fgsm']
    """
    from fatbench.run import brought

    preprocessing: dict[str, Any] = {"mean": tuple(mean), "std": tuple(std), "outputs": outputs, "channels": channels}
    if not isinstance(module, (str, Path)):
        found = brought.from_module(module, name, **preprocessing)
    elif network is None:
        raise SpecError(f"{module}: say its network, timm/NAME or FILE.py:FUNCTION")
    else:
        found = brought.from_file(Path(module), network, name, **preprocessing)
    task = brought.Task(dataset, evaluated.evaluations(list(attacks), eps, n, batch), size=size)
    with tempfile.TemporaryDirectory() as nowhere:
        url = db or str(Path(nowhere) / "evaluate.db")
        said = _Lines("", quiet)
        folder = None if data is None else Path(data)
        cell, outcome = brought.evaluate(
            found, task, db=url, data=folder, device=device, notify=lambda event: said.see(0, event)
        )
        with opened(url) as store:
            assert store is not None
            if outcome != "done":
                errors = [row.error.strip().splitlines()[-1] for row in store.stages([cell]).values() if row.error]
                raise FatbenchError(f"{found.model.name}: {outcome}: {'; '.join(errors)}")
            return Table(tables(*reporting_evaluated.suite_and_plan(store, f"id={cell}"), store))


# --- reading ------------------------------------------------------------------------------------------------------


def results(
    name: str | None = None, *, preset: str | None = None, where: str | None = None, db: str | None = None
) -> pandas.DataFrame:
    """Every number in the database, one row each, with what produced it; of one suite with the labels of its axes.

    Columns: cell, the axes, seed, stage ("train", or an evaluation), metric, round, client (-1: of none), value, n, and
    the provenance suite, preset, commit, dirty, device, precision, created, run, attack (all its settings), flags (such
    as that the model's natural accuracy is at chance; separated by ";"). Values are fractions, not per cent. An axis
    with the name of another column is called "axis:NAME". preset: default the first that was run. An experiment that
    stands at several points of the grid has a row for each. SpecError: no such suite.

    >>> import fatbench
    >>> found = fatbench.results("sfat-cifar10", preset="smoke")
    >>> accuracies = found[found["stage"] != "train"].pivot_table(index="method", columns="metric", values="value")
    """
    import pandas

    from fatbench.report import flags
    from fatbench.suite import words

    with opened(db) as store:
        keys: dict[str, list[dict[str, str]]] | None = None
        if name is not None:
            keys = {}
            for cell in planned(name, preset, None, where, store)[1].cells:
                keys.setdefault(cell.id, []).append(cell.key)
        numbers = [] if store is None else store.measurements(None if keys is None else list(keys))
        flags.mark(numbers, {} if store is None else store.cells(list({number["cell"] for number in numbers})))
    rows = []
    attack: dict[str, str] = {}
    for number in numbers:
        text, doubts = number.pop("settings"), ";".join(number.pop("flags"))
        if text is not None and text not in attack:
            attack[text] = words.full(json.loads(text))
        for key in [{}] if keys is None else keys[number["cell"]]:
            labels = {axis if axis not in number else f"axis:{axis}": label for axis, label in key.items()}
            rows.append({"cell": number["cell"], **labels, **number, "attack": attack.get(text), "flags": doubts})
    order = ["cell", "suite", "preset", "seed", "stage", "metric", "round", "client", "value", "n"]
    frame = pandas.DataFrame(rows)
    if frame.empty:
        return pandas.DataFrame(columns=order)
    axes = [column for column in frame if column not in numbers[0] and column not in ("attack", "flags")]
    first = ["cell", *axes, *order[3:]]
    return frame[first + [column for column in frame if column not in first]]


def table(
    name: str,
    id: str | None = None,
    *,
    preset: str | None = None,
    select: Checkpoint = "last",
    published: bool = True,
    where: str | None = None,
    seeds: Sequence[int] | None = None,
    with_evaluated: bool = False,
    db: str | None = None,
) -> Table:
    """The tables of a suite, or the one called `id`: measured beside published.

    preset: default the first that was run. with_evaluated: also rows of models that `fatbench evaluate --like NAME`
    judged. The name "evaluate" is the table of all evaluated models. SpecError: no such suite, preset or table.

    >>> import fatbench
    >>> print(fatbench.table("sfat-cifar10", "T3", preset="smoke").markdown().splitlines()[0])
    ### T3: SFAT Table 3, CIFAR-10, Non-IID: accuracy (%) [SMOKE PRESET - not comparable with published numbers]
    """
    with opened(db) as store:
        suite, chosen = planned(name, preset, seeds, where, store)
        more = reporting_evaluated.beside(chosen, store) if with_evaluated else []
        grids = tables(suite, chosen, store, select=select, published=published, evaluated=more)
    known = [grid.id for grid in grids]
    if id is not None and id not in known:
        raise SpecError(f"suite '{suite.name}' has no table '{id}'{did_you_mean(id, known)}")
    return Table([grid for grid in grids if id in (None, grid.id)])


@dataclass(frozen=True)
class Table:
    """Tables of a suite, ready to be shown: a notebook shows them as HTML."""

    grids: list[Grid]

    def __repr__(self) -> str:
        return self.markdown()

    def _repr_html_(self) -> str:
        from fatbench.report import html

        return html.fragment(self.grids)

    def markdown(self) -> str:
        """As `fatbench report --format markdown`."""
        return render(self.grids, "markdown")

    def latex(self) -> str:
        """As `fatbench report --format latex`."""
        return render(self.grids, "latex")

    def frame(self) -> pandas.DataFrame:
        """One row a number that the tables show: labels, metric, mean, std, n, published, flags; fractions."""
        import pandas

        return pandas.read_csv(StringIO(render(self.grids, "csv")), keep_default_na=True)


# --- what the commands share --------------------------------------------------------------------------------------


def planned(
    name: str, preset: str | None, seeds: Sequence[int] | None, where: str | None, store: Store | None
) -> tuple[Suite, Plan]:
    """A suite and the plan to look at: the preset asked for, else the first that has been run, else paper."""
    from fatbench.run import progress

    if name == evaluated.SUITE and name not in files.available():
        return reporting_evaluated.suite_and_plan(store, where)
    chosen = files.load(name)
    if preset is None and store is not None:
        preset = progress.preset_run(chosen, store)
    return chosen, chosen.plan(preset or "paper", seeds, where)
