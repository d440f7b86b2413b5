"""Scales of a model: solved once over its graph, drawn afresh for every key, applied in milliseconds.

The server multiplies the weights of a model by one positive scale per channel and permutes channels so that the
function of the network is unchanged (`practical.md`, Eq. 7, 14 and 15, Lemmas 1 and 2):

    W^ = P(R o W),    R_ij = s_i / s_j for a linear layer from channels j to channels i,
    grad L(W) = R o P^-1(grad L(W^)),

with s = 1 on the model's inputs and on the head's outputs. `perturbation` adds the head's offset.

    graph           which functions the model calls
    rules, layers   what each call does to scales
    solver          the equalities that the rules state
    patterns        how a key changes one tensor
    selfcheck       a test of the result in numbers
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moretta.contract.messages import Array
from moretta.errors import ParameterError, UnsupportedModel
from moretta.models.checks import check_traceable
from moretta.protocols.pbpfl import head as heads
from moretta.protocols.pbpfl import patterns, selfcheck
from moretta.protocols.pbpfl.graph import FAILURES, Call, Trace, other_answers, record
from moretta.protocols.pbpfl.head import Head
from moretta.protocols.pbpfl.layers import LAYERS
from moretta.protocols.pbpfl.patterns import Indices, Pattern, Positions
from moretta.protocols.pbpfl.rules import SIGNED, opaque
from moretta.protocols.pbpfl.solver import OUTPUT, Ids, SignedUnion, Solver, Stored, View, constant, names_in
from moretta.secure_aggregation.keystream import Keystream

FROZEN = "it is frozen, so that silos are sent it as it is"
SIGNS = "it follows only signs, which hide no size"

Values = TypeVar("Values", Tensor, Array)
Pairs = Iterable[tuple[str, Values]]


@dataclass(frozen=True)
class Forced:
    """A tensor in which some scale is 1, and the reason."""

    tensor: str
    because: str


@dataclass(frozen=True, eq=False)
class ScaleKey:
    """The secret of one round: a value for each free scale, float64[free], and an order for each block of channels."""

    scales: NDArray[np.float64] = field(repr=False)
    permutations: tuple[Indices, ...] = field(repr=False)

    def __repr__(self) -> str:
        return "ScaleKey(<redacted>)"


@dataclass(frozen=True, eq=False)
class ScalePlan:
    """The free scales of a model, and how every parameter and buffer follows them.

    Attributes:
        parameters, buffers: Their patterns by name.
        aliases: Second names of tied parameters.
        free: The number of free scales.
        blocks: The sizes of the sets of channels that are permuted.
        forced: The tensors with scale 1, and the reasons.
        head: The last layer.
        signs: Places of the free scales that are 1 or -1.
    """

    parameters: Mapping[str, Pattern]
    buffers: Mapping[str, Pattern]
    aliases: Mapping[str, str]
    free: int
    blocks: tuple[int, ...]
    forced: tuple[Forced, ...]
    head: Head
    signs: tuple[int, ...] = ()
    # A cache, the only part that changes, and no part of the value; `replace` gives the new plan an empty one.
    _vectors: dict[tuple[str, ...], Pattern] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, model: nn.Module, example_inputs: Sequence[Tensor]) -> ScalePlan:
        """Trace a copy of the model in float64, solve its scales and check the result numerically.

        Args:
            example_inputs: The model's arguments, each with the batch as axis 0.

        Raises:
            UnsupportedModel: The model reads data (other than by up to 4 yes-or-no questions about its inputs), differs
                between training and evaluation, or mixes rows outside batch normalisation. Or it does not end in a
                linear layer, or that layer's inputs always add up to 0. The sentence names the place and a remedy.
        """
        check_traceable(model)
        with selfcheck.double_precision():
            clone, inputs = selfcheck.stand_in(model, example_inputs)
            plan = cls._of(clone, inputs)
            selfcheck.refuse_vanishing_alpha(plan, clone, inputs)
        _refuse_frozen_head(model, plan.head)
        return plan

    @classmethod
    def _of(cls, clone: nn.Module, inputs: Sequence[Tensor]) -> ScalePlan:
        solved = _solved(clone, inputs)
        plan = _plan(clone, solved.solver, solved.head)
        still = replace(plan, blocks=(), parameters=_still(plan.parameters), buffers=_still(plan.buffers))
        for candidate in (plan, still):
            ways = [turned for turned in solved.ways if selfcheck.agrees(candidate, clone, inputs, turned)]
            # Further ways may disagree, as perhaps no rows lead there; a silo's rows that do are refused.
            if ways[:1] == [frozenset()] and (len(ways) == len(solved.ways) or candidate is still):
                answers = frozenset[tuple[bool, ...]]().union(*(solved.ways[turned] for turned in ways))
                return replace(candidate, head=replace(solved.head, answers=answers - {()}))
        predict = partial(_predicted, solved.solver.scales, _free_roots(solved.solver))
        raise UnsupportedModel(selfcheck.first_deviation(still, clone, inputs, predict, solved.history))

    @property
    def positive(self) -> int:
        """The number of free scales that are not signs."""
        return self.free - len(self.signs)

    def draw(self, stream: Keystream) -> ScaleKey:
        """Draw a key: scales log-uniform in [1/2, 2], signs and permutations of each block uniform."""
        uniform, signs = np.asarray(stream.uniform(self.free)), np.array(self.signs, np.int64)
        scales = 2.0 ** (2.0 * uniform - 1.0)
        scales[signs] = np.where(uniform[signs] < 0.5, -1.0, 1.0)
        return ScaleKey(scales, tuple(np.asarray(stream.permutation(size)) for size in self.blocks))

    def draw_powers_of_two(self, stream: Keystream) -> ScaleKey:
        """Draw scales from 1/2, 1 and 2 and permute nothing: then perturbation is exact to the last bit.

        Differs from the paper, whose scales are real numbers. Exponents are uniform over the range of `draw`. The
        solver uses a free scale, its inverse or a quotient of two, all powers of two. Channels stay in place: a sum
        over permuted channels rounds in another order, which moves a deep network's gradient as far as any key. Signs
        stay 1: a library's tanh(-x) need not be -tanh(x) to the last bit.
        """
        scales = 2.0 ** np.floor(3.0 * np.asarray(stream.uniform(self.free)) - 1.0)
        scales[np.array(self.signs, np.int64)] = 1.0
        return replace(self.identity(), scales=scales)

    def identity(self) -> ScaleKey:
        """Return the key that changes nothing."""
        return ScaleKey(np.ones(self.free), tuple(np.arange(size) for size in self.blocks))

    def perturb(
        self, tensors: Mapping[str, Values], key: ScaleKey, rounded: Callable[[Array], Array] = lambda array: array
    ) -> dict[str, Values]:
        """Return copies of parameters and buffers by name: R o W, permuted, each in its dtype and then `rounded`."""
        orders, factors = patterns.orders(self._moved(key)), patterns.factors(key.scales)

        def follow(pattern: Pattern, array: Array) -> Array:
            return rounded(pattern.perturb(array, factors, orders))

        return self.head.split(self._each(self.head.joined(tensors), follow, True))

    def recover(
        self, tensors: Mapping[str, Values] | Pairs[Values], key: ScaleKey, into: Mapping[str, Array] | None = None
    ) -> dict[str, Values]:
        """Return the true parameters' gradients from the noisy ones': permuted back, times R, in float64.

        Args:
            tensors: By name, or in pairs with their names, each freed before the next is read.
            into: Arrays by name for the results; None makes new ones.
        """
        back, factors = patterns.orders(np.argsort(self._moved(key))), patterns.factors(key.scales)
        return self._each(tensors, lambda pattern, array: pattern.recover(array, factors, back), into=into)

    def recover_buffers(self, tensors: Mapping[str, Values], key: ScaleKey) -> dict[str, Values]:
        """Return copies of running statistics in their original order; their scale is 1."""
        back = patterns.orders(np.argsort(self._moved(key)))
        return self._each(tensors, lambda pattern, array: pattern.permute(array.copy(), back))

    def _each(
        self,
        tensors: Mapping[str, Values] | Pairs[Values],
        follow: Callable[[Pattern, Array], Array],
        keep_dtype: bool = False,
        into: Mapping[str, Array] | None = None,
    ) -> dict[str, Values]:
        """Return each tensor transformed, in their order, in new memory or in the arrays `into`.

        Vectors of one dtype are joined end to end, because many small ones would cost mostly calls.
        """
        names, values = [], dict[str, Values]()

        def keep(name: str, value: Values, result: Array) -> None:
            if into is not None:
                into[name][...] = result
                result = into[name]
            values[name] = _like(value, result, keep_dtype)

        vectors: defaultdict[np.dtype[np.generic], dict[str, Values]] = defaultdict(dict)
        for name, value in tensors.items() if isinstance(tensors, Mapping) else tensors:
            names.append(name)
            pattern, array = self._pattern(name), _array(value)
            if array.ndim == 1 and array.size and array.dtype.kind == "f":
                if array.shape != pattern.shape:  # end to end, two wrong lengths could add up to a correct one
                    raise ParameterError(f"`{name}`: expected the shape {pattern.shape}, got {array.shape}")
                vectors[array.dtype][name] = value
            else:
                keep(name, value, follow(pattern, array))
        for alike in vectors.values():
            joined = follow(self._joined(tuple(alike)), np.concatenate([_array(value) for value in alike.values()]))
            start = 0
            for name, value in alike.items():
                keep(name, value, joined[start : start + len(value)])
                start += len(value)
        return {name: values[name] for name in names}

    def _joined(self, names: tuple[str, ...]) -> Pattern:
        """Return the pattern of some vectors end to end; cached, because every round has the same names."""
        if names not in self._vectors:
            self._vectors[names] = Pattern.joined([self._pattern(name) for name in names])
        return self._vectors[names]

    def multiplier(self, name: str, key: ScaleKey) -> NDArray[np.float64]:
        """Return R of one tensor, broadcastable to it, in the original order of its channels."""
        return self._pattern(name).multiplier(patterns.factors(key.scales))

    def _pattern(self, name: str) -> Pattern:
        canonical = self.aliases.get(name, name)
        pattern = self.parameters.get(canonical) or self.buffers.get(canonical)
        if pattern is None:
            raise ParameterError(f"expected the name of a parameter or buffer of the model, got `{name}`")
        return pattern

    def _moved(self, key: ScaleKey) -> Indices:
        """Return for each moving channel the channel that replaces it; channels are counted block by block."""
        if len(key.scales) != self.free or tuple(map(len, key.permutations)) != self.blocks:
            raise ParameterError("the key was drawn for another model")
        starts = np.cumsum([0, *self.blocks])
        parts = [start + order for start, order in zip(starts, key.permutations, strict=False)]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def _refuse_frozen_head(model: nn.Module, head: Head) -> None:
    """Raise UnsupportedModel if part of the head is frozen, because silos hold frozen parts without the offset."""
    parts = dict(model.named_parameters())
    whole = (head.weight, head.bias, head.magnitude)
    frozen = [name for name in whole if name in parts and not parts[name].requires_grad]
    if frozen:
        raise UnsupportedModel(
            f"`{frozen[0]}` is frozen, but the server removes PBPFL's offset by the gradient of the whole head; "
            "unfreeze it, or freeze layers below the head alone"
        )


def _array(value: Tensor | Array) -> Array:
    if not isinstance(value, Tensor):
        return value
    tensor = value.detach().cpu()
    return (tensor.double() if tensor.dtype == torch.bfloat16 else tensor).numpy()  # NumPy has no bfloat16


def _like(value: Values, result: Array, keep_dtype: bool = False) -> Values:
    """Return the result as an array, or as a tensor on the device of `value` if that is a tensor."""
    if not isinstance(value, Tensor):
        return result
    return torch.from_numpy(result).to(value.device, value.dtype if keep_dtype else None)


@dataclass(frozen=True)
class _Solved:
    """history: each call's ids. ways: for each set of reversed answers (`other_answers`), the answers that followed."""

    solver: Solver
    head: Head
    history: list[tuple[Ids | None, ...]]
    ways: Mapping[frozenset[int], frozenset[tuple[bool, ...]]]


