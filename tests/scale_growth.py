"""What grows with the work: ends of stages by their numbers, folders of images by their files, and uploads.

    python tests/scale_growth.py --folder build/scale        a part of `make scale`; --only numbers, images or uploads

Every measurement is a program of its own: CPU seconds (user and system, children too) and the most memory of the
largest of its processes. Images are JPEGs of 224 x 224, links to 220 files, so that the disk is no part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

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
  two: {axes: {what: [two]}}
  ten: {axes: {what: [ten]}}
"""


def used(command: list[str], folder: Path) -> tuple[float, float]:
    """CPU seconds and megabytes of a program that ends well, its children counted."""
    (folder / "used").unlink(missing_ok=True)
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    ask = "import json, os, resource, subprocess, sys; done = subprocess.run(json.loads(sys.argv[1])).returncode;"
    ask += " spent = resource.getrusage(resource.RUSAGE_CHILDREN);"
    ask += " open('used', 'w').write(f'{spent.ru_utime + spent.ru_stime} {spent.ru_maxrss / 1024}'); sys.exit(done)"
    subprocess.run([sys.executable, "-c", ask, json.dumps(command)], cwd=folder, env=env, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    seconds, megabytes = map(float, (folder / "used").read_text().split())
    return seconds, megabytes


def images(folder: Path, n: int) -> None:
    """images<n>/{train,test}/c<k>/*.jpg of ten classes: links, made where they are missing."""
    place, base = folder / f"images{n}", folder / "base"
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
        if not store.any_cell():
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/scale"))
    parser.add_argument("--only", choices=("numbers", "images", "uploads"))
    parser.add_argument("--end", nargs=2, metavar=("NUMBERS", "FILE"), help="one end of a stage, in this process")
    asked = parser.parse_args()
    if asked.end:
        end_of_stage(int(asked.end[0]), asked.end[1])
        return
    folder = asked.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "growth.yaml").write_text(SUITE)
    if asked.only in (None, "numbers"):
        print(
            "| numbers of a stage | CPU seconds of its end | of these the database is locked | MB |\n|---|---|---|---|"
        )
        for n in (500_000, 1_000_000, 2_000_000, 4_000_000):
            file = folder / f"numbers{n}.db"
            for part in folder.glob(f"{file.name}*"):
                part.unlink()
            for _ in range(2):
                subprocess.run([sys.executable, __file__, "--end", str(n), str(file)], check=True)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    cells = {"images": ("images2000", "images50000"), "uploads": ("two", "ten")}
    for what in [asked.only] if asked.only else cells:
        if what in cells:
            print(f"\n| {what} | CPU seconds | MB |\n|---|---|---|")
        for preset in cells.get(what, ()):
            images(folder, 50_000 if preset == "images50000" else 2000)
            for again in ("first", "again") if what == "images" else ("",):
                place = folder / f"{preset}{again}"
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
                command = [sys.executable, "-m", "fatbench", "run", "suite", "growth.yaml", "--preset", preset,
                           "--jobs", "1", "--db", f"{place.name}/growth.db", "--data", str(folder)]  # fmt: skip
                seconds, megabytes = used(command, folder)
                print(f"| {preset} {again} | {seconds:.1f} | {megabytes:.0f} |", flush=True)


if __name__ == "__main__":
    main()
