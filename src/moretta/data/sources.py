"""From the `[data]` section of a run file to a `Dataset`: built-in names, tables, .npz and `module:function`."""

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import numpy as np

from moretta.contract.memory import within_memory
from moretta.contract.messages import Array
from moretta.contract.wording import check_choice, did_you_mean
from moretta.data.assemble import Wish, from_arrays, from_images, from_parts, from_table, split_rows
from moretta.data.images.folder import FOLDER, read_labelled
from moretta.data.images.pixels import ImageForm, squares
from moretta.data.images.sets import SETS, SIZE, Images, load_images, load_office_home, read_npz, scaled
from moretta.data.references import OWN_CODE, beside, is_reference, resolve, said
from moretta.data.rows import Dataset, as_features, as_targets
from moretta.data.split import RowNumbers, split
from moretta.data.tables.files import ENDINGS, Format, is_table, read_columns
from moretta.data.tables.inference import Encoding, Hints, Missing, Task, infer, infer_labels
from moretta.data.tables.rows import encode
from moretta.data.tables.schema import Schema
from moretta.data.wdbc import CLASSES, NAMES, read_wdbc
from moretta.errors import MissingExtra, ParameterError

BUILT_IN = ("wdbc", "digits", "bank-marketing", *SETS, "office-home", FOLDER)
_BANK = ("bank-additional-full.csv", "bank-additional-full.csv.gz", "bank-full.csv", "bank-full.csv.gz")


def load(
    source: str,
    *,
    path: str | Path | None = None,
    schema: Schema | None = None,
    form: Format | None = None,
    target: str | None = None,
    task: Task | None = None,
    test_fraction: float | None = None,
    validation_fraction: float | None = None,
    encoding: Encoding | None = None,
    missing: Missing = "error",
    id_column: str | None = None,
    labels: str | Path | None = None,
    group_column: str | None = None,
    image_size: int | None = None,
    channels: int | None = None,
    window: tuple[float, float] | None = None,
    spacing: float | None = None,
    channel_mean: tuple[float, ...] | None = None,
    channel_deviation: tuple[float, ...] | None = None,
    seed: int = 0,
    base: Path = Path("."),
) -> Dataset:
    """Load a source; relative paths and modules start at `base`, the run file's folder.

    `path` is the folder of an image set, or the folder or file of bank-marketing. `schema` says what a table's columns
    mean and `form` how its file is written; without a schema it is inferred, by `target`, `id_column` and `encoding`.
    `image_size` is for images, which become squares of so many pixels a side; office-home's by default 64.
    `channel_mean` and `channel_deviation` are for images too, whose pixels are in [0, 1] without them.
    `labels` is the table of image-folder, `group_column` the column in it that says whom an image is about, and
    `channels`, `window` and `spacing` say what its images become (`moretta.data.images.pixels.ImageForm`). The
    fractions are of all rows, stratified by class (office-home: by domain and class) and drawn from `seed`; by default
    0.2 for test (bank-marketing 0.1) and 0 for validation (bank-marketing 0.1). A source with its own test part keeps
    it; validation rows then come from the training rows.
    Raises ParameterError for anything that cannot work, and MissingExtra if a built-in set needs scikit-learn or
    Pillow.
    """
    check_choice("missing", missing, get_args(Missing))
    if task is not None:
        check_choice("task", task, get_args(Task))
    default_test, default_validation = (0.1, 0.1) if source == "bank-marketing" else (0.2, 0.0)
    wish = Wish(
        source,
        task,
        default_test if test_fraction is None else test_fraction,
        default_validation if validation_fraction is None else validation_fraction,
        missing,
        seed,
    )
    if not 0 < wish.test < 1:
        raise ParameterError(f"expected a test-fraction between 0 and 1, got {wish.test}")
    folder, bank, table = source == FOLDER, source == "bank-marketing", is_table(source) or source == FOLDER
    _refuse_idle(source, "schema", schema, table, "a table")
    _refuse_idle(source, "how a file is written", form, table, "a table")
    _refuse_idle(source, "target", target, (table and schema is None) or bank, "a table without a schema")
    encodes = (table and schema is None and not folder) or bank
    _refuse_idle(source, "task", task, schema is None, "rows without a schema, which says what the target is")
    _refuse_idle(source, "encoding", encoding, encodes, "a table of features without a schema")
    files = (*SETS, "office-home", "bank-marketing", FOLDER)
    _refuse_idle(source, "path", path, source in files, "a built-in set of files")
    place = None if path is None else base / path
    _refuse_idle(source, "id-column", id_column, table and schema is None, "a table without a schema")
    pictures = folder or source == "office-home" or source in SETS
    _refuse_idle(source, "image-size", image_size, pictures, "images")
    _refuse_idle(source, "channel-mean", channel_mean, pictures, "images")
    _refuse_idle(source, "channel-deviation", channel_deviation, pictures, "images")
    _refuse_idle(source, "group-column", group_column, folder and schema is None, "image-folder without a schema")
    of_images = {"labels": labels, "channels": channels, "window": window, "spacing": spacing}
    for key, value in of_images.items():
        _refuse_idle(source, key, value, folder, "image-folder, images with a table of labels")
    image = ImageForm(image_size, channels, window, spacing, channel_mean, channel_deviation)
    if bank:
        return _bank(place, target, encoding or "one-hot", wish)
    if source in SETS:
        return _images(load_images(source, place), wish, image)
    if source == "office-home":
        return _images(load_office_home(place, SIZE if image_size is None else image_size), wish, image)
    if source in ("wdbc", "digits"):
        return _scikit(source, wish)
    wanted = Hints(target, task, id_column, encoding or "one-hot", missing)
    if folder:
        names = None if labels is None else base / labels
        return _image_folder(place, names, image, schema, wanted, group_column, form or Format(), wish)
    if table:
        return _table(base / source, schema, wanted, form or Format(), wish)
    if source.endswith(".npz"):
        with within_memory(f"{base / source}"):
            return from_arrays(read_npz(base / source), wish)
    if is_reference(source):
        return from_arrays(called(source, base), wish)
    raise ParameterError(
        f'source = "{source}" is neither a built-in set, nor a {", ".join(ENDINGS)} or .npz file, nor '
        f'"module:function"; {did_you_mean(source, BUILT_IN)}'
    )


