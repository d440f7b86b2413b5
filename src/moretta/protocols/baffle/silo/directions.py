"""The directions in which parameters are perturbed: the same bits on every machine, from a key that all roles share.

    Rademacher   each entry -1 or +1. A block of 8 directions is one keystream of n bytes: bit j of byte i is the sign
                 of entry i of the block's direction j, 1 for minus.
    Gaussian     each entry standard normal to 2^-12, from 16 bits of the keystream: the highest is the sign (1 for
                 minus), the others the place in a table of 2^15 quantiles that the package contains.

torch.randn and numpy's generators differ between versions, and torch's between instruction sets of one machine; AES in
counter mode, integers and one rounded addition do not.

Orthogonal directions (``orthogonal``) are s_k h_k o r. The h_k are rows of a Sylvester-Hadamard matrix of order B,
repeated along the parameters, and r is one vector of random signs. Without each direction's own sign s_k the mean form
would omit parameters where all h_k agree. Each single direction is uniform, as before, and any two of them are
orthogonal, up to B where B does not divide n.

A sum over directions, sum_k c_k d_k, is made of integers: c_k are rounded to a common step, and a table gives 256
partial sums of a block by its bytes. Sums in int64 are exact, so they are the same bit for bit in any order.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.errors import ParameterError
from moretta.secure_aggregation.keystream import Keystream, derive

BLOCK = 8  # directions in a block: the bits of a byte
STEP = 1 << 15  # parameters that are summed at a time, so that they stay in the cache
MOST = STEP  # directions; an orthogonal block of them must divide a step
SUM_BITS = 61  # the most bits of a sum of rounded coefficients in int64
GAUSSIAN_BITS = 12  # the table has multiples of 2^-12
GAUSSIAN_LARGEST = 15  # bits of the largest of them
DISTRIBUTIONS = ("rademacher", "gaussian")

_BITS = (np.arange(256)[:, None] >> np.arange(BLOCK)) & 1
_SIGNS = (1 - 2 * _BITS).astype(np.int64)  # [256, 8]: the signs of a byte's 8 directions


class Directions:
    """d_1 .. d_K of n entries each.

    Args:
        keys: 32 bytes for each block of 8 directions; for orthogonal ones a single key for all.
        count: K, from 1 to `MOST`.
        size: n; at least `order_of(count)` for orthogonal directions.
        distribution: "rademacher" or "gaussian"; orthogonal directions are of the former alone.

    Attributes:
        largest: The largest |entry| of a direction.

    Raises:
        ParameterError: An argument has another value, or `keys` another number of keys.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        count: int,
        size: int,
        distribution: str = "rademacher",
        *,
        orthogonal: bool = False,
    ) -> None:
        blocks = -(-count // BLOCK)
        if not 1 <= count <= MOST:
            raise ParameterError(f"expected 1 to {MOST} directions, got {count}")
        if distribution not in DISTRIBUTIONS or (orthogonal and distribution != "rademacher"):
            raise ParameterError(
                f"expected Rademacher or Gaussian directions, orthogonal ones Rademacher; got {distribution}"
            )
        if len(keys) != (1 if orthogonal else blocks):
            raise ParameterError(f"{count} directions need {1 if orthogonal else blocks} keys, got {len(keys)}")
        if orthogonal and order_of(count) > size:
            raise ParameterError(
                f"{count} orthogonal directions need {order_of(count)} parameters or more, and {size} are trained; use "
                "fewer directions"
            )
        self._keys, self.count, self.size = keys, count, size
        self._distribution, self._orthogonal = distribution, orthogonal
        self.largest = 1.0 if distribution == "rademacher" else float(gaussian_table().max()) / 2**GAUSSIAN_BITS

    def perturbed(
        self, parameters: NDArray[np.floating], distance: float, at_once: int = BLOCK
    ) -> Iterator[NDArray[np.floating]]:
        """Yield parameters + distance d_k, k = 1 .. K, `at_once` together, [m, n], float32 or float64; overwritten."""
        blocks = (self._entries(block, parameters.dtype, distance) for block in range(-(-self.count // BLOCK)))
        entries = itertools.islice(itertools.chain.from_iterable(blocks), self.count)
        together = np.empty((min(at_once, self.count), self.size), dtype=parameters.dtype)
        for start in range(0, self.count, at_once):
            vectors = together[: self.count - start]
            for vector in vectors:
                np.add(parameters, next(entries), out=vector)
            yield vectors

    def combine(self, coefficients: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return sum_k c_k d_k, float64[n]; c_k, [K], rounded to 2^-60 (Gaussian 2^-45) of K times the largest."""
        whole, bits = self.rounded(coefficients)
        if not self.gaussian:
            return scaled_back(self._combine_signs(whole), bits)
        total = np.zeros(self.size, dtype=np.int64)
        for block in range(len(self._keys)):
            for coefficient, entries in zip(whole[block * BLOCK :], self.quantiles(block), strict=False):
                total += coefficient * entries
        return scaled_back(total, bits + GAUSSIAN_BITS)

    @property
    def gaussian(self) -> bool:
        """Whether entries are normal, not signs."""
        return self._distribution == "gaussian"

    def rounded(self, coefficients: NDArray[np.float64]) -> tuple[NDArray[np.int64], int]:
        """Return coefficients as whole numbers of 2^-bits, int64[K], and the bits. Raises as `combine`."""
        if coefficients.shape != (self.count,) or not np.isfinite(coefficients).all():
            raise ParameterError(f"expected {self.count} finite coefficients, got shape {list(coefficients.shape)}")
        bound = float(np.abs(coefficients).max(initial=0.0)) * self.count
        bits = SUM_BITS - math.frexp(bound)[1] - (GAUSSIAN_LARGEST if self.gaussian else 0)
        return np.rint(np.ldexp(coefficients, bits)).astype(np.int64), bits

    def tables(self, whole: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return each byte's contribution to a sum over a block's directions, int64[blocks, 256]."""
        padded = np.concatenate([whole, np.zeros(-len(whole) % BLOCK, dtype=np.int64)]).reshape(-1, BLOCK)
        return np.asarray(padded @ _SIGNS.T)

    def _combine_signs(self, whole: NDArray[np.int64]) -> NDArray[np.int64]:
        total, tables = np.zeros(self.size, dtype=np.int64), self.tables(whole)
        if not whole.any():
            return total
        picked, index = np.empty(STEP, dtype=np.int64), np.empty(STEP, dtype=np.intp)
        blocks = [self.octets(block) for block in range(len(tables))]
        for start in range(0, self.size, STEP):
            part = total[start : start + STEP]
            for table, octets in zip(tables, blocks, strict=True):
                index[: len(part)] = next(octets)
                np.take(table, index[: len(part)], out=picked[: len(part)], mode="wrap")
                part += picked[: len(part)]
        return total

    def _entries(self, block: int, dtype: np.dtype[Any], distance: float) -> Iterator[NDArray[np.floating]]:
        """Yield distance d_k for the directions of a block, in the parameters' dtype; the array is overwritten."""
        if self._distribution == "gaussian":
            scale = dtype.type(distance * 2.0**-GAUSSIAN_BITS)
            for entries in self.quantiles(block):
                yield entries.astype(dtype) * scale
            return
        # The sign bit of a float is its highest: the direction's bit is shifted there and joined to the distance.
        words = np.dtype(f"u{dtype.itemsize}")
        highest = 8 * dtype.itemsize - 1
        octets = np.concatenate(list(self.octets(block))).astype(words)
        magnitude = dtype.type(abs(distance)).view(words)
        turned = words.type(0 if distance >= 0 else 1) << words.type(highest)
        signed = np.empty_like(octets)
        for bit in range(BLOCK):
            np.left_shift(octets, words.type(highest - bit), out=signed)
            signed &= words.type(1 << highest)
            signed ^= magnitude | turned
            yield signed.view(dtype)

    def octets(self, block: int) -> Iterator[NDArray[np.uint8]]:
        """Yield the signs of a block's directions, `STEP` parameters at a time, uint8[STEP]."""
        stream = Keystream(self._keys[0 if self._orthogonal else block])
        turned = stream.octets(-(-self.count // BLOCK))[block] if self._orthogonal else 0
        rows = block * BLOCK + np.arange(BLOCK)
        for start in range(0, self.size, STEP):
            length = min(STEP, self.size - start)
            if not self._orthogonal:
                yield stream.octets(length)
                continue
            random = np.unpackbits(stream.octets(-(-length // 8)), count=length, bitorder="little")
            minus = _parity(rows[:, None] & np.arange(order_of(self.count)))  # of Sylvester's matrix, [8, B]
            pattern = np.packbits(minus.astype(np.uint8), axis=0, bitorder="little")[0]
            yield np.resize(pattern, length) ^ (random * np.uint8(255)) ^ turned  # B divides STEP

    def quantiles(self, block: int) -> Iterator[NDArray[np.int64]]:
        """Yield a block's Gaussian directions as whole numbers of 2^-12, int64[n]."""
        stream = Keystream(self._keys[block])
        for _ in range(min(BLOCK, self.count - block * BLOCK)):
            words = stream.integers(self.size, 16)
            entries = gaussian_table()[words & np.uint16(0x7FFF)].astype(np.int64)
            yield np.where(words >> np.uint16(15), -entries, entries)


def scaled_back(total: NDArray[np.int64], bits: int) -> NDArray[np.float64]:
    """Return whole numbers of 2^-bits as float64."""
    return np.ldexp(total.astype(np.float64), -bits)


def keys_of(
    secret: bytes, count: int, *purpose: int | str | bytes, orthogonal: bool = False, pool: int = 0
) -> list[bytes]:
    """Return the keys of K = count directions for one purpose (the run, a round, the parameters' hash).

    Args:
        secret: The seed that the roles agreed on, or a silo's own secret.
        pool: The number of fixed directions to take each purpose's from, a multiple of 8 and at least K; 0 for fresh
            ones. Orthogonal ones are always fresh.
    """
    if orthogonal:
        return [derive(secret, "baffle directions", *purpose)]
    blocks = -(-count // BLOCK)
    if not pool:
        return [derive(secret, "baffle directions", *purpose, block) for block in range(blocks)]
    drawn = Keystream(derive(secret, "baffle pool", *purpose)).permutation(pool // BLOCK)[:blocks]
    return [derive(secret, "baffle directions", "pool", int(block)) for block in drawn]


@functools.cache
def gaussian_table() -> NDArray[np.int16]:
    """Return the half-normal quantiles at (i + 1/2) 2^-15, scaled to variance 1, int16[2^15] in units of 2^-12."""
    with resources.files(__package__).joinpath("gaussian.npy").open("rb") as file:
        table: NDArray[np.int16] = np.load(file, allow_pickle=False)
    return table


def _parity(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return whether whole numbers below 2^16 have an odd number of bits."""
    for shift in (8, 4, 2, 1):
        numbers = numbers ^ (numbers >> shift)
    return numbers & 1


def order_of(count: int) -> int:
    """Return B, the order of the Hadamard matrix for `count` orthogonal directions."""
    return max(BLOCK, 1 << (count - 1).bit_length())
