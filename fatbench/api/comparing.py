"""Whether two rows, cells, files or arrays of outcomes differ."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench import hub, whole_file
from fatbench.api.asking import Plugins, Seeds, Where, cells_and_run, known_choice, names, plugged
from fatbench.api.views import existing_store, plan_read, trained_suites
from fatbench.errors import NothingMatched, SpecError
from fatbench.report import contrasts, pairs, sentences
from fatbench.report.contrasts import Difference
from fatbench.report.numbers.stored import Measurement
from fatbench.store.opening import Db, cell_id, may_be_cell, opened, shown_databases
from fatbench.suite import filters
from fatbench.suite.cells import Plan
from fatbench.suite.declared_contrasts import Tests
from fatbench.suite.facts import first_images
from fatbench.suite.files import Suite
from fatbench.suite.folders import available
from fatbench.suite.model import CHECKPOINTS

if TYPE_CHECKING:
    import pandas
    from numpy.typing import ArrayLike

    from fatbench.store.selection import Checkpoint

    GroupsAsked = str | Path | ArrayLike | None  # see `labels_of`; None: images are independent

WRITERS = "writers"


@dataclass(frozen=True)
class Comparison:
    """Differences A - B, paired by seed and image: a part for each row and evaluation, or those that a suite declares.

    Of a single part, `difference` as a fraction, `low` and `high` of its 95 % interval, `p` and `at_most` (the size
    that the data do not exclude) are here as well; None where nothing can be tested.
    """

    parts: tuple[Difference, ...]
    text: str  # what is printed of them
    preset: str = ""  # of the suite whose cells are compared; empty without one

    def __repr__(self) -> str:
        return self.text

    @property
    def _only_part(self) -> Difference:
        if len(self.parts) != 1:
            part_names = ", ".join(" ".join(filter(None, (part.row, part.metric))) for part in self.parts)
            choose = "choose one with metric and where, or .frame()"
            raise SpecError(f"{len(self.parts)} comparisons ({part_names}): {choose}")
        return self.parts[0]

    @property
    def difference(self) -> float | None:
        """A - B, the mean over seeds."""
        return self._only_part.difference

    @property
    def low(self) -> float | None:
        """Lower end of the 95 % interval."""
        return self._only_part.low

    @property
    def high(self) -> float | None:
        """Upper end of the 95 % interval."""
        return self._only_part.high

    @property
    def p(self) -> float | None:
        """The p-value of the test over seeds and images; None with one seed, which says nothing about methods."""
        return self._only_part.p

    @property
    def at_most(self) -> float | None:
        """The size that the data do not exclude."""
        return self._only_part.at_most

    def frame(self) -> pandas.DataFrame:
        """One row a part, with all that is printed of it: difference, low, high, at_most, p, p_holm, detectable, ..."""
        return contrasts.frame(self.parts)


def compare(
    a: str | ArrayLike,
    b: str | ArrayLike,
    *,
    suite: str | Path | Suite | None = None,
    metric: str | Sequence[str] = (),
    preset: str | None = None,
    seeds: Seeds = None,
    where: Where = None,
    select: Checkpoint = "last",
    groups: GroupsAsked = None,
    plugins: Plugins = (),
    db: Db = None,
) -> Comparison:
    """Test whether two sides differ, paired by image and seed; seeds and images are both taken as random.

    a, b: labels or filters of a suite's rows ("SFAT", "aggregator=sfat"), ids of cells, databases or exported files; or
    outcomes, arrays (images,) or (seeds, images) of booleans, True where an image is classified right, in the same
    order on both sides. metric: only this evaluation. The other arguments as of `table`.
    groups: images are taken as independent of each other, unless it says whose each is: labels (images,) of persons,
    writers or videos, which are then what is taken as random; of stored results also a text file with a label a line
    for each test image, or "writers", those that the data set knows.
    Such a comparison is exploratory; a claim is one of those that a suite declares (`fatbench compare SUITE`).
    SpecError: no such row, or arrays of other shapes; NothingMatched: nothing is measured on both sides.

    >>> import numpy, fatbench
    >>> a, b = numpy.ones((3, 100), bool), numpy.ones((3, 100), bool)
    >>> b[:, :20] = False
    >>> round(fatbench.compare(a, b).difference, 2)
    0.2
    """
    known_choice("select", select, CHECKPOINTS)
    if not isinstance(a, str) or not isinstance(b, str):
        return _compare_arrays(a, b, groups)
    with plugged(plugins, db):
        return _compare_stored(a, b, suite, names(metric), preset, seeds, where, select, groups=groups, db=db)


def tests(
    suite: str | Path | Suite,
    *,
    preset: str | None = None,
    seeds: Seeds = None,
    where: Where = None,
    select: Checkpoint = "last",
    groups: GroupsAsked = None,
    plugins: Plugins = (),
    db: Db = None,
) -> Comparison:
    """The comparisons that a suite declares, each family corrected as a whole: `fatbench compare SUITE`.

    where: the cells whose comparisons are shown; p stays corrected over the family. Other arguments as of `compare`.
    SpecError: the suite declares no contrasts.
    """
    known_choice("select", select, CHECKPOINTS)
    with plugged(plugins, db):
        plan, families = declared_families(suite, preset, seeds, where, select, groups=groups, db=db)
    parts = tuple(part for _, declared, cells, _ in families for part in contrasts.of_cells(declared, cells))
    return Comparison(parts, "\n".join(text for *_, text in families), plan.preset)


Family = tuple[Tests, list[Difference], set[str] | None, str]  # of all comparisons; the cells that are shown, the text


def declared_families(
    suite: str | Path | Suite, preset: str | None, seeds: Seeds, where: Where, select: Checkpoint, *,
    groups: GroupsAsked, db: Db,
) -> tuple[Plan, list[Family]]:  # fmt: skip
    """The plan, not filtered, and each family that the suite declares. SpecError: it declares none."""
    with opened(db) as store:
        shown_cells, run = cells_and_run(where)
        chosen_suite, plan = plan_read(suite, preset, seeds, None, store, run)
        declaring = [family for family in chosen_suite.tests if family.family]
        if not declaring:
            raise SpecError(f"suite '{chosen_suite.name}' declares no contrasts (section 'tests', docs/suites.md)")
        store = existing_store(store, db)
        cells = None if shown_cells is None else {cell.id for cell in filters.select(plan, shown_cells).cells}
        ids = [cell.id for cell in plan.cells]
        numbers_of = pairs.measured_numbers(store, ids, select, labels_of(groups)).__getitem__
        tested = [(family, contrasts.family(family, plan, numbers_of)) for family in declaring if family.contrasts]
        for family in (family for family in declaring if family.points):
            answers = pairs.answers_of_clients(store, {cell.id for cell in plan.cells}, str(family.clients))
            tested.append((family, contrasts.family_of_clients(family, plan, answers)))
    asked_seeds = chosen_suite.contents.presets[plan.preset].seeds or chosen_suite.contents.seeds
    return plan, [
        (family, declared, cells, sentences.family(declared, family, plan, select, cells, asked_seeds))
        for family, declared in tested
    ]


def _compare_arrays(a: Any, b: Any, groups: GroupsAsked) -> Comparison:
    """Compare arrays of outcomes (seeds, images)."""
    import numpy

    from fatbench.report.numbers.statistics import bits_of

    sides = [numpy.atleast_2d(numpy.asarray(side)) for side in (a, b)]
    for name, side in zip("ab", sides, strict=True):
        if side.ndim != 2 or not side.size or not (side.dtype == bool or numpy.isin(side, (0, 1)).all()):
            raise SpecError(
                f"{name}: expected outcomes (images,) or (seeds, images), True where an image is classified right, got"
                f" {side.dtype} {side.shape}"
            )
    if sides[0].shape != sides[1].shape:
        raise SpecError(f"a has outcomes {sides[0].shape} and b {sides[1].shape}: give the same seeds and images")
    images, image_groups = sides[0].shape[1], None
    if groups is not None:
        if isinstance(groups, str | Path) or numpy.shape(groups) != (images,):
            labels = repr(groups) if isinstance(groups, str | Path) else numpy.shape(groups)
            raise SpecError(f"groups: a and b have {images} images: expected a label for each, got {labels}")
        image_groups = pairs.grouped(groups, images)

    def numbers_of(side: Any) -> dict[str, Mapping[str, Measurement]]:
        outcomes = [bits_of(row.astype(bool)) for row in side]
        return {
            str(seed): {"accuracy-": Measurement(bits.bit_count() / n, n, (bits, n), groups=image_groups)}
            for seed, (bits, n) in enumerate(outcomes)
        }

    cells = [pairs.Pair((), seed, str(seed), str(seed)) for seed in range(len(sides[0]))]
    of_a, of_b = (numbers_of(side).__getitem__ for side in sides)
    compared = contrasts.compare(cells, of_a, of_b, sides=("a", "b"))
    return Comparison(tuple(compared), sentences.exploratory(compared, "a", "b", ""))


def _compare_stored(
    a: str, b: str, suite: str | Path | Suite | None, metrics: Sequence[str], preset: str | None,
    seeds: Seeds, where: Where, select: Checkpoint, *, groups: GroupsAsked, db: Db,
) -> Comparison:  # fmt: skip
    """Compare two rows or cells of one database, or the common cells of two databases or files."""
    margin, estimator, plan = None, contrasts.PAIRED, None
    are_files = [_is_results(side) for side in (a, b)]
    if any(are_files) and not all(are_files):
        first_side, second_side = (a, b) if are_files[0] else (b, a)
        raise SpecError(f"'{first_side}' is a file or database, but '{second_side}' is not: give two of a kind")
    with contextlib.ExitStack() as stack:
        if all(are_files):
            store_a, store_b = (existing_store(stack.enter_context(opened(side)), side) for side in (a, b))
            if suite is not None:
                chosen_suite, plan = plan_read(suite, preset, seeds, where, store_a)
                margin = chosen_suite.margin
            cells, estimator = pairs.common(store_a, store_b, plan), contrasts.TWO_DATABASES
            if not cells:
                contents = f"{a} has {trained_suites(store_a)}, {b} has {trained_suites(store_b)}"
                raise NothingMatched(f"{a} and {b} have no cell in common: {contents}")
        else:
            maybe_store = stack.enter_context(opened(db))
            if suite is not None:  # misspelt names are said first, with or without a database
                chosen_suite, plan = plan_read(suite, preset, seeds, where, maybe_store)
                cells, margin = pairs.pairs(plan, a, b), chosen_suite.margin
            elif not (may_be_cell(a) and may_be_cell(b)):
                contents = "" if maybe_store is None else f" ({shown_databases(db)} has {trained_suites(maybe_store)})"
                raise SpecError(f"'{a}' and '{b}' are rows: name their suite{contents}", option="suite")
            store_a = store_b = existing_store(maybe_store, db)
            if suite is None:
                ids = [cell_id(store_a, cell, available(), db) for cell in (a, b)]
                cells = [pairs.Pair((), int(store_a.cells(ids)[ids[0]].get("seed") or 0), ids[0], ids[1])]
        image_groups = labels_of(groups)
        of_a = pairs.measured_numbers(store_a, {pair.a for pair in cells}, select, image_groups)
        of_b = pairs.measured_numbers(store_b, {pair.b for pair in cells}, select, image_groups)
    empty_sides = [side for side, numbers in ((a, of_a), (b, of_b)) if not any(numbers.values())]
    if empty_sides:
        named_sides = " and ".join(f"'{side}'" for side in dict.fromkeys(empty_sides))
        place = "" if all(are_files) else f" in {shown_databases(db)}"
        name = "NAME" if suite is None else suite.name if isinstance(suite, Suite) else suite
        verb = "have" if len(empty_sides) > 1 else "has"
        lists = f"fatbench status {name} says what is left to run"
        raise NothingMatched(f"{named_sides} {verb} no numbers yet{place}: {lists}")
    compared = contrasts.compare(cells, of_a.__getitem__, of_b.__getitem__, metrics, sides=(a, b), estimator=estimator)
    compared = [replace(difference, margin=margin) for difference in compared]
    text = sentences.exploratory(compared, a, b, select)
    return Comparison(tuple(compared), text, "" if plan is None else plan.preset)


def _is_results(side: str) -> bool:
    """Whether a side is a database's URL or a file; hf://... on the hub is a file."""
    if "://" in side and hub.address(Path(side)) is None:
        return True
    # not Path.is_file, which raises for a name too long for a file, such as a filter
    return os.path.isfile(whole_file.regular(Path(side)))


