"""The images of the README, out of the committed results. Run it as a program; it needs chromium and pdflatex."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
SUITE = ["sfat-audit", "--preset", "jpeg75-cpu"]


def fatbench(*arguments: str, **env: str) -> str:
    """What the program prints."""
    command = [sys.executable, "-m", "fatbench", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, check=True, capture_output=True, text=True
    ).stdout


def terminal(text: str) -> None:
    """terminal.svg, without the font that Rich would fetch."""
    console = Console(record=True, width=112, file=io.StringIO())
    console.print(Text.from_ansi(text))
    svg = console.export_svg(title="fatbench report sfat-audit --preset jpeg75-cpu")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    (HERE / "terminal.svg").write_text(svg, encoding="utf-8")


def latex(text: str, folder: Path) -> None:
    """table.png: the table as a paper prints it."""
    page = "\\documentclass[twocolumn]{article}\\usepackage{booktabs,graphicx,amssymb}\\pagestyle{empty}"
    (folder / "table.tex").write_text(page + "\\begin{document}\n" + text + "\\end{document}\n", encoding="utf-8")
    subprocess.run(
        ["pdflatex", "-interaction=batchmode", "table.tex"], cwd=folder, check=True, stdout=subprocess.DEVNULL
    )
    subprocess.run(["pdftoppm", "-r", "150", "-png", "-singlefile", "table.pdf", "table"], cwd=folder, check=True)
    with Image.open(folder / "table.png") as image:
        box = image.convert("L").point(lambda x: 255 * (x < 250)).getbbox()
        assert box is not None
        small(image.crop((box[0] - 12, box[1] - 12, box[2] + 12, box[3] + 12)), HERE / "table.png")


def page(file: Path) -> None:
    """page.png: a page from its top to the end of the first leaderboard."""
    quiet = ["--headless", "--no-sandbox", "--disable-gpu"]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=quiet)
        shown = browser.new_page(viewport={"width": 1180, "height": 1400})
        shown.goto(file.as_uri())
        end = shown.locator(".board details").first.bounding_box()
        assert end is not None
        shown.screenshot(path=file.with_suffix(".png"), clip={"x": 0, "y": 0, "width": 1180, "height": end["y"]})
        browser.close()
    with Image.open(file.with_suffix(".png")) as image:
        small(image, HERE / "page.png")


def small(image: Image.Image, file: Path) -> None:
    """At most 1000 pixels wide, 96 colours; an octree keeps the rare ones."""
    if image.width > 1000:
        image = image.resize((1000, round(image.height * 1000 / image.width)), Image.Resampling.LANCZOS)
    image.convert("RGB").quantize(96, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
        file, optimize=True
    )


def main() -> None:
    """All of them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        db = ["--db", str(folder / "results.db")]
        fatbench("import", "results/sfat-jpeg75-cpu.jsonl.xz", *db)
        terminal(fatbench("report", *SUITE, "--format", "terminal", *db, FORCE_COLOR="1", COLUMNS="112"))
        fatbench("site", "results/fat-baselines-cpu.jsonl.xz", "-o", str(folder / "site"))
        page(folder / "site" / "fat-baselines-cpu.html")
        latex(fatbench("report", *SUITE, "--format", "latex", "--width", "text", *db), folder)


if __name__ == "__main__":
    main()
