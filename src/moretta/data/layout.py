"""A sample that is a mapping of arrays (token ids and their mask, an image and a table), as one row of numbers.

All modules but the model see the arrays packed: side by side in the order of their names, each flattened, float32[rows,
size]. Batches, secure sums, files and messages are then those of any other rows. The `SampleLayout` has the entries of
each array. The model takes the arrays themselves, by keyword (`moretta.models.hooks`).

    numbers     floats, and bytes and booleans unscaled; the run's dtype in the model
    integers    of 16 bits or more: token ids and the like, never negative, below 2^24, where float32 is exact; int64
                in the model
"""

import keyword
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moretta.contract.messages import Array
from moretta.contract.wording import either
from moretta.errors import ParameterError

Samples = NDArray[np.generic] | Mapping[str, ArrayLike]
"""A user's inputs: one array, or a mapping of arrays."""

LARGEST = 1 << 24  # float32 holds every whole number up to here
RESERVED = ("self", "outputs")  # of every forward, and of every exported graph

AS_ONE_ARRAY = "; columns of a table are one array as a DataFrame, or by moretta.read_table(columns, schema).x"


@dataclass(frozen=True)
class InputArray:
    """One array of a sample.

    Attributes:
        shape: Without the axis of rows; empty for one number a row.
        integers: Whether it holds whole numbers, such as token ids.
        standardised: Whether each of its columns gets mean 0 and deviation 1. Only for numbers in one axis.
    """

    name: str
    shape: tuple[int, ...]
    integers: bool = False
    standardised: bool = False

    @property
    def size(self) -> int:
        """The number of its entries in a row."""
        return prod(self.shape)

    @property
    def may_be_standardised(self) -> bool:
        """Whether it has columns of numbers: images and token ids have none."""
        return not self.integers and len(self.shape) < 2

    @property
    def kind(self) -> str:
        """The kind of its numbers, in a word."""
        return "integers" if self.integers else "numbers"


