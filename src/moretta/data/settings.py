"""Settings of where rows come from and who holds which: `[data]` of a run file, and a silo's file."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, ValidationInfo, field_validator, model_validator

from moretta.contract.settings import SERVER, Fraction, Positive, Section, Spelled, Unit, Words, kebab
from moretta.contract.wording import shown
from moretta.data.domains import check_domains
from moretta.data.images.folder import FOLDER
from moretta.data.images.pixels import ImageForm
from moretta.data.images.sets import OFFICE_HOME, OFFICE_HOME_SIZE, SETS
from moretta.data.layout import SampleLayout
from moretta.data.tables.files import Format, Separator, is_table
from moretta.data.tables.schema import Schema
from moretta.errors import ParameterError

ROWS = Unit("rows")
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
    """Name a silo's file, and the form of a .csv file (`moretta.data.tables.files.Format`).

    Args:
        source: the file, relative to the run file's folder.
        separator: the sign between cells; None detects a comma, a semicolon or a tab in the first line.
        decimal: the sign before the fraction of a number.
        file_encoding: the encoding of the text: any name that Python knows, such as "latin-1".
        absent: words that stand for no value, besides an empty cell, NA, NaN, nan and ?.
        alignment: a file of `moretta align`, where another silo holds other columns of these rows.
        test: a file of this silo's own test rows in the same form, instead of a fraction; all silos have one or none.
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
        """The form of a .csv file."""
        return Format(self.separator, self.decimal, self.file_encoding, self.absent)


