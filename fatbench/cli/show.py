"""What the commands print for people: plain text that rich colours on a terminal. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fatbench import settings
from fatbench.data import catalogue
from fatbench.errors import SpecError
from fatbench.suite import format_call, plugins, weights
from fatbench.suite.entry import Work
from fatbench.suite.folders import is_jpeg, paper_of
from fatbench.suite.types import seeds_text

if TYPE_CHECKING:
    from fatbench.runner.progress import CellProgress
    from fatbench.store.stages import StageRow
    from fatbench.suite.cells import Plan
    from fatbench.suite.duration import Estimate, Schedule
    from fatbench.suite.files import Suite

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


LONG = 200  # rows; Rich takes a millisecond for each
GOT = "where, or how to get it"
WHOLE = ("presets", "attack", "settings", GOT)  # columns that are never cut: a command is of use whole
NARROW = 8  # letters that are left of a text at least


def print_rows(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], right_aligned: Sequence[str] = ()
) -> None:
    """A table, one line a row. If it is too wide, what all rows share is said once above it, then texts are cut."""
    widths = {i: max(map(len, (column, *(row[i] for row in rows)))) for i, column in enumerate(columns)}

    def excess() -> int:
        return sum(widths.values()) + 2 * (len(widths) - 1) - console.width

    if excess() > 0 and len(rows) > 1:
        shared_columns = [i for i in widths if all(row[i] == rows[0][i] for row in rows)]
        widths = {i: width for i, width in widths.items() if i not in shared_columns}
        if shared_columns:
            said = ", ".join(f"{columns[i]} {rows[0][i]}" for i in shared_columns)
            console.print(f"all: {said}", style="dim", soft_wrap=True)
    texts = [i for i in widths if i and columns[i] not in (*right_aligned, *WHOLE)]
    while excess() > 0 and texts and widths[widest := max(texts, key=widths.__getitem__)] > NARROW:
        widths[widest] -= 1

    def line(row: Sequence[str]) -> str:
        cut = {i: row[i] if len(row[i]) <= n else f"{row[i][: n - 1]}…" for i, n in widths.items()}
        return "  ".join(
            f"{text:>{widths[i]}}" if columns[i] in right_aligned else f"{text:{widths[i]}}" for i, text in cut.items()
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
    """`list suites`: first one of each paper, then the others under their papers; hidden: how many are not shown."""
    console = new_console()
    names = max((len(row["name"]) for row in rows), default=0)
    by_paper: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if "weekend" in row["presets"] and not is_jpeg(row["name"]):
            by_paper.setdefault(paper_of(row["name"]), row)
    firsts = [*by_paper.values()]
    groups: dict[str, list[Mapping[str, Any]]] = {"One suite of each paper, to begin with": firsts} if firsts else {}
    for row in rows:
        if row not in firsts:
            groups.setdefault(paper_of(row["name"]), []).append(row)
    for heading, group in groups.items():
        console.print(f"\n{heading}", style="bold")
        for row in group:
            cells = row["presets"].get("paper", "")
            title = row["title"]
            if group is not firsts:  # without the name of the paper
                title = re.sub(r"^[\w ]*?,? (?=(Table|Figure)s? \d)", "", title)
            line = f"  {row['name']:{names}} {cells:>5}  {title}"
            console.print(line, no_wrap=True, overflow="ellipsis")
    hint = f"\n{hidden} more on images as JPEG: --all" if hidden else ""
    console.print(f"\nNumbers are cells (training runs) of the preset paper: fatbench show NAME{hint}", style="dim")


def suite(shown_suite: Suite) -> None:
    """`show NAME`."""
    console = new_console()
    console.print(Text.assemble((shown_suite.name, "bold"), f"  {shown_suite.title}"))
    if shown_suite.description:
        console.print(shown_suite.description)
    console.print()
    for axis, labels in shown_suite.axes().items():
        console.print(f"  {axis}: {', '.join(labels)}")
    for preset in shown_suite.presets():
        plan = shown_suite.plan(preset, refuse=False)
        seeds = seeds_text({cell.spec["seed"] for cell in plan.cells})
        count_text = f": {len(plan.to_run())} cells, seeds {seeds}"
        note = f"\n  {plan.note}" if plan.note else ""
        console.print(Text.assemble((f"\npreset {preset}", "bold"), count_text, note))
        console.print(f"  evaluated at {', '.join(plan.checkpoints)}:{'' if plan.metrics() else ' nothing'}")
        for metric, attacks in _attacks(plan).items():
            console.print(f"    {format_call.attack(metric, attacks)}")
        _weights(console, plan)
        for key, reason in plan.excluded:
            console.print(f"  left out: {', '.join(key.values())}: {reason}", style="dim")
    console.print()
    for table in shown_suite.tables:
        console.print(f"  table {table.id}: {table.title}")
    for figure in shown_suite.figures:
        console.print(f"  figure {figure.id}: {figure.title}")
    console.print(f"\n{shown_suite.file}", style="dim")


def _weights(console: Console, plan: Plan) -> None:
    """The weights that a preset wants: which cell trains them, or where their file goes and if it is here."""
    root = settings.data_folder()
    cells = plan.to_run()
    for begin in {cell.origin.id: cell.origin for cell in cells if cell.origin is not None}.values():
        origin_text = ", ".join([begin.suite, *begin.key.values(), f"seed {begin.spec['seed']}"])
        console.print(f"  weights of cell {begin.id}, which runs first: {origin_text}")
    for text in weights.weights_of(cell.spec for cell in cells if cell.origin is None):
        console.print(f"  weights {weights.describe(text, root)}")


def _attacks(plan: Plan) -> dict[str, list[dict[str, Any]]]:
    """Metric -> the attacks it stands for in this preset."""
    attacks_by_metric: dict[str, list[dict[str, Any]]] = {}
    for evaluations in {id(cell.evaluations): cell.evaluations for cell in plan.cells}.values():
        for evaluation in evaluations:
            origin = evaluation.origin
            origin_setting = {} if origin is None else {"computed on": f"{origin.display_name}'s model"}
            attacks_by_metric.setdefault(evaluation.label, []).append({**evaluation.attack, **origin_setting})
    return attacks_by_metric


def plan(
    shown_plan: Plan, works: Mapping[str, Work | None], total: Work, time: Estimate, gpu: str | None = None
) -> None:
    """`plan NAME`; gpu: the GPU that the time is an estimate for."""
    from fatbench.suite import cost

    console = new_console()
    cells = shown_plan.to_run()
    axes = list(dict.fromkeys(axis for cell in cells for axis in cell.key))
    rows = []
    for cell in cells:
        work = works[cell.id]
        counts = ("?", "?") if work is None else (_si_number(work.gradient_steps), _si_number(work.image_passes))
        rows.append([cell.id, *(cell.key.get(axis, "") for axis in axes), str(cell.spec["seed"]), *counts])
    numbers = ("seed", "steps", "images")
    print_rows(console, ("cell", *axes, *numbers), rows, numbers)
    console.print(f"suite {shown_plan.suite}, preset {shown_plan.preset}: {len(cells)} cells")
    _weights(console, shown_plan)
    unknown = [cell for cell in cells if works[cell.id] is None]
    if len(unknown) < len(cells):
        console.print(
            f"{_si_number(total.gradient_steps)} gradient steps, {_si_number(total.forward)} forward and"
            f" {_si_number(total.backward)} backward image passes (AutoAttack counted as if every image survived)"
        )
    if unknown:
        console.print(
            f"work of {len(unknown)} of {len(cells)} cells: unknown, nothing says how many clients or images they have,"
            " or what their algorithm does"
        )
    if any(cost.parameters(cell.spec) is None for cell in cells):
        console.print(
            "bytes uploaded, downloaded and on this disk: unknown, a data set or model does not say its size"
            " (images of its DataEntry, or parameters of its ModelEntry)"
        )
    elif not unknown:
        up, down, disk = (_si_number(size, "B") for size in (total.bytes_up, total.bytes_down, total.disk))
        console.print(f"{up} uploaded and {down} downloaded by the clients, {disk} of checkpoints on this disk")
    if gpu is None and (memory_line := cost.memory_line(cell.spec for cell in cells)):
        console.print(memory_line)
    console.print(_how_long(len(cells), time, gpu))


def schedule(gpu_schedule: Schedule | None, gpu: str | None) -> None:
    """`plan --jobs`."""
    from fatbench.cli.watch import duration
    from fatbench.suite.duration import SQLITE

    if gpu_schedule is None:
        print("schedule: unknown, nothing comparable has run here (--on here measures for about 20 s)")
        return
    kind = "of that kind" if gpu else "as fast as this machine's worker"
    sqlite = gpu_schedule.writes <= SQLITE
    advice = "SQLite is enough on one machine" if sqlite else "PostgreSQL is needed (docs/clusters.md)"
    print(
        f"on {gpu_schedule.gpus} workers {kind}: {duration(gpu_schedule.seconds)},"
        f" {100 * gpu_schedule.idle:.0f} % of their time idle (the longest cell takes "
        f"{duration(gpu_schedule.longest)});"
        f" {gpu_schedule.writes:.3g} database writes per second: {advice}"
    )


def _how_long(cells: int, time: Estimate, gpu: str | None) -> str:
    """The answer to "how long?"."""
    done_text = f"; {time.done} of {cells} cells are done" if time.done else ""
    if time.done == cells:
        return "no time left: all cells are done"
    if time.unknown == cells - time.done:
        if gpu is not None:
            return f"time: unknown, the size of the data set is not known until it is read{done_text}"
        return f"time: unknown, nothing comparable has run here (--on here measures for about 20 s){done_text}"
    from fatbench.cli.watch import duration
    from fatbench.runner.executors.local import slots

    bound = "; an upper bound: AutoAttack as if every image survived" * time.bound
    if gpu is not None:
        not_counted = f"; {time.unknown} cells not counted" * (time.unknown > 0)
        return (
            f"time left on one {gpu.upper()}: about {duration(time.seconds)}{done_text}{not_counted}{bound}\n"
            "an estimate: operations and kernels were counted on this machine; the GPU's speed is from its data sheet"
        )
    worker_count = len(slots(None, None))
    on_all = duration(time.seconds / min(worker_count, cells))
    side = f", {on_all} on the {worker_count} workers of this machine" * (worker_count > 1)
    not_counted = f"; {time.unknown} cells not counted: nothing comparable has run here" * (time.unknown > 0)
    return f"time left: about {duration(time.seconds)} on one worker{side}{done_text}{not_counted}{bound}"


def _si_number(value: float, unit: str = "") -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()


def status(plan: Plan, rows: Sequence[CellProgress]) -> None:
    """`status NAME`."""
    from fatbench.cli.watch import said_once
    from fatbench.runner import progress, versions

    console = new_console()
    axes = list(dict.fromkeys(axis for row in rows for axis in row.cell.key))
    labels: dict[tuple[str, str], dict[str, None]] = {}  # several where points of the grid are one cell
    for cell in plan.cells:
        for axis, label in cell.key.items():
            labels.setdefault((cell.id, axis), {})[label] = None
    status_rows = [
        [row.cell.id, *("; ".join(labels.get((row.cell.id, axis), ())) for axis in axes), str(row.cell.spec["seed"]),
         row.status, f"{row.round}/{row.total}", f"{row.stages_done}/{row.stages}"]
        for row in rows
    ]  # fmt: skip
    print_rows(console, ("cell", *axes, "seed", "state", "rounds", "stages"), status_rows, ("seed", "rounds", "stages"))
    counts = progress.count(rows).items()
    console.print(f"suite {plan.suite}, preset {plan.preset}: " + ", ".join(f"{n} {state}" for state, n in counts))
    own_rows = [row for row in rows if plugins.files(row.cell.spec)]
    if 0 < len(own_rows) < len(rows):
        own_counts = ", ".join(f"{n} {state}" for state, n in progress.count(own_rows).items() if n)
        console.print(f"own rows, of functions in a plug-in: {own_counts}")
    if changed := {row.cell.id: row.changed for row in rows if row.changed}:
        console.print("\n".join(versions.lines(changed)), style="yellow")
    cells_by_error: dict[str, list[str]] = {}
    for row in rows:
        if row.status == "failed":
            cells_by_error.setdefault(row.error, []).append(row.cell.id)
    for error, ids in cells_by_error.items():
        console.print(f"failed: {said_once(ids, error)}", style="red")


def all_status(counts: Mapping[tuple[str, str], Mapping[str, int]]) -> None:
    """`status`: what the database holds."""
    from fatbench.runner.progress import STATES

    console = new_console()
    if not counts:
        console.print("nothing has been run yet: fatbench run NAME (see fatbench list suites)")
        return
    rows = [[*name, *(str(states[state]) for state in STATES)] for name, states in counts.items()]
    print_rows(console, ("suite", "preset", *STATES), rows, STATES)
    console.print("Cells by the state of their training; fatbench status NAME also counts evaluations.", style="dim")


def cell(
    id: str,
    name: str,
    spec: Mapping[str, Any],
    stages: Mapping[tuple[str, str], StageRow],
    numbers: Sequence[Mapping[str, Any]],
    runs: Sequence[Mapping[str, Any]],
    earlier_count: int = 0,
) -> None:
    """`show CELL`: its name, its accuracies and why to doubt them; then settings, stages, the last round, the runs.

    earlier_count: how many numbers of earlier rounds are not among `numbers`.
    """
    from fatbench.report.sentences import way_back
    from fatbench.store.replicates import SIGN
    from fatbench.store.stage_names import parsed
    from fatbench.suite.standard_attacks import attack_name, strength

    console = new_console()
    console.print(f"cell {id}{f': {name}' if name else ''}", style="bold")
    model_numbers = [(parsed(row["stage"]), row) for row in numbers if row["client"] < 0]
    accuracies = [(stage, row) for stage, row in model_numbers if row["metric"] == stage.metric]
    evaluated = [
        [attack_name(stage.metric), _accuracy(row["value"], row["doubts"]), str(row["n"]), str(stage.round),
         stage.precision]
        for stage, row in sorted(accuracies, key=lambda one: (strength(one[0].metric), one[0].metric))
    ]  # fmt: skip
    counted = ("accuracy", "n", "model of round")
    if evaluated:
        print_rows(console, ("evaluated", *counted, "precision"), evaluated, counted)
    for doubt in dict.fromkeys(doubt for row in numbers for doubt in row["doubts"]):
        attack_names = dict.fromkeys(attack_name(row["metric"]) for _, row in accuracies if doubt in row["doubts"])
        console.print(f"† {doubt} ({', '.join(attack_names)})", style="red")
    for setting_name, text, _ in format_call.of_cell(spec):
        console.print(f"{setting_name}: {text}", soft_wrap=True)
    print_rows(console, ("stage", "state", "done", "run", "attack"), [
        [name, row.status, f"{row.round}/{row.total}", str(row.run or ""), _attack_text(row.settings)]
        for (_, name), row in sorted(stages.items())
    ], ("done", "run"))  # fmt: skip
    last_round = max((row["round"] for row in numbers if row["stage"] == "train"), default=0)
    ends = [row for row in numbers if row["stage"] == "train" and row["round"] == last_round]
    values = [[row["metric"], f"{row['value']:.6g}"] for row in ends if row["client"] < 0]
    print_rows(console, ("training, last round", "value"), values, ("value",))
    hidden = earlier_count + len(numbers) - len(accuracies) - sum(row["client"] < 0 for row in ends)
    if hidden:
        console.print(f"{hidden} further numbers, of clients and earlier rounds: --format json", style="dim")
    for run in runs:
        job = f" SLURM job {run['slurm_job']}," if run.get("slurm_job") else ""
        commit = f"commit {(run['commit'] or 'unknown')[:12]}{' (modified)' if run['dirty'] else ''}"
        console.print(
            f"run {run['id']}: {run['stage']} {run['status']}, {run['started']} on {run['host']},{job} {run['device']},"
            f" {run['precision']}, {_path(run)}{commit}"
        )
    if "evaluated" not in spec and any((stage, row.status) == ("train", "done") for (_, stage), row in stages.items()):
        console.print(f"computes it again: {way_back(id.partition(SIGN)[0])}", soft_wrap=True)


def _accuracy(value: float, doubts: Sequence[str]) -> str:
    return f"{100 * value:.2f} %{'†' * bool(doubts)}"


def _attack_text(settings: Mapping[str, Any] | None) -> str:
    """The settings of a stage's attack, and the code that computed it; empty of a training."""
    attack = dict(settings or {})
    code = attack.pop("implementation", "")
    return format_call.with_all_settings(attack) + f"; code: {code}" * bool(code) if attack else ""


