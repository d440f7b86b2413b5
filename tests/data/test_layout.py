"""A sample of several arrays as one packed row: exact, and with the array at fault named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from splits import distribute, load

from moretta.data.layout import LARGEST, InputArray, SampleLayout, gather, is_mask, pack
from moretta.data.reading import ExpectedRows, Source
from moretta.data.reading import called as called_
from moretta.data.reading import read as read_rows
from moretta.data.silo import Silo, layout_of
from moretta.errors import ParameterError

ARRAYS: dict[str, Any] = {
    "table": np.array([[1.5, -2.0], [0.0, 3.0], [7.0, 8.0]]),
    "ids": np.array([[1, 5, 0], [2, 0, 0], [LARGEST, 3, 9]]),
    "image": np.arange(3 * 4, dtype=np.uint8).reshape(3, 1, 2, 2),
    "mask": np.array([[True, True, False], [True, False, False], [True, True, True]]),
    "age": np.array([20.0, 30.0, 40.0]),
}
Y = np.array([0, 1, 0])


def put(name: str, array: Any) -> dict[str, Any]:
    return {**ARRAYS, name: array}


def without(name: str) -> dict[str, Any]:
    return {other: array for other, array in ARRAYS.items() if other != name}


def refused(said: str) -> Any:
    return pytest.raises(ParameterError, match=said)


# -- packing -----------------------------------------------------------------------------------------------------------


def test_arrays_lie_side_by_side_in_the_order_of_their_names() -> None:
    packed, layout = pack(ARRAYS, "rows")
    assert layout.names == ("age", "ids", "image", "mask", "table")
    assert packed.dtype == np.float32
    assert packed.shape == (3, layout.size) == (3, 1 + 3 + 4 + 3 + 2)
    assert packed[2].tolist() == [40, LARGEST, 3, 9, 8, 9, 10, 11, 1, 1, 1, 7, 8]


def test_unpacking_gives_the_arrays_again_with_integers_whole() -> None:
    packed, layout = pack(ARRAYS, "rows")
    found = layout.unpack(packed)
    for name, array in ARRAYS.items():
        assert found[name].shape == array.shape
        np.testing.assert_array_equal(found[name], array)
    assert found["ids"].dtype == np.int64
    assert {found[name].dtype.name for name in ARRAYS if name != "ids"} == {"float32"}


@given(
    st.lists(st.integers(0, LARGEST), min_size=4, max_size=4),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=6, max_size=6),
)
def test_integers_and_float32_survive_packing_to_the_last_bit(whole: list[int], numbers: list[float]) -> None:
    arrays = {"ids": np.array(whole).reshape(2, 2), "x": np.array(numbers, np.float32).reshape(2, 3)}
    packed, layout = pack(arrays, "rows")
    for name, array in layout.unpack(packed).items():
        assert array.tobytes() == arrays[name].tobytes()


def test_the_order_of_the_mapping_does_not_matter() -> None:
    packed, layout = pack(ARRAYS, "rows")
    other, same = pack(dict(reversed(list(ARRAYS.items()))), "rows")
    assert layout == same
    assert packed.tobytes() == other.tobytes()


def test_a_layout_is_plain_data_and_comes_back() -> None:
    layout = pack(ARRAYS, "rows")[1].standardising(["table"])
    assert SampleLayout.load(json.loads(json.dumps(layout.dump()))) == layout
    declared = SampleLayout.declared({"ids": (3,), "table": (2,)}, ["ids"], ["table"])
    assert declared.arrays == (InputArray("ids", (3,), integers=True), InputArray("table", (2,), standardised=True))


def test_only_named_arrays_are_standardised_by_column() -> None:
    layout = pack(ARRAYS, "rows")[1].standardising(["table", "age"])
    assert layout.standardised.tolist() == [0, 11, 12]
    assert layout.numbers.tolist() == [0, *range(4, 13)]
    assert pack(ARRAYS, "rows")[1].standardised.tolist() == []


def test_rows_for_tracing_have_small_ids_and_whole_masks() -> None:
    layout = pack(ARRAYS, "rows")[1].standardising(["table"])
    rows = layout.unpack(layout.example())
    assert set(np.unique(rows["ids"])) == {0, 1}
    assert is_mask(rows["mask"])
    assert (rows["mask"][:, 0] == 1).all()
    assert (rows["table"] < 0).any()
    drawn = layout.plausible(np.random.default_rng(0).standard_normal((200, layout.size)), vocabulary=9)
    assert set(np.unique(layout.unpack(drawn)["ids"])) == set(range(9))
    sequences = pack({"x": np.zeros((2, 6, 4)), "lengths": np.array([5, 6])}, "rows")[1]
    drawn = sequences.plausible(np.random.default_rng(0).standard_normal((200, sequences.size)), vocabulary=9)
    assert set(np.unique(sequences.unpack(drawn)["lengths"])) == {1, 2, 3, 4}
    assert set(np.unique(sequences.unpack(sequences.example())["lengths"])) == {1}


BAD: list[tuple[Mapping[str, Any], str]] = [
    (
        put("mask", np.zeros((2, 3))),
        r"rows: array `mask` has 2 rows, but `age` has 3; expected the same number in each array",
    ),
    (
        put("table", np.array([[1, 2], [np.nan, 3], [np.inf, 4.0]])),
        "array `table` column 0 is NaN or infinite in 2 rows",
    ),
    (
        put("table", np.array([[1, 2], [0, 3], [4, 1e39]])),
        "array `table` column 1 is NaN or infinite in 1 row",
    ),
    (put("age", np.array([1.0, np.nan, 2.0])), "array `age` column 0 is NaN or infinite in 1 row"),
    (put("image", np.full((3, 1, 2, 2), np.nan)), r"array `image` column \(0, 0, 0\) is NaN or infinite in 3 rows"),
    (put("ids", np.array([[1], [-1], [2]])), "array `ids`: integers are token ids, but some are negative"),
    (put("ids", np.full((3, 1), LARGEST + 1)), "array `ids`: integers above 16777216 are not exact"),
    (put("ids", np.array([["a"], ["b"], ["c"]])), r"array `ids`: expected numbers \[rows, ...\] of one shape"),
    (put("ids", [[1, 2], [3], [4, 5]]), r"array `ids`: expected numbers \[rows, ...\] of one shape a row"),
    (put("ids", 3), r"array `ids`: expected numbers \[rows, ...\]"),
    (put("ids", np.zeros((3, 0))), r"array `ids` has samples of shape \[0\], which hold nothing"),
    (put("a b", np.zeros(3)), "called 'a b'; expected a name that can be an argument"),
    (put("class", np.zeros(3)), "called 'class'; expected a name that can be an argument"),
    (put("outputs", np.zeros(3)), "called 'outputs'; expected a name that .* not self or outputs"),
    ({}, "a sample has no arrays"),
]


@pytest.mark.parametrize(("arrays", "said"), BAD)
def test_the_array_at_fault_is_named(arrays: Mapping[str, Any], said: str) -> None:
    with refused(said):
        pack(arrays, "rows")


OTHERS: list[tuple[Mapping[str, Any], str]] = [
    (without("mask"), r"more: array `mask` is missing; expected age, ids, image, mask, table"),
    (put("note", np.zeros(3)), r"more: array `note` is unexpected; expected"),
    (put("table", np.zeros((3, 4))), r"more: array `table` has \[4\] a row, expected \[2\]; make them the same"),
    (put("ids", np.zeros((3, 3))), r"more: array `ids` holds numbers, expected integers; save token ids as"),
    (
        put("mask", np.zeros((3, 3), int)),
        r"more: array `mask` holds integers, expected numbers; .* masks as flo",
    ),
]


@pytest.mark.parametrize(("arrays", "said"), OTHERS)
def test_other_rows_must_have_the_same_arrays(arrays: Mapping[str, Any], said: str) -> None:
    with refused(said):
        pack(ARRAYS, "rows")[1].pack(arrays, "more")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["ids"], r"standardise: array `ids` holds integers of shape \[3\] a row, which have no columns"),
        (["image"], r"standardise: array `image` holds numbers of shape \[1, 2, 2\] a row"),
        (["tabel"], "standardise: there is no array `tabel`; a sample has age, ids, image, mask or table"),
    ],
)
def test_what_cannot_be_standardised_is_said(names: list[str], said: str) -> None:
    with refused(said):
        pack(ARRAYS, "rows")[1].standardising(names)


# -- silos -------------------------------------------------------------------------------------------------------------


def test_a_silo_holds_its_arrays_packed() -> None:
    silo = Silo("north", ARRAYS, Y, held_out=(ARRAYS, Y))
    packed, layout = pack(ARRAYS, "rows")
    assert silo.layout == layout
    assert silo.held_out is not None
    assert silo.x.tobytes() == silo.held_out[0].tobytes() == packed.tobytes()


def test_numbers_in_one_axis_are_standardised_unless_they_are_a_mask_in_all_silos() -> None:
    floats = put("mask", ARRAYS["mask"].astype(float))
    silos = [Silo("north", floats, Y), Silo("south", floats, Y)]
    layout = layout_of(silos, True)
    assert layout is not None
    assert [one.name for one in layout.arrays if one.standardised] == ["age", "table"]
    silos.append(Silo("east", put("mask", np.full((3, 3), 0.5)), Y))
    layout = layout_of(silos, True)
    assert layout is not None
    assert [one.name for one in layout.arrays if one.standardised] == ["age", "mask", "table"]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"x": without("age")}, "silo `south`: array `age` is missing; silo `north` has age, ids, image"),
        ({"x": put("note", Y)}, "silo `south`: array `note` is unexpected; silo `north` has"),
        (
            {"x": put("table", np.zeros((3, 3)))},
            r"silo `south`: array `table` has \[3\] a row, silo `north` has \[2",
        ),
        (
            {"x": put("ids", np.zeros((3, 3)))},
            "`south`: array `ids` holds numbers, silo `north` has integers",
        ),
        ({"x": np.zeros((3, 2))}, "silo `south` has one array a sample, but `north` has several by name"),
        (
            {"x": ARRAYS, "row": "r", "columns": (0,)},
            "`south`: columns of samples of several arrays cannot",
        ),
    ],
)
def test_silos_have_the_same_arrays(other: dict[str, Any], said: str) -> None:
    with refused(said):
        layout_of([Silo("north", ARRAYS, Y), Silo("south", y=Y, **other)], True)


def test_what_silos_hold_back_has_the_same_arrays() -> None:
    with refused("silo `north`: held_out: array `mask` is missing"):
        Silo("north", ARRAYS, Y, held_out=(without("mask"), Y))
    with refused("silo `north`: held_out: expected one array of inputs, as the silos have; got arrays by name"):
        Silo("north", np.zeros((3, 2)), Y, held_out=(ARRAYS, Y))


def test_masks_of_remote_silos_cannot_be_seen() -> None:
    layout = pack(ARRAYS, "rows")[1]
    silos = [Silo("north", np.empty((0, layout.size), np.float32), Y[:0], remote=True, layout=layout)]
    with refused("rows are on other machines, so nobody sees which arrays are masks"):
        layout_of(silos, True)
    with refused("standardise names arrays, and a sample is one array"):
        layout_of([Silo("north", np.zeros((3, 2)), Y)], ("table",))
    with refused("missing needs samples of one array"):
        layout_of([Silo("north", ARRAYS, Y)], False, "mean")


# -- sources -----------------------------------------------------------------------------------------------------------


def saved(path: Path, parts: Mapping[str, Mapping[str, Any]], **others: Any) -> Path:
    np.savez(
        path, **{f"{part}.{name}": one for part, arrays in parts.items() for name, one in arrays.items()}, **others
    )
    return path


FEW = {name: ARRAYS[name] for name in ("ids", "table")}
MODULE = """
import numpy as np
X = {"ids": np.arange(40).reshape(10, 4) % 7, "table": np.arange(20.0).reshape(10, 2)}
def load():
    return X, np.arange(10) % 2, {name: one[:3] for name, one in X.items()}, np.arange(3) % 2
