"""The documents are true: their commands run and print what they show, and what CI runs is what the README says."""

from __future__ import annotations

import csv
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import fuzzing
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fatbench.runner.executors.slurm import table

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


def run(command: str, folder: Path, shown: list[str], decimals: bool = False, only: Path | None = None) -> None:
    """Run a command as its page says; it must end well and print the lines that the page shows. only: a folder of
    `only_installed`."""
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "160"}
    if only is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(only), str(ROOT), env.get("PYTHONPATH", "")])
    words = [sys.executable, "-m", "fatbench", *shlex.split(command)[1:]]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
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
        assert any(line.startswith(target) for line in ci)
        assert re.search(rf"^{target.split()[1]}:", makefile, re.MULTILINE)


(INSTALL,) = {command for command in COMMANDS if "pip install -c" in command}


def required(name: str, extras: frozenset[str], found: dict[str, frozenset[str]]) -> None:
    """Add to `found` what pip installs for a distribution: canonical name -> extras."""
    for line in importlib.metadata.requires(name) or []:
        one = Requirement(line)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            key, wanted = canonicalize_name(one.name), frozenset(one.extras)
            if key not in found or not wanted <= found[key]:
                found[key] = found.get(key, frozenset()) | wanted
                required(one.name, found[key], found)


def only_installed(extras: frozenset[str], folder: Path) -> Path:
    """A folder that, first on PYTHONPATH, hides every module that `pip install '.[extras]'` does not install."""
    found: dict[str, frozenset[str]] = {"fatbench": extras}
    required("fatbench", extras, found)
    hidden = [
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & found.keys()
    ]
    assert {"pytest", "ray"} <= set(hidden) and not {"torch", "pandas"} & set(hidden)
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        f"import sys\nHIDDEN = {set(hidden)!r}\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in HIDDEN:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    return folder


def test_the_install_command_names_this_folder_its_pins_and_extras_that_exist() -> None:
    assert "python3 -m venv .venv" in COMMANDS
    assert INSTALL == ".venv/bin/pip install -c constraints.txt ." and (ROOT / "constraints.txt").is_file()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = re.search(r"The extras are\n(.*?)\.\n", README, re.DOTALL)
    assert named is not None and {*re.findall(r"`(\w+)`", named[1])} == {*extras}


def planned(command: str) -> None:
    """Run a command that trains nothing, in this process and folder; it must end with 0."""
    code, said = fuzzing.program(*shlex.split(command)[1:])
    assert code == 0, f"{command}\n{said}"


def test_the_first_table_is_the_paper_s_beside_the_page_s() -> None:
    """What is printed is quoted to the digit, and ours as on its page."""
    table = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in README.splitlines() if "| *" in line]
    lines = (ROOT / "suites" / "published" / "sfat-t3.csv").read_text(encoding="utf-8").splitlines()
    rows_of_paper = [row for row in csv.DictReader(lines) if row["dataset"] == "CIFAR-10"]
    paper = {row["method"]: row for row in rows_of_paper if row["optimizer"] == "FedAvg"}
    page = " ".join((ROOT / "results" / "sfat.md").read_text(encoding="utf-8").split())
    rows = [row for row in table if row[0] in paper]
    assert [row[0] for row in rows] == ["FAT", "SFAT"]
    for method, *numbers in rows:
        of_paper = paper[method]
        assert numbers[::2] == [f"{of_paper[key]} ±{of_paper[f'{key}_std']}" for key in ("natural", "pgd20", "aa")]
        assert f"| {method} | {' | '.join(numbers[1::2])} |" in page.replace("  ", " ")


def test_the_row_at_a_papers_settings_is_its_page_s() -> None:
    (cells,) = re.findall(r"^\| \*\*the paper's settings\*\*.*? \| (.*) \|$", README, re.MULTILINE)
    fedavg, adfl, gain, ours = cells.replace("*", "").split(" | ")
    page = " ".join((ROOT / "results" / "adfl.md").read_text(encoding="utf-8").split())
    assert f"| FedAvg | {fedavg} | | AdFL | {adfl} |" in page
    assert round(float(adfl) - float(fedavg), 2) == float(ours)
    lines = (ROOT / "suites" / "published" / "adfl-misc.csv").read_text(encoding="utf-8").splitlines()
    assert [row for row in lines if row.startswith("mnist1") and f",{gain},{gain}" in row]


