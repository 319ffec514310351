"""Tensors that a round has stored, as images and lines of text; the shape decides, whatever the name.

| tensor | shown as |
|---|---|
| (n, ch, H, W), ch 1 or 3 | a row of images; those of one shape stand under each other |
| (a, b, ch, H, W) | a sheet of a rows and b columns of images |
| (a, b) | a heat map |
| (a, b, c) | heat maps: the mean over c, then each of c |
| (n,), () | a line of text |

If there is a vector NAME_clients (a,), rows of NAME_... are labelled with the clients it names, else counted.
Images are uint8, or floats in [0, 1]. Pillow and numpy only: neither torch nor matplotlib.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from fatbench.errors import MachineError, reason

Tensors = dict[str, np.ndarray]

ROW = 10  # images of a flat stack beside each other
GAP = 2  # pixels between two images
MARGIN = 4  # around an image
LARGEST = 256  # rows or columns of a matrix that is drawn
INK, SOFT = (29, 31, 35), (104, 110, 121)


def rounds(folder: Path) -> dict[int, Path]:
    """Round -> its file, in order, of a cell's folder; empty where nothing was kept."""
    file_by_round = {}
    for file in sorted((folder / "artifacts").glob("round-*.safetensors")):
        if match := re.fullmatch(r"round-(\d+)\.safetensors", file.name):
            file_by_round[int(match[1])] = file
    return file_by_round


def load(file: Path, sha256: str | None = None) -> Tensors:
    """The tensors of a round, by name. MachineError: damaged, of another cell, or not of this SHA-256."""
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import load_file

    try:
        if sha256 is not None and (digest := hashlib.sha256(file.read_bytes()).hexdigest()) != sha256:
            raise MachineError(f"{file}: not the file that was written: its SHA-256 is {digest}, {sha256} is stored")
        with safe_open(file, "numpy") as opened:
            header = json.loads((opened.metadata() or {}).get("fatbench", "{}"))
        tensors = dict(sorted(load_file(file).items()))
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise MachineError(f"{file}: damaged, or not written by fatbench ({reason(error, file)})") from None
    location = file.parent.parent.name, file.name.removeprefix("round-").removesuffix(".safetensors").lstrip("0")
    origin = str(header.get("cell", location[0])), str(header.get("round", location[1]))  # earlier files have neither
    if origin != location:
        raise MachineError(f"{file}: holds what cell {origin[0]} kept of round {origin[1]}, not its own cell's")
    return tensors


def latest(folders: Sequence[Path], name: str) -> tuple[int, Tensors] | None:
    """(round, tensors) of the last round that kept a tensor of this name, in the first of some cells that has one."""
    for folder in folders:
        for round, file in reversed(rounds(folder).items()):
            if name in (tensors := load(file)):
                return round, tensors
    return None


def is_images(tensor: np.ndarray) -> bool:
    """Whether the last three dimensions are channels, height and width."""
    return tensor.ndim in (4, 5) and tensor.shape[-3] in (1, 3) and min(tensor.shape) > 0


def is_matrix(tensor: np.ndarray) -> bool:
    """Whether a tensor can be drawn as a heat map."""
    return tensor.ndim in (2, 3) and min(tensor.shape) > 0 and max(tensor.shape) <= LARGEST


def clients(name: str, tensors: Tensors) -> list[str]:
    """The labels of a tensor's rows: the clients that NAME_clients lists, counted from 1, else 0, 1, ..."""
    rows = len(tensors[name])
    client_numbers = tensors.get(f"{name.split('_')[0]}_clients")
    if client_numbers is None or client_numbers.shape != (rows,):
        return [str(k) for k in range(rows)]
    return [str(k + 1) for k in client_numbers]  # as tables and figures count clients


def lines(tensors: Tensors) -> list[str]:
    """Tensors that are no image, in words: the numbers of a vector, the shape and range of others."""
    descriptions = []
    for name, tensor in tensors.items():
        if is_images(tensor) or is_matrix(tensor):
            continue
        if tensor.ndim <= 1 and tensor.size <= 64:
            descriptions.append(f"{name}: {' '.join(f'{value:.4g}' for value in np.atleast_1d(tensor))}".rstrip())
        elif tensor.size:
            descriptions.append(f"{name}: {tensor.shape}, from {tensor.min():.4g} to {tensor.max():.4g}")
        else:
            descriptions.append(f"{name}: {tensor.shape}, empty")
    return descriptions