def _solved(clone: nn.Module, inputs: Sequence[Tensor]) -> _Solved:
    """Trace the model and solve its scales; the memory for it, many times the model's, is freed on return.

    Training may call other functions than evaluation (dropout, noise, statistics), and so may a run with other answers
    about the inputs. The solver states the equalities of all these runs.
    """
    before = [buffer.clone() for buffer in clone.buffers()]

    def traced(training: bool, turned: frozenset[int] = frozenset()) -> Trace:
        try:
            return record(clone, inputs, training=training, turned=turned)
        finally:  # restore running statistics
            for buffer, value in zip(clone.buffers(), before, strict=True):
                buffer.copy_(value)

    training, evaluation = traced(True).outline, traced(False)  # one trace's results are in memory at a time
    if training.kind is not type(evaluation.output):
        raise UnsupportedModel(
            f"in training the model returns {training.kind.__name__} and in evaluation "
            f"{type(evaluation.output).__name__}: switch auxiliary outputs off (for example aux_logits=False)"
        )
    selfcheck.refuse_non_finite(clone, inputs, evaluation)
    selfcheck.refuse_unsteady(clone, inputs, evaluation)
    head = heads.find(clone, evaluation, inputs)
    selfcheck.refuse_mixed_rows(clone, inputs, evaluation)
    named = [*clone.named_parameters(), *clone.named_buffers()]
    solver = Solver({name: tensor.shape for name, tensor in named}, head.weight)
    history = _solve(solver, clone, inputs, evaluation)
    seen = evaluation.outline
    del evaluation
    ways, others = {frozenset[int](): frozenset({seen.answers, training.answers})}, [(True, frozenset[int](), training)]
    for turned in other_answers(seen.answers):
        try:
            both = [(mode, turned, traced(mode, turned).outline) for mode in (True, False)]
        except UnsupportedModel:
            continue  # perhaps no batch has these answers; if one has, its silo gets an error
        ways[turned], others = frozenset(outline.answers for _, _, outline in both), others + both
    for mode, turned, outline in others:
        if outline.calls != seen.calls:
            _solve(solver, clone, inputs, traced(mode, turned))
    for ids in (solver.stored[head.weight].out, solver.stored[head.weight].into):
        if ids is not None:  # alpha = sum h would change from round to round, which reveals the offset to silos
            solver.scales.force_signs(ids.scale, "signs of the head's inputs would show its offset")
    return _Solved(solver, head, history, ways)


