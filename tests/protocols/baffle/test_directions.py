"""Directions are the same bits everywhere, are what they are said to be, and add up exactly in any order."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import golden
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from golden import COUNT, KINDS, SECRET, SIZE, coefficients, directions
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.linalg import hadamard
from scipy.special import ndtri

from moretta.errors import ParameterError
from moretta.protocols.baffle.silo import directions as module
from moretta.protocols.baffle.silo.directions import BLOCK, MOST, STEP, Directions, gaussian_table, keys_of

FOLDER = Path(__file__).parent
GOLDEN: dict[str, str] = json.loads((FOLDER / "golden.json").read_text(encoding="utf-8"))["sha256"]


def matrix(of: Directions) -> NDArray[np.float64]:
    """The directions themselves, float64[K, n]: moved by 1 from the origin, which rounds nothing."""
    return np.array([vector.copy() for together in of.perturbed(np.zeros(of.size), 1.0) for vector in together])


def stream(key: bytes, count: int) -> bytes:
    """AES-128 in counter mode, without `moretta.secure_aggregation.keystream`."""
    return Cipher(algorithms.AES(key[:16]), modes.CTR(key[16:])).encryptor().update(bytes(count))


# -- the same bits everywhere ------------------------------------------------------------------------------------------


def test_all_is_what_it_was() -> None:
    assert golden.hashes() == GOLDEN


def dispatched() -> list[str]:
    """Names of the instruction sets that this numpy chooses among on this machine, beyond what it always uses."""
    core = importlib.import_module("numpy._core._multiarray_umath" if hasattr(np, "_core") else "numpy.core")
    core = getattr(core, "_multiarray_umath", core)
    return [name for name in core.__cpu_dispatch__ if core.__cpu_features__.get(name)]


WITHOUT: dict[str, tuple[dict[str, str], Any]] = {
    "all of them": ({"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}, lambda name: True),
    "the widest": (
        {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
        lambda name: "512" in name or name == "X86_V4",
    ),
}


@pytest.mark.parametrize("case", WITHOUT)
def test_a_processor_with_fewer_instructions_computes_the_same(case: str) -> None:
    environment, leaves_out = WITHOUT[case]
    names = [name for name in dispatched() if leaves_out(name)]
    if not names:
        pytest.skip("this processor has no such instructions")
    program = "import golden, json, importlib; print(json.dumps(golden.hashes()))"
    lean = {**os.environ, **environment, "NPY_DISABLE_CPU_FEATURES": " ".join(names), "PYTHONPATH": str(FOLDER)}
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=lean,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(found.stdout) == GOLDEN


def test_a_rademacher_entry_is_one_bit_of_the_keystream() -> None:
    found, keys = matrix(directions("rademacher")), keys_of(SECRET, COUNT, "run", 1, b"hash")
    assert found.shape == (COUNT, SIZE)
    for k, row in enumerate(found):
        octets = np.frombuffer(stream(keys[k // 8], SIZE), dtype=np.uint8)
        assert np.array_equal(row, np.where(octets >> (k % 8) & 1, -1.0, 1.0))


def test_a_gaussian_entry_is_a_quantile_that_16_bits_choose() -> None:
    found, keys, table = matrix(directions("gaussian")), keys_of(SECRET, COUNT, "run", 1, b"hash"), gaussian_table()
    for block in range(3):
        inside = min(8, COUNT - 8 * block)
        words = (
            np.frombuffer(stream(keys[block], 2 * SIZE * inside), dtype="<u2").reshape(inside, SIZE).astype(np.int64)
        )
        entries = table[words % 2**15] / 4096.0
        assert np.array_equal(found[8 * block : 8 * block + inside], np.where(words < 2**15, entries, -entries))


def test_orthogonal_directions_are_rows_of_hadamards_matrix_up_to_signs() -> None:
    found = matrix(directions("orthogonal"))
    order = 32  # the power of two from 19 on
    rows = np.tile(hadamard(order)[:COUNT], (1, -(-SIZE // order)))[:, :SIZE]
    signs = found / rows  # of entries, the same in all rows, times signs of rows
    assert np.array_equal(np.abs(signs), np.ones_like(signs))
    assert np.array_equal(signs * signs[0], np.tile((signs * signs[0])[:, :1], (1, SIZE)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_perturbed_parameters_are_one_rounded_sum(kind: str, dtype: str) -> None:
    at, scale = golden.parameters(dtype), np.dtype(dtype).type
    before, rows = at.copy(), matrix(directions(kind))
    for distance in (0.0125, -0.0125):
        wanted = (at + (rows * 4096).astype(dtype) * scale(distance / 4096)).astype(dtype)
        if kind != "gaussian":
            wanted = (at + rows.astype(dtype) * scale(distance)).astype(dtype)
        for at_once in (1, 3, 8, 32):
            groups = [
                [vector.copy() for vector in together] for together in directions(kind).perturbed(at, distance, at_once)
            ]
            assert {len(group) for group in groups} <= {min(at_once, COUNT), COUNT % at_once}
            assert np.array_equal(np.concatenate(groups), wanted)
    assert at.tobytes() == before.tobytes()


# -- the Gaussian table ------------------------------------------------------------------------------------------------


def test_the_gaussian_table_is_the_half_normals_quantiles_at_variance_1() -> None:
    table = gaussian_table()
    assert (table.shape, table.dtype) == ((2**15,), np.dtype(np.int16))
    exact = ndtri(0.5 + (np.arange(2**15) + 0.5) / 2**16)
    scaled = 4096 * exact / np.sqrt(np.square(exact).mean())  # what the tails beyond the last quantile lack: 1e-5
    assert np.array_equal(table, np.rint(scaled))
    assert np.abs(table - 4096 * exact).max() < 1


def test_the_gaussian_tables_moments_are_the_normals() -> None:
    z = gaussian_table() / 4096.0
    assert np.square(z).mean() == pytest.approx(1, abs=2e-6)  # rounding to 2^-12 moves 2^15 squares by 2^-13 |z| each
    assert np.abs(z).mean() == pytest.approx(np.sqrt(2 / np.pi), abs=1e-5)
    # The last cell, of the probability 2^-15 beyond a = 4.17, stands for by its middle b = 4.32: E z^4 there is about
    # a^4 + 8 a^2 + 8 = 449 and not b^4 = 348, so that 2^-15 * 101 = 3e-3 is missing at most of 3.
    assert 0 < 3 - (z**4).mean() < 3e-3


# -- sums --------------------------------------------------------------------------------------------------------------


def exactly(rows: NDArray[np.float64], weights: NDArray[np.float64]) -> list[Fraction]:
    return [sum(Fraction(float(c)) * Fraction(float(d)) for c, d in zip(weights, row, strict=True)) for row in rows.T]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 7, 8, 19, 64])
def test_a_sum_is_the_exact_one_to_the_rounding_of_coefficients(kind: str, count: int) -> None:
    of = directions(kind, count)
    weights = np.random.default_rng(count).normal(0, 1, count) * 10.0 ** np.arange(-3, count - 3).clip(max=3)
    picked = np.r_[0:40, STEP - 20 : STEP + 20, SIZE - 20 : SIZE]
    found, bound = of.combine(weights)[picked], count * np.abs(weights).max()
    # Each coefficient is off by at most half of 2^-60 of the bound, times an entry; Gaussian ones keep 15 bits for
    # theirs, of up to 8, and have half of 2^-45. Then the sum is rounded to float64 once.
    off, largest = (2.0**-46, 8) if kind == "gaussian" else (2.0**-61, 1)
    for value, wanted in zip(found, exactly(matrix(of)[:, picked], weights), strict=True):
        assert (
            abs(Fraction(float(value)) - wanted)
            <= Fraction(count * bound * off * largest) + abs(wanted) * Fraction(2) ** -52
        )


@given(
    kind=st.sampled_from(sorted(KINDS)), count=st.integers(1, 40), size=st.integers(64, 200), seed=st.integers(0, 2**31)
)
def test_a_sum_is_the_matrix_product(kind: str, count: int, size: int, seed: int) -> None:
    of, weights = directions(kind, count, size, seed), np.random.default_rng(seed).normal(0, 1, count)
    bound = count * np.abs(weights).max()
    unit = 2.0**-43 if kind == "gaussian" else 2.0**-52  # see above; the product's own rounding is of 2^-53 a term
    np.testing.assert_allclose(of.combine(weights), weights @ matrix(of), rtol=0, atol=count * bound * unit)


def shuffled(keys: Sequence[bytes], weights: NDArray[np.float64], seed: int) -> tuple[list[bytes], NDArray[np.float64]]:
    order = np.random.default_rng(seed).permutation(len(keys))
    return [keys[block] for block in order], weights.reshape(-1, BLOCK)[order].ravel()


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_a_sum_is_the_same_bits_whatever_the_order_of_blocks(distribution: str) -> None:
    count = 64
    keys, weights = keys_of(SECRET, count, "any"), np.random.default_rng(0).normal(0, 1, count) ** 3
    wanted = Directions(keys, count, SIZE, distribution).combine(weights)
    floats = [weights @ matrix(Directions(keys, count, SIZE, distribution))]
    for seed in range(4):
        others, moved = shuffled(keys, weights, seed)
        of = Directions(others, count, SIZE, distribution)
        assert of.combine(moved).tobytes() == wanted.tobytes()
        floats.append(moved @ matrix(of))
    assert len({product.tobytes() for product in floats}) > 1  # which a product of floats does not give


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [64, 1024])
def test_how_many_parameters_are_summed_at_a_time_does_not_matter(
    kind: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, size = directions(kind, 35, 5000), 5000
    wanted, rows = of.combine(coefficients(35)), matrix(of)
    monkeypatch.setattr(module, "STEP", step)
    assert np.array_equal(directions(kind, 35, size).combine(coefficients(35)), wanted)
    assert np.array_equal(matrix(directions(kind, 35, size)), rows)


@pytest.mark.parametrize("kind", KINDS)
def test_scale_passes_through_a_sum(kind: str) -> None:
    of, weights = directions(kind, 24, 500), coefficients(24)
    wanted = of.combine(weights)
    for power in (-900, -60, 60, 900):  # powers of two change no bit but the exponent
        assert np.array_equal(of.combine(np.ldexp(weights, power)), np.ldexp(wanted, power))
    assert not of.combine(np.zeros(24)).any()
    assert np.array_equal(of.combine(-weights), -wanted)


# -- statistics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_entries_are_independent_with_mean_0_and_variance_1(kind: str) -> None:
    rows = np.concatenate([matrix(directions(kind, 40, number=number)) for number in (1, 2)])
    entries, pairs = rows.size, len(rows) * (len(rows) - 1) // 2
    assert abs(rows.mean()) < 5 / np.sqrt(entries)
    # Var z^2 is 2 for a normal one; the table's own variance is short of 1 by 2e-5.
    assert abs(np.square(rows).mean() - 1) < 5 * np.sqrt(2 / entries) + 5e-5
    # Products of two directions' entries have mean 0 and variance 1; of both rounds' 80 no two belong together. Sums of
    # their squares are chi-squared, of two rounds' columns too, with their neighbours a row or a step further.
    correlations = (rows @ rows.T / np.sqrt(SIZE))[np.triu_indices(len(rows), 1)]
    assert np.abs(correlations).max() < 6
    assert abs(np.square(correlations).sum() - pairs) < 5 * np.sqrt(2 * pairs)
    for lag in (1, 8, SIZE - STEP):
        along = (rows[:, lag:] * rows[:, :-lag]).sum(axis=1) / np.sqrt(SIZE - lag)
        assert abs(np.square(along).sum() - len(rows)) < 5 * np.sqrt(2 * len(rows))
        assert np.abs(along).max() < 6


@pytest.mark.parametrize("count", [2, 8, 9, 32, 33])
def test_orthogonal_directions_are_orthogonal_exactly_where_their_order_divides(count: int) -> None:
    order = max(8, 1 << (count - 1).bit_length())
    for size in (order, 40 * order, STEP + 3 * order):
        rows = matrix(directions("orthogonal", count, size))
        assert np.array_equal(rows @ rows.T, size * np.eye(count))
    for size in (order + 1, 40 * order - 3, STEP + 1):
        products = (rows := matrix(directions("orthogonal", count, size))) @ rows.T
        np.fill_diagonal(products, 0)
        assert 0 < np.abs(products).max() <= order


def test_an_orthogonal_direction_by_itself_is_uniform() -> None:
    rounds, size = 600, 16
    rows = np.array([matrix(directions("orthogonal", 8, size, number)) for number in range(rounds)])  # [rounds, 8, 16]
    assert np.abs(rows.mean(axis=0)).max() < 6 / np.sqrt(rounds)
    for row in rows.transpose(1, 0, 2):
        correlations = (row.T @ row / np.sqrt(rounds))[np.triu_indices(size, 1)]
        assert np.abs(correlations).max() < 6
        assert len(np.unique(row, axis=0)) > rounds - 10  # of 2^16; some 3 coincide by chance


# -- keys --------------------------------------------------------------------------------------------------------------


def test_keys_differ_by_purpose_secret_and_block() -> None:
    purposes: list[tuple[int | str | bytes, ...]] = [
        ("run", 1, b"a"),
        ("run", 2, b"a"),
        ("run", 1, b"b"),
        ("nur", 1, b"a"),
    ]
    found = [key for secret in (SECRET, bytes(32)) for p in purposes for key in keys_of(secret, 24, *p)]
    assert len(set(found)) == len(found) == 2 * 4 * 3
    assert keys_of(SECRET, 24, *purposes[0])[:2] == keys_of(SECRET, 16, *purposes[0])


def test_a_pools_directions_are_always_the_same_few() -> None:
    count, pool, rounds = 20, 64, 60
    drawn = [keys_of(SECRET, count, "run", number, pool=pool) for number in range(rounds)]
    assert {len(set(keys)) for keys in drawn} == {3}
    assert len(set(itertools.chain(*drawn))) == pool // BLOCK
    assert len({tuple(keys) for keys in drawn}) > rounds / 2  # of 8 * 7 * 6 orders
    often = np.unique(list(itertools.chain(*drawn)), return_counts=True)[1]
    assert np.abs(often - rounds * 3 / 8).max() < 5 * np.sqrt(rounds * 3 / 8 * 5 / 8)  # binomial, 60 draws of 3 of 8
    assert not set(itertools.chain(*drawn)) & set(keys_of(bytes(32), 64, "run", 1, pool=pool))
    assert sorted(keys_of(SECRET, pool, "run", 1, pool=pool)) == sorted(keys_of(SECRET, pool, "run", 2, pool=pool))


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "count", "distribution", "orthogonal", "said"),
    [
        (1, 0, "rademacher", False, f"expected 1 to {MOST} directions, got 0"),
        (1, MOST + 1, "rademacher", True, f"expected 1 to {MOST} directions, got {MOST + 1}"),
        (1, 8, "cauchy", False, "expected Rademacher or Gaussian directions"),
        (1, 8, "gaussian", True, "orthogonal ones Rademacher; got gaussian"),
        (1, 9, "rademacher", False, "9 directions need 2 keys, got 1"),
        (2, 9, "rademacher", True, "9 directions need 1 keys, got 2"),
        (1, 65, "rademacher", True, "65 orthogonal directions need 128 parameters or more, and 100 are trained"),
    ],
)
def test_impossible_directions_are_refused(
    keys: int, count: int, distribution: str, orthogonal: bool, said: str
) -> None:
    with pytest.raises(ParameterError, match=said):
        Directions([bytes(32)] * keys, count, 100, distribution, orthogonal=orthogonal)


@pytest.mark.parametrize("weights", [np.ones(3), np.ones((4, 1)), np.array([1.0, np.nan, 1, 1]), np.full(4, np.inf)])
def test_coefficients_are_finite_and_as_many_as_directions(weights: NDArray[np.float64]) -> None:
    with pytest.raises(ParameterError, match="expected 4 finite coefficients"):
        directions("rademacher", 4, 10).combine(weights)
