"""What grows with the work: ends of stages by their numbers, folders of images by their files, and uploads.

    python tests/scale_growth.py --folder build/scale        a part of `make scale`; --only numbers, images or uploads

Every measurement is a program of its own: CPU seconds (user and system, children too) and memory. Last comes
what is asked of these numbers; exit 1 where that is missed. Images are JPEGs of 224 x 224, links to 220 files, so that
the disk is no part of it. --small is a part of it for a first look.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

SUITE = """
name: growth
title: Folders of images, and uploads of a large network
seeds: [0]
base:
  data: {name: image_folder, path: images2000, size: 224}
  train: 2000
  test: 80
  partition: {name: iid, clients: 2}
  model: {name: mlp}
  algorithm:
    {name: fedavg, rounds: 1, local: {epochs: 1, batch: 64, lr: 0.01, objective: standard}, aggregator: samples}
axes:
  what:
    "2000": {}
    "50000": {data: {path: images50000}}
    all: {data: {path: images50000}, train: 50000, test: 100}
    two:
      model: {name: vit, dim: 768, heads: 12, head_norm: ln}
      train: 2
      partition: {clients: 2}
      algorithm: {rounds: 2, local: {batch: 1}}
    ten:
      model: {name: vit, dim: 768, heads: 12, head_norm: ln}
      train: 10
      partition: {clients: 10}
      algorithm: {rounds: 2, local: {batch: 1}}
evaluate: {checkpoints: [last], attacks: {}}
presets:
  paper: {}
  images2000: {axes: {what: ["2000"]}}
  images50000: {axes: {what: ["50000"]}}
  all: {axes: {what: [all]}}
  two: {axes: {what: [two]}}
  ten: {axes: {what: [ten]}}
