"""The canonical form of a network: the same for all networks that differ by PBPFL's scales and permutations alone.

A model's scales s, and the entries that they multiply or divide, follow from its architecture and are public
(`moretta.protocols.pbpfl.scales`). An attacker receives them, as an exported program cannot be solved. Of all networks
R o W the canonical one is the smallest:

    minimise over x = log s:    |R(x) o W|^2 - 2 sum_k c_k x_k,

where c_k = 0 for a scale by which some entries are multiplied and others divided, and 1 or -1 where all are multiplied
or all divided. The incoming weights of a channel then have the norm of its outgoing ones, or 1. This is convex; if W is
replaced by R(x0) o W its minimiser moves by -x0, and R(x) o W stays. Channels are put in the order of another network's
by the assignment of least squared distance, block by block, first by what no permutation of other blocks changes. Where
channels have signs, distances are those of absolute values, and each sign is then that of the product with the other.

The head's offset, one number added to all entries of a row, would spoil the scales of its inputs: `trunk` omits it.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from moretta.audit.evidence.intervals import Floats
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Array, Tensors
from moretta.errors import ParameterError, UnsupportedModel
from moretta.protocols.pbpfl import patterns
from moretta.protocols.pbpfl.head import Head
from moretta.protocols.pbpfl.patterns import Pattern, Positions, Shuffle
from moretta.protocols.pbpfl.scales import ScalePlan

PLAN = "plan"  # in the names of arrays
SWEEPS = 30  # of balancing each channel, all at once
STEPS = 60  # of Newton, the most; a few are enough
MOST_NEWTON = 1500  # free scales: more have too large a Hessian, and get more sweeps instead
LARGEST = 40.0  # of |x|: W has no smallest form beyond it, as with a channel that is cut off
CLOSE = 1e-12  # of the balance, relative to the norm of the tensors
SETTLED = 3  # rounds of assignments, each with the others' of the previous one

Named = Mapping[str, Floats]


@lru_cache(maxsize=1)
def plan_of(truth: Truth) -> ScalePlan:
    """Return the scales and permutations of a run's model, which every silo can compute from its own copy.

    Raises:
        ParameterError: The plan cannot be computed for this model.
    """
    model, run = copy.deepcopy(truth.federation.model), truth.run
    sample = torch.zeros_like(torch.tensor(truth.rows(run.silos[0]).x[:1]).repeat(2, *(1 for _ in run.shape)))
    if run.layout is not None:
        sample = torch.from_numpy(run.layout.example()).to(sample)
    try:
        return ScalePlan.of(model, (sample,))
    except UnsupportedModel as error:
        raise ParameterError(f"the scales of this model cannot be worked out: {error}".partition("\n")[0]) from error


def structure(plan: ScalePlan) -> dict[str, Array]:
    """Return the public part of a plan's parameters as arrays, for `plan_from`."""
    plain = {
        "free": plan.free,
        "signs": plan.signs,
        "blocks": plan.blocks,
        "aliases": dict(plan.aliases),
        "head": asdict(plan.head) | {"answers": ()},  # empty, as no model runs on rows here
        "parameters": {
            name: [pattern.shape, len(pattern.follows), [shuffle.axis for shuffle in pattern.shuffles]]
            for name, pattern in plan.parameters.items()
        },
    }
    arrays: dict[str, Array] = {PLAN: np.frombuffer(json.dumps(plain).encode(), np.uint8)}
    for name, pattern in plan.parameters.items():
        arrays |= {f"{PLAN}/{name}/follows/{k}": places for k, places in enumerate(pattern.follows)}
        arrays |= {f"{PLAN}/{name}/channel/{k}": each.positions.channel for k, each in enumerate(pattern.shuffles)}
        arrays |= {f"{PLAN}/{name}/rank/{k}": each.positions.rank for k, each in enumerate(pattern.shuffles)}
    return arrays


