"""What several commands do first or last: read the suite, find the cell, open the database, print JSON."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fatbench import whole_file
from fatbench.cli.options import Plugin
from fatbench.errors import FatbenchError, SpecError, UnknownName, did_you_mean

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


SHORT = {"md": "markdown", "tex": "latex"}  # formats by the ending of their files


def known_format(value: str, formats: tuple[str, ...]) -> str:
    """`value`, one of `formats`, or what it is short for. SpecError: it is not."""
    short = SHORT.get(value.lower(), value.lower())
    value = short if short in formats else value
    if value not in formats:
        raise SpecError(f"--format: no format is named '{value}'{did_you_mean(value, formats)}")
    return value


def with_plugins(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the option --plugin; the plug-ins that are named anywhere are added before it runs.

    A name that is unknown without a plug-in of the database's runs is answered with which plug-in that was. A mistake
    of the program is looked for in the database first: what it cannot read is damaged.
    """

    @functools.wraps(command)
    def run(*arguments: Any, plugin: list[Path] | None = None, **options: Any) -> None:
        from fatbench.suite import plugins

        plugins.load(plugin or ())
        try:
            command(*arguments, **options)
        except UnknownName as error:
            from fatbench.runner import versions

            raise SpecError(versions.explain(error, options.get("db"))) from None
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            if "db" in options and (damage := _damage(options["db"])):
                raise damage from error
            raise

    signature = inspect.signature(command, eval_str=True)
    option = inspect.Parameter("plugin", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Plugin)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, "plugin": Plugin}
    return run


def _damage(db: str | None) -> FatbenchError | None:
    """What is damaged in the database; None: nothing, or there is none."""
    from fatbench import settings
    from fatbench.store import integrity

    try:
        integrity.check(settings.database(db))
    except integrity.Damaged as damage:
        return damage
    except FatbenchError:
        pass
    return None


def plan_of(
    name: str,
    preset: str | None,
    smoke: bool,
    seeds: str | None,
    where: list[str] | None,
    attacks: list[str] | None = None,
) -> Plan:
    """The plan that a suite's name and the options ask for. SpecError, NothingMatched."""
    from fatbench.suite import files

    suite = files.load(name)
    return suite.plan(
        named_preset(preset, smoke) or "paper", _seeds(seeds), named_filter(where), name_list(",".join(attacks or ()))
    )


def name_list(text: str | None) -> list[str]:
    """ "suite, method" as names, each once."""
    return list(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))


def plan_in(
    name: str, preset: str | None, smoke: bool, seeds: str | None, where: list[str] | None, store: Store | None
) -> tuple[Suite, Plan]:
    """A suite and the plan to look at: the preset asked for, else the first that has been run, else paper."""
    from fatbench import api

    return api.planned_suite(name, named_preset(preset, smoke), _seeds(seeds), named_filter(where), store)


def named_preset(preset: str | None, smoke: bool) -> str | None:
    """The preset of --preset or --smoke. SpecError: both say another."""
    if smoke and preset not in (None, "smoke"):
        raise SpecError(f"--smoke and --preset {preset} contradict each other")
    return "smoke" if smoke else preset


def _seeds(text: str | None) -> list[int] | None:
    from fatbench.suite.seeds import parse_seeds

    return parse_seeds(text) if text else None


def named_filter(filter_texts: list[str] | None) -> str | None:
    """One filter of all that were given; each by itself is what `-k` says it is."""
    from fatbench.suite import filters

    return filters.join_filters(filter_texts) if filter_texts else None


def cell_in(store: Store | None, cell: str, db: str | None) -> str:
    """The id of the cell (or, written with "~", the replicate) whose id begins so. NothingMatched: none has.

    db: the option --db. SpecError: several have.
    """
    from fatbench.store.opening import cell_id
    from fatbench.suite.folders import available, own_files

    return cell_id(store, cell, [*available(), *own_files()], db)


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
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda said: None
        return
    with console.status(activity, spinner="line") as status:
        yield status.update


def write_text(file: Path, text: str, named_path: Path) -> None:
    """Write a text whole where `-o` asked for it: `named_path` is the file, or its folder. SpecError, MachineError."""
    whole_file.write(file, text, f"-o {named_path}", make_folder=file != named_path)
    if file == named_path:
        say_written(file)


def say_written(file: Path) -> None:
    """Say on stderr which file a command has written; of stdout, a device or a pipe nothing."""
    if whole_file.is_new_file(file):
        print(f"fatbench: wrote {file}", file=sys.stderr)
