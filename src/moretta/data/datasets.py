"""The data set of a run file: its rows, whose form all of them decide, and their parts.

    load(data, table, seed, base)  -> Split           rows of any source, with a test part
    load_files, load_columns       -> Split, silos    the rows of several silos, each in a file of its own

scikit-learn is needed only for its own sets, `wdbc` and `digits`.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moretta.contract.memory import within_memory
from moretta.contract.messages import Array
from moretta.contract.wording import did_you_mean
from moretta.data.alignment.partner import Alignment
from moretta.data.images import sets
from moretta.data.images.folder import FOLDER, read_labelled
from moretta.data.images.pixels import ImageForm, squares
from moretta.data.layout import packed_parts
from moretta.data.reading import ExpectedRows, Source, called, read
from moretta.data.references import is_reference
from moretta.data.rows import Rows, Split, as_features, as_targets, check_about, check_apart
from moretta.data.settings import Data, label_holders, shape_of_grid
from moretta.data.silo import Silo, aligned
from moretta.data.split import cut, split
from moretta.data.tables.doubts import Encoding, Hints, Missing, Task
from moretta.data.tables.files import ENDINGS, Format, composed, is_table, read_columns
from moretta.data.tables.inference import infer, infer_labels
from moretta.data.tables.preparation import ColumnRules, check_rounding
from moretta.data.tables.rows import encode, expansion_of, rules_of
from moretta.data.tables.schema import Number, Schema
from moretta.errors import MissingExtra, ParameterError

ORIGINS = {name: origin for name, (_, _, origin) in sets.SETS.items()}
ORIGINS["bank-marketing"] = "https://archive.ics.uci.edu/dataset/222/bank+marketing"
"""Where to get the sets that are not part of a package."""

BUILT_IN = ("wdbc", "digits", "bank-marketing", *sets.SETS, sets.OFFICE_HOME, FOLDER)
_BANK = ("bank-additional-full.csv", "bank-additional-full.csv.gz", "bank-full.csv", "bank-full.csv.gz")
MEASURES = "radius texture perimeter area smoothness compactness concavity concave_points symmetry fractal_dimension"
WDBC = tuple(
    form.format(measure.replace("_", " "))
    for form in ("mean {}", "{} error", "worst {}")
    for measure in MEASURES.split()
)
WDBC_CLASSES: tuple[str, ...] = ("malignant", "benign")


@dataclass(frozen=True)
class _Wish:
    """The settings of rows and targets. test, validation: fractions of all rows; or test_rows: a table of test rows."""

    name: str
    task: Task | None
    test: float
    validation: float
    missing: Missing
    seed: int
    test_rows: Source | None = None

    @classmethod
    def of(cls, data: Data, name: str, seed: int, base: Path) -> "_Wish":
        """Return it; the fractions are 0.2 and 0 by default, and of bank-marketing 0.1 both."""
        test, validation = (0.1, 0.1) if name == "bank-marketing" else (0.2, 0.0)
        test = test if data.test_fraction is None else data.test_fraction
        validation = validation if data.validation_fraction is None else data.validation_fraction
        rows = None if data.test is None else Source(data.test, data.form, base=base)
        return cls(name, data.task, test, validation, data.missing, seed, rows)

    def test_by(self, table: Schema) -> Rows | None:
        """Return the test rows of a separate table."""
        return self.test_rows and read(self.test_rows, ExpectedRows.of_table(table), "[data] test")


_Make = Callable[[Rows, Rows, Rows], Split]  # of training, test and validation rows


def load(data: Data, table: Schema | None = None, *, seed: int = 0, base: Path = Path(".")) -> Split:
    """Load the source of a run file's section.

    A source with its own test part keeps it, and validation rows are then from the training rows. Otherwise both parts
    are drawn, stratified by class (office-home: by domain and class).

    Args:
        table: The schema of a table; None infers it.
        seed: Draws the test and validation rows.
        base: The run file's folder, where relative paths and modules start.

    Raises:
        ParameterError: The settings are impossible.
        MissingExtra: A built-in set needs scikit-learn or Pillow.
    """
    source, wish = data.source, _Wish.of(data, data.source, seed, base)
    _refuse_idle(data, table)
    place, form = None if data.path is None else base / data.path, data.form
    image = data.image
    hints = Hints(data.target, data.task, data.id_column, data.encoding or "one-hot", data.missing)
    if source == "bank-marketing":
        return _bank(place, data.target, data.encoding or "one-hot", wish)
    if source in sets.SETS:
        return _of_images(sets.load_images(source, place), wish, image)
    if source == sets.OFFICE_HOME:
        return _of_images(sets.load_office_home(place, image.size or sets.OFFICE_HOME_SIZE), wish, image)
    if source in ("wdbc", "digits"):
        return _scikit(source, wish)
    if source == FOLDER:
        return _image_folder(data, base, image, table, hints, wish)
    if is_table(source):
        return _table(base / source, table, hints, form, wish)
    if source.endswith(".npz"):
        with within_memory(f"{base / source}"):
            return _from_arrays(sets.read_npz(base / source), wish)
    if is_reference(source):
        return _from_arrays(called(source, base), wish)
    raise ParameterError(
        f'source = "{source}" is neither a built-in set, nor a {", ".join(ENDINGS)} or .npz file, nor '
        f'"module:function"; {did_you_mean(source, BUILT_IN)}'
    )


def _refuse_idle(data: Data, schema: Schema | None) -> None:
    """Raise ParameterError for a key that the source does not use."""
    source, bare = data.source, schema is None
    folder, bank = source == FOLDER, source == "bank-marketing"
    table = is_table(source) or folder
    pictures = folder or source == sets.OFFICE_HOME or source in sets.SETS
    for key, value, used, kind in (
        ("schema", schema, table, "a table"),
        ("separator, decimal, file-encoding or absent", None if data.form == Format() else data.form, table, "a table"),
        ("target", data.target, (table and bare) or bank, "a table without a schema"),
        ("task", data.task, bare, "rows without a schema, which says what the target is"),
        ("encoding", data.encoding, (table and bare and not folder) or bank, "a table of features without a schema"),
        ("path", data.path, pictures or bank, "a built-in set of files"),
        ("id-column", data.id_column, table and bare, "a table without a schema"),
        ("image-size", data.image_size, pictures, "images"),
        ("channel-mean", data.channel_mean, pictures, "images"),
        ("channel-deviation", data.channel_deviation, pictures, "images"),
        ("group-column", data.group_column, folder and bare, "image-folder without a schema"),
        ("labels", data.labels, folder, "image-folder, images with a table of labels"),
        ("channels", data.channels, folder, "image-folder, images with a table of labels"),
        ("window", data.window, folder, "image-folder, images with a table of labels"),
        ("spacing", data.spacing, folder, "image-folder, images with a table of labels"),
        ("plane", data.plane, folder, "image-folder, images with a table of labels"),
    ):
        if value is not None and not used:
            raise ParameterError(f'{key} is for {kind}, not for source = "{source}"; remove {key}')


def _table(path: Path, schema: Schema | None, hints: Hints, form: Format, wish: _Wish) -> Split:
    with within_memory(f"{path}"):
        columns = read_columns(path, form, () if schema is None else schema.dropped)
        table = schema or infer(columns, hints, path.name, form)
        rows = encode(columns, table, path.name, form)
        return _from_table(Rows(rows.x, rows.y, rows.ids, rows.groups), table, wish, wish.test_by(table))


def _from_table(rows: Rows, table: Schema, wish: _Wish, test: Rows | None, together: Array | None = None) -> Split:
    """Split a table read by its schema, in proportion of domains too where rows have them."""
    (y, task, classes), strata, expansion = _targets_of(rows.y, table, wish), None, expansion_of(table)
    if rows.domain is not None:
        strata = np.unique(rows.domain, return_inverse=True)[1] * (classes or 1) + (y if classes else 0)
    make = partial(
        Split,
        name=wish.name,
        task=task,
        classes=classes,
        feature_names=expansion.names,
        origins=expansion.origins,
        class_names=table.classes if classes else (),
        column_rules=rules_of(table),
        table=table,
    )
    if test is not None:
        test = replace(test, y=_targets_of(test.y, table, wish)[0])
    return _parts(make, replace(rows, y=y), wish, test=test, strata=strata, together=together)


def _image_folder(data: Data, base: Path, image: ImageForm, schema: Schema | None, hints: Hints, wish: _Wish) -> Split:
    if data.path is None or data.labels is None:
        raise ParameterError(
            f'source = "{wish.name}" needs path, the folder of images, and labels, the table that has a column `file` '
            "and the target"
        )
    labels, form = base / data.labels, data.form
    table = schema or infer_labels(read_columns(labels, form), hints, data.group_column, labels.name, form)
    rows = read_labelled(base / data.path, labels, image, table, written=form)
    y, task, classes = _targets_of(rows.y, table, wish)
    names = table.classes if classes else ()
    make = partial(Split, name=wish.name, task=task, classes=classes, class_names=names, table=table, standardise=False)
    return _parts(make, Rows(rows.x, y, rows.ids, rows.groups), wish)


def _targets_of(y: Array, table: Schema, wish: _Wish) -> tuple[Array, Task, int | None]:
    """Return targets by the run file or the schema, the task, and the number of classes."""
    task: Task = wish.task or ("classification" if table.classes else "regression")
    if task == "classification" and not table.classes:
        raise ParameterError(
            f'{wish.name}: task = "classification" needs a target with classes; list them in the schema'
        )
    return (y, task, len(table.classes)) if task == "classification" else as_targets(y, wish.name, "regression")


def _bank(place: Path | None, target: str | None, encoding: Encoding, wish: _Wish) -> Split:
    file = place
    if place is not None and place.is_dir():
        file = next((place / name for name in _BANK if (place / name).is_file()), None)
    if file is None or not file.is_file():
        got = "no path" if place is None else f"no such file in {place}" if place.is_dir() else f"no file {place}"
        raise ParameterError(
            f'source = "bank-marketing" needs path, bank-additional-full.csv (or .csv.gz) or its folder, got {got}; '
            f"get it at {ORIGINS['bank-marketing']}"
        )
    # the answer and its duration are known together, after the call
    drop = ("duration",) if encoding == "one-hot" else ()
    known = Hints(target or "y", encoding=encoding, missing=wish.missing, drop=drop, known=True)
    return _table(file, None, known, Format(), wish)


def _scikit(source: str, wish: _Wish) -> Split:
    try:
        if source == "wdbc":
            x, y = read_wdbc()
            names, classes = WDBC, WDBC_CLASSES
        else:
            from sklearn import datasets

            digits = datasets.load_digits()
            x, y = digits.data / 16.0, digits.target  # grey levels 0 to 16
            names, classes = tuple(digits.feature_names), tuple(str(name) for name in digits.target_names)
    except ImportError as error:
        raise MissingExtra(f'source = "{source}" needs scikit-learn; run: pip install "moretta[torch]"') from error
    targets, task, count = as_targets(y, source, wish.task)
    class_names = classes if task == "classification" else ()
    make = partial(Split, name=source, task=task, classes=count, feature_names=names, class_names=class_names)
    return _parts(partial(make, standardise=source == "wdbc"), Rows(as_features(x, source), targets), wish)


def read_wdbc() -> tuple[Array, Array]:
    """Return inputs, float64[569, 30] in the order of `WDBC`, and int64[569], 0 malignant or 1 benign.

    It reads scikit-learn's file as `sklearn.datasets.load_breast_cancer` does, without importing scikit-learn, which
    takes nearly as long as PyTorch.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    table = np.loadtxt(Path(package.origin).parent / "datasets/data/breast_cancer.csv", delimiter=",", skiprows=1)
    return table[:, :-1], table[:, -1].astype(np.int64)


