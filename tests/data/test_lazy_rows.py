"""Lazy rows say what the same rows in memory say, and never make more of them than was asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moretta.contract import lazy_rows, memory
from moretta.contract.lazy_rows import LazyRows, as_array, blocks, joined, loaded, taken
from moretta.data.silo import Silo, rows_digest
from moretta.errors import ParameterError
from moretta.secure_aggregation.keystream import digest_of

X = np.random.default_rng(0).normal(size=(11, 2, 3, 4)).astype(np.float32)


def lazy(x: np.ndarray = X, made: list[int] | None = None) -> np.ndarray:
    """Return x as lazy rows. made: takes the numbers of the rows that were made."""

    def make(number: int) -> np.ndarray:
        if made is not None:
            made.append(number)
        return x[number]

    return as_array(LazyRows(make, x.shape[1:], np.arange(len(x))))


@pytest.mark.parametrize("key", [slice(None), slice(2, 5), slice(0), np.array([7, 0, 7]), np.arange(11) % 2 == 0])
def test_what_is_indexed_is_made_and_no_more(key: slice | np.ndarray) -> None:
    made: list[int] = []
    rows = lazy(made=made)
    assert (rows.shape, rows.ndim, len(rows), rows.dtype, rows.nbytes) == (X.shape, 4, 11, X.dtype, X.nbytes)
    part = taken(rows, key)
    assert made == []
    np.testing.assert_array_equal(rows[key], X[key])
    np.testing.assert_array_equal(part[:], X[key])
    assert made == 2 * np.arange(11)[key].tolist()
    np.testing.assert_array_equal(taken(X, key), X[key])


def test_a_part_of_a_part_and_parts_joined() -> None:
    half = taken(taken(lazy(), np.array([9, 3, 1, 5])), slice(1, 3))
    np.testing.assert_array_equal(half[:], X[[3, 1]])
    both = joined([half, X[:2], lazy()])
    assert isinstance(both, LazyRows)
    np.testing.assert_array_equal(both[:], np.concatenate([X[[3, 1]], X[:2], X]))
    assert type(joined([X, X])) is np.ndarray


@given(st.integers(1, 400), st.integers(1, 30), st.sampled_from([1, 2, 4, 24]))
def test_entries_are_those_of_the_array(block_bytes: int, step: int, columns: int) -> None:
    whole, bytes_before = X.reshape(-1, columns), lazy_rows.BLOCK_BYTES
    lazy_rows.BLOCK_BYTES = block_bytes
    try:
        entries = lazy().reshape(-1, columns)
        assert (entries.shape, entries.ndim, len(entries)) == (whole.shape, 2, len(whole))
        for start in range(0, len(whole) + step, step):
            np.testing.assert_array_equal(entries[start : start + step], whole[start : start + step])
        np.testing.assert_array_equal(np.asarray(entries), whole)
        np.testing.assert_array_equal(np.concatenate(list(blocks(lazy()))), X)
    finally:
        lazy_rows.BLOCK_BYTES = bytes_before


def test_digests_are_those_of_the_array() -> None:
    y = np.arange(11)
    assert digest_of({"x": lazy(), "y": y}) == digest_of({"x": X, "y": y})
    assert digest_of({"x": np.array(3.0), "y": y[:0]}) != digest_of({"x": np.array(4.0), "y": y[:0]})
    assert rows_digest([Silo("a", lazy(), y)]) == rows_digest([Silo("a", X, y)])
    assert rows_digest([Silo("a", lazy(X[::-1]), y)]) != rows_digest([Silo("a", X, y)])


def test_rows_that_are_not_as_promised_are_refused() -> None:
    bad = X.copy()
    bad[5, 1, 2, 3] = np.nan
    with pytest.raises(ParameterError, match="expected finite inputs, got NaN or infinity in a row that was read"):
        lazy(bad)[4:6]
    odd = as_array(LazyRows(lambda number: X[number, :number], (2, 3, 4), np.arange(3)))
    with pytest.raises(ParameterError, match=r"expected samples of shape \[2, 3, 4\], got \[1, 3, 4\]"):
        odd[1:2]


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CHECKED_BYTES", 1000)
    monkeypatch.setattr(memory, "free_memory", lambda: X.nbytes)


@pytest.mark.usefixtures("little_memory")
def test_more_than_fits_is_refused_and_a_batch_is_not() -> None:
    made: list[int] = []
    rows = lazy(made=made)
    for load in (
        lambda: rows[:],
        lambda: loaded(rows),
        lambda: np.asarray(rows.reshape(-1, 4)),
        lambda: np.isnan(rows),
    ):
        with pytest.raises(
            ParameterError, match=r"11 rows at once take .* GiB of memory, and .* are free; use smaller"
        ):
            load()
    assert made == []
    assert len(rows[:4]) == 4


def test_what_a_container_keeps_of_files_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts the cache of files that were read as used: soon all of it, on a long-lived container."""
    monkeypatch.setattr(memory, "CONTAINER", tmp_path)
    for name, text in {
        "memory.max": "1000000\n",
        "memory.current": "990000\n",
        "memory.stat": "anon 90000\nfile 900000\ninactive_file 700000\nactive_file 100000\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert memory.free_memory() == 810_000


def test_free_memory_is_of_this_machine() -> None:
    assert 0 < memory.free_memory() < 2**50
