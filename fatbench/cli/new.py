"""`fatbench new`: a small working starter file, and a suite that puts it beside FAT and SFAT, or beside any rows."""

from __future__ import annotations

import json
import keyword
import re
from pathlib import Path
from typing import Annotated

from fatbench import packed, whole_file
from fatbench.cli import completing
from fatbench.cli.completing import one_of
from fatbench.cli.options import Argument, Option
from fatbench.errors import SpecError, article, did_you_mean

TEMPLATES = Path(__file__).parent / "templates"
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
        "data: {name: digits}           # later: cifar10, svhn, ... (fatbench list data)": "data: {name: NAME}",
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


def new(
    kind: Annotated[
        str,
        Argument(metavar="KIND", help=f"{', '.join(CHANGES)}.", show_default=False, autocompletion=one_of(*CHANGES)),
    ],
    name: Annotated[str, Argument(metavar="NAME", help="Its name in the suite file.", show_default=False)],
    beside: Annotated[
        str | None,
        Option(
            "--beside", metavar="SUITE|FILE", autocompletion=completing.suites,
            help="Put it beside the rows of this suite, or exported file; imports their numbers.",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Write a small working file NAME.py, and a suite NAME.yaml to run it.

    The suite compares it with FAT and SFAT, or with the rows of a suite of ours. KIND suite writes only the suite.

    Example: fatbench new aggregator my_rule --beside fat-baselines
    """
    if kind not in CHANGES:
        raise SpecError(f"no kind is named '{kind}'{did_you_mean(kind, CHANGES)}")
    if kind == "suite":
        if beside is not None:
            raise SpecError("not with the kind suite; write 'extends: SUITE' in the file", option="beside")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise SpecError(f"'{name}' cannot be a file name: use letters, digits, '.', '_' and '-'")
    else:
        _refuse_taken(kind, name)
    rows: list[Path] = []
    if beside is not None and beside.endswith(packed.RESULTS):
        rows, beside = [Path(beside)], _suite_in(Path(beside))
    cells = ""
    if beside is None:
        contents = {f"{name}.yaml": _suite(kind).replace("NAME", name)}
    else:
        text, cells = _suite_beside(kind, name, beside)
        contents = {f"{name}.yaml": text}
    if kind != "suite":
        template = (TEMPLATES / f"{kind}.py.txt").read_text(encoding="utf-8")
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
        shipped.take_rows(f"{name}.yaml", cells, rows)
        return
    print(f"wrote {', '.join(contents)}; next:")
    print(f"  fatbench run {name}.yaml --smoke")
    print(f"  fatbench report {name}.yaml")


def _suite_in(file: Path) -> str:
    """The suite whose cells a file of results has. SpecError: there is no such file, or it has several suites."""
    if not file.is_file():
        raise SpecError(f"no such file: {file}", option="beside")
    with packed.read_text(file) as lines:
        cells = [json.loads(line) for line in lines if line.startswith('{"cell"')]
    suites = sorted({str(run["suite"]) for cell in cells for run in cell.get("runs", ()) if run.get("suite")})
    if len(suites) != 1:
        raise SpecError(f"expected the cells of one suite, got {', '.join(suites) or 'none'}", option=f"beside {file}")
    return suites[0]


def _suite_beside(kind: str, name: str, suite_name: str) -> tuple[str, str]:
    """The suite that adds this function to a suite, and a filter of the cells that it adds.

    SpecError: there is no such suite, or it has no place for it.
    """
    from fatbench.api import beside
    from fatbench.suite import files

    base, settings = files.split_settings(suite_name)
    if settings:
        raise SpecError(f"name the suite alone, without {', '.join(settings)}", option=f"beside {suite_name}")
    return beside.text_of(kind, name, files.load(base), base)


def _refuse_taken(kind: str, name: str) -> None:
    """SpecError: no name for a Python function, or one that is taken."""
    from fatbench.suite import signatures

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        allowed = "use lower case letters, digits and '_', such as near_median"
        raise SpecError(f"'{name}' cannot be a function name: {allowed}")
    table = KINDS[kind]
    if name in signatures.names(table):
        raise SpecError(f"there is already {article(table.lower())} named '{name}'")


def _suite(kind: str) -> str:
    """templates/suite.yaml with what this kind changes; the marks that are left over go."""
    text = (TEMPLATES / "suite.yaml").read_text(encoding="utf-8")
    changes = CHANGES[kind] if kind == "suite" else {**CHANGES[kind], "# PLUGINS": PLUGINS}
    for placeholder, replacement in changes.items():
        assert placeholder in text, placeholder
        text = text.replace(placeholder, replacement)
    return re.sub(r"^ *# [A-Z]+\n", "", text, flags=re.MULTILINE)