@dataclass(frozen=True)
class SampleLayout:
    """The arrays of a sample, by name in sorted order. Raises ParameterError for names that no forward could have."""

    arrays: tuple[InputArray, ...]

    def __post_init__(self) -> None:
        if not self.arrays:
            raise ParameterError("a sample has no arrays; expected at least one by its name")
        for array in self.arrays:
            bad = keyword.iskeyword(array.name) or array.name in RESERVED
            if bad or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", array.name):
                raise ParameterError(
                    f"an array of a sample is called {array.name!r:.80}; expected a name that can be an argument of "
                    f"the model's forward, and not {either(RESERVED)}"
                )
            if 0 in array.shape:
                raise ParameterError(
                    f"array `{array.name}` has samples of shape {list(array.shape)}, which hold nothing"
                )
        object.__setattr__(self, "arrays", tuple(sorted(self.arrays, key=lambda array: array.name)))

    @classmethod
    def declared(
        cls, inputs: Mapping[str, Sequence[int]], integers: Collection[str], standardised: Collection[str] = ()
    ) -> "SampleLayout":
        """Return the layout that a run file declares: the shape of each array, and which hold token ids.

        Raises:
            ParameterError: Another key names an array that `inputs` lacks, or an array cannot be standardised.
        """
        for key, names in (("tokens", integers), ("standardise", standardised)):
            if unknown := sorted(set(names) - set(inputs)):
                raise ParameterError(
                    f"{key}: there is no array `{unknown[0]:.80}`; inputs has {either(sorted(inputs))}"
                )
        arrays = [InputArray(name, tuple(shape), name in integers) for name, shape in inputs.items()]
        return cls(tuple(arrays)).standardising(standardised)

    @classmethod
    def load(cls, held: Mapping[str, Mapping[str, Any]]) -> "SampleLayout":
        """Return the layout that `dump` wrote."""
        return cls(tuple(InputArray(name, **{**array, "shape": tuple(array["shape"])}) for name, array in held.items()))

    def dump(self) -> dict[str, dict[str, Any]]:
        """Return the layout as plain data, for JSON."""
        return {
            array.name: {"shape": list(array.shape), "integers": array.integers, "standardised": array.standardised}
            for array in self.arrays
        }

    def __str__(self) -> str:
        """Describe the arrays, for messages."""
        return f"the arrays {', '.join(f'{array.name} {list(array.shape)} of {array.kind}' for array in self.arrays)}"

    @property
    def table_hint(self) -> str:
        """The end of a sentence for a model that takes one array, where these may be columns of a table; else empty."""
        return "" if any(array.shape for array in self.arrays) else AS_ONE_ARRAY

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays' names."""
        return tuple(array.name for array in self.arrays)

    @property
    def size(self) -> int:
        """The number of entries of a packed row."""
        return sum(array.size for array in self.arrays)

    @cached_property
    def places(self) -> Mapping[str, slice]:
        """The place of each array in a packed row."""
        places, start = dict[str, slice](), 0
        for array in self.arrays:
            places[array.name] = slice(start, start + array.size)
            start += array.size
        return places

    @property
    def has_integers(self) -> bool:
        """Whether any array holds token ids, which can be neither rounded nor searched for by a gradient."""
        return any(array.integers for array in self.arrays)

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The entries of a packed row that are numbers, int64."""
        return self._entries(array for array in self.arrays if not array.integers)

    @property
    def standardised(self) -> NDArray[np.int64]:
        """The entries of a packed row that are standardised by column, int64."""
        return self._entries(array for array in self.arrays if array.standardised)

    def _entries(self, arrays: Iterable[InputArray]) -> NDArray[np.int64]:
        parts = [np.arange(self.places[array.name].start, self.places[array.name].stop) for array in arrays]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def standardising(self, names: Collection[str]) -> "SampleLayout":
        """Return the layout with these arrays standardised by column, and no others. Raises ParameterError."""
        for array in self.arrays:
            if array.name in names and not array.may_be_standardised:
                raise ParameterError(
                    f"standardise: array `{array.name}` holds {array.kind} of shape {list(array.shape)} a row, which "
                    "have no columns to standardise; name arrays of numbers in one axis"
                )
        if unknown := sorted(set(names) - set(self.names)):
            raise ParameterError(
                f"standardise: there is no array `{unknown[0]:.80}`; a sample has {either(self.names)}"
            )
        return SampleLayout(tuple(replace(array, standardised=array.name in names) for array in self.arrays))

    def pack(self, arrays: Mapping[str, ArrayLike], where: str) -> NDArray[np.float32]:
        """Return the arrays of some rows packed, float32[rows, size].

        Args:
            where: The start of each error's sentence.

        Raises:
            ParameterError: An array is missing, unknown, or of another shape, kind or number of rows. Entries are NaN,
                infinite, negative or too large. The sentence names the array.
        """
        return _packed(self, _as_arrays(arrays, where), where)

    def unpack(self, packed: Array) -> dict[str, Array]:
        """Return the arrays of packed rows: integers as int64, numbers in the dtype of the rows."""
        parts = {
            array.name: packed[:, self.places[array.name]].reshape(len(packed), *array.shape) for array in self.arrays
        }
        return {
            array.name: parts[array.name].astype(np.int64) if array.integers else parts[array.name]
            for array in self.arrays
        }

    def check_same(self, expected: "SampleLayout", where: str, owner: str) -> None:
        """Raise ParameterError, naming the array at fault, unless a sample has the arrays of another layout.

        Args:
            where: The owner of these arrays, which begins the sentence.
            owner: The owner of the expected arrays.
        """
        _check_same(self.arrays, expected, where, f"{owner} has")

    def example(self) -> NDArray[np.float64]:
        """Return four rows that a model can take."""
        return self.plausible(np.random.default_rng(0).standard_normal((4, self.size)))

    def plausible(self, numbers: NDArray[np.float64], vocabulary: int = 2) -> NDArray[np.float64]:
        """Return normal numbers made rows that a model can take.

        Numbers in one axis that are not standardised may be a mask, so those are 1 at the beginning of a row, then 0.
        One whole number a row may be a length, so it is from 1 to the longest axis.

        Args:
            numbers: float64[rows, size].
            vocabulary: Token ids are below this.
        """
        rows = numbers.copy()
        longest = min([vocabulary - 1, *(size for array in self.arrays for size in array.shape)])
        for array in self.arrays:
            place = self.places[array.name]
            if array.integers:
                least, most = (0, vocabulary) if array.shape else (1, max(longest, 1))
                rows[:, place] = least + np.floor(np.abs(numbers[:, place]) * most) % most
            elif len(array.shape) == 1 and not array.standardised:
                ends = (1 + np.arange(len(rows))[:, None] % 4) * max(array.size // 4, 1)
                rows[:, place] = np.arange(array.size) < ends
        return rows


def pack(arrays: Mapping[str, ArrayLike], where: str) -> tuple[NDArray[np.float32], SampleLayout]:
    """Return the arrays of some rows packed, and their layout. Raises ParameterError as `SampleLayout.pack` does."""
    plain = _as_arrays(arrays, where)
    try:
        layout = SampleLayout(tuple(_form(name, array) for name, array in plain.items()))
    except ParameterError as error:
        raise ParameterError(f"{where}: {error}") from None
    return _packed(layout, plain, where), layout


def packed_as(x: Samples, layout: SampleLayout | None, where: str) -> NDArray[np.generic]:
    """Return samples as one array by a layout. Raises ParameterError for samples of another kind."""
    if not isinstance(x, Mapping):
        return x
    if layout is None:
        raise ParameterError(f"{where}: expected one array of inputs, as the silos have; got arrays by name")
    return layout.pack(x, where)


def is_mask(packed: Array) -> bool:
    """Return whether an array's entries are all 0 or 1, as a mask's are."""
    return bool(((packed == 0) | (packed == 1)).all())


def gather(arrays: Mapping[str, Array], part: str) -> dict[str, Array]:
    """Return a part's samples from the arrays of a file: ``x.ids`` is `ids` of the part ``x``."""
    return {name.removeprefix(f"{part}."): array for name, array in arrays.items() if name.startswith(f"{part}.")}


