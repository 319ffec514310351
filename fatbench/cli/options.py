"""Arguments and options that several commands share, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fatbench import hub
from fatbench.cli import completing
from fatbench.errors import SpecError
from fatbench.settings import AUTO, PATHS, PRECISIONS

Name = Annotated[
    str,
    typer.Argument(help="Suite name, or path of a YAML file.", show_default=False, autocompletion=completing.suites),
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
        "-k",
        "--filter",
        metavar="FILTER",
        help="Only these cells: 'model=nin and method in [FAT, SFAT]'; if repeated, all must match.",
    ),
]
Seeds = Annotated[str | None, typer.Option("--seeds", help="Seeds to use instead of the suite's: 0-4, or 6,7.")]
Override = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting in all cells: algorithm.local.lr=0.02."),
]
Attacks = Annotated[
    list[str] | None,
    typer.Option(
        "--attacks",
        "--attack",
        metavar="LIST",
        help="Attacks to add where the preset has none: fgsm,pgd20,cw,autoattack.",
        autocompletion=completing.one_of("fgsm", "pgd20", "cw", "autoattack", "fgsm,pgd20,cw,autoattack"),
    ),
]
Runs = Annotated[
    str,
    typer.Option(
        "--runs",
        metavar="KEY=VALUE",
        help="Of cells run more than once, read these runs: precision=, device= or commit=.",
        autocompletion=completing.one_of("precision=fp32", "precision=tf32", "precision=bf16"),
    ),
]
Db = Annotated[str | None, typer.Option("--db", metavar="URL", help="Database: path or SQLAlchemy URL.")]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask on a terminal.")]
DataDir = Annotated[Path | None, typer.Option("--data", help="Folder with the data sets.")]
Plugin = Annotated[
    list[Path] | None, typer.Option("--plugin", metavar="FILE", help="Python file with functions of your own.")
]


def output_folder(output: Path | None) -> Path | None:
    """What `-o` names where a command writes several files. SpecError: it is stdout, a device or a file."""
    if output is not None and (
        str(output) == "-" or hub.address(output) is not None or (output.exists() and not output.is_dir())
    ):
        raise SpecError(f"-o {output}: expected a folder, for several files are written")
    return output


Format = Annotated[
    str, typer.Option("--format", help="text or json.", autocompletion=completing.one_of("text", "json"))
]
Cell = Annotated[
    str, typer.Argument(help="Cell id, or its first letters.", show_default=False, autocompletion=completing.cells)
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
Jobs = Annotated[
    int | None, typer.Option("--jobs", min=1, help="Cells to run in parallel; default: one per core or GPU.")
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", help="auto, cpu, cuda, or cuda:0,1.", autocompletion=completing.one_of("auto", "cpu", "cuda")
    ),
]
PerGpu = Annotated[
    int | None,
    typer.Option("--per-gpu", min=1, help="Cells to run in parallel on each GPU; default: as many as fit in memory."),
]
Executor = Annotated[
    str,
    typer.Option("--executor", help="local, ray or slurm.", autocompletion=completing.one_of("local", "ray", "slurm")),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="auto (tf32 where a GPU has it, else fp32), fp32, tf32 or bf16.",
        autocompletion=completing.one_of(AUTO, *PRECISIONS),
    ),
]
AttackPrecision = Annotated[
    str | None,
    typer.Option(
        "--attack-precision",
        help="Precision of the attacks after training, if another.",
        autocompletion=completing.one_of(*PRECISIONS),
    ),
]
PathOption = Annotated[
    str,
    typer.Option(
        "--path",
        help="How clients are trained: loop, graphs (recorded as CUDA graphs); auto chooses.",
        autocompletion=completing.one_of(*PATHS),
    ),
]
Microbatch = Annotated[
    int | None,
    typer.Option("--microbatch", min=1, help="Most images in the network at once; smaller values need less memory."),
]
Retry = Annotated[bool, typer.Option("--retry-failed", help="Run failed stages again.")]
RerunChanged = Annotated[
    bool,
    typer.Option("--rerun-changed", help="Recompute cells that other data, models or plug-ins have answered."),
]
FailFast = Annotated[bool, typer.Option("--fail-fast", help="Stop at the first failure.")]
TimeLimit = Annotated[
    str | None,
    typer.Option("--time-limit", metavar="TIME", help="Stop a stage of a cell after this time: 90s, 45m, 2h."),
]
Wait = Annotated[
    bool,
    typer.Option("--wait/--no-wait", help="Wait for cells that other processes run; take over those that are lost."),
]
DryRun = Annotated[bool, typer.Option("-n", "--dry-run", help="Show what would run, without running it.")]

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only say what fails.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="A line for every round and attack.")]

Log = Annotated[
    str | None,
    typer.Option(
        "--log",
        help="Also write learning curves for tensorboard, wandb or mlflow.",
        autocompletion=completing.one_of("tensorboard", "wandb", "mlflow"),
    ),
]

# field of `fatbench.runner.run_options.RunOptions` -> how the command line takes it
RUN = {
    "jobs": Jobs, "device": Device, "per_gpu": PerGpu, "executor": Executor, "precision": Precision,
    "attack_precision": AttackPrecision,
    "path": PathOption, "microbatch": Microbatch, "retry_failed": Retry,
    "rerun_changed": RerunChanged, "fail_fast": FailFast, "time_limit": TimeLimit, "wait": Wait, "dry_run": DryRun,
    "log": Log, "db": Db, "data": DataDir,
}  # fmt: skip
