"""`fatbench new`: a small working starter file, and a suite that compares it with FedAvg and SFAT."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from fatbench import whole_file
from fatbench.errors import SpecError, article

TEMPLATES = Path(__file__).parent / "templates"
Name = Annotated[str, typer.Argument(help="Its name in the suite file.", show_default=False)]

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
        "NAME beside FedAvg and SFAT": "FedAvg with a malicious client, FedAvg and SFAT",
    },
    "dataset": {
        "data: {name: digits}           # later: cifar10, svhn, ... (fatbench data list)": "data: {name: NAME}",
        "NAME beside FedAvg and SFAT, on scikit-learn's digits": "FedAvg and SFAT on NAME",
    },
    "model": {
        "model: {name: small_cnn, width: 16}": "model: {name: NAME, width: 16}",
        "NAME beside FedAvg and SFAT": "FedAvg and SFAT with NAME",
    },
    "partition": {
        "partition: {name: shah, clients: 5, skew: 2}": "partition: {name: NAME, clients: 5}",
        "NAME beside FedAvg and SFAT": "FedAvg and SFAT with NAME",
    },
    "suite": {},
}
PLUGINS = "plugins: [NAME.py]             # found relative to this file"


def _command(what: str, help: str) -> Callable[..., None]:
    def command(name: Name) -> None:
        _write(what, name)

    command.__doc__ = help
    return command


method = _command("method", "Write an algorithm to NAME.py, and the suite NAME.yaml.")
aggregator = _command("aggregator", "Write an aggregator to NAME.py, and the suite NAME.yaml.")
objective = _command("objective", "Write a training objective to NAME.py, and the suite NAME.yaml.")
attack = _command("attack", "Write an attack to NAME.py, and the suite NAME.yaml.")
adversary = _command("adversary", "Write what malicious clients do to NAME.py, and the suite NAME.yaml.")
dataset = _command("dataset", "Write a data set of arrays to NAME.py, and the suite NAME.yaml.")
model = _command("model", "Write a network to NAME.py, and the suite NAME.yaml.")
partition = _command("partition", "Write a partition to NAME.py, and the suite NAME.yaml.")
suite = _command("suite", "Write the suite NAME.yaml, which compares FedAvg with SFAT.")


def _write(what: str, name: str) -> None:
    """Write the files for a kind and say what to do next. SpecError: a name that cannot be, or a file that is there."""
    if what == "suite":
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise SpecError(f"'{name}' cannot be a file name: use letters, digits, '.', '_' and '-'")
    else:
        _free(what, name)
    contents = {f"{name}.yaml": _suite(what)}
    if what != "suite":
        contents = {f"{name}.py": (TEMPLATES / f"{what}.py.txt").read_text(encoding="utf-8"), **contents}
    if there := [file for file in contents if Path(file).exists()]:
        raise SpecError(f"{there[0]} exists already: nothing was written")
    for file, text in contents.items():
        whole_file.write(Path(file), text.replace("NAME", name), new=True)
    print(f"wrote {' and '.join(contents)}; next:")
    print(f"  fatbench run suite {name}.yaml --smoke")
    print(f"  fatbench report {name}.yaml")


def _free(what: str, name: str) -> None:
    """SpecError: no name for a Python function, or one that is taken."""
    from fatbench.suite import signatures

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise SpecError(
            f"'{name}' cannot be a function name: use lower case letters, digits and '_', such as near_median"
        )
    kind = KINDS[what]
    if name in signatures.names(kind):
        raise SpecError(f"there is already {article(kind.lower())} named '{name}'")


def _suite(what: str) -> str:
    """templates/suite.yaml with what this kind changes; the marks that are left over go."""
    text = (TEMPLATES / "suite.yaml").read_text(encoding="utf-8")
    changes = CHANGES[what] if what == "suite" else {**CHANGES[what], "# PLUGINS": PLUGINS}
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return re.sub(r"^ *# [A-Z]+\n", "", text, flags=re.MULTILINE)
