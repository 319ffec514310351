"""Fuzzing: suites, imports, data files and command lines that are a little wrong; none may end in a traceback.

    python tests/fuzzing.py --cases 10000        `make fuzz`; prints what failed, with the command that repeats it
    python tests/fuzzing.py --kind import --only 417

A case is a kind and a number, from which everything is drawn. The program is called in this process. It must end with a
documented exit code and, where that is not 0, a message of a few lines; a reader must raise a FatbenchError or read.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

SECONDS = 60  # of CPU time, or ten times as long by the clock; a case takes a tenth of a second
EXITS = {0, 1, 2, 3, 4, 5, 130}
SUITE = """
name: fuzzed
title: Two axes
seeds: [0, 1]
base:
  data: digits
  train: 60
  test: 30
  validation: 10
  partition: {name: shah, clients: 2, skew: 2}
  model: {name: small_cnn}
  algorithm:
    name: fedavg
    rounds: 2
    local:
      {epochs: 1, batch: 16, lr: 0.05, objective: {name: at, attack: {name: pgd, eps: 8/255, step: 4/255, steps: 1}}}
    aggregator: samples
  monitor: {name: pgd, eps: 8/255, step: 4/255, steps: 1}
axes:
  method:
    FAT: {}
    SFAT: {algorithm: {aggregator: {name: sfat, alpha: 1/6, top: 1}}}
  lr:
    low: {algorithm: {local: {lr: 0.01}}}
    high: {algorithm: {local: {lr: 0.1}}}
grid:
  exclude: [{when: {method: SFAT, lr: high}, reason: too much}]
  overrides: [{when: {lr: low}, set: {train: 50}}]
evaluate:
  n: 20
  checkpoints: [last, best-val]
  attacks:
    natural: natural
    pgd: {name: pgd, eps: [2/255, 8/255], step: 2/255, steps: 2}
presets:
  paper: {}
  smoke: {seeds: "0-1", axes: {method: [FAT]}, overrides: [{set: {algorithm: {rounds: 1}}}]}
tables:
  - {id: A, title: One, rows: [method], across: [lr], values: {natural: natural, PGD: pgd_8_255}}
figures:
  - {id: F, title: Curves, panels: [lr], lines: [method], series: {loss: "train:train_loss"}}