def _table(path: Path, schema: Schema | None, wanted: Hints, form: Format, wish: Wish) -> Dataset:
    with within_memory(f"{path}"):
        columns = read_columns(path, form, () if schema is None else schema.dropped)
        found = schema or infer(columns, wanted, path.name, form)
        return from_table(encode(columns, found, path.name, form), found, wish)


def _refuse_idle(source: str, key: str, value: object, used: bool, kind: str) -> None:
    if value is not None and not used:
        raise ParameterError(f'{key} is for {kind}, but source = "{source}" is none; remove {key}')


def _bank(place: Path | None, target: str | None, encoding: Encoding, wish: Wish) -> Dataset:
    file = place
    if place is not None and place.is_dir():
        file = next((place / name for name in _BANK if (place / name).is_file()), None)
    if file is None or not file.is_file():
        got = "no path" if place is None else f"no such file in {place}" if place.is_dir() else f"no file {place}"
        raise ParameterError(
            f'source = "bank-marketing" needs path, bank-additional-full.csv (or .csv.gz) or its folder, got {got}; '
            "get it at https://archive.ics.uci.edu/dataset/222/bank+marketing"
        )
    # the answer and its duration are known together, after the call
    drop = ("duration",) if encoding == "one-hot" else ()
    wanted = Hints(target or "y", encoding=encoding, missing=wish.missing, drop=drop)
    return _table(file, None, wanted, Format(), wish)


