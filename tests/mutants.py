"""Mutation testing: small mistakes are made in the program, one at a time; the tests must see each.

    python tests/mutants.py --sample 50 --seed 0     `make mutants`; writes the survivors to build/mutants/
    python tests/mutants.py --room attacks --again   those that survived last time, and no others

The mistakes are mutmut's, and two more: a statement that is one call is left out, and a method without arguments is
not called (`model.eval()` becomes `model`). mutmut's own runner puts dispatchers where the functions were; that cannot
be done here, because fatbench reads the settings of a method from its source.

For each room (a few files and the tests that guard them) the tests are collected once, in a copy of the repository. A
first walk notes which lines each test runs and what it costs. Then each mutant gets a process, forked from there: the
code of the live functions is exchanged, so that a mutant costs little more than the tests that run the changed line.
They run cheapest first until one fails. A mutant is killed if a test fails, if it does not import, or if it takes
several times as long as it should.

Left out, because no behaviour is in them: annotations, decorators, imports, messages of errors and of the log, the
`strict=` of zip, and `device=`, for which another device than the CPU is needed. What survives and cannot matter is
explained in tests/mutants.yaml.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import inspect
import itertools
import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libcst as cst
import libcst.matchers as m
import yaml
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider
from mutmut.mutation import mutators

ROOT = Path(__file__).resolve().parent.parent
CHILDREN = 0.3  # CPU seconds in processes of its own, from which on a test may run any line there
MARKS = "not slow and not nightly"  # of the tests that guard
COSTS = 60.0  # CPU seconds of tests for one mutant, the dearest left out

# What is mutated, the tests that guard it, and which of them would cost more than they find (`-k`).
ROOMS: dict[str, tuple[list[str], list[str], str]] = {
    "partitions": (["methods/partitions.py"], ["test_partitions.py"], ""),
    "aggregation": (["methods/aggregators.py", "engine/mixing.py"], ["test_mixing.py", "test_aggregators.py"], ""),
    "objectives": (["methods/objectives.py"], ["test_objectives.py"], ""),
    "evaluation": (["engine/accuracy.py"], ["test_accuracy.py"], ""),
    "checkpoints": (
        ["runner/checkpoints.py", "whole_file.py"],
        ["test_checkpoints.py", "test_whole_file.py"],
        "test_whole_file or comes_back or flipped or paths or header or another_cell or is_gone or gets_its_name"
        " or swept",
    ),
    "worker": (
        ["runner/worker.py", "runner/stage.py", "runner/training.py", "runner/attacking.py"],
        [
            "test_attack_stages.py",
            "test_checkpoints.py",
            "test_evaluate.py",
            "test_fast.py",
            "test_malicious.py",
            "test_precision.py",
            "test_resume.py",
            "test_stage.py",
            "test_takeover.py",
            "test_transfer.py",
            "test_worker.py",
        ],
        "test_attack_stages or test_worker"
        " or test_checkpoints and (another_cell or not_here_any_more or imported or round_kept or undamaged)"
        " or test_evaluate and (digest_and_its or same_command or doubts_are_said) or images_once"
        " or clients_destroy or deterministic_kernel"
        " or test_resume and not killed_anywhere and not many_kills and not rare_checkpoints"
        " or test_stage or test_takeover and (takes_nothing or memory or batch_norm or lock_of)"
        " or test_transfer and not mistakes",
    ),
    "store": (
        ["store/stages.py", "store/leases.py", "store/selection.py", "store/database.py"],
        ["test_leases.py", "test_opening.py", "test_selection.py", "test_store.py"],
        "not racing and not random_instants and not ten_thousand and not clock_is_off and not killed_while",
    ),
    "attacks": (
        ["methods/attacks.py", "methods/packages.py"],
        ["test_attacks.py", "test_personalised.py", "test_precision.py"],
        "test_attacks or test_personalised and through_which or test_precision and autoattack",
    ),
    "numbers": (
        ["report/numbers/statistics.py", "report/numbers/declared_tests.py", "report/tables/significance.py"],
        ["test_declared_tests.py", "test_significance.py", "test_statistics.py"],
        "not analysis_of_variance and not null",
    ),
    "robustness": (
        ["engine/malicious.py", "methods/adversaries.py", "methods/robust_aggregators.py"],
        ["test_malicious.py", "test_robust_aggregators.py"],
        "",
    ),
    "exchange": (
        ["store/consistency.py", "store/export_schema.py", "store/jsonl.py"],
        ["test_consistency.py", "test_exchange.py", "test_export_schema.py", "test_replicates.py"],
        "not flipped and not journey and (not test_replicates or another_run or wall_time)",
    ),
}


# --- mistakes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """One file with one mistake. The lines it is in are those of its statement; `within` those of its function."""

    file: str  # below fatbench/
    number: int  # of the possible mutants of its file
    source: str
    was: str
    now: str
    lines: frozenset[int]
    within: frozenset[int]


def _one_string(node: cst.BaseString) -> list[cst.CSTNode]:
    """One wrong string instead of mutmut's three, and none for an empty one."""
    return list(mutators.operator_string(node))[:1] if getattr(node, "raw_value", "") else []


