"""The tables and figures of a suite: the axes that label them, and the numbers that they show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)

from fatbench.errors import did_you_mean
from fatbench.suite import threats
from fatbench.suite.declared_contrasts import Baseline, Tests, as_list
from fatbench.suite.model import (
    Axes,
    AxesOfSuite,
    Condition,
    Evaluate,
    GridSpec,
    Label,
    Misfit,
    Node,
    Note,
    OneOrMore,
    OverrideMap,
    Preset,
    Presets,
    Seeds,
    Text,
    Tune,
    known_axis,
    known_label,
    labels,
    mapping,
)
from fatbench.suite.threats import Letter

SERIES = "series"  # as an axis of panels: one panel for each heading
Selected = Literal["last", "best-val", "best-test", "unknown"]
Kind = Literal["lines", "bars", "clients", "raster", "matrix", "heatmap", "images", "boundaries"]
KEPT = ("heatmap", "images", "boundaries")  # kinds of figure that show a tensor stored in a round
Best = Literal["max", "min", "none"]

SOURCE = re.compile(
    r"(?:(?P<stage>train|gap|artifact|prior|prior_mean|prior_worst|clients|pooled|worst|worst_if_equal|tenth|std|not_above_chance|below_chance|unseen):)?(?P<metric>[a-z_][a-z0-9_]*)(?:\[(?P<client>\d+|\*)\])?(?:@(?P<round>\d+))?\Z"
    r"|(?P<over>all):(?P<metrics>[a-z_][a-z0-9_]*(?:\+[a-z_][a-z0-9_]*)*)\Z"
)
UNRANKED = re.compile(r"\A(std|worst_if_equal|not_above_chance|below_chance):")  # not: the more the better


class Heading(Node):
    """The column or series under a heading: a source of numbers, for all points or only some."""

    source: Annotated[str, PlainValidator(str, json_schema_input_type=str)]
    where: Condition = Field(default={})
    minus: Condition = Field(default={})  # in a table: subtract the number of the same point with these labels
    share: Condition = Field(default={})  # in a table: the position between the numbers of two labels, 0 to 1
    worst: Condition = Field(default={})  # in a table: the least accuracy over these labels of one axis

    @property
    def relative(self) -> bool:
        """Whether a number depends on the numbers of other points."""
        return bool(self.minus or self.share or self.worst)

    @model_validator(mode="after")
    def _one_relation(self) -> Heading:
        if len(list(filter(None, (self.minus, self.share, self.worst)))) > 1:
            raise ValueError("a heading shows either a difference, 'minus', a 'share', or a 'worst' case")
        if len(self.worst) > 1:
            raise ValueError(f"worst: expected labels of one axis, got {' and '.join(self.worst)}")
        return self

    @field_validator("share")
    @classmethod
    def _from_one_label_to_another(cls, share: Condition) -> Condition:
        if share and [len(axis_labels) for axis_labels in share.values()] != [2]:
            labels_text = ", ".join(f"{axis}: {', '.join(axis_labels)}" for axis, axis_labels in share.items())
            raise ValueError(f"expected two labels of one axis, from and to, got {labels_text}")
        return share

    @field_validator("minus")
    @classmethod
    def _one_label(cls, minus: Condition) -> Condition:
        for axis, axis_labels in minus.items():
            if len(axis_labels) != 1:
                raise ValueError(f"{axis}: expected one label, got {', '.join(axis_labels)}")
        return minus


def _headings(value: Any) -> dict[str, Any]:
    """Headings by name; a text as the value of a heading is short for {source: text}."""
    return {k: v if isinstance(v, dict) else {"source": v} for k, v in mapping(value).items()}


Headings = Annotated[dict[str, Heading], BeforeValidator(_headings, json_schema_input_type=dict[str, str | Heading])]
Texts = Annotated[
    dict[str, str],
    PlainValidator(
        lambda value: {key: str(text) for key, text in mapping(value).items()}, json_schema_input_type=dict[str, Label]
    ),
]


def _alternatives(value: Any) -> Any:
    if not (isinstance(value, list) and value):
        raise ValueError("expected a list of conditions, such as [{method: FAT}, {method: SFAT, split: IID}]")
    return value


Alternatives = Annotated[list[Condition], BeforeValidator(_alternatives)]


class Reference(Node):
    """Numbers in a CSV file that are printed beside ours, and how its labels map to ours."""

    file: Annotated[Path, PlainValidator(str, json_schema_input_type=str)]
    match: Texts = Field(default={})
    rows: Texts = Field(default={})  # axis -> CSV column
    labels: Texts = Field(default={})  # our label -> the CSV's
    values: Texts = Field(default={})  # heading -> CSV column; "{axis}" stands for the label of an `across` axis
    std: Texts = Field(default={})
    to: Texts = Field(default={})  # in a figure: columns of the upper ends of ranges
    unit: Literal["percent", "plain"] = "percent"  # or plain for distances and counts
    times: float = 1.0  # in a figure: factor from the file's unit to ours

    @field_validator("file")
    @classmethod
    def _find_file(cls, name: str, info: ValidationInfo) -> Path:
        folders = (info.context or {})["folders"]
        if Path(name).is_absolute() or ".." in Path(name).parts:  # an error message could print the content of any file
            raise ValueError(f"give a file in the suite's folder, got {name}")
        existing_file = next((file for folder in folders if (file := folder / name).is_file()), None)
        if existing_file is None:
            raise ValueError(f"no such file: {name}")
        return existing_file


class Published(Reference):
    """The numbers that a paper printed."""

    select: Selected = "unknown"  # the paper's choice of checkpoint; unknown: not stated


class Displayed(Node):
    """The common part of tables and figures; `id` names one in files and messages."""

    id: Text
    title: Text
    where: Condition = Field(default={})
    note: Note = ""
    published: Published | None = None  # in a figure of bars, marked beside ours
    formula: Reference | None = None  # numbers that no paper prints, such as an expectation

    @property
    def reference(self) -> Reference | None:
        """The numbers beside ours, published or of a formula, or None."""
        return self.published or self.formula

    @property
    def reference_key(self) -> str:
        """The key under which a suite file has `reference`."""
        return "published" if self.published else "formula"

    @property
    def headings(self) -> dict[str, Heading]:
        raise NotImplementedError

    @property
    def conditions(self) -> dict[str, Condition]:
        """heading -> the condition on its points, for headings that have one."""
        return {heading: heading_spec.where for heading, heading_spec in self.headings.items() if heading_spec.where}


class PairedTest(Node):
    """A test of each label of an axis against one of them, paired by seed."""

    axis: Annotated[str, PlainValidator(str, json_schema_input_type=str)]
    against: Annotated[str, PlainValidator(str, json_schema_input_type=Label)]


def _rows(value: Any, info: ValidationInfo) -> list[str]:
    return [known_axis(axis, {**dict.fromkeys(threats.AXES), **(info.context or {})["axes"]}) for axis in labels(value)]


class Table(Displayed):
    """One table of a paper, or of ours: the axes of its rows and column groups, and its numbers."""

    # axes, or names in threats.AXES
    rows: Annotated[list[str], PlainValidator(_rows, json_schema_input_type=OneOrMore)]
    across: Axes = Field(default=[])
    sources: Headings = Field(alias="values")
    best: dict[str, Best] = Field(default="max", validate_default=True)
    best_within: Literal["column", "row"] = "column"  # the numbers among which the best is marked, see `significance`
    compare_across: Axes = Field(default=[])  # axes whose labels are compared whatever they set, such as the objective
    test: PairedTest | None = Field(default=None, alias="paired")
    ties: bool = True  # test compared numbers and mark the best (bold, ↓); False: no marks

    @property
    def headings(self) -> dict[str, Heading]:
        return self.sources

    @property
    def values(self) -> dict[str, str]:
        """heading -> source, see docs/suites.md."""
        return {heading: heading_spec.source for heading, heading_spec in self.sources.items()}

    @property
    def paired(self) -> tuple[str, str] | None:
        """(axis, label) of the reference of the paired test, or None."""
        return None if self.test is None else (self.test.axis, self.test.against)

    @field_validator("best", mode="before", json_schema_input_type=Best | dict[str, Best])
    @classmethod
    def _direction_by_heading(cls, best: Any, info: ValidationInfo) -> dict[str, str]:
        """heading -> max, min or none, from one for all or some by name; a spread over clients is never best."""
        named_best = best if isinstance(best, dict) else {}
        default = "max" if isinstance(best, dict) else str(best)
        best_by_heading = {}
        for heading, spec in info.data.get("sources", {}).items():
            unranked = spec.relative or (default == "max" and UNRANKED.search(spec.source))
            direction = best_by_heading[heading] = str(named_best.get(heading, "none" if unranked else default))
            if direction not in ("max", "min", "none"):
                raise ValueError(f"{heading}: expected max, min or none, got '{direction}'")
        return best_by_heading

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Table:
        for heading, source in self.values.items():
            match = SOURCE.match(source)
            if match is not None and match["client"] == "*":
                raise Misfit(f"only a figure shows each client of '{source}'", "values", heading)
            if not match or match["stage"] == "artifact":
                raise Misfit(f"cannot read the source '{source}' (see docs/suites.md)", "values", heading)
        if self.best_within == "row" and not self.across:
            raise Misfit("row: marking the best of a row needs axes in 'across'", "best_within")
        if self.published is not None and self.formula is not None:
            raise Misfit("a table has either published numbers or those of a formula", "formula")
        if (reference := self.reference) is not None:
            for heading in (*reference.values, *reference.std):
                if heading not in self.sources:
                    hint = did_you_mean(heading, self.sources)
                    raise Misfit(f"the table has no column '{heading}'{hint}", self.reference_key, "values")
        if self.test is not None:
            axis, shown_axes = self.test.axis, [*self.rows, *self.across]
            if axis not in shown_axes:
                hint = did_you_mean(axis, shown_axes)
                raise Misfit(f"the table has no axis '{axis}' in 'rows' or 'across'{hint}", "paired", "axis")
            try:
                known_label(axis, self.test.against, (info.context or {})["axes"])
            except ValueError as error:
                raise Misfit(error, "paired", "against") from None
        return self


def _panels(value: Any, info: ValidationInfo) -> list[str]:
    return [known_axis(axis, {**(info.context or {})["axes"], SERIES: ()}) for axis in labels(value)]


class Figure(Displayed):
    """One figure: the axes of its panels and lines, and the series that it draws."""

    kind: Kind = "lines"
    # axes, or SERIES
    panels: Annotated[list[str], PlainValidator(_panels, json_schema_input_type=OneOrMore)] = Field(default=[])
    lines: Axes = Field(default=[])
    sources: Headings = Field(alias="series")
    scale: Literal["linear", "log"] = "linear"  # of the vertical axis
    xlabel: Text = "round"  # the name of a round, such as epoch
    ylabel: Note = ""  # the quantity of a panel with several headings, unless they are fractions
    include: Alternatives = Field(default=[])  # only points that meet one of these conditions; empty: all
    minus: Condition = Field(default={})  # subtract the number of the same point and seed with these labels

    @property
    def headings(self) -> dict[str, Heading]:
        return self.sources

    @property
    def series(self) -> dict[str, str]:
        """heading -> source, see docs/suites.md."""
        return {heading: heading_spec.source for heading, heading_spec in self.sources.items()}

    @field_validator("id")
    @classmethod
    def _names_a_file(cls, id: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", id):
            raise ValueError(f"the id names a file: use letters, digits, '.', '_' and '-', got '{id}'")
        return id

    @field_validator("sources")
    @classmethod
    def _check_sources(cls, sources: dict[str, Heading]) -> dict[str, Heading]:
        if not sources:
            raise ValueError("a figure needs at least one series")
        return sources

    @model_validator(mode="after")
    def _check(self) -> Figure:
        for heading, heading_spec in self.sources.items():
            if heading_spec.minus:
                raise Misfit("in a figure, put 'minus' beside 'series'", "series", heading, "minus")
            for relation in ("share", "worst"):
                if getattr(heading_spec, relation):
                    raise Misfit(f"only a table shows a '{relation}'", "series", heading, relation)
        for heading, source in self.series.items():
            if problem := _why_not_drawn(source, self.kind):
                raise Misfit(problem, "series", heading)
        for axis, axis_labels in self.minus.items():
            if len(axis_labels) != 1:
                raise Misfit(f"expected one label, got {', '.join(axis_labels)}", "minus", axis)
        if (reference := self.reference) is not None:
            if self.kind != "bars":
                subject = "published numbers" if self.published else "a formula's numbers"
                raise Misfit(f"{subject} can be drawn in bars only, not in {self.kind}", self.reference_key)
            for heading in (*reference.values, *reference.to):
                if heading not in self.sources:
                    hint = did_you_mean(heading, self.sources)
                    raise Misfit(f"the figure has no series '{heading}'{hint}", self.reference_key, "values")
        if self.kind == "raster" and (self.lines or len(self.series) > 1):
            raise Misfit("a raster has exactly one series and no 'lines': its rows are the index", "kind")
        are_over_rounds = {source.startswith("train:") for source in self.series.values()}
        if self.kind == "lines" and len(are_over_rounds) > 1:
            raise Misfit("series must be either all over rounds (train:) or all over radii", "series")
        if self.kind == "bars" and len({source.endswith("[*]") for source in self.series.values()}) > 1:
            raise Misfit("give all series an index, [*], or none", "series")
        return self


def distinct(figures: list[Figure]) -> list[Figure]:
    """The figures; Misfit if two share an id, which names their files."""
    for position, figure in enumerate(figures):
        if figure.id in [earlier_figure.id for earlier_figure in figures[:position]]:
            raise Misfit(f"two figures have the id '{figure.id}'", position, "id")
    return figures


def _why_not_drawn(source: str, kind: str) -> str:
    """The reason why a figure of this kind cannot show a source, empty if it can."""
    match = SOURCE.match(source)
    stage = "artifact" if kind in KEPT else "train"
    if match is None:
        hint = did_you_mean(source.split(":")[0], ("train", "artifact")) if ":" in source else ""
        return f"cannot read the source '{source}'{hint or ' (see docs/suites.md)'}"
    evaluated = match["stage"] not in ("train", "artifact", "gap")
    if match["over"] and kind != "bars":
        return f"a figure of kind {kind} cannot show '{source}': draw 'bars'"
    if kind == "raster" and match["client"] != "*":
        return f"a raster has one row per client or class: write 'train:{match['metric']}[*]', not '{source}'"
    if kind == "clients" and (match["stage"], match["client"]) != ("clients", "*"):
        return f"a figure of clients shows each on its own images: write 'clients:{match['metric']}[*]', not '{source}'"
    if kind == "matrix" and not evaluated:
        return f"a matrix shows evaluations, such as a transfer, not '{source}'"
    if stage == "train" and evaluated:
        return f"an evaluation has no rounds: remove '@{match['round']}' from '{source}'" if match["round"] else ""
    if match["stage"] != stage:
        shows = "a tensor stored in a round" if stage == "artifact" else "a number logged in training, or an evaluation"
        return f"a figure of kind {kind} shows {shows}, not '{source}' (did you mean '{stage}:{match['metric']}'?)"
    if match["round"]:
        shows_text = "shows all rounds" if kind in ("lines", "raster") else "shows the last round"
        return f"a figure of kind {kind} {shows_text}: remove '@{match['round']}' from '{source}'"
    if stage == "artifact" and match["client"]:
        return f"a tensor is drawn whole: remove '[{match['client']}]' from '{source}'"
    return ""


# --- the whole file -------------------------------------------------------------------------------------------------


def _in_context(axes: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """The axes, against which the fields after this one are checked."""
    if info.context is not None:
        info.context["axes"] = axes
    return axes


def _file_name(name: str) -> str:
    """`name`, with which the names of figures, pages and exports begin. ValueError if it could be a path."""
    if re.search(r"[/\\]", name) or name.startswith(".") or not name.isprintable():
        raise ValueError(f"expected a name without / and \\ that files can begin with, got {name!r}")
    return name


class Contents(Node):
    """A suite file, merged over the suite that it extends."""

    name: Annotated[Text, AfterValidator(_file_name)]
    title: Text
    description: Note = ""
    extends: Text | None = None
    plugins: list[str] = Field(default=[])  # paths; first those of the suite that it extends
    seeds: Seeds = Field(default=[0])
    threat: Letter | None = None  # the most that an attack on privacy may assume
    base: OverrideMap
    axes: Annotated[AxesOfSuite, AfterValidator(_in_context)] = Field(default={})
    baseline: Baseline = None  # the label with which all others of its axis are compared
    grid: GridSpec = GridSpec()
    evaluate: Evaluate = Evaluate()
    variants: Annotated[dict[str, OverrideMap], BeforeValidator(mapping)] = Field(default={})  # settings, over `base`
    presets: Presets = Field(default={"paper": Preset()})
    tune: Tune | None = None
    tables: list[Table] = Field(default=[])
    figures: Annotated[list[Figure], AfterValidator(distinct)] = Field(default=[])
    tests: Annotated[list[Tests], BeforeValidator(as_list, json_schema_input_type=Tests | list[Tests])] = Field(
        default=[]
    )
