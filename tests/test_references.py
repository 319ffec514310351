"""The papers behind suites: entries that are whole, and the ones that a suite cites."""

from __future__ import annotations

from pathlib import Path

import pytest

from fatbench.report import references
from fatbench.suite import files

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
        (
            "fat-baselines",
            {"zhu2023", "dejorge2022", "wong2020", "wang2020mart", "howe1974"},
            "wang2020fednova",
        ),
        ("fat-byzantine", {"blanchard2017", "elmhamdi2018", "xie2019", "zizzo2020", "wilson1927"}, "chen2022"),
    ],
)
def test_a_suite_cites_its_methods(name: str, cited: set[str], absent: str) -> None:
    keys = {one.key for one in references.cited_by(files.load(name))}
    assert cited <= keys and absent not in keys


def test_a_name_and_a_year_find_the_paper() -> None:
    found = [one.key for one in references.in_text("FedProx (Li et al. 2020), de Jorge et al. 2022; Chambolle 2004")]
    assert sorted(found) == ["chambolle2004", "dejorge2022", "li2020fedprox"]
