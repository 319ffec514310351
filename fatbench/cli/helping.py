"""What `--help` prints, the options of the program on both sides of a command, and how other words are answered."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import typer

from fatbench import settings
from fatbench.errors import FatbenchError, SpecError, UnknownName, did_you_mean

GLOBALS = ("db", "data", "plugin", "config", "quiet", "verbose", "color", "smoke")
REPEATED = ("plugin", "config")  # they add up; of the others the later one counts
LINES = {"quiet": "none", "verbose": "event"}  # -> which lines of progress are printed

WORDS = """\
suite: a YAML file that describes the tables of a paper
preset: a size of a suite: paper is full, quick is minutes to hours on a GPU, smoke seconds to minutes anywhere
cell: one experiment: data, partition, model, method, seed; trained once
stage: a part of a cell: its training, or one attack on its model
replicate: another run of the same cell
doubt: a reason to distrust this number, found by an automatic check
comparison group: numbers that may be compared: same data, split and attack"""


def _pairs(text: str) -> dict[str, str]:
    """Each "word: answer" of a text, with semicolons between them."""
    return dict(" ".join(pair.split()).split(": ", 1) for pair in text.split(";"))


# A command of before -> of now. A word in capitals is the user's next one, where there is one.
MOVED = _pairs("""
    suite list: list suites; suite show: show NAME; suite check: check FILE; suite schema: check --schema;
    run cell: run CELL; logs: show CELL --log; outcomes: show CELL --outcomes; models: list models;
    cite: list papers NAME --format bibtex; submit: verify FILE; clean: delete --unused; data list: list data;
    data prepare: fetch NAME; data verify: fetch -n NAME; db check: check; db backup: export -o COPY.db;
    suite: list suites; data: list data; db: check
""")
# A word that people try -> the command that does it.
MEANT = _pairs("""
    init: new suite NAME; create: new suite NAME; add: new suite NAME; ls: list suites; suites: list suites;
    datasets: list data; algorithms: list methods; attacks: list attacks; papers: list papers;
    bibtex: list papers --format bibtex; version: --version; help: --help; train: run NAME; start: run NAME;
    resume: run NAME; exec: run NAME; attack: evaluate FILE; eval: evaluate FILE; test: evaluate FILE; table: report;
    tables: report; results: report; figure: plot NAME; figures: plot NAME; curves: plot CELL; html: site -o site;
    web: site -o site; serve: site -o site; page: site -o site; leaderboard: site -o site; rm: delete NAME;
    remove: delete NAME; gc: delete --unused; prune: delete --unused; validate: check FILE; lint: check FILE;
    reproduce: verify FILE; diff: compare A B; ttest: compare NAME; tests: compare NAME; download: fetch NAME;
    prepare: fetch NAME; cost: plan NAME; time: plan NAME; info: doctor; env: doctor; ps: status;
    progress: status NAME --watch; watch: status NAME --watch; backup: export -o copy.db;
    upgrade: export -o results.jsonl; migrate: export -o results.jsonl; log: show CELL --log; cell: show CELL;
    cells: status NAME; load: import FILE; save: export -o results.jsonl; dump: export -o results.jsonl
""")
# An option of before, of one command or of any -> what to type now; VALUE is what the user gave it.
MOVED_OPTIONS = _pairs("""
    report --rows: --by VALUE; report --columns: --metric VALUE; report --images: --common;
    report --runs: -k run.VALUE; report --digits: -c report.digits=VALUE; report --notes: -c report.notes=VALUE;
    report --published: -c report.published=none; report --no-published: -c report.published=none;
    report --spread: no longer needed: --width decides; report --numbers: no longer needed: numbers are text;
    report --bom: -c report.bom=true; report --with-evaluated: -c report.evaluated=true; plot --y: --metric VALUE;
    plot --cell: fatbench plot VALUE; plot --plain: --width text; plot --serif: -c plot.serif=true;
    site --runs: fatbench report -k run.VALUE; site --images: no longer needed: images are found in results/figures;
    status --every: --watch; compare --tests: fatbench compare NAME; check --contract: fatbench check FILE.py;
    verify --cell: -k cell=VALUE; verify --precision: -c run.precision=VALUE; verify --seed: --sample-seed VALUE;
    plan --gpus: --jobs VALUE; plan --calibrate: --on here; run --retry-failed: --rerun failed;
    run --rerun-changed: --rerun changed; run --per-gpu: -c run.per_gpu=VALUE;
    run --time-limit: -c run.time_limit=VALUE; run --wait: -c run.wait=true; run --no-wait: -c run.wait=false;
    run --fail-fast: -c run.fail_fast=true; run --log: -c run.log=VALUE; evaluate -n: --images VALUE;
    evaluate --batch: -c run.microbatch=VALUE; evaluate --outputs: --model '{name: ..., outputs: VALUE}';
    evaluate --channels: --model '{name: ..., channels: VALUE}'; evaluate --size: --model '{name: ..., size: VALUE}';
    evaluate --entry: --model '{name: ..., entry: VALUE}'; invert --batch: --images VALUE;
    invert --lr: --set local.lr=VALUE; invert --epochs: --set local.epochs=VALUE;
    invert --local-batch: --set local.batch=VALUE; invert --momentum: --set local.momentum=VALUE;
    invert --weight-decay: --set local.weight_decay=VALUE; new --rows: --beside FILE;
    list --from: fatbench fetch NAME; list --name: fatbench fetch VALUE; list --here: fatbench list models;
    --attacks: --attack VALUE; --seeds: -k 'seed in [VALUE]'; --path: -c run.path=VALUE;
    --microbatch: -c run.microbatch=VALUE; --attack-precision: -c run.attack_precision=VALUE