def _of_images(images: sets.Images, wish: _Wish, form: ImageForm) -> Split:
    y = images.y if images.y_test is None else np.concatenate([images.y, images.y_test])
    y, task, classes = as_targets(y, wish.name, wish.task)
    names = images.class_names if task == "classification" else ()
    make = partial(Split, name=wish.name, task=task, classes=classes, class_names=names, standardise=False)

    def samples(pixels: NDArray[np.uint8]) -> Array:
        return form.standardised(sets.scaled(squares(pixels, form.size)))

    count = len(images.y)
    if images.x_test is not None:
        return _parts(make, Rows(samples(images.x), y[:count]), wish, test=Rows(samples(images.x_test), y[count:]))
    rows = Rows(samples(images.x), y, groups=images.group, domain=images.domain)
    if images.domain is None:
        return _parts(make, rows, wish)
    strata = np.unique(images.domain, return_inverse=True)[1] * len(images.class_names) + images.y
    split = _parts(make, rows, wish, strata=strata)
    lacking = np.flatnonzero(np.isin(np.arange(len(images.class_names)), split.train.y, invert=True))
    if len(lacking):
        has = int((images.y == lacking[0]).sum())
        raise ParameterError(
            f'{wish.name}: category "{images.class_names[lacking[0]]}" is in no training row ({has} '
            f"{'image' if has == 1 else 'images'} in all); add images to it, or remove its folder"
        )
    return split


