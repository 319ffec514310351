"""Every committed table in the classes that people write papers in: no error, nothing sticks out, one float a table.

    python tests/latex_runs.py [--set-up NAME] [--notes short] [--keep FOLDER]

A class that is not installed is left out, with a line that says so. Exit 1: something was found.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import result_files

from fatbench.report import build_tables, render
from fatbench.report.formats import latex
from fatbench.report.tables.sheet import Sheet
from fatbench.store import jsonl
from fatbench.store.stages import Store
from fatbench.suite import files

RESULTS = Path(__file__).parent.parent / "results"
FILES = {  # of rows -> a suite of them
    "adfl-mnist-jpeg-cpu": "adfl-mnist-jpeg", "april-jpeg75-cpu": "april-masks-jpeg75",
    "fat-baselines-cpu": "fat-baselines", "fat-byzantine-cpu": "fat-byzantine",
    "fedvkd-cifar10-jpeg75-p02-cpu": "fedvkd-cifar10-jpeg75", "privacy-updates-cpu": "privacy-updates",
    "sfat-fashion-cpu": "sfat-fashion", "sfat-jpeg75-cpu": "sfat-audit-jpeg75",
}  # fmt: skip


@dataclass(frozen=True)
class SetUp:
    """A class with its options, what a paper of it has before its body, and the widths that are for it."""

    cls: str
    options: str = ""
    preamble: str = ""
    widths: tuple[str, ...] = ("article",)


NARROW = r"\usepackage[textwidth=487pt,textheight=650pt,columnsep=19pt]{geometry}"
# a frame of beamer's size, where beamer is not installed
FRAMES = r"""\usepackage[paperwidth=128mm,paperheight=96mm,margin=1cm,includefoot=false]{geometry}\pagestyle{empty}
\renewenvironment{frame}[1]{\clearpage\noindent\begin{minipage}[t][\textheight][t]{\textwidth}{\large #1\par}}%
{\end{minipage}}"""
SET_UPS = {
    "article": SetUp("article"),
    "article-11pt-a4": SetUp("article", "11pt,a4paper", widths=("article", "345")),
    "article-two-columns": SetUp("article", "twocolumn", NARROW, ("column", "text")),
    "report": SetUp("report", "12pt"),
    "llncs": SetUp("llncs", widths=("llncs",)),
    # the text block of neurips_2024.sty, which TeX Live does not have
    "neurips": SetUp("article", "", r"\usepackage[textwidth=5.5in,textheight=9in]{geometry}", ("neurips",)),
    "ieee": SetUp("IEEEtran", "conference", widths=("ieee", "column", "text")),
    "frames": SetUp("article", "", FRAMES, ("beamer",)),
    "acm": SetUp("acmart", "sigconf", r"\title{Tables}", ("acm",)),
    "elsarticle": SetUp("elsarticle", "preprint"),
    "beamer": SetUp("beamer", "", r"\usepackage{pgf}", ("beamer",)),
    "beamer-wide": SetUp("beamer", "aspectratio=169", r"\usepackage{pgf}", ("beamer",)),
}
NOTES = ("short", "none", "full")
BAD = re.compile(
    r"^(?:! .*|Overfull \\[hv]box .*|LaTeX Warning: Float too large.*|.*duplicate ignored.*|.*multiply defined.*)", re.M
)


def installed(setup: SetUp) -> bool:
    """Whether LaTeX finds the class and the packages."""
    packages = re.findall(r"\\usepackage(?:\[.*?\])?{(\w+)}", setup.preamble)
    wanted = [f"{setup.cls}.cls", *(f"{name}.sty" for name in packages)]
    return all(subprocess.run(["kpsewhich", one], capture_output=True, check=False).returncode == 0 for one in wanted)


def grids(folder: Path) -> Iterator[Sheet]:
    """The tables of the committed rows."""
    for rows, name in FILES.items():
        with Store.open(str(folder / f"{rows}.db"), create=True) as store:
            jsonl.import_(store, result_files.committed(rows))
            suite = files.load(name)
            yield from build_tables(suite, suite.plan("cpu"), store)


def run(setup: SetUp, text: str, folder: Path) -> list[str]:
    """What pdflatex finds wrong with a fragment in a document of a class."""
    hyperref = "" if setup.cls in ("beamer", "acmart") else r"\usepackage{hyperref}"
    lines = [rf"\documentclass[{setup.options}]{{{setup.cls}}}", setup.preamble, r"\usepackage{booktabs,graphicx}",
             hyperref, r"\begin{document}", r"\input{table}", r"\end{document}"]  # fmt: skip
    (folder / "main.tex").write_text("\n".join(lines))
    (folder / "table.tex").write_text(text, encoding="utf-8")
    for draft in (["-draftmode"], []):
        command = ["pdflatex", "-interaction=nonstopmode", *draft, "main.tex"]
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=900, check=False)
    said = BAD.findall(done.stdout.decode("utf-8", "replace"))
    return [line for line in said if not is_announced(line, text.splitlines())]


def is_announced(line: str, lines: list[str]) -> bool:
    """Whether a line of the log is of a float that names itself too wide for its line."""
    place = re.match(r"Overfull \\hbox .* at lines (\d+)--", line)
    begins = (r"\begin{table", r"\begin{frame")
    before = range(int(place[1]) - 1, 0, -1) if place else ()
    above = next((at for at in before if lines[at].startswith(begins)), 0)
    return bool(place) and lines[above - 1].endswith(latex.TOO_MANY)


def main() -> int:
    """Say what each set-up has wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set-up", choices=SET_UPS)
    parser.add_argument("--notes", choices=NOTES)
    parser.add_argument("--keep", type=Path, help="keep the PDFs in this folder")
    asked = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as scratch:
        shown = list(grids(Path(scratch)))
        for name, setup in SET_UPS.items():
            if asked.set_up not in (None, name):
                continue
            if not installed(setup):
                print(f"{name}: left out, {setup.cls} or a package of it is not installed")
                continue
            for width in setup.widths:
                for notes in [asked.notes] if asked.notes else NOTES:
                    folder = (asked.keep or Path(scratch)) / f"{name}-{width}-{notes}"
                    folder.mkdir(parents=True, exist_ok=True)
                    text = render(shown, "latex", notes, width=width)
                    found = run(setup, text, folder)
                    floats = text.count(r"\begin{table") + text.count(r"\begin{frame}")
                    print(
                        f"{name}, {width}, notes {notes}: {len(shown)} tables, {floats} floats, {len(found)} findings"
                    )
                    for line in found[:8]:
                        print(f"  {line}")
                    bad += len(found)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
