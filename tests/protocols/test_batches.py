"""Which rows a silo uses in which round."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused_rows import Row, refused

from moretta.protocols.common.batches import Batches, UnionBatches, most_rows

ROWS, SIZES, SEEDS = st.integers(1, 60), st.integers(0, 70), st.integers(0, 2**63 - 1)


@given(ROWS, SIZES, SEEDS, st.integers(0, 5))
def test_every_row_is_used_once_an_epoch_and_no_batch_has_one_row_where_more_are_asked_for(
    rows: int, size: int, seed: int, epoch: int
) -> None:
    batches = Batches(rows, size, seed, "silo")
    size = min(size, rows) or rows
    parts = batches.of_epoch(epoch)
    assert sorted(np.concatenate(parts).tolist()) == list(range(rows))
    lengths = [len(part) for part in parts]
    assert lengths[:-2] == [size] * (len(parts) - 2)  # the last two may differ
    assert max(lengths) <= most_rows(size)
    assert batches.fewest == min(lengths)
    assert min(lengths) > 1 or size == 1
    assert len(parts) == batches.per_epoch


@given(ROWS, SIZES, SEEDS, st.lists(st.integers(1, 200), min_size=1, max_size=8))
def test_a_round_is_a_pure_function_of_seed_silo_and_number(
    rows: int, size: int, seed: int, numbers: list[int]
) -> None:
    batches = Batches(rows, size, seed, "silo")
    for number in numbers:  # in any order, on an object that has been used or on a fresh one
        epoch, position = divmod(number - 1, batches.per_epoch)
        expected = Batches(rows, size, seed, "silo").of_epoch(epoch)[position]
        assert batches.of_round(number).tolist() == expected.tolist()


def test_every_epoch_silo_and_seed_has_a_permutation_of_its_own() -> None:
    orders = [
        tuple(Batches(50, 0, seed, silo).of_epoch(epoch)[0].tolist())
        for seed in (0, 1, 2**62) for silo in ("a", "b", "ab") for epoch in (0, 1, 2)
    ]  # fmt: skip
    assert len(set(orders)) == len(orders)  # two of 27 alike by chance: below 27^2 / 50!


def test_the_batches_of_a_seed_do_not_change_from_version_to_version() -> None:
    # PCG64 seeded by [seed, SHA-256(silo)[:8], epoch]; recorded runs depend on it.
    assert [batch.tolist() for batch in Batches(7, 3, 7, "north").of_epoch(1)] == [
        [4, 5, 6], [3, 2], [1, 0]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "size", "whole"), [(5, 2, True), (4, 2, False), (7, 3, False), (5, 3, True), (9, 0, True)]
)
def test_a_batch_of_over_half_of_the_rows_counts_as_all(rows: int, size: int, whole: bool) -> None:
    """Two of them would share rows, so no further take may draw one."""
    batches = Batches(rows, size, 0, "north", "run")
    assert batches.whole is whole
    assert whole is (max(len(batches.of_round(number)) for number in range(1, 6)) * 2 > rows)


@refused("batches.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), SIZES, st.integers(1, 30))
def test_the_union_is_the_silos_batches_side_by_side(counts: list[int], size: int, number: int) -> None:
    def parts() -> list[Batches]:
        return [Batches(rows, size, 3, f"silo-{index}") for index, rows in enumerate(counts)]

    union, start = UnionBatches(parts()), 0
    found = union.of_round(number)
    assert union.rows == sum(counts)
    for part in parts():
        own, found = part.of_round(number), np.asarray(found)
        assert (found[: len(own)] - start).tolist() == own.tolist()
        found, start = found[len(own) :], start + part.rows
    assert len(found) == 0


def test_batches_in_order_begin_each_epoch_with_the_first_row() -> None:
    batches = Batches(10, 4, 1, "north", in_order=True)
    rounds = [batches.of_round(number).tolist() for number in range(1, 7)]
    assert rounds == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2
    again = batches.of_round(1, 1)  # another take shares no order with the first
    assert sorted(set(again.tolist())) == sorted(again.tolist())
    assert batches.of_round(1).tolist() == rounds[0]
    drawn = [Batches(100, 4, 1, "north", in_order=True).of_round(1, take).tolist() for take in (0, 1, 2)]
    assert drawn[0] == [0, 1, 2, 3]
    assert len({tuple(one) for one in drawn}) == 3
