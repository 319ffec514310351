"""The first 80 fuzzed cases, more of those that take less time; `make fuzz` runs 10,000. See tests/fuzzing.py."""

from __future__ import annotations

from pathlib import Path

import fuzzing
import pytest

CASES = {"suite": 12, "import": 8, "data": 17, "line": 43}
PARTS = 4  # so that several processes share the cases of a kind


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.promise("Input", "No malformed input ends in a traceback")
def test_no_traceback(kind: str, part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = {number: fuzzing.case(kind, number, tmp_path / "cases") for number in range(part, CASES[kind], PARTS)}
    failed = {number: problem for number, problem in found.items() if problem}
    assert not failed, "\n".join(f"python tests/fuzzing.py --kind {kind} --only {n}\n{p}" for n, p in failed.items())


def test_every_kind_is_among_the_first_80() -> None:
    assert set(CASES) == set(fuzzing.KINDS) and sum(CASES.values()) == 80


def test_the_fuzzer_sees_a_traceback_and_a_wrong_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fatbench.cli import app

    def broken(**_: object) -> None:
        raise KeyError("what a person did not write")

    monkeypatch.setattr(app, "app", broken)
    assert "KeyError" in str(fuzzing.case("suite", 0, tmp_path))
    monkeypatch.setattr(app, "app", lambda **_: 77)
    assert "exit 77" in str(fuzzing.case("suite", 0, tmp_path))
    monkeypatch.setattr(fuzzing, "SECONDS", 1)
    monkeypatch.setattr(app, "app", lambda **_: exec("while True: pass"))
    assert "took more than 1 seconds" in str(fuzzing.case("suite", 0, tmp_path))