def _solve(solver: Solver, model: nn.Module, inputs: Sequence[Tensor], trace: Trace) -> list[tuple[Ids | None, ...]]:
    """State the equalities of a trace's calls, in order, and of its output; return the ids of the calls' results."""
    solver.values = {id(tensor): constant(tensor.shape) for tensor in inputs}
    # Silos know frozen tensors, or can average them over rounds: they have scale 1 and stay in their places.
    floats = [
        (n, parameter)
        for n, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.requires_grad
    ]
    solver.values |= {id(tensor): View(name, tensor.shape) for name, tensor in floats}
    solver.buffers = {id(tensor): name for name, tensor in model.named_buffers()}
    history = []
    for call in trace.calls:
        solver.where = call.place
        history.append(tuple(value if isinstance(value, Ids) else None for value in _follow(solver, call)))
    solver.where = OUTPUT
    output = solver.ids(trace.output)
    solver.force(output, OUTPUT)
    solver.pin(output.channel)
    return history


def _follow(solver: Solver, call: Call) -> list[Ids | View]:
    """Apply the rule of one call; record and return the ids of its results."""
    arguments = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    results = [leaf for leaf in tree_leaves(call.result) if isinstance(leaf, Tensor)]
    known = any(id(tensor) in solver.values for tensor in arguments)
    if not known and call.name not in ("zeros", "zeros_like", "embedding"):
        return []
    if call.name not in SIGNED:
        for tensor in arguments:
            solver.unsigned(tensor)
    result = None
    if call.name in LAYERS and (call.args or not arguments) and all(tensor.numel() for tensor in arguments):
        # A rule may fail on an unusual way to call the function. Equalities that it stated before only free less.
        with suppress(*FAILURES):
            result = LAYERS[call.name](solver, call)
    if result is None:
        solver.where = f"{call.place}, an operation without a rule,"
        result = opaque(solver, call)
    values = [result] if isinstance(result, Ids | View) else list(result)
    for tensor, value in zip(results, values, strict=True):
        # A whole number has no scale, so its arguments must have scale 1.
        numbers = tensor.is_floating_point() or tensor.is_complex()
        solver.values[id(tensor)] = value if numbers else constant(tensor.shape)
    return values