def _left_out(node: cst.Expr) -> Iterator[cst.CSTNode]:
    if isinstance(node.value, cst.Call):
        yield node.with_changes(value=cst.Ellipsis())


def _not_called(node: cst.Call) -> Iterator[cst.CSTNode]:
    if not node.args and isinstance(node.func, cst.Attribute):
        yield node.func.value


UNSEEN = m.Arg(keyword=m.Name("strict") | m.Name("device"))


def _rest(call: cst.CSTNode) -> tuple[Any, list[cst.Arg]]:
    """A call without `strict=` and `device=`."""
    given = getattr(call, "args", ())
    return getattr(call, "func", call), [arg for arg in given if not m.matches(arg, UNSEEN)]


OPERATORS: list[tuple[type, Callable[[Any], Iterable[cst.CSTNode]]]] = [
    *((t, f) for t, f in mutators.mutation_operators if f is not mutators.operator_string),
    (cst.BaseString, _one_string),
    (cst.Expr, _left_out),
    (cst.Call, _not_called),
]
NOTHING = (
    m.Annotation()
    | m.Decorator()
    | m.Raise()
    | m.Assert()
    | m.Import()
    | m.ImportFrom()
    | UNSEEN
    | m.Call(func=m.Name("cast") | m.Name("isinstance") | m.Name("len"))
    | m.Call(func=m.Attribute(value=m.Name("log")))
    | m.Expr(value=m.Call(func=m.Attribute(value=m.Name("log"))))
    | m.SimpleStatementLine(body=[m.Expr(m.SimpleString())])  # a docstring
    | m.If(test=m.Name("TYPE_CHECKING"))
)


class _Places(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider, ParentNodeProvider)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[cst.CSTNode, cst.CSTNode, int]] = []  # (node, what it becomes, its line)

    def on_visit(self, node: cst.CSTNode) -> bool:
        if m.matches(node, NOTHING):
            return False
        for kind, operator in OPERATORS:
            if isinstance(node, kind):
                for changed in operator(node):
                    if isinstance(node, cst.Call) and _rest(node) == _rest(changed):
                        continue
                    at: cst.CSTNode = node
                    while self.get_metadata(PositionProvider, at, None) is None:
                        at = self.get_metadata(ParentNodeProvider, at)
                    self.found.append((node, changed, self.get_metadata(PositionProvider, at).start.line))
        return True


def spans(source: str) -> tuple[dict[int, frozenset[int]], dict[int, frozenset[int]]]:
    """Line -> the lines of its innermost statement (the head alone, of one that has a body), and of its function."""
    whole = frozenset(range(1, len(source.splitlines()) + 1))
    statement: dict[int, frozenset[int]] = {}
    function: dict[int, frozenset[int]] = {}
    for node in ast.walk(ast.parse(source)):  # outer ones first
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if isinstance(body, list) and body else (node.end_lineno or node.lineno)
            own = range(node.lineno, max(last, node.lineno) + 1)
            statement.update(dict.fromkeys(own, frozenset(own)))
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                every = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                within = whole if isinstance(node, ast.ClassDef) else frozenset(every)  # a field is made at import
                function.update(dict.fromkeys(every, within))
    return statement, function