def _path(run: Mapping[str, Any]) -> str:
    """How a run trained, where it was not in the usual way: "fast 45 clients of up to 9 cells, "."""
    if run["stage"] != "train" or run.get("path") in (None, "loop"):
        return ""
    batch_texts = [f"{run[key]} {unit}" for key, unit in (("stack", "clients"), ("vectorise", "cells")) if run.get(key)]
    return f"{run['path']} {' of up to '.join(batch_texts)}".strip() + ", "


def evaluation(results: Sequence[Mapping[str, Any]], subject: str) -> None:
    """`evaluate`: the accuracy under the strongest attack in a sentence, then every attack, its interval and doubts."""
    from fatbench.api.evaluating import answer
    from fatbench.methods.intervals import wilson
    from fatbench.suite.standard_attacks import attack_name

    console = new_console()
    console.print(f"{answer(results)}: {subject}", style="bold", soft_wrap=True)
    rows = []
    for row in results:
        low, high = wilson(round(row["accuracy"] * row["n"]), row["n"])
        settings_of = _settings_text(row["attack"]) if row["attack"] else ""
        interval, images = f"{100 * low:.1f} to {100 * high:.1f}", str(row["n"])
        accuracy = _accuracy(row["accuracy"], row["doubts"])
        rows.append([attack_name(row["label"]), accuracy, interval, images, settings_of])
    columns = ("attack", "accuracy", "95 % interval", "images", "settings")
    print_rows(console, columns, rows, ("accuracy", "images"))
    for doubt in dict.fromkeys(doubt for row in results for doubt in row["doubts"]):
        attack_names = ", ".join(attack_name(row["label"]) for row in results if doubt in row["doubts"])
        console.print(f"† {doubt} ({attack_names})", style="red", soft_wrap=True)