def _from_arrays(arrays: Mapping[str, Array], wish: _Wish) -> Split:
    """Arrays x_train, y_train, x_test, y_test, or x and y to be split.

    Instead of x there may be several arrays, ``x.ids``, ``x.mask`` and so on, which are packed
    (`moretta.data.layout`). Optional are domain_train, domain_test, id_train, id_test, group_train and group_test, or
    domain, id and group, [rows] each. All rows of a group are in one part, and test rows share no id or group with
    training rows.
    """
    arrays, layout = packed_parts(arrays, wish.name)
    if layout is not None and wish.missing != "error":
        raise ParameterError(
            f'{wish.name}: missing = "{wish.missing}" is for one table, but a sample here has the arrays '
            f"{', '.join(layout.names)}; fill in their absent values beforehand"
        )
    parted = {"x_train", "y_train", "x_test", "y_test"} <= arrays.keys()
    if not parted and not {"x", "y"} <= arrays.keys():
        raise ParameterError(
            f"{wish.name}: expected arrays x_train, y_train, x_test, y_test, or x and y; "
            f"got {', '.join(arrays) or 'none'}"
        )
    ends = ("_train", "_test") if parted else ("",)
    for name in (f"x{ends[0]}", f"y{ends[0]}"):
        check_rounding(np.asarray(arrays[name]), f"{wish.name}: {name}")
    xs = [as_features(arrays[f"x{end}"], f"{wish.name}: x{end}" if parted else wish.name) for end in ends]
    ys = [arrays[f"y{end}"] for end in ends]
    if parted and (ys[0].shape[1:] != ys[1].shape[1:] or ys[0].ndim == 0):
        raise ParameterError(
            f"{wish.name}: y_train has the shape {list(ys[0].shape)} and y_test {list(ys[1].shape)}; expected the "
            "same, except for the number of rows"
        )
    # The task is decided on all targets together, so that both parts have the same.
    targets = [targets for targets in ys if np.size(targets)] or ys  # an empty list would be floats
    y, task, classes = as_targets(np.concatenate(targets), wish.name, wish.task)
    count = len(ys[0])
    if len(xs[0]) != count or not count:
        raise ParameterError(
            f"{wish.name} has {len(xs[0])} samples and {count} targets; expected as many of each, at least one"
        )
    names, rules = _numbered(xs[0]), None
    if wish.missing != "error" and len({x.shape[1:] for x in xs}) == 1:
        both, names, rules = _lacking(np.concatenate(xs) if parted else xs[0], wish.missing)
        xs = [both[: len(xs[0])], both[len(xs[0]) :]]
    make = partial(
        Split,
        name=wish.name,
        task=task,
        classes=classes,
        feature_names=() if layout else names,
        column_rules=rules,
        standardise=xs[0].ndim == 2 and xs[0].dtype.kind == "f" and wish.name.endswith(".npz"),  # tables of numbers
        layout=layout,
    )
    parts = [
        Rows(x, part, composed(arrays.get(f"id{end}")), composed(arrays.get(f"group{end}")), arrays.get(f"domain{end}"))
        for x, part, end in zip(xs, (y[:count], y[count:]), ends, strict=False)
    ]
    return _parts(make, parts[0], wish, test=parts[1] if parted else None)


