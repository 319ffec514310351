"""The command line: every command's name and place, the options of the program, and the door.

A command parses, calls one function and prints; what it prints to stdout is the result. Heavy imports stand inside the
commands, and none of them imports torch but in a worker or for a plug-in.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from fatbench.cli import (
    audit,
    checking,
    compare,
    delete,
    evaluate,
    exchange,
    inverting,
    listing,
    new,
    planning,
    reporting,
    run,
    showing,
    site,
    verify,
)  # fmt: skip
from fatbench.cli.helping import GLOBALS, MEANT_OPTIONS, Command, Program, moved_option, option_of
from fatbench.cli.options import Option
from fatbench.errors import FatbenchError, MachineError, SpecError
from fatbench.settings import IN_VARIANT, shown_url
from fatbench.version import __version__

JOBS: dict[str, dict[str, Callable[..., None]]] = {
    "Run": {"plan": planning.plan, "run": run.run, "status": reporting.status},
    "Look": {
        "list": listing.list_, "show": showing.show, "report": reporting.report, "plot": reporting.plot,
        "site": site.site,
    },
    "Compare": {"compare": compare.compare, "verify": verify.verify, "audit": audit.audit},
    "Own": {
        "new": new.new, "check": checking.check, "evaluate": evaluate.evaluate, "invert": inverting.invert,
    },
    "Share": {"export": exchange.export, "import": exchange.import_},
    "Look after": {"fetch": listing.fetch, "delete": delete.delete, "doctor": showing.doctor},
}  # fmt: skip

Many = list[str] | None
Db = Annotated[str | None, Option("--db", metavar="URL", help="Database: a path or an SQLAlchemy URL.")]
Data = Annotated[Path | None, Option("--data", metavar="FOLDER", help="Folder of the data sets.")]
Plugin = Annotated[
    list[Path] | None, Option("--plugin", metavar="FILE", help="Python file with functions of your own; repeatable.")
]
Config = Annotated[
    Many, Option("-c", "--config", metavar="KEY=VALUE", help="A key of fatbench.toml, for this call: run.jobs=2.")
]
Quiet = Annotated[bool, Option("-q", "--quiet", help="Print only failures on stderr.")]
Verbose = Annotated[bool, Option("-v", "--verbose", help="Print a line for every round and attack on stderr.")]
Color = Annotated[str | None, Option("--color", metavar="WHEN", help="auto, always or never.")]
Smoke = Annotated[bool, Option("--smoke", hidden=True, help="Short for --preset smoke.")]
Version = Annotated[bool, Option("-V", "--version", help="Print the version and exit.", is_eager=True)]


def _root(
    ctx: typer.Context,
    db: Db = None,
    data: Data = None,
    plugin: Plugin = None,
    config: Config = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    color: Color = None,
    smoke: Smoke = False,
    version: Version = False,
) -> None:
    if version:
        print(f"fatbench {__version__}")
        raise typer.Exit
    given = {name: ctx.params[name] for name in GLOBALS}
    ctx.meta["fatbench"] = {name: value for name, value in given.items() if value not in (None, [], (), False)}


def _application() -> typer.Typer:
    Program.jobs = {job: tuple(commands) for job, commands in JOBS.items()}
    application = typer.Typer(
        cls=Program,
        help="Benchmark federated adversarial training: run suites, keep results, compare them with published numbers.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    application.callback(invoke_without_command=True)(_root)
    for commands in JOBS.values():
        for name, function in commands.items():
            application.command(name, cls=Command)(function)
    return application


app = _application()


# What the installed typer raises for a mistake on a command line: its own error, or in earlier versions click's.
Mistake: type[Exception] = sys.modules[typer.BadParameter.__module__].ClickException


VALUES = {"int_parsing": "expected a whole number", "float_parsing": "expected a number"}  # pydantic's type -> words


def _of_options(error: Any) -> str:
    """What is wrong with a command line, on one line; the help of a program that was called without a command."""
    message, ctx = error.format_message(), error.ctx
    if "\n" in message:
        return str(message)
    command = ctx.command_path.removeprefix("fatbench").strip() if ctx else ""
    parameters = ctx.command.get_params(ctx) if ctx else []
    known_options = _options_of(parameters)
    if isinstance(error.__cause__, ValueError) and getattr(error, "param", None) is not None:  # pydantic's, of a value
        problem = error.__cause__.errors()[0]  # type: ignore[attr-defined]
        expected, value = VALUES.get(problem["type"], problem["msg"].removeprefix("Input ")), str(problem["input"])[:60]
        message = f"{error.param.opts[0]}: {expected}, got {'the option ' * (value in known_options)}{value!r}"
    elif ctx and (option := getattr(error, "option_name", None)) and option not in known_options:
        later = next((word for word in sys.argv[1:] if word in ctx.command.commands), "") if not command else ""
        if later:  # an option of a command stands before it
            known_options = _options_of(ctx.command.commands[later].params)
        message = moved_option(later or command, option, sys.argv) or _unknown_option(option, known_options, later)
    elif extra_words := re.match(r"Got unexpected extra argument\S* \((.*)\)$", message):
        message += option_of(extra_words[1].split())
    return shown_url(f"fatbench{f' {command}' if command else ''}: {message[:1].lower()}{message[1:]}")


def _options_of(parameters: Iterable[Any]) -> set[str]:
    return {name for parameter in parameters for name in parameter.opts if name.startswith("-")}


def _unknown_option(option: str, known_options: set[str], later: str = "") -> str:
    """later: the command that the option stands before."""
    if option in known_options:
        return f"{option} is an option of a command: fatbench {later} ... {option}"
    bare = {name.lstrip("-"): name for name in known_options}  # two dashes alone make nothing alike
    meant = MEANT_OPTIONS.get(option.lstrip("-"), "")
    similar = difflib.get_close_matches(option.lstrip("-"), bare, n=1)
    words = meant if meant.split(" ")[0] in known_options else bare[similar[0]] if similar else ""
    one_dash = [f"-{word}" for word in sys.argv if word.startswith(option) and f"-{word}" in known_options]
    words = one_dash[0] if one_dash else words  # "-smoke" is read as "-s"
    hint = (
        f"did you mean '{f'fatbench {later} ... ' if later else ''}{words}'?"
        if words
        else f"known: {', '.join(sorted(known_options))}"
    )
    return f"no such option: {option[:60]} ({hint})"


def _without_passwords(text: str) -> str:
    """A message that may repeat an argument: an address can stand in the place of any name."""
    for argument in sys.argv[1:]:
        text = text.replace(argument, shown_url(argument)) if "@" in argument or "=" in argument else text
    return text


def main() -> None:
    """Entry point: run the command line, turn our errors into one message and the documented exit code."""
    logging.getLogger("fatbench").addHandler(logging.NullHandler())
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        for argument in sys.argv[1:]:  # what is no text is in no database and names no suite
            if any(0xD800 <= ord(letter) <= 0xDFFF for letter in argument):
                raise SpecError(f"an argument is not UTF-8: {os.fsencode(argument)[:60]!r}")
            suite, variant = IN_VARIANT.get(argument, ("", ""))
            if suite and not os.path.isfile(f"{argument}.yaml"):
                print(f"fatbench: {argument} is now {suite}, presets {variant} and {variant}-...", file=sys.stderr)
        code = app(prog_name="fatbench", standalone_mode=False) or 0
        sys.stdout.flush()  # here, where it can be explained that a disk is full
        sys.exit(code)
    except FatbenchError as error:
        print(_without_passwords(f"fatbench: {error.at_terminal()}"), file=sys.stderr)
        sys.exit(error.exit_code)
    except Mistake as error:
        print(_without_passwords(_of_options(error)), file=sys.stderr)
        sys.exit(error.exit_code)  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:  # of a run, which ignores the signal (`fatbench.runner.waiting.StopRequest`)
        sys.exit(128 + signal.SIGPIPE)
    except MemoryError:
        print("fatbench: out of memory", file=sys.stderr)
        sys.exit(MachineError.exit_code)