class Source:
    """A file that mistakes are made in; `len` is how many can be thought of."""

    def __init__(self, file: str):
        self.file, self.text = file, (Path("fatbench") / file).read_text()
        self.wrapper = MetadataWrapper(cst.parse_module(self.text))
        places = _Places()
        self.wrapper.visit(places)
        self.places, self.spans, self.plain = places.found, spans(self.text), _bytes(self.text)

    def mutant(self, number: int) -> Mutant | None:
        """One of them; None where it does not compile, or to the same bytecode."""
        node, changed, line = self.places[number]
        mutated = self.wrapper.module.deep_replace(node, changed).code  # type: ignore[arg-type]
        try:
            if _bytes(mutated) == self.plain:
                return None
        except SyntaxError:
            return None
        lines = self.text.splitlines()
        was, now = _difference(lines, mutated.splitlines())
        statement, function = self.spans
        own, every = statement.get(line, frozenset([line])), frozenset(range(1, len(lines) + 1))
        return Mutant(self.file, number, mutated, was, now, own, function.get(line, every))


def made_by_hand(one: Mapping[str, Any]) -> Mutant:
    """A mutant of tests/mutants.yaml; any test that runs its file may see it."""
    text = (Path("fatbench") / one["file"]).read_text()
    every = frozenset(range(1, len(text.splitlines()) + 1))
    for was, now in one["change"].items():
        if text.count(was) != 1:
            raise SystemExit(f"tests/mutants.yaml: {one['file']} has {text.count(was)} times, and not once: {was}")
        text = text.replace(was, now)
    return Mutant(one["file"], -1, text, one["mistake"], " ".join(one["change"].values()), every, every)


def _bytes(source: str) -> list[bytes]:
    """What is run of a source: bytecode, constants and names, without lines."""
    out: list[bytes] = []
    todo = [compile(source, "mutant", "exec", dont_inherit=True)]
    while todo:
        code = todo.pop()
        todo += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        rest = [c for c in code.co_consts if not isinstance(c, types.CodeType)]
        out.append(code.co_code + repr((rest, code.co_names, code.co_varnames, code.co_freevars)).encode())
    return out


def _difference(before: list[str], after: list[str]) -> tuple[str, str]:
    """The lines that differ, each side as one line of text."""
    start = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    end = 0
    while end < min(len(before), len(after)) - start and before[-1 - end] == after[-1 - end]:
        end += 1
    was, now = before[start : len(before) - end], after[start : len(after) - end]
    return " ".join(" ".join(was).split()), " ".join(" ".join(now).split())


def put_in(mutant: Mutant, file: Path, module: types.ModuleType) -> None:
    """Exchange the code of the functions that live in this process; the file on disk is for processes to come."""
    now = _codes(compile(mutant.source, str(file), "exec", dont_inherit=True))
    was = _codes(compile(file.read_text(), str(file), "exec", dont_inherit=True))
    file.write_text(mutant.source)
    changed = {name for name in was if name != "<module>" and was[name] != now.get(name)}
    gc.unfreeze()  # tests/conftest.py freezes what was collected, and what is frozen is not listed
    for live in gc.get_objects():
        if type(live) is types.FunctionType and live.__module__ == module.__name__:  # others may warn when looked at
            name = live.__code__.co_qualname
            if live.__code__.co_filename == str(file) and name in changed and "<locals>" not in name:
                # of a method that lost its `super()` the cell of `__class__` stays, and nothing looks into it
                live.__code__ = now[name].replace(co_freevars=live.__code__.co_freevars)
    if all(code == now.get(name) for name, code in was.items() if not code.co_flags & inspect.CO_NEWLOCALS):
        return  # of the module and its classes nothing is made another way
    scratch = types.ModuleType(module.__name__)  # a default or a constant: what the module makes when it is imported
    scratch.__dict__.update(__file__=str(file), __package__=module.__package__)
    live_module, sys.modules[module.__name__] = sys.modules.get(module.__name__), scratch  # annotations are looked up
    try:
        exec(compile(mutant.source, str(file), "exec", dont_inherit=True), scratch.__dict__)
    except Exception as error:
        raise NotImportable(type(error).__name__) from error
    finally:
        sys.modules[module.__name__] = live_module or module
    for name, new in vars(scratch).items():
        old = vars(module).get(name)
        if isinstance(new, types.FunctionType) and isinstance(old, types.FunctionType):
            old.__defaults__, old.__kwdefaults__ = new.__defaults__, new.__kwdefaults__
        elif isinstance(new, type) and isinstance(old, type):
            _defaults(old, new)
        elif not name.startswith("__") and not isinstance(new, types.ModuleType) and _said(old) != _said(new):
            for other in [*sys.modules.values()]:
                if other is not None and vars(other).get(name) is old and old is not None:
                    setattr(other, name, new)


