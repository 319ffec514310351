"""Images and labels of a running program: each form gives the right images, or one sentence."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import data_layouts as layouts
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fatbench.data import own
from fatbench.data.own_objects import AGAIN, dataset
from fatbench.errors import SpecError

N = 90  # more than are read twice
X, Y = layouts.pixels(N, 8, 8), np.arange(N) % 10  # begins with the image that stands in for training images


def read(source: Any, n: int | None = None) -> Any:
    return dataset(source, n, lambda x: 10)


class Items(torch.utils.data.Dataset[Any]):
    """Images that a function makes of a row, and labels."""

    def __init__(self, image: Callable[[int], Any], labels: Any = Y, order: int = 1):
        self.image, self.labels, self.order = image, labels, order

    def __len__(self) -> int:
        return N

    def __getitem__(self, row: int) -> Any:
        return (self.image(row), self.labels[row])[:: self.order]


def floats(row: int) -> torch.Tensor:
    return torch.tensor(X[row])[None] / 255


def grey(row: int) -> Image.Image:
    return Image.fromarray(X[row])


def palette(row: int, *colour: int) -> Image.Image:
    """An image whose numbers say nothing of its brightness: number k has the grey value, or colour, of 255 - k."""
    image = Image.frombytes("P", (8, 8), (255 - X[row]).tobytes())
    image.putpalette([(255 - k) // part for k in range(256) for part in colour or (1, 1, 1)])
    return image


def half_seen(row: int) -> Image.Image:
    image = palette(row)
    image.info["transparency"] = bytes(range(256))
    return image


RGB = np.repeat(X[:, None], 3, axis=1)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (grey, X[:, None]), (lambda row: grey(row).convert("LA"), X[:, None]), (palette, X[:, None]),
        (lambda row: grey(row).convert("LA").convert("La"), X[:, None]),
        (lambda row: grey(row).convert("RGBA").convert("RGBa"), RGB),
        (floats, X[:, None]), (half_seen, X[:, None]),
        (lambda row: palette(row, 1, 2, 4), np.stack([X, X // 2, X // 4], 1)),
        (lambda row: Image.fromarray(X[row].astype(np.uint16) * 257), X[:, None]),
        (lambda row: grey(row).convert("RGB"), RGB), (lambda row: grey(row).convert("RGBA"), RGB),
        (lambda row: grey(row).convert("CMYK"), RGB), (lambda row: grey(row).convert("RGB" if row % 3 else "L"), RGB),
        (lambda row: grey(row).convert("1", dither=0), np.where(X[:, None] > 127, 255, 0)),
        (lambda row: torch.tensor(X[row])[None].bfloat16() / 256, None),
        (lambda row: floats(row).requires_grad_(), X[:, None]), (lambda row: X[row].tolist(), SpecError),
        (lambda row: X[row].astype(np.uint16), "got uint16"), (lambda row: grey(row).convert("I"), "32-bit integers"),
        (lambda row: grey(row).convert("F"), "32-bit floats"), (lambda row: floats(row) - 0.5, r"in \[0, 1\]"),
        (lambda row: floats(row).to_sparse(), "Sparse"), (lambda row: floats(row) + 0j, "got complex64"),
        (lambda row: X[row, : 7 + row % 2], "several shapes"), (lambda row: None, "expected images"),
    ],
)  # fmt: skip
def test_images_of_each_form_are_these_or_a_sentence(image: Callable[[int], Any], expected: Any) -> None:
    """Of a data set, of a list, and the same in `fatbench.dataset`."""
    sources: list[Any] = [Items(image), ([image(row) for row in range(N)], Y)]
    if isinstance(expected, str | type):
        for source in sources:
            with pytest.raises(SpecError, match=expected if isinstance(expected, str) else "got int64"):
                read(source)
        return
    for source in sources:
        found = read(source)
        if expected is None:
            assert abs(found.test_images[:, 0] - X.astype(int)).max() <= 2  # 8 bits of mantissa
        else:
            assert found.test_images.tolist() == expected.tolist()
        assert found.test_labels.tolist() == Y.tolist() and found.classes == 10
    a, b = sources[1][0][3:63], sources[1][0][63:]
    mine = own.dataset(a, Y[3:63], b, Y[63:], name="mine")
    assert mine.test_images.tolist() == read(sources[1]).test_images[63:].tolist()


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (torch.tensor(Y), ""), (torch.tensor(Y)[:, None], ""), (list(map(int, Y)), ""), (Y.astype(np.uint8), ""),
        ([3.7] * N, r"integers \(N,\), got float64"), (Y.astype(float), "got float64"), ([None] * N, "got object"),
        (np.eye(10)[Y], r"\(90, 10\) \(of one-hot labels, give the argmax\)"), ([True] * N, "got bool"),
        (["cat"] * N, "got <U3"), ([{"boxes": []} for _ in Y], "got object"), (Y - 1, "labels begin at 0"),
        ([[1] * (1 + row % 2) for row in range(N)], "several shapes"), (Y + 1, "labels must be 0 to 9"),
    ],
)  # fmt: skip
def test_labels_are_whole_numbers_or_a_sentence(labels: Any, said: str) -> None:
    for source in (Items(floats, labels), ([*map(floats, range(N))], labels)):
        if said:
            with pytest.raises(SpecError, match="inhomogeneous|" * (said == "several shapes") + said):
                read(source)
        else:
            assert read(source).test_labels.tolist() == Y.tolist()


def test_a_label_before_its_image_is_said() -> None:
    tensors = TensorDataset(torch.tensor(Y), torch.tensor(X))
    for source in (Items(floats, order=-1), tensors, DataLoader(tensors, 7), Items(grey, order=-1)):
        with pytest.raises(SpecError, match=r"expected pairs \(image, label\), got \(label, image\)"):
            read(source)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((floats(row), int(Y[row])) for row in range(N))


def listed(items: list[Any]) -> tuple[Any, Any]:
    """What a program makes of a list of items itself."""
    return torch.stack([image for image, _ in items]), torch.tensor([label for _, label in items])


ITEMS = Items(floats)


@pytest.mark.parametrize(
    "source",
    [
        DataLoader(ITEMS, 32, drop_last=True), DataLoader(ITEMS, 7, shuffle=True), DataLoader(ITEMS, batch_size=None),
        DataLoader(ITEMS, batch_sampler=BatchSampler(RandomSampler(ITEMS), 9, drop_last=False)),
        DataLoader(ITEMS, 7, sampler=SubsetRandomSampler(range(N))),
        DataLoader(ITEMS, 7, collate_fn=listed, shuffle=True),
        DataLoader(Stream(), 7), Stream(), [*Stream()].__iter__(), DataLoader(ITEMS, 100), ITEMS,
    ],
)  # fmt: skip
def test_a_loader_gives_all_images_of_its_data_set(source: Any) -> None:
    """In their order, whatever it shuffles or drops; the first n are the first of all."""
    found = read(source) if isinstance(source, Iterator) else read(source, 70)
    assert found.test_images[:70].tolist() == X[:70, None].tolist()
    assert found.test_labels[:70].tolist() == Y[:70].tolist()
    assert len(found.test_labels) == (N if isinstance(source, Iterator) else 70)
    if not isinstance(source, Iterator):
        assert len(read(source).test_labels) == N
        assert read(source).fingerprint == read(ITEMS).fingerprint


class Own(DataLoader[Any]):
    """A loader that does something to its batches."""

    def __iter__(self) -> Any:
        return ((1 - x, y) for x, y in super().__iter__())


def test_a_loader_with_a_way_of_its_own_is_read_by_itself() -> None:
    assert read(Own(ITEMS, 7)).test_images.tolist() == (255 - X[:, None]).tolist()
    for how, said in (("shuffle", "read again"), ("drop_last", "drop_last=False")):
        with pytest.raises(SpecError, match=said):
            read(Own(ITEMS, 7, **{how: True}))


def flipped(row: int) -> torch.Tensor:
    return floats(row).flip(-1) if torch.rand(()) < 0.5 else floats(row)


class Shuffled:
    def __iter__(self) -> Iterator[Any]:
        return ((floats(row), Y[row]) for row in torch.randperm(N))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (DataLoader(ITEMS, 7, sampler=WeightedRandomSampler([1.0] * N, N)), "WeightedRandomSampler draws other images"),
        (DataLoader(ITEMS, 7, sampler=RandomSampler(ITEMS, replacement=True)), "RandomSampler draws other images"),
        (DataLoader(ITEMS, 7, sampler=RandomSampler(ITEMS, num_samples=20)), "RandomSampler draws other images"),
        (Items(flipped), "others when they are read again"), (DataLoader(Items(flipped), 9), "read again"),
        (DataLoader(Items(flipped), 9, shuffle=True), "read again"), (Shuffled(), "read again"),
        (DataLoader(Stream(), 32, drop_last=True), "give drop_last=False"),
        (type("Module", (), {"dataset": ITEMS, "batch_size": 3})(), "expected a name"),
    ],
)  # fmt: skip
def test_what_is_another_set_each_time_is_refused(source: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        read(source)


def test_few_images_are_read_twice() -> None:
    reads: list[int] = []
    read(Items(lambda row: reads.append(row) or floats(row)))
    assert reads == [*range(N), *range(AGAIN)]


def test_rows_with_integers_beyond_a_byte_are_no_bytes() -> None:
    rows = [{"image": image.astype(np.int64), "label": label} for image, label in zip(X, Y, strict=True)]
    assert read(iter(rows)).test_images.tolist() == X[:, None].tolist()
    dark = ({"image": image // 16 + np.uint16(0), "label": label} for image, label in zip(X, Y, strict=True))
    with pytest.raises(SpecError, match="got uint16"):
        read(dark)
    rows[3]["image"][0, 0] = 256
    with pytest.raises(SpecError, match="got int64"):
        read(itertools.chain(rows))


def test_the_image_that_stands_in_for_training_makes_no_doubt() -> None:
    assert read((X // 3, Y)).doubts == {} and list(read((X // 5, Y)).doubts) == ["test images have few grey levels"]
