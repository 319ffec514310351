"""The documents are true: their commands run and print what they show, and what CI runs is what the README says."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fatbench.methods.algorithms import ALGORITHMS
from fatbench.runner.executors import slurm

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```sh\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def examples(page: str) -> list[tuple[str, list[str]]]:
    """Every command of the ```sh blocks, with the lines of the ```text block that follows its block."""
    found = []
    for block, output in BLOCK.findall(page):
        commands = [line.split("#")[0].strip() for line in block.splitlines() if line.strip()]
        found += [(command, []) for command in commands[:-1]] + [(commands[-1], output.splitlines())]
    return found


COMMANDS = [command for command, _ in examples(README)]


def plain(line: str, decimals: bool) -> str:
    """A printed line without marks, widths and times; without the digits of fractions unless `decimals`."""
    line = re.sub(r"<sup>.*?</sup>|</?u>|\*\*", "", line)
    line = re.sub(r"done in .*", "done in T", re.sub(r"^\d\d:\d\d:\d\d ", "", line))
    return " ".join((line if decimals else re.sub(r"[+-]?\d+\.\d+", "x", line)).split())


def run(command: str, folder: Path, shown: list[str], decimals: bool = False, code: int = 0) -> None:
    """Run a command as its page says; it must end with this code and print the lines that the page shows."""
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "160"}
    done = subprocess.run(
        [sys.executable, "-m", "fatbench", *shlex.split(command)[1:]],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, f"{command}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    printed = {plain(line, decimals) for line in (done.stdout + done.stderr).splitlines()}
    missing = [line for line in shown if plain(line, decimals) not in printed]
    assert not missing, f"{command}\n{done.stdout}{done.stderr}"


def test_make_targets_of_the_readme_are_what_ci_runs():
    targets = [c for c in COMMANDS if c.startswith("make ")]
    assert targets == ["make demo", "make test"]
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in targets:
        assert target in ci
        assert re.search(rf"^{target.split()[1]}:", makefile, re.MULTILINE)


def test_installing_is_as_the_readme_says():
    """The install commands need the registry: here only that what they name is there."""
    assert "python3 -m venv .venv" in COMMANDS
    assert ".venv/bin/pip install -c constraints.txt ." in COMMANDS
    assert (ROOT / "constraints.txt").is_file()


@pytest.mark.slow
def test_every_fatbench_command_of_the_readme_runs_and_prints_what_it_shows(tmp_path):
    """In the order of the README, in one folder. The one that needs CIFAR-10 must say that it is missing (exit 5): no
    test fetches anything; `report` of a suite without results shows what is missing. Fractions differ between CPUs."""
    commands = [example for example in examples(README) if example[0].startswith("fatbench ")]
    assert len(commands) > 10
    assert sum(bool(shown) for _, shown in commands) >= 4
    for command, shown in commands:
        if command.startswith("fatbench data prepare"):
            continue  # fetches; tests/test_data.py has it with files of its own
        run(command, tmp_path, shown, code=5 if command == "fatbench run suite sfat-cifar10" else 0)


def test_recipes_for_clusters_are_commands_as_they_stand(tmp_path, monkeypatch, new_postgres):
    """Planned, not run; what a block exports holds for its commands, and the server is one of our own."""
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    seen, server = 0, new_postgres().replace("postgresql:", "postgresql+psycopg:")
    for block in re.findall(r"^```sh\n(.*?)^```\n", page, re.MULTILINE | re.DOTALL):
        with monkeypatch.context() as patch:
            for line in block.splitlines():
                if line.startswith("export "):
                    name, value = line.removeprefix("export ").split("=", 1)
                    patch.setenv(name, server if name == "FATBENCH_DB" else value)
                    continue
                run(f"{line} --dry-run" if " run " in line else line, tmp_path, [])
                seen += " run " in line
    assert seen == 4


def test_what_the_page_tells_slurm_is_what_submitit_takes(tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit")
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    tables = [
        tomllib.loads(text)["slurm"] for text in re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    ]
    assert len(tables) == 2
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")  # submitit looks for srun
    for number, table in enumerate(tables):
        made = slurm._executor(submitit, tmp_path / str(number), table, ["cuda:0"])._executor.parameters
        assert (made["partition"], made["time"], made["gpus_per_node"], made["cpus_per_task"]) == (
            table["partition"], table["time"], table["gpus"], table["cpus"],
        )  # fmt: skip


def test_commands_of_the_results_index_print_its_table(tmp_path):
    """From the committed rows, so every digit is compared."""
    (tmp_path / "results").symlink_to(ROOT / "results")
    commands = examples((ROOT / "results" / "README.md").read_text(encoding="utf-8"))
    assert len(commands) == 2
    for command, shown in commands:
        run(command, tmp_path, shown, decimals=True)


@pytest.mark.parametrize("page", sorted((ROOT / "results").glob("*.md")), ids=lambda page: page.name)
def test_commands_that_made_the_results_name_their_suites(page, tmp_path):
    """Planned, not run: the suite, the preset and the options exist."""
    text = page.read_text(encoding="utf-8")
    commands = [command for command, _ in examples(text)] + re.findall(r"`(fatbench run suite [^`]+|make \w+)`", text)
    commands = [command for command in commands if command.startswith(("fatbench run", "make"))]
    assert commands
    for command in commands:
        if command.startswith("make"):
            target = command.split()[1]
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        else:
            run(f"{command} --dry-run", tmp_path, [])


def test_the_readme_names_every_algorithm():
    assert all(f"`{name}`" in README for name in ALGORITHMS)
