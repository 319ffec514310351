"""What `fatbench invert` shows beside its attacks: originals to compare with, results of a suite, images as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
from PIL import Image

from fatbench.api.views import planned_suite
from fatbench.errors import MachineError, NothingMatched, SpecError
from fatbench.report.figures import artifacts
from fatbench.report.numbers.stored import OVERALL, numbers_of
from fatbench.store.opening import opened
from fatbench.store.schema import NUMBERS
from fatbench.suite import threats
from fatbench.suite.filters import Where

if TYPE_CHECKING:
    from torch import Tensor


MEASURES = ("psnr", "ssim", "lpips", "matched_psnr", "matched_ssim", "recovered")


def rows_of_suite(name: str, where: Where) -> list[dict[str, Any]]:
    """A row for each cell of a suite that inverted updates: means over its clients. NothingMatched: there is none."""
    with opened(None) as store:
        _, plan = planned_suite(name, None, None, where, store)
        cells = [cell for cell in plan.cells if cell.spec["algorithm"]["name"] == "gradient_inversion"]
        measures = NUMBERS.c.metric.in_(MEASURES) & OVERALL
        numbers = [] if store is None else numbers_of([cell.id for cell in cells], store, measures)
    # an axis that all cells share would only widen the table
    varying = [axis for axis in cells[0].key if len({cell.key.get(axis) for cell in cells}) > 1] if cells else []
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
        said = f"no cell of preset {plan.preset} has inverted updates here yet"
        raise NothingMatched(said, option=f"like {plan.suite}")
    return rows


def images_of(files: list[Path], shape: tuple[int, int, int], count: int) -> Tensor | None:
    """(N, C, H, W) in [0, 1]. SpecError: an image of another size, or another number of them."""
    import torch

    from fatbench.data.common import eight_bits

    if not files:
        return None
    if count and len(files) != count:
        raise SpecError(f"{len(files)} images, and the update is of {count}", option="original")
    if shape[1] < 11:
        raise SpecError(f"SSIM needs images of at least 11 x 11, these are {shape[1]} x {shape[2]}", option="original")
    tensors = []
    for file in files:
        try:
            with Image.open(file) as image:
                width, height = image.size
                if (height, width) != shape[1:]:  # before it is unpacked
                    wanted_size = f"{shape[1]} x {shape[2]}"
                    raise SpecError(f"{height} x {width} pixels, --shape says {wanted_size}", option=f"original {file}")
                pixels = numpy.asarray(eight_bits(image, "RGB" if shape[0] == 3 else "L"))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            said = f"{getattr(error, 'strerror', None) or 'not an image'}"
            raise MachineError(said, option=f"original {file}") from None
        tensors.append(torch.from_numpy(pixels.copy()).view(*shape[1:], shape[0]).permute(2, 0, 1).float() / 255)
    return torch.stack(tensors)


def png(images: Tensor) -> bytes:
    """Images (N, C, H, W) in [0, 1] as one PNG."""
    stack = (images.clamp(0, 1) * 255).round().byte().cpu().numpy()
    return artifacts.sheet({"images": stack})
