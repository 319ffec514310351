"""Writes docs/promises.md from the tests: each `@pytest.mark.promise(section, text)` is a line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "promises.md"
SECTIONS = ("Numbers", "Leases", "Interrupted and shared runs", "Faults of the machine", "Input")
HEAD = """# What is promised

`python docs/promises.py` writes this page from the tests in parentheses.
[running.md](running.md#several-runs-on-one-database) explains leases.

One fault remains: a process stopped in the middle of a commit keeps SQLite's write lock until it continues or is
killed. PostgreSQL releases the lock after `idle_in_transaction_session_timeout`, a server setting.
"""


def promises() -> Iterator[tuple[str, str, str]]:
    """(section, promise, test) in the order of the files. ValueError: a section that SECTIONS lacks."""
    for file in sorted((ROOT / "tests").glob("test_*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
                    section, text = (ast.literal_eval(argument) for argument in mark.args)
                    if section not in SECTIONS:
                        raise ValueError(f"{file.name}: {node.name}: no section '{section}'")
                    yield section, text, f"[`{node.name}`](../tests/{file.name})"


def page() -> str:
    """The text of the page."""
    found = list(promises())
    parts = [HEAD]
    for section in SECTIONS:
        lines = [f"- {text} ({test})" for of, text, test in found if of == section]
        parts.append("\n".join(["", f"## {section}", "", *lines, ""]))
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