def _plan(model: nn.Module, solver: Solver, head: Head) -> ScalePlan:
    """Number the free scales and the moving channels, and describe each tensor by these numbers."""
    stored = solver.stored
    patterns.settle_axes(list(stored.values()), solver.channels)
    blocks = solver.channels.blocks()
    moving = {root: place for place, root in enumerate(root for block in blocks for root in block)}
    free = _free_roots(solver)
    signs = tuple(place for root, place in free.items() if solver.scales.is_sign(root))
    known: dict[tuple[bytes, bytes], Positions] = {}
    described = {
        name: Pattern(
            tuple(tensor.shape),
            patterns.follows(tensor, solver.scales, free),
            patterns.shuffles(tensor, solver.channels, moving, known),
        )
        for name, tensor in stored.items()
    }
    named = dict(model.named_parameters())
    first = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    everything = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return ScalePlan(
        parameters={name: described[name] for name in named},
        buffers={name: described[name] for name in stored if name not in named},
        aliases={name: first[id(tensor)] for name, tensor in everything if first[id(tensor)] != name},
        free=len(free),
        blocks=tuple(len(block) for block in blocks),
        forced=tuple(
            Forced(name, why)
            for name, parameter in named.items()
            if name not in (head.bias, head.magnitude)
            and parameter.is_floating_point()
            and (
                why := _why(solver, stored[name], described[name].scales(len(free)), signs)
                if parameter.requires_grad
                else FROZEN
            )
        ),
        head=head,
        signs=signs,
    )


