"""One grammar: options of the program on both sides of a command, one meaning a name, what was here before answered."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from fatbench import settings
from fatbench.cli import app, helping
from fatbench.cli.helping import MEANT, MEANT_OPTIONS, MOVED, MOVED_OPTIONS

DOCS = Path(__file__).parent.parent / "docs"
ROOT: Any = typer.main.get_command(app.app)
ARGUMENTS = {  # what a command needs, for a line that it takes
    "run": "X", "plan": "X", "list": "suites", "show": "X", "compare": "X", "verify": "F", "new": "model N",
    "evaluate": "F", "invert": "F", "import": "F", "fetch": "N",
}  # fmt: skip
LINES = [f"{name} {ARGUMENTS.get(name, '')}".strip() for name in ROOT.commands]
GIVEN = {  # an option of the program with a value -> what the command is told
    "--db a.db": {"db": "a.db"}, "--data d": {"data": "d"}, "--plugin m.py": {"plugin": ["m.py"]},
    "-c run.jobs=1": {"run.jobs": 1}, "--color never": {"color": "never"}, "-q": {"lines": "none"},
    "-v": {"lines": "event"},
}  # fmt: skip


def options(command: Any) -> list[Any]:
    return [one for one in command.params if one.param_type_name == "option" and not one.hidden]


@pytest.fixture
def asked(run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """What a command line asks of which command, without calling it: its parameters, and what the program is told."""
    calls: list[dict[str, Any]] = []

    def record(command: Any, ctx: Any) -> None:
        import os

        given = {**settings._options, "lines": helping.quietness(), "plugin": loaded[-1]}
        given["color"] = "never" if os.environ.get("NO_COLOR") else "always" if os.environ.get("FORCE_COLOR") else ""
        calls.append({"command": command.name, "given": given, **ctx.params})

    loaded: list[list[str]] = []
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(typer.core.TyperCommand, "invoke", record, raising=False)
    monkeypatch.setattr("fatbench.suite.plugins.load", lambda files=(): loaded.append([str(file) for file in files]))

    def ask(line: str) -> dict[str, Any]:
        calls.clear()
        code, out, err = run(*shlex.split(line))
        assert (code, out, err, len(calls)) == (0, "", "", 1), (line, code, out, err)
        return calls[0]

    return ask


@pytest.mark.parametrize("line", LINES)
def test_options_of_the_program_stand_before_and_after_each_command(line: str, asked: Any, run: Any) -> None:
    command, _, rest = line.partition(" ")
    for option, given in GIVEN.items():
        for words in (f"{option} {line}", f"{line} {option}", f"{command} {option} {rest}"):
            told = asked(words)
            assert told["command"] == command and told["given"].items() >= given.items(), words
    assert run(*shlex.split(f"-q {line} -v"))[::2] == (2, "fatbench: --quiet and --verbose contradict each other\n")


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("--db a report X --db b", {"db": "b"}),
        ("--plugin a report X --plugin b --plugin c", {"plugin": ["a", "b", "c"]}),
        ("-c run.jobs=1 -c run.log=wandb run X -c run.jobs=3", {"run.jobs": 3, "run.log": "wandb"}),
        ("-c db=x report --db y", {"db": "y"}),
        ("report X -k --db", {}),  # a value
        ("report -- --db", {}),
    ],
)
def test_the_later_one_counts_and_what_may_be_repeated_adds_up(line: str, given: dict[str, Any], asked: Any) -> None:
    told = asked(line)["given"]
    assert told.items() >= given.items() and ("db" in given or "db" not in told)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        *((line, {"target": ["sfat"]}) for line in ("run sfat", "run suite sfat", "run --smoke suite sfat")),
        ("run suite --smoke sfat", {"target": ["sfat"], "preset": "smoke"}),
        ("run suite sfat --smoke --db x", {"target": ["sfat"], "preset": "smoke"}),
        ("run suite", {"target": ["suite"]}), ("run suite suite", {"target": ["suite"]}),
        ("run suite.yaml", {"target": ["suite.yaml"]}), ("run 0301a225a8b3", {"target": ["0301a225a8b3"]}),
        ("run -- --odd", {"target": ["--odd"]}), ("plan", {"target": []}), ("plan suite X", {"target": ["X"]}),
        ("report X -k --db", {"where": ["--db"]}), ("report -- --db", {"names": ["--db"]}),
        ("report --format latex", {"format": "latex", "names": []}),
        ("run suite sfat-cifar10", {"target": ["sfat-cifar10"]}),
        ("--smoke run X", {"preset": "smoke"}), ("report X --smoke", {"preset": "smoke"}),
        ("run X --smoke -p smoke", {"preset": "smoke"}), ("evaluate F -p quick", {"preset": "quick"}),
    ],
)  # fmt: skip
def test_what_a_line_asks(line: str, expected: dict[str, Any], asked: Any) -> None:
    told = asked(line)
    told = {key: list(value) if isinstance(value, tuple) else value for key, value in told.items()}
    assert {key: told[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run a b", "expected one NAME or CELL, got 2: a b"), ("run suite a b", "expected one NAME or CELL, got 3"),
        ("--smoke doctor", "doctor has no presets: --smoke does not fit"),
        ("run X --smoke -p paper", "--smoke and --preset paper contradict each other"),
        ("--data run X", "--data: expected a value, got the command 'run'"),
        ("--gpu 0 run X", "no such option: --gpu (did you mean 'fatbench run ... --device cuda'?)"),
        ("--preset quick run X", "--preset is an option of a command: fatbench run ... --preset"),
        ("plto X", "no command is named 'plto' (did you mean 'plot'?)"),
        ("-c run.job=1 status", "-c: unknown setting 'run.job' (did you mean 'run.jobs'?)"),
        ("status -c jobs", "-c: expected KEY=VALUE such as run.jobs=2, got 'jobs'"),
        ("report -c report.digits=9", "report.digits: expected a whole number from 0 to 6, got '9'"),
        ("report -c report.notes=shrt", "report.notes: expected full, short, none, got 'shrt' (did you mean 'short'?)"),
        ("run X -c run.wait=maybe", "run.wait: expected true or false, got 'maybe'"),
        ("run X --rerun al", "--rerun: expected failed, changed or both, got 'al'"),
        ("run X --precision a,b,c", "--precision: expected one, or two such as tf32,fp32, got 'a,b,c'"),
        ("run sfat-mu -k run.precision=fp32", "-k run.precision=fp32: only report, plot and compare choose runs"),
        ("report -k run.host=a", "-k: a run has no 'host' (known: commit, device, precision)"),
        ("status --color blue", "--color: expected auto, always or never, got 'blue'"),
        ("compare SFAT", "missing B: fatbench compare SFAT B --suite NAME, or fatbench compare NAME"),
        ("audit x.csv", "x.csv: No such file"), ("list thing", "no kind of thing is named 'thing'"),
        ("status --preset quick", "--preset and -k need a suite: fatbench status NAME"),
        ("show sfat-cifar10 --log", "'sfat-cifar10' is a suite, and --log shows a cell"),
        ("run 0301a225a8b3 --preset quick", "need a suite, and '0301a225a8b3' is a cell"),
        # the user's own words
        ("report --rows suite", "report: --rows suite is now --by suite"),
        ("report --digits=1", "report: --digits 1 is now -c report.digits=1"),
        ("run X --retry-failed", "run: --retry-failed is now --rerun failed"),
        ("run X --microbatch 4", "run: --microbatch 4 is now -c run.microbatch=4"),
        ("verify F --cell 0301", "verify: --cell 0301 is now -k cell=0301"),
        ("evaluate F -n 60", "evaluate: -n 60 is now --images 60"),
        ("compare X --tests", "compare: --tests is now fatbench compare NAME"),
        ("status X --seeds 0,1", "status: --seeds 0,1 is now -k 'seed in [0,1]'"),
        ("logs abcd", "'logs' is now 'fatbench show abcd --log'"), ("logs", "'logs' is now 'fatbench show CELL --log'"),
        ("data prepare cifar10", "'data prepare' is now 'fatbench fetch cifar10'"),
        ("db check", "'db check' is now 'fatbench check'"),
        ("suite list", "'suite list' is now 'fatbench list suites'"),
        # habits of other tools
        ("ls", "'fatbench list suites'"), ("init", "'fatbench new suite NAME'"), ("rm X", "'fatbench delete NAME'"),
        ("train X", "'fatbench run NAME'"), ("eval F", "'fatbench evaluate FILE'"), ("ps", "'fatbench status'"),
        ("download cifar10", "'fatbench fetch NAME'"), ("leaderboard", "'fatbench site -o site'"),
        ("run X --gpu 0", "(did you mean '--device cuda'?)"), ("run X --workers 4", "(did you mean '--jobs N'?)"),
        ("run X --eps 8", "(did you mean '--set perturbation.eps=8/255'?)"), ("run X --seed 0", "'--seeds 0'"),
        ("run X --lr 0.1", "'--set algorithm.local.lr=0.02'"), ("run X --force", "'--rerun changed'"),
        ("run X --bf16", "'--precision bf16'"), ("report X --latex", "'--format latex'"),
        ("report X --out f", "'-o PATH'"),
    ],
)  # fmt: skip
def test_a_mistake_or_a_word_of_before_is_answered_in_one_line(
    line: str, said: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "X").mkdir()
    code, out, err = run(*shlex.split(line))
    assert said in err and (code, out, err.count("\n")) == (2, "", 1), err


def test_every_answer_is_a_line_that_the_program_takes(asked: Any) -> None:
    """Moved and guessed words and options; an option is one that its command has."""
    for words in [*MOVED.values(), *MEANT.values()]:
        if not words.startswith("-"):  # --help and --version end the program
            assert asked(words)["command"] == words.split()[0]
    assert not {*MOVED} & {*ROOT.commands} and not {*MEANT} & {*ROOT.commands}
    for place, answer in MOVED_OPTIONS.items():
        command, _, option = place.rpartition(" ")
        owners = [command] if command else [n for n, c in ROOT.commands.items() if option not in c.params]
        line = answer.replace("VALUE", "1")
        if line.startswith("fatbench "):
            asked(line.removeprefix("fatbench "))
        elif not line.startswith("no longer"):
            taken = [name for name in owners if _takes(name, line)]
            assert taken == owners if command else taken, place
        assert not [name for name in owners if command and option in _names(name)], place
    known = {option for name in ROOT.commands for option in _names(name)}
    assert {answer.split()[0] for answer in MEANT_OPTIONS.values()} <= known


def _names(command: str) -> set[str]:
    every = [*options(ROOT.commands[command]), *options(ROOT)]
    return {name for one in every for name in one.opts}


def _takes(command: str, line: str) -> bool:
    return shlex.split(line)[0] in _names(command)


def test_a_name_has_one_meaning_and_the_promise_has_its_line() -> None:
    """20 commands, no sub-commands, at most 152 options; each stands in the table of the docs, and no other."""
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    commands = [ROOT, *ROOT.commands.values()]
    count = sum(len(options(command)) for command in commands) - 2  # of shell completion
    names = {next(name for name in one.opts if name.startswith("--")) for c in commands for one in options(c)}
    said = re.search(r"(\d+) commands, (\d+) options, (\d+) names", page)
    assert [int(number) for number in said.groups()] == [len(ROOT.commands), count, len(names) - 2]
    assert len(ROOT.commands) == 20 and count <= 152
    table = page.partition("## Every option")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`(?:-\w, )?(--[\w-]+)", table))
    assert listed == names - {"--install-completion", "--show-completion", "--help"} | {"--smoke"}
    helps, letters = defaultdict(set), defaultdict(set)
    for command in commands:
        for one in options(command):
            helps[one.opts[-1]].add(one.help)
            for letter in (name for name in one.opts if len(name) == 2):
                letters[letter].add(one.opts[-1])
    own_values = {"--format", "--output", "--help"}  # the values of a command; what a command writes
    assert {name for name, texts in helps.items() if len(texts) > 1} <= own_values
    assert {letter for letter, meanings in letters.items() if len(meanings) > 1} == set()


def test_every_command_has_its_line_in_the_docs_and_every_key_its_place() -> None:
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\|[^|]*\| `([a-z]+)", page, re.MULTILINE)) >= {*ROOT.commands}
    keys = {name for names in settings.KEYS.values() for name in names}
    table = page.partition("## Settings")[2].partition("\n## ")[0]
    assert {key for key in keys if f"`{key}`" not in table} == set()


@pytest.mark.parametrize("name", ["", *ROOT.commands])
def test_help_has_80_columns_and_an_example_that_the_command_takes(
    name: str, run: Any, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(*name.split(), "--help")
    assert code == 0 and max(map(len, out.splitlines())) <= 80 and not re.search(r"<[a-z]", out)
    if not name:
        assert all(f"\n{job}:\n" in out for job in app.JOBS) and "--db URL" in out
        return
    assert out.startswith(f"Usage: fatbench {name} ") and "--db URL" not in out and "see 'fatbench --help'" in out
    example = re.search(r"Example: (fatbench .*?)\n\n", re.sub(r"\n  (?=\S)", " ", out), re.DOTALL)
    assert example is not None and asked(example[1].removeprefix("fatbench "))["command"] == name


def test_settings_are_an_option_then_c_then_the_environment_then_the_file(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fatbench.toml").write_text('db = "f.db"\n[run]\njobs = 3\nwait = false\n[report]\ndigits = 1\n')
    assert (settings.setting("run.jobs"), settings.switch("run.wait", True)) == ("3", False)
    assert settings.number("report.digits", 2, 0, 6) == 1
    monkeypatch.setenv("FATBENCH_RUN_JOBS", "4")
    with settings.options({}, ["run.jobs=5", "slurm.partition=gpu"]):
        assert settings.setting("run.jobs") == "5" and settings.setting("run.jobs", 6) == "6"
        assert settings.table("slurm") == {"partition": "gpu"}
    assert settings.setting("run.jobs") == "4" and settings.database() == "f.db"
    monkeypatch.setenv("FATBENCH_DB", "absent.db")
    assert settings.database() == "absent.db"
    monkeypatch.delenv("FATBENCH_DB")
    for text, said in {
        "[run]\njob = 3": "fatbench.toml: [run]: unknown setting 'job' (did you mean 'jobs'?)",
        "jobs = 3": "fatbench.toml: unknown setting 'jobs' (it is run.jobs)",
        "run = 3": "fatbench.toml: run: expected a table [run]",
        "[db]\na = 1": "fatbench.toml: db: expected one value",
        "dbb = 1": "fatbench.toml: unknown setting 'dbb' (did you mean 'db'?)",
        'db = "sqlite:///a\\u0000b.db"': "db: 'sqlite:///a\\x00b.db' contains a zero byte",
    }.items():
        (tmp_path / "fatbench.toml").write_text(text)
        assert run("status")[::2] == (2, f"fatbench: {said}\n")


SHELLS = {
    "bash": ("complete_bash", {"COMP_WORDS": "fatbench report --d", "COMP_CWORD": "2"}, r"(?m)^--d(?:b|ata|iff\w+)$"),
    "zsh": ("complete_zsh", {"_TYPER_COMPLETE_ARGS": "fatbench report --d"}, r'"--(?:differences|db|data)":'),
}  # fmt: skip


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_the_program_s_options_behind_a_command(shell: str) -> None:
    instruction, words, offered = SHELLS[shell]
    environment = {"_FATBENCH_COMPLETE": instruction, **words}
    code = f"import os; os.environ |= {json.dumps(environment)}; from fatbench.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert len(re.findall(offered, done.stdout)) == 3 and not done.stderr, done