"""
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 1e308, -1e308, 1e-320, 0.5, "", " ", "a", "x" * 5000,
    "\u0000", "ä", "\ud800", "8/255", "1/0", "0/0", "9" * 400 + "/3", "nan", "-", "~1", "a@b", "train", "last",
    "2024-01-01", [], {}, [[]], [None], {"": ""}, {"name": None}, {"name": "pgd"}, {"name": []}, [1, [2, [3]]],
    {"round": 1}, [0, 1], "0-3", "*", "../../x", "a\nb", "%s", "{}", "[red]", "[/]",
)  # fmt: skip

Case = Callable[[random.Random, Path], None]


# --- calling the program -----------------------------------------------------------------------------------------


class Failed(AssertionError):
    """What should not have happened, in words."""


def program(*arguments: str) -> tuple[int, str]:
    """(exit code, what was printed) of a command line; Failed: a traceback, or an exit that is not documented."""
    from fatbench.cli import app

    out, err = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["fatbench", *arguments]
    code: object = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            app.main()
    except SystemExit as exit:
        code = exit.code
    except BaseException as error:
        raise Failed(f"fatbench {' '.join(map(repr, arguments))}\n{traceback.format_exc()}") from error
    finally:
        sys.argv = before
    said = err.getvalue()
    mute = code in (2, 4, 5) and not (said + out.getvalue()).strip()
    if code not in EXITS or "Traceback (most recent" in said or mute:
        raise Failed(f"fatbench {' '.join(map(repr, arguments))}\nexit {code!r}: {said[-2000:]}")
    return int(code) if isinstance(code, int) else 0, out.getvalue() + said


def reads(read: Callable[[], object]) -> None:
    """A reader must read, or say in one of our errors why not."""
    from fatbench.errors import FatbenchError

    with contextlib.suppress(FatbenchError):
        read()


# --- mistakes ----------------------------------------------------------------------------------------------------


def places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in nested lists and mappings."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in items for place in [(tree, key), *places(value)]]


def mistake(rng: random.Random, tree: Any) -> None:
    """Change one place of a tree."""
    known = places(tree)
    if not known:
        return
    holder, key = rng.choice(known)
    match rng.randrange(7):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(["x", "", "name", str(key).upper(), "seed", "rounds"])] = holder.pop(key)
        case 2:
            other, its = rng.choice(known)
            with contextlib.suppress(KeyError, IndexError):  # it may just have gone
                holder[key] = copy.deepcopy(other[its])
        case 3 if isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(rng.choice(ODD)))
        case 4 if isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
            holder[key] = rng.choice([-holder[key], holder[key] * 10**6, holder[key] + 1, holder[key] + 0.5])
        case _:
            holder[key] = copy.deepcopy(rng.choice(ODD))


def garbled(rng: random.Random, data: bytes) -> bytes:
    """The bytes with a few of them flipped, cut, doubled or replaced."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        at = rng.randrange(len(out) + 1)
        much = rng.choice([1, 2, 4, 64, len(out)])
        match rng.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                del out[at:]
            case 2:
                del out[at : at + much]
            case 3:
                out[at:at] = out[at : at + much]
            case 4:
                out[at : at + much] = rng.randbytes(min(much, 64))
            case _:
                out[at : at + much] = rng.choice([b"\x00", b"\xff"]) * min(much, 64)
    return bytes(out)


# --- kinds -------------------------------------------------------------------------------------------------------


def suite(rng: random.Random, folder: Path) -> None:
    """A suite file with mistakes in its structure or in its text, read by every command that reads suites."""
    file = folder / "fuzzed.yaml"
    if rng.random() < 0.6:
        tree = yaml.safe_load(SUITE)
        for _ in range(rng.choice([1, 1, 2, 5])):
            mistake(rng, tree)
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode("utf-8", "replace")
    else:
        text = garbled(rng, SUITE.encode())
        if rng.random() < 0.5:
            rows = text.split(b"\n")
            rng.shuffle(rows)
            text = b"\n".join(rows)
    file.write_bytes(text)
    code, _ = program("check", str(file))
    more = [["plan", "suite"], ["show"], ["status"], ["report"], ["run", "suite", "-n"], ["plot", "--format", "csv"]]
    for command in rng.sample(more, 1 if code else 2):
        program(*command, str(file), *([] if command[0] == "suite" else ["--db", str(folder / "no.db")]))