def plan_from(arrays: Mapping[str, Array]) -> ScalePlan:
    """Return the plan of a result of `structure`, without buffers."""
    plain = json.loads(arrays[PLAN].tobytes())
    parameters = {}
    for name, (shape, terms, axes) in plain["parameters"].items():
        at = f"{PLAN}/{name}"
        follows = tuple(arrays[f"{at}/follows/{k}"] for k in range(terms))
        moving = [Positions.of(arrays[f"{at}/channel/{k}"], arrays[f"{at}/rank/{k}"]) for k in range(len(axes))]
        shuffles = tuple(Shuffle(axis, positions) for axis, positions in zip(axes, moving, strict=True))
        parameters[name] = Pattern(tuple(shape), follows, shuffles)
    head = Head(**plain["head"] | {"answers": frozenset()})
    blocks, signs = tuple(plain["blocks"]), tuple(plain["signs"])
    return ScalePlan(parameters, {}, plain["aliases"], plain["free"], blocks, (), head, signs)


def trunk(plan: ScalePlan, tensors: Tensors) -> dict[str, Floats]:
    """Return the parameters below the head, float64. Raises `moretta.errors.ParameterError` for a head alone."""
    below = whole(plan, tensors)
    for name in plan.head.above:
        below.pop(name, None)
    if not below:
        raise ParameterError("the model is a head alone; there is nothing below it")
    return below


def whole(plan: ScalePlan, tensors: Tensors) -> dict[str, Floats]:
    """Return all parameters, float64, tied ones once, and of a head with weight normalisation W in place of v and g."""
    return dict(plan.head.joined({name: np.asarray(tensors[name], dtype=np.float64) for name in plan.parameters}))


def canonical(plan: ScalePlan, tensors: Named) -> dict[str, Floats]:
    """Return the smallest of all networks that differ by scales alone. tensors: some or all parameters."""
    factors = patterns.factors(np.exp(_Balance(plan, tensors).solved()))
    return {name: value * plan.parameters[name].multiplier(factors) for name, value in tensors.items()}


