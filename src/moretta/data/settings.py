"""Settings of where rows come from and who holds which: `[data]` of a run file, and a silo's file."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, ValidationInfo, field_validator, model_validator

from moretta.contract.settings import SERVER, Fraction, Positive, Section, Spelled, Unit, Words, kebab
from moretta.contract.wording import shown
from moretta.data.domains import check_domains
from moretta.data.layout import SampleLayout
from moretta.data.tables.files import Format, Separator, is_table
from moretta.errors import ParameterError

ROWS = Unit("rows")
Pair = tuple[float, float]
PYTHON = "python"  # the source of rows that a program gives itself: no run file has it
GRIDS = ("by-feature", "grid")  # partitions that split columns
MOST_AXES, MOST_NUMBERS, MOST_COLUMNS = 16, 2**31 - 1, 2**22  # of a sample at a site; columns of one that is split

# Keys of [data] that say where rows are and how they are read and dealt out, and those of rows at sites.
OF_ROWS_HERE = (
    "alpha", "sizes", "domains", "id_column", "path", "target", "task", "test_fraction", "validation_fraction",
    "encoding", "image_size", "labels", "group_column", "channels",
)  # fmt: skip


OF_SITES = ("inputs", "tokens", "classes", "outputs", "mask", "least_rows", "test", "score_at_silos")
NOT_OF_FILES = (
    "alpha", "sizes", "domains", "id_column", "path", "target", "encoding", "missing", "image_size",
    "labels", "group_column", "channels", "window", "spacing", "plane", "channel_mean", "channel_deviation",
    *(name for name in OF_SITES if name != "test"),
)  # fmt: skip


def _as_tuples(value: object) -> object:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def _are(value: object, *kinds: type) -> bool:
    """Return whether a value is a tuple of these types alone; true is no whole number."""
    return isinstance(value, tuple) and all(type(part) in kinds for part in value)


# By key: what is expected, in words that pydantic lacks, and whether a value fits.
_FORMS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "score_at_silos": ('true, false or "classes"', lambda value: isinstance(value, bool) or value == "classes"),
    "grid": (
        "how many row parts and column parts, for example [2, 2]",
        lambda value: _are(value, int) and len(value) == 2 and min(value) >= 1,
    ),
    "window": (
        "the center and the width of the values to be shown, for example [40, 400]",
        lambda value: _are(value, int, float) and len(value) == 2,
    ),
    "columns": (
        'a list of columns for each part, for example [["age", "job"], ["balance"]]',
        lambda value: _are(value, tuple) and value and all(_are(part, str, int) for part in value),
    ),
    "label_holder": (
        "the number of a column part, or a list of them",
        lambda value: type(value) is int or _are(value, int),
    ),
}


class FileOfRows(Section):
    """A silo's file, and how a .csv file is written (`moretta.data.tables.files.Format`).

    source: the file, from the run file's folder.
    separator: what stands between cells; None: it is found out from the first line, among a comma, a semicolon and a
        tab.
    decimal: what stands before the fraction of a number.
    file_encoding: how the text is encoded: any name that Python knows, such as "latin-1".
    absent: words that stand for no value, besides an empty cell, NA, NaN, nan and ?.
    alignment: a file of `moretta align`, where another silo holds other columns of these rows.
    test: a file of test rows of this silo's, written alike, in the place of a fraction; then each silo has one.
    """

    source: Words
    separator: Separator | None = None
    decimal: Literal[".", ","] = "."
    file_encoding: Words = "utf-8"
    absent: tuple[Words, ...] = ()
    alignment: Path | None = None
    test: Words | None = None

    @property
    def form(self) -> Format:
        """How it is written."""
        return Format(self.separator, self.decimal, self.file_encoding, self.absent)


class Data(Section):
    """Where the rows come from, and who holds which.

    source: a built-in name, a file ending in .csv or .npz, or "module:function"; or "files": each silo's rows are in a
        table of its own, which `files` names; or "sites": each silo's rows are on a
        machine of its own, which alone knows where (`moretta.config.silo_file`). Then only these keys apply: `silos`,
        `partition`, `grid`, `columns`, `label_holder`, `batch_size`, `standardise`, `standardise_targets`, `augment`,
        and the last ones, which say what the rows are like.
    files: a table for each silo by its name: a path, of a file that is written as `separator` and so on say, or a
        section of its own. All are read by `schema`. In a grid they stand row part by row part.
    silos: how many silos the rows are dealt out to; 3 unless given, or with `grid` and `columns` what those say.
    partition: "iid"; "dirichlet" over classes with concentration `alpha`; "by-label"; "same-rows", the first of `silos`
        equal parts of the rows, which every silo has; "by-domain", whole domains to
        silos in turn, or with more silos than domains an equal part of one domain to each, in turn; or "grid" and
        "by-feature", where each pair of a row part and a column part is a silo: see `moretta.data.partition`.
    alpha: the concentration of "dirichlet"; the smaller, the more do silos differ in their classes.
    sizes: how the rows are shared out, a positive part for each silo, for "iid" and "by-label", and for each row part
        in a grid; None: evenly.
    grid: how many row parts and column parts, for "grid" and "by-feature".
    columns: for "by-feature", the columns of each part, by name or by index from 0.
    label_holder: in a grid, the column part, from 1, that holds a row part's labels: one number for all, or one for
        each; None is 1.
    domains: makes several domains out of one source of images. Every row, test rows too, is dealt to one of these, and
        its image is changed accordingly (`moretta.data.domains`). None keeps the images and the source's domains.
    id_column: the column of a .csv file that names whom a row belongs to; it is no feature, and no two rows share one.
    batch_size: how many rows a batch has; 0 is a silo's whole data.
    path: where a built-in source finds its files.
    target: the column to predict; None is the last one.
    task: what targets are: classes, or numbers; None lets their type decide.
    test_fraction: which part of the rows is held back to test by, where the source does not split them itself; 0: none,
        and nothing says how good the model is; None is 0.2, or the source's own default (bank-marketing: 0.1).
    validation_fraction: which part of the rows is held back for early stopping; with source = "sites" of each site's
        own, which scores the model of each evaluated round on it. None is 0, or the source's own default
        (bank-marketing: 0.1).
    encoding: what becomes of text columns: "one-hot", which None is; "yes-no", the same but for columns of yes and no,
        which become 1 and 0; or "ordinal".
    missing: without a schema, an absent value is an error, or becomes the column's mean, or that with one more column
        to mark it ("indicator"); "median" is refused, as a median is counted within a range that a schema declares.
    schema: a file that says what a table's columns mean (`moretta.data.tables.schema`); it is read into the section
        [columns] of the run file. None: it is inferred, and printed before the first round; for rows at sites a table
        needs one.
    separator: what stands between the cells of .csv files; None: it is found out from the first line, among a comma, a
        semicolon and a tab.
    decimal: what stands before the fraction of a number in .csv files.
    file_encoding: how the text of .csv files is encoded: any name that Python knows, such as "latin-1".
    absent: words that stand for no value in .csv files, besides an empty cell, NA, NaN, nan and ?.
    image_size: how many pixels a side of the square images has. None is 64 for "office-home", and takes those of all
        other image sources as they are.
    labels: the .csv file of "image-folder": it names files below `path` in its column "file", and their targets.
    group_column: the column of `labels` that says whom an image is about, for "image-folder".
    channels: 1 for grey images and 3 for coloured ones, for "image-folder"; None: as all of them are.
    window: center and width of the values of DICOM and NIfTI images that become 0 to 1; None: as each file says.
    spacing: how many mm there are from pixel to pixel once such images are resampled; None: as they are. Rows at sites
        have it too, as they have `window` and the shape in `inputs`.
    plane: which plane of NIfTI volumes a sample is: the one in their middle that is "axial", "coronal" or "sagittal";
        None: of volumes of a single slice that.
    channel_mean: what is taken from each channel of pixels in [0, 1], for image sources and images at sites: public
        constants of the run, never computed from its rows.
    channel_deviation: what each channel is divided by after `channel_mean` is taken from it.
    standardise: whether each column is brought to mean 0 and deviation 1. None is true for tables and false for images
        and for module:function. Where samples have several arrays, true is those of numbers in one axis that are no
        mask of 0 and 1, and a list names others.
    standardise_targets: whether targets that are numbers are brought to mean 0 and deviation 1 for training, by
        statistics over all silos' rows; predictions, exports and scores are in the targets' own units. None is false.
    augment: vary training images each time they are used: "none"; random crops and mirror images, "crop-flip", with
        zeros at their edges, or "reflect-crop-flip", with mirrored pixels; or "turn": turns by any angle, shifts and
        scales by up to a tenth, contrast and brightness by up to a fifth (`moretta.protocols.common.augmentation`).
    inputs: the shape of a sample of rows at sites, or the shape of each of its arrays by name (`moretta.data.layout`);
        at most 2147483647 numbers in 16 axes, and 4194304 columns where columns are split.
    tokens: whether samples of rows at sites are token ids, or the names of the arrays that hold such.
    classes: how many classes rows at sites have; None: their targets are numbers.
    outputs: how many targets a row at a site has, where these are numbers.
    mask: the shape of masks in arrays at sites, a class of `classes` at each position, such as [height, width]; None:
        targets are no masks, or files that a schema names.
    least_rows: the fewest rows (groups under dp-unit = "group") that any site has, which dp-noise needs to know; a site
        with fewer refuses.
    look: count rows and classes of all silos together before round one, by a secure sum: for the server, and `data` in
        result.json (`moretta look` shows rows on one machine).
    test: the server's own test rows, where silos' rows are at sites: a .csv or .npz file or "module:function"; None: it
        has none. Where rows are here, in a table or in a file for each silo, a table of whole rows in the place of
        `test_fraction`.
    score_at_silos: whether sites score the outcome on the rows that each of them holds back (test-fraction of its
        silo.toml); their scores are summed in secret (`moretta.protocols.common.scoring`). "classes": they also sum how
        many rows of each class are predicted as which, and how sure predictions are, of three silos or more together.
    """

    source: Words
    files: Annotated[dict[Words, Words | FileOfRows], SERVER] = {}  # noqa: RUF012  # pydantic copies it
    silos: PositiveInt = 3
    partition: Literal["iid", "dirichlet", "by-label", "same-rows", "by-domain", "by-feature", "grid"] = "iid"
    alpha: Positive | None = None
    sizes: tuple[Positive, ...] | None = None
    grid: Annotated[tuple[int, int] | None, Spelled("list of 2 whole numbers, each 1 or more")] = None
    columns: Annotated[tuple[tuple[str | int, ...], ...] | None, Spelled("list of lists of names or whole numbers")] = (
        None
    )
    label_holder: Annotated[int | tuple[int, ...] | None, Spelled("whole number, or list of them")] = None
    domains: tuple[str, ...] | None = None
    id_column: Words | None = None
    batch_size: Annotated[int, Field(ge=0), ROWS] = 32
    path: Path | None = None
    target: Words | None = None
    task: Literal["classification", "regression"] | None = None
    test_fraction: Fraction | None = None
    validation_fraction: Fraction | None = None
    encoding: Literal["one-hot", "yes-no", "ordinal"] | None = None
    missing: Literal["error", "mean", "median", "indicator"] = "error"
    separator: Annotated[Separator | None, SERVER] = None
    decimal: Annotated[Literal[".", ","], SERVER] = "."
    file_encoding: Annotated[Words, SERVER] = "utf-8"
    absent: Annotated[tuple[Words, ...], SERVER] = ()
    image_size: Annotated[PositiveInt | None, Unit("pixels")] = None
    labels: Path | None = None
    group_column: Words | None = None
    channels: Literal[1, 3] | None = None
    window: tuple[float, float] | None = None
    spacing: Annotated[Positive | None, Unit("mm")] = None
    plane: Literal["axial", "coronal", "sagittal"] | None = None
    channel_mean: tuple[float, ...] | None = None
    channel_deviation: tuple[Positive, ...] | None = None
    standardise: bool | tuple[Words, ...] | None = None
    standardise_targets: bool | None = None
    augment: Literal["none", "crop-flip", "reflect-crop-flip", "turn"] = "none"
    inputs: tuple[PositiveInt, ...] | dict[str, tuple[PositiveInt, ...]] | None = None
    tokens: bool | tuple[Words, ...] = False
    classes: Annotated[int, Field(ge=2)] | None = None
    outputs: PositiveInt | None = None
    mask: Annotated[tuple[Annotated[PositiveInt, Field(le=65535)], ...], Field(min_length=1, max_length=3)] | None = (
        None
    )
    least_rows: Annotated[PositiveInt | None, ROWS] = None
    test: Annotated[Words | None, SERVER] = None
    score_at_silos: bool | Literal["classes"] = False
    look: bool = False

    @property
    def form(self) -> Format:
        """How .csv files are written."""
        return Format(self.separator, self.decimal, self.file_encoding, self.absent)

    @property
    def varied(self) -> str:
        """How training images are varied; empty: not."""
        return "" if self.augment == "none" else self.augment

    @property
    def silos_validate(self) -> bool:
        """Whether silos hold back validation rows of their own, on which they score the model on the way."""
        return bool(self.validation_fraction) and (self.at_sites or self.source == PYTHON)

    @property
    def at_sites(self) -> bool:
        """Whether rows are on machines of their own."""
        return self.source == "sites"

    @property
    def in_files(self) -> bool:
        """Whether each silo's rows are in a file of their own here."""
        return self.source == "files"

    @property
    def of_images(
        self,
    ) -> tuple[Pair | None, float | None, tuple[float, ...] | None, tuple[float, ...] | None, str | None]:
        """What images become, as `moretta.data.images.pixels.ImageForm` takes it behind their size and channels."""
        return self.window, self.spacing, self.channel_mean, self.channel_deviation, self.plane

    @property
    def of_silos(self) -> dict[str, FileOfRows]:
        """`files`, where a path alone is that of a file written as `form` says."""
        form = {key: getattr(self, key) for key in ("separator", "decimal", "file_encoding", "absent")}
        return {
            name: FileOfRows(source=file, **form) if isinstance(file, str) else file
            for name, file in self.files.items()
        }

    @property
    def layout(self) -> SampleLayout | None:
        """Of rows at sites, how the arrays of a sample are packed; None where a sample is one array."""
        if not isinstance(self.inputs, dict):
            return None
        tokens, standardised = (() if isinstance(names, bool) else names for names in (self.tokens, self.standardise))
        return SampleLayout.declared(self.inputs, tokens or (), standardised or ())

    @property
    def shape(self) -> tuple[int, ...]:
        """Of rows at sites, the shape of a sample, packed where it has several arrays."""
        return self.inputs if isinstance(self.inputs, tuple) else (self.layout.size,) if self.layout else ()

    @field_validator(*_FORMS, mode="before")
    @classmethod
    def _has_its_form(cls, value: object, info: ValidationInfo) -> object:
        expected, fits = _FORMS[info.field_name or ""]
        value = _as_tuples(value)
        if value is None or fits(value):
            return value
        raise ValueError(expected)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if "silos" not in self.model_fields_set and (self.grid or self.columns):  # frozen, but for its own default
            object.__setattr__(self, "silos", math.prod(self.grid) if self.grid else len(self.columns or ()))
        try:
            check_grid(self)
            if self.domains is not None:
                check_domains(self.domains)
        except ParameterError as error:
            raise ParameterError(f"[data] {error}") from None
        if self.partition == "dirichlet" and self.alpha is None:
            raise ParameterError('[data] alpha is missing; partition = "dirichlet" needs it, for example alpha = 0.5')
        if self.partition != "dirichlet" and self.alpha is not None:
            raise ParameterError(
                f'[data] alpha belongs to partition = "dirichlet", not to "{self.partition}"; remove it'
            )
        if self.domains is not None and self.channel_mean is not None:
            raise ParameterError(
                "[data] domains are made of pixels in [0, 1]; remove it, or channel-mean and -deviation"
            )
        if self.augment == "turn" and (self.channel_mean is not None or self.standardise):
            raise ParameterError(
                '[data] augment = "turn" is for pixels in [0, 1]; remove it, or standardise, channel-mean and '
                "channel-deviation"
            )
        self._check_place()
        own = any(file.test is not None for file in self.of_silos.values())
        if (self.test is not None or own) and self.test_fraction:
            raise ParameterError(
                f"[data] test names the test rows, and test-fraction {self.test_fraction:g} would hold others back; "
                "set test-fraction = 0"
            )
        test, validation = self.test_fraction or 0.0, self.validation_fraction or 0.0
        if test + validation >= 1:
            raise ParameterError(
                f"[data] test-fraction {test:g} and validation-fraction {validation:g} "
                "leave no rows to train on; their sum must be less than 1"
            )
        return self

    def _check_place(self) -> None:
        """Raise ParameterError for keys of rows that are here where they are at sites, or the other way round."""
        keys = [name for name in type(self).model_fields if name in self.model_fields_set]
        changed = self.changed(*keys)
        if self.in_files or self.files:
            self._check_files(changed)
            return
        if self.source == PYTHON:
            return
        if not self.at_sites:
            for name in changed:
                if name in OF_SITES and not (name == "test" and is_table(self.source)):
                    raise ParameterError(
                        f'[data] {kebab(name)} is for source = "sites", not "{self.source}"; remove it'
                    )
            return
        for name in changed:
            if name in OF_ROWS_HERE and name != "validation_fraction":
                raise ParameterError(
                    f'[data] {kebab(name)} is about rows, and with source = "sites" each site\'s own silo.toml says '
                    "where its rows are and how to read them; remove it here"
                )
        if self.partition not in ("iid", *GRIDS):
            raise ParameterError(
                f'[data] partition = "{self.partition}" deals rows out, and sites have theirs already; remove it'
            )
        self._check_arrays()

    def _check_arrays(self) -> None:
        """Raise ParameterError for a sample that is too large, or arrays that do not fit what is said of them."""
        shapes = self.inputs.values() if isinstance(self.inputs, dict) else [self.inputs or ()]
        most = MOST_COLUMNS if self.partition in GRIDS else MOST_NUMBERS
        if max(map(len, shapes), default=0) > MOST_AXES or sum(map(math.prod, shapes)) > most:
            raise ParameterError(
                f"[data] inputs = {shown(self.inputs)}: expected the shape of a sample of at most {most} numbers, in "
                f"at most {MOST_AXES} axes; use smaller samples"
            )
        if not isinstance(self.inputs, dict):
            for name in ("tokens", "standardise"):
                if isinstance(getattr(self, name), tuple):
                    raise ParameterError(
                        f"[data] {name} lists arrays, and inputs is the shape of one; say true or false"
                    )
            return
        if self.tokens is True:
            raise ParameterError('[data] tokens: name the arrays of inputs that hold token ids, for example ["ids"]')
        try:
            layout = self.layout
        except ParameterError as error:
            raise ParameterError(f"[data] {error}") from None
        columns = [array.name for array in layout.arrays if array.may_be_standardised] if layout else []
        if self.standardise is True or (self.standardise is None and columns):
            raise ParameterError(
                f"[data] standardise: name those of {', '.join(columns) or 'the arrays'} that are to be standardised, "
                "as a list, or none, []: nobody sees the rows of all sites, and whether one is a mask"
            )
        if self.partition in GRIDS:
            raise ParameterError(
                f'[data] partition = "{self.partition}" splits the columns of one array, and inputs names several'
            )

    def _check_files(self, changed: Sequence[str]) -> None:
        """Raise ParameterError for keys that do not go with a file for each silo."""
        if not self.in_files or not self.files:
            raise ParameterError(
                '[data] source = "files" and a section [data.files] belong together, which names a table for each '
                f'silo, for example north = "north.csv"; got source = {shown(self.source)} and {len(self.files)} files'
            )
        if len(self.files) != self.silos:
            raise ParameterError(
                f"[data] files names {len(self.files)} silos and silos is {self.silos}; remove silos, or the grid that "
                "says so"
            )
        in_grid = self.partition in GRIDS
        wrong = dict.fromkeys(NOT_OF_FILES, "is not for rows that are in a file for each silo, read by a schema")
        if in_grid:
            held = "would hold back rows that other holders of columns train on; give test, a table of whole rows"
            wrong |= {"test_fraction": held, "validation_fraction": held}
        for name in changed:
            if name in wrong:
                raise ParameterError(f"[data] {kebab(name)} {wrong[name]}; remove it")
        aligned = [name for name, file in self.of_silos.items() if file.alignment is not None]
        tested = [name for name, file in self.of_silos.items() if file.test is not None]
        if tested and (in_grid or self.test is not None or len(tested) < len(self.files)):
            raise ParameterError(
                f"[data.files.{tested[0]}] test is for silos of whole rows that all have one, in the place of one for "
                "all; give each silo its own, or give all test rows in one table, [data] test, and remove it here"
            )
        if aligned and not in_grid:
            raise ParameterError(
                f"[data.files.{aligned[0]}] alignment is for silos that hold different columns of the same rows; "
                'remove it, or give partition = "by-feature" and columns'
            )
        if not in_grid and self.partition != "iid":
            raise ParameterError(
                f'[data] partition = "{self.partition}" deals rows out, and files have theirs; remove it'
            )


