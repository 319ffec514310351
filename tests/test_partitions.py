"""Partitions: the published tables and ranges exactly, properties of every member, and what is refused."""

from __future__ import annotations

from typing import Any

import members
import numpy
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fatbench.engine.randomness import numpy_generator
from fatbench.methods.partitions import LABEL_TABLES, PARTITIONS, drawn_labels
from fatbench.suite import signatures
from fatbench.suite.entry import entry_of

CIFAR = numpy.arange(50_000) % 10  # balanced, like CIFAR-10's labels
# The published counts of SVHN's training labels 1 .. 9, 0, in that order: 73,257 together.
SVHN_COUNTS = [13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659, 4948]
SVHN = numpy.repeat(numpy.roll(numpy.arange(10), -1), SVHN_COUNTS)


def rng(seed: int = 0) -> numpy.random.Generator:
    return numpy.random.default_rng(seed)


def shards(name: str, labels: NDArray[Any], seed: int = 0, **arguments: Any) -> list[NDArray[Any]]:
    return PARTITIONS[name](labels, rng(seed), None, **arguments)


def histograms(labels: NDArray[Any], parts: list[NDArray[Any]]) -> list[list[int]]:
    return [numpy.bincount(labels[part], minlength=10).tolist() for part in parts]


# --- exact -------------------------------------------------------------------------------------------------------


def test_iid() -> None:
    """11 examples, 3 clients: 3 each and 2 to nobody. Not the order of the labels."""
    parts = shards("iid", numpy.zeros(11), clients=3)
    assert [len(part) for part in parts] == [3, 3, 3]
    every = shards("iid", CIFAR, clients=5)
    assert [len(part) for part in every] == [10_000] * 5
    assert all(900 < count < 1100 for histogram in histograms(CIFAR, every) for count in histogram)  # 1000 +- 30


def test_similarity() -> None:
    """1,003 labels, two outsiders: 1,001 for ten clients; at 0 sorted parts, at 0.5 half of them, at 1 IID."""
    labels = rng(1).permutation(numpy.append(numpy.arange(1000) % 10, [0, 5, 9]))
    for share, lone in ((0.0, 90), (0.5, 45), (1.0, 0)):
        parts = shards("similarity", labels, clients=12, similarity=share, outsiders=2)
        assert [len(part) for part in parts[:2]] == [1, 1] and sum(map(len, parts)) == 1003
        assert all(100 <= len(part) <= 102 for part in parts[2:])
        assert all(max(row) >= lone + 5 for row in histograms(labels, parts[2:]))
        if share == 0:  # of 1,001 sorted labels a part has at most three classes
            assert all(sum(count > 0 for count in row) <= 3 for row in histograms(labels, parts[2:]))
        if share == 1:
            assert all(max(row) < 30 for row in histograms(labels, parts[2:]))  # 10 +- 3
    exact = shards("similarity", CIFAR, clients=10, similarity=0)
    assert histograms(CIFAR, exact) == (5000 * numpy.eye(10, dtype=int)).tolist()


@pytest.mark.parametrize(
    ("classes", "table"),
    [
        (2, [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]),
        (4, [[0, 2, 5, 7], [0, 3, 5, 8], [1, 3, 6, 8], [1, 4, 6, 9], [2, 4, 7, 9]]),
    ],
)
def test_classes_per_client_tables(classes: int, table: list[list[int]]) -> None:
    """CIFAR-10 and 5 clients: 5000 of each class in Non-IID(2), 2500 in Non-IID(4). No draw is made."""
    labels = rng(1).permutation(CIFAR)
    parts = shards("classes_per_client", labels, clients=5, classes=classes)
    for held, histogram in zip(table, histograms(labels, parts), strict=True):
        assert histogram == [10_000 // classes if label in held else 0 for label in range(10)]
    again = shards("classes_per_client", labels, seed=7, clients=5, classes=classes)
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))


def test_classes_per_client_slices() -> None:
    """Labels 1 1 0 0 2 2 2, 3 clients of 1 class: slices of 2 of the stable order 2 3 0 1 4 5 6; example 6 is left."""
    parts = shards("classes_per_client", numpy.array([1, 1, 0, 0, 2, 2, 2]), clients=3, classes=1)
    assert [part.tolist() for part in parts] == [[2, 3], [0, 1], [4, 5]]
    held = [sum(map(bool, h)) for h in histograms(CIFAR, shards("classes_per_client", CIFAR, clients=3, classes=2))]
    assert held == [5, 6, 4]  # slices that cut classes: more of them than asked for