"""


Bound = tuple[str, float, float]  # what is measured, its value, the largest that it may have
DECODED_MB = 2080 * 3 * 224**2 / 2**20


class Usage(NamedTuple):
    """What a program and its children took."""

    seconds: float  # of CPU
    megabytes: float  # of the largest process
    anonymous: float  # MB of all processes together that lie in no file
    images: float  # MB of the decoded images, each page shared out among those that map it


def used(command: list[str], folder: Path) -> Usage:
    """What a program takes that ends well; memory is looked at once a second."""
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL)
    ended, anonymous = 0, 0.0
    mapped = []  # the median: while a process more maps them, one after the other counts a page twice
    while not ended:
        ended, status, spent = os.wait4(process.pid, os.WNOHANG)
        files = [file for file in Path("/proc").glob("[0-9]*") if _is_of(file, process.pid)]
        anonymous = max(anonymous, sum(_kilobytes(file / "status", r"^RssAnon:") for file in files) / 1024)
        of_images = r"images\.npy\n(?:.*\n)*?Pss:"
        mapped.append(sum(_kilobytes(file / "smaps", of_images) for file in files) / 1024)
        time.sleep(1)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return Usage(
        spent.ru_utime + spent.ru_stime,
        spent.ru_maxrss / 1024,
        anonymous,
        statistics.median(list(filter(None, mapped)) or [0.0]),
    )


def _is_of(process: Path, ancestor: int) -> bool:
    """Whether a process, as a folder of /proc, is another's or descends from it."""
    while int(process.name) not in (0, 1, ancestor):
        try:
            process = process.parent / (process / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            return False
    return int(process.name) == ancestor


def _kilobytes(file: Path, label: str) -> int:
    """The sum of what stands behind a label; 0: the process has ended."""
    with contextlib.suppress(OSError):
        return sum(map(int, re.findall(label + r"\s+(\d+) kB", file.read_text(), re.MULTILINE)))
    return 0


def images(folder: Path, name: int, n: int = 2000) -> None:
    """images<name>/{train,test}/c<k>/*.jpg of ten classes, n for training: links, made where they are missing."""
    place, base = folder / f"images{name}", folder / "base"
    if place.exists():
        return
    base.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for i in range(220):
        small = Image.fromarray(rng.integers(0, 255, (14, 14, 3), dtype=np.uint8))
        small.resize((224, 224), Image.Resampling.BICUBIC).save(base / f"{i}.jpg", quality=85)
    for split, count, first, files in (("train", n, 0, 200), ("test", 100, 200, 20)):
        for k in range(10):
            (place / split / f"c{k}").mkdir(parents=True)
            for i in range(count // 10):
                os.link(base / f"{first + (7 * i + k) % files}.jpg", place / split / f"c{k}" / f"{i:06d}.jpg")


def end_of_stage(numbers: int, file: str) -> None:
    """Print what the end of a stage of so many numbers takes, a second call of the same file; the first makes it."""
    from fatbench.engine.rounds import Number
    from fatbench.store.stages import Store

    with Store.open(file, create=True) as store:
        if not store.has_cells():
            store.add_cell("a", {"seed": 0})
            run = store.claim("a", "train", suite="growth", total=100, provenance={})
            for t in range(1, 101):
                rows = [Number("loss", k / t, t, 1, k) for k in range(numbers // 100)]
                store.commit(run, numbers=rows, round=t)
            return
        writing, locked = store.database.writing, [0.0]

        @contextmanager
        def timed():
            with writing() as connection:
                begin = time.process_time()
                yield connection
            locked.append(time.process_time() - begin)

        store.database.writing = timed
        begin = time.process_time()
        store.finish(1, [Number("accuracy", 0.5, 100)], round=100)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"| {numbers:,} | {time.process_time() - begin:.1f} | {max(locked):.2f} | {peak:.0f} |", flush=True)


def end_of_stages(folder: Path, small: bool) -> Iterator[Bound]:
    """A table of ends of stages, each in a process of its own."""
    print("| numbers of a stage | CPU seconds of its end | of these the database is locked | MB |\n|---|---|---|---|")
    for n in (500_000, 1_000_000, 2_000_000, 4_000_000) if not small else (100_000, 200_000):
        file = folder / f"numbers{n}.db"
        for part in folder.glob(f"{file.name}*"):
            part.unlink()
        command = [sys.executable, __file__, "--end", str(n), str(file)]
        for _ in range(2):
            row = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        print(row, end="", flush=True)
    yield f"MB of the end of a stage of {n:,} numbers", float(row.split("|")[4]), 700


def cell(folder: Path, preset: str, *more: str, again: str = "") -> Usage:
    """What a cell takes, from an empty database; a row of the table."""
    name = f"run {preset} {again}".strip()
    for place in (folder / name, folder / f"{name}-files"):
        shutil.rmtree(place, ignore_errors=True)
    (folder / name).mkdir()
    command = [sys.executable, "-m", "fatbench", "run", "suite", "growth.yaml", "--preset", preset,
               "--db", f"{name}/growth.db", "--data", str(folder), *(more or ("--jobs", "1"))]  # fmt: skip
    usage = used(command, folder)
    said = " | ".join(f"{value:,.0f}" for value in usage)
    print(f"| {' '.join([preset, *more, again])} | {said} |", flush=True)
    return usage


HEAD = "| cell | CPU seconds | MB of the largest process | MB in no file | MB of images |\n|---|---|---|---|---|"


def folders_of_images(folder: Path, small: bool) -> Iterator[Bound]:
    """A few images of a large folder; one copy for all workers; a set whose half is more than what workers hold."""
    print(f"\n{HEAD}")
    shutil.rmtree(folder / "cache", ignore_errors=True)
    many = 5000 if small else 50_000
    images(folder, 2000)
    images(folder, 50_000, many)
    few = [cell(folder, "images2000", again=again).seconds for again in ("first", "again")]
    large = [cell(folder, "images50000", again=again).seconds for again in ("first", "again")]
    yield f"CPU seconds of 2,000 images of {many:,}, of those of 2,000", large[0] / few[0], 1.2
    yield "the same, once they are decoded", large[1] / few[1], 1.2
    workers = 3 if small else 8
    shared = cell(folder, "images2000", "--jobs", str(workers), "--seeds", f"0-{workers - 1}")
    yield f"copies of the images that {workers} workers have", shared.images / DECODED_MB, 1.05
    if not small:
        size = many / 2080 * DECODED_MB  # a worker takes 0.8 GB whatever the set: half of it must be more than two do
        whole = cell(folder, "all", "--jobs", "2", "--seeds", "0-1")
        yield f"memory in no file, of the size of a set of {many:,} images", whole.anonymous / size, 0.5


def uploads(folder: Path, small: bool) -> Iterator[Bound]:
    """ViT-B/16, one image a client."""
    print(f"\n{HEAD}")
    cell(folder, "two")
    if not small:
        yield "MB of ViT-B with ten clients", cell(folder, "ten").megabytes, 6000


PARTS = {"numbers": end_of_stages, "images": folders_of_images, "uploads": uploads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/scale"))
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--small", action="store_true", help="a part of it, in a few minutes")
    parser.add_argument("--end", nargs=2, metavar=("NUMBERS", "FILE"), help="one end of a stage, in this process")
    asked = parser.parse_args()
    if asked.end:
        end_of_stage(int(asked.end[0]), asked.end[1])
        return
    folder = asked.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "growth.yaml").write_text(SUITE)
    wanted = [asked.only] if asked.only else list(PARTS)
    bounds = [bound for part in wanted for bound in PARTS[part](folder, asked.small)]
    print("\n| what | measured | at most | |\n|---|---|---|---|")
    for what, value, most in bounds:
        print(f"| {what} | {value:,.4g} | {most:,g} | {'holds' if value <= most else 'MISSED'} |")
    sys.exit(any(value > most for _, value, most in bounds))


if __name__ == "__main__":
    main()
