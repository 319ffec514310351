"""`python -m benchmarks.gpu`: half an hour on a GPU, in slices, worst risks first.

    make gpu                     goes on where it stopped, for at most nine minutes; again until it says "all done"
    make gpu ARGS=--rehearse     every step with the least of everything, on the CPU, in a folder of its own

Each item is a process of its own. One that fails or takes too long is noted and does not stop the others; one that the
end of a slice stopped is tried again in the next. Items that time nothing run side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import risks
from benchmarks.measure import Bench, cores, provenance

LEAST = 30  # seconds left of a slice in which nothing is begun any more
MOST = 12  # items side by side: their processes take turns on the GPU, unless NVIDIA's MPS runs


def main() -> None:
    """Run what is not done, until the slice or the budget is over; 0: all is done, 75: a call can go on, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="the least of every step, on the CPU")
    parser.add_argument("--slice", type=float, default=540, help="seconds of this call (default: 540)")
    parser.add_argument("--budget", type=float, default=1800, help="seconds of all calls together (default: 1800)")
    parser.add_argument("--suites", type=int, help="only so many suites' smoke")
    parser.add_argument("--only", help="only items whose name holds this")
    parser.add_argument("--again", action="store_true", help="try what failed once more")
    parser.add_argument("-o", "--output", type=Path, help="folder; default: results/bench, rehearsal: .rehearsal")
    parser.add_argument("--item", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    folder: Path = chosen.output or Path(".rehearsal" if chosen.rehearse else "results/bench")
    folder.mkdir(parents=True, exist_ok=True)
    if not chosen.rehearse and not torch.cuda.is_available():
        sys.exit("make gpu: there is no GPU here; make gpu ARGS=--rehearse tries every step on the CPU")
    bench = Bench(torch.device("cpu" if chosen.rehearse else "cuda"), chosen.rehearse, folder.absolute())
    names = [name for name in risks.items(bench, chosen.suites) if (chosen.only or "") in name]
    if chosen.item:
        print(json.dumps(risks.items(bench)[chosen.item](bench)))
        return
    file = folder / f"gpu-{bench.device.type}.json"
    kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    end, least = time.monotonic() + chosen.slice, min(LEAST, chosen.slice / 2)
    width = max(1, min(MOST, cores() - 2))

    def unspent() -> float:
        budget: float = chosen.budget
        return budget - sum(one["seconds"] for one in kept.values())

    def attempt(name: str) -> dict[str, Any] | None:
        """Run an item; None: too little time is left of the slice or the budget."""
        left = min(end - time.monotonic(), unspent())
        return None if left < least else _run([*sys.argv[1:], "--item", name], left)

    def keep(name: str, made: dict[str, Any], at_once: int) -> None:
        seconds = made["seconds"] / at_once  # its share of the device's time
        before = kept[name]["seconds"] if kept.get(name, {}).get("outcome") == "stopped" else 0.0
        kept[name] = {**made, "seconds": seconds + before, "where": provenance(bench.device)}
        file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        (folder / f"gpu-{bench.device.type}.md").write_text(_table(kept, bench.quick), encoding="utf-8")
        print(f"{made['outcome']:8} {made['seconds']:6.1f} s  {name}: {made['said']}", flush=True)

    ended = ("done",) if chosen.again else ("done", "failed")
    names_left = [name for name in names if kept.get(name, {}).get("outcome") not in ended]
    side_by_side = [name for name in names_left if name.startswith(risks.SMOKE)]
    with ThreadPoolExecutor(width) as pool:
        running = {pool.submit(attempt, name): name for name in side_by_side}
        for future in as_completed(running):
            if made := future.result():
                keep(running[future], made, min(width, len(side_by_side)))
    for name in names_left:
        if name not in side_by_side:
            if (made := attempt(name)) is None:
                break
            keep(name, made, 1)
    open_ = [name for name in names if kept.get(name, {}).get("outcome") not in ("done", "failed")]
    failed = [name for name in names if kept.get(name, {}).get("outcome") == "failed"]
    if open_ and unspent() < least:
        sys.exit(f"{len(open_)} to do, and the {chosen.budget:g} s of all calls are used up: a larger --budget goes on")
    print(f"{len(open_)} to do: the same command goes on" if open_ else f"all done, {len(failed)} failed")
    sys.exit(75 if open_ else 1 if failed else 0)


def _run(arguments: list[str], seconds: float) -> dict[str, Any]:
    """An item in a process of its own, interrupted after so many seconds: {"outcome", "said", "seconds", ...}."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, error = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for how in (signal.SIGINT, signal.SIGKILL):  # what it runs commits where it is, and goes on from there
            os.killpg(process.pid, how)
            try:
                process.communicate(timeout=20)
                break
            except subprocess.TimeoutExpired:
                continue
        return {"outcome": "stopped", "said": "by the end of the slice", "seconds": time.monotonic() - begin}
    took = time.monotonic() - begin
    if process.returncode:
        lines = error.strip().splitlines() or ["it gives no reason"]
        return {"outcome": "failed", "said": lines[-1][:300], "error": error[-4000:], "seconds": took}
    return {"outcome": "done", **json.loads(out.strip().splitlines()[-1]), "seconds": took}


def _table(kept: dict[str, Any], rehearsal: bool) -> str:
    """What was tried, in Markdown."""
    text = ["| item | outcome | seconds | what it says |", "|---|---|---|---|"]
    for name, one in kept.items():
        said = str(one["said"]).replace("|", "/")
        text.append(f"| {name} | {one['outcome']} | {one['seconds']:.0f} | {said} |")
    places = {(one["where"]["device"], one["where"]["commit"][:12]) for one in kept.values()}
    text += [
        "",
        *(f"Measured on {device}, commit {commit}, {datetime.now(UTC):%Y-%m-%d}." for device, commit in sorted(places)),
    ]
    if rehearsal:
        text += ["", "**A rehearsal: it shows that every step works, and no number means anything.**"]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    main()
