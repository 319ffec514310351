"""Arguments and options that several commands share, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fatbench.cli import completing
from fatbench.settings import PATHS

Name = Annotated[
    str,
    typer.Argument(
        help="A suite's name, or the path of a YAML file.", show_default=False, autocompletion=completing.suites
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset", help="paper, quick, smoke, or another preset of the suite.", autocompletion=completing.presets
    ),
]
Smoke = Annotated[bool, typer.Option("--smoke", help="Short for --preset smoke.")]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "-k", metavar="FILTER", help="Only these cells: 'model=nin and aggregator=sfat'; given again: of these."
    ),
]
Seeds = Annotated[str | None, typer.Option("--seeds", help="Instead of the suite's seeds: 0-4, or 6,7.")]
Db = Annotated[str | None, typer.Option("--db", metavar="URL", help="Database: a path or an SQLAlchemy URL.")]
DataDir = Annotated[Path | None, typer.Option("--data", help="Folder of the data sets.")]
Plugin = Annotated[
    list[Path] | None, typer.Option("--plugin", metavar="FILE", help="A Python file whose tables extend ours.")
]
Format = Annotated[
    str, typer.Option("--format", help="text or json.", autocompletion=completing.one_of("text", "json"))
]
Cell = Annotated[
    str, typer.Argument(help="A cell's id, or its first letters.", show_default=False, autocompletion=completing.cells)
]
Select = Annotated[
    str,
    typer.Option(
        "--select",
        help="Checkpoint: last, best-val or best-test.",
        autocompletion=completing.one_of("last", "best-val", "best-test"),
    ),
]

# of `run` and `evaluate`
Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="Cells side by side; default: cores, or GPUs.")]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", help="auto, cpu, cuda, or cuda:0,1.", autocompletion=completing.one_of("auto", "cpu", "cuda")
    ),
]
PerGpu = Annotated[
    int | None,
    typer.Option("--per-gpu", min=1, help="Cells side by side on each GPU; default: as many as fit into its memory."),
]
Executor = Annotated[
    str,
    typer.Option("--executor", help="local, ray or slurm.", autocompletion=completing.one_of("local", "ray", "slurm")),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="fp32, tf32 (GPUs), or bf16; weights stay fp32.",
        autocompletion=completing.one_of("fp32", "tf32", "bf16"),
    ),
]
PathOption = Annotated[
    str,
    typer.Option(
        "--path",
        help="Local training: loop, fast (clients as one program), graphs (that, steps recorded), reference.",
        autocompletion=completing.one_of(*PATHS),
    ),
]
Microbatch = Annotated[
    int | None,
    typer.Option("--microbatch", min=1, help="At most so many images in the network at once: less memory."),
]
VectoriseOption = Annotated[
    int,
    typer.Option("--vectorise", min=1, help="Cells that each worker trains as one program, on --path fast."),
]
Retry = Annotated[bool, typer.Option("--retry-failed", help="Run failed stages again.")]
RerunChanged = Annotated[
    bool, typer.Option("--rerun-changed", help="Begin again what an older version of a plug-in computed.")
]
FailFast = Annotated[bool, typer.Option("--fail-fast", help="Stop at the first failure.")]
TimeLimit = Annotated[
    str | None,
    typer.Option("--time-limit", metavar="TIME", help="At most so long for a turn at a cell: 90s, 45m, 2h."),
]
Wait = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Wait for cells that other processes work on, and take over lost ones.")
]
DryRun = Annotated[bool, typer.Option("-n", "--dry-run", help="Say what would run, run nothing.")]