""")
# An option that people try -> what is meant; it is answered where the command has it.
MEANT_OPTIONS = _pairs("""
    gpu: --device cuda; gpus: --device cuda:0,1; cpu: --device cpu; cuda: --device cuda; workers: --jobs N;
    parallel: --jobs N; threads: --jobs N; out: -o PATH; outdir: -o PATH; file: -o PATH; seed: --seeds 0;
    lr: --set algorithm.local.lr=0.02; epochs: --set algorithm.local.epochs=1; rounds: --set algorithm.rounds=10;
    override: --set KEY=VALUE; where: -k FILTER; only: -k FILTER; method: -k method=NAME; json: --format json;
    csv: --format csv; latex: --format latex; markdown: --format markdown; force: --rerun changed;
    retry: --rerun failed; check: --dry-run; simulate: --dry-run; database: --db URL; dataset: --data FOLDER;
    root: --data FOLDER; fast: --preset quick; bf16: --precision bf16; fp16: --precision bf16; amp: --precision bf16;
    half: --precision bf16; attacks: --attack LIST; epsilon: --eps R; eps: --set perturbation.eps=8/255;
    limit: --images N; n: --images N; columns: --metric LIST; rows: --by AXES; y: --metric LIST
""")

# -- the command line so far, for what has no other way to know it ---------------------------------------------------


def moved_option(command: str, option: str, arguments: list[str]) -> str | None:
    """ "--digits 1 is now -c report.digits=1", in the words of the command line; None: the option was never there."""
    new = MOVED_OPTIONS.get(f"{command} {option}") or MOVED_OPTIONS.get(option)
    if new is None:
        return None
    given, value = option, ""
    for position, word in enumerate(arguments):
        name, sign, assigned = word.partition("=")
        if name == option:
            following = arguments[position + 1 : position + 2]
            value = assigned if sign else following[0] if following and not following[0].startswith("-") else ""
            given = f"{option} {value}" if value and "VALUE" in new else option
    is_now = "is" if new.startswith("no longer") else "is now"
    return f"{given} {is_now} {new.replace('VALUE', value or 'VALUE')}"


def _moved_command(arguments: list[str]) -> str | None:
    """ "'logs' is now 'fatbench show 0123 --log'", in the words of the command line."""
    for count in (2, 1):
        word, following = " ".join(arguments[:count]), arguments[count:]
        if len(arguments) >= count and (new := MOVED.get(word)):
            named = next((name for name in following if not name.startswith("-")), "")
            return f"'{word}' is now 'fatbench {re.sub('[A-Z]+(?= |$)', named, new) if named else new}'"
    return None


JOINED_BY = {"-k": " ", "--filter": " ", "--seeds": ",", "--attack": ",", "--metric": ","}


def option_of(extra_words: list[str]) -> str:
    """ " (did you mean --seeds '0,1'?)" if the words follow the value of an option that takes several."""
    position = sys.argv.index(extra_words[0]) if extra_words and extra_words[0] in sys.argv else 0
    option, value = ["", "", *sys.argv][position : position + 2]
    if (joined_by := JOINED_BY.get(option)) is None:
        return ""
    joined_by = " " if value.startswith(("{", "[")) else joined_by  # a mapping without quotes
    words = [value if joined_by == " " else value.rstrip(","), *extra_words]
    return f" (did you mean {option} '{joined_by.join(words)}'?)"


# -- commands --------------------------------------------------------------------------------------------------------


def anywhere(ctx: Any, param: Any, value: Any) -> Any:
    """Store an option of the program, which stands before or after a command; not given, it changes nothing."""
    if value not in (None, (), [], False):
        given = ctx.find_root().meta.setdefault("fatbench", {})
        given[param.name] = [*given.get(param.name, ()), *value] if param.name in REPEATED else value
    return value


def quietness() -> str:
    """Which lines of progress this command line asks for: "none", "cell" or "event"."""
    return _said.get("lines", "cell")


_said: dict[str, str] = {}


class Command(typer.core.TyperCommand):
    """A command that takes the program's options too, which its help does not list."""

    def get_params(self, ctx: Any) -> list[Any]:
        root, params = ctx.find_root().command, super().get_params(ctx)
        own = {name for param in params for name in param.opts}
        for param in params:
            if param.param_type_name == "argument":
                vars(param)["get_help_record"] = lambda ctx, param=param: (param.metavar, param.help)
        for param in root.params if root is not self else ():
            if param.name in GLOBALS and not own & set(param.opts):
                param = copy.copy(param)
                param.expose_value, param.callback, param.hidden = False, anywhere, False
                param.get_help_record = lambda ctx: None  # taken and completed, listed on the program's page
                params.insert(-1, param)
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(str(param.metavar) for param in self.params if param.param_type_name == "argument")]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write_paragraph()
        formatter.write_text("Also --db, --data, --plugin, -c, -q, -v, --color: see 'fatbench --help'.")

    def invoke(self, ctx: Any) -> Any:
        given = dict(ctx.find_root().meta.get("fatbench", {}))
        if given.pop("smoke", False):
            preset = ctx.params.get("preset", "none")
            if preset == "none":
                raise SpecError(f"{ctx.info_name} has no presets: --smoke does not fit")
            if preset not in (None, "smoke"):
                raise SpecError(f"--smoke and --preset {preset} contradict each other")
            ctx.params["preset"] = "smoke"
        with called(given):
            return super().invoke(ctx)