class Data(Section):
    """Choose the source of the rows, and which silo holds which rows and columns.

    Args:
        source: a built-in name, a file ending in .csv or .npz, or "module:function". With "files", `files` names a
            table for each silo. With "sites", each silo's rows are on its own machine, and only that knows where
            (`moretta.config.silo_file`). "sites" takes `silos`, `partition`, `grid`, `columns`, `label_holder`,
            `batch_size`, `standardise`, `standardise_targets`, `augment` and the keys from `inputs` on.
        files: a table for each silo by its name: a path, in the form that `separator` and the like give, or a section
            of its own. `schema` reads them all. In a grid they stand row part by row part.
        silos: the number of silos that share the rows; by default 3, or the number that `grid` and `columns` give.
        partition: how rows are dealt to silos (`moretta.data.partition`). "iid" shuffles them. "dirichlet" draws each
            silo's share of a class with concentration `alpha`. "by-label" sorts by target. "same-rows" gives every silo
            the first of `silos` equal parts. "by-domain" gives each silo whole domains in turn, or a part of one
            domain where there are more silos than domains. In "grid" and "by-feature" each pair of a row part and a
            column part is a silo.
        alpha: the concentration of "dirichlet"; the smaller, the more silos differ in their classes.
        sizes: the relative size of each silo under "iid" and "by-label", or of each row part in a grid; None: equal.
        grid: the numbers of row parts and column parts, for "grid" and "by-feature".
        columns: for "by-feature", the columns of each part, by name or by index from 0.
        label_holder: in a grid, the column part, from 1, that holds a row part's labels: one number for all row parts,
            or one for each; None is 1.
        domains: domains to make from one source of images. Every row, test rows too, goes to one of them, and its image
            is changed accordingly (`moretta.data.domains`). None keeps the images and the source's domains.
        id_column: the column of a .csv file that holds each row's own id; it is not a feature.
        batch_size: the number of rows in a batch; 0 is all rows of a silo.
        path: the folder or file of a built-in source.
        target: the column to predict; None is the last one.
        task: the kind of targets: classes, or numbers; None lets their type decide.
        test_fraction: the fraction of rows held back for testing, where the source has no test part. With 0 nothing
            measures how good the model is. None is 0.2, or the source's own default (bank-marketing: 0.1).
        validation_fraction: the fraction of rows held back for early stopping. With source = "sites" each site holds
            back its own, and scores the model of each evaluated round on them. None is 0, or the source's own default
            (bank-marketing: 0.1).
        encoding: the coding of text columns. "one-hot" is the default. "yes-no" is the same, but columns of yes and no
            become 1 and 0. "ordinal" numbers the words.
        missing: without a schema, the treatment of absent values. "error" refuses them. "mean" fills in the column's
            mean. "indicator" also adds a column that marks them. "median" is refused, because it needs a range that
            only a schema declares.
        schema: a file with the meaning of a table's columns (`moretta.data.tables.schema`); the run file takes it over
            as its section [columns]. None infers it, and prints it before the first round; a table at sites needs one.
        separator: the sign between the cells of .csv files; None detects a comma, a semicolon or a tab in the first
            line.
        decimal: the sign before the fraction of a number in .csv files.
        file_encoding: the encoding of .csv files: any name that Python knows, such as "latin-1".
        absent: words that stand for no value in .csv files, besides an empty cell, NA, NaN, nan and ?.
        image_size: the side of the square images. None is 64 for "office-home", and keeps the size of all other images.
        labels: the table of "image-folder": its column "file" names files below `path`; it also holds their targets.
        group_column: for "image-folder", the column of `labels` with the person or thing that an image is about.
        channels: for "image-folder", 1 for grey and 3 for coloured images; None keeps the number that all images have.
        window: center and width of the values of DICOM and NIfTI images that become 0 to 1; None uses each file's own.
        spacing: the distance of pixels to which such images are resampled; None keeps theirs. It also applies at sites,
            like `window` and the shape in `inputs`.
        plane: the plane of a NIfTI volume that is the sample: the middle "axial", "coronal" or "sagittal" one. None
            takes volumes of a single slice.
        channel_mean: numbers to subtract from each channel of pixels in [0, 1], for images here and at sites. They are
            public constants of the run, never computed from its rows.
        channel_deviation: numbers to divide each channel by after `channel_mean` is subtracted.
        standardise: whether each column is brought to mean 0 and deviation 1. None is true for tables, and false for
            images and module:function. For samples of several arrays, a list names the arrays; true takes those of
            numbers in one axis that are not masks of 0 and 1.
        standardise_targets: whether targets that are numbers are brought to mean 0 and deviation 1 for training, by
            statistics over all silos' rows. Predictions, exports and scores keep the targets' units. None is false.
        augment: the variation of training images at each use (`moretta.protocols.common.augmentation`). "crop-flip"
            crops and mirrors them at random with zeros at the edges, "reflect-crop-flip" with mirrored pixels. "turn"
            rotates by any angle, shifts and scales by up to a tenth, and changes contrast and brightness by up to a
            fifth.
        inputs: the shape of a sample at sites, or the shape of each of its arrays by name (`moretta.data.layout`); at
            most 2147483647 numbers in 16 axes, and 4194304 columns where columns are split.
        tokens: whether samples at sites are token ids, or the names of the arrays that are.
        classes: the number of classes at sites; None: targets are numbers.
        outputs: the number of targets of a row at sites, where they are numbers.
        mask: the shape of masks in arrays at sites, such as [height, width], with a class of `classes` at each
            position; None: targets are not masks, or are files that a schema names.
        least_rows: the fewest rows (groups under dp-unit = "group") of any site, a public number that dp-noise needs;
            a site with fewer refuses.
        look: whether a secure sum counts the rows and classes of all silos together before round one, for the server
            and for `data` in result.json (`moretta look` shows rows on one machine).
        test: with rows at sites, the server's own test rows: a .csv or .npz file or "module:function"; None: no test
            rows. With rows here, a table of whole rows that replaces `test_fraction`.
        score_at_silos: whether sites score the final model on the rows that they hold back (test-fraction of
            silo.toml), and sum the scores in secret (`moretta.protocols.common.scoring`). With "classes", three silos
            or more also sum a confusion matrix and the confidence of predictions.
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
        """The form of .csv files."""
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
    def image(self) -> ImageForm:
        """The form of images in files; at sites `inputs` has their channels and size."""
        channels, size = self.shape[:2] if self.at_sites else (self.channels, self.image_size)
        size = OFFICE_HOME_SIZE if size is None and self.source == OFFICE_HOME else size
        values = self.window, self.spacing, self.channel_mean, self.channel_deviation, self.plane
        return ImageForm(size, channels, *values)

    def has_images(self, table: Schema | None) -> bool:
        """Return whether samples are images in files. table: the schema of the rows."""
        in_folder = self.source in (FOLDER, OFFICE_HOME, *SETS)
        return in_folder or (self.at_sites and table is not None and not table.features)

    @property
    def of_silos(self) -> dict[str, FileOfRows]:
        """`files`, with each path alone as a file of this form."""
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
                "[data] domains needs pixels in [0, 1]; remove it, or channel-mean and channel-deviation"
            )
        if self.augment == "turn" and (self.channel_mean is not None or self.standardise):
            raise ParameterError(
                '[data] augment = "turn" needs pixels in [0, 1]; remove it, or standardise, channel-mean and '
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
        """Raise ParameterError for keys of rows at sites where rows are here, or the other way round."""
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
                    f'[data] {kebab(name)} is about rows, which with source = "sites" each site describes in its own '
                    "silo.toml; remove it here"
                )
        if self.partition not in ("iid", *GRIDS):
            raise ParameterError(
                f'[data] partition = "{self.partition}" splits one set of rows, but each site has its own; remove it'
            )
        self._check_arrays()

    def _check_arrays(self) -> None:
        """Raise ParameterError for a sample that is too large, or keys that do not fit its arrays."""
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
                        f"[data] {name} lists arrays, and inputs is the shape of one; set true or false"
                    )
            return
        if self.tokens is True:
            raise ParameterError(
                '[data] tokens: expected names of the arrays of inputs that hold token ids, for example ["ids"]'
            )
        try:
            layout = self.layout
        except ParameterError as error:
            raise ParameterError(f"[data] {error}") from None
        columns = [array.name for array in layout.arrays if array.may_be_standardised] if layout else []
        if self.standardise is True or (self.standardise is None and columns):
            raise ParameterError(
                f"[data] standardise: expected a list of arrays, of {', '.join(columns) or 'these'}, or []; name those "
                "to standardise, as nobody sees all sites' rows to recognise masks"
            )
        if self.partition in GRIDS:
            raise ParameterError(
                f'[data] partition = "{self.partition}" splits the columns of one array, and inputs names several'
            )

    def _check_files(self, changed: Sequence[str]) -> None:
        """Raise ParameterError for keys that do not go with a file for each silo."""
        if not self.in_files or not self.files:
            raise ParameterError(
                f"[data] source = {shown(self.source)}, but [data.files] has {len(self.files)} tables; source = "
                '"files" needs a table for each silo there, for example north = "north.csv": set both, or neither'
            )
        if len(self.files) != self.silos:
            raise ParameterError(
                f"[data] files names {len(self.files)} silos, expected silos = {self.silos}; remove silos, or the grid "
                "that sets it"
            )
        in_grid = self.partition in GRIDS
        wrong = dict.fromkeys(NOT_OF_FILES, 'is not supported by source = "files"')
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
                f"[data.files.{tested[0]}] test: expected one for each silo of whole rows, and no [data] test; set it "
                "for each silo, or remove it and name all test rows in [data] test"
            )
        if aligned and not in_grid:
            raise ParameterError(
                f"[data.files.{aligned[0]}] alignment is for silos that hold different columns of the same rows; "
                'remove it, or set partition = "by-feature" and columns'
            )
        if not in_grid and self.partition != "iid":
            raise ParameterError(
                f'[data] partition = "{self.partition}" splits one set of rows, but each silo has its own file; '
                "remove it"
            )


def check_grid(data: Data) -> None:
    """Raise ParameterError for settings that do not belong to a partition, are missing from it, or do not fit.

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
                raise ParameterError(f"columns: part {number} is empty; add a column to it, or remove it")
        rows, parts = shape_of_grid(data)
        holders = data.label_holder
        if isinstance(holders, tuple) and len(holders) != rows:
            raise ParameterError(
                f"label-holder has {len(holders)} numbers for {rows} row parts; set one number for all, or one for each"
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
            f"silos = {silos} is not a multiple of the {len(columns)} column parts; expected a silo for each pair of "
            f"a row part and a column part: set a multiple of {len(columns)}"
        )
    return silos // len(columns), len(columns)


def label_holders(data: Data) -> tuple[int, ...]:
    """Return, for each row part of a grid, the column part from 1 that holds its labels."""
    holder = 1 if data.label_holder is None else data.label_holder
    return holder if isinstance(holder, tuple) else (holder,) * shape_of_grid(data)[0]
