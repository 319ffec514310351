"""A suite with a mistake is refused in one line that has file, line, key and the word: `wrong_suites.yaml`."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_declared_tests
import test_perturbation
import test_suites
import test_transfer
import yaml

from fatbench.errors import SpecError
from fatbench.suite import files

SUITES = {  # name in wrong_suites.yaml -> the suite before it is changed
    "tiny": test_suites.TINY,
    "figure": test_suites.TINY.replace(*test_suites.FIGURE),
    "radius": test_perturbation.SUITE,
    "moved": test_transfer.SUITE,
    "family": f"{test_declared_tests.SUITE}tests:\n  TESTS\n",
}
WRONG = yaml.safe_load(Path(__file__).with_name("wrong_suites.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "before", "after", "place", "words"),
    [(name, before, after, place, words) for name, rows in WRONG.items() for before, after, place, *words in rows],
)
def test_wrong(
    name: str,
    before: str,
    after: str,
    place: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_plugins: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("looking.py").write_text(test_transfer.PLUGIN)  # which the suite "moved" names
    suite = SUITES[name]
    assert before in suite
    Path("s.yaml").write_text(suite.replace(before, after, 1), encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        files.load("s.yaml").plan()
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert message.startswith(f"s.yaml:{place}") and all(word in message for word in words), message
