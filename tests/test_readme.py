"""The README is true: its commands run, its files are there, what CI runs is what it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fatbench.methods.protocols import PROTOCOLS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line.split("#")[0].strip() for block in BLOCKS for line in block.splitlines() if line.strip()]


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


def test_every_fatbench_command_of_the_readme_runs(tmp_path):
    """In the order of the README, in one folder. The two that need CIFAR-10 must say that it is missing (exit 5): no
    test fetches anything; `report` of a suite without results shows what is missing."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "160"}
    commands = [c for c in COMMANDS if c.startswith("fatbench ")]
    assert len(commands) > 10
    for command in commands:
        arguments = shlex.split(command)[1:]
        if arguments[:2] == ["data", "prepare"]:
            continue  # fetches; tests/test_data.py has it with files of its own
        done = subprocess.run(
            [sys.executable, "-m", "fatbench", *arguments], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        expected = 5 if arguments == ["run", "suite", "sfat-cifar10"] else 0
        assert done.returncode == expected, f"{command}\n{done.stderr}"
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)#]+)", README))
def test_links_of_the_readme_lead_somewhere(link):
    assert (ROOT / link).exists()


def test_the_readme_names_every_protocol():
    assert all(f"`{name}`" in README for name in PROTOCOLS)