def _parts(
    make: _Make,
    rows: Rows,
    wish: _Wish,
    *,
    test: Rows | None = None,
    strata: NDArray[np.int64] | None = None,
    together: Array | None = None,
) -> Split:
    """Split rows into training, test and validation rows, or without test rows if the source has a test part.

    strata: [rows], whose proportions each part keeps; None: the classes. No two rows have one id, and no group is in
    two parts. together: [rows], the units that stay whole, instead of groups.
    """
    check_about(rows, wish.name)
    if test is not None:
        check_apart(rows, test, wish.name)
        if not len(test) and wish.test:
            raise ParameterError(f"{wish.name}: the test part has no rows; add some, or set test-fraction = 0")
    fractions = (wish.test, wish.validation) if test is None else (wish.validation,)
    *held, train = split(
        rows.y if strata is None else strata,
        fractions,
        wish.seed,
        wish.name,
        together if together is not None else rows.groups,
    )
    kept = rows if len(train) == len(rows) else rows.of(train)  # so that nothing is copied: image sets are large
    return make(kept, rows.of(held[0]) if test is None else test, rows.of(held[-1]))


def _numbered(x: Array) -> tuple[str, ...]:
    return tuple(f"x{j}" for j in range(x.shape[1])) if x.ndim == 2 else ()