def _said(value: object) -> str:
    """By what a constant is known; what checks a pydantic model is called like its model, whatever it checks."""
    return repr(getattr(value, "core_schema", value))


def _defaults(old: type, new: type) -> None:
    for name, made in vars(new).items():
        live = vars(old).get(name)
        if isinstance(made, types.FunctionType) and made.__code__.co_filename == "<string>":
            setattr(old, name, made)  # what a dataclass wrote keeps the factories of its fields to itself
        elif isinstance(made, types.FunctionType) and isinstance(live, types.FunctionType):
            live.__defaults__, live.__kwdefaults__ = made.__defaults__, made.__kwdefaults__


def _codes(code: types.CodeType) -> dict[str, types.CodeType]:
    """Every code object by its qualified name; a module's or a class's own is compared without what is
    nested in it.
    """
    found = {}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= _codes(inner)
    if not code.co_flags & inspect.CO_NEWLOCALS:
        bare = tuple(c for c in code.co_consts if not isinstance(c, types.CodeType))
        code = code.replace(co_consts=bare, co_linetable=b"", co_firstlineno=1)
    return {**found, code.co_qualname: code}


# --- a room --------------------------------------------------------------------------------------------------------


@dataclass
class Cost:
    """What a test costs, and which lines of the room's files it runs; None: it starts processes, so it may run any."""

    cpu: float
    lines: dict[str, set[int]] | None
    failed: str = ""


