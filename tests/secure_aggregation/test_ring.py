from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused_rows import Row, refused

from moretta.errors import PeerError, RangeError
from moretta.secure_aggregation.encoding import CHUNK, Ring, check_fraction_bits, largest_magnitude

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "ring.json").read_text(encoding="utf-8"))

rings = st.sampled_from([Ring(32), Ring(64)])
limits = st.floats(1e-30, 1e30)
weights = st.integers(1, 2**32 - 1)
parties = st.integers(1, 100)


@pytest.mark.parametrize("case", VECTORS["good"])
def test_vectors(case: dict) -> None:
    ring, sizes = Ring(case["bits"]), (case["most_weight"], case["parties"])
    assert ring.fraction_bits("w", case["limit"], *sizes) == case["fraction_bits"]
    values = np.array([float.fromhex(value) for value in case["values"]])
    words = ring.encode("w", values, case["weight"], case["fraction_bits"], *sizes)
    assert words.dtype == ring.dtype
    assert words.tolist() == case["words"]


@pytest.mark.parametrize("case", VECTORS["bad"], ids=lambda case: case["why"])
def test_bad_vectors(case: dict) -> None:
    values = np.array([0.0, float(case["value"])])
    with pytest.raises(RangeError, match=r"`w`.*nothing was sent"):
        Ring(case["bits"]).encode("w", values, 1, case["fraction_bits"], case["most_weight"], case["parties"])


@given(rings, limits, weights, parties)
def test_fraction_bits_are_the_most_that_have_headroom(ring: Ring, limit: float, most: int, silos: int) -> None:
    f = ring.fraction_bits("w", limit, most, silos)

    def needed(bits: int) -> Fraction:
        return Fraction(2) ** bits * most * Fraction(limit) * (1 + Fraction(1, 2**53)) + Fraction(silos, 2)

    assert needed(f) < 2 ** (ring.bits - 1) <= needed(f + 1)
    # The module's promise: at least a quarter of the ring is used.
    assert Fraction(2) ** f * most * Fraction(limit) >= 2 ** (ring.bits - 2) - silos


@given(rings, limits, weights, parties, st.data())
def test_decode_inverts_encode_to_half_a_step(ring: Ring, limit: float, most: int, silos: int, data: st.DataObject):
    f = ring.fraction_bits("w", limit, most, silos)
    weight = data.draw(st.integers(1, most))
    values = np.array(data.draw(st.lists(st.floats(-limit, limit), min_size=1, max_size=5)))
    words = ring.encode("w", values, weight, f, most, silos)
    decoded = ring.decode(words.copy(), f)
    for value, back in zip(values.tolist(), decoded.tolist(), strict=True):
        exact = weight * Fraction(value)
        # Half a step of 2^-f, and two roundings of float64: of the product, and of the decoded number.
        bound = Fraction(2) ** (-f - 1) + abs(exact) * Fraction(2, 2**53) + Fraction(2) ** (-f - 52)
        assert abs(Fraction(back) - exact) <= bound


@given(rings, limits, parties, st.data())
def test_headroom_never_wraps_at_the_extremes(ring: Ring, limit: float, silos: int, data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(1, 2**24), min_size=silos, max_size=silos))
    f = ring.fraction_bits("w", limit, sum(weights), silos)
    extreme = np.array([limit, -limit])
    total = sum(ring.encode("w", extreme, weight, f, sum(weights), silos).astype(object) for weight in weights)
    signed = [int(entry) - (2**ring.bits if number else 0) * silos for number, entry in enumerate(total)]
    assert signed[0] < 2 ** (ring.bits - 1)  # the integers themselves, not modulo the ring
    assert signed[1] >= -(2 ** (ring.bits - 1))


@given(rings, limits, weights, parties)
def test_just_outside_the_range_is_refused(ring: Ring, limit: float, most: int, silos: int) -> None:
    f = ring.fraction_bits("w", limit, most, silos)
    largest = ring.largest(f, most, silos)
    assert limit < largest
    inside = np.nextafter(float(largest), 0.0)
    for value in (inside, -inside):
        ring.encode("w", np.array(value), 1, f, most, silos)
    with pytest.raises(RangeError, match="a value is outside the range"):
        ring.encode("w", np.array(np.nextafter(float(largest), np.inf)), 1, f, most, silos)


@pytest.mark.parametrize(("bits", "weight"), [(964, 1), (963, 3), (-964, 1), (-964, 2**63)])
def test_the_outermost_fraction_bits_are_accepted(bits: int, weight: int) -> None:
    check_fraction_bits("w", bits, weight)
    for further, heavier in ((bits + (1 if bits > 0 else -1), weight), *([(bits, 2 * weight)] if bits > 0 else [])):
        with pytest.raises(PeerError, match="`w`: expected at most 964 fraction bits"):
            check_fraction_bits("w", further, heavier)


def test_the_largest_magnitude_is_of_all_axes_and_signs() -> None:
    values = np.array([[1.0, -3.0], [2.0, 0.0]])
    assert (largest_magnitude("w", values), largest_magnitude("w", -values), largest_magnitude("w", values[:0])) == (
        3.0,
        3.0,
        0.0,
    )


def test_a_refusal_names_the_tensor_where_a_later_part_is_not_finite() -> None:
    values = np.zeros(CHUNK + 1)
    values[[0, -1]] = 1e300, np.nan
    with pytest.raises(RangeError, match="`w`: expected finite numbers"):
        Ring(64).encode("w", values, 1, 20, 2, 2)


def test_a_sum_of_64_bits_is_decoded_in_its_own_memory() -> None:
    words = {bits: np.zeros(3, f"uint{bits}") for bits in (32, 64)}
    shared = {bits: np.shares_memory(Ring(bits).decode(total, 20), total) for bits, total in words.items()}
    assert shared == {32: False, 64: True}


@refused("ring.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
def test_every_real_dtype_and_layout_is_read_and_left_alone(dtype: str) -> None:
    ring = Ring(64)
    values = np.arange(12).reshape(3, 4).astype(dtype).T[::2]
    values.flags.writeable = False
    f = ring.fraction_bits("w", 11.0, 5, 2)
    assert (ring.decode(ring.encode("w", values, 5, f, 5, 2), f) == 5 * values.astype(np.float64)).all()
    assert ring.encode("w", np.zeros((0, 3)), 1, f, 5, 2).shape == (0, 3)


@given(
    bits=st.sampled_from([32, 64]),
    limit=st.floats(1e-6, 1e6),
    most_weight=st.integers(2, 2000),
    parties=st.integers(2, 200),
)
def test_no_sum_reads_as_more_than_twice_all_silos_at_their_limit(
    bits: int, limit: float, most_weight: int, parties: int
) -> None:
    """Whatever ring elements a silo puts in: the largest that a ring element reads as is 2^(b - 1) / 2^f."""
    ring = Ring(bits)
    fraction = ring.fraction_bits("w", limit, most_weight, parties)
    largest = float(np.abs(ring.decode(np.array([1 << (bits - 1)], dtype=ring.dtype), fraction))[0])
    # K / 2 of rounding and 2^-53 of the product are inside: above them it is twice all at their limit, at most.
    assert largest <= 2.0 * most_weight * limit * (1.0 + 2.0**-52) + parties * 2.0**-fraction