def results(folder: Path) -> list[str]:
    """The lines of an export of three cells: one done with evaluations and a replicate's worth of runs, one failed."""
    from fatbench.engine.rounds import Number
    from fatbench.store import jsonl
    from fatbench.store.stages import Store
    from fatbench.suite import files

    file = folder / "base.jsonl"
    if not file.exists():
        (folder / "fuzzed.yaml").write_text(SUITE)
        plan = files.load(str(folder / "fuzzed.yaml")).plan()
        said = {
            "preset": "paper", "device": "cpu", "precision": "fp32", "commit": "a" * 40, "dirty": False,
            "versions": {"torch": "2.15.0"}, "path": "loop", "threads": 1,
            "data": {"name": "digits", "variant": None, "fingerprint": "0" * 64},
        }  # fmt: skip
        best = {"round": 2, "value": 0.2}
        with Store.open(str(folder / "base.db"), create=True) as store:
            for i, cell in enumerate(plan.unique()[:3]):
                store.add_cell(cell.id, cell.spec)
                run = store.claim(cell.id, "train", suite="fuzzed", total=2, provenance=said)
                for round in (1, 2):
                    numbers = [Number(m, 0.1 * round, round, n=20) for m in ("train_loss", "monitor", "val_monitor")]
                    numbers += [Number("weight", 0.5, round, client=k) for k in range(2)]
                    spent = {"forward": 10.0, "backward": 5.0, "seconds": 0.5}
                    numbers += [Number(metric, value, round) for metric, value in spent.items()]
                    store.commit(run, numbers=numbers, round=round, record={"last": {"round": round}, "best-val": best})
                if i == 2:
                    store.fail(run, "Traceback\nValueError: no")
                    continue
                store.finish(run, round=2)
                for evaluation in cell.evaluations:
                    attack = {**evaluation.attack, "implementation": "fatbench 0.1.0"}
                    stage = evaluation.stage(2)
                    run = store.claim(cell.id, stage, suite="fuzzed", total=20, provenance=said, settings=attack)
                    store.commit(run, round=20, outcomes=(0, 20, b"\xff\x0f\xf0"))
                    store.finish(run, [Number(evaluation.label, 16 / 20, 2, n=20)])
            jsonl.export(store, file)
    return file.read_text().splitlines()


def import_(rng: random.Random, folder: Path) -> None:
    """Results with mistakes; after any file that is accepted every command works, after any other there is nothing."""
    from result_files import mismatches

    from fatbench.suite import cells

    home = folder.parent
    header, *rows = results(home)
    file, db = folder / "r.jsonl", folder / "r.db"
    if rng.random() < 0.85:
        trees = [json.loads(row) for row in rows]
        tree = rng.choice(trees)
        for _ in range(rng.choice([1, 1, 1, 3])):
            mistake(rng, rng.choice([tree, tree["spec"]] if isinstance(tree.get("spec"), dict) else [tree]))
        if rng.random() < 0.7:
            with contextlib.suppress(Exception):  # so that what the spec says is looked at, not its hash alone
                tree["cell"] = cells.identity(tree["spec"])
        if rng.random() < 0.7:
            with contextlib.suppress(Exception):  # likewise behind the digests
                for stage, digest in mismatches(tree):
                    stage["digest"] = digest
        if rng.random() < 0.1:
            trees.append(copy.deepcopy(rng.choice(trees)))
            header = json.dumps({**json.loads(header), "cells": len(trees)})
        data = "\n".join([header, *(json.dumps(tree) for tree in trees)]).encode() + b"\n"
    else:
        data = garbled(rng, "\n".join([header, *rows]).encode() + b"\n")
    file.write_bytes(data)
    skip = rng.random() < 0.3
    code, _ = program("import", str(file), "--db", str(db), *(["--skip-bad"] if skip else []))
    if code:
        if db.exists():
            raise Failed(f"a refused import left {db}")
        return
    shutil.copy(home / "fuzzed.yaml", folder / "fuzzed.yaml")
    name, ids = str(folder / "fuzzed.yaml"), [json.loads(row)["cell"] for row in rows]
    every = (
        ["status"], ["status", name], ["plan", "suite", name], ["report", name],
        ["show", rng.choice(ids)], ["show", rng.choice(ids), "--format", "json"], ["show", "--log", rng.choice(ids)],
        ["show", "--outcomes", rng.choice(ids)],
        ["report", name, "--format", rng.choice(["json", "latex", "csv", "html"])],
        ["run", "suite", name, "-n"], ["compare", ids[0], ids[1]],
        ["plot", name, "--format", "csv"], ["check"], ["status", "evaluate"],
    )  # fmt: skip
    for command in [*rng.sample(every, 5), ["export", "-o", str(folder / "again.jsonl")]]:
        ended, said = program(*command, "--db", str(db))
        works = command[0] in ("status", "plan", "report", "export", "check") and command[-1] != "evaluate"
        if works and ended in (2, 4, 5):
            raise Failed(f"after an accepted import fatbench {' '.join(command)} says {said}")
    if program("import", str(folder / "again.jsonl"), "--db", str(db))[0]:
        raise Failed("what was exported again is not accepted")


