"""Names and texts that a person does not choose well: passwords in messages, paths as names, pages of one name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import fuzzing
import pytest
import result_files

from fatbench.engine.rounds import Number
from fatbench.errors import SpecError, masked
from fatbench.report.formats import markdown
from fatbench.report.site.pages import Part
from fatbench.store.stages import Store
from fatbench.suite import files


@pytest.mark.parametrize(
    "text, shown",
    [
        ("plugin postgresql://me:hunter2@host/x: no", "plugin postgresql://me:***@host/x: no"),
        ("plugin 'https://me:hunter2@host/mine.py': no", "plugin 'https://me:***@host/mine.py': no"),
        ("s.yaml:3: path: password=hunter2 is no folder", "s.yaml:3: path: password=*** is no folder"),
        ("fatbench.toml: db_token = hunter2", "fatbench.toml: db_token = ***"),
        ("s.yaml:3: t2t(token_dim=64): no", "s.yaml:3: t2t(token_dim=64): no"),
        ("a.yaml:12: lr: 3 is too large", "a.yaml:12: lr: 3 is too large"),
    ],
)
def test_a_message_hides_its_secrets(text: str, shown: str) -> None:
    assert masked(text) == str(SpecError(text)) == shown


@pytest.mark.parametrize("line", ["plugins: [{}]", "extends: {}", "base: {{data: {{name: image_folder, path: {}}}}}"])
def test_a_suite_that_names_a_password_does_not_have_it_printed(line: str, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(
        f"name: s\ntitle: t\n{line.format('postgresql://me:hunter2@host/x.py')}\npresets: {{paper: {{}}}}\n"
    )
    code, said = fuzzing.program("check", str(file))
    assert code != 0 and "hunter2" not in said and said.startswith("fatbench")


def test_plugins_of_the_command_and_of_the_file_of_settings_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = fuzzing.program("list", "suites", "--plugin", "https://me:hunter2@host/mine.py")
    assert code == 2 and "hunter2" not in said
    Path("fatbench.toml").write_text('plugin = "https://me:hunter2@host/mine.py"\n')
    code, said = fuzzing.program("list", "suites")
    assert code == 2 and "hunter2" not in said
    Path("fatbench.toml").write_text('data = "https://me:hunter2@host/x"\n')
    for command in ("doctor", "list data"):
        code, said = fuzzing.program(*command.split())
        assert code == 2 and "https://me:***@host/x" in said


def test_no_two_suites_share_a_page_and_none_replaces_the_index() -> None:
    suite = files.load("sfat-cifar10")

    def page(name: str, preset: str = "paper") -> str:
        return Part(suite, replace(suite.plan("smoke"), suite=name, preset=preset), []).file

    names = ["index", "index_", "~index", "a b", "a-b", "a_b", "a/b", "a_20_b", "a~20~b", "ä"]
    pages = [page(name) for name in names]
    assert len(set(pages)) == len(names) and "index.html" not in pages and not any("/" in name for name in pages)
    assert page("my_rule", "cpu") == "my_rule-cpu.html"


def test_a_suite_s_name_in_a_file_of_results_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    secret = tmp_path / "secret.yaml"
    secret.write_text("password: hunter2\n")
    lines = fuzzing.results(tmp_path)
    cell = json.loads(result_files.rows(lines[1]))
    for run in cell["runs"]:
        run["suite"] = str(secret)
    for stage, digest in result_files.mismatches(cell):
        stage["digest"] = digest
    head = {**json.loads(lines[0]), "cells": 1}
    (tmp_path / "r.jsonl").write_text(f"{json.dumps(head)}\n{json.dumps(cell)}\n")
    code, said = fuzzing.program("site", "r.jsonl", "-o", "site")
    assert "hunter2" not in said and "'password'" not in said and "a suite's name is not a path" in said and code == 3


def test_brackets_in_names_are_text(tmp_path: Path) -> None:
    """Rich reads "[/x]" as the end of a style: here it is what a file of results says of itself."""
    path = str(tmp_path / "x.db")
    with Store.open(path, create=True) as store:
        store.add_cell("a", {"seed": 1, "algorithm": {"rounds": 1}})
        run = store.claim("a", "train", suite="[/s]", total=1, provenance={"host": "[/h]", "device": "[/d]"})
        store.finish(run, [Number("[/m]", 0.5, 1)], round=1)
    code, said = fuzzing.program("status", "--db", path)
    assert code == 0 and "[/s]" in said
    code, said = fuzzing.program("show", "a", "--db", path)
    assert code == 0 and "[/m]" in said and "on [/h], [/d]" in said


def test_what_a_suite_extends_is_a_suite(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("SECRET_KEY: hunter2\n")
    (tmp_path / "s.yaml").write_text("name: s\ntitle: t\nextends: .env\n")
    code, said = fuzzing.program("check", str(tmp_path / "s.yaml"))
    assert code == 2 and "extends: .env is not a suite file" in said and "SECRET" not in said


def test_markdown_of_a_name_is_text() -> None:
    assert markdown.escape("[x](javascript:y) <b>") == r"[x]\(javascript:y) \<b\>"