def _lacking(x: Array, missing: Missing) -> tuple[Array, tuple[str, ...], ColumnRules | None]:
    """Return an array with possible absent values (NaN), with requested marks of absence, and its column rules."""
    names = _numbered(x)
    if missing == "error" or not names or x.dtype.kind != "f":
        return x, names, None
    if missing == "median":
        raise ParameterError(
            'missing = "median" needs a range, which only the schema of a table declares; set missing = "mean"'
        )
    marked = np.logical_and(~np.isfinite(x).all(axis=0), missing == "indicator")
    table = Schema(columns={name: Number(blanks="indicator" if marked[j] else "mean") for j, name in enumerate(names)})
    expansion = expansion_of(table)
    return expansion.apply(x), expansion.names, rules_of(table)


# Rows of several silos on one machine, each silo's in a file of its own, all read by one schema.


def load_files(data: Data, table: Schema, *, seed: int, base: Path) -> Split:
    """Return the rows of silos that each have whole rows; their domains are the silos' names.

    Test rows are drawn from all files, in proportion of files and classes, or have files of their own. A group in
    several files is on one side in all, and so is an id without groups. With files of their own ids are compared with
    test rows within a silo, and groups everywhere.

    Raises:
        ParameterError: A file is unusable; the sentence names the silo, the file and the column.
    """
    if table.target is None:
        raise ParameterError('[data] schema: expected a column of kind "target", which the run learns to predict')
    expected, wish = ExpectedRows.of_table(table), _Wish.of(data, "the silos' files", seed, base)
    rows_of, tests, test = dict[str, Rows](), dict[str, Rows](), wish.test_by(table)
    for name, file in data.of_silos.items():
        rows_of[name] = read(Source(file.source, file.form, base=base), expected, f"silo `{name}`")
        if file.test is not None:
            tests[name] = read(Source(file.test, file.form, base=base), expected, f"silo `{name}`: test")
        if (held := tests.get(name, test)) is not None:
            check_apart(rows_of[name], held, f"silo `{name}`")
    rows, ids = _joined(rows_of), [part.ids for part in rows_of.values() if part.ids is not None]
    together = np.concatenate(ids) if ids and rows.groups is None else None
    return _from_table(rows, table, wish, _joined(tests) if tests else test, together)


