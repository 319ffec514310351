"""The command line: every command's name and place, and the door.

A command parses, calls one function and prints; what it prints to stdout is the result. Heavy imports stand inside the
commands: `--help`, `suite list`, `plan`, `status` and `report` never import torch.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from fatbench.cli import (
    audit,
    cells,
    cite,
    cleanup,
    compare,
    data,
    db,
    evaluating,
    inverting,
    models,
    new,
    outcomes,
    reporting,
    running,
    site,
    submit,
    suites,
    verify,
)
from fatbench.cli.common import known_format, print_json, with_plugins
from fatbench.cli.helping import MEANT_OPTIONS, WORDS, Documented, OfSuites, Suggesting
from fatbench.cli.options import DataDir, Db, Format
from fatbench.errors import FatbenchError, MachineError, SpecError
from fatbench.settings import shown_url
from fatbench.version import __version__


def _group(help: str, cls: type[Suggesting] = Suggesting, epilog: str = "") -> typer.Typer:
    return typer.Typer(
        cls=cls,
        help=help,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=epilog,
    )


def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"fatbench {__version__}")
        raise typer.Exit


def doctor(db: Db = None, data: DataDir = None, format: Format = "text") -> None:
    """Describe this machine, for a bug report.

    Example: fatbench doctor
    """
    from fatbench.cli import show

    known_format(format, ("text", "json"))
    if format == "json":
        print_json({"facts": [{"name": name, "text": text} for name, text in show.machine(db, data)]})
    else:
        show.doctor(db, data)


GROUPS: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
    "suite": (
        "List, show and check suites.",
        {
            "list": suites.suite_list,
            "show": suites.suite_show,
            "check": suites.suite_check,
            "schema": suites.suite_schema,
        },
    ),
    "plan": ("Show what a run would do and cost, without running it.", {"suite": suites.plan_suite}),
    "run": (
        "Run the cells that are not done; run the same command again to resume.",
        {"suite": running.run_suite, "cell": running.run_cell},
    ),
    "new": (
        "Write a starter file, and a suite that compares it with FAT and SFAT, or with the rows of a suite of ours.",
        {kind: getattr(new, kind) for kind in new.CHANGES},
    ),
    "data": (
        "List, fetch and verify data sets.",
        {"list": data.data_list, "prepare": data.data_prepare, "verify": data.data_verify},
    ),
    "db": (
        "Check or back up the database.",
        {"check": db.db_check, "backup": db.db_backup},
    ),
}
COMMANDS: dict[str, Callable[..., None]] = {
    "status": reporting.status,
    "report": reporting.report,
    "compare": compare.compare,
    "plot": reporting.plot,
    "site": site.site,
    "show": cells.show_cell,
    "logs": cells.logs,
    "outcomes": outcomes.outcomes,
    "evaluate": evaluating.evaluate,
    "invert": inverting.invert,
    "export": db.export,
    "import": db.import_,
    "delete": cleanup.delete,
    "clean": cleanup.clean,
    "verify": verify.verify,
    "audit": audit.audit,
    "cite": cite.cite,
    "submit": submit.submit,
    "models": models.models,
    "doctor": doctor,
}


def _application() -> typer.Typer:
    application = _group(
        "Benchmark federated adversarial training: run suites, keep the results, compare them with published numbers.",
        epilog=WORDS,
    )
    application.callback(invoke_without_command=True)(_root)
    for name, (help, commands) in GROUPS.items():
        group = _group(help, OfSuites if "suite" in commands and name in ("run", "plan") else Suggesting)
        for command, function in commands.items():
            group.command(command, cls=Documented)(with_plugins(function))
        application.add_typer(group, name=name)
    for name, function in COMMANDS.items():
        application.command(name, cls=Documented)(with_plugins(function))
    return application


app = _application()


# What the installed typer raises for a mistake on a command line: its own error, or in earlier versions click's.
Mistake: type[Exception] = sys.modules[typer.BadParameter.__module__].ClickException


VALUES = {"int_parsing": "expected a whole number", "float_parsing": "expected a number"}  # pydantic's type -> words


def _of_options(error: Any) -> str:
    """What is wrong with a command line, on one line; the help of a group that was called without a command."""
    message, ctx = error.format_message(), error.ctx
    if "\n" in message:
        return str(message)
    command = ctx.command_path.removeprefix("fatbench").strip() if ctx else ""
    parameters = ctx.command.params if ctx else []
    known_options = {name for parameter in parameters for name in parameter.opts if name.startswith("-")}
    if isinstance(error.__cause__, ValueError) and getattr(error, "param", None) is not None:  # pydantic's, of a value
        problem = error.__cause__.errors()[0]  # type: ignore[attr-defined]
        expected, value = VALUES.get(problem["type"], problem["msg"].removeprefix("Input ")), str(problem["input"])[:60]
        message = f"{error.param.opts[0]}: {expected}, got {'the option ' * (value in known_options)}{value!r}"
    elif ctx and (option := getattr(error, "option_name", None)):
        if option not in known_options:
            bare = {name.lstrip("-"): name for name in known_options}  # two dashes alone make nothing alike
            similar = difflib.get_close_matches(option.lstrip("-"), bare, n=1)
            words = MEANT_OPTIONS.get(option.lstrip("-"), "")
            words = words if words.split(" ")[0] in known_options else bare[similar[0]] if similar else ""
            one_dash = [f"-{word}" for word in sys.argv if word.startswith(option) and f"-{word}" in known_options]
            words = one_dash[0] if one_dash else words  # "-smoke" is read as "-s"
            hint = f"did you mean '{words}'?" if words else f"known: {', '.join(sorted(known_options))}"
            message = f"no such option: {option[:60]} ({hint})"
    elif extra_words := re.match(r"Got unexpected extra argument\S* \((.*)\)$", message):
        message += _option_of(extra_words[1].split())
    return shown_url(f"fatbench{f' {command}' if command else ''}: {message[:1].lower()}{message[1:]}")


JOINED_BY = {"-k": " ", "--filter": " ", "--seeds": ",", "--attack": ",", "--attacks": ",", "--metric": ","}


def _option_of(extra_words: list[str]) -> str:
    """ " (did you mean --seeds '0,1'?)" if the words follow the value of an option that takes several."""
    position = sys.argv.index(extra_words[0]) if extra_words[0] in sys.argv else 0
    option, value = ["", "", *sys.argv][position : position + 2]
    if (joined_by := JOINED_BY.get(option)) is None:
        return ""
    joined_by = " " if value.startswith(("{", "[")) else joined_by  # a mapping without quotes
    words = [value if joined_by == " " else value.rstrip(","), *extra_words]
    return f" (did you mean {option} '{joined_by.join(words)}'?)"


def _without_passwords(text: str) -> str:
    """A message that may repeat an argument: an address can stand in the place of any name."""
    for argument in sys.argv[1:]:
        text = text.replace(argument, shown_url(argument)) if "@" in argument or "=" in argument else text
    return text


def _refuse_bytes() -> None:
    """SpecError: an argument is not text, so it is in no database and names no suite."""
    for argument in sys.argv[1:]:
        if any(0xD800 <= ord(letter) <= 0xDFFF for letter in argument):
            raise SpecError(f"an argument is not UTF-8: {os.fsencode(argument)[:60]!r}")


def main() -> None:
    """Entry point: run the command line, turn our errors into one message and the documented exit code."""
    logging.getLogger("fatbench").addHandler(logging.NullHandler())
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        _refuse_bytes()
        code = app(prog_name="fatbench", standalone_mode=False) or 0
        sys.stdout.flush()  # here, where it can be explained that a disk is full
        sys.exit(code)
    except FatbenchError as error:
        print(_without_passwords(f"fatbench: {error}"), file=sys.stderr)
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
