"""The command line as people and scripts meet it: texts, exit codes, JSON shapes, settings, start-up times."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from small import small

from fatbench import __version__
from fatbench.suite import calls, files, signatures
from fatbench.suite.folders import LINKS, paper_of

STEP = "{name: pgd, eps: 8/255, step: 4/255, steps: 1}"
TINY = small(
    name="tiny", seeds="[1]", test="30", validation="10", partition="{name: shah, clients: 2, skew: 2}", monitor=STEP,
    model="{name: nin, width: 4, init: he}", rounds=2,
    local=f"epochs: 1, batch: 16, lr: 0.05, objective: {{name: at, attack: {STEP}}}",
    axes="{method: {FAT: {}, SFAT: {algorithm: {aggregator: {name: sfat, alpha: 1/6, top: 1}}}}}",
    evaluate="{checkpoints: [last, best-val, best-test], attacks: {natural: natural, fgsm: {name: fgsm, eps: 8/255}}}",
    presets="{paper: {}, smoke: {overrides: [{set: {algorithm: {rounds: 1}}}]}}",
    tables="[{id: A, title: Tiny, rows: [method], values: {natural: natural, FGSM: fgsm}}]",
)  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder to work in, with one suite file."""
    for name in list(os.environ):
        if name.startswith("FATBENCH_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "tiny.yaml").write_text(TINY)
    yield tmp_path
    signatures.drop_plugins(list(signatures.plugins()))


def test_no_arguments_and_help_and_version(run, place):
    code, out, err = run()
    assert "Usage: fatbench" in out + err
    for flag in ("--help", "-h"):
        code, out, err = run(flag)
        assert code == 0
        assert "Run:" in out
    assert run("--version") == (0, f"fatbench {__version__}\n", "")
    assert run("plan", "tiny.yaml")[1].splitlines()[-2] == run("plan", "suite", "tiny.yaml")[1].splitlines()[-2]


def test_start_up_is_quick_and_without_torch():
    """The promise is 0.3 s for help on a quiet machine; processor time, with slack, is what a busy one can hold to.

    What reads results imports pandas, which takes a third of a second; torch takes three.
    """

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "fatbench", "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert any(seconds() < 0.6 for _ in range(3))  # the first may have to compile
    code = """
import contextlib, sys
from fatbench.cli import app as cli
sys.argv = ["fatbench", "status", "--db", "/nowhere/x.db"]
with contextlib.suppress(SystemExit):
    cli.main()
assert not {"torch", "sklearn", "matplotlib"} & set(sys.modules), sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


PLAN = ["plan", "suite", "tiny.yaml"]
RUN = ["run", "suite", "tiny.yaml"]
MISTAKES = [  # arguments, exit code, the message on stderr
    (["plan", "suite", "sfat-cifar"], 2, "no suite is named 'sfat-cifar' (did you mean 'sfat-cifar10'?)"),
    (["plan", "suite", "zzz"], 2, "no suite is named 'zzz' (the nearest of "),
    (["run", "tiny.yaml", "-n", "--device", "gpu"], 2, "--device"),
    (["delete"], 2, "fatbench delete NAME -k"),
    (["delete", "0123", "-k", "model=nin"], 2, "fatbench delete NAME -k"),
    (["delete", "sfat-cifr10", "-k", "method=FAT"], 2, "did you mean 'sfat-cifar10'"),
    (["export", "--smoke"], 2, "fatbench export NAME"),
    ([*PLAN, "-k", "method=FAT,SFAT"], 3, "(write method in [FAT, SFAT])"),
    ([*PLAN, "--attack", "cv", "--attack", "pgd20"], 2, "no attack is named 'cv'"),
    (["run", "sfat-cifer10"], 2, "no suite is named 'sfat-cifer10' (did you mean 'sfat-cifar10'?)"),
    (["report", "tiny.yaml", "--db", "no.db"], 4, "no.db does not exist: nothing has been run yet"),
    (["show", "0123", "--db", "no.db"], 4, "no.db does not exist: nothing has been run yet"),
    (["plan", "suite", "nothere.yaml"], 2, "nothere.yaml: no such suite file"),
    (["plan", "0123456789ab"], 3, "no suite has a cell '0123456789ab'"),
    ([*PLAN, "--attack", "{name:", "pgd}"], 2, "(did you mean --attack '{name: pgd}'?)"),
    (["plan", "tiny.yml"], 2, "tiny.yml: no such suite file (did you mean 'tiny.yaml'?)"),
    (["plan", "-smoke", "tiny.yaml"], 2, "no such option: -s (did you mean '--smoke'?)"),
    ([*PLAN, "--seeds", "0", "1"], 2, "(did you mean --seeds '0,1'?)"),
    ([*PLAN, "-k", "model=nin", "or", "model=vit"], 2, "(did you mean -k 'model=nin or model=vit'?)"),
    (["plan", "fat-baselines", "-k", "method in [FAT SFAT]"], 3, "(write method in [FAT, SFAT])"),
    ([*PLAN, "--preset", "quik"], 2, "suite 'tiny' has no preset 'quik' (known: paper, smoke)"),
    ([*PLAN, "-k", "modl=nin"], 2, "-k: no cell has 'modl' (did you mean 'model'?)"),
    ([*PLAN, "-k", "model"], 2, "-k: expected name=value at 'model' in 'model'"),
    ([*PLAN, "-k", "model in nin"], 2, "-k: expected a list such as [FAT, SFAT] after 'model in'"),
    ([*PLAN, "-k", "model=vit"], 3, "cells of 'tiny': model is never 'vit' (known: nin)"),
    ([*PLAN, "-k", "model=nin", "-k", "method=a, b"], 2, "-k: unexpected 'b' in 'method=a, b'"),
    ([*PLAN, "-k", "model=nin", "-k", "model=vit"], 3, "-k '(model=nin) and (model=vit)' matches none of the 2 cells"),
    ([*PLAN, "--seeds", "4-1"], 2, "--seeds: expected seeds such as 0-4 or 6,7, got '4-1'"),
    ([*PLAN, "--format", "xml"], 2, "--format: no format is named 'xml' (known: json, text)"),
    ([*RUN, "--device", "tpu"], 2, "--device: expected auto, cpu, cuda or cuda:0,1, got 'tpu'"),
    ([*RUN, "--device", "cuda:7"], 5, "--device cuda:7: there is no GPU 7 here"),
    ([*RUN, "--precision", "fp8"], 2, "--precision: expected auto, fp32, tf32 or bf16, got 'fp8'"),
    ([*RUN, "--precision", "tf32", "--device", "cpu"], 5, "--precision tf32 needs an NVIDIA GPU, and this would run"),
    ([*RUN, "--executor", "k8s"], 2, "--executor: no executor is named 'k8s'"),
    (["run", "suite", "sfat-cifar10", "--device", "cpu"], 5, "cifar10"),
    (["run", "ab"], 2, "'ab': give at least the first 4 letters"),
    (["run", "ffffffffffff"], 3, "no suite has a cell 'ffffffffffff'"),
    (["show", "abcd"], 3, "no cell 'abcd': results/fatbench.db does not exist; run a suite first"),
    (["show", "--log", "abcd"], 3, "no cell 'abcd': results/fatbench.db does not exist; run a suite first"),
    (["compare", "abcd", "ef01"], 3, "results/fatbench.db does not exist"),
    (["compare"], 2, "missing argument 'SUITE|A'"),
    (["verify", "tiny.yaml", "--sample", "-n"], 2, "--sample: expected a whole number, got the option '-n'"),
    (["report", "tiny.yaml", "--format", "latx"], 2, "--format: no format is named 'latx' (did you mean 'latex'?)"),
    (["report", "tiny.yaml", "--select", "best"], 2, "--select: no checkpoint is named 'best'"),
    (["report"], 3, "does not exist: nothing has been run here"),
    (["export"], 3, "does not exist: nothing has been run here"),
    # without a database, a misspelt name is said and not that there are no results
    (["site", "sfat-cifar", "-o", "s"], 2, "did you mean 'sfat-cifar10'"),
    (["export", "sfat-cifar"], 2, "did you mean 'sfat-cifar10'"),
    (["export", "tiny.yaml", "--preset", "smok"], 2, "did you mean 'smoke'"),
    (["compare", "FAT", "SFAT", "--suite", "sfat-cifar"], 2, "did you mean 'sfat-cifar10'"),
    (["compare", "FAT", "SFTA", "--suite", "sfat-mu"], 2, "did you mean 'SFAT'"),
    (["show", "sfat-cifer10"], 3, "(fatbench status sfat-cifar10 lists the cells; --db names another database)"),
    (["plan", "--budget", "8h", "--preset", "smok"], 2, "did you mean 'smoke'"),
    (["evaluate", "no.safetensors"], 5, "no.safetensors: no such checkpoint"),
    (["fetch", "-n", "cifar11"], 2, "cifar11"),
    (["status", "--db", "tiny.yaml"], 4, "tiny.yaml is not a fatbench database"),
    ([*PLAN, "--plugin", "none.py"], 2, "plugin "),
]


@pytest.mark.parametrize(("arguments", "code", "message"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_a_mistake_is_one_message_and_the_documented_code(run, place, monkeypatch, arguments, code, message):
    if re.fullmatch("[0-9a-f]+", arguments[-1]):  # which plans every preset of every suite
        few = {name: file for name, file in files.available().items() if name.startswith("adfl")}
        monkeypatch.setattr(files, "available", lambda: few)
    given, out, err = run(*arguments)
    assert message in err and "Traceback" not in err and len(err.strip().splitlines()) <= 2
    assert (given, out) == (code, "")
    assert sorted(p.name for p in place.iterdir()) in (["tiny.yaml"], ["cache", "tiny.yaml"])  # nothing was written


def test_json_shapes(run, place):
    _, out, _ = run("list", "suites", "--format", "json")
    listed = json.loads(out)
    assert listed["schema_version"] == 1
    one = next(s for s in listed["suites"] if s["name"] == "sfat-cifar10")
    assert set(one["presets"]) >= {"paper", "quick", "smoke"}
    _, out, _ = run("plan", "suite", "tiny.yaml", "--format", "json")
    plan = json.loads(out)
    assert (plan["suite"], plan["preset"], len(plan["cells"])) == ("tiny", "paper", 2)
    cell = plan["cells"][0]
    assert {"id", "spec", "work"} <= set(cell)
    assert cell["work"]["image_passes"] > 0
    _, out, _ = run("status", "tiny.yaml", "--format", "json")
    assert json.loads(out)["cells"] == {"done": 0, "failed": 0, "running": 0, "todo": 2}


def test_plan_counts_by_hand(run, place):
    """50 training images, 2 clients of 25, 2 rounds, 1 epoch, batch 16: 2 * 2 * 2 steps. AT with one step: 2 forward,
    2 backward an image. Monitor every round on 30 + 10 images: natural 1 forward, attack 1 + 1 forward, 1 backward.
    Evaluation at up to 3 checkpoints on 30 images: natural 1 forward, FGSM 1 + 1 forward, 1 backward.
    """
    _, out, _ = run("plan", "suite", "tiny.yaml", "--format", "json")
    work = json.loads(out)["cells"][0]["work"]
    assert work["gradient_steps"] == 8
    assert work["forward"] == 2 * 50 * 2 + 2 * 40 * 3 + 3 * 30 * 3
    assert work["backward"] == 2 * 50 * 2 + 2 * 40 * 1 + 3 * 30 * 1
    assert work["image_passes"] == work["forward"] + work["backward"]


def test_a_plan_says_that_the_number_of_clients_is_unknown(run, place):
    """It printed 0 gradient steps and 0 B uploaded for a partition with a client for each writer."""
    text = Path("tiny.yaml").read_text()
    partition = next(line for line in text.splitlines() if line.strip().startswith("partition:"))
    Path("tiny.yaml").write_text(text.replace(partition, "  partition: by_writer"))
    _, out, _ = run("plan", "suite", "tiny.yaml")
    assert "work of 2 of 2 cells: unknown" in out and "gradient steps" not in out and "uploaded" not in out


def test_a_user_s_way_from_plan_to_table(run, place, forks):
    """Run, look, report, export, import elsewhere, evaluate a checkpoint, run again: nothing left to do."""
    code, out, err = run("run", "suite", "tiny.yaml", "--jobs", "2", "--device", "cpu")
    assert (code, out) == (0, ""), err
    assert "2 of 2 cells done" in err

    _, out, _ = run("status", "tiny.yaml", "--format", "json")
    status = json.loads(out)
    assert status["cells"] == {"done": 2, "failed": 0, "running": 0, "todo": 0}
    id = status["list"][0]["id"]
    assert run("status", "tiny.yaml")[1].count("done") >= 2
    assert "tiny" in run("status")[1]

    _, out, _ = run("show", id[:6], "--format", "json")
    numbers = json.loads(out)["numbers"]
    assert {"natural", "fgsm", "train_loss", "weight", "drift_post"} <= {row["metric"] for row in numbers}
    kept = {stage["stage"].split("-")[0]: stage["settings"] for stage in json.loads(out)["stages"]}
    ours = {"implementation": f"fatbench {__version__}"}
    attacks = {"natural": {"name": "natural", **ours}, "fgsm": {"name": "fgsm", "eps": "8/255", **ours}}
    assert kept == {"train": None, **attacks}
    assert f"fgsm(eps=8/255); code: fatbench {__version__}" in run("show", id)[1]
    assert "    natural\n    fgsm = fgsm(eps=8/255)\n" in run("show", "tiny.yaml")[1]
    assert "attacks*: FGSM = fgsm(eps=8/255)\n" in run("report", "tiny.yaml", "--format", "markdown")[1]
    assert "round 2" in run("show", "--log", id)[1]
    code, _, err = run("show", "SFAT")
    assert code == 3 and "fatbench report tiny -k method=SFAT" in err and "results/fatbench.db" in err
    assert [cell["id"] in err for cell in status["list"]] == [False, True]
    assert run("show", "zzzz")[::2] == (
        3, "fatbench: no cell 'zzzz' in results/fatbench.db (fatbench status NAME lists the cells; --db names another"
           " database)\n"
    )  # fmt: skip

    for format in ("markdown", "latex", "csv", "json", "html", "terminal"):
        code, out, err = run("report", "tiny.yaml", "--format", format)
        assert (code, err) == (0, ""), format
        assert "SFAT" in out
    _, out, _ = run("report", "tiny.yaml", "--format", "json", "--select", "best-test")
    rows = json.loads(out)["tables"][0]["rows"]
    assert [row["key"]["method"] for row in rows] == ["FAT", "SFAT"]
    measured = rows[0]["measured"]["fgsm"]
    assert 0 <= measured["mean"] <= 1
    assert measured["n"] == 30
    for format, file in (("latex", "t.tex"), ("html", "t.html")):
        assert run("report", "tiny.yaml", "--format", format, "-o", file) == (0, "", f"fatbench: wrote {file}\n")
    assert r"\begin{table" in (place / "t.tex").read_text()
    assert run("report", "tiny.yaml", "-o", "no/such/t.tex")[0] == 2

    # of a suite without numbers it says which suites have some; of one with numbers, which table has none
    other = TINY.replace("name: tiny", "name: other", 1).replace("seeds: [1]", "seeds: [9]\nbaseline: FAT")
    (place / "other.yaml").write_text(other)
    for options in ((), ("--format", "latex"), ("--format", "html"), ("--differences", "--metric", "fgsm")):
        code, out, err = run("report", "other.yaml", *options)
        assert (code, "--</td>" in out, "| --" in out, err.count("\n")) == (0, False, False, 1)
        assert "results/fatbench.db has no numbers of 'other', preset 'paper'; it has tiny (paper)" in err
    code, _, err = run("compare", "SFAT", "FAT", "--suite", "other.yaml")
    assert code == 3 and "'SFAT' and 'FAT' have no numbers yet in results/fatbench.db" in err
    (table,) = json.loads(run("report", "other.yaml", "--format", "json")[1])["tables"]
    assert [row["measured"]["fgsm"]["mean"] for row in table["rows"]] == [None, None]  # programs count on every table
    empty_table = "{id: B, title: Empty, rows: [method], values: {logged: 'train:never_logged'}}"
    (place / "other.yaml").write_text(TINY.replace("tables: [", f"tables: [{empty_table}, "))
    code, out, err = run("report", "other.yaml")
    assert (code, "### A" in out, "### B" in out, err.count("\n")) == (0, True, False, 1) and "--table B" in err
    assert "### B" in run("report", "other.yaml", "--table", "B")[1]
    (place / "other.yaml").unlink()

    assert run("export", "-o", "r.jsonl")[::2] == (0, "fatbench: wrote r.jsonl\n")
    assert run("import", "r.jsonl", "--db", "other.db")[0] == 0
    first = run("report", "tiny.yaml", "--format", "json")[1]
    assert run("report", "tiny.yaml", "--format", "json", "--db", "other.db")[1] == first
    assert run("import", "r.jsonl", "--db", "other.db")[0] == 0
    assert run("report", "tiny.yaml", "--format", "json", "--db", "other.db")[1] == first

    model = sorted(Path("results/fatbench-files", id).glob("model-*.safetensors"))[-1]
    attacks = ("--attack", "natural", "--attack", "{name: fgsm, eps: 8/255}")
    again = json.loads(run("evaluate", str(model), *attacks, "--format", "json")[1])["results"]
    last = [row for row in numbers if row["stage"] != "train" and row["round"] == 2]
    stored = next(row["value"] for row in last if row["metric"] == "natural")
    assert {r["label"]: r["accuracy"] for r in again}["natural"] == stored
    code, _, err = run("evaluate", str(model), "--attack", "fgsmm")
    assert (code, "did you mean 'fgsm'" in err) == (2, True)

    code, _, err = run("run", "suite", "tiny.yaml", "--device", "cpu")
    assert code == 0
    assert "train" not in err
    assert run("run", "suite", "tiny.yaml", "-n")[1].startswith("suite tiny, preset paper: 2 cells, 0 to run")
    assert run("status", "tiny")[1] == run("status", "tiny.yaml")[1]  # as `status` lists it
    assert run("report", "tiny", "--format", "md") == run("report", "tiny.yaml", "--format", "markdown")
    assert run("report", "tiny", "-o", "table.tex")[0] == 0 and r"\begin{tabular}" in Path("table.tex").read_text()
    Path("table.tex").unlink()
    code, _, err = run("compare", "FAT", "SFAT")
    assert (code, "--suite: 'FAT' and 'SFAT' are rows: name their suite" in err) == (2, True)
    code, out, _ = run("export", "tiny", "-k", "method=FAT")
    assert (code, sum('"cell"' in line for line in out.splitlines())) == (0, 1)
    code, _, err = run("delete", "tiny")
    assert (code, "all 2 cells" in err) == (2, True)
    code, out, _ = run("delete", "tiny", "-k", "method=FAT", "-n")
    assert (code, out.splitlines()[-1]) == (0, "1 cell would be deleted") and "FAT, seed 1" in out
    assert run("check")[0] == 0
    assert "torch" in run("doctor")[1]


def test_data_commands(run, place):
    _, out, _ = run("list", "data", "--format", "json")
    states = {row["name"]: row["state"] for row in json.loads(out)["datasets"]}
    assert states["digits"] == "complete"
    assert states["cifar10"] == "missing"
    assert run("fetch", "-n", "digits")[0] == 0
    code, out, _ = run("fetch", "-n", "cifar10", "digits")
    assert code == 5
    assert "cifar10: missing" in out


MOODY = """import os
from fatbench.methods.aggregators import uniform

def moody(updates, context):
    if os.path.exists("PLACE/broken"):
        raise RuntimeError("not today")
    return uniform(updates, context)

AGGREGATORS = {"moody": moody}
"""


def test_a_broken_method_fails_alone(run, place, forks):
    """A plugin whose aggregator raises: exit 1, the traceback in the logs, the other cell done; --rerun failed."""
    (place / "mine.py").write_text(MOODY.replace("PLACE", str(place)))
    (place / "tiny.yaml").write_text(TINY.replace("{name: sfat, alpha: 1/6, top: 1}", "moody"))
    (place / "broken").touch()
    command = ("run", "suite", "tiny.yaml", "--plugin", "mine.py", "--device", "cpu")
    code, _, err = run(*command, "--jobs", "1")
    assert code == 1, err
    assert "1 of 2 cells done, 1 failed" in err and "Traceback" not in err
    cell = next(line.split()[2].rstrip(":") for line in err.splitlines() if "  failed:" in line)
    assert "RuntimeError: not today" in run("show", "--log", cell)[1]
    code, _, err = run(*command)
    assert code == 1 and "train" not in err
    assert run(*command, "-n")[1].endswith("2 cells, 0 to run\n1 failed earlier: --rerun failed\n")
    (place / "broken").unlink()
    code, _, err = run(*command, "--rerun", "failed", "--jobs", "1")
    assert code == 0, err


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_interrupted_and_killed_the_same_command_goes_on(run, place):
    """SIGINT ends with 130 after a checkpoint; kill -9 loses nothing that was committed."""
    import signal

    (place / "tiny.yaml").write_text(TINY.replace("rounds: 2", "rounds: 15").replace("train: 60", "train: 120"))
    env = {**os.environ, "FATBENCH_RUN_CHECKPOINT_SECONDS": "0"}
    command = [sys.executable, "-m", "fatbench", "run", "suite", "tiny.yaml", "--device", "cpu", "--jobs", "1", "-v"]
    for number, expected in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
            for line in process.stderr:
                if " train " in line and "/" in line.split()[3]:  # a round is done
                    break
            process.send_signal(number)
            process.stderr.read()
            assert process.wait(300) == expected
    code, _, err = run(*command[3:])
    assert code == 0, err
    status = json.loads(run("status", "tiny.yaml", "--format", "json")[1])
    assert status["cells"]["done"] == 2
    assert "is intact" in run("check")[1]


# --- a first look -------------------------------------------------------------------------------------------------


def test_the_list_of_suites_begins_with_one_of_each_paper(run):
    lines = run("list", "suites")[1].splitlines()
    assert lines[1].startswith("One suite of each paper") and lines[7] == ""
    assert {paper_of(line.split()[0]) for line in lines[2:7]} == {*LINKS}
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    assert len(names) == len({*names})


def test_what_data_a_suite_needs(place, run):
    _, out, _ = run("list", "data", "sfat-cifar10")
    rows = {line.split()[0]: line for line in out.splitlines()[2:]}
    assert set(rows) == {"cifar10", "digits", "looked"}
    assert "missing" in rows["cifar10"] and "paper, quick" in rows["cifar10"]
    assert "fatbench fetch cifar10 (170 MB)" in rows["cifar10"]
    assert "vit-half-jpeg75.safetensors" in run("list", "data", "april-trained-jpeg75")[1]
    assert run("list", "aggregators", "sfat-cifar10") == (0, "samples\nsfat\nsfat_released\n", "")
    assert {"krum", "sfat"} < {*run("list", "aggregators")[1].split()}
    assert "@" in run("list", "papers", "sfat-mu", "--format", "bibtex")[1]


@pytest.mark.parametrize("where", ["evaluate", "objective"])
def test_a_package_that_is_missing_is_said_before_a_run_begins(place, run, monkeypatch, where):
    """A plan needs it as little as its digits."""
    attack = "{name: torchattacks, attack: FGSM, eps: 8/255}"
    old = "{name: fgsm, eps: 8/255}" if where == "evaluate" else "{name: pgd, eps: 8/255, step: 4/255, steps: 1}}"
    (place / "tiny.yaml").write_text(TINY.replace(old, attack + "}" * old.count("}}"), 1))
    monkeypatch.setattr(calls, "installed", lambda package: package != "torchattacks")
    assert run("plan", "suite", "tiny.yaml")[0] == 0
    code, out, err = run("run", "suite", "tiny.yaml", "--db", "new.db")
    said = "'torchattacks' needs the package torchattacks: pip install --no-deps torchattacks"
    assert (code, out) == (5, "") and re.fullmatch(rf"fatbench: cell \w{{12}}: {re.escape(said)}\n", err), err
    assert sorted(os.listdir()) == ["tiny.yaml"]


def test_a_status_of_a_database_that_is_not_there_says_so(place, run):
    """Where it was named, so that a slip is no empty answer; without a name nothing has been run yet."""
    for name in ([], ["tiny.yaml"]):
        said = "fatbench: no.db does not exist: nothing has been run yet\n"
        assert run("status", *name, "--db", "no.db") == (4, "", said)
    assert "0 done, 0 failed, 0 running, 2 todo" in run("status", "tiny.yaml")[1]


def test_an_attack_that_is_written_out_is_run_and_shown(run, place):
    (place / "tiny.yaml").write_text(TINY)
    own = ("--attack", "{name: pgd, steps: 3, step: 2/255}", "--attack", "near={name: fgsm, eps: 2/255}")
    one = ("tiny.yaml", "--smoke", "-k", "method=FAT")
    assert run("run", *one, *own, "--device", "cpu", "--jobs", "1")[0] == 0
    assert "PGD-3 |   near |" in run("report", "tiny.yaml", "--smoke", "--format", "markdown")[1]
    assert run("export", *one, "-o", "own.jsonl")[0] == run("import", "own.jsonl", "--db", "other.db")[0] == 0
    assert "near" in run("report", "tiny.yaml", "--smoke", "--db", "other.db", "--format", "markdown")[1]


def test_a_setting_of_the_command_line_makes_cells_of_their_own(place, run, forks):
    """--set: other cells, another name, a label, and nothing of it in the suite's own table."""
    planned = lambda *more: json.loads(run("plan", "suite", "tiny.yaml", *more, "--format", "json")[1])  # noqa: E731
    own, quick = planned(), planned("--set", "algorithm.local.lr=0.02", "--set", "train=50")
    assert quick["suite"] == "tiny+algorithm.local.lr=0.02+train=50"
    assert not {cell["id"] for cell in own["cells"]} & {cell["id"] for cell in quick["cells"]}
    assert {(c["spec"]["algorithm"]["local"]["lr"], c["spec"]["train"]) for c in quick["cells"]} == {(0.02, 50)}
    assert run("run", "suite", "tiny.yaml", "--set", "train=50", "--jobs", "1", "--device", "cpu")[0] == 0
    report = json.loads(run("report", "--format", "json")[1])["tables"]
    title = "Tiny [WITH train=50 - not comparable with published numbers]"
    assert [(table["id"], table["title"]) for table in report] == [("A", title)]
    mine = json.loads(run("report", "tiny.yaml", "--format", "json")[1])["tables"][0]["rows"]
    assert all(cell["n"] is None or not cell["n"] for row in mine for cell in row["measured"].values())
    for given, said in (
        ("lr", "expected a setting such as algorithm.local.lr=0.02, got 'lr'"),
        ("algorithm.local.lrr=1", "--set: lrr: 'local' has no setting 'lrr' (did you mean 'lr'?)"),
        ("lr=0.02", "--set lr=0.02: a cell has no setting 'lr' (did you mean 'algorithm.local.lr=0.02'?)"),
        ("train=many", "--set: train: "),
    ):
        code, _, err = run("plan", "suite", "tiny.yaml", "--set", given)
        assert code == 2 and said in err and err.count("\n") == 1