def data(rng: random.Random, folder: Path) -> None:
    """A file of a data set damaged, missing, or something else."""
    import data_layouts

    from fatbench.suite import calls

    write: dict[str, Callable[[Path], object]] = {
        "mnist": lambda root: data_layouts.write_mnist(root, packed=rng.random() < 0.5),
        "svhn": lambda root: data_layouts.write_svhn(root / "SVHN"),
        "cifar10": data_layouts.write_cifar10,
        "cifar100": lambda root: data_layouts.write_cifar100(root, 10),
        "cinic10": lambda root: data_layouts.write_cinic(root, 1),
        "image_folder": lambda root: data_layouts.write_image_folder(root / "images"),
        "celeba": lambda root: data_layouts.write_celeba(root, {1: 2, 2: 3}),
    }
    name = rng.choice([*write])
    root = folder / "data"
    root.mkdir()
    write[name](root)
    files = sorted(file for file in root.rglob("*") if file.is_file())
    for _ in range(rng.choice([1, 1, 2])):
        file = rng.choice(files)
        if file.is_dir():  # the first mistake made it one
            continue
        match rng.randrange(8):
            case 0:
                file.unlink(missing_ok=True)
            case 1:
                file.unlink(missing_ok=True)
                file.mkdir(exist_ok=True)
            case 2:
                file.unlink(missing_ok=True)
                file.symlink_to(file)
            case 3 if file.is_file():
                other = rng.choice(files)
                if other.is_file():
                    file.write_bytes(other.read_bytes())
            case _ if file.is_file():
                file.write_bytes(garbled(rng, file.read_bytes()))
    spec = {"name": name, **({"path": str(root / "images"), "size": 8} if name == "image_folder" else {})}
    checked = calls.check("Data", {**spec, "variant": rng.choice([None, "mine"])})
    reads(lambda: calls.build("Data", checked)(root))
    if name != "image_folder":
        program("fetch", "-n", name, "--data", str(root))
        if rng.random() < 0.1:
            program("list", "data", "--data", str(root))


def line(rng: random.Random, folder: Path) -> None:
    """A command line: words of the program, values that are a little wrong."""
    home = folder.parent
    base = home / "base.db"
    results(home)
    shutil.copy(home / "fuzzed.yaml", folder / "s.yaml")
    shutil.copy(base, folder / "b.db")
    (folder / "bad.py").write_text("AGGREGATORS = {'x': y}\n")
    values = [
        str(folder / "s.yaml"), str(folder / "b.db"), str(folder / "no.db"), str(folder / "bad.py"), str(folder),
        "sfat-cifar10", "nothing", "paper", "smoke", "seed=1", "method=FAT and lr=low", "lr>0.01", "a=", "(", "not",
        "0-3", "3-0", "1,1", "0-99999999999", "٣", "9" * 5000, "-1", "0", "1", "1e400", "nan", "", " ", "\x00", "ä",
        "\udce4", "x" * 5000, "json", "text", "html", "latex", "csv", "png", "last", "best-val", "first", "pool",
        "postgresql://u:geh@eim@h/x", "password=geheim", "sqlite://", "sqlite:///:memory:", "mysql://h/x", "://",
        "cpu", "cuda:99", "local", "slurm", "fp32", "8/255", "1/0", "pgd20", "{name: pgd}", "{name: [}",
        "timm/nothing", "natural", "--", "-h", "digits", results(home) and json.loads(results(home)[1])["cell"], "A",
        "F", "%s", "[red]", "/dev/null", "/proc/self/mem", "../x",
    ]  # fmt: skip
    words = rng.choice([path for path in commands() for _ in range(1 if path[0] in ("doctor", "new") else 3)])
    options = commands()[words]
    arguments = [rng.choice(values) for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))]
    for _ in range(rng.choice([0, 1, 2, 2, 4])):
        option = rng.choice([*options, *options, "--zz", "-q"])
        arguments += [option] if rng.random() < 0.2 else [option, rng.choice(values)]
    if rng.random() < 0.5:
        arguments = [str(folder / "s.yaml" if words[0] != "import" else home / "base.jsonl"), *arguments]
    if words[0] == "run":
        arguments = ["--dry-run", *(a for a in arguments if a != "--")]
    if words[0] == "verify":  # it would train
        arguments = [a for a in arguments if "/" not in a]
    if "--db" not in arguments and rng.random() < 0.8 and "--db" in options:
        arguments = ["--db", str(folder / "b.db"), *arguments]
    said = program(*words, *arguments)[1]
    if "geh" in said.replace("geheim' (did", "") and "eim@" in said:
        raise Failed(f"a password is shown: {said}")