def _joined(rows_of: Mapping[str, Rows]) -> Rows:
    rows = list(rows_of.values())
    groups = [part.groups for part in rows if part.groups is not None]
    return Rows(
        np.concatenate([part.x for part in rows]),
        np.concatenate([part.y for part in rows]),
        groups=np.concatenate(groups) if groups else None,
        domain=np.repeat(list(rows_of), [len(part) for part in rows]),
    )


def load_columns(data: Data, table: Schema, *, joint: bool, base: Path) -> tuple[list[Silo], Rows | None]:
    """Return silos that hold different columns of the same rows, in any order, and the test rows of a file.

    Silos' files hold back no rows, because other holders would need the same ones.

    Args:
        joint: Whether only the label holder of each row of the grid has the labels.

    Raises:
        ParameterError: A file is unusable, or a test row shares an id or a group with a silo's training rows.
    """
    (_, count), holders = shape_of_grid(data), label_holders(data)
    parts, silos = table_parts(table, data.columns, count), list[Silo]()
    for number, (name, file) in enumerate(data.of_silos.items()):
        row, part = divmod(number, count)
        labelled = not joint or holders[row] == part + 1
        own = table_of_part(table, parts[part], labelled=labelled)
        source = Source(file.source, file.form, base=base)
        rows = read(source, ExpectedRows.of_table(own, labelled=labelled), f"silo `{name}`")
        y = rows.y if table.classes else rows.y.astype(np.float32)
        silo = Silo(name, rows.x, y, f"row-{row + 1}", parts[part], rows.ids, groups=rows.groups)
        silos.append(silo if file.alignment is None else aligned(silo, Alignment.load(base / file.alignment)))
    if data.test is None:
        return silos, None
    test = read(Source(data.test, data.form, base=base), ExpectedRows.of_table(table), "[data] test")
    for silo in silos:
        check_apart(Rows(silo.x, silo.y, silo.subjects.ids, silo.groups), test, f"silo `{silo.name}`")
    return silos, test


def table_parts(table: Schema, columns: Sequence[Sequence[str | int]] | None, parts: int) -> list[tuple[int, ...]]:
    """Return the indices of each column part's inputs; all inputs of one column belong to one part.

    Args:
        columns: The columns of each part, by name; None cuts all into `parts` parts.

    Raises:
        ParameterError: The columns are not those of the schema, each once.
    """
    features, origins = list(table.features), expansion_of(table).origins
    named: Sequence[Sequence[str | int]] = columns or ()
    if columns is None:
        named = [[features[place] for place in places] for places in cut(np.arange(len(features)), parts, None)]
    flat = [str(name) for part in named for name in part]
    if sorted(flat) != sorted(features):
        raise ParameterError(
            f"[data] columns: expected each input column of the schema in exactly one part, by its name "
            f"({', '.join(features):.200}); got {', '.join(flat):.200}"
        )
    return [tuple(column for column, origin in enumerate(origins) if origin in part) for part in named]


def table_of_part(table: Schema, part: Sequence[int], *, labelled: bool) -> Schema:
    """Return the schema of one column part's holder. labelled: whether with the labels."""
    origins = expansion_of(table).origins
    return table.only([origins[column] for column in part], labelled=labelled)