@contextlib.contextmanager
def called(given: dict[str, Any]) -> Iterator[None]:
    """A context in which a command runs: with what the program's options say, and with their plug-ins.

    A name that is unknown without a plug-in of the database's runs is answered with which plug-in that was. A mistake
    of the program is looked for in the database first: what it cannot read is damaged.
    """
    from fatbench.suite import plugins

    if given.get("quiet") and given.get("verbose"):
        raise SpecError("--quiet and --verbose contradict each other")
    if (color := given.get("color", "auto")) not in ("auto", "always", "never"):
        raise SpecError(f"expected auto, always or never, got '{color}'", option="color")
    before = dict(os.environ)
    _said["lines"] = next((lines for name, lines in LINES.items() if given.get(name)), "cell")
    try:
        if color != "auto":
            os.environ.pop("NO_COLOR" if color == "always" else "FORCE_COLOR", None)
            os.environ["FORCE_COLOR" if color == "always" else "NO_COLOR"] = "1"
        options = {key: str(given[key]) for key in ("db", "data") if given.get(key) is not None}
        with settings.options(options, given.get("config", ())):
            plugins.load([Path(file) for file in given.get("plugin", ())])
            try:
                yield
            except UnknownName as error:
                from fatbench.runner import versions

                raise versions.explain(error) from None
            except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
                if damage := _damage():
                    raise damage from error
                raise
    finally:
        _said.clear()
        for name in ("NO_COLOR", "FORCE_COLOR"):
            os.environ.pop(name, None)
            os.environ.update({name: before[name]} if name in before else {})


def _damage() -> FatbenchError | None:
    """What is damaged in the database; None: nothing, or there is none."""
    from fatbench.store import integrity

    with contextlib.suppress(FatbenchError):
        try:
            integrity.check(settings.database())
        except integrity.Damaged as damage:
            return damage
    return None


class Program(typer.core.TyperGroup):
    """The program: its commands by the job they do, and an answer to words that are none."""

    jobs: ClassVar[dict[str, tuple[str, ...]]] = {}  # set by `fatbench.cli.app`

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in self.jobs.values() for name in names]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for job, names in self.jobs.items():
            with formatter.section(job):
                helps = {name: " ".join((self.commands[name].help or "").split("\n\n")[0].split()) for name in names}
                formatter.write_dl([(name.ljust(width), first) for name, first in helps.items()])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Words"):
            formatter.write_dl([tuple(line.split(": ", 1)) for line in WORDS.splitlines()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0] if args else ""
        if word and word not in self.commands and not word.startswith("-"):
            if moved := _moved_command(args):
                raise SpecError(moved)
            for name, value in ctx.params.items():  # `--data run X`: its value is missing
                if swallowed := [
                    one for one in (value if isinstance(value, list) else [value]) if str(one) in self.commands
                ]:
                    raise SpecError(f"--{name}: expected a value, got the command '{swallowed[-1]}'")
            hint = f" (did you mean 'fatbench {MEANT[word.lower()]}'?)" if word.lower() in MEANT else ""
            raise SpecError(f"no command is named '{word}'{hint or did_you_mean(word, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)