def packed_parts(
    arrays: Mapping[str, Array], where: str, layout: SampleLayout | None = None
) -> tuple[dict[str, Array], SampleLayout | None]:
    """Return a source's arrays, with samples that are mappings (`gather`) packed under their part's name.

    Args:
        layout: None takes the first part's.

    Returns:
        The arrays and the layout; None as layout if no samples are mappings.

    Raises:
        ParameterError: Parts have other arrays, or a part has both forms. The sentence names the part and the array.
    """
    parts = {name: array for name, array in arrays.items() if "." not in name}
    for part in ("x", "x_train", "x_test"):
        named = gather(arrays, part)
        if part in parts and (named or layout is not None):
            names = f"the arrays {', '.join(f'{part}.{name}' for name in (layout.names if layout else named))}"
            raise ParameterError(f"{where}: expected {names} of a sample alone; got one array `{part}`")
        if not named:
            continue
        if layout is None:
            parts[part], layout = pack(named, f"{where}: {part}")
        else:
            parts[part] = layout.pack(named, f"{where}: {part}")
    return parts, layout


def _as_arrays(arrays: Mapping[str, ArrayLike], where: str) -> dict[str, NDArray[Any]]:
    converted = dict[str, NDArray[Any]]()
    for name, value in arrays.items():
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, RuntimeError):
            array = np.empty(0, object)
        if array.dtype.kind not in "fiub" or array.ndim < 1:
            raise ParameterError(
                f"{where}: array `{name!s:.80}`: expected numbers [rows, ...] of one shape a row; got {array.dtype}"
                f"{list(array.shape)}{AS_ONE_ARRAY if array.ndim == 1 else ''}"
            )
        converted[str(name)] = array
    return converted


def _form(name: str, array: NDArray[Any]) -> InputArray:
    """Return an array's form: integers of 16 bits or more are token ids, as in `moretta.data.rows.as_features`."""
    return InputArray(name, array.shape[1:], array.dtype.kind in "iu" and array.dtype.itemsize > 1)


def _packed(layout: SampleLayout, arrays: Mapping[str, NDArray[Any]], where: str) -> NDArray[np.float32]:
    _check_same([_form(name, array) for name, array in arrays.items()], layout, where, "expected")
    first = layout.arrays[0].name
    rows = len(arrays[first])
    packed = np.empty((rows, layout.size), np.float32)
    for form in layout.arrays:
        name, array, place = form.name, arrays[form.name], f"{where}: array `{form.name}`"
        if len(array) != rows:
            raise ParameterError(
                f"{place} has {len(array)} rows, but `{first}` has {rows}; expected the same number in each array"
            )
        with np.errstate(over="ignore", invalid="ignore"):  # too large becomes infinite, which the error names
            packed[:, layout.places[name]] = array.reshape(rows, -1)
        _check_entries(packed[:, layout.places[name]], array, form, place)
    return packed


def _check_same(arrays: Sequence[InputArray], layout: SampleLayout, where: str, owner: str) -> None:
    """Raise ParameterError unless arrays have the names, shapes and kinds of a layout's."""
    ours, theirs = ({array.name: array for array in each} for each in (arrays, layout.arrays))
    for name in sorted(set(ours) ^ set(theirs)):
        lack = "is missing" if name in theirs else "is unexpected"
        raise ParameterError(f"{where}: array `{name:.80}` {lack}; {owner} {', '.join(theirs)}")
    for name, expected in theirs.items():
        got, place = ours[name], f"{where}: array `{name}`"
        if got.shape != expected.shape:
            raise ParameterError(
                f"{place} has {list(got.shape)} a row, {owner} {list(expected.shape)}; make them the same"
            )
        if got.integers != expected.integers:
            raise ParameterError(
                f"{place} holds {got.kind}, {owner} {expected.kind}; save token ids as integers of 16 bits or more, "
                "and numbers and masks as floats"
            )


def _check_entries(packed: NDArray[np.float32], array: NDArray[Any], form: InputArray, place: str) -> None:
    """Raise ParameterError for entries that cannot be packed exactly, or are not numbers."""
    if form.integers:
        if array.size and array.min() < 0:
            raise ParameterError(f"{place}: integers are token ids, but some are negative; save numbers as floats")
        if array.size and array.max() > LARGEST:
            raise ParameterError(f"{place}: integers above {LARGEST} are not exact as float32; number them from 0")
        return
    bad = ~np.isfinite(packed)
    if bad.any():
        column = int(bad.any(axis=0).argmax())
        at = column if len(form.shape) < 2 else tuple(map(int, np.unravel_index(column, form.shape)))
        rows = int(bad[:, column].sum())
        raise ParameterError(
            f"{place} column {at} is NaN or infinite in {rows} {'row' if rows == 1 else 'rows'} as float32; "
            "expected finite numbers: remove or correct those rows"
        )