def check_grid(data: Data) -> None:
    """Raise ParameterError for what does not belong to a partition, is missing from it, or does not fit.

    It needs no rows, so that a run file can be judged before its rows are read.
    """
    for key, value, homes in (
        ("grid", data.grid, GRIDS),
        ("columns", data.columns, ("by-feature",)),
        ("label-holder", data.label_holder, GRIDS),
    ):
        if value is not None and data.partition not in homes:
            where = " or ".join(f'"{home}"' for home in homes)
            raise ParameterError(f'{key} belongs to partition = {where}, not to "{data.partition}"; remove it')
    if data.partition in GRIDS:
        for number, part in enumerate(data.columns or (), 1):
            if not part:
                raise ParameterError(f"columns: part {number} is empty; give it a column or remove it")
        rows, parts = shape_of_grid(data)
        holders = data.label_holder
        if isinstance(holders, tuple) and len(holders) != rows:
            raise ParameterError(
                f"label-holder has {len(holders)} numbers for {rows} row parts; give one number for all, or one for "
                "each"
            )
        for holder in label_holders(data):
            if not 1 <= holder <= parts:
                raise ParameterError(f"label-holder: expected the number of a column part, 1 to {parts}, got {holder}")


def shape_of_grid(data: Data) -> tuple[int, int]:
    """Return how many row parts and column parts a grid has."""
    silos, columns = data.silos, data.columns
    if data.partition == "by-feature" and columns is None:
        raise ParameterError(
            'columns is missing; partition = "by-feature" needs it, for example columns = [["age", "job"], ["balance"]]'
        )
    if data.grid is not None:
        m_h, m_v = data.grid
        if columns is not None and m_v != len(columns):
            raise ParameterError(
                f"grid = [{m_h}, {m_v}] has {m_v} column parts, but columns has {len(columns)}; make them the same"
            )
        if silos != m_h * m_v:
            raise ParameterError(
                f"silos = {silos} and grid = [{m_h}, {m_v}] differ: that grid has {m_h * m_v} participants; remove "
                "silos"
            )
        return m_h, m_v
    if columns is None:
        raise ParameterError('grid is missing; partition = "grid" needs it, for example grid = [2, 2]')
    if silos % len(columns):
        raise ParameterError(
            f"silos = {silos} does not fit {len(columns)} column parts; it counts every pair of a row part and a "
            f"column part, so give a multiple of {len(columns)}"
        )
    return silos // len(columns), len(columns)


def label_holders(data: Data) -> tuple[int, ...]:
    """Return, for each row part of a grid, the column part from 1 that holds its labels."""
    holder = 1 if data.label_holder is None else data.label_holder
    return holder if isinstance(holder, tuple) else (holder,) * shape_of_grid(data)[0]