def test_the_counts_of_the_readme_are_counted() -> None:
    """Tables and numbers of the five papers, and the comparisons with the authors' programs."""
    files = [*(ROOT / "suites" / "published").glob("*.csv")]
    of_papers = [file for file in files if not file.name.startswith(("ce-vfal", "dbfat", "decvfal"))]
    tables = [csv.DictReader(file.read_text(encoding="utf-8").splitlines()) for file in of_papers]
    fields = [row[name] for table in tables for row in table for name in row if not name.endswith("_std")]
    numbers = sum(bool(re.fullmatch(r"-?\d+\.\d+", field or "")) for field in fields)
    assert f"- {len(of_papers)} tables of these papers, with their {numbers:,} printed numbers" in README
    fidelity = (ROOT / "results" / "bench" / "fidelity.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in fidelity.splitlines()]
    agree = [row for row in rows if len(row) == 8 and row[4] in ("output", "gradient", "run") and "passes" in row[7]]
    largest = max(float(row[5]) for row in agree)
    said = f"- {len(agree)} [comparisons](results/bench/fidelity.md) of our functions with the authors' programs agree;"
    assert said in README and f"deviation is {largest:.1e}\n" in README


def test_the_readme_s_aggregator_keeps_the_contract(tmp_path: Path, own_plugins: None) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    (tmp_path / "readme_rule.py").write_text(f'{code}\nAGGREGATORS = {{"my_rule": my_rule}}\n')
    said = fuzzing.program("check", str(tmp_path / "readme_rule.py"))
    assert said[0] == 0, said[1]


@pytest.mark.slow
def test_every_fatbench_command_of_the_readme_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    """In the order of the README, in one folder, with nothing but what its install command installs. Fractions differ
    between CPUs. Where `make demo` has just run the first of them (`.ci/run`), what it stored is not trained again."""
    if demo := os.environ.get("DEMO_RESULTS"):
        shutil.copytree(demo, tmp_path / "results")
    (tmp_path / "results").mkdir(exist_ok=True)
    for rows in (ROOT / "results").glob("*.jsonl.xz"):  # as they come with a clone
        (tmp_path / "results" / rows.name).symlink_to(rows)
    only = only_installed(frozenset(), tmp_path / "only")
    commands = [example for example in examples(README) if example[0].startswith("fatbench ")]
    assert len(commands) > 8 and sum(bool(shown) for _, shown in commands) >= 2
    for command, shown in commands:
        run(command, tmp_path, shown, only=only)


def test_a_command_that_needs_an_extra_fails_without_it(tmp_path: Path) -> None:
    """So that hiding what is not installed hides it."""
    only = only_installed(frozenset(), tmp_path / "only")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(only), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", "import torchattacks"], env=env, capture_output=True, text=True)
    assert "No module named 'torchattacks'" in done.stderr


def test_recipes_for_clusters_are_commands_as_they_stand(tmp_path, monkeypatch, new_postgres):
    """Planned, not run; what a block exports holds for its commands, and the server is one of our own."""
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    seen, server = 0, new_postgres().replace("postgresql:", "postgresql+psycopg:")
    for block in re.findall(r"^```sh\n(.*?)^```\n", page, re.MULTILINE | re.DOTALL):
        with monkeypatch.context() as patch:
            for line in block.splitlines():
                if line.startswith("export "):
                    name, value = line.removeprefix("export ").split("=", 1)
                    patch.setenv(name, server if name == "FATBENCH_DB" else value)
                    continue
                line = line.replace(" --device cuda:0,1,2,3,4,5,6,7", "")  # -n asks for what a run needs
                if "part.tar" not in line:  # here nothing is half done: tests/test_unfinished.py has it
                    planned(f"{line} --dry-run" if " run " in line else line)
                seen += " run " in line
    assert seen == 5


def test_what_the_page_tells_slurm_is_what_the_table_takes():
    """Every table of the page is one that a run accepts, and its table of keys has each key."""
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    tables = [tomllib.loads(text)["slurm"] for text in blocks]
    assert len(tables) >= 2
    for one in tables:
        chosen = table.checked(one)
        assert table.of_attacks(chosen) is None or "attacks" in one
        assert f"#SBATCH --partition={one['partition']}\n" in table.script(chosen, "cuda", "pool")
    keys = re.findall(r"^\| `(\w+)` \|", page.partition("## SLURM")[2], re.MULTILINE)
    assert sorted(keys) == sorted(table.KEYS)


@pytest.mark.nightly
def test_commands_of_the_results_index_print_its_table(tmp_path):
    """From the committed rows, so every digit is compared."""
    (tmp_path / "results").symlink_to(ROOT / "results")
    commands = examples((ROOT / "results" / "README.md").read_text(encoding="utf-8"))
    assert len(commands) == 2
    for command, shown in commands:
        run(command, tmp_path, shown, decimals=True)


@pytest.mark.parametrize("page", sorted((ROOT / "results").glob("*.md")), ids=lambda page: page.name)
def test_commands_that_made_the_results_name_their_suites(page, tmp_path, monkeypatch):
    """Planned, not run: the suite, the preset and the options exist."""
    text = page.read_text(encoding="utf-8")
    commands = [command for command, _ in examples(text)] + re.findall(r"`(fatbench run [^`]+|make \w+)`", text)
    commands = [command for command in commands if command.startswith(("fatbench run", "fatbench audit", "make"))]
    assert commands
    monkeypatch.chdir(tmp_path)
    Path("paper.csv").write_text("Method,Clean,PGD-20\nFedAvg,61.05,28.0\nOurs,64.1,36.0\n")
    for command in commands:
        if command.startswith("make"):
            target = command.split()[1]
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        else:
            planned(f"{command} --dry-run" if " run " in command else command)