@dataclass
class Room:
    """A plugin of pytest: instead of running the tests it collected, it holds them against mutants."""

    name: str
    files: list[str]
    sample: int
    seed: int
    only: dict[tuple[str, str], tuple[str, int]] | None  # (was, now) -> (file, number)
    known: dict[str, Any]  # tests/mutants.yaml
    report: Path
    results: list[dict[str, Any]] = field(default_factory=list)

    def pytest_runtestloop(self, session: Any) -> bool:
        items = session.items
        costs: list[Cost] = _forked(lambda: self.walk(items), 3600, 3600)
        if not isinstance(costs, list):
            raise SystemExit(f"{self.name}: the first walk ended with {costs}")
        for item, cost in zip(items, costs, strict=True):
            if cost.failed:
                print(f"{self.name}: left out, it fails without a mistake: {item.nodeid}\n{cost.failed}", flush=True)
        tests = [(cost, item) for item, cost in zip(items, costs, strict=True) if not cost.failed]
        tests.sort(key=lambda test: test[0].cpu)
        total = sum(cost.cpu for cost, _ in tests)
        sources = [Source(file) for file in self.files]
        every = [(source, number) for source in sources for number in range(len(source.places))]
        print(f"{self.name}: {len(every)} mutants, {len(tests)} tests of {total:.0f} s of CPU", flush=True)
        by_hand = [made_by_hand(one) for one in self.known["always"].get(self.name, [])]
        by_hand = [one for one in by_hand if self.only is None or (one.was, one.now) in self.only]
        for mutant in [*by_hand, *(self.drawn(every) if self.only is None else self.again(every))]:
            self.results.append(self.judge(mutant, tests))
            with self.report.open("a") as handle:
                handle.write(json.dumps(self.results[-1], ensure_ascii=False) + "\n")
        return True

    def drawn(self, every: list[tuple[Source, int]]) -> Iterator[Mutant]:
        random.Random(f"{self.seed} {self.name}").shuffle(every)
        made = (mutant for source, number in every if (mutant := source.mutant(number)) is not None)
        return itertools.islice(made, self.sample)

    def again(self, every: list[tuple[Source, int]]) -> Iterator[Mutant]:
        """Those asked for, where they were; if the source has changed since, they are looked for."""
        left = dict(self.only or {})
        every.sort(key=lambda place: (place[0].file, place[1]) not in left.values())
        for source, number in every:
            text = " ".join(source.text.splitlines()[source.places[number][2] - 1].split())
            if not any(text in was for was, _ in left):
                continue
            mutant = source.mutant(number)
            if mutant is not None and left.pop((mutant.was, mutant.now), None):
                yield mutant

    def walk(self, items: list[Any]) -> list[Cost]:
        import coverage

        paths = {file: str((Path("fatbench") / file).resolve()) for file in self.files}
        found = []
        for item in items:
            tracer = coverage.Coverage(data_file=None, include=[*paths.values()], config_file=False, messages=False)
            tracer.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured"])
            before, theirs = time.process_time(), _children()
            tracer.start()
            failed = _run([item])
            tracer.stop()
            cpu, far = time.process_time() - before, _children() - theirs
            data = tracer.get_data()
            lines = None if far > CHILDREN else {f: set(data.lines(p) or ()) for f, p in paths.items()}
            found.append(Cost(cpu + far, lines, failed))
        return found

    def judge(self, mutant: Mutant, tests: list[tuple[Cost, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {"file": mutant.file, "number": mutant.number, "line": min(mutant.lines)}
        result |= {"was": mutant.was, "now": mutant.now}
        for one in self.known["explained"].get(self.name, []):
            if (one["was"], one["now"]) == (mutant.was, mutant.now):
                return {**result, "end": "explained", "by": one["why"]}
        reach = [test for test in tests if test[0].lines is None or test[0].lines[mutant.file] & mutant.lines]
        if 1 in mutant.within:  # a constant, which a test may look at and run no line of its file
            reach = tests
        elif not any(cost.lines is not None for cost, _ in reach):  # a default, say, which is made at import
            reach = [test for test in tests if test[0].lines is None or test[0].lines[mutant.file] & mutant.within]
        cost, affordable = 0.0, []
        for test in reach:
            cost += test[0].cpu
            if cost <= COSTS:
                affordable.append(test)
        spent = sum(test[0].cpu for test in affordable)
        file = Path("fatbench") / mutant.file
        plain = file.read_text()

        def attempt() -> str:
            import importlib

            module = importlib.import_module("fatbench." + mutant.file.removesuffix(".py").replace("/", "."))
            try:
                put_in(mutant, file.resolve(), module)
            except NotImportable as error:
                return f"the import: {error}"
            return _run([item for _, item in affordable])

        try:
            ended = _forked(attempt, 10 + 5 * spent, 120 + 60 * spent)
        finally:
            file.write_text(plain)
        by = ended if isinstance(ended, str) else f"ended with {ended}"
        return {**result, "end": "killed" if by else "survived", "by": by, "tests": len(affordable)}


class NotImportable(Exception):
    """A mutant that a program could not even import."""


class Broken(RuntimeError):
    """What should not happen in the forked process."""


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(items: list[Any]) -> str:
    """Run tests until one fails; the name of that one and how it failed, or nothing."""
    from _pytest.runner import runtestprotocol

    for place, item in enumerate(items):
        following = items[place + 1] if place + 1 < len(items) else None
        for report in runtestprotocol(item, log=False, nextitem=following):
            if report.failed:
                return f"{item.nodeid}: {str(report.longrepr)[-500:]}"
    return ""


def _forked(call: Callable[[], Any], cpu: float, wall: float) -> Any:
    """What `call` gives in a process forked from this one; the signal or the exit status it ended with otherwise."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu) + 1, int(cpu) + 1))
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        try:
            made = pickle.dumps(call())
            with os.fdopen(writer, "wb") as out:
                out.write(made)
        except BaseException as error:
            os.write(writer, pickle.dumps(Broken(repr(error))))
        finally:
            os._exit(0)
    os.close(writer)

    def late(*_: object) -> None:
        os.killpg(child, signal.SIGKILL)

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(int(wall))
    try:
        with os.fdopen(reader, "rb") as into:
            said = into.read()
        status = os.waitpid(child, 0)[1]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
    ended = pickle.loads(said) if said else os.waitstatus_to_exitcode(status)
    if isinstance(ended, Broken):
        raise ended
    return ended


def in_room(name: str, place: Path, report: Path, asked: argparse.Namespace, only: Any) -> None:
    """Collect the tests of a room in the copy at `place`, and hold them against its mutants."""
    import pytest

    files, tests, chosen = ROOMS[name]
    known = yaml.safe_load((ROOT / "tests" / "mutants.yaml").read_text())
    room = Room(name, files, asked.sample, asked.seed, only, known, report)
    without = [word for plugin in ("terminal", "cacheprovider", "xdist") for word in ("-p", f"no:{plugin}")]
    options = [*without, "-o", "addopts=", "--basetemp", str(place / "pytest-tmp"), "-m", MARKS, "-k", chosen]
    sys.exit(pytest.main([*options, *(f"tests/{test}" for test in tests)], plugins=[room]))


@contextlib.contextmanager
def _server() -> Iterator[None]:
    """A PostgreSQL server for the tests of all mutants, where one is installed; each process would start its own."""
    import databases

    del sys.modules["databases"]  # pytest imports it in its own way, from the copy
    if (binaries := databases.binaries_of_postgres()) is None:
        yield
        return
    with databases.serving(binaries) as folder:
        os.environ[databases.SERVER] = folder
        yield


def main() -> None:
    """`make mutants`."""
    parser = argparse.ArgumentParser(description="Make small mistakes and see which the tests do not notice.")
    parser.add_argument(
        "--sample", type=int, default=50, help="mutants drawn in each room; 0: those made by hand alone"
    )
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--room", choices=[*ROOMS], action="append", help="these rooms alone")
    parser.add_argument("--again", action="store_true", help="those that survived last time, and no others")
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "build" / "mutants", help="folder of the results")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    out = asked.out.resolve()
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    import torch  # noqa: F401  # once, for every room

    start = time.time()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fatbench-mutants-"))
        place = Path(folder)
        place.chmod(0o755)  # some tests look as another user
        if {"store", "exchange"} & {*(asked.room or ROOMS)}:
            stack.enter_context(_server())
        for name in tracked.split("\0"):
            committed = name.startswith("results/") and name.endswith(".jsonl")
            if name and (committed or not name.startswith("results/")) and (ROOT / name).is_file():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                (os.symlink if committed else shutil.copy)(ROOT / name, place / name)
        os.environ |= {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        sys.dont_write_bytecode = True
        here = (str(ROOT), str(ROOT / "tests"))
        sys.path[:] = [folder, str(place / "tests"), *(p for p in sys.path if os.path.realpath(p) not in here)]
        os.chdir(place)
        ends: Counter[str] = Counter()
        for room in asked.room or ROOMS:
            report = out / f"{room}.jsonl"
            only = None
            if asked.again:
                rows = [json.loads(row) for row in report.read_text().splitlines()]
                only = {
                    (row["was"], row["now"]): (row["file"], row["number"]) for row in rows if row["end"] == "survived"
                }
            kept = [] if not asked.again else [row for row in rows if row["end"] != "survived"]
            report.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
            child = multiprocessing.get_context("fork").Process(target=in_room, args=(room, place, report, asked, only))
            child.start()
            child.join()
            if child.exitcode != 0:
                sys.exit(f"{room}: the tests could not be collected, or the run of them broke off")
            rows = [json.loads(row) for row in report.read_text().splitlines()]
            count = Counter(row["end"] for row in rows)
            ends += count
            print(
                f"{room}: {count['killed']} of {len(rows)} killed, {count['survived']} survived, "
                f"{count['explained']} explained; {time.time() - start:.0f} s",
                flush=True,
            )
            for row in rows:
                if row["end"] == "survived":
                    print(f"  fatbench/{row['file']}:{row['line']}\n    - {row['was']}\n    + {row['now']}", flush=True)
    all_ = sum(ends.values())
    fraction = 100 * ends["killed"] / max(all_ - ends["explained"], 1)
    print(f"{ends['killed']} of {all_} killed, {ends['explained']} explained: {fraction:.1f} % of the rest")
    sys.exit(ends["survived"] > 0.05 * (all_ - ends["explained"]))


if __name__ == "__main__":
    main()
