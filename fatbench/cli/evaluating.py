"""`fatbench evaluate`: attack a saved model, a run's or one that was trained elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fatbench import whole_file
from fatbench.cli.common import known_format, name_list, plan_of, print_json
from fatbench.cli.options import DataDir, Db, Device, Format, Precision, Preset, Smoke, Where
from fatbench.errors import Doubtful, SpecError
from fatbench.runner.run_options import RunOptions
from fatbench.store.opening import opened
from fatbench.store.stage_names import parsed

if TYPE_CHECKING:
    from fatbench.report.numbers.doubts import Doubt
    from fatbench.suite.cells import Plan


def evaluate(
    file: Annotated[
        Path,
        typer.Argument(help="A checkpoint of a run, or a state dict (.pt, .safetensors).", show_default=False),
    ],
    *,
    model: Annotated[
        str | None, typer.Option("--model", help="Network of a state dict: FILE.py:NAME, FILE.py or timm/NAME.")
    ] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", help="The data set, written as in a suite.")] = None,
    like: Annotated[
        str | None, typer.Option("--like", metavar="SUITE", help="Use the images and attacks of this suite's cells.")
    ] = None,
    attack: Annotated[
        list[str] | None,
        typer.Option("--attack", "--attacks", help="fgsm,pgd20, or {name: pgd, eps: 8/255, ...}; may be repeated."),
    ] = None,
    eps: Annotated[
        str | None,
        typer.Option(
            "--eps", help="Radius of attacks that state none; default: a run's radius of training, else 8/255."
        ),
    ] = None,
    n: Annotated[int | None, typer.Option("-n", min=1, help="Use the first n test images.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Batch size.")] = 500,
    mean: Annotated[
        str | None, typer.Option("--mean", help="Mean of the preprocessing, one number per channel.")
    ] = None,
    std: Annotated[str | None, typer.Option("--std", help="Standard deviation of the preprocessing.")] = None,
    outputs: Annotated[
        str, typer.Option("--outputs", help="What it returns: logits, probabilities, or sigmoid (one of each class).")
    ] = "logits",
    channels: Annotated[str, typer.Option("--channels", help="Channel order of the network: rgb or bgr.")] = "rgb",
    size: Annotated[int | None, typer.Option("--size", min=1, help="Resize images to SIZE x SIZE pixels.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Row name in tables; default: the file name.")] = None,
    entry: Annotated[
        str | None, typer.Option("--entry", help="State of a file with several: ema, model.student.")
    ] = None,
    expect_natural: Annotated[
        float | None,
        typer.Option(
            "--expect-natural",
            min=0,
            max=100,
            help="Natural accuracy in per cent that your own program measured; no attack runs if it differs here.",
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="End with exit code 6 if a number is doubtful.")] = False,
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    device: Device = None,
    precision: Precision = None,
    db: Db = None,
    data: DataDir = None,
    format: Format = "text",
) -> None:
    """Attack a saved model outside any suite.

    Example: fatbench evaluate net.pt --model net.py:Net --dataset cifar10 --eps 8/255 -n 1000
    """
    known_format(format, ("text", "json"))
    if expect_natural is not None and 0 < expect_natural <= 1:
        raise SpecError(f"--expect-natural: expected per cent such as 95 (and not 0.95), got {expect_natural:g}")
    attack = [item for text in attack or () for item in ([text] if "{" in text else name_list(text))]
    file = whole_file.regular(file)  # of the hub, or a pipe
    options = RunOptions(device=device, precision=precision, db=db, data=data)
    if like is None and (preset or smoke or where):
        raise SpecError("--preset, --smoke and -k choose cells of a suite: name it with --like SUITE")
    if model is None:
        from fatbench.runner import checkpoints

        # every model of a run ends so
        if file.is_file() and (file.suffix != ".safetensors" or checkpoints.is_state_dict(file)):
            raise SpecError(
                f"{file} is no checkpoint of a run; a state dict needs --model timm/NAME or --model FILE.py:FUNCTION"
            )
        of_a_state_dict = {
            "--dataset": dataset, "--mean": mean, "--std": std, "--size": size, "--name": name, "--entry": entry,
            "--expect-natural": expect_natural, "--strict": strict or None,
        }  # fmt: skip
        misplaced = [option for option, value in of_a_state_dict.items() if value is not None]
        if misplaced and file.is_file():
            raise SpecError(
                f"{file}: without --model it is read as a checkpoint of a run, which has its own settings: leave out"
                f" {', '.join(misplaced)}, or name a state dict's network with --model timm/NAME or FILE.py:FUNCTION"
            )
        plan = None if like is None else plan_of(like, preset, smoke, None, where)
        _checkpoint(file, plan, attack, eps, n, batch, options, format)
        return
    from fatbench import api
    from fatbench.runner import evaluate_external
    from fatbench.suite.external_models import ROUND
    from fatbench.suite.standard_attacks import DEFAULT_RADIUS

    plan = None if like is None else plan_of(like, preset, smoke, None, where)
    task = evaluate_external.task(
        plan, dataset and _mapping(dataset), attack, eps=eps or DEFAULT_RADIUS, n=n, batch=batch, size=size
    )
    preprocessing: dict[str, Any] = {
        "mean": _numbers("--mean", mean), "std": _numbers("--std", std), "outputs": outputs, "channels": channels,
    }  # fmt: skip
    source = evaluate_external.from_file(file, model, name, entry, **preprocessing)
    if source.note:
        print(f"fatbench: {source.note}", file=sys.stderr)
    expected_natural = None if expect_natural is None else expect_natural / 100
    cell, status = api.attack_and_store(source, task, options, _say, expected_natural, in_percent=True)
    doubts = _show(cell, {stage: item.attack for item in task.evaluations for stage in item.stages(ROUND)}, db, format)
    if status != "done":
        print(f"fatbench: {cell}: {status} (fatbench logs {cell})", file=sys.stderr)
        raise typer.Exit(1)
    if strict and doubts:
        raise Doubtful(f"--strict: {cell}: {'; '.join(doubts)}")


def _show(cell: str, attack_by_stage: Mapping[str, Any], db: str | None, format: str) -> list[str]:
    """The numbers of a cell, the robust accuracy first, and on stderr what is doubtful: what `--strict` ends at.

    attack_by_stage: stage -> attack of those that a text shows; JSON has all attacks on the model.
    """
    from fatbench import report as reporting
    from fatbench.report.numbers import cell_rows
    from fatbench.report.numbers.doubts import MEASURED_WELL, in_words
    from fatbench.report.tables.external_suite import split_note, suite_and_plan
    from fatbench.suite.standard_attacks import strength

    with opened(db) as store:
        assert store is not None
        doubts_by_stage = cell_rows.doubts_of([cell], store)
        if format == "json":
            suite, plan = suite_and_plan(store, f"id={cell}")
            grids = reporting.build_tables(suite, plan, store)
        else:
            numbers = cell_rows.accuracies([cell], store, attack_by_stage)
            spec = store.cells([cell])[cell]
    all_doubts = dict.fromkeys(doubt for doubts in doubts_by_stage.values() for doubt in doubts)
    doubts = advised(all_doubts)
    if format == "json":
        import json

        print_json({"cell": cell, "doubts": doubts, **json.loads(reporting.render(grids, "json"))})
    else:
        from fatbench.cli import show

        rows = [
            {
                "label": parsed(stage).metric,
                "attack": attack_by_stage[stage],
                "accuracy": accuracy,
                "n": n,
                "doubts": in_words(doubts_by_stage.get((cell, stage), ())),
            }
            for (_, stage), (accuracy, n) in numbers.items()
        ]
        rows.sort(key=lambda row: strength(row["label"]))
        show.evaluation(rows, f"{spec['evaluated']['name']} on {spec['data']['name']}")
        print(f"cell {cell}: fatbench show {cell}; fatbench report evaluate has all models")
        if note := split_note(spec["data"]["name"]):
            print(note)
    for line in doubts:
        print(f"fatbench: {line}", file=sys.stderr)
    return in_words(doubt for doubt in all_doubts if doubt.code not in MEASURED_WELL)


AT_CHANCE = "no better than guessing the most frequent class; "


def advised(doubts: Iterable[Doubt]) -> list[str]:
    """Each doubt about a model in words, a sentence each, with what to do about it where that is known."""
    from fatbench.api import CHECK
    from fatbench.engine.plausible import ADVICE
    from fatbench.report.numbers.doubts import Doubt, in_words

    advice = {**ADVICE, Doubt("chance").words: AT_CHANCE + CHECK}
    return [f"{words}: {advice[words]}" if words in advice else words for words in in_words(doubts)]


def _checkpoint(
    file: Path,
    plan: Plan | None,
    attack: list[str],
    eps: str | None,
    n: int | None,
    batch: int,
    options: RunOptions,
    format: str,
) -> None:
    """A model that a run has written: its settings are in it."""
    from fatbench.report.numbers.doubts import Doubt, in_words
    from fatbench.runner import evaluate_checkpoint as evaluating

    results = evaluating.checkpoint(file, evaluating.evaluations(file, plan, attack, eps, n, batch), options)
    for row in results:
        row["doubts"] = in_words(Doubt(kind.replace(" ", "_"), amount) for kind, amount in row["doubts"].items())
    if format == "json":
        print_json({"checkpoint": str(file), "results": results})
    else:
        from fatbench.cli import show

        show.evaluation(results, file.name)
    for row in results:
        for words in row["doubts"]:
            print(f"fatbench: {row['label']}: {words}", file=sys.stderr)


def _numbers(option: str, text: str | None) -> tuple[float, ...]:
    try:
        values = tuple(float(field) for field in (text or "").split(",") if field.strip())
    except ValueError:
        raise SpecError(f"{option}: expected numbers such as 0.5,0.5,0.5, got '{text}'") from None
    if option == "--std" and not all(0 < value < float("inf") for value in values):
        raise SpecError(f"--std: expected positive numbers, by which images are divided, got '{text}'")
    return values


def _mapping(dataset: str) -> Any:
    """A data set as the command line gives it: a name, or {name: image_folder, path: ..., size: 64}."""
    if not dataset.lstrip().startswith("{"):
        return dataset
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return dict(YAML(typ="safe", pure=True).load(dataset))
    except YAMLError:
        raise SpecError(f"--dataset: cannot read '{dataset}' as a mapping such as {{name: svhn}}") from None


def _say(event: Any) -> None:
    """A line for each attack that begins, and what a person should know; on a terminal also how far it is."""
    if event.message and event.kind != "progress":
        about = "" if event.stage == "cell" else f"{event.cell} {event.stage} {event.kind}: "
        print(f"fatbench: {about}{event.message}", file=sys.stderr)
        return
    metric = event.stage.split("-")[0]
    if event.kind == "start":
        print(f"attack {metric}", file=sys.stderr, flush=True)
    elif event.kind == "progress" and sys.stderr.isatty():
        so_far = "" if event.accuracy is None else f", {100 * event.accuracy:.1f} % right so far"
        phase = f", {event.message}" if event.message else ""
        print(
            f"\x1b[2Kattack {metric}: {event.round} of {event.total}{phase}{so_far}",
            end="\r",
            file=sys.stderr,
            flush=True,
        )
