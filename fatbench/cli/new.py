"""`fatbench new`: a small working starter file, and a suite that puts it beside FAT and SFAT, or beside any rows."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fatbench import whole_file
from fatbench.cli import completing
from fatbench.cli.options import Db
from fatbench.errors import SpecError, article

TEMPLATES = Path(__file__).parent / "templates"
Name = Annotated[str, typer.Argument(help="Its name in the suite file.", show_default=False)]
Beside = Annotated[
    str | None,
    typer.Option(
        "--beside",
        metavar="SUITE",
        help="Add it to the rows of this suite, whose shipped numbers are imported.",
        autocompletion=completing.suites,
    ),
]
Rows = Annotated[
    list[Path] | None,
    typer.Option("--rows", metavar="FILE", help="The suite's numbers, as exported; default: those of a clone."),
]

KINDS = {
    "method": "Algorithm",
    "aggregator": "Aggregator",
    "objective": "Objective",
    "attack": "Attack",
    "adversary": "Adversary",
    "dataset": "Data",
    "model": "Model",
    "partition": "Partition",
}
# What each changes in templates/suite.yaml: what stands there -> what comes in its place.
LOCAL, ATTACK = "local:                       #", "attack: {name: pgd}"
CHANGES: dict[str, dict[str, str]] = {
    "method": {
        "# METHOD": "NAME: {algorithm: {name: NAME, rounds: 20, aggregator: {name: samples}, local: *local}}",
        LOCAL: "local: &local                #",  # another algorithm replaces the whole mapping, and needs its own
    },
    "aggregator": {"# METHOD": "NAME: {algorithm: {aggregator: {name: NAME}}}"},
    "objective": {
        "# METHOD": "NAME: {algorithm: {local: {objective: {name: NAME, attack: *training}}}}",
        ATTACK: ATTACK.replace("attack: ", "attack: &training "),
    },
    "attack": {
        "# ATTACK": "NAME: {name: NAME, step: 3/255, steps: 20}",
        "PGD-20: pgd20}": "PGD-20: pgd20, NAME: NAME}",
    },
    "adversary": {
        "# METHOD": "NAME: {malicious: {clients: 1, attack: {name: NAME}}}",
        "NAME beside FAT and SFAT": "FAT with a malicious client, FAT and SFAT",
    },
    "dataset": {
        "data: {name: digits}           # later: cifar10, svhn, ... (fatbench data list)": "data: {name: NAME}",
        "NAME beside FAT and SFAT, on scikit-learn's digits": "FAT and SFAT on NAME",
    },
    "model": {
        "model: {name: small_cnn, width: 16}": "model: {name: NAME, width: 16}",
        "NAME beside FAT and SFAT": "FAT and SFAT with NAME",
    },
    "partition": {
        "partition: {name: shah, clients: 5, skew: 2}": "partition: {name: NAME, clients: 5}",
        "NAME beside FAT and SFAT": "FAT and SFAT with NAME",
    },
    "suite": {},
}
SCHEMA = "fatbench.schema.json"  # beside a suite, for editors
PLUGINS = "plugins: [NAME.py]             # found relative to this file"


def _command(kind_name: str, help: str) -> Callable[..., None]:
    def command(name: Name, *, beside: Beside = None, rows: Rows = None, db: Db = None) -> None:
        _write(kind_name, name, beside, rows or [], db)

    def suite_command(name: Name) -> None:
        _write(kind_name, name)

    function = suite_command if kind_name == "suite" else command
    function.__doc__ = help
    return function


def _help(kind_text: str, example: str) -> str:
    return f"Write {kind_text} to NAME.py, and the suite NAME.yaml.\n\nExample: fatbench new {example}"


method = _command("method", _help("an algorithm", "method my_method"))
aggregator = _command("aggregator", _help("an aggregator", "aggregator my_rule --beside fat-baselines"))
objective = _command("objective", _help("a training objective", "objective my_loss --beside fat-baselines"))
attack = _command("attack", _help("an attack", "attack my_attack --beside fat-baselines"))
adversary = _command("adversary", _help("what malicious clients do", "adversary my_flip --beside fat-byzantine"))
dataset = _command("dataset", _help("a data set of arrays", "dataset my_images"))
model = _command("model", _help("a network", "model my_net --beside fat-baselines"))
partition = _command("partition", _help("a partition", "partition my_split --beside fat-baselines"))
suite = _command(
    "suite", "Write the suite NAME.yaml, which compares FAT with SFAT.\n\nExample: fatbench new suite my_suite"
)


def _write(
    kind_name: str, name: str, beside: str | None = None, rows: Sequence[Path] = (), db: str | None = None
) -> None:
    """Write the files for a kind and say what to do next. SpecError: a name that cannot be, or a file that is there."""
    if kind_name == "suite":
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise SpecError(f"'{name}' cannot be a file name: use letters, digits, '.', '_' and '-'")
    else:
        _refuse_taken(kind_name, name)
    if rows and beside is None:
        raise SpecError("--rows: only with --beside SUITE")
    if missing_files := [file for file in rows if not file.is_file()]:
        raise SpecError(f"--rows: no such file: {missing_files[0]}")
    cells = ""
    if beside is None:
        contents = {f"{name}.yaml": _suite(kind_name).replace("NAME", name)}
    else:
        text, cells = _suite_beside(kind_name, name, beside)
        contents = {f"{name}.yaml": text}
    if kind_name != "suite":
        template = (TEMPLATES / f"{kind_name}.py.txt").read_text(encoding="utf-8")
        contents = {f"{name}.py": template.replace("NAME", name), **contents}
    if existing_files := [file for file in contents if Path(file).exists()]:
        raise SpecError(f"{existing_files[0]} exists already: nothing was written")
    contents[f"{name}.yaml"] = f"# yaml-language-server: $schema={SCHEMA}\n{contents[f'{name}.yaml']}"
    if not Path(SCHEMA).exists():
        from fatbench.suite import file_schema

        contents[SCHEMA] = file_schema.text()
    for file, text in contents.items():
        whole_file.write(Path(file), text, new=True)
    if beside is not None:
        from fatbench.cli import shipped

        print(f"wrote {', '.join(contents)}", flush=True)
        shipped.take_rows(f"{name}.yaml", cells, rows, db)
        return
    print(f"wrote {', '.join(contents)}; next:")
    print(f"  fatbench run {name}.yaml --smoke")
    print(f"  fatbench report {name}.yaml")


def _suite_beside(kind_name: str, name: str, suite_name: str) -> tuple[str, str]:
    """The suite that adds this function to a suite, and a filter of the cells that it adds.

    SpecError: there is no such suite, or it has no place for it.
    """
    from fatbench.cli import beside
    from fatbench.suite import files

    base, settings = files.split_settings(suite_name)
    if settings:
        raise SpecError(f"--beside {suite_name}: name the suite alone, without {', '.join(settings)}")
    return beside.text_of(kind_name, name, files.load(base), base)


def _refuse_taken(kind_name: str, name: str) -> None:
    """SpecError: no name for a Python function, or one that is taken."""
    from fatbench.suite import signatures

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise SpecError(
            f"'{name}' cannot be a function name: use lower case letters, digits and '_', such as near_median"
        )
    kind = KINDS[kind_name]
    if name in signatures.names(kind):
        raise SpecError(f"there is already {article(kind.lower())} named '{name}'")


def _suite(kind_name: str) -> str:
    """templates/suite.yaml with what this kind changes; the marks that are left over go."""
    text = (TEMPLATES / "suite.yaml").read_text(encoding="utf-8")
    changes = CHANGES[kind_name] if kind_name == "suite" else {**CHANGES[kind_name], "# PLUGINS": PLUGINS}
    for placeholder, replacement in changes.items():
        assert placeholder in text, placeholder
        text = text.replace(placeholder, replacement)
    return re.sub(r"^ *# [A-Z]+\n", "", text, flags=re.MULTILINE)
