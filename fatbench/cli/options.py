"""Arguments and options that several commands share, each declared once: a name has one meaning wherever it stands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fatbench import hub
from fatbench.cli import completing
from fatbench.cli.completing import one_of
from fatbench.cli.helping import option_of
from fatbench.errors import SpecError, did_you_mean
from fatbench.settings import AUTO, PRECISIONS

if TYPE_CHECKING:
    from fatbench.store.selection import Checkpoint
else:  # what typer reads
    Checkpoint = str

Option, Argument = typer.Option, typer.Argument
CELL = "the first letters of a cell's id"


def one_name(words: list[str] | None) -> list[str]:
    """[NAME], where a person wrote NAME or `suite NAME`; [] for nothing. SpecError: it is several names."""
    names = words[1:] if words and len(words) == 2 and words[0] == "suite" else words or []
    if len(names) > 1:
        hint = option_of(list(names[2 if names[0] == "suite" else 1 :]))
        raise SpecError(f"expected one NAME or CELL, got {len(names)}: {' '.join(names)[:60]}{hint}")
    return list(names)


def output_folder(output: Path | None) -> Path | None:
    """What `-o` names where a command writes several files. SpecError: it is stdout, a device or a file, or no name."""
    if output is not None:
        try:
            is_other = output.exists() and not output.is_dir()
        except OSError as error:  # a name that is too long
            raise SpecError(f"{error.strerror}", option=f"o {str(output)[:60]}") from None
        if is_other or str(output) == "-" or hub.address(output) is not None:
            raise SpecError("expected a folder, for several files are written", option=f"o {output}")
    return output


def checkpoint(select: str) -> str:
    """The checkpoint that `--select` names. SpecError: there is none of this name."""
    from fatbench.suite.model import CHECKPOINTS

    if select not in CHECKPOINTS:
        raise SpecError(f"no checkpoint is named '{select}'{did_you_mean(select, CHECKPOINTS)}", option="select")
    return select


def precisions(text: str | None) -> tuple[str | None, str | None]:
    """Precision of training and of attacks: "tf32,fp32" has both, "bf16" the first alone. SpecError: it has more."""
    training, comma, attacks = (text or "").partition(",")
    if "," in attacks or (comma and not (training and attacks)):
        raise SpecError(f"expected one, or two such as tf32,fp32, got '{text}'", option="precision")
    return training.strip() or None, attacks.strip() or None


Target = Annotated[
    list[str],
    Argument(
        metavar="[suite] NAME|CELL", help=f"Suite, its YAML file, or {CELL}.", show_default=False,
        autocompletion=completing.suites, callback=one_name,
    ),
]  # fmt: skip
Thing = Annotated[
    str,
    Argument(
        metavar="NAME|CELL", help=f"Suite, its YAML file, or {CELL}.", show_default=False,
        autocompletion=completing.suites_and_cells,
    ),
]  # fmt: skip
Names = Annotated[
    list[str] | None,
    Argument(
        metavar="[NAME]...", help="Suites or their YAML files; none: all with results.", show_default=False,
        autocompletion=completing.suites,
    ),
]  # fmt: skip
Things = Annotated[
    list[str] | None,
    Argument(
        metavar="[NAME|CELL]...", help=f"Suites, their YAML files, or {CELL}.", show_default=False,
        autocompletion=completing.suites_and_cells,
    ),
]  # fmt: skip
Preset = Annotated[
    str | None,
    Option(
        "-p", "--preset", metavar="NAME", help="paper, quick, smoke, or another of the suite; --smoke: --preset smoke.",
        autocompletion=completing.presets,
    ),
]  # fmt: skip
Where = Annotated[
    list[str] | None,
    Option(
        "-k", "--filter", metavar="FILTER",
        help="Only these cells: 'model=nin and method in [FAT, SFAT]', cell=ID; if repeated, all must match.",
    ),
]  # fmt: skip
Seeds = Annotated[
    str | None, Option("--seeds", metavar="LIST", help="Seeds to use instead of the suite's: 0-4, or 6,7.")
]
Override = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="A setting as in a suite file, for all cells: algorithm.local.lr=0.02."),
]
Attacks = Annotated[
    list[str] | None,
    Option(
        "--attack", metavar="LIST",
        help="Attacks, in plan and run beside the suite's: fgsm,pgd20; or {name: pgd, eps: 8/255}; repeatable.",
        autocompletion=one_of("fgsm", "pgd20", "cw", "autoattack", "fgsm,pgd20,cw,autoattack"),
    ),
]  # fmt: skip
Metric = Annotated[
    list[str] | None, Option("--metric", metavar="LIST", help="Only these metrics: natural,pgd20; may be repeated.")
]
By = Annotated[str | None, Option("--by", metavar="AXES", help="A row or line for each label of these axes.")]
Select = Annotated[
    Checkpoint,
    Option(
        "--select", metavar="WHICH", help="Checkpoint: last, best-val or best-test.", callback=checkpoint,
        autocompletion=one_of("last", "best-val", "best-test"),
    ),
]  # fmt: skip
TableId = Annotated[
    list[str] | None, Option("--table", metavar="ID", help="Only the table of this id; may be repeated.")
]
WIDTHS = ("article", "llncs", "neurips", "ieee", "acm", "beamer", "column", "text")
PageWidth = Annotated[
    str | None,
    Option(
        "--width", metavar="WIDTH", help=f"Fit a page: {', '.join(WIDTHS)}, or points.",
        autocompletion=one_of(*WIDTHS),
    ),
]  # fmt: skip
Jobs = Annotated[int | None, Option("--jobs", metavar="N", min=1, help="Cells in parallel.")]
Device = Annotated[
    str | None,
    Option(
        "--device", metavar="DEVICE", help="auto, cpu, cuda, or cuda:0,1.", autocompletion=one_of("auto", "cpu", "cuda")
    ),
]
Precision = Annotated[
    str | None,
    Option(
        "--precision", metavar="P", help="auto, fp32, tf32 or bf16; TRAINING,ATTACKS for two.",
        autocompletion=one_of(AUTO, *PRECISIONS),
    ),
]  # fmt: skip
DryRun = Annotated[bool, Option("-n", "--dry-run", help="Say what would be done, and do nothing.")]
Watched = Annotated[bool, Option("--watch", help="Refresh until all cells are done.")]
Model = Annotated[
    str | None,
    Option("--model", metavar="MODEL", help="FILE.py:NAME, timm/NAME, or {name: ..., outputs: probabilities}."),
]
Mean = Annotated[str | None, Option("--mean", metavar="LIST", help="Mean that images are normalised with.")]
Std = Annotated[str | None, Option("--std", metavar="LIST", help="Standard deviation that they are divided by.")]
Images = Annotated[int | None, Option("--images", metavar="N", min=1, help="Number of images.")]
Classes = Annotated[int, Option("--classes", metavar="N", min=2, help="Number of classes.")]
Like = Annotated[
    str | None, Option("--like", metavar="NAME", help="A suite to go by.", autocompletion=completing.suites)
]
Output = Annotated[Path | None, Option("-o", "--output", metavar="PATH", help="File or folder to write; - is stdout.")]
OutputFolder = Annotated[
    Path | None, Option("-o", "--output", metavar="PATH", help="Folder to write.", callback=output_folder)
]


def formats(*names: str) -> Option:  # type: ignore[valid-type]
    """The option --format of a command that knows these."""
    return Option("--format", metavar="FORMAT", help=f"{', '.join(names)}.", autocompletion=one_of(*names))


Format = Annotated[str, formats("text", "json")]
