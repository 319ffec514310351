"""`make gpu-piece`: the preset jpeg75-pair of sfat-local-epochs on a GPU, some minutes at a time.

    make gpu-piece ARGS='--data FOLDER'       goes on from results/pieces, and writes back what it has come to
    make gpu-piece ARGS='--device cpu --set train=64 --set algorithm.rounds=2 ...'      tries it without a GPU

FOLDER has the images. What is half done stays as a tar (`fatbench export --unfinished`) in files of at most 16 MiB,
and all numbers as JSON lines, so that a machine that is there for minutes only needs a copy of that folder. Exit code
0: all is done. 75: call it again. 1: a cell failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measure import fatbench
from fatbench.errors import NothingMatched

SUITE, PRESET = "sfat-local-epochs", "jpeg75-pair"
FOLDER = Path("results/pieces")
LARGEST = 16 * 2**20  # bytes of a file that is written back
LAST = 60.0  # seconds of a call that are left for the round that ends, and for writing back
AGAIN = 75


def main() -> None:
    """Restore, run what the time allows, write back."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.piece", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=540, help="of this call (default: 540)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    parser.add_argument("--data", type=Path, help="folder with the images; default: the user's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of fatbench run, to try it")
    parser.add_argument("-o", "--output", type=Path, default=FOLDER, help=f"folder of the pieces (default: {FOLDER})")
    chosen = parser.parse_args()
    end = time.monotonic() + chosen.seconds
    folder: Path = chosen.output
    folder.mkdir(parents=True, exist_ok=True)
    database = ("--db", str(folder / "piece.db"))
    if kept := [*restored(folder), *folder.glob("piece.jsonl.xz")]:
        subprocess.run(fatbench("import", *map(str, kept), *database), check=True)
    how = ["--precision", "tf32,fp32", "-c", "run.path=graphs", "-c", "run.per_gpu=2"] if chosen.device != "cpu" else []
    overrides = [word for pair in chosen.set for word in ("--set", pair)]
    data = ["--data", str(chosen.data)] if chosen.data else []
    command = fatbench("run", SUITE, "--preset", PRESET, *overrides, "--device", chosen.device, *how, *data, *database)
    with sharing(chosen.device):
        code = run_until(command, max(1.0, end - time.monotonic() - min(LAST, chosen.seconds / 4)))
    write_back(folder, database)
    sys.exit(0 if code == 0 else 1 if code == 1 else AGAIN)


def restored(folder: Path) -> list[Path]:
    """The tar of the pieces in a folder, as one file; empty without any."""
    pieces = sorted(folder.glob("part.tar.[0-9][0-9][0-9]"))
    if not pieces:
        return []
    with (folder / "part.tar").open("wb") as whole:
        for piece in pieces:
            with piece.open("rb") as source:
                shutil.copyfileobj(source, whole)
    return [folder / "part.tar"]


def run_until(command: Sequence[str], seconds: float) -> int:
    """Run a command, and ask it to stop after so many seconds; its exit code."""
    process = subprocess.Popen(command)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        return process.wait()


def write_back(folder: Path, database: Sequence[str]) -> None:
    """Replace the pieces of a folder by what is half done now, and by the rows of what is finished."""
    tar = folder / "part.tar"
    tar.unlink(missing_ok=True)
    code = subprocess.run(fatbench("export", "--unfinished", "-o", str(tar), *database)).returncode
    if code not in (0, NothingMatched.exit_code):  # the pieces that are there stay
        sys.exit(code)
    for piece in folder.glob("part.tar.[0-9][0-9][0-9]"):
        piece.unlink()
    if code == 0:
        content = tar.read_bytes()
        for number, begin in enumerate(range(0, len(content), LARGEST)):
            (folder / f"part.tar.{number:03d}").write_bytes(content[begin : begin + LARGEST])
        tar.unlink()
    subprocess.run(fatbench("export", "-o", str(folder / "piece.jsonl.xz"), *database), check=True)


@contextmanager
def sharing(device: str) -> Iterator[None]:
    """NVIDIA's MPS, where it is there and nobody has started it: two cells then compute at the same time."""
    control = shutil.which("nvidia-cuda-mps-control") if device != "cpu" else None
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    if control is None or (pipes / "control").exists():
        yield
        return
    subprocess.run([control, "-d"])
    try:
        yield
    finally:
        subprocess.run([control], input=b"quit\n")


if __name__ == "__main__":
    main()