def _scikit(source: str, wish: Wish) -> Dataset:
    try:
        if source == "wdbc":
            x, y = read_wdbc()
            names, classes = NAMES, CLASSES
        else:
            from sklearn import datasets

            digits = datasets.load_digits()
            x, y = digits.data / 16.0, digits.target  # grey levels 0 to 16
            names, classes = tuple(digits.feature_names), tuple(str(name) for name in digits.target_names)
    except ImportError as error:
        raise MissingExtra(f'source = "{source}" needs scikit-learn; run: pip install "moretta[torch]"') from error
    targets, task, count = as_targets(y, source, wish.task)
    return split_rows(
        wish,
        as_features(x, source),
        targets,
        task,
        count,
        feature_names=names,
        class_names=classes if task == "classification" else (),
        standardise=source == "wdbc",
    )


def _images(images: Images, wish: Wish, form: ImageForm) -> Dataset:
    if images.x_test is not None and images.y_test is not None:
        arrays: dict[str, Array] = {
            "x_train": squares(images.x, form.size),
            "y_train": images.y,
            "x_test": squares(images.x_test, form.size),
            "y_test": images.y_test,
        }
        return from_parts(arrays, wish, pixels=form, class_names=images.class_names)
    y, task, classes = as_targets(images.y, wish.name, wish.task)
    parts = None if images.domain is None else _parts_of_domains(images, images.domain, wish)
    names = images.class_names if task == "classification" else ()
    return split_rows(
        wish,
        form.standardised(scaled(squares(images.x, form.size))),
        y,
        task,
        classes,
        class_names=names,
        domain=images.domain,
        groups=images.group,
        standardise=False,
        parts=parts,
    )


def _image_folder(
    place: Path | None,
    labels: Path | None,
    image: ImageForm,
    schema: Schema | None,
    wanted: Hints,
    group_column: str | None,
    form: Format,
    wish: Wish,
) -> Dataset:
    if place is None or labels is None:
        raise ParameterError(
            f'source = "{wish.name}" needs path, the folder of images, and labels, the table that has a column `file` '
            "and the target"
        )
    table = schema or infer_labels(read_columns(labels, form), wanted, group_column, labels.name, form)
    found = read_labelled(place, labels, image, table, written=form)
    return from_images(found, table, wish)


def _parts_of_domains(images: Images, domain: Array, wish: Wish) -> tuple[RowNumbers, RowNumbers, RowNumbers]:
    """A split where every category of every domain is in each part in proportion, and every category in training."""
    number = np.unique(domain, return_inverse=True)[1]
    strata = number * len(images.class_names) + images.y
    test, validation, train = split(strata, (wish.test, wish.validation), wish.seed, wish.name)
    for label, count in enumerate(np.bincount(images.y[train], minlength=len(images.class_names))):
        if count == 0:
            has = int((images.y == label).sum())
            raise ParameterError(
                f'{wish.name}: category "{images.class_names[label]}" is in no training row '
                f"({has} {'image' if has == 1 else 'images'} in all); give it more images or remove its folder"
            )
    return test, validation, train


def called(source: str, base: Path) -> dict[str, Array]:
    """Return what a module:function gives, as arrays x_train, y_train, x_test and y_test. Raises ParameterError.

    Where x_train and x_test are mappings of arrays, those are ``x_train.ids`` and so on, as in an .npz file.
    """
    function = resolve(source, base, OWN_CODE)
    try:
        with beside(base):
            made = function()
    except (Exception, SystemExit) as error:
        raise ParameterError(f'calling "{source}" failed with {said(error)}; mend the function') from error
    expected = f'"{source}" must return (x_train, y_train, x_test, y_test)'
    if not isinstance(made, tuple | list) or len(made) != 4:
        got = f"{len(made)} values" if isinstance(made, tuple | list) else type(made).__name__
        raise ParameterError(f"{expected}, got {got}")
    parts = dict[str, object]()
    for name, part in zip(("x_train", "y_train", "x_test", "y_test"), made, strict=True):
        parts |= {f"{name}.{key}": one for key, one in part.items()} if isinstance(part, Mapping) else {name: part}
    try:
        return {name: np.asarray(part) for name, part in parts.items()}
    except (ValueError, TypeError, RuntimeError) as error:
        raise ParameterError(f"{expected} as arrays, but one is none ({said(error)})") from error