_COMMANDS: dict[tuple[str, ...], list[str]] = {}


def commands() -> dict[tuple[str, ...], list[str]]:
    """Every command of the program -> its options."""
    import typer

    from fatbench.cli.app import app

    if not _COMMANDS:
        root: Any = typer.main.get_command(app)
        for name, command in root.commands.items():
            if name != "fetch":  # it fetches
                params = [*command.params, *root.params]
                _COMMANDS[(name,)] = [o for p in params for o in p.opts if o.startswith("-") and "completion" not in o]
    return _COMMANDS


KINDS: dict[str, Case] = {"suite": suite, "import": import_, "data": data, "line": line}


# --- running them ------------------------------------------------------------------------------------------------


def _late(*_: object) -> None:
    raise Failed(f"took more than {SECONDS} seconds")


def case(kind: str, number: int, home: Path) -> str | None:
    """Run one case in a folder of its own below `home`; what went wrong, or None."""
    folder = home / f"{kind}-{number}"
    folder.mkdir(parents=True)
    here = Path.cwd()
    before = [(late, signal.signal(late, _late)) for late in (signal.SIGPROF, signal.SIGALRM)]
    os.chdir(folder)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 10 * SECONDS)  # where it waits
    try:
        KINDS[kind](random.Random(f"{kind} {number}"), folder)
    except Exception:
        return traceback.format_exc(limit=-12)[-6000:]
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for late, handler in before:
            signal.signal(late, handler)
        os.chdir(here)
        shutil.rmtree(folder, ignore_errors=True)
    return None


def main() -> None:
    """`make fuzz`."""
    parser = argparse.ArgumentParser(description="Fuzz fatbench; exit 1 if a case ended in a traceback.")
    parser.add_argument("--cases", type=int, default=10_000, help="of all kinds together")
    parser.add_argument("--kind", choices=[*KINDS], help="of this kind alone")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each kind")
    parser.add_argument("--only", type=int, help="one case, by its number")
    asked = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))

    def refuse(*_: object) -> None:
        raise OSError("the fuzzer does not use the network")

    socket.socket.connect = refuse  # type: ignore[assignment,method-assign]
    kinds = [asked.kind] if asked.kind else [*KINDS]
    numbers = [asked.only] if asked.only is not None else range(asked.first, asked.first + asked.cases // len(kinds))
    failed, start = 0, time.process_time()
    with tempfile.TemporaryDirectory(prefix="fatbench-fuzz-") as place:
        os.environ |= {"HOME": place, "XDG_CACHE_HOME": f"{place}/cache", "NO_COLOR": "1"}
        for kind in kinds:
            for number in numbers:
                problem = case(kind, number, Path(place) / kind)
                if problem is not None:
                    failed += 1
                    print(f"--- python tests/fuzzing.py --kind {kind} --only {number}\n{problem}", flush=True)
            spent = f"{time.process_time() - start:.0f} s of CPU"
            print(f"{kind}: {len(numbers)} cases, {failed} failed so far, {spent}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
