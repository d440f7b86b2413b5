"""The judge's arithmetic against trying all combinations, in a ring so small that they can be tried."""

from __future__ import annotations

from itertools import product

import equations
import numpy as np
import pytest
from equations import Equation, alone, without
from hypothesis import given
from hypothesis import strategies as st

MODULUS = 8
NAMES = "abc"
ROWS = st.lists(st.tuples(*[st.integers(0, MODULUS - 1)] * len(NAMES)), min_size=1, max_size=3)


@given(rows=ROWS)
def test_alone_finds_whatever_some_combination_leaves_of_one(rows: list[tuple[int, ...]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equations, "MODULUS", MODULUS)
        found = alone([_equation(row) for row in rows], lambda name: name)
    combinations = [
        tuple(
            sum(c * row[place] for c, row in zip(factors, rows, strict=True)) % MODULUS for place in range(len(NAMES))
        )
        for factors in product(range(MODULUS), repeat=len(rows))
    ]
    expected = {
        NAMES[place]
        for one in combinations
        for place in range(len(NAMES))
        if one[place] and not any(value for other, value in enumerate(one) if other != place)
    }
    assert set(found) == expected


def _equation(row: tuple[int, ...]) -> Equation:
    return Equation({name: value for name, value in zip(NAMES, row, strict=True) if value})


@pytest.mark.parametrize(("rows", "told"), [
    ([(1, 1, 1), (1, 1, 0)], "c"),
    ([(1, 1, 0), (0, 1, 1), (1, 0, 1)], "abc"),  # an even multiple of each, and its parity
    ([(1, 1, 1), (1, 1, 1)], ""),
    ([(1, 1, 1)], ""),
])  # fmt: skip
def test_sums_of_three_silos(rows: list[tuple[int, ...]], told: str) -> None:
    assert set(alone([_equation(row) for row in rows], lambda name: name)) == set(told)


def test_several_unknowns_of_one_silo_against_each_other_are_its_own() -> None:
    rows = [Equation({"a1": 1, "b1": 1}), Equation({"a1": 1, "b2": 1})]
    (left,) = alone(rows, lambda name: str(name)[0])["b"]
    assert set(left.coefficients) == {"b1", "b2"}


def test_data_goes_along_modulo_2_64() -> None:
    a, b = np.array([2**64 - 1], np.uint64), np.array([5], np.uint64)
    (left,) = without([Equation({"a": 1, "b": 1}, a + b), Equation({"b": 1}, b)], ["b"])
    assert left.coefficients in ({"a": 1}, {"a": 2**64 - 1})
    assert left.data is not None
    assert left.data.tolist() == [int(a[0]) * left.coefficients["a"] % 2**64]
