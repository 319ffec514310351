"""What `--help` prints and how a mistyped command is answered: panels, placeholders, examples, what was meant."""

from __future__ import annotations

import re
from typing import Any

import typer

from fatbench.cli import completing
from fatbench.errors import SpecError, did_you_mean

ORDER = (
    "suite", "new", "plan", "run", "status", "report", "compare", "plot", "site", "show", "logs", "outcomes",
    "evaluate", "invert", "export", "import", "delete", "clean", "verify", "submit", "models", "data", "db", "doctor",
)  # fmt: skip


MEANT = {  # a word that people try -> the command that does it
    "init": "new", "create": "new", "add": "new --help", "ls": "suite list", "list": "suite list",
    "suites": "suite list",
    "version": "--version", "help": "--help", "train": "run", "start": "run", "resume": "run", "exec": "run",
    "attack": "evaluate", "eval": "evaluate", "test": "evaluate", "table": "report", "tables": "report",
    "results": "report", "figure": "plot", "figures": "plot", "curves": "plot", "html": "site", "web": "site",
    "serve": "site", "page": "site", "leaderboard": "site", "rm": "delete", "remove": "delete", "check": "suite check",
    "validate": "suite check", "lint": "suite check", "reproduce": "verify", "diff": "compare",
    "ttest": "compare --tests",
    "download": "data prepare", "fetch": "data prepare", "datasets": "data list", "cost": "plan", "time": "plan",
    "info": "doctor", "env": "doctor", "ps": "status", "progress": "status --watch", "watch": "status --watch",
    "backup": "db backup", "upgrade": "export", "migrate": "export", "log": "logs", "load": "import",
    "save": "export",
    "dump": "export", "gc": "clean", "prune": "clean", "cells": "status", "cell": "show",
}  # fmt: skip
MEANT_OPTIONS = {  # the same of options; what is meant is one that the command has
    "gpu": "--device cuda", "gpus": "--device cuda:0,1", "cpu": "--device cpu", "cuda": "--device cuda",
    "workers": "--jobs N", "parallel": "--jobs N", "threads": "--jobs N", "out": "-o", "outdir": "-o",
    "file": "-o FILE",
    "seed": "--seeds 0", "lr": "--set algorithm.local.lr=0.02", "epochs": "--set algorithm.local.epochs=1",
    "rounds": "--set algorithm.rounds=10", "override": "--set KEY=VALUE", "where": "--filter", "only": "--filter",
    "method": "--filter method=NAME", "json": "--format json", "csv": "--format csv", "latex": "--format latex",
    "markdown": "--format markdown", "force": "--rerun-changed", "rerun": "--rerun-changed", "retry": "--retry-failed",
    "check": "--dry-run", "simulate": "--dry-run", "database": "--db", "dataset": "--data", "fast": "--preset quick",
    "bf16": "--precision bf16", "fp16": "--precision bf16", "amp": "--precision bf16", "half": "--precision bf16",
    "attacks": "--attack", "epsilon": "--eps", "limit": "-n", "images": "-n", "name": "--name",
}  # fmt: skip

WORDS = """\
suite: a YAML file that describes the tables of a paper
preset: a size of a suite: paper is full, quick is minutes to hours on a GPU, smoke seconds to minutes anywhere
cell: one experiment: data, partition, model, method, seed; trained once
stage: a part of a cell: its training, or one attack on its model
replicate: another run of the same cell
doubt: a reason not to believe a number, found by a test; marked at it
comparison group: numbers that may be compared: same data, split and attack"""

# a parameter -> the panel of the help that it stands in, where a command has many
PANELS = {
    "Which cells": ("preset", "smoke", "where", "seeds", "override", "attacks", "select", "runs", "like"),
    "Where things are": ("db", "data", "plugin", "output", "log", "format"),
    "Rarely needed": (
        "per_gpu", "executor", "attack_precision", "path", "microbatch", "time_limit", "wait", "on",
        "batch", "entry", "channels", "outputs", "images", "spread", "numbers", "with_evaluated", "calibrate", "gpus",
    ),
}  # fmt: skip
MANY = 12  # options; with more, they stand in panels


def _first_sentence(text: str | None) -> str:
    """The first sentence of a help text."""
    return " ".join((text or "").split("\n\n")[0].split())


class Documented(typer.core.TyperCommand):
    """A command whose help has one style of placeholder, its options in panels, and its example as it is typed."""

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        for parameter in self.params:
            if getattr(parameter, "metavar", None) is None and not getattr(parameter, "is_flag", False):
                parameter.metavar = _placeholder(parameter)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        pieces = " ".join(self.collect_usage_pieces(ctx))
        formatter.write_usage(" ".join(ctx.command_path.split()), re.sub("[{}]", "", pieces))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[Any]] = {"Arguments": [], "Options": [], **{panel: [] for panel in PANELS}}
        parameters = [
            (option, record) for option in self.get_params(ctx) if (record := option.get_help_record(ctx)) is not None
        ]
        has_panels = len(parameters) > MANY
        for parameter, record in parameters:
            panel = next((p for p, names in PANELS.items() if has_panels and parameter.name in names), "Options")
            if parameter.param_type_name == "argument":
                panels["Arguments"].append((re.sub(" <.*>", "", record[0]), record[1]))
            else:
                panels[panel].append(record)
        leading_panels = ["Arguments", "Which cells", "Options"]
        for panel in dict.fromkeys([*leading_panels, *panels]):
            if panels[panel]:
                with formatter.section(panel):
                    formatter.write_dl(panels[panel])


def _placeholder(parameter: Any) -> str:
    """ "N" for a number, "PATH" for a file, else the last word of the name: "NAME", "PRECISION"."""
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper().rstrip("_")
    kind = getattr(parameter, "type", None) or parameter.bare_type()  # of typer's own click, or of the older one
    if match := re.search("int|float|path", str(kind).lower()):
        return "PATH" if match[0] == "path" else "N"
    return str(parameter.name).rpartition("_")[2].upper()


class Suggesting(typer.core.TyperGroup):
    """A command group whose "no such command" names the one that was meant, and whose help follows a user's day."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Every command with all of its first sentence, on as many lines as it needs."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, _first_sentence(command.help)) for name, command in commands if command is not None]
            )

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.epilog:
            with formatter.section("Words"):
                formatter.write_dl([tuple(line.split(": ", 1)) for line in self.epilog.splitlines()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            if ctx.parent is None and (hint := MEANT.get(args[0].lower())):
                raise SpecError(f"no command is named '{args[0]}' (did you mean 'fatbench {hint}'?)")
            raise SpecError(f"no command is named '{args[0]}'{did_you_mean(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


class OfSuites(Suggesting):
    """A group whose command `suite` need not be written: `fatbench run NAME` is `fatbench run suite NAME`."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        if not args and ctx.info_name == "plan":  # every suite
            args = ["suite"]
            ctx.obj = True
            return super().parse_args(ctx, args)
        commands, first_word = self.list_commands(ctx), next((arg for arg in args if not arg.startswith("-")), None)
        ctx.obj = args and args[0] not in commands and first_word not in commands
        return super().parse_args(ctx, ["suite", *args] if ctx.obj else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, remaining = super().resolve_command(ctx, args)
        return "" if ctx.obj else name, command, remaining

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        items = super().shell_complete(ctx, incomplete)
        kind = type(items[0]) if items else None
        names = [] if incomplete.startswith("-") else completing.suites(ctx, incomplete)
        return [*items, *(map(kind, names) if kind else names)]