class _Balance:
    """|R(x) o W|^2 - 2 c x, as a sum of a exp(2 (+-x_k +-x_l)) over distinct pairs of signed scales."""

    def __init__(self, plan: ScalePlan, tensors: Named) -> None:
        self._free = plan.free
        self._sized = np.ones(max(plan.free, 1))  # 0 for signs, which have no size to solve for
        self._sized[np.array(plan.signs, np.int64)] = 0.0
        base = 2 * plan.free + 1  # the places among the factors: s, 1 / s, and the 1 at their end
        pairs: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        squares: list[Floats] = [np.empty(0)]
        for name, value in tensors.items():
            terms = [np.broadcast_to(place % base, value.shape).ravel() for place in plan.parameters[name].follows]
            if terms:
                first, other = (*terms, np.full(value.size, base - 1))[:2]
                codes, where = np.unique(first * base + other, return_inverse=True)
                pairs.append(np.asarray(codes, dtype=np.int64))
                squares.append(np.asarray(np.bincount(where.ravel(), value.ravel() ** 2), dtype=np.float64))
        pair, square = np.concatenate(pairs), np.concatenate(squares)
        self._size = float(square.sum()) or 1.0
        pair, square = pair[square > 0], square[square > 0] / self._size
        self._terms = [self._signed(pair // base), self._signed(pair % base)]
        self._square = square
        up, down = self._sums(np.zeros(self._free))
        self._pull = np.sign(up) - np.sign(down)
        self._used = (up > 0) | (down > 0)

    def _signed(self, place: NDArray[np.int64]) -> tuple[NDArray[np.int64], Floats]:
        """Return the scale of each place, 0 for the 1, and the sign of its exponent, 0 for those without size."""
        sign = np.where(place < self._free, 1.0, -1.0) * (place < 2 * self._free)
        sign *= self._sized[place % max(self._free, 1)]
        return np.where(sign != 0, place % max(self._free, 1), 0), sign

    def _values(self, x: Floats) -> Floats:
        exponent = np.zeros(len(self._square))
        for scale, sign in self._terms:
            exponent += sign * x[scale] if self._free else 0.0
        return self._square * np.exp(2.0 * np.clip(exponent, -LARGEST * 4, LARGEST * 4))

    def _sums(self, x: Floats) -> tuple[Floats, Floats]:
        """Return for each scale the sum of squares multiplied by it, and that of those divided by it."""
        values, up, down = self._values(x), np.zeros(self._free), np.zeros(self._free)
        for scale, sign in self._terms:
            up += np.bincount(scale, values * (sign > 0), self._free)[: self._free]
            down += np.bincount(scale, values * (sign < 0), self._free)[: self._free]
        return up, down

    def _aim(self, x: Floats) -> float:
        return float(self._values(x).sum() - 2.0 * self._pull @ x / self._size)

    def solved(self) -> Floats:
        """Return x."""
        x = np.zeros(self._free)
        if not self._used.any():
            return x
        small = self._free <= MOST_NEWTON
        for _ in range(SWEEPS if small else 20 * SWEEPS):
            x = self._swept(x)
        for _ in range(STEPS if small else 0):
            up, down = self._sums(x)
            slope = np.asarray(2.0 * (up - down - self._pull / self._size))
            if float(np.abs(slope).max()) < CLOSE:
                break
            x = self._stepped(x, slope)
        return x

    def _swept(self, x: Floats) -> Floats:
        """Balance each channel with the others fixed, and go half the way."""
        up, down = self._sums(x)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(self._pull > 0, 1.0 / (self._size * up), down / up)
            ratio = np.where(self._pull < 0, down * self._size, ratio)
        move = np.where(self._used, np.log(np.where(self._used, ratio, 1.0)), 0.0)
        # Half of what balances: a quarter of the log where both sums change, half of it where one does.
        return np.asarray(np.clip(x + move * np.where(self._pull == 0, 0.125, 0.25), -LARGEST, LARGEST))

    def _stepped(self, x: Floats, slope: Floats) -> Floats:
        """Return x after a step of Newton, shortened until it goes down."""
        values, free = self._values(x), self._free
        hessian = np.zeros(free * free)
        for scale, sign in self._terms:
            for other, its in self._terms:
                hessian += np.bincount(scale * free + other, 4.0 * values * sign * its, free * free)
        matrix = hessian.reshape(free, free)
        diagonal = matrix.diagonal()
        matrix[np.diag_indices(free)] += 1e-12 * diagonal + (diagonal == 0)
        move, before, length = np.linalg.solve(matrix, -slope), self._aim(x), 1.0
        while length > 1e-3:
            further = np.clip(x + length * move, -LARGEST, LARGEST)
            if self._aim(further) <= before + 1e-15:
                return further
            length /= 2
        return x


def matched(plan: ScalePlan, tensors: Named, like: Named, others: Named | None = None) -> dict[str, Floats]:
    """Return canonical tensors with their channels in the order of another network's, and with its signs.

    Args:
        like: The other network's canonical tensors.
        others: Tensors that turn as `tensors` would, such as a step; None turns `tensors`.
    """
    moved = order(plan, tensors, like)
    factors = _turned(plan, ordered(plan, tensors, moved), like)
    turned = ordered(plan, tensors if others is None else others, moved)
    return {name: value * plan.parameters[name].multiplier(factors) for name, value in turned.items()}


def _turned(plan: ScalePlan, tensors: Named, like: Named) -> Floats:
    """Return the factors, 1 or -1, by which channels of `tensors` have the signs of `like`.

    A sign is that of the sum of products over its entries whose other sign is known, sweep by sweep.
    """
    base, signs, scales = 2 * plan.free + 1, np.array(plan.signs, np.int64), np.ones(plan.free)
    scales[signs] = 0.0
    for _ in range(SWEEPS if len(signs) else 0):
        factors, votes = np.concatenate([scales, scales, [1.0]]), np.zeros(base)
        for name, value in tensors.items():
            product = (value * like[name]).ravel()
            terms = [np.broadcast_to(term % base, value.shape).ravel() for term in plan.parameters[name].follows]
            for number, term in enumerate(terms):
                known = factors[terms[1 - number]] if len(terms) == 2 else 1.0
                votes += np.bincount(term, product * known, base)
        scales[signs] = np.sign(votes[signs] + votes[signs + plan.free])
    scales[scales == 0] = 1.0
    return np.concatenate([scales, scales, [1.0]])


def order(plan: ScalePlan, tensors: Named, like: Named) -> NDArray[np.int64]:
    """Return for each moving channel of `like` the nearest channel of `tensors`, one each."""
    if plan.signs:
        tensors, like = ({name: np.abs(value) for name, value in named.items()} for named in (tensors, like))
    starts = np.cumsum([0, *plan.blocks])
    moved = np.arange(starts[-1])
    blocks = [range(start, start + size) for start, size in zip(starts, plan.blocks, strict=False)]
    for block in blocks:
        moved[block.start : block.stop] = _assigned(plan, block, tensors, like, still=True)
    for _ in range(SETTLED):
        before = moved.copy()
        for block in blocks:
            # Each channel's entries have the current order of the other blocks.
            nearest = _assigned(plan, block, ordered(plan, tensors, moved), like, still=False)
            moved[block.start : block.stop] = moved[nearest]
        if np.array_equal(before, moved):
            break
    return moved


def ordered(plan: ScalePlan, tensors: Named, moved: NDArray[np.int64]) -> dict[str, Floats]:
    """Return tensors with channel `moved[c]` where channel c was."""
    orders = patterns.orders(moved)
    return {name: plan.parameters[name].permute(value, orders) for name, value in tensors.items()}


def _assigned(plan: ScalePlan, block: range, tensors: Named, like: Named, *, still: bool) -> NDArray[np.int64]:
    """Return the channels of `tensors` nearest to each of a block of `like`."""
    from scipy.optimize import linear_sum_assignment

    cost = np.zeros((len(block), len(block)))
    for name, value in tensors.items():
        pattern = plan.parameters[name]
        for shuffle in pattern.shuffles:
            rows = _positions(shuffle, block)
            if rows.size:
                alone = len(pattern.shuffles) == 1 or not still
                mine, its = (_slices(tensor, shuffle.axis, rows, alone) for tensor in (value, like[name]))
                cost += (its**2).sum(1)[:, None] + (mine**2).sum(1)[None, :] - 2.0 * its @ mine.T
    return block.start + np.asarray(linear_sum_assignment(cost)[1], dtype=np.int64)


def _positions(shuffle: Shuffle, block: range) -> NDArray[np.int64]:
    """Return the positions of each channel of a block along an axis, [channels, positions of each]."""
    place = shuffle.positions.place
    channel = shuffle.positions.channel[place]
    positions = place[(channel >= block.start) & (channel < block.stop)]
    return positions.reshape(len(block), -1) if len(positions) else np.empty((0, 0), dtype=np.int64)


def _slices(value: Floats, axis: int, rows: NDArray[np.int64], alone: bool) -> Floats:
    """Return each channel's entries, [channels, entries]; sorted unless the tensor has no other moving axis."""
    taken = np.moveaxis(value, axis, 0)[rows].reshape(len(rows), -1)
    return taken if alone else np.sort(taken, axis=1)


def cosine(tensors: Named, other: Named) -> float:
    """Return the cosine of two networks or steps as vectors of all their entries, 0 for a vector of zeros."""
    pairs = [(tensors[name], other[name]) for name in tensors]
    product, first, second = np.sum([[np.vdot(a, b), np.vdot(a, a), np.vdot(b, b)] for a, b in pairs], axis=0)
    scale = float(np.sqrt(first * second))
    return min(1.0, float(product) / scale) if scale else 0.0
