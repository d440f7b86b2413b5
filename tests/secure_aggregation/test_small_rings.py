"""The ring's arithmetic at every bit pattern.

`Ring` is made for 32 and 64 bits, but its formulas name no width. So they are tried on rings of 8 bits, for all pairs
of words, and of 16, for all words, where Python's whole numbers say what is right; of Z_2^32 itself, for all patterns
of the upper and of the lower half of a word.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from moretta.errors import ParameterError, PeerError, RangeError
from moretta.secure_aggregation.encoding import MOST_WEIGHT, Range, Ring, add_up, decode, encode
from moretta.secure_aggregation.masks import add_masks
from moretta.secure_aggregation.sums import Wanted

EVERY_BYTE = np.arange(256, dtype=np.uint8)


def small(bits: int) -> Ring:
    ring = object.__new__(Ring)
    object.__setattr__(ring, "bits", bits)
    return ring


def signed(word: int, bits: int) -> int:
    return word - (1 << bits) if word >> (bits - 1) else word


@pytest.mark.parametrize("bits", [8, 16])
def test_every_word_decodes_as_twos_complement(bits: int) -> None:
    words = np.arange(1 << bits).astype(f"uint{bits}")
    for fraction_bits in (-3, 0, 5):
        values = small(bits).decode(words.copy(), fraction_bits)
        assert values.tolist() == [signed(word, bits) / 2.0**fraction_bits for word in range(1 << bits)]


@pytest.mark.parametrize("bits", [8, 16])
def test_every_word_in_range_is_encoded_and_comes_back(bits: int) -> None:
    ring, parties = small(bits), 2
    largest = ring.largest(0, 1, parties)
    values = np.array([float(n) for n in range(-(1 << bits), 1 << bits) if abs(n) < largest])
    assert len(values) == 2**bits - 3  # all but the two largest, and the most negative word, which has no opposite
    words = ring.encode("x", values, 1, 0, 1, parties)
    assert words.tolist() == [int(n) % (1 << bits) for n in values]
    assert ring.decode(words, 0).tolist() == values.tolist()
    for value in (values.max() + 1, values.min() - 1, float(1 << bits)):
        with pytest.raises(RangeError):
            ring.encode("x", np.array([value]), 1, 0, 1, parties)


def test_every_sum_of_two_words() -> None:
    one, other = (grid.ravel() for grid in np.meshgrid(EVERY_BYTE, EVERY_BYTE))
    total = add_up([one, other])
    assert total.tolist() == [(a + b) % 256 for a, b in zip(one.tolist(), other.tolist(), strict=True)]
    assert np.array_equal(np.subtract(total, other), one)  # a mask that is added and subtracted is gone
    for word in (one, other):
        counts = np.bincount(total[word == 7], minlength=256)
        assert (counts == 1).all()  # a word under a uniform one is uniform


def test_no_sum_of_two_in_range_wraps_and_one_more_bit_would() -> None:
    ring = small(8)
    for limit in (0.3, 1.0, 7.5):
        for most_weight in (2, 3, 9):
            bits = ring.fraction_bits("x", limit, most_weight, 2)
            step = 2.0**-bits
            values = np.array([k * step / 4 for k in range(-600, 601) if abs(k * step / 4) <= limit] + [limit, -limit])
            for weight in range(1, most_weight):
                # All pairs of values, of two silos whose weights make up the most there may be.
                mine, theirs = (
                    ring.encode("x", values, part, bits, most_weight, 2) for part in (weight, most_weight - weight)
                )
                grid = np.add.outer(mine.view(np.int8).astype(int), theirs.view(np.int8).astype(int))
                assert np.abs(grid).max() <= 127
                assert np.array_equal(np.add.outer(mine, theirs).view(np.int8), grid)
            assert Fraction(2) ** (bits + 1) * most_weight * Fraction(limit) * (1 + Fraction(1, 2**53)) >= 127


@pytest.mark.parametrize("bits", [8, 16])
def test_masks_cancel_at_every_word(bits: int) -> None:
    words = np.arange(1 << bits).astype(f"uint{bits}")
    masked = words.copy()
    add_masks(masked, [(True, b"k" * 32), (False, b"l" * 32)])
    assert not np.array_equal(masked, words)
    add_masks(masked, [(False, b"k" * 32), (True, b"l" * 32)])
    assert np.array_equal(masked, words)


@pytest.mark.parametrize("shift", [0, 16])
def test_every_half_of_a_word_of_32_bits(shift: int) -> None:
    ring, numbers = Ring(32), [pattern << shift for pattern in range(1 << 16)]
    words = np.array(numbers, dtype=np.uint32)
    expected = [signed(number, 32) for number in numbers]
    values = ring.decode(words.copy(), 0)
    assert values.tolist() == expected
    inside = np.abs(values) < float(ring.largest(0, 1, 2))
    assert inside.sum() >= 2**16 - 2
    assert np.array_equal(ring.encode("x", values[inside], 1, 0, 1, 2), words[inside])
    # Every pattern of a mask, on every other pattern once.
    masks = np.roll(words, 12345) ^ np.uint32(0x5A5A5A5A)
    total = add_up([words, masks])
    assert total.tolist() == [(a + b) % 2**32 for a, b in zip(numbers, masks.tolist(), strict=True)]
    assert np.array_equal(total - masks, words)


# -- encodings and sums ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "sentence"),
    [
        ({"w": 20}, f"expected a total weight of 1 to {2**63 - 1}, got 0"),
        ({"w": 20, MOST_WEIGHT: 0}, f"expected a total weight of 1 to {2**63 - 1}, got 0"),
        ({"w": 20, MOST_WEIGHT: 2**63}, f"expected a total weight of 1 to {2**63 - 1}, got {2**63}"),
        ({"w": 965, MOST_WEIGHT: 2}, "`w`: expected at most 964 fraction bits, got 965"),
        ({"w": 61, MOST_WEIGHT: 2}, "`w`: expected an encoding of values up to 2, got one of fewer"),
    ],
)
def test_a_silo_refuses_encodings_that_honest_servers_do_not_make(encoding: dict[str, int], sentence: str) -> None:
    demanded = Range(2.0, one_weight=False)
    demanded.check(Ring(64), {"w": 20, MOST_WEIGHT: 2}, 2, None, once=False)
    with pytest.raises(PeerError) as caught:
        demanded.check(Ring(64), encoding, 2, None, once=False)
    assert str(caught.value) == sentence


def test_a_total_weight_is_at_least_the_silos_own() -> None:
    tensors = {"w": np.array([0.5])}
    whole, _ = encode(Ring(64), tensors, 1, {"w": 20, MOST_WEIGHT: 1}, 1)
    assert whole.tolist() == [1, 2**19]
    with pytest.raises(ParameterError, match="total weight of at least this silo's own, got 2"):
        encode(Ring(64), tensors, 3, {"w": 20, MOST_WEIGHT: 2}, 2)


def test_a_sum_of_one_is_a_copy() -> None:
    words = np.arange(3, dtype=np.uint64)
    total = add_up([words])
    assert total.tolist() == words.tolist()
    assert not np.shares_memory(total, words)


@pytest.mark.parametrize("fraction_bits", [10, 20])
def test_means_out_of_reach_are_clipped_to_the_range_and_a_step(fraction_bits: int) -> None:
    ring, parties, weight, most_weight = Ring(32), 3, 5, 9  # of 64 bits a step vanishes beside the range
    request = Wanted({"w": (2,)}, {"w": fraction_bits}, most_weight)
    words = np.array([2**31 - 1, 2**31], dtype=np.uint32)
    total = decode(ring, {"w": words}, weight, "abc", request)
    step = parties / (2 * 2.0**fraction_bits * weight)  # K / (2 * 2^f N)
    largest = float(ring.largest(fraction_bits, most_weight, parties)) + step
    assert total.steps == {"w": step}
    assert total.means["w"].tolist() == [largest, -largest]
