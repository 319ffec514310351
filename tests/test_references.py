"""The papers behind suites: entries that are whole, and the ones that a suite cites."""

from __future__ import annotations

from pathlib import Path

import pytest

from fatbench.report import references
from fatbench.suite import files, signatures
from fatbench.suite.folders import CITES

ROOT = Path(__file__).parent.parent


def test_every_entry_is_whole() -> None:
    """Authors with initials, title, venue and year; the page of references is the list of them."""
    found = references.entries()
    assert len({one.key for one in found}) == len(found) > 90
    for one in found:
        assert one.fields.keys() >= {"author", "title", "year"} and set(references.VENUES) & one.fields.keys(), one.key
        assert all(initials or family == "others" for family, initials in one.authors), one.key
        assert one.bibtex.count("{") == one.bibtex.count("}") and "\\" not in one.bibtex, one.key
    page = (ROOT / "docs" / "references.md").read_text(encoding="utf-8")
    assert page.endswith(f"\n\n{references.markdown(found)}")


@pytest.mark.parametrize(
    ("name", "cited", "absent"),
    [
        ("fat-baselines", {"zhu2023", "dejorge2022", "wong2020", "wang2020mart", "howe1974"}, "wang2020fednova"),
        ("fat-byzantine", {"blanchard2017", "elmhamdi2018", "xie2019", "zizzo2020", "wilson1927"}, "chen2022"),
    ],
)
def test_a_suite_cites_its_methods(name: str, cited: set[str], absent: str) -> None:
    keys = {one.key for one in references.cited_by(files.load(name))}
    assert cited <= keys and absent not in keys


def test_what_is_cited_is_an_entry_and_each_once() -> None:
    """A key that no entry has would be left out silently."""
    known = {one.key: one for one in references.entries()}
    cited: set[str] = {key for keys in CITES.values() for key in keys}
    for kind in signatures.TABLES:
        for name, one in signatures.known_functions(kind).items():
            keys = one.entry.get("cites", ())
            assert [*keys] == sorted(set(keys)), f"{kind} {name}"
            cited.update(keys)
    assert cited <= known.keys() and len(cited) > 60
    assert signatures.known_functions("Aggregator")["krum"].entry["cites"] == ["blanchard2017"]
