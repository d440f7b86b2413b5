"""Counts that are withheld cannot be had back by subtraction: what is shown leaves each small one open."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from moretta.data.look import WITHHELD, Shown, few, shown, shown_by_silo, total

LEAST = 5
CELLS = st.lists(st.integers(0, 12), min_size=1, max_size=6)


def possible(told: list[Shown], whole: int, least: int) -> list[set[int]]:
    """All values that each cell may have, given the words, the shown counts and their sum: tried out one by one."""
    bounds = [
        range(one, one + 1) if isinstance(one, int)
        else range(least) if one == few(least)
        else range(whole + 1) if all(other == WITHHELD for other in told)
        else range(least, whole + 1)
        for one in told
    ]  # fmt: skip
    found: list[set[int]] = [set() for _ in told]
    for place in range(len(told)):
        others = {0}
        for bound in (*bounds[:place], *bounds[place + 1 :]):
            others = {a + b for a in others for b in bound if a + b <= whole}
        found[place] = {value for value in bounds[place] if whole - value in others}
    return found


@settings(deadline=None)
@given(CELLS)
def test_each_small_count_may_be_any_small_count(cells: list[int]) -> None:
    told, whole = shown(cells, LEAST), sum(cells)
    if whole < LEAST:
        assert told == [few(LEAST)] * len(cells)
        assert total(cells, LEAST) == few(LEAST)
        return
    assert total(cells, LEAST) == whole
    for cell, one, may_be in zip(cells, told, possible(told, whole, LEAST), strict=True):
        assert cell in may_be
        if isinstance(one, int):
            assert cell == one >= LEAST
        else:
            assert len(may_be) >= LEAST if cell < LEAST else len(may_be) > 1
        if cell < LEAST:
            assert set(range(LEAST)) <= may_be


def test_no_more_is_withheld_than_needed() -> None:
    assert shown([300, 40, 3], LEAST) == [300, WITHHELD, few(LEAST)]
    assert shown([300, 40, 3, 1], LEAST) == [300, 40, few(LEAST), few(LEAST)]  # 4 in all: either may be 0 to 4
    assert shown([300, 40, 0, 0], LEAST) == [300, WITHHELD, few(LEAST), few(LEAST)]
    assert shown([300, 40], LEAST) == [300, 40]
    assert shown([6, 1], LEAST) == [WITHHELD, WITHHELD]
    assert shown([3, 0], 1) == [3, 0]
    assert shown([], LEAST) == []


def spans(told: list[list[Shown]], sums: list[Shown], rows: np.ndarray, least: int) -> np.ndarray:
    """The least and the most that each cell at each silo may be, by linear programming over all that is shown."""
    silos, cells = len(told), len(told[0])
    grid = np.arange(silos * cells).reshape(silos, cells)
    equal, what = [], []
    for silo in range(silos):
        equal.append(np.isin(np.arange(grid.size), grid[silo]))
        what.append(rows[silo])
    unequal, most = [], []
    alike = all(one == WITHHELD for one in sums)
    for cell, one in enumerate(sums):
        column = np.isin(np.arange(grid.size), grid[:, cell]).astype(float)
        if isinstance(one, int):
            equal.append(column > 0)
            what.append(one)
        elif one == few(least):
            unequal.append(column)
            most.append(least - 1)
        elif not alike:
            unequal.append(-column)
            most.append(-least)
    bounds = [(one, one) if isinstance(one, int) else (0, None) for silo in told for one in silo]
    found = np.zeros((grid.size, 2))
    for place, sign in itertools.product(range(grid.size), (1, -1)):
        goal = np.zeros(grid.size)
        goal[place] = sign
        solved = linprog(
            goal, A_eq=np.array(equal, float), b_eq=what, A_ub=np.array(unequal) if unequal else None,
            b_ub=most or None, bounds=bounds,
        )  # fmt: skip
        assert solved.status == 0
        found[place, (1 - sign) // 2] = sign * solved.fun
    return found.reshape(silos, cells, 2)


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(2, 4), st.integers(0, 10**6), st.sampled_from([3, 12, 40]))
def test_what_is_withheld_by_silo_stays_open(silos: int, cells: int, seed: int, size: int) -> None:
    generator = np.random.default_rng(seed)
    counts = generator.integers(0, size, (silos, cells)) * (generator.random((silos, cells)) < 0.8)
    told, sums = shown_by_silo(counts, LEAST), shown(counts.sum(axis=0), LEAST)
    rows = counts.sum(axis=1)
    for silo, cell in np.ndindex(*counts.shape):
        one = told[silo][cell]
        assert one == counts[silo, cell] >= LEAST if isinstance(one, int) else one == WITHHELD
        assert isinstance(one, str) == isinstance(told[0][cell], str)  # at all silos or at none
    if any(isinstance(one, str) for one in shown(rows, LEAST)) or all(isinstance(one, str) for one in told[0]):
        assert all(one == WITHHELD for silo in told for one in silo)  # no more is told than rows and sums tell
        return
    open_ = spans(told, sums, rows, LEAST)
    for silo, cell in np.ndindex(*counts.shape):
        low, high = open_[silo, cell]
        if isinstance(told[silo][cell], str):
            assert high - low >= 1 - 1e-6
        if counts[silo, cell] < LEAST:
            assert high - low >= LEAST - 1 - 1e-6


@pytest.mark.parametrize("least", [0, 1])
def test_nothing_is_withheld_where_nothing_is_to_be(least: int) -> None:
    assert shown_by_silo(np.array([[0, 1], [2, 3]]), least) == [[0, 1], [2, 3]]