def _free_roots(solver: Solver) -> dict[int, int]:
    """Return the free scales that some tensor follows, each with its place in a key."""
    terms = [ids for stored in solver.stored.values() for ids in (stored.out, stored.into) if ids is not None]
    roots = sorted({abs(root) for ids in terms for root in names_in(solver.scales.values(ids.scale))})
    return {root: place for place, root in enumerate(roots)}


def _why(solver: Solver, stored: Stored, follows: set[int], signs: Sequence[int]) -> str:
    """Return in words why some scale of a tensor is 1 or a sign; empty if all are free.

    The scale 1 of the model's inputs and outputs is no reason, unless the tensor has no other scale. follows: the free
    scales in the tensor's pattern.
    """
    if stored.out is None or stored.into is None:
        return "no operation of the model uses it"
    reasons = dict.fromkeys(why for ids in (stored.out, stored.into) if (why := _reason(solver, ids)))
    sized = follows.difference(signs)
    named_reasons = [why for why in reasons if why != OUTPUT or not sized]
    return "; ".join(named_reasons) or ("" if sized else SIGNS if follows else stored.because)


def _reason(solver: Solver, ids: Ids) -> str | None:
    return next((why for name in names_in(ids.scale) if (why := solver.scales.reason(name))), None)


def _still(patterns_by_name: Mapping[str, Pattern]) -> dict[str, Pattern]:
    return {name: replace(pattern, shuffles=()) for name, pattern in patterns_by_name.items()}


def _predicted(scales: SignedUnion, number: dict[int, int], ids: Ids, key: ScaleKey) -> Tensor:
    """Return the factor by which a key scales a tensor, broadcastable to it; 1 for an element that fits any."""
    stored = Stored(ids.scale.shape, ids)
    pattern = Pattern(tuple(stored.shape), patterns.follows(stored, scales, number))
    return torch.from_numpy(pattern.multiplier(patterns.factors(key.scales)))