def test_classes_per_client_permuted() -> None:
    """A seed deals the classes anew: still 2 whole classes each, the same for one seed, not those of the table."""
    parts = shards("classes_per_client", CIFAR, clients=5, classes=2, class_perm_seed=1)
    held = [[label for label, count in enumerate(h) if count] for h in histograms(CIFAR, parts)]
    assert sorted(label for classes in held for label in classes) == list(range(10))
    assert held != [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]
    again = shards("classes_per_client", CIFAR, seed=9, clients=5, classes=2, class_perm_seed=1)
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))
    other = shards("classes_per_client", CIFAR, clients=5, classes=2, class_perm_seed=2)
    assert histograms(CIFAR, other) != histograms(CIFAR, parts)


def chunks(n: int, size: int, **arguments: Any) -> NDArray[Any]:
    """How many examples each client of `shah` has of each chunk of so many: chunk numbers instead of classes."""
    labels = numpy.arange(n) // size
    parts = shards("shah", labels, clients=n // size, **arguments)
    return numpy.array([numpy.bincount(labels[part], minlength=n // size) for part in parts])


@pytest.mark.parametrize(("clients", "percent"), [(5, 92), (8, 86), (10, 82), (20, 62), (25, 52), (50, 2)])
def test_shah_own_share(clients: int, percent: int) -> None:
    """SFAT: the fraction of its own chunk that a client gets at skew 2, and 2 per cent of every other."""
    size = 50_000 // clients
    own, other = size * percent // 100, size * 2 // 100
    assert (chunks(50_000, size) == numpy.where(numpy.eye(clients, dtype=bool), own, other)).all()


def test_shah_fixed_share() -> None:
    """own_fraction 0.92 with 20 clients of 2500: 2300 of the own chunk, 200 from 19 others (10 or 11 each).

    49,000 examples, 50 clients: a chunk of 980 is 19 or 20 of each; everyone has 980, every chunk is used up.
    """
    counts, own = chunks(50_000, 2500, own_fraction=0.92), numpy.eye(20, dtype=bool)
    assert (counts[own] == 2300).all() and set(counts[~own].tolist()) == {10, 11}
    assert (counts.sum(1) == 2500).all()
    assert shards("shah", CIFAR, clients=1)[0].tolist() == list(range(50_000))
    held_out = chunks(49_000, 980)
    assert set(numpy.unique(held_out).tolist()) == {19, 20}
    assert (held_out.sum(0) == 980).all() and (held_out.sum(1) == 980).all()
    labels = rng(2).permutation(CIFAR)  # differences: sfat-skew; with K = 50 and s = 2 it is IID
    assert histograms(labels, shards("shah", labels, clients=50)) == [[100] * 10] * 50


def test_a_class_that_is_cut_goes_on_in_the_order_of_the_examples() -> None:
    """Python's sort is stable: chunk k of 4 of 1000 examples of 3 classes in random order, all of it client k's own."""
    labels = rng(5).integers(0, 3, 1000)
    order = sorted(range(1000), key=labels.tolist().__getitem__)
    own = [sorted(order[k * 250 : (k + 1) * 250]) for k in range(4)]
    assert [part.tolist() for part in shards("shah", labels, clients=4, own_fraction=1.0)] == own
    slices = [sorted(order[k * 125 : (k + 1) * 125] + order[(k + 4) * 125 : (k + 5) * 125]) for k in range(4)]
    assert [part.tolist() for part in shards("classes_per_client", labels, clients=4, classes=2)] == slices


EIGHT_OF_49, NINE_OF_50 = [8, 6, 1, 6, 1, 2, 7, 4, 7, 7], [1, 1, 9, 6, 4, 4, 9, 1, 8, 7]
PUBLISHED: list[tuple[tuple[int, int], NDArray[Any], dict[str, int], list[int], int]] = [
    # published range, labels, settings, sizes: Zhu et al. 2023, Tables 14, 17, 18
    ((6000, 13000), CIFAR, {"clients": 5, "shards": 50, "split_seed": 24}, [6, 12, 10, 9, 13], 1000),
    ((1000, 8000), CIFAR, {"clients": 10, "shards": 50, "split_seed": 10}, [8, 7, 1, 6, 1, 2, 7, 4, 7, 7], 1000),
    ((5860, 26370), SVHN, {"clients": 5, "shards": 50, "split_seed": 142}, [4, 18, 8, 13, 7], 1465),
    ((1465, 13185), SVHN, {"clients": 10, "shards": 50, "split_seed": 0}, NINE_OF_50, 1465),
    ((50, 16700), SVHN, {"clients": 10, "shards": 1465, "max_shards": 1465, "split_seed": 1492},
     [331, 304, 72, 29, 39, 4, 334, 242, 1, 109], 50),
    # the same with 1000 validation examples held out, where the shards have another size
    ((6000, 13000), CIFAR[:49_000], {"clients": 5, "shards": 49, "split_seed": 24}, [6, 11, 10, 9, 13], 1000),
    ((1000, 8000), CIFAR[:49_000], {"clients": 10, "shards": 49, "split_seed": 10}, EIGHT_OF_49, 1000),
    ((5880, 12740), CIFAR[:49_000], {"clients": 5, "shards": 50, "split_seed": 24}, [6, 12, 10, 9, 13], 980),
    ((980, 7840), CIFAR[:49_000], {"clients": 10, "shards": 50, "split_seed": 10}, [8, 7, 1, 6, 1, 2, 7, 4, 7, 7], 980),
    ((5780, 26010), SVHN[:72_257], {"clients": 5, "shards": 50, "split_seed": 142}, [4, 18, 8, 13, 7], 1445),
    ((1445, 13005), SVHN[:72_257], {"clients": 10, "shards": 50, "split_seed": 0}, NINE_OF_50, 1445),
    ((50, 16700), SVHN[:72_257], {"clients": 10, "shards": 1445, "max_shards": 1465, "split_seed": 4113},
     [252, 58, 194, 44, 45, 17, 198, 302, 1, 334], 50),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "labels", "arguments", "counts", "shard"), PUBLISHED)
def test_published_ranges(
    sizes: tuple[int, int], labels: NDArray[Any], arguments: dict[str, int], counts: list[int], shard: int
) -> None:
    """split_seed gives the published smallest and largest client, whatever the seed of the cell."""
    parts = shards("unequal_shards", labels, **arguments)
    assert [len(part) for part in parts] == [count * shard for count in counts]
    assert (min(map(len, parts)), max(map(len, parts))) == sizes
    again = shards("unequal_shards", labels, seed=5, **arguments)
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))


def test_unequal_shards_are_label_shards() -> None:
    """50 shards of 1000 of balanced CIFAR-10: a shard has one class, so that clients hold whole thousands of each."""
    for seed in range(3):
        parts = shards("unequal_shards", CIFAR, seed=seed, clients=5, shards=50)
        assert all(count % 1000 == 0 for h in histograms(CIFAR, parts) for count in h)
        assert sum(map(len, parts)) == 50_000
    sizes = {tuple(map(len, shards("unequal_shards", CIFAR, seed=seed, clients=5, shards=50))) for seed in range(5)}
    assert len(sizes) > 1  # without split_seed the generator decides


class Drawn:
    """Stands in for a generator whose draws are given, so that the rounding can be followed."""

    def __init__(self, *draws: int) -> None:
        self.draws = numpy.array(draws)

    def integers(self, low: int, high: int, size: int) -> NDArray[Any]:
        assert (low, high, size) == (1, 31, len(self.draws))
        return self.draws

    def permutation(self, n: int) -> NDArray[Any]:
        return numpy.arange(n)


@pytest.mark.parametrize(
    ("draws", "total", "expected"),
    [
        ((5, 10, 15), 6, [1, 2, 3]),  # scaled exactly
        ((1, 1, 1), 5, [2, 2, 1]),  # 1.67 each, rounded 2 2 2, one too many: 1 1 1, then 1, 1, 0
        ((2, 3, 4), 4, [1, 1, 2]),  # .89 1.33 1.78, rounded 1 1 2
        ((1, 1, 1), 4, [2, 1, 1]),  # 1.33 each, rounded 1 1 1, one left over: to the first of the smallest
        ((13, 5, 6), 10, [5, 3, 2]),  # 5.42 2.08 2.5, rounded 5 2 2
        ((1, 29, 30), 10, [1, 5, 4]),  # .17 4.83 5 -> 0 5 5, at least one: 1 5 5, one too many: 1 + (0, 4, 3)
    ],
)
def test_unequal_shards_rounding(draws: tuple[int, ...], total: int, expected: list[int]) -> None:
    """One example a shard, so that sizes are numbers of shards."""
    stand_in: Any = Drawn(*draws)
    parts = PARTITIONS["unequal_shards"](numpy.zeros(total), stand_in, None, clients=3, shards=total, shard_size=1)
    assert [len(part) for part in parts] == expected


def test_dirichlet_concentration() -> None:
    """alpha = 1000: near 1000 of every class. alpha = 0.05: most of a class with one or two clients."""
    even = numpy.array(histograms(CIFAR, shards("dirichlet", CIFAR, clients=5, alpha=1000.0)))
    assert abs(even - 1000).max() < 150
    skewed = numpy.array(histograms(CIFAR, shards("dirichlet", CIFAR, clients=5, alpha=0.05)))
    assert (numpy.sort(skewed, axis=0)[-2:].sum(0) / 5000).mean() > 0.9
    assert even.sum() == skewed.sum() == 50_000


def test_dirichlet_draws_inside_a_class() -> None:
    """Two clients share each class evenly; cut unshuffled, the first would have the first half of its images."""
    labels = numpy.repeat([0, 1], 1000)
    first, _ = shards("dirichlet", labels, clients=2, alpha=1e6)
    for of_class in (first[first < 1000], first[first >= 1000] - 1000):
        assert 450 < len(of_class) < 550 and 200 < (of_class < 500).sum() < 300


def test_a_split_of_its_own_seed_is_that_of_a_cell_with_this_seed() -> None:
    """What `split` gives a cell of seed 4; another seed of the cell changes nothing."""
    function = entry_of(PARTITIONS["dirichlet"]).function
    first, second, cell = (
        function(CIFAR, numpy_generator(seed, "partition"), None, clients=5, alpha=0.3, **more)
        for seed, more in ((0, {"split_seed": 4}), (1, {"split_seed": 4}), (4, {}))
    )
    assert all(a.tolist() == b.tolist() == c.tolist() for a, b, c in zip(first, second, cell, strict=True))


def test_dirichlet_minimum() -> None:
    """Skewed draws are repeated until everyone has enough; an unreachable minimum is an error, not a loop."""
    assert min(map(len, shards("dirichlet", CIFAR[:500], clients=5, alpha=0.3, min_size=40))) >= 40
    said = r"dirichlet: no draw of 1000 gave each of 20 clients 25 examples at alpha=0.01; raise alpha or lower"
    with pytest.raises(ValueError, match=said):
        shards("dirichlet", CIFAR[:500], clients=20, alpha=0.01, min_size=25)


def test_by_writer() -> None:
    """Writers 7, 2 and 9 with 3, 2 and 1 images: at least 2 keeps writer 2 and writer 7, in this order."""
    labels, writers = numpy.zeros(6), numpy.array([7, 2, 7, 9, 2, 7])
    parts = PARTITIONS["by_writer"](labels, rng(), writers, min_images=2)
    assert [part.tolist() for part in parts] == [[1, 4], [0, 2, 5]]
    deal = PARTITIONS["by_writer"]
    one = [deal(labels, rng(seed), writers, min_images=1, clients=1)[0].tolist() for seed in range(20)]
    assert {tuple(part) for part in one} == {(1, 4), (0, 2, 5), (3,)}
    alone = PARTITIONS["by_writer"](labels, rng(), writers, min_images=3)  # all that are left, be it one
    assert [part.tolist() for part in alone] == [[0, 2, 5]]


# Danilenka et al. 2022, Table 1, and in how many of 100 clients a label is to be found with 3 and with 4 labels each
TABLE = [3.5, 4.5, 10, 21, 21, 20, 10, 4.5, 3.5, 2]
INCLUDED = {
    3: [0.12, 0.16, 0.33, 0.58, 0.58, 0.56, 0.33, 0.16, 0.12, 0.07],
    4: [0.18, 0.23, 0.46, 0.73, 0.73, 0.71, 0.46, 0.23, 0.18, 0.11],
}


def test_label_tables() -> None:
    """The printed vector; rolled so that 21, 21, 20 stand at 0, 1, 2 and at 7, 8, 9. Each sums to 1."""
    assert [100 * p for p in LABEL_TABLES["middle"]] == pytest.approx(TABLE)
    assert [100 * p for p in LABEL_TABLES["low"]] == pytest.approx(TABLE[3:] + TABLE[:3])
    assert [100 * p for p in LABEL_TABLES["high"]] == pytest.approx(TABLE[-4:] + TABLE[:-4])
    assert [100 * p for p in LABEL_TABLES["low"][:3]] == [100 * p for p in LABEL_TABLES["high"][7:]] == [21, 21, 20]


@pytest.mark.parametrize("classes", INCLUDED)
def test_label_table_inclusion(classes: int) -> None:
    """20,000 clients: one standard error is at most 0.0036, and the published values are rounded to 0.01."""
    held = drawn_labels(rng(), 20_000, classes, numpy.array(LABEL_TABLES["middle"]))
    assert (held.sum(1) == classes).all()
    assert abs(held.mean(0) - INCLUDED[classes]).max() < 0.005 + 0.0108


def test_label_table_divides_a_label_among_its_holders() -> None:
    """30 clients of 3 labels: exactly 3 each, those who share a label have as many of it, to one, and all of it."""
    parts = shards("label_table", CIFAR, clients=30, classes=3)
    counts = numpy.array(histograms(CIFAR, parts))
    assert ((counts > 0).sum(1) == 3).all()
    for label in range(10):
        held = counts[:, label][counts[:, label] > 0]
        assert held.sum() == (5000 if len(held) else 0)
        if len(held):
            assert held.max() - held.min() <= 1
    many = shards("label_table", CIFAR, clients=1000, classes=1, table="low")
    common = sum(int(CIFAR[part[0]]) < 3 for part in many)
    assert common == pytest.approx(620, abs=60)  # 21 + 21 + 20 per cent; one standard error is 15


def test_label_table_of_every_label_and_of_one() -> None:
    """10 of 10 labels: everyone holds everything, and equal parts are random parts. One client, one label: the other
    nine belong to nobody. Labels without examples are not drawn."""
    labels = numpy.arange(200) % 10
    parts = shards("label_table", labels, clients=4, classes=10)
    assert histograms(labels, parts) == [[5] * 10] * 4
    assert parts[0].tolist() != list(range(50))
    part = shards("label_table", CIFAR, clients=1, classes=1)[0]
    assert len(part) == 5000 and len(set(CIFAR[part])) == 1
    labels = numpy.array([2, 2, 5, 5])
    drawn = {int(labels[shards("label_table", labels, seed=seed, clients=1, classes=1)[0][0]]) for seed in range(40)}
    assert drawn == {2, 5}


@pytest.mark.parametrize(("p", "groups", "own"), [(0.2, 10, 0.2), (0.1, 10, 0.1), (0.9, 5, 0.9), (1.0, 2, 1.0)])
def test_group_skew(p: float, groups: int, own: float) -> None:
    """Every group of clients has p of one group of consecutive classes and (1 - p) / (M - 1) of each other one."""
    parts = shards("group_skew", CIFAR, clients=10, groups=groups, p=p)
    counts = numpy.array(histograms(CIFAR, parts))
    assert counts.sum() == 50_000
    by_group = counts.reshape(10, groups, 10 // groups).sum(2) / (50_000 / groups)  # client, group of classes
    favourite = by_group.argmax(1)
    together = numpy.array([by_group[favourite == g].sum(0) for g in range(groups)])
    if p > 1 / groups:
        assert (numpy.bincount(favourite, minlength=groups) == 10 // groups).all()
        assert numpy.diagonal(together) == pytest.approx(own, abs=0.02)
        assert together[~numpy.eye(groups, dtype=bool)] == pytest.approx((1 - p) / (groups - 1), abs=0.02)
        # inside a group all clients are alike, and which client is in which is random
        assert counts[favourite == 0].sum(1) == pytest.approx(5000, rel=0.06)
        other = histograms(CIFAR, shards("group_skew", CIFAR, seed=1, clients=10, groups=groups, p=p))
        assert (numpy.array(other).reshape(10, groups, -1).sum(2).argmax(1) != favourite).any()
    else:  # IID
        assert counts == pytest.approx(500, abs=100)
    everything = shards("group_skew", CIFAR, clients=2, groups=1, p=1.0)
    assert sorted(numpy.concatenate(everything).tolist()) == list(range(50_000))


# --- every partition ----------------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn, name: str) -> tuple[NDArray[Any], NDArray[Any], dict[str, Any]]:
    """Labels, writers and settings of a partition within its ranges; what it may refuse is left to other tests.

    A setting that is not known here has the value of the partition's example.
    """
    size = draw(st.integers(40, 400))
    generator = rng(draw(st.integers(0, 10_000)))
    labels, writers = generator.integers(0, draw(st.integers(1, 10)), size), generator.integers(0, 6, size)
    clients = draw(st.integers(1, 8))
    known: dict[str, st.SearchStrategy[Any]] = {
        "clients": st.just(clients),
        "classes": st.integers(1, 4),
        "class_perm_seed": st.none() | st.integers(0, 5),
        "skew": st.floats(0, 99.9 / max(clients - 1, 1)),
        "own_fraction": st.none() | st.floats(0.01, 1),
        "shards": st.integers(clients, 20),
        "shard_size": st.just(None) | st.integers(1, 2),
        "max_shards": st.integers(1, 40),
        "split_seed": st.none() | st.integers(0, 5),
        "alpha": st.floats(0.5, 100),
        "min_size": st.integers(1, 2),
        "min_images": st.integers(1, 3),
        "table": st.sampled_from(sorted(LABEL_TABLES)),
        "groups": st.integers(1, min(clients, int(labels.max()) + 1)),
        "p": st.floats(0.1, 1),
    }
    others = members.arguments("Partition", name)
    arguments = {
        setting.name: draw(known.get(setting.name, st.just(others[setting.name])))
        for setting in signatures.describe("Partition", name).settings
        if setting.name in {*known, *others}
    }
    if name == "by_writer":
        assume(len(numpy.unique(writers)) >= 6)
        arguments["clients"] = draw(st.none() | st.integers(1, 6))
        arguments["min_images"] = 1
    if name == "label_table":
        assume(arguments["classes"] <= len(numpy.unique(labels)))
        assume(numpy.bincount(labels)[numpy.unique(labels)].min() >= clients)
    if name == "group_skew":
        assume(arguments["groups"] > 1 or arguments["p"] == 1)
    return labels, writers, arguments


def handed_out(name: str, labels: NDArray[Any], arguments: dict[str, int], held: NDArray[Any]) -> int | None:
    """How many examples somebody holds, from the docstrings; `held` are the labels of those that somebody does.

    None: this test does not know the partition.
    """
    n = len(labels)
    if name == "label_table":
        return int(numpy.isin(labels, held).sum())
    if name in ("iid", "shah"):
        return n // arguments["clients"] * arguments["clients"]
    if name == "classes_per_client":
        slices = arguments["clients"] * arguments["classes"]
        return n // slices * slices
    if name == "unequal_shards":
        return (arguments["shard_size"] or n // arguments["shards"]) * arguments["shards"]
    return n if name in ("dirichlet", "by_writer", "group_skew") else None


NEEDED = {
    "classes_per_client": {"classes": 2}, "unequal_shards": {"shards": 20}, "dirichlet": {"alpha": 0.5},
    "label_table": {"classes": 2}, "group_skew": {"groups": 2, "p": 0.8},
}  # fmt: skip


@pytest.mark.parametrize("name", PARTITIONS)
def test_another_seed_gives_other_clients(name: str) -> None:
    """The same seed gives the same; another other clients, unless nothing is drawn."""
    labels, writers = rng(1).integers(0, 10, 2000), rng(2).integers(0, 40, 2000)
    deal = members.member("Partition", name, **{"clients": 4, **NEEDED.get(name, {})})
    one, two = ([part.tolist() for part in deal(labels, rng(seed), writers)] for seed in (1, 2))
    draws = rng(2)
    assert [part.tolist() for part in deal(labels, draws, writers)] == two
    assert (one == two) == (draws.bit_generator.state == rng(2).bit_generator.state)


@pytest.mark.parametrize("name", PARTITIONS)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_every_partition(name: str, data: st.DataObject) -> None:
    """One non-empty sorted int64 array a client, disjoint, complete but for the documented rest, the same again."""
    labels, writers, arguments = data.draw(problems(name))
    seed = data.draw(st.integers(0, 1000))
    before = labels.copy()
    try:
        parts = PARTITIONS[name](labels, rng(seed), writers, **arguments)
    except ValueError as error:
        assume(not (name == "group_skew" and "would get none of" in str(error)))
        assume(not (name == "dirichlet" and "no draw of" in str(error)))  # nearly equal cuts leave one client short
        assume(handed_out(name, labels, arguments, labels) is not None)  # else its ranges are not known here
        raise
    together = numpy.concatenate(parts)
    assert (labels == before).all()
    assert arguments.get("clients") in (None, len(parts))
    assert all(part.dtype == numpy.int64 and len(part) and (numpy.diff(part) > 0).all() for part in parts)
    assert len(numpy.unique(together)) == len(together)
    assert together.min() >= 0
    assert together.max() < len(labels)
    if arguments.get("clients") is None or name != "by_writer":
        assert len(together) == (handed_out(name, labels, arguments, labels[together]) or len(together))
    if name in ("iid", "classes_per_client", "shah"):
        assert {len(part) for part in parts} == {len(together) // len(parts)}
    again = PARTITIONS[name](labels, rng(seed), writers, **arguments)
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("iid", {"clients": 11}, "iid: 11 clients, but only 10 examples"),
        ("shah", {"clients": 11, "skew": 1.0}, "shah: 11 clients, but only 10 examples"),
        ("classes_per_client", {"clients": 6, "classes": 2},
         "classes_per_client: 6 clients with 2 slices each, but only 10 examples"),
        ("classes_per_client", {"clients": 11, "classes": 1}, "classes_per_client: 11 clients, but only 10 examples"),
        ("unequal_shards", {"clients": 11, "shards": 10}, "unequal_shards: 11 clients but only 10 shards"),
        ("unequal_shards", {"clients": 5, "shards": 11},
         "unequal_shards: 11 shards of 1 examples, but only 10 examples"),
        ("unequal_shards", {"clients": 5, "shards": 5, "shard_size": 3},
         "unequal_shards: 5 shards of 3 examples, but only 10 examples"),
        ("dirichlet", {"clients": 2, "alpha": 1.0},
         "dirichlet: 2 clients with at least 10 examples, but only 10 examples"),
        ("dirichlet", {"clients": 11, "alpha": 1.0, "min_size": 1}, "dirichlet: 11 clients with at least 1 examples"),
        ("by_writer", {}, "by_writer: this data set does not record writers"),
        ("label_table", {"clients": 1, "classes": 11},
         "label_table: classes=11 labels for each client, but only 10 occur"),
        ("label_table", {"clients": 2, "classes": 10}, "label_table: 2 clients hold label 0, of 1 examples"),
        ("group_skew", {"clients": 11, "groups": 11, "p": 0.2},
         "group_skew: 11 groups of 10 classes and 11 clients: at least one each"),
        ("group_skew", {"clients": 2, "groups": 1, "p": 0.5}, "group_skew: with one group p must be 1, got 0.5"),
    ],
)  # fmt: skip
def test_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shards(name, numpy.arange(10), **arguments)


def test_a_client_without_examples_is_refused() -> None:
    """p = 1 and only class 1 of 0 and 1: the client of the other group has nothing. Writers with too few images."""
    with pytest.raises(ValueError, match=r"group_skew: client [01] of 2 would get none of 5 images"):
        shards("group_skew", numpy.ones(5, dtype=int), clients=2, groups=2, p=1.0)
    writers = numpy.array([1, 1, 1, 2, 2, 3])
    with pytest.raises(ValueError, match="by_writer: 3 clients, but only 2 of 3 writers have 2 examples or more"):
        PARTITIONS["by_writer"](writers, rng(), writers, clients=3, min_images=2)
    with pytest.raises(ValueError, match="by_writer: one client per writer, but only 0 of 3 writers have 5 examples"):
        PARTITIONS["by_writer"](writers, rng(), writers)
