"""What several commands do first or last: read the suite, find the cell, open the database, print JSON."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fatbench import whole_file
from fatbench.cli.helping import quietness
from fatbench.errors import NothingMatched, SpecError, did_you_mean

if TYPE_CHECKING:
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Plan
    from fatbench.suite.files import Suite

SCHEMA_VERSION = 1  # of every JSON that a command prints
FIGURES = Path("results/figures")


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object with its schema's version; what an iterator in it gives is a list that is never held."""
    value = {key: _Given(item) if isinstance(item, Iterator) else item for key, item in value.items()}
    for text in json.JSONEncoder(indent=2).iterencode({"schema_version": SCHEMA_VERSION, **value}):
        sys.stdout.write(text)
    print()


class _Given(list[Any]):
    """A list for the encoder, which asks whether it is empty and then for one item after the other."""

    def __init__(self, items: Iterator[Any]) -> None:
        super().__init__(itertools.islice(items, 1))
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain(super().__iter__(), self.items)


SHORT = {"md": "markdown", "tex": "latex", "htm": "html", "db": "sqlite"}  # formats by the ending of their files


def format_of(output: Path | None, formats: tuple[str, ...], default: str) -> str:
    """The format of a file that is written where none is named: by its ending, "latex" of table.tex."""
    ending = "" if output is None else output.suffix.lower().removeprefix(".")
    named = SHORT.get(ending, ending)
    return named if named in formats else default


def known_format(value: str, formats: tuple[str, ...]) -> str:
    """`value`, one of `formats`, or what it is short for. SpecError: it is not."""
    short = SHORT.get(value.lower(), value.lower())
    value = short if short in formats else value
    if value not in formats:
        raise SpecError(f"no format is named '{value}'{did_you_mean(value, formats)}", option="format")
    return value


def name_list(text: str | list[str] | None) -> list[str]:
    """ "suite, method" as names, each once; of an option that may be repeated, all of them."""
    text = ",".join(text) if isinstance(text, list) else text or ""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def attack_list(texts: list[str] | None) -> list[str]:
    """What --attack names: each of "fgsm,pgd20", and a mapping such as "{name: pgd, eps: 8/255}" as it stands."""
    return [item for text in texts or () for item in ([text] if "{" in text else name_list(text))]


def mapping(option: str, text: str) -> dict[str, Any]:
    """What is named with settings: "svhn" as {name: svhn}, or "{name: timm/resnet18, size: 224}".

    SpecError: it cannot be read, or has no name.
    """
    if not text.lstrip().startswith("{"):
        return {"name": text}
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        value = dict(YAML(typ="safe", pure=True).load(text))
    except (YAMLError, TypeError, ValueError):
        raise SpecError(f"{option}: cannot read '{text}' as a mapping such as {{name: NAME}}") from None
    if "name" not in value:
        raise SpecError(f"{option}: '{text}' has no name: expected a mapping such as {{name: NAME}}")
    return value


def is_suite(target: str) -> bool:
    """Whether a word names a suite, and not a cell; where it could be both, it is the suite."""
    from fatbench.store.opening import may_be_cell
    from fatbench.suite import files
    from fatbench.suite.external_models import SUITE

    if target == SUITE:
        return True
    name = files.split_settings(target)[0]
    try:
        files.locate(name)
    except SpecError:
        return files.is_path(target) or not may_be_cell(target)
    return True


def plan_of(
    target: str,
    preset: str | None = None,
    where: list[str] | None = None,
    seeds: str | None = None,
    attacks: list[str] | None = None,
    override: list[str] | None = None,
) -> tuple[Suite, Plan]:
    """The suite and plan that a NAME or CELL and the options ask for. SpecError, NothingMatched."""
    from fatbench import report
    from fatbench.suite import files
    from fatbench.suite.filters import filter_text
    from fatbench.suite.types import parse_seeds

    if not is_suite(target):
        if preset or where or seeds or attacks or override:
            raise SpecError(f"--preset, -k, --seeds, --set and --attack need a suite, and '{target}' is a cell")
        suite, preset, cell = planned_cell(target)
        return suite, suite.plan(preset, where=f"id={cell}")
    suite = files.load(files.name_with_settings(target, override))
    chosen_seeds = parse_seeds(seeds) if seeds else None
    plan = suite.plan(preset or "paper", chosen_seeds, filter_text(where), attack_list(attacks))
    report.check(suite, plan)
    return suite, plan


def planned_cell(begin: str) -> tuple[Suite, str, str]:
    """The first suite and preset that have the cell whose id begins so, and the id.

    SpecError: too few letters, or several cells. NothingMatched: no suite has it.
    """
    from fatbench.suite import files, folders

    if len(begin) < 4:
        raise SpecError(f"'{begin}': give at least the first 4 letters of a cell's id (fatbench plan NAME lists them)")
    found: dict[str, tuple[Suite, str, str]] = {}
    for name in [*files.available(), *folders.own_files().values()]:
        with contextlib.suppress(SpecError):
            suite = files.load(name)
            for preset in suite.presets():
                for cell in suite.plan(preset, refuse=False).unique():
                    if cell.id.startswith(begin):
                        found.setdefault(cell.id, (suite, preset, cell.id))
    if not found:
        raise NothingMatched(f"no suite has a cell '{begin}'")
    if len(found) > 1:
        raise SpecError(f"'{begin}' could be any of {', '.join(sorted(found))}")
    return next(iter(found.values()))


def cell_in(store: Store | None, cell: str) -> str:
    """The id of the cell (or, written with "~", the replicate) whose id begins so. NothingMatched: none has.

    SpecError: several have.
    """
    from fatbench.store.opening import cell_id
    from fatbench.suite.folders import available, own_files

    return cell_id(store, cell, [*available(), *own_files()], None)


def demand_consent(question: str, yes: bool) -> None:
    """Ask on a terminal whether to go on; elsewhere, and with --yes, nobody is asked. typer.Exit: no."""
    if not yes and sys.stdin.isatty() and sys.stderr.isatty() and not typer.confirm(question, err=True):
        print("fatbench: nothing was deleted", file=sys.stderr)
        raise typer.Exit(130)


@contextlib.contextmanager
def working(activity: str) -> Iterator[Callable[[str], None]]:
    """What a command is doing, on the terminal of stderr while it takes time; yields what says the next thing."""
    from rich.console import Console

    console = Console(stderr=True)
    if quietness() == "none" or not console.is_terminal or console.is_dumb_terminal:
        yield lambda said: None
        return
    with console.status(activity, spinner="line") as status:
        yield status.update


def print_or_write(text: str, output: Path | None) -> None:
    """A result on stdout, or whole in the file of `-o`."""
    if output is None:
        sys.stdout.write(text)
    else:
        write_text(output, text, output)


def write_text(file: Path, text: str, named_path: Path) -> None:
    """Write a text whole where `-o` asked for it: `named_path` is the file, or its folder. SpecError, MachineError."""
    whole_file.write(file, text, f"-o {named_path}", make_folder=file != named_path)
    if file == named_path:
        say_written(file)


def say_written(file: Path) -> None:
    """Say on stderr which file a command has written; of stdout, a device or a pipe nothing."""
    if whole_file.is_new_file(file) and quietness() != "none":
        print(f"fatbench: wrote {file}", file=sys.stderr)