def runs_as_text(runs: Sequence[Mapping[str, Any]]) -> str:
    """Runs as lines of text: each run, then each evaluation with its values and their range."""
    lines = ["runs of this cell:"]
    for run in runs:
        lines.append(f"  {run['id']}  {run['device']}, {run['precision']}, commit {(run['commit'] or 'unknown')[:10]}")
    for stage in dict.fromkeys(stage for run in runs for stage in run["evaluations"]):
        values = [run["evaluations"].get(stage) for run in runs]
        measured_values = [value for value in values if value is not None]
        values_text = "  ".join("--" if value is None else f"{100 * value:.2f}" for value in values)
        apart = 100 * (max(measured_values) - min(measured_values))
        distance_text = f"  (apart {apart:.2f})" if len(measured_values) > 1 else ""
        lines.append(f"  {stage}: {values_text}{distance_text}")
    return "\n".join(lines)


def _settings_text(attack: Mapping[str, Any]) -> str:
    """An attack with its numbers; every setting where the function is not known here."""
    try:
        return format_call.brief("Attack", attack)
    except SpecError:
        return format_call.with_all_settings(attack)


def datasets(root: Path, rows: Sequence[Mapping[str, Any]], files: Sequence[Mapping[str, Any]] = ()) -> None:
    """`list data`."""
    console = new_console()
    numbers = ("train", "test")
    set_rows = [
        [row["name"], row["state"], str(row["train"] or ""), str(row["test"] or ""),
         *([", ".join(row["presets"])] if "presets" in row else []), row.get("terms", ""), _location(row)]
        for row in rows
    ]  # fmt: skip
    if set_rows:
        extra = ["presets"] if len(set_rows[0]) > 6 else []
        print_rows(console, ("data set", "state", *numbers, *extra, "terms of use", GOT), set_rows, numbers)
    if files:
        console.print()
        print_rows(
            console,
            ("weights", "state", "terms of use", GOT),
            [[Path(row["name"]).name.partition("@")[0], row["state"], row["terms"], _location(row)] for row in files],
        )
    for row in [*rows, *files]:
        if row["state"] in ("variant", "damaged"):
            console.print(f"{row['name']}: {row['message']}")
    console.print(f"looked in {root} (--data, FATBENCH_DATA)", style="dim")


