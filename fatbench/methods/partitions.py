"""Partitions: which client holds which training examples.

    PARTITIONS["shah"](labels, rng, None, clients=5, skew=2)   -> [indices of client 0, indices of client 1, ...]

A partition gets the labels (N,), a numpy generator, the writer of every example (N,) or None, and its settings. It
returns one sorted int64 array of example indices per client; the arrays are disjoint and none is empty. If examples are
left out (the remainder of a division), the docstring says so. The same generator state gives the same partition.

| here | papers | what |
|---|---|---|
| clients | K | number of clients |
| skew | s | per cent of every other client's chunk that a client gets (Zhu et al. 2023) |
| classes | c of Non-IID(c) | slices of label-sorted data per client (FAT); labels a client draws (AdFL) |
| groups, p | M, p | groups of classes and of clients, and how likely an example stays with its own (FedVKD) |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy
from numpy.typing import NDArray

from fatbench.engine.randomness import numpy_generator
from fatbench.suite.entry import PartitionEntry
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count, Fraction, Natural, NonNegative, Positive, Probability

Labels = NDArray[Any]
Shards = list[NDArray[numpy.int64]]

DIRICHLET_DRAWS = 1000


def iid(labels: Labels, rng: numpy.random.Generator, writers: Labels | None, *, clients: Count) -> Shards:
    """Equal random parts of N // clients examples each; the remainder of the division is left out.

    Source: Zhu et al. 2023, released `cifar_iid`. Raises ValueError for more clients than examples.
    """
    size = _chunk("iid", labels, clients)
    order = rng.permutation(len(labels))
    return [_sorted(order[k * size : (k + 1) * size]) for k in range(clients)]


def equal_parts(images: int, *, clients: int) -> int:
    return images // clients


def classes_per_client(
    labels: Labels,
    rng: numpy.random.Generator,
    writers: Labels | None,
    *,
    clients: Count,
    classes: Count,
    class_perm_seed: Natural | None = None,
) -> Shards:
    """Non-IID(c): the label-sorted examples in clients * classes equal slices; client k gets slices k, K + k, ...

    No draw is made: with CIFAR-10's balanced labels, 5 clients and 2 classes, client 0 holds classes 0 and 5, client 1
    holds 1 and 6, and so on. `class_perm_seed` sorts the classes in a random order instead. A slice has
    N // (clients * classes) examples; the last few examples of the sorted order are left out.

    A client holds exactly `classes` classes only if each slice lies within one class. Three clients with 2 hold 5, 6
    and 4 of CIFAR-10's ten classes. If labels are not balanced, slices cut across classes, and a client may hold a few
    examples of further ones: five clients with 2 hold 3 to 5 of ten classes in 10,000 drawn labels.

    Paper: "randomly selected classes"; here as in the partitioner it names, FedTorch's, which is deterministic.
    Source: Aldahdooh et al. 2022; differences: classes-partition. Raises ValueError for fewer examples than slices.
    """
    size = _chunk("classes_per_client", labels, clients, classes)
    labels = numpy.asarray(labels)
    if class_perm_seed is not None:
        class_position = numpy_generator(class_perm_seed, "classes_per_client").permutation(int(labels.max()) + 1)
        labels = class_position[labels]
    order = numpy.argsort(labels, kind="stable")  # stable: the same on every machine
    # slice number c * K + k at [c, k]: client k gets column k
    slices = order[: clients * classes * size].reshape(classes, clients, size)
    return [_sorted(slices[:, k].ravel()) for k in range(clients)]


def classes_of_the_data(cell: Facts, *, classes: int) -> str | None:
    return f"classes: {classes} of {cell.classes} classes" if classes > cell.classes else None


def shah(
    labels: Labels,
    rng: numpy.random.Generator,
    writers: Labels | None,
    *,
    clients: Count,
    skew: NonNegative = 2.0,
    own_fraction: Fraction | None = None,
) -> Shards:
    """Shah skew: client k takes most of the k-th chunk of the label-sorted examples and `skew` per cent of each other.

    The sorted examples are cut into `clients` chunks of N // clients; the remainder is left out. Client k gets 100 -
    (clients - 1) * skew per cent of chunk k: 92 with 5 clients and skew 2, 62 with 20, and 2 with 50, which is IID.
    `own_fraction` replaces `skew`, if given: client k gets that fraction of chunk k whatever the number of clients, and
    the others share the rest equally. Fractions are rounded to whole examples such that every client has N // clients
    examples and every chunk is dealt completely. Chunks are cut by position, so they split classes unless the number of
    clients divides that of classes.

    Source: Shah et al. 2021; differences: sfat-skew. Unlike the release, it uses a stable sort and a seeded generator.
    Raises ValueError for more clients than examples, or if (clients - 1) * skew >= 100.
    """
    size = _chunk("shah", labels, clients)
    if own_fraction is None and (clients - 1) * skew >= 100:
        raise ValueError(
            f"shah: (clients - 1) * skew must be below 100 per cent, got ({clients} - 1) * {skew:g} = "
            f"{(clients - 1) * skew:g}"
        )
    main_fraction = 1 - (clients - 1) * skew / 100 if own_fraction is None else own_fraction
    # Client j + d gets the d-th part of chunk j. The parts are cut alike in every chunk, hence the equal sizes.
    cuts = numpy.rint(
        size * (main_fraction + (1 - main_fraction) / max(clients - 1, 1) * numpy.arange(clients - 1))
    ).astype(int)
    order = numpy.argsort(labels, kind="stable")
    shards: list[list[NDArray[Any]]] = [[] for _ in range(clients)]
    for j in range(clients):
        chunk = rng.permutation(order[j * size : (j + 1) * size])  # else the parts would be sorted by class
        for d, piece in enumerate(numpy.split(chunk, cuts)):
            shards[(j + d) % clients].append(piece)
    return [_sorted(numpy.concatenate(pieces)) for pieces in shards]


def keeps_own_fraction(*, clients: int, skew: float, own_fraction: float | None) -> str | None:
    if own_fraction is None and (clients - 1) * skew >= 100:
        return f"skew: (clients - 1) * skew must be below 100, got ({clients} - 1) * {skew:g}"
    return None


def unequal_shards(
    labels: Labels,
    rng: numpy.random.Generator,
    writers: Labels | None,
    *,
    clients: Count,
    shards: Count,
    shard_size: Count | None = None,
    max_shards: Count = 30,
    split_seed: Natural | None = None,
) -> Shards:
    """Label-sorted shards of equal size, a random number of them to each client: unequal and label-skewed.

    Each client draws a number in 1 .. max_shards; the numbers are scaled to add up to `shards` and rounded, at least
    one each. If rounding gives too many, every client gets one shard and the rest are dealt in the order of the clients
    until none is left; if it gives too few, the client with the fewest gets the remainder. Which shards a client gets
    is random. `shard_size` defaults to N // shards; examples after the last shard are left out.

    `split_seed` fixes the split for every seed of the cell. SFAT gives no seeds, only ranges of sizes. These settings
    hit them exactly whatever `shard_size` is, because they fix the numbers of shards:

    | published range (Zhu et al. 2023, Tables 14, 17, 18) | settings | with validation held out |
    |---|---|---|
    | CIFAR-10 6000-13000, K=5 | clients 5, shards 50, split_seed 24 | the same, or shards 49 |
    | CIFAR-10 1000-8000, K=10 | clients 10, shards 50, split_seed 10 | the same, or shards 49 |
    | SVHN 5860-26370, K=5 | clients 5, shards 50, split_seed 142 | the same |
    | SVHN 1465-13185, K=10 | clients 10, shards 50, split_seed 0 | the same |
    | SVHN 50-16700, K=10 | clients 10, shards 1465, max_shards 1465, split_seed 1492 | shards 1445, split_seed 4113 |

    Here every client gets at least one shard; the release can leave a client without data.
    Source: Zhu et al. 2023, released `*_noniid_unequal`, after McMahan et al. 2017; differences: sfat-unequal.
    Raises ValueError for more clients than shards, or if the shards need more examples than there are.
    """
    total = len(labels)
    size = total // shards if shard_size is None else shard_size
    if clients > shards:
        raise ValueError(f"unequal_shards: {clients} clients but only {shards} shards")
    if size == 0 or shards * size > total:
        raise ValueError(f"unequal_shards: {shards} shards of {max(size, 1)} examples, but only {total} examples")
    if split_seed is not None:
        rng = numpy_generator(split_seed, "unequal_shards")
    counts = shard_counts(rng, clients, shards, max_shards)
    # Cutting one random order of the shards has the same distribution as the release's draws in turn.
    shard_numbers_by_client = numpy.split(rng.permutation(shards), numpy.cumsum(counts)[:-1])
    pieces = numpy.argsort(labels, kind="stable")[: shards * size].reshape(shards, size)
    return [_sorted(pieces[shard_numbers].ravel()) for shard_numbers in shard_numbers_by_client]


def shard_counts(rng: numpy.random.Generator, clients: int, shards: int, max_shards: int) -> NDArray[numpy.int64]:
    """The number of shards of each client of `unequal_shards`, (clients,): at least 1, together `shards`."""
    random_counts = rng.integers(1, max_shards + 1, clients)
    counts: NDArray[numpy.int64] = numpy.maximum(
        numpy.around(random_counts / random_counts.sum() * shards).astype(numpy.int64), 1
    )
    remaining = shards - int(counts.sum())
    if remaining > 0:  # as the release does
        counts[counts.argmin()] += remaining
    elif remaining < 0:  # one each, then the rest in turn until the shards are gone
        extra_counts = numpy.minimum(numpy.cumsum(counts - 1), shards - clients)
        counts = 1 + numpy.diff(extra_counts, prepend=0)
    return counts


def dirichlet(
    labels: Labels,
    rng: numpy.random.Generator,
    writers: Labels | None,
    *,
    clients: Count,
    alpha: Positive,
    min_size: Count = 10,
    split_seed: Natural | None = None,
) -> Shards:
    """Each class is divided among the clients in proportions drawn from Dirichlet(alpha, ..., alpha).

    Small alpha: few clients hold most of a class; large alpha: near IID, with unequal sizes. Every example is dealt.
    The whole draw is repeated until every client has `min_size` examples, at most 1000 times. `split_seed` fixes the
    split for every seed of the cell, to that of a cell with this seed.

    Source: Hsu et al. 2019, in the most common form (Yurochkin et al. 2019): per class over clients, while Hsu et al.
    draw per client over classes and keep sizes equal. Raises ValueError for fewer than clients * min_size examples, or
    if no draw gives min_size to every client.
    """
    rng = rng if split_seed is None else numpy_generator(split_seed, "partition")
    total = len(labels)
    if clients * min_size > total:
        raise ValueError(f"dirichlet: {clients} clients with at least {min_size} examples, but only {total} examples")
    classes = [numpy.flatnonzero(labels == label) for label in numpy.unique(labels)]
    for _ in range(DIRICHLET_DRAWS):
        # positions at which each class is cut; only their sizes are needed to refuse a draw
        cuts = [
            numpy.floor(numpy.cumsum(rng.dirichlet(numpy.full(clients, alpha)))[:-1] * len(members)).astype(int)
            for members in classes
        ]
        sizes = [
            numpy.diff(cut, prepend=0, append=len(members_of_class))
            for cut, members_of_class in zip(cuts, classes, strict=True)
        ]
        if numpy.sum(sizes, axis=0).min() >= min_size:
            break
    else:
        raise ValueError(
            f"dirichlet: no draw of {DIRICHLET_DRAWS} gave each of {clients} clients {min_size} examples at "
            f"alpha={alpha:g}; raise alpha or lower min_size or clients"
        )
    shards: list[list[NDArray[Any]]] = [[] for _ in range(clients)]
    for cut, members in zip(cuts, classes, strict=True):
        for shard, piece in zip(shards, numpy.split(rng.permutation(members), cut), strict=True):
            shard.append(piece)
    return [_sorted(numpy.concatenate(pieces)) for pieces in shards]


def by_writer(
    labels: Labels,
    rng: numpy.random.Generator,
    writers: Labels | None,
    *,
    clients: Count | None = None,
    min_images: Count = 5,
) -> Shards:
    """One client per writer (LEAF: per celebrity) with at least `min_images` examples, in the order of writer ids.

    Writers with fewer are left out. `clients` draws that many of the writers without replacement, as LEAF's user
    fraction does (455 in Zhu et al. 2023, Table 19); None takes all.

    Source: Caldas et al. 2018. Raises ValueError for a data set without writers, or for fewer writers with min_images
    examples than clients.
    """
    if writers is None:
        raise ValueError("by_writer: this data set does not record writers (or the people on its images)")
    # owner: for each example, the position of its writer in names
    names, owner, sizes = numpy.unique(writers, return_inverse=True, return_counts=True)
    chosen_writers = numpy.flatnonzero(sizes >= min_images)
    if len(chosen_writers) < (clients or 1):
        request = "one client per writer" if clients is None else f"{clients} clients"
        raise ValueError(
            f"by_writer: {request}, but only {len(chosen_writers)} of {len(names)} writers have {min_images} "
            "examples or more"
        )
    if clients is not None:
        chosen_writers = numpy.sort(rng.choice(chosen_writers, clients, replace=False))
    order = numpy.argsort(owner)  # writer after writer; a writer's are sorted below
    starts = numpy.concatenate([[0], numpy.cumsum(sizes)])
    return [_sorted(order[starts[k] : starts[k + 1]]) for k in chosen_writers]


def known_writers(cell: Facts) -> str | None:
    if "writers" not in cell.data.parts:
        return f"by_writer: {cell.data.name} does not record the writers of its examples"
    return None


# Danilenka et al. 2022, Table 1: the probabilities of labels 0 .. 9. For its other runs, only the common labels are
# given.
PRINTED = (0.035, 0.045, 0.10, 0.21, 0.21, 0.20, 0.10, 0.045, 0.035, 0.02)
LABEL_TABLES = {"middle": PRINTED, "low": PRINTED[3:] + PRINTED[:3], "high": PRINTED[-4:] + PRINTED[:-4]}


def label_table(
    labels: Labels,
    rng: numpy.random.Generator,
    writers: Labels | None,
    *,
    clients: Count,
    classes: Count,
    table: Literal["middle", "low", "high"] = "middle",
) -> Shards:
    """Each client draws `classes` labels by a table of probabilities; a label's examples are divided among its holders.

    The labels of a client are drawn one after the other, without replacement, in these proportions (per cent):

    | table | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 |
    |---|---|---|---|---|---|---|---|---|---|---|
    | middle (MNIST run 1) | 3.5 | 4.5 | 10 | 21 | 21 | 20 | 10 | 4.5 | 3.5 | 2 |
    | low (MNIST run 2) | 21 | 21 | 20 | 10 | 4.5 | 3.5 | 2 | 3.5 | 4.5 | 10 |
    | high (MNIST run 3) | 10 | 4.5 | 3.5 | 2 | 3.5 | 4.5 | 10 | 21 | 21 | 20 |

    The holders of a label get equal parts of its examples, which differ by at most one. Examples of a label that no
    client drew are left out. Labels without examples are not drawn.

    Source: Danilenka et al. 2022, Table 1; differences: adfl-labels. Not stated there: the tables of runs 2 and 3 (here
    the printed one, rolled until its three common labels are 0, 1, 2 and 7, 8, 9), and how many examples of a label a
    holder gets. Raises ValueError for a label above 9, for more labels per client than occur, or for a label with fewer
    examples than holders.
    """
    labels = numpy.asarray(labels)
    if labels.max() > 9:
        raise ValueError(f"label_table: the table has labels 0 to 9, but there is a label {labels.max()}")
    labels_present = numpy.unique(labels)
    if classes > len(labels_present):
        raise ValueError(f"label_table: classes={classes} labels for each client, but only {len(labels_present)} occur")
    holdings = drawn_labels(rng, clients, classes, numpy.asarray(LABEL_TABLES[table])[labels_present])
    shards: list[list[NDArray[Any]]] = [[] for _ in range(clients)]
    for column, label in enumerate(labels_present):
        holders, members = numpy.flatnonzero(holdings[:, column]), numpy.flatnonzero(labels == label)
        if len(holders) > len(members):
            raise ValueError(f"label_table: {len(holders)} clients hold label {label}, of {len(members)} examples")
        if len(holders):
            for k, piece in zip(holders, numpy.array_split(rng.permutation(members), len(holders)), strict=True):
                shards[k].append(piece)
    return [_sorted(numpy.concatenate(pieces)) for pieces in shards]


def drawn_labels(
    rng: numpy.random.Generator, clients: int, classes: int, table: NDArray[numpy.float64]
) -> NDArray[numpy.bool_]:
    """The labels that each client of `label_table` draws, (clients, L) bool, in the proportions `table` (L,)."""
    holdings = numpy.zeros((clients, len(table)), dtype=bool)
    for k in range(clients):
        holdings[k, rng.choice(len(table), classes, replace=False, p=table / table.sum())] = True
    return holdings


def group_skew(
    labels: Labels, rng: numpy.random.Generator, writers: Labels | None, *, clients: Count, groups: Count, p: Fraction
) -> Shards:
    """Every group of classes belongs to a group of clients, which gets each of its examples with probability p.

    The C classes are cut into `groups` groups of consecutive ones (label * groups // C), the clients, in random order,
    into as many of equal number, or differing by one. Each other group of clients gets an example with probability
    (1 - p) / (groups - 1); within a group all clients are equally likely. p = 1 / groups is IID: 0.1 with FedVKD's 10
    groups of one client each, where FedVKD uses 0.2. Every example is dealt; sizes are random.

    Source: Tao et al. 2022, after Fang et al. 2020. Not stated: the classes of a group (differences: fedvkd-groups).
    Raises ValueError for more groups than clients or classes, for one group with p below 1, or if a client gets
    nothing.
    """
    labels = numpy.asarray(labels)
    classes = int(labels.max()) + 1
    if groups > min(clients, classes):
        raise ValueError(f"group_skew: {groups} groups of {classes} classes and {clients} clients: at least one each")
    if groups == 1 and p < 1:
        raise ValueError(f"group_skew: with one group p must be 1, got {p:g}")
    own_group = labels * groups // classes
    # a shift of 1 to groups - 1 never ends at the own group; the bound of 2 only serves a single group, whose p is 1
    other_group = (own_group + rng.integers(1, max(groups, 2), len(labels))) % groups
    group = numpy.where(rng.random(len(labels)) < p, own_group, other_group)
    owner = numpy.empty(len(labels), dtype=numpy.int64)
    for g, members in enumerate(numpy.array_split(rng.permutation(clients), groups)):
        owner[group == g] = rng.choice(members, int((group == g).sum()))
    sizes = numpy.bincount(owner, minlength=clients)
    if not sizes.all():
        raise ValueError(f"group_skew: client {sizes.argmin()} of {clients} would get none of {len(labels)} images")
    return [numpy.flatnonzero(owner == k).astype(numpy.int64) for k in range(clients)]


def one_class_and_client_each(cell: Facts, *, groups: int, clients: int) -> str | None:
    if groups > min(clients, cell.classes):
        return f"groups: {groups} groups of {cell.classes} classes and {clients} clients: at least one each"
    return None


def similarity(
    labels: Labels,
    rng: numpy.random.Generator,
    writers: Labels | None,
    *,
    clients: Count,
    similarity: Probability,
    outsiders: Natural = 0,
) -> Shards:
    """A share `similarity` of the examples dealt at random, the others sorted by label and cut into one part a client.

    1 is IID; at 0 ten clients of ten balanced classes have one class each. Parts of both kinds differ by at most one
    example, and every example is dealt. The first `outsiders` clients hold one example each, drawn at random: malicious
    clients that have no data of their own, beside whom the others share what they would share alone.

    Source: Karimireddy et al. 2020, section 7 ("s % similar"); the gamma similarity of González et al. 2025 (ByzFL).
    Raises ValueError for more clients than examples, or for none that is no outsider.
    """
    if outsiders >= clients:
        raise ValueError(f"similarity: {outsiders} outsiders of {clients} clients: at least one is none")
    _chunk("similarity", labels, clients)
    apart, order = numpy.split(rng.permutation(len(labels)), [outsiders])
    alike, others = numpy.split(order, [int(len(order) * similarity)])
    others = others[numpy.argsort(numpy.asarray(labels)[others], kind="stable")]
    parts = (numpy.array_split(indices, clients - outsiders) for indices in (alike, others))
    return [*apart[:, None].astype(numpy.int64), *map(_sorted, map(numpy.concatenate, zip(*parts, strict=True)))]


def outsiders_beside_others(*, clients: int, outsiders: int) -> str | None:
    return f"outsiders: {outsiders} of {clients} clients: at least one is none" if outsiders >= clients else None


def _chunk(name: str, labels: Labels, clients: int, slices: int = 1) -> int:
    size = len(labels) // (clients * slices)
    if size == 0:
        holders_text = f"{clients} clients" if slices == 1 else f"{clients} clients with {slices} slices each"
        raise ValueError(f"{name}: {holders_text}, but only {len(labels)} examples")
    return size


def _sorted(indices: NDArray[Any]) -> NDArray[numpy.int64]:
    return numpy.sort(indices).astype(numpy.int64)


PARTITIONS: dict[str, Callable[..., Shards]] = {
    "iid": PartitionEntry(iid, each=equal_parts, cites=("zhu2023",)),
    "classes_per_client": PartitionEntry(classes_per_client, refuse=(classes_of_the_data,), cites=("aldahdooh2022",)),
    "shah": PartitionEntry(shah, each=equal_parts, refuse=(keeps_own_fraction,), cites=("shah2021",)),
    "unequal_shards": PartitionEntry(unequal_shards, example={"shards": 6}, cites=("mcmahan2017", "zhu2023")),
    "dirichlet": PartitionEntry(dirichlet, cites=("hsu2019", "yurochkin2019")),
    "by_writer": PartitionEntry(
        by_writer, refuse=(known_writers,), example={"min_images": 1}, cites=("caldas2018", "zhu2023")
    ),
    "label_table": PartitionEntry(label_table, refuse=(classes_of_the_data,), cites=("danilenka2022",)),
    "group_skew": PartitionEntry(
        group_skew, refuse=(one_class_and_client_each,), example={"groups": 2}, cites=("fang2020", "tao2022")
    ),
    "similarity": PartitionEntry(
        similarity,
        refuse=(outsiders_beside_others,),
        example={"similarity": 0.5},
        cites=("gonzalez2025", "karimireddy2020"),
    ),
}
