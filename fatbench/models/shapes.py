"""The checks that models share: whether one can read images of this size, and train on the smallest batch."""

from __future__ import annotations

from fatbench.suite.facts import Facts


def image_side(model: str, shape: tuple[int, int, int], smallest: int) -> int:
    """The side of the square images of `shape` (C, H, W). ValueError: not square, or smaller than `smallest` pixels."""
    _, height, width = shape
    if height != width:
        raise ValueError(f"{model}: needs square images, got {height}x{width}")
    if height < smallest:
        raise ValueError(f"{model}: needs images of at least {smallest}x{smallest}, got {height}x{width}")
    return height


def at_least_2(cell: Facts) -> str | None:
    return _too_small(cell, 2)


def at_least_4(cell: Facts) -> str | None:
    return _too_small(cell, 4)


def at_least_8(cell: Facts) -> str | None:
    return _too_small(cell, 8)


def _too_small(cell: Facts, smallest: int) -> str | None:
    if cell.side < smallest:
        images = f"{smallest}x{smallest}, got {cell.side}x{cell.side}"
        return f"{cell.model.name}: needs images of at least {images}"
    return None


def no_batch_of_one_at_8(cell: Facts) -> str | None:
    return _batch_of_one(cell, 8)


def no_batch_of_one_at_32(cell: Facts) -> str | None:
    return _batch_of_one(cell, 32)


def _batch_of_one(cell: Facts, side: int) -> str | None:
    """Of images up to this side the last feature map is one number, and batch normalisation needs two."""
    if cell.side <= side and cell.last_batch == 1:
        return (
            f"{cell.model.name}: a client's last batch has one example, which batch normalisation cannot train on at "
            f"{cell.side}x{cell.side}: set another 'batch', 'train' or number of clients"
        )
    return None


def tiled(cell: Facts, *, patch: int) -> str | None:
    return untiled(patch, cell.side)


def untiled(patch: int, side: int) -> str | None:
    """Why patches do not fit images of a side; None: they do."""
    if side % patch:
        return f"patch: patches of {patch}x{patch} do not tile images of {side}x{side} (see 'size')"
    return None


def equal_heads(*, dim: int, heads: int) -> str | None:
    return f"dim: {dim} is not a multiple of its {heads} attention heads" if dim % heads else None
