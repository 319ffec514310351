"""`fatbench invert`: what one's own update gives away."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

from fatbench import whole_file
from fatbench.cli import options as opt
from fatbench.cli.options import Argument, Option
from fatbench.cli.shared import known_format, mapping, print_json
from fatbench.errors import SpecError, did_you_mean

LOCAL = {"lr": float, "epochs": int, "batch": int, "momentum": float, "weight_decay": float}  # keys of local training


def invert(
    file: Annotated[
        Path,
        Argument(
            metavar="FILE", help="The weights that the client received: .pt or .safetensors.", show_default=False
        ),
    ],
    model: opt.Model = None,
    mean: opt.Mean = None,
    std: opt.Std = None,
    shape: Annotated[
        str | None, Option("--shape", metavar="CxHxW", help="Shape of an image, such as 3x32x32.")
    ] = None,
    after: Annotated[
        Path | None, Option("--after", metavar="FILE", help="The weights that the client returned.")
    ] = None,
    gradient: Annotated[
        Path | None, Option("--gradient", metavar="FILE", help="Instead: a gradient, by parameter.")
    ] = None,
    classes: opt.Classes = 10,
    images: opt.Images = None,
    labels: Annotated[
        str | None,
        Option("--labels", metavar="LIST", help="Labels of the images, such as 3,1; default: recovered."),
    ] = None,
    threat: Annotated[
        str, Option("--threat", metavar="T", help="Threat model of the attacker: A, B, C, D or E.")
    ] = "B",
    mode: Annotated[
        str, Option("--mode", metavar="M", help="How batch normalisation computed at the client: eval or train.")
    ] = "eval",
    override: opt.Override = None,
    inversion: Annotated[
        list[str] | None,
        Option("--inversion", metavar="NAME", help="NAME or {name: ..., ...}; default: those that fit."),
    ] = None,
    original: Annotated[
        list[Path] | None, Option("--original", metavar="FILE", help="Image to compare with; may be repeated.")
    ] = None,
    like: opt.Like = None,
    where: opt.Where = None,
    format: opt.Format = "text",
    output: opt.OutputFolder = None,
) -> None:  # fmt: skip
    """Try to reconstruct training images from a model update.

    --images is the number of images behind the update. An attacker of threat model C or D knows how the client trained:
    --set local.lr=0.1, local.epochs, local.batch, local.momentum, local.weight_decay. --like shows a suite's results
    below. The images go to the folder inverted if -o names none.

    Example: fatbench invert weights.pt --model net.py:Net --shape 3x32x32 --after returned.pt --images 1
    """
    known_format(format, ("text", "json"))
    if model is None or shape is None:
        missing = "--model" if model is None else "--shape"
        raise SpecError(f"{missing} is missing: invert FILE --model M --shape 3x32x32")
    if (after is None) == (gradient is None):
        raise SpecError("give the update as --after WEIGHTS or as --gradient FILE, one of the two")
    size = _shape(shape)
    from fatbench.suite import threats

    if mode not in ("eval", "train"):
        raise SpecError(f"expected eval or train, got '{mode}'", option="mode")
    if threat not in ("A", "B", "C", "D", "E"):
        reason = "a manipulated model is needed" if threat in threats.KNOWS else "no such threat model"
        reason += "; see docs/methods.md, Inversions"
        raise SpecError(f"expected A, B, C, D or E, got '{threat}' ({reason})", option="threat")
    local = _local(override)
    if local and "lr" not in local:
        raise SpecError("needs local.lr, too", option=f"set local.{min(local)}")
    if local and threat not in ("C", "D", "E"):
        raise SpecError(f"--set local.lr: an attacker of threat model {threat} does not know it: --threat C")
    from fatbench.api import inverted as api
    from fatbench.cli.evaluate import numbers
    from fatbench.runner import invert as inverting

    if labels is not None and not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", labels):
        raise SpecError(f"expected whole numbers such as 3,1, got '{labels}'", option="labels")
    given_labels = tuple(map(int, labels.split(","))) if labels is not None else ()
    count = images or len(given_labels)
    settings = {"epochs": 1, "batch": count, "momentum": 0.0, "weight_decay": 0.0, **local} if local else None
    preprocessing = {"mean": numbers("--mean", mean), "std": numbers("--std", std)}
    if len(preprocessing["mean"]) != len(preprocessing["std"]):
        raise SpecError("--mean and --std go together, one number per channel")
    update, kind = (after, "after") if after is not None else (gradient, "gradient")
    assert update is not None
    task = inverting.InversionTask(
        file, update, kind, model, size, classes, threat, images, given_labels,  # type: ignore[arg-type]
        tuple(mapping("--inversion", text) if "{" in text else text for text in inversion or ()), preprocessing,
        settings, mode,  # type: ignore[arg-type]
    )  # fmt: skip
    originals = api.images_of(original or [], size, count)
    if like is None and where:
        raise SpecError("-k needs a suite: name it with --like NAME")
    # before anything is computed: a misspelt suite is an error of the first second
    beside = [] if like is None else api.rows_of_suite(like, where)
    loaded, output = inverting.load(task), output or Path("inverted")
    attack_calls = inverting.fitting(task, loaded)
    answers = inverting.invert(task, loaded, attack_calls)
    residual = inverting.residual(task, loaded)
    rows: list[dict[str, Any]] = []
    pictures: dict[Path, str | bytes] = {}
    for position, answer in enumerate(answers):
        picture_file = output / f"{position + 1}-{re.sub('[^a-z0-9]+', '-', answer.name.lower()).strip('-')}.png"
        pictures[picture_file] = api.png(answer.images)
        row = {"attack": answer.name, "threat": answer.threat, "labels": answer.labels, "file": str(picture_file)}
        rows.append(row | (inverting.scores(answer, originals) if originals is not None else {}))
    if originals is not None:
        pictures[output / "originals.png"] = api.png(originals)
    whole_file.write_all(pictures, f"-o {output}")  # all or none
    label_list = loaded.observed.labels[0].tolist()
    verdict = _verdict(residual, inverting.ONE_IMAGE)
    if format == "json":
        notes = list(loaded.notes)
        print_json({"labels": label_list, "residual": residual, "notes": notes, "attacks": rows, "like": beside})
        return
    _print(rows + beside)
    print(f"\nlabels, {'given' if given_labels else 'recovered'}: {', '.join(map(str, label_list))}")
    for line in (verdict, *loaded.notes):
        if line:
            print(line, file=sys.stderr if line in loaded.notes else sys.stdout)


def _verdict(residual: float | None, threshold: float) -> str:
    if residual is None:
        return ""
    verdict = "one image, which patch_ls finds" if residual < threshold else "a mixture, or numbers of low precision"
    return f"residual of the least squares {residual:.1e}: {verdict}"


def _print(rows: list[dict[str, Any]]) -> None:
    from tabulate import tabulate

    heads = {
        "file": "from", "psnr": "PSNR, best pair", "ssim": "SSIM, best pair", "lpips": "LPIPS, best pair",
        "matched_psnr": "PSNR, all",
        "matched_ssim": "SSIM, all", "recovered": "above 19 dB",
    }  # fmt: skip
    shown_rows = [
        {heads.get(key, key): f"{value:.3f}" if isinstance(value, float) else value for key, value in row.items()}
        for row in rows
    ]
    print(tabulate(shown_rows, headers="keys", tablefmt="pipe", disable_numparse=True))


def _local(pairs: list[str] | None) -> dict[str, Any]:
    """How the client trained, of --set local.lr=0.1. SpecError: another key, or no number."""
    local: dict[str, Any] = {}
    for text in pairs or ():
        path, _, value = text.partition("=")
        table, _, key = path.strip().rpartition(".")
        if table != "local" or key not in LOCAL:
            known = [f"local.{name}" for name in LOCAL]
            hint = did_you_mean(path.strip(), known)
            raise SpecError(f"expected {', '.join(known)}, got '{text}'{hint}", option="set")
        try:
            local[key] = LOCAL[key](value)
        except ValueError:
            raise SpecError(f"expected a number, got '{value}'", option=f"set {path}") from None
        if not (local[key] >= 0 and local[key] < 1e9) or (key in ("lr", "epochs", "batch") and local[key] == 0):
            raise SpecError(f"must be positive, got '{value}'", option=f"set {path}")
        if key == "momentum" and local[key] >= 1:
            raise SpecError(f"expected 0 to below 1, got '{value}'", option=f"set {path}")
    return local


def _shape(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d{1,2})x(\d{1,4})x(\d{1,4})", text)
    if match is None or match[2] != match[3] or match[1] not in ("1", "3"):
        raise SpecError(f"expected 1 or 3 channels and a square, such as 3x32x32, got '{text}'", option="shape")
    return int(match[1]), int(match[2]), int(match[3])
