"""Checks that models share: image sizes, and batches that are too small for batch normalisation."""

from __future__ import annotations

from fatbench.suite.facts import Facts


def image_side(model: str, shape: tuple[int, int, int], smallest: int) -> int:
    """The side of square images of `shape` (C, H, W). Raises ValueError if not square or below `smallest` pixels."""
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
    """Refuse batches of one for images up to this side: their last feature map is too small for batch norm."""
    if cell.side <= side and cell.last_batch == 1:  # one number a channel has no variance
        return (
            f"{cell.model.name}: a client's last batch has one example, which batch normalisation cannot train on at "
            f"{cell.side}x{cell.side}: change 'batch', 'train' or the number of clients"
        )
    return None


def tiled(cell: Facts, *, patch: int) -> str | None:
    return untiled(patch, cell.side)


def untiled(patch: int, side: int) -> str | None:
    """The reason why patches do not tile images of this side, or None."""
    if side % patch:
        return f"patch: patches of {patch}x{patch} do not tile images of {side}x{side} (see 'size')"
    return None


def equal_heads(*, dim: int, heads: int) -> str | None:
    return f"dim: {dim} is not a multiple of its {heads} attention heads" if dim % heads else None