def _location(row: Mapping[str, Any]) -> str:
    """Where a data set or a file is; of a missing one the command that fetches it."""
    if row["state"] != "missing" or row["name"] not in (*catalogue.CATALOGUE, *weights.WEIGHTS):
        return str(row["where"] or "").replace(str(Path.home()), "~", 1)
    size = catalogue.CATALOGUE[row["name"]].download if row["name"] in catalogue.CATALOGUE else 0
    return f"fatbench fetch {row['name']}" + (f" ({_si_number(size, 'B')})" if size else "")


def models(rows: Sequence[Mapping[str, Any]]) -> None:
    """`list models`: per cent and the radii of the attacks, the file or how its name begins, and how to attack one."""
    from fatbench.suite.standard_attacks import heading

    known_metrics = dict.fromkeys(metric for row in rows for metric in row["numbers"])
    usual = [metric for metric in ("natural", "pgd20", "autoattack") if metric in known_metrics]
    shown_metrics = usual or [*known_metrics][:3]
    headings = [heading(metric) for metric in shown_metrics]
    radii = [dict.fromkeys(str(attack["eps"]) for attack in row["attacks"].values() if "eps" in attack) for row in rows]
    print_rows(new_console(), ("network", *headings, "radius", GOT), [
        [row["name"], *(f"{100 * row['numbers'][m]:.2f}" if m in row["numbers"] else "" for m in shown_metrics),
         ", ".join(row_radii), row["file"] or f"SHA-256 {row['sha256'][:12]}"]
        for row, row_radii in zip(rows, radii, strict=True)
    ], headings)  # fmt: skip
    if example := next((row for row in rows if row["file"] and row["suite"] and row["preset"]), None):
        like = f"--like {example['suite']} --preset {example['preset']}"
        print(f"The same attacks on one: fatbench evaluate {example['file']} {like}")


def doctor(facts: Sequence[tuple[str, str]]) -> None:
    """`doctor`: a line for each fact."""
    table = Table.grid(padding=(0, 2))
    for name, text in facts:
        table.add_row(Text(name, "bold"), text)
    new_console().print(table)
