"""`fatbench invert`: what one's own update gives away."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fatbench import whole_file
from fatbench.cli.common import known_format, plan_of, print_json
from fatbench.cli.options import Db, Format, Preset, Smoke, Where, output_folder
from fatbench.errors import MachineError, NothingMatched, SpecError
from fatbench.store.opening import opened

if TYPE_CHECKING:
    from torch import Tensor

    from fatbench.suite.cells import Plan


def invert(
    file: Annotated[
        Path, typer.Argument(help="The weights that the client received: .pt or .safetensors.", show_default=False)
    ],
    *,
    model: Annotated[str, typer.Option("--model", help="Network: timm/NAME or FILE.py:FUNCTION.")],
    shape: Annotated[str, typer.Option("--shape", help="Shape of an image, such as 3x32x32.")],
    after: Annotated[Path | None, typer.Option("--after", help="The weights that the client returned.")] = None,
    gradient: Annotated[Path | None, typer.Option("--gradient", help="Instead: a gradient, by parameter.")] = None,
    classes: Annotated[int, typer.Option("--classes", min=2, help="Number of classes.")] = 10,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Number of images behind the update.")] = None,
    labels: Annotated[
        str | None,
        typer.Option("--labels", help="Labels of the images, such as 3,1; default: restored from the update."),
    ] = None,
    threat: Annotated[str, typer.Option("--threat", help="Threat model of the attacker: A, B, C or D.")] = "B",
    lr: Annotated[float | None, typer.Option("--lr", min=1e-12, help="Learning rate of local SGD (threat C).")] = None,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Local epochs.")] = 1,
    local_batch: Annotated[
        int | None, typer.Option("--local-batch", min=1, help="Batch size of local training.")
    ] = None,
    momentum: Annotated[float, typer.Option("--momentum", min=0, max=0.9999, help="Local momentum.")] = 0.0,
    weight_decay: Annotated[float, typer.Option("--weight-decay", min=0, help="Local weight decay.")] = 0.0,
    inversion: Annotated[
        list[str] | None, typer.Option("--inversion", help="NAME or {name: ..., ...}; default: those that fit.")
    ] = None,
    original: Annotated[
        list[Path] | None, typer.Option("--original", help="Image file to compare with; may be repeated.")
    ] = None,
    mean: Annotated[str | None, typer.Option("--mean", help="Mean of the preprocessing, per channel.")] = None,
    std: Annotated[str | None, typer.Option("--std", help="Standard deviation of the preprocessing.")] = None,
    like: Annotated[
        str | None, typer.Option("--like", metavar="SUITE", help="Show the results of this suite's cells below.")
    ] = None,
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    db: Db = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", callback=output_folder, help="Folder for the reconstructions.")
    ] = Path("inverted"),
    format: Format = "text",
) -> None:
    """Attack an update of your own: what does it give away?

    Example: fatbench invert weights.pt --model net.py:Net --shape 3x32x32 --after returned.pt
    """
    known_format(format, ("text", "json"))
    if (after is None) == (gradient is None):
        raise SpecError("give the update as --after WEIGHTS or as --gradient FILE, one of the two")
    size = _shape(shape)
    from fatbench.suite import threats

    if threat not in ("A", "B", "C", "D"):
        reason = "a manipulated model is needed" if threat in threats.KNOWS else "no such threat model"
        raise SpecError(f"--threat: expected A, B, C or D, got '{threat}' ({reason}; see docs/methods.md, Inversions)")
    if lr is None and (epochs > 1 or local_batch or momentum or weight_decay):
        raise SpecError("--epochs, --local-batch, --momentum and --weight-decay need --lr")
    if lr is not None and threat not in ("C", "D"):
        raise SpecError(f"--lr: an attacker of threat model {threat} does not know it: --threat C")
    from fatbench.cli.evaluating import _mapping, _numbers
    from fatbench.runner import invert as inverting

    given_labels = (
        tuple(int(label_text) for label_text in (labels or "").split(",") if label_text.strip())
        if _are_labels(labels)
        else ()
    )
    count = batch or len(given_labels)
    local = lr and {
        "lr": lr, "epochs": epochs, "batch": local_batch or count, "momentum": momentum, "weight_decay": weight_decay,
    }  # fmt: skip
    preprocessing = {"mean": _numbers("--mean", mean), "std": _numbers("--std", std)}
    if len(preprocessing["mean"]) != len(preprocessing["std"]):
        raise SpecError("--mean and --std go together, one number per channel")
    update, kind = (after, "after") if after is not None else (gradient, "gradient")
    assert update is not None
    task = inverting.InversionTask(
        file, update, kind, model, size, classes, threat, batch, given_labels,  # type: ignore[arg-type]
        tuple(_mapping(attack_text) for attack_text in inversion or ()), preprocessing, local or None,
    )  # fmt: skip
    originals = _images(original or [], size, count)
    if like is None and (preset or smoke or where or db):
        raise SpecError("--preset, --smoke, -k and --db choose results of a suite: name it with --like SUITE")
    # before anything is computed: a misspelt suite is an error of the first second
    beside = [] if like is None else _rows_of_suite(plan_of(like, preset, smoke, None, where), db)
    loaded = inverting.load(task)
    attack_calls = inverting.fitting(task, loaded)
    answers = inverting.invert(task, loaded, attack_calls)
    residual = inverting.residual(task, loaded)
    rows: list[dict[str, Any]] = []
    pictures: dict[Path, str | bytes] = {}
    for position, answer in enumerate(answers):
        picture_file = output / f"{position + 1}-{re.sub('[^a-z0-9]+', '-', answer.name.lower()).strip('-')}.png"
        pictures[picture_file] = _png(answer.images)
        row = {"attack": answer.name, "threat": answer.threat, "labels": answer.labels, "file": str(picture_file)}
        rows.append(row | (inverting.scores(answer, originals) if originals is not None else {}))
    if originals is not None:
        pictures[output / "originals.png"] = _png(originals)
    whole_file.write_all(pictures, f"-o {output}")  # all or none
    label_list = loaded.observed.labels[0].tolist()
    verdict = _verdict(residual, inverting.ONE_IMAGE)
    if format == "json":
        print_json(
            {"labels": label_list, "residual": residual, "notes": list(loaded.notes), "attacks": rows, "like": beside}
        )
        return
    _print(rows + beside)
    print(f"\nlabels, {'given' if given_labels else 'restored'}: {', '.join(map(str, label_list))}")
    for line in (verdict, *loaded.notes):
        if line:
            print(line, file=sys.stderr if line in loaded.notes else sys.stdout)


MEASURES = ("psnr", "ssim", "lpips", "matched_psnr", "matched_ssim", "recovered")


def _rows_of_suite(plan: Plan, db: str | None) -> list[dict[str, Any]]:
    """A row for each cell of a suite that inverted updates: means over its clients. NothingMatched: there is none."""
    from fatbench.report.numbers.cell_rows import OVERALL, numbers_of
    from fatbench.store.schema import NUMBERS
    from fatbench.suite import threats

    cells = [cell for cell in plan.cells if cell.spec["algorithm"]["name"] == "gradient_inversion"]
    # an axis that all cells share would only widen the table
    varying = [axis for axis in cells[0].key if len({cell.key.get(axis) for cell in cells}) > 1] if cells else []
    with opened(db) as store:
        measures = NUMBERS.c.metric.in_(MEASURES) & OVERALL
        numbers = [] if store is None else numbers_of([cell.id for cell in cells], store, measures)
    # the last round's are those of all clients
    value_by_cell = {(row.cell, row.metric): row.value for row in numbers}
    rows = []
    for cell in cells:
        if (cell.id, "psnr") in value_by_cell:
            algorithm = cell.spec["algorithm"]
            labels = ", ".join(str(cell.key.get(axis, "")) for axis in varying) or algorithm["inversion"]["name"]
            clients = f"{plan.suite}: mean of {algorithm['rounds'] * algorithm['target_clients']} clients"
            means = {name: value_by_cell[cell.id, name] for name in MEASURES if (cell.id, name) in value_by_cell}
            rows.append({"attack": labels, **threats.of_cell(cell.spec), "file": clients, **means})
    if not rows:
        raise NothingMatched(f"--like {plan.suite}: no cell of preset {plan.preset} has inverted updates here yet")
    return rows


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


def _are_labels(labels: str | None) -> bool:
    if labels is not None and not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", labels):
        raise SpecError(f"--labels: expected whole numbers such as 3,1, got '{labels}'")
    return True


def _shape(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d{1,2})x(\d{1,4})x(\d{1,4})", text)
    if match is None or match[2] != match[3] or match[1] not in ("1", "3"):
        raise SpecError(f"--shape: expected 1 or 3 channels and a square, such as 3x32x32, got '{text}'")
    return int(match[1]), int(match[2]), int(match[3])


def _images(files: list[Path], shape: tuple[int, int, int], count: int) -> Tensor | None:
    """(N, C, H, W) in [0, 1]. SpecError: an image of another size, or another number of them."""
    import numpy
    import torch
    from PIL import Image

    from fatbench.data.common import eight_bits

    if not files:
        return None
    if count and len(files) != count:
        raise SpecError(f"--original: {len(files)} images, and the update is of {count}")
    if shape[1] < 11:
        raise SpecError(f"--original: SSIM needs images of at least 11 x 11, these are {shape[1]} x {shape[2]}")
    tensors = []
    for file in files:
        try:
            with Image.open(file) as image:
                width, height = image.size
                if (height, width) != shape[1:]:  # before it is unpacked
                    wanted_size = f"{shape[1]} x {shape[2]}"
                    raise SpecError(f"--original {file}: {height} x {width} pixels, --shape says {wanted_size}")
                pixels = numpy.asarray(eight_bits(image, "RGB" if shape[0] == 3 else "L"))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise MachineError(f"--original {file}: {getattr(error, 'strerror', None) or 'not an image'}") from None
        tensors.append(torch.from_numpy(pixels.copy()).view(*shape[1:], shape[0]).permute(2, 0, 1).float() / 255)
    return torch.stack(tensors)


def _png(images: Tensor) -> bytes:
    from fatbench.report.figures.artifacts import images as drawn

    stack = (images.clamp(0, 1) * 255).round().byte().cpu().numpy()
    return drawn({"images": stack})[0].png()