def torn():
    return X, np.arange(10) % 2, {"ids": X["ids"][:3]}, np.arange(3) % 2
"""


def test_an_npz_file_has_each_array_by_name(tmp_path: Path) -> None:
    many = {name: np.concatenate([one] * 4) for name, one in FEW.items()}
    saved(tmp_path / "all.npz", {"x": many}, y=np.tile(Y, 4))
    found = load("all.npz", base=tmp_path)
    packed, layout = pack(many, "rows")
    assert found.layout == layout
    assert found.standardise
    assert found.feature_names == ()
    rows = {tuple(row) for row in np.concatenate([found.train.x, found.test.x]).tolist()}
    assert rows == {tuple(row) for row in packed.tolist()}
    dealt = distribute(found, 2)
    assert sum(len(silo.x) for silo in dealt.silos) == len(found.train.x)
    with refused("splits the columns of one array, but a sample of all.npz has the arrays ids, table"):
        distribute(found, 4, "grid", grid=(2, 2))


def test_four_part_files_and_functions_give_the_same(tmp_path: Path) -> None:
    (tmp_path / "arrays_of_two.py").write_text(MODULE)
    called = load("arrays_of_two:load", base=tmp_path)
    given = called_("arrays_of_two:load", tmp_path)
    parts = {part: gather(given, part) for part in ("x_train", "x_test")}
    saved(tmp_path / "all.npz", parts, y_train=given["y_train"], y_test=given["y_test"])
    read = load("all.npz", base=tmp_path)
    assert called.layout == read.layout is not None
    assert read.train.x.tobytes() == called.train.x.tobytes()
    assert read.test.x.tobytes() == called.test.x.tobytes()
    assert (read.standardise, called.standardise) == (True, False)
    with refused("arrays_of_two:torn: x_test: array `table` is missing; expected ids, table"):
        load("arrays_of_two:torn", base=tmp_path)


def test_one_array_beside_several_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "both.npz", {"x": FEW}, y=Y, x=np.zeros((3, 2)))
    with refused("both.npz: expected the arrays x.ids, x.table of a sample alone; got one array `x`"):
        load("both.npz", base=tmp_path)
    saved(tmp_path / "few.npz", {"x": FEW}, y=Y)
    with refused('few.npz: missing = "mean" is for one table, but a sample here has the arrays ids, table'):
        load("few.npz", base=tmp_path, missing="mean")


def test_a_sites_rows_have_the_arrays_that_the_run_declares(tmp_path: Path) -> None:
    layout = SampleLayout.declared({"ids": (3,), "table": (2,)}, ["ids"], ["table"])
    wanted = ExpectedRows((layout.size,), False, 2, None, layout=layout)
    saved(tmp_path / "rows.npz", {"x": FEW}, y=Y)
    rows = read_rows(Source("rows.npz", base=tmp_path), wanted, "silo `north`")
    assert rows.x.tobytes() == layout.pack(FEW, "rows").tobytes()
    saved(tmp_path / "odd.npz", {"x": {**FEW, "ids": FEW["ids"] / 2}}, y=Y)
    with refused("silo `north`: odd.npz: x: array `ids` holds numbers, expected integers"):
        read_rows(Source("odd.npz", base=tmp_path), wanted, "silo `north`")
    np.savez(tmp_path / "one.npz", x=np.zeros((3, 5)), y=Y)
    with refused("silo `north`: one.npz: expected the arrays x.ids, x.table of a sample alone; got one array `x`"):
        read_rows(Source("one.npz", base=tmp_path), wanted, "silo `north`")
    with refused("rows.npz: expected samples as one array, as in .*; got the arrays ids, table"):
        read_rows(Source("rows.npz", base=tmp_path), ExpectedRows((5,), False, 2, None), "silo `north`")