def sheet(stack: Mapping[str, np.ndarray], tile: int = 64, rows: Sequence[str] = ()) -> bytes:
    """A PNG of images in rows and columns with their indices: a tensor (a, b, ch, H, W), or (n, ch, H, W) of one shape.

    tile: about the side of an image, in pixels.
    """
    first_tensor = next(iter(stack.values()))
    bands: list[list[tuple[str, np.ndarray, int]]] = []  # label, images, the index of the first
    if first_tensor.ndim == 5:
        bands.append([(rows[row] if rows else str(row), images, 0) for row, images in enumerate(first_tensor)])
    else:
        for start in range(0, len(first_tensor), ROW):
            bands.append([(name, images[start : start + ROW], start) for name, images in stack.items()])
    tile_height, tile_width = (_scaled(side, max(first_tensor.shape[-2:]), tile) for side in first_tensor.shape[-2:])
    labels = [label for band in bands for label, _, _ in band] if len(stack) > 1 or first_tensor.ndim == 5 else [""]
    label_width = _text_width(labels) + (6 if any(labels) else 0)
    longest_band = max(len(images) for band in bands for _, images, _ in band)
    height = TOP + sum(LINE + len(band) * (tile_height + GAP) for band in bands)
    page = Image.new(
        "RGB", (max(label_width + longest_band * (tile_width + GAP), _text_width(list(stack)) + 4), height), "white"
    )
    draw = ImageDraw.Draw(page)
    draw.text((0, 0), ", ".join(stack), INK, _font())
    y = TOP
    for band in bands:
        start = band[0][2]
        for column in range(len(band[0][1])):
            _centred(draw, label_width + column * (tile_width + GAP) + tile_width / 2, y, str(start + column), SOFT)
        y += LINE
        for label, images, _ in band:
            if any(labels):
                draw.text((0, y + tile_height / 2 - LINE / 2), label, SOFT, _font())
            for column, image in enumerate(images):
                page.paste(_image(image, (tile_width, tile_height)), (label_width + column * (tile_width + GAP), y))
            y += tile_height + GAP
    stream = io.BytesIO()
    ImageOps.expand(page, MARGIN, "white").save(stream, "PNG", optimize=True)
    return stream.getvalue()


def flat(tensor: np.ndarray) -> np.ndarray:
    """A matrix as it is; of (a, b, c) the mean over the finite values along c, NaN where there are none."""
    if tensor.ndim == 2:
        return tensor
    is_finite = np.isfinite(tensor)
    count = is_finite.sum(-1)
    total = np.where(is_finite, tensor, 0).sum(-1, dtype=np.float64)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def pixels(image: np.ndarray) -> np.ndarray:
    """(ch, H, W) uint8, or floats in [0, 1], as (H, W, 3) uint8."""
    if image.dtype != np.uint8:
        image = np.rint(255 * np.clip(np.nan_to_num(image.astype(np.float64)), 0, 1)).astype(np.uint8)
    return np.repeat(image, 3 // len(image), axis=0).transpose(1, 2, 0)


def tiled(tensor: np.ndarray) -> tuple[np.ndarray, tuple[int, int], tuple[int, int]]:
    """(one image (H, W, 3) uint8, (rows, columns) of images in it, (height, width) of each with its margin)."""
    flat_rows = range(0, len(tensor), ROW)
    rows = list(tensor) if tensor.ndim == 5 else [tensor[start : start + ROW] for start in flat_rows]
    tile_height, tile_width = tensor.shape[-2] + GAP, tensor.shape[-1] + GAP
    page = np.full((len(rows) * tile_height, len(rows[0]) * tile_width, 3), 255, np.uint8)
    for y, images in enumerate(rows):
        for x, image in enumerate(images):
            down = slice(y * tile_height, (y + 1) * tile_height - GAP)
            across = slice(x * tile_width, (x + 1) * tile_width - GAP)
            page[down, across] = pixels(image)
        page[down, across] = pixels(image)
    return page, (len(rows), len(rows[0])), (tile_height, tile_width)


def _image(image: np.ndarray, size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(pixels(image))).resize(
        size, Image.Resampling.NEAREST if size[0] >= image.shape[-1] else Image.Resampling.BOX
    )


def _scaled(side: int, longest: int, tile: int) -> int:
    """A side in pixels: whole multiples of small images, large ones shrunk to `tile`."""
    return side * (tile // longest) if longest <= tile else max(1, round(side * tile / longest))


# --- text --------------------------------------------------------------------------------------------------------

LINE = 13  # pixels of a line of text
TOP = 17  # of the title


def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font, the same on every machine."""
    return ImageFont.load_default(size=11)


def _text_width(words: Sequence[str]) -> int:
    return math.ceil(max(_font().getbbox(text)[2] for text in words)) if any(words) else 0


def _centred(draw: ImageDraw.ImageDraw, x: float, y: float, words: str, ink: tuple[int, int, int]) -> None:
    draw.text((x - _font().getbbox(words)[2] / 2, y), words, ink, _font())
