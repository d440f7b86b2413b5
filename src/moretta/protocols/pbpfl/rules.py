"""What each function of torch does to scales and channels: elementwise functions, products, reductions, movement.

A rule takes the solver and a call and returns the ids of the result. `RULES` maps the name of a function to its rule;
layers with weights are in `layers.py`. A function without a rule is `opaque`: scale 1 in, scale 1 out, nothing moves.
That is always correct, but hides less.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from moretta.protocols.pbpfl.graph import Call
from moretta.protocols.pbpfl.solver import ANY, Ids, Solver, View, compress, constant, empty, names_in

Known = Ids | View | Sequence[Ids | View]
Rule = Callable[[Solver, Call], Known]


def tensors_of(call: Call) -> list[Tensor]:
    """Return the tensors among the arguments of a call."""
    return [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]


def opaque(solver: Solver, call: Call) -> Known:
    """Take and return scale 1 and fixed channels: correct for every deterministic function."""
    for tensor in tensors_of(call):
        value = solver.value(tensor)
        if isinstance(value, View):
            stored = solver.stored[value.name]
            solver.bind(View(value.name, stored.shape), None)
            stored.because = f"{solver.where} needs scale 1"
        else:
            solver.force(value)
            solver.pin(value.channel)
    return [constant(leaf.shape) for leaf in tree_leaves(call.result) if isinstance(leaf, Tensor)]


def passes(solver: Solver, call: Call) -> Known:
    """f(s x) = s f(x) element by element, for s > 0: ReLU, absolute values, factors, copies, dropout in evaluation."""
    value = solver.value(call.argument(0, "input"))
    if not call.result.is_floating_point() and not call.result.is_complex():
        return opaque(solver, call)
    return value if isinstance(value, View) and call.name in COPIES else solver.ids(call.argument(0, "input"))


def elementwise(solver: Solver, call: Call) -> Known:
    """Any other function of single elements: scale 1 in and out, but channels may still move."""
    if len(tensors_of(call)) > 1 and call.args[0] is not call.args[-1]:
        return opaque(solver, call)
    ids = solver.ids(call.args[0])
    solver.force(ids)
    return Ids(torch.zeros_like(ids.scale), ids.channel)


def dropout(solver: Solver, call: Call) -> Known:
    """Pass the scale. Channels stay, so that the same random numbers drop the same channels as without a key."""
    ids = solver.ids(call.argument(0, "input"))
    if call.argument(1, "p", 0.5) > 0:
        solver.pin(ids.channel)
    return ids


def fresh_constant(solver: Solver, call: Call) -> Known:
    """A constant: a tensor that takes only its shape from another, or is overwritten with noise or a number."""
    return constant(call.result.shape)


def zeros(solver: Solver, call: Call) -> Known:
    """Zeros fit every scale."""
    return empty(call.result.shape)


def threshold(solver: Solver, call: Call) -> Known:
    """Clamping at 0 is positively homogeneous, at another number it is not."""
    bounds = [bound for bound in (*call.args[1:], *call.kwargs.values()) if bound is not None]
    zero = all(isinstance(bound, int | float) and not isinstance(bound, bool) and bound == 0 for bound in bounds)
    return passes(solver, call) if zero else elementwise(solver, call)


def add(solver: Solver, call: Call) -> Known:
    """x + y, maximum(x, y), ...: one scale for both; adding a number needs scale 1."""
    terms = call.args[:2] if len(call.args) > 1 else (call.argument(0, "input"), call.argument(1, "other"))
    tensors = [term for term in terms if isinstance(term, Tensor)]
    if len(tensors) == 1:
        number = next((term for term in terms if not isinstance(term, Tensor)), 0)
        return solver.ids(tensors[0]) if number == 0 else elementwise(solver, call)
    return solver.merge(solver.ids(tensors[0]), solver.ids(tensors[1]), call.result.shape)


def where(solver: Solver, call: Call) -> Known:
    """where(condition, x, y): x and y as in a sum; the condition must not move."""
    if len(call.args) != 3:
        return opaque(solver, call)
    condition, *terms = call.args
    if call.name == "where":
        terms = [solver.ids(term) if isinstance(term, Tensor) else _number(term) for term in terms]
    else:  # x.masked_fill(mask, value): minus infinity is minus infinity at every scale
        value = call.args[2]
        if isinstance(value, Tensor):
            return opaque(solver, call)
        held, condition = solver.ids(call.args[0]), call.args[1]
        terms = [held, empty(()) if value in (0, float("-inf"), float("inf")) else _number(value)]
    ids = solver.merge(terms[0], terms[1], call.result.shape)
    solver.force(solver.ids(condition))
    return Ids(ids.scale, solver.together(ids, solver.ids(condition), call.result.shape))


def _number(value: Any) -> Ids:
    return empty(()) if value == 0 else constant(())


def compare(solver: Solver, call: Call) -> Known:
    """x > 0 is the same at every scale; compared with anything else x needs scale 1."""
    if len(call.args) != 2 or isinstance(call.args[1], Tensor) or call.args[1] != 0:
        return opaque(solver, call)
    solver.pin(solver.ids(call.args[0]).channel)
    return constant(call.result.shape)


def multiply(solver: Solver, call: Call) -> Known:
    """x * y: the product has the scale of one factor, and the other needs scale 1; a parameter gives a fresh scale."""
    factors = [call.argument(0, "input"), call.argument(1, "other")]
    tensors = [factor for factor in factors if isinstance(factor, Tensor)]
    if len(tensors) == 1 or factors[0] is factors[1]:
        return passes(solver, call) if len(tensors) == 1 else elementwise(solver, call)
    known = [(solver.value(tensor), tensor) for tensor in tensors]
    views = [(value, tensor) for value, tensor in known if isinstance(value, View)]
    if len(views) == 1:
        view, parameter = views[0]
        return _scaled_by_parameter(solver, call, view, parameter, next(t for t in tensors if t is not parameter))
    carrier, gate = (solver.ids(tensor) for tensor in tensors)
    sizes = [compress(ids.scale).numel() if solver.scaled(ids) else 0 for ids in (carrier, gate)]
    if sizes[1] > sizes[0]:
        carrier, gate = gate, carrier
    solver.force(gate)
    shape = call.result.shape
    return Ids(carrier.scale.expand(shape), solver.together(carrier, gate, shape))


def _scaled_by_parameter(solver: Solver, call: Call, view: View, parameter: Tensor, tensor: Tensor) -> Known:
    """x * p with a trained p (layer scale, the gain of a hand-written normalisation): R = s_out / s_in."""
    x, shape = solver.ids(tensor), call.result.shape
    lead = len(shape) - len(view.shape)
    kept = [axis for axis in range(len(shape)) if axis >= lead and view.shape[axis - lead] > 1]
    if shape != tensor.shape or not kept or any(axis not in kept for axis in _varying(x)):
        gain = solver.ids(parameter)  # one number for all channels: it stays, and the scale passes
        solver.force(gain)
        return Ids(x.scale.expand(shape), solver.together(x, gain, shape))
    inward = solver.collapse(x.expand(shape), kept)
    shown = inward.map(lambda numbers: numbers.reshape(view.shape))
    out = solver.scales.fresh(shown.scale.numel()).reshape(view.shape)
    solver.bind(view, Ids(out, shown.channel), shown.inverse().still())
    lead_one = out.reshape((1,) * lead + tuple(view.shape))
    return Ids(lead_one.expand(shape), x.channel.expand(shape))


def _varying(ids: Ids) -> set[int]:
    both = (compress(ids.scale), compress(ids.channel))
    return {axis for numbers in both for axis, size in enumerate(numbers.shape) if size > 1}


def divide(solver: Solver, call: Call) -> Known:
    """x / y: y needs scale 1."""
    top, bottom = call.argument(0, "input"), call.argument(1, "other")
    if not isinstance(bottom, Tensor):
        return passes(solver, call) if not call.kwargs.get("rounding_mode") else elementwise(solver, call)
    held, by = solver.ids(top), solver.ids(bottom)
    solver.force(by)
    return Ids(held.scale.expand(call.result.shape), solver.together(held, by, call.result.shape))


def reduce(solver: Solver, call: Call) -> Known:
    """Mean, sum, deviation, largest, smallest: one scale for all reduced entries; the other axes pass."""
    x = call.argument(0, "input")
    axes = call.argument(1, "dim", call.kwargs.get("axis"))
    if isinstance(axes, bool):  # x.std(unbiased)
        return opaque(solver, call)
    if isinstance(axes, Tensor):  # max(x, y)
        return add(solver, call)
    reduced = _axes(axes, x.dim())
    kept = [axis for axis in range(x.dim()) if axis not in reduced]
    ids = solver.ids(x)
    scale = solver.collapse(ids.still(), kept).scale
    small = compress(ids.channel)
    shown = [x.shape[axis] if axis in kept else 1 for axis in range(x.dim())]
    if any(small.shape[axis] > 1 for axis in reduced):
        solver.hold(ids.channel, shown, x.shape)
        small = torch.zeros((1,) * x.dim(), dtype=torch.int64)
    first = next(leaf for leaf in tree_leaves(call.result) if isinstance(leaf, Tensor))
    out = Ids(scale, small).expand(shown).map(lambda numbers: numbers.reshape(first.shape))
    return [out, *(constant(leaf.shape) for leaf in tree_leaves(call.result)[1:])]


def _axes(axes: Any, dimensions: int) -> list[int]:
    if axes is None:
        return list(range(dimensions))
    return [axis % dimensions for axis in (axes if isinstance(axes, tuple | list | torch.Size) else [axes])]


def softmax(solver: Solver, call: Call) -> Known:
    """Softmax and vector norms along an axis: scale 1 in and out; channels may move along the axis or beside it."""
    x = call.argument(0, "input")
    axis = call.argument(2 if call.name == "normalize" else 1, "dim", 1 if call.name == "normalize" else None)
    if not isinstance(axis, int) or isinstance(solver.value(x), View):
        return opaque(solver, call)
    ids = solver.ids(x)
    solver.force(ids)
    beside = [1 if a == axis % x.dim() else size for a, size in enumerate(x.shape)]
    if compress(ids.channel).shape[axis] > 1:
        solver.hold(ids.channel, beside, x.shape)
    return Ids(torch.zeros_like(ids.scale), ids.channel)


def pool(solver: Solver, call: Call) -> Known:
    """Pooling and resizing over the last axes: each channel has one scale there, which passes."""
    x = call.argument(0, "input")
    spatial = {"1": 1, "2": 2, "3": 3}.get(call.name[-2]) or x.dim() - 2
    ids = solver.collapse(solver.ids(x), range(x.dim() - spatial))
    return [ids.expand(leaf.shape) for leaf in tree_leaves(call.result)[:1]] + [
        constant(leaf.shape) for leaf in tree_leaves(call.result)[1:]
    ]


def matmul(solver: Solver, call: Call) -> Known:
    """x @ y of two tensors of the graph, [..., i, j] @ [..., j, k]."""
    a, b = call.args[:2] if call.name != "rmatmul" else call.args[1::-1]
    if min(a.dim(), b.dim()) < 2:
        return opaque(solver, call)
    return contract(solver, solver.ids(a), solver.ids(b), call.result.shape)


def contract(solver: Solver, a: Ids, b: Ids, shape: torch.Size) -> Ids:
    """Return the ids of a matrix product: s_b = 1/s_a along the summed axis if both are scaled (queries and keys)."""
    batch = tuple(shape[:-2])
    a, b = (ids.expand((*batch, *ids.scale.shape[-2:])) for ids in (a, b))
    lead = range(len(batch))
    if solver.scaled(a) and solver.scaled(b):
        left, right = solver.collapse(a.still(), (*lead, -1)), solver.collapse(b.still(), (*lead, -2))
        solver.equate(left, right.inverse().map(lambda numbers: numbers.transpose(-1, -2)))
        scale = torch.zeros((1,) * len(shape), dtype=torch.int64)
    elif solver.scaled(b):
        scale = solver.collapse(b.still(), (*lead, -1)).scale
    else:
        scale = solver.collapse(a.still(), (*lead, -2)).scale
        solver.force(b)
    return Ids(scale.expand(shape), _contract_channels(solver, a, b, shape))


def _contract_channels(solver: Solver, a: Ids, b: Ids, shape: torch.Size) -> Tensor:
    fixed = torch.zeros((1,) * len(shape), dtype=torch.int64).expand(shape)
    batch = shape[:-2]
    if compress(a.channel).shape[-1] > 1 or compress(b.channel).shape[-2] > 1:
        lead = range(len(batch))
        left = solver.collapse_channels(a.channel, (*lead, -1))
        right = solver.collapse_channels(b.channel, (*lead, -2)).transpose(-1, -2)
        solver.equate_channels(left, right)
        solver.hold(left, (*batch, 1, 1), left.shape)
        return fixed
    if solver.moves(a.channel) and solver.moves(b.channel):
        solver.pin(a.channel)
        solver.pin(b.channel)
        return fixed
    carried = a.channel[..., :, :1] if solver.moves(a.channel) else b.channel[..., :1, :]
    solver.hold(carried, (*batch, 1, 1), carried.shape)
    return carried.expand(shape)


def movement(solver: Solver, call: Call) -> Known:
    """Functions that only move elements: run them on the ids."""
    if isinstance(call.argument(0, "input"), Tensor) and isinstance(solver.value(call.args[0]), View):
        return _moved_view(solver, call)
    floating = [tensor for tensor in tensors_of(call) if tensor.is_floating_point()]
    chosen_by_data = any(id(tensor) in solver.values and not tensor.is_floating_point() for tensor in tensors_of(call))
    if chosen_by_data or not all(leaf.is_floating_point() for leaf in tree_leaves(call.result)):
        return opaque(solver, call)
    held = {id(tensor): solver.ids(tensor) for tensor in floating}
    scales = _run_on(call, {key: ids.scale for key, ids in held.items()})
    channels = _run_on(call, {key: ids.channel for key, ids in held.items()})
    for ids in held.values():
        _count(solver, compress(ids.channel), channels)
    return [Ids(scale, channel) for scale, channel in zip(scales, channels, strict=True)]


def select_index(solver: Solver, call: Call) -> Known:
    """Indexing changes nothing along an axis with one scale and one channel, such as that of packed rows."""
    x, axis = call.argument(0, "input"), call.argument(1, "dim")
    ids = solver.values.get(id(x))
    if not isinstance(ids, Ids) or axis % x.dim() in _varying(ids):
        return movement(solver, call)
    return ids.map(lambda numbers: numbers.narrow(axis, 0, 1)).expand(call.result.shape)


def _moved_view(solver: Solver, call: Call) -> Known:
    view = solver.value(call.args[0])
    if not isinstance(view, View) or (len(tensors_of(call)) > 1 and call.name != "__getitem__"):
        return opaque(solver, call) if call.name == "__setitem__" else movement_of_ids(solver, call)
    if call.name in ("pad", "__setitem__"):
        return opaque(solver, call)
    moved = _run_on(call, {id(call.args[0]): view.positions()})
    return [View(view.name, elements.shape, elements) for elements in moved]


def movement_of_ids(solver: Solver, call: Call) -> Known:
    """Move a parameter with other tensors, such as a class token, as an ordinary tensor with free scales."""
    for tensor in tensors_of(call):
        if isinstance(solver.value(tensor), View):
            solver.values[id(tensor)] = solver.ids(tensor)
    return movement(solver, call)


def _run_on(call: Call, numbers: dict[int, Tensor]) -> list[Tensor]:
    """Run the call with tensors replaced by numbers; float64 holds them exactly, and all functions take it."""

    def replaced(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or id(leaf) not in numbers:
            return leaf
        # `view` needs contiguous memory, which broadcast numbers lack.
        return numbers[id(leaf)].double().contiguous() if call.name == "view" else numbers[id(leaf)].double()

    args, kwargs = tree_map(replaced, call.args), tree_map(replaced, dict(call.kwargs))
    if call.name == "pad" and call.argument(2, "mode", "constant") == "constant":
        zero = not call.argument(3, "value")
        args, kwargs = args[:1], {"pad": call.argument(1, "pad"), "mode": "constant", "value": ANY if zero else 0}
    if call.name == "__setitem__":
        target, index, value = args[0].clone(), args[1], args[2]
        target[index] = value if isinstance(value, Tensor) else (0 if value else ANY)
        return [_restored(target)]
    return [_restored(leaf) for leaf in tree_leaves(call.function(*args, **kwargs))]


def _restored(numbers: Tensor) -> Tensor:
    return compress(numbers.long()).expand(numbers.shape)


def _count(solver: Solver, before: Tensor, after: list[Tensor]) -> None:
    """Keep channels of one tensor apart if they occur unequally often in the results, as after slices and chunks."""
    names = torch.tensor(names_in(before), dtype=torch.int64)
    for result in after:
        occurrences = dict(
            zip(*(part.tolist() for part in torch.unique(compress(result), return_counts=True)), strict=True)
        )
        counts = torch.tensor([occurrences.get(name, 0) for name in names.tolist()])
        if len(counts) and bool((counts != counts[0]).any()):
            solver.channels.tag(names, counts)


COPIES = frozenset(
    {"contiguous", "clone", "detach", "to", "float", "double", "requires_grad", "data", "type_as", "alias"}
)

_HOMOGENEOUS = [*COPIES, "relu", "leaky_relu", "abs", "neg", "identity", "positive"]
_POINTWISE = [
    "gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "relu6", "hardtanh", "elu", "selu", "celu", "mish",
    "softplus", "softsign", "logsigmoid", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "square", "pow", "sin",
    "cos", "erf", "reciprocal", "rdiv", "rpow", "rsub", "hardshrink", "softshrink", "tanhshrink", "sign", "round",
    "floor", "ceil", "nan_to_num",
]  # fmt: skip
_REDUCTIONS = ["mean", "sum", "amax", "amin", "max", "min", "std"]
_POOLS = [
    "interpolate",
    *(f"{kind}_pool{n}d" for n in (1, 2, 3) for kind in ("max", "avg", "adaptive_avg", "adaptive_max")),
]
_MOVEMENT = [
    "reshape", "view", "flatten", "unflatten", "permute", "transpose", "t", "T", "mT", "movedim", "squeeze",
    "unsqueeze", "expand", "broadcast_to", "repeat", "tile", "repeat_interleave", "cat", "stack", "hstack", "vstack",
    "chunk", "split", "tensor_split", "split_with_sizes", "unbind", "__getitem__", "__setitem__", "select", "narrow",
    "index_select", "roll", "flip", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle",
    "pad", "unfold",
]  # fmt: skip
_NOISE = [
    "bernoulli", "uniform", "normal", "fill", "random", "exponential", "rand_like", "randn_like", "ones_like",
    "empty_like", "full_like", "new_empty", "new_ones", "new_full", "new_tensor",
]  # fmt: skip

GATES = {"lstm": (0, 0, 1, 0), "gru": (0, 0, 1), "rnn_tanh": (1,), "rnn_relu": (1,)}
"""1 for a gate with the scale of its hidden channel, 0 for one behind a sigmoid, which has scale 1."""

PACKING = ("_pack_padded_sequence", "_pad_packed_sequence")

SIGNED = frozenset({
    *COPIES, *_MOVEMENT, *PACKING, "linear", "addmm", "matmul", "add", "sub", "mul", "div", "mean", "sum", "neg",
    "dropout", *GATES, *(f"{name}_cell" for name in GATES),
})  # fmt: skip
"""Functions whose rules also hold for scales of -1: f(-x) = -f(x), or the rule sets scale 1 itself."""

RULES: dict[str, Rule] = {
    **dict.fromkeys(_HOMOGENEOUS, passes),
    **dict.fromkeys(_POINTWISE, elementwise),
    **dict.fromkeys(_REDUCTIONS, reduce),
    **dict.fromkeys(_POOLS, pool),
    **dict.fromkeys(_MOVEMENT, movement),
    **dict.fromkeys(_NOISE, fresh_constant),
    **dict.fromkeys(["zeros", "zeros_like", "new_zeros", "zero"], zeros),
    **dict.fromkeys(["add", "sub", "maximum", "minimum", "fmax", "fmin"], add),
    **dict.fromkeys(["dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"], dropout),
    **dict.fromkeys(["clamp", "clamp_min", "clamp_max", "threshold"], threshold),
    **dict.fromkeys(["gt", "ge", "lt", "le", "eq", "ne"], compare),
    **dict.fromkeys(["where", "masked_fill"], where),
    **dict.fromkeys(["softmax", "log_softmax", "softmin", "normalize"], softmax),
    **dict.fromkeys(["matmul", "rmatmul"], matmul),
    "index_select": select_index,
    "mul": multiply,
    "div": divide,
}