# --- test images that are not independent: those of one person, writer or video ------------------------------------


def labels_of(groups: GroupsAsked) -> Callable[[Mapping[str, Any]], ArrayLike] | None:
    """A function: spec of a cell -> the group's label of each test image, in order. None: images are independent.

    groups: "writers", those that the data set knows; a text file with a label a line; or the labels (images,).
    SpecError: the file cannot be read, or the data set knows no writers.
    """
    if groups is None:
        return None
    if isinstance(groups, str) and groups == WRITERS:
        return lambda spec: _writers(json.dumps(spec["data"]), first_images(spec)["data"])
    labels = _read_labels(Path(groups)) if isinstance(groups, str | Path) else groups
    return lambda spec: labels


@functools.cache  # data is JSON: a cache needs hashable arguments
def _writers(data: str, first_counts: tuple[int | None, int | None]) -> ArrayLike:
    from fatbench import settings
    from fatbench.data.own import load

    dataset = load(json.loads(data), settings.data_folder(), first_counts)
    if dataset.test_writers is None:
        raise SpecError(f"data set '{dataset.name}' has no writer labels: give a file of them", option="groups")
    return dataset.test_writers


def _read_labels(file: Path) -> ArrayLike:
    import numpy as np

    try:
        return np.array(file.read_text(encoding="utf-8-sig").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"groups: expected '{WRITERS}' or a text file with a label a line, one for each test image, got '{file}':"
            f" {getattr(error, 'strerror', None) or error}"
        ) from None
