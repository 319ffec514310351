"""What the commands print for people: plain text that rich colours on a terminal. Imports no torch."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fatbench import settings
from fatbench.data import catalogue
from fatbench.errors import SpecError
from fatbench.suite import format_call, plugins, signatures, weights
from fatbench.suite.papers import paper_of

if TYPE_CHECKING:
    from fatbench.runner.progress import CellProgress
    from fatbench.store.stages import StageRow
    from fatbench.suite.cells import Plan
    from fatbench.suite.duration import Estimate
    from fatbench.suite.entry import Work
    from fatbench.suite.files import Suite
    from fatbench.suite.schedule import Schedule

COLOURS = {
    "done": "green",
    "failed": "red",
    "changed": "yellow",
    "running": "yellow",
    "todo": "dim",
    "complete": "green",
    "variant": "yellow",
    "damaged": "red",
    "missing": "dim",
    "interrupted": "yellow",
}


def new_console() -> Console:
    """The terminal, or a pipe."""
    console = Console(highlight=False, markup=False, soft_wrap=False)  # names may hold brackets
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200  # a pipe has no width: do not cut what a script may want
    return console


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


LONG = 200  # rows; Rich takes a millisecond for each
NARROW = 8  # letters that are left of a text at least


def print_rows(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()
) -> None:
    """A table, one line a row. If it is too wide, what all rows share is said once above it, then texts are cut."""
    widths = {i: max(len(column), *(len(row[i]) for row in rows)) for i, column in enumerate(columns)}

    def excess() -> int:
        return sum(widths.values()) + 2 * (len(widths) - 1) - console.width

    if excess() > 0 and len(rows) > 1:
        same = [i for i in widths if all(row[i] == rows[0][i] for row in rows)]
        widths = {i: width for i, width in widths.items() if i not in same}
        if same:
            console.print(
                f"all: {', '.join(f'{columns[i]} {rows[0][i]}' for i in same)}",
                style="dim",
                soft_wrap=True,
            )
    texts = [i for i in widths if i and columns[i] not in (*right, "presets", GOT)]  # a command is of use whole
    while excess() > 0 and texts and widths[widest := max(texts, key=widths.__getitem__)] > NARROW:
        widths[widest] -= 1

    def line(row: Sequence[str]) -> str:
        cut = {i: row[i] if len(row[i]) <= n else f"{row[i][: n - 1]}…" for i, n in widths.items()}
        return "  ".join(
            f"{text:>{widths[i]}}" if columns[i] in right else f"{text:{widths[i]}}" for i, text in cut.items()
        ).rstrip()

    lines = [line(columns), "─" * min(excess() + console.width, console.width), *map(line, rows)]
    if len(rows) > LONG:
        console.file.write("\n".join([*lines, ""]))
        return
    for text in map(Text, lines):
        for state, colour in COLOURS.items():
            text.highlight_regex(rf"(?<=  ){state}(?=  |$)", colour)
        console.print(text, no_wrap=True, overflow="ignore", crop=False)


def suites(rows: Sequence[Mapping[str, Any]], hidden: int) -> None:
    """`suite list`: a line a suite under the name of its paper; hidden: how many are not shown."""
    console = new_console()
    names = max((len(row["name"]) for row in rows), default=0)
    papers: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        papers.setdefault(paper_of(row["name"]), []).append(row)
    for paper, group in papers.items():
        console.print(f"\n{paper}", style="bold")
        for row in group:
            cells = row["presets"].get("paper", "")
            title = re.sub(r"^[\w ]*?,? (?=(Table|Figure)s? \d)", "", row["title"])  # without the name of the paper
            line = f"  {row['name']:{names}} {cells:>5}  {title}"
            console.print(line, no_wrap=True, overflow="ellipsis")
    more = f"\n{hidden} more on images as JPEG: --all" if hidden else ""
    console.print(
        f"\nNumbers are cells (training runs) of the preset paper: fatbench suite show NAME{more}",
        style="dim",
    )


def suite(chosen: Suite) -> None:
    """`suite show`."""
    console = new_console()
    console.print(Text.assemble((chosen.name, "bold"), f"  {chosen.title}"))
    if chosen.description:
        console.print(chosen.description)
    console.print()
    for axis, labels in chosen.axes().items():
        console.print(f"  {axis}: {', '.join(labels)}")
    for preset in chosen.presets():
        plan = chosen.plan(preset, refuse=False)
        seeds = sorted({cell.spec["seed"] for cell in plan.cells})
        counted = f": {len(plan.to_run())} cells, seeds {', '.join(map(str, seeds))}"
        console.print(Text.assemble((f"\npreset {preset}", "bold"), counted, f"\n  {plan.note}" if plan.note else ""))
        console.print(f"  evaluated at {', '.join(plan.checkpoints)}:{'' if plan.metrics() else ' nothing'}")
        for metric, attacks in _attacks(plan).items():
            console.print(f"    {format_call.attack(metric, attacks)}")
        _weights(console, plan)
        for key, reason in plan.excluded:
            console.print(f"  left out: {', '.join(key.values())}: {reason}", style="dim")
    console.print()
    for table in chosen.tables:
        console.print(f"  table {table.id}: {table.title}")
    for figure in chosen.figures:
        console.print(f"  figure {figure.id}: {figure.title}")
    console.print(f"\n{chosen.file}", style="dim")


def _weights(console: Console, what: Plan) -> None:
    """The weights that a preset wants: which cell trains them, or where their file goes and if it is here."""
    root = settings.data_folder()
    cells = what.to_run()
    for begin in {cell.origin.id: cell.origin for cell in cells if cell.origin is not None}.values():
        said = ", ".join([begin.suite, *begin.key.values(), f"seed {begin.spec['seed']}"])
        console.print(f"  weights of cell {begin.id}, which runs first: {said}")
    for text in weights.weights_of(cell.spec for cell in cells if cell.origin is None):
        console.print(f"  weights {weights.describe(text, root)}")


def _attacks(what: Plan) -> dict[str, list[dict[str, Any]]]:
    """Metric -> the attacks it stands for in this preset."""
    found: dict[str, list[dict[str, Any]]] = {}
    for evaluations in {id(cell.evaluations): cell.evaluations for cell in what.cells}.values():
        for evaluation in evaluations:
            on = {} if evaluation.origin is None else {"computed on": f"{evaluation.origin.shown}'s model"}
            found.setdefault(evaluation.label, []).append({**evaluation.attack, **on})
    return found


def plan(what: Plan, works: Mapping[str, Work | None], total: Work, time: Estimate, on: str | None = None) -> None:
    """`plan suite`; on: the GPU that the time is an estimate for."""
    from fatbench.suite import cost, memory_need

    console = new_console()
    cells = what.to_run()
    axes = list(dict.fromkeys(axis for cell in cells for axis in cell.key))
    rows = []
    for cell in cells:
        work = works[cell.id]
        counts = ("?", "?") if work is None else (_short(work.gradient_steps), _short(work.image_passes))
        rows.append([cell.id, *(cell.key.get(axis, "") for axis in axes), str(cell.spec["seed"]), *counts])
    numbers = ("seed", "steps", "images")
    print_rows(console, ("cell", *axes, *numbers), rows, numbers)
    console.print(f"suite {what.suite}, preset {what.preset}: {len(cells)} cells")
    _weights(console, what)
    console.print(
        f"{_short(total.gradient_steps)} gradient steps, {_short(total.forward)} forward and"
        f" {_short(total.backward)} backward image passes (AutoAttack counted as if every image survived)"
    )
    if all(cost.parameters(cell.spec) is not None for cell in cells):
        console.print(
            f"{_bytes(total.bytes_up)} uploaded and {_bytes(total.bytes_down)} downloaded by the clients,"
            f" {_bytes(total.disk)} of checkpoints on this disk"
        )
    else:
        console.print(
            "bytes uploaded, downloaded and on this disk: unknown, a data set or model does not say its size"
            " (images of its DataEntry, or parameters of its ModelEntry)"
        )
    if on is None and (said := memory_need.line(cell.spec for cell in cells)):
        console.print(said)
    console.print(_how_long(len(cells), time, on))


def schedule(what: Schedule | None, on: str | None) -> None:
    """`plan --gpus`."""
    from fatbench.cli.watch import duration
    from fatbench.suite.schedule import SQLITE

    if what is None:
        print("schedule: unknown, nothing comparable has run here (--calibrate measures for about 20 s)")
        return
    kind = "of that kind" if on else "as fast as this machine's worker"
    enough = "SQLite is enough on one machine" if what.writes <= SQLITE else "PostgreSQL is needed (docs/clusters.md)"
    print(
        f"on {what.gpus} GPUs {kind}: {duration(what.seconds)},"
        f" {100 * what.idle:.0f} % of their time idle (the longest cell takes {duration(what.longest)});"
        f" {what.writes:.3g} database writes per second: {enough}"
    )


def _how_long(cells: int, time: Estimate, on: str | None) -> str:
    """The answer to "how long?"."""
    done = f"; {time.done} of {cells} cells are done" if time.done else ""
    if time.done == cells:
        return "no time left: all cells are done"
    if time.unknown == cells - time.done:
        if on is not None:
            return f"time: unknown, the size of the data set is not known until it is read{done}"
        return f"time: unknown, nothing comparable has run here (--calibrate measures for about 20 s){done}"
    from fatbench.cli.watch import duration
    from fatbench.runner.executors.local import slots

    bound = "; an upper bound: AutoAttack as if every image survived" * time.bound
    if on is not None:
        rest = f"; {time.unknown} cells not counted" * (time.unknown > 0)
        return (
            f"time left on one {on.upper()}: about {duration(time.seconds)}{done}{rest}{bound}\n"
            "an estimate: operations and kernels were counted on this machine; the GPU's speed is from its data sheet"
        )
    here = len(slots(None, None))
    side = f", {duration(time.seconds / min(here, cells))} on the {here} workers of this machine" * (here > 1)
    rest = f"; {time.unknown} cells not counted: nothing comparable has run here" * (time.unknown > 0)
    return f"time left: about {duration(time.seconds)} on one worker{side}{done}{rest}{bound}"


def _short(value: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


def _bytes(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def status(what: Plan, rows: Sequence[CellProgress]) -> None:
    """`status NAME`."""
    from fatbench.cli.watch import said_once
    from fatbench.runner import progress, versions

    console = new_console()
    axes = list(dict.fromkeys(axis for row in rows for axis in row.cell.key))
    labels: dict[tuple[str, str], dict[str, None]] = {}  # several where points of the grid are one cell
    for cell in what.cells:
        for axis, label in cell.key.items():
            labels.setdefault((cell.id, axis), {})[label] = None
    shown = [
        [row.cell.id, *("; ".join(labels.get((row.cell.id, axis), ())) for axis in axes), str(row.cell.spec["seed"]),
         row.status, f"{row.round}/{row.total}", f"{row.stages_done}/{row.stages}"]
        for row in rows
    ]  # fmt: skip
    print_rows(console, ("cell", *axes, "seed", "state", "rounds", "stages"), shown, ("seed", "rounds", "stages"))
    counts = progress.count(rows).items()
    console.print(f"suite {what.suite}, preset {what.preset}: " + ", ".join(f"{n} {state}" for state, n in counts))
    if changed := {row.cell.id: row.changed for row in rows if row.changed}:
        console.print("\n".join(versions.lines(changed)), style="yellow")
    failed: dict[str, list[str]] = {}
    for row in rows:
        if row.status == "failed":
            failed.setdefault(row.error, []).append(row.cell.id)
    for error, ids in failed.items():
        console.print(f"failed: {said_once(ids, error)}", style="red")


def all_status(counts: Mapping[tuple[str, str], Mapping[str, int]]) -> None:
    """`status`: what the database holds."""
    from fatbench.runner.progress import STATES

    console = new_console()
    if not counts:
        console.print("nothing has been run yet: fatbench run NAME (see fatbench suite list)")
        return
    table = _table("suite", "preset", *STATES, right=STATES)
    for (name, preset), states in counts.items():
        table.add_row(name, preset, *(str(states[state]) for state in STATES))
    console.print(table)
    console.print("Cells by the state of their training; fatbench status NAME also counts evaluations.", style="dim")


def cell(
    id: str,
    name: str,
    spec: Mapping[str, Any],
    stages: Mapping[tuple[str, str], StageRow],
    numbers: Sequence[Mapping[str, Any]],
    runs: Sequence[Mapping[str, Any]],
    earlier: int = 0,
) -> None:
    """`show CELL`: its name, its accuracies and why to doubt them; then settings, stages, the last round, the runs.

    earlier: how many numbers of earlier rounds are not among `numbers`.
    """
    from fatbench.report.numbers.cell_facts import settings as settings_of
    from fatbench.store.stage_names import parsed
    from fatbench.suite.external_models import place

    console = new_console()
    console.print(f"cell {id}{f': {name}' if name else ''}", style="bold")
    made = [(parsed(row["stage"]), row) for row in numbers if row["client"] < 0]
    accuracies = [(stage, row) for stage, row in made if row["metric"] == stage.metric]
    table = _table(
        "evaluated", "accuracy", "n", "model of round", "precision", right=("accuracy", "n", "model of round")
    )
    for stage, row in sorted(accuracies, key=lambda one: (place(one[0].metric), one[0].metric)):
        accuracy = f"{100 * row['value']:.2f} %{'†' * bool(row['doubts'])}"
        table.add_row(stage.metric, accuracy, str(row["n"]), str(stage.round), stage.precision)
    if accuracies:
        console.print(table)
    for doubt in dict.fromkeys(doubt for row in numbers for doubt in row["doubts"]):
        about = dict.fromkeys(row["metric"] for _, row in accuracies if doubt in row["doubts"])
        console.print(f"† {doubt} ({', '.join(about)})", style="red")
    for what, text, _ in settings_of(spec):
        console.print(f"{what}: {text}", soft_wrap=True)
    table = _table("stage", "state", "done", "run", "attack", right=("done", "run"))
    for (_, stage_name), stage_row in sorted(stages.items()):
        state = Text(stage_row.status, COLOURS.get(stage_row.status, ""))
        attack = format_call.full(stage_row.settings) if stage_row.settings else ""
        table.add_row(stage_name, state, f"{stage_row.round}/{stage_row.total}", str(stage_row.run or ""), attack)
    console.print(table)
    last = max((row["round"] for row in numbers if row["stage"] == "train"), default=0)
    ends = [row for row in numbers if row["stage"] == "train" and row["round"] == last]
    table = _table("training, last round", "value", right=("value",))
    for row in ends:
        if row["client"] < 0:
            table.add_row(row["metric"], f"{row['value']:.6g}")
    console.print(table)
    hidden = earlier + len(numbers) - len(accuracies) - sum(row["client"] < 0 for row in ends)
    if hidden:
        console.print(f"{hidden} further numbers, of clients and earlier rounds: --format json", style="dim")
    for run in runs:
        console.print(
            f"run {run['id']}: {run['stage']} {run['status']}, {run['started']} on {run['host']},"
            f"{_slurm(run)} {run['device']},"
            f" {run['precision']}, {_path(run)}commit {str(run['commit'])[:12]}{' (modified)' if run['dirty'] else ''}"
        )


def _slurm(run: Mapping[str, Any]) -> str:
    return f" SLURM job {run['slurm_job']}," if run.get("slurm_job") else ""


def _path(run: Mapping[str, Any]) -> str:
    """How a run trained, where it was not in the usual way: "fast 45 clients of up to 9 cells, "."""
    if run["stage"] != "train" or run.get("path") in (None, "loop"):
        return ""
    many = [f"{run[key]} {what}" for key, what in (("stack", "clients"), ("vectorise", "cells")) if run.get(key)]
    return f"{run['path']} {' of up to '.join(many)}".strip() + ", "


def evaluation(results: Sequence[Mapping[str, Any]], what: str) -> None:
    """`evaluate`: the accuracy under the strongest attack in a sentence, then every attack, its interval and doubts."""
    from fatbench.api.evaluating import answer
    from fatbench.report.numbers.statistics import wilson

    console = new_console()
    console.print(f"{answer(results)}: {what}", style="bold", soft_wrap=True)
    table = _table("attack", "accuracy", "95 % interval", "images", "settings", right=("accuracy", "images"))
    for row in results:
        low, high = wilson(round(row["accuracy"] * row["n"]), row["n"])
        accuracy = f"{100 * row['accuracy']:.2f} %{'†' * bool(row['doubts'])}"
        settings_of = _called(row["attack"]) if row["attack"] else ""
        table.add_row(row["label"], accuracy, f"{100 * low:.1f} to {100 * high:.1f}", str(row["n"]), settings_of)
    console.print(table)
    for doubt in dict.fromkeys(doubt for row in results for doubt in row["doubts"]):
        about = ", ".join(row["label"] for row in results if doubt in row["doubts"])
        console.print(f"† {doubt} ({about})", style="red", soft_wrap=True)


def _called(attack: Mapping[str, Any]) -> str:
    """An attack with its numbers; every setting where the function is not known here."""
    try:
        return format_call.brief("Attack", attack)
    except SpecError:
        return format_call.full(attack)


def datasets(root: Path, rows: Sequence[Mapping[str, Any]], files: Sequence[Mapping[str, Any]] = ()) -> None:
    """`data list`."""
    console = new_console()
    numbers = ("train", "test")
    shown = [
        [row["name"], row["state"], str(row["train"] or ""), str(row["test"] or ""),
         *([", ".join(row["presets"])] if "presets" in row else []), _got(row)]
        for row in rows
    ]  # fmt: skip
    if shown:
        extra = ["presets"] if len(shown[0]) > 5 else []
        print_rows(console, ("data set", "state", *numbers, *extra, GOT), shown, numbers)
    if files:
        console.print()
        print_rows(
            console,
            ("weights", "state", GOT),
            [[Path(row["name"]).name.partition("@")[0], row["state"], _got(row)] for row in files],
        )
    for row in [*rows, *files]:
        if row["state"] in ("variant", "damaged"):
            console.print(f"{row['name']}: {row['message']}")
    console.print(f"looked in {root} (--data, FATBENCH_DATA)", style="dim")


GOT = "where, or how to get it"


def _got(row: Mapping[str, Any]) -> str:
    """Where a data set or a file is; of a missing one the command that fetches it."""
    if row["state"] != "missing" or row["name"] not in (*catalogue.CATALOGUE, *weights.WEIGHTS):
        return str(row["where"] or "").replace(str(Path.home()), "~", 1)
    size = catalogue.CATALOGUE[row["name"]].download if row["name"] in catalogue.CATALOGUE else 0
    return f"fatbench data prepare {row['name']}" + (f" ({_bytes(size)})" if size else "")


def models(rows: Sequence[Mapping[str, Any]]) -> None:
    """`models`: per cent, and the file or how its name begins."""
    known = dict.fromkeys(metric for row in rows for metric in row["numbers"])
    shown = [metric for metric in ("natural", "pgd20", "autoattack") if metric in known] or [*known][:3]
    print_rows(new_console(), ("network", *shown, GOT), [
        [row["name"], *(f"{100 * row['numbers'][m]:.2f}" if m in row["numbers"] else "" for m in shown),
         row["file"] or f"SHA-256 {row['sha256'][:12]}"]
        for row in rows
    ], shown)  # fmt: skip


MPS = "/tmp/nvidia-mps"  # where NVIDIA's daemon has its pipes unless told otherwise


def doctor(db: str | None, data: Path | None) -> None:
    """`doctor`: a line for each fact."""
    table = Table.grid(padding=(0, 2))
    for name, text in machine(db, data):
        table.add_row(Text(name, "bold"), text)
    new_console().print(table)


def machine(db: str | None, data: Path | None) -> list[tuple[str, str]]:
    """(name, fact): versions, devices, folders, what a bug report needs. A name can stand twice."""
    from fatbench.runner import provenance
    from fatbench.store import inputs, integrity
    from fatbench.version import __version__

    code = provenance.code_version()
    lines: list[tuple[str, str]] = [
        ("fatbench", f"{__version__}, commit {code['commit']}{' (modified)' if code['dirty'] else ''}"),
        ("python", f"{platform.python_version()} at {sys.executable}"),
        ("system", f"{platform.platform()}, {provenance.processor()}, {os.cpu_count()} cores"),
        *([("cpu", "no instructions for bfloat16: use --precision fp32")] if provenance.emulates_bfloat16() else []),
    ]
    try:
        import torch

        lines.append(("torch", f"{torch.__version__}, threads {torch.get_num_threads()}"))
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            lines.append((f"cuda:{i}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"))
        if torch.cuda.device_count():
            running = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS), "control").exists()
            said = (
                "running: cells on one GPU compute side by side"
                if running
                else "not running: the cells on a GPU take turns"
            )
            lines.append(("mps", f"{said} (docs/gpu.md, Several cells on one GPU)"))
        if not torch.cuda.device_count():
            lines.append(("cuda", "no GPU found"))
    except (ImportError, OSError) as error:
        lines.append(("torch", f"does not import: {error}"))
    versions = provenance.produced_by("cpu")["versions"]
    lines.append(("packages", ", ".join(f"{name} {v}" for name, v in versions.items() if name != "python")))
    url = settings.database(db)
    try:
        state = integrity.check(url, contents=False)
    except Exception as error:
        state = f"{error}"
    lines.append(("database", f"{settings.shown_url(url)}: {state}"))
    root = settings.data_folder(str(data) if data else None)
    lines.append(("data", str(root)))
    if used := signatures.plugins():
        lines.append(("plug-ins", ", ".join(f"{inputs.describe(plugins.version(file))} at {file}" for file in used)))
    lines += [("weights", weights.describe(name, root)) for name in weights.WEIGHTS]
    lines.append(("checkpoints", str(settings.files_folder(url))))
    return lines
