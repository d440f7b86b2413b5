"""Linear equations over Z_2^64: what sums say, and whether they say something of one silo alone.

An equation is sum of coefficient times unknown = data, modulo 2^64. The unknowns are vectors of ring elements, and so
is the data; where it is not asked for, there is none.

**Why over the ring, and not over the rationals.** Whoever has equations can multiply them by numbers and add them, and
that is all that can be done where unknowns are arbitrary vectors. A combination c v with c odd gives v, since c has an
inverse; with c = 2^k (odd) it gives v but for its k highest bits, which already tells a small number whole. What counts
is thus whether any combination leaves c v of one silo with c not 0 modulo 2^64. The rationals would miss the one that
is a multiple of 2^64 elsewhere, and elimination modulo 2 those with c even; the ring has both.

**Elimination in Z_2^64**, which has zero divisors (Howell's form, as in Storjohann, "Algorithms for matrix canonical
forms", 2000): in each column the pivot is an entry with the fewest factors of 2, of which all others are multiples. The
pivot's own equation stays, too, times what makes its entry there 0.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BITS = 64
MODULUS = 1 << BITS


@dataclass(frozen=True, eq=False)
class Equation:
    """coefficients: from 1 to 2^64 - 1, by unknown. data: uint64, or None. of: what it was found in."""

    coefficients: Mapping[Hashable, int]
    data: NDArray[np.uint64] | None = None
    of: frozenset[Hashable] = frozenset()

    def times(self, factor: int) -> Equation:
        return Equation(
            {name: value for name, c in self.coefficients.items() if (value := c * factor % MODULUS)},
            None if self.data is None else self.data * np.uint64(factor % MODULUS),
            self.of,
        )

    def plus(self, other: Equation) -> Equation:
        names = self.coefficients.keys() | other.coefficients.keys()
        both = {name: (self.coefficients.get(name, 0) + other.coefficients.get(name, 0)) % MODULUS for name in names}
        data = None if self.data is None or other.data is None else self.data + other.data
        return Equation({name: value for name, value in both.items() if value}, data, self.of | other.of)


def without(equations: Iterable[Equation], unknowns: Iterable[Hashable]) -> list[Equation]:
    """Return equations that span all combinations in which none of these unknowns is left."""
    left = [one for one in equations if one.coefficients]
    for unknown in unknowns:
        concerned = [one for one in left if unknown in one.coefficients]
        if not concerned:
            continue
        left = [one for one in left if unknown not in one.coefficients]
        pivot = min(concerned, key=lambda one: _twos(one.coefficients[unknown]))
        value = pivot.coefficients[unknown]
        twos = _twos(value)
        inverse = pow(value >> twos, -1, MODULUS)
        reduced = [
            one.plus(pivot.times(-(one.coefficients[unknown] >> twos) * inverse))
            for one in concerned
            if one is not pivot
        ]
        reduced.append(pivot.times(MODULUS >> twos))
        left += [one for one in reduced if one.coefficients]
    return left


def alone(equations: Sequence[Equation], owner: Callable[[Hashable], Hashable]) -> dict[Hashable, list[Equation]]:
    """Return, by owner, equations that hold nobody else's unknowns, of each owner of whom there is one."""
    found = dict[Hashable, list[Equation]]()
    unknowns = dict.fromkeys(name for one in equations for name in one.coefficients)
    for mine in dict.fromkeys(map(owner, unknowns)):
        left = without(equations, [name for name in unknowns if owner(name) != mine])
        if left:
            found[mine] = left
    return found


def _twos(number: int) -> int:
    """Return how often 2 divides a number that is not 0."""
    return (number & -number).bit_length() - 1
