"""What each layer with weights does to scales and channels: linear, convolution, normalisation, embedding, attention.

The scale of a weight is R = s_out / s_in (`practical.md`, Eq. 7, 14 and 15), of a bias s_out. Differs from the paper,
which has rules for chains of linear and convolution layers only.
"""

import re
from math import prod

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from moretta.protocols.pbpfl.graph import Call
from moretta.protocols.pbpfl.rules import GATES, PACKING, RULES, Known, Rule, contract, opaque
from moretta.protocols.pbpfl.solver import ANY, Ids, Solver, View, compress, constant


def _views(solver: Solver, *tensors: Tensor | None) -> list[View | None] | None:
    """Return the parameters' views, None for absent ones; None for all if one is computed from others."""
    views = [None if tensor is None else solver.value(tensor) for tensor in tensors]
    return None if any(isinstance(view, Ids) for view in views) else views  # type: ignore[return-value]


def linear(solver: Solver, call: Call) -> Known:
    """y_o = sum_i W_oi x_i + b_o: R = s_out / s_in, bias s_out; a fresh scale out."""
    x, weight, bias = call.argument(0, "input"), call.argument(1, "weight"), call.argument(2, "bias")
    views = _views(solver, weight, bias)
    if views is None or weight.dim() != 2:
        return opaque(solver, call)
    inward = solver.collapse(solver.ids(x), (-1,)).map(lambda numbers: numbers.reshape(-1))
    out = solver.fresh(weight.shape[0])
    _bind(solver, views[0], out.along(0, 2), inward.inverse().along(1, 2))
    _bind(solver, views[1], out)
    return out.along(-1, call.result.dim()).expand(call.result.shape)


def matmul_by_parameter(solver: Solver, call: Call) -> Known:
    """x @ W with a parameter W[in, out] is a linear layer; otherwise both are tensors of the graph."""
    a, b = call.args[:2]
    view = solver.value(b)
    if call.name != "matmul" or not isinstance(view, View) or b.dim() != 2 or isinstance(solver.value(a), View):
        return _PRODUCT(solver, call)
    return _by_columns(solver, call, a, view, None)


def addmm(solver: Solver, call: Call) -> Known:
    """b + x @ W with parameters W[in, out] and b[out], as in the Conv1D of transformers."""
    if len(call.args) != 3 or call.kwargs or call.args[0].dim() != 1:
        return opaque(solver, call)
    bias, x, weight = call.args
    views = _views(solver, weight, bias)
    if views is None or views[0] is None or isinstance(solver.value(x), View):
        return opaque(solver, call)
    return _by_columns(solver, call, x, views[0], views[1])


def _by_columns(solver: Solver, call: Call, x: Tensor, weight: View, bias: View | None) -> Known:
    inward = solver.collapse(solver.ids(x), (-1,)).map(lambda numbers: numbers.reshape(-1))
    out = solver.fresh(weight.shape[1])
    solver.bind(weight, out.along(1, 2), inward.inverse().along(0, 2))
    _bind(solver, bias, out)
    return out.along(-1, call.result.dim()).expand(call.result.shape)


def weight_norm(solver: Solver, call: Call) -> Known:
    """W = g v / |v| by row: g has the scales of W's rows, and so has v; scales of inputs are 1.

    In the head the server sends W in place of v (`moretta.protocols.pbpfl.head`), with scales like any weight.
    """
    v, g, dim = (call.argument(position, name) for position, name in enumerate(["v", "g", "dim"]))
    views = _views(solver, v, g)
    if views is None or views[0] is None or views[0].elements is not None:
        return opaque(solver, call)
    if views[0].name == solver.head:
        _bind(solver, views[1], constant(g.shape))
        return views[0]
    if dim not in (0, -1):
        return opaque(solver, call)
    rows, anywhere = solver.fresh(v.shape[0]), Ids(*(torch.full((1,) * v.dim(), fit) for fit in (0, ANY)))
    solver.bind(views[0], anywhere if dim else rows.along(0, v.dim()), anywhere)
    _bind(solver, views[1], constant(g.shape) if dim else rows.along(0, g.dim()))
    solver.stored[views[0].name].normed = True
    return views[0]


def einsum(solver: Solver, call: Call) -> Known:
    """Two factors, each axis kept or summed over: a linear layer, or a product of two tensors."""
    letters = re.fullmatch(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]*)", str(call.args[0]).replace(" ", ""))
    if letters is None or len(call.args) != 3:
        return opaque(solver, call)
    (left, right, out), (a, b) = letters.groups(), call.args[1:]
    if isinstance(solver.value(a), View):
        left, right, a, b = right, left, b, a
    twice = all((left + right + out).count(letter) >= 2 for letter in left + right)
    if not twice or isinstance(solver.value(a), View) or any(len({*axes}) < len(axes) for axes in (left, right, out)):
        return opaque(solver, call)
    shared = [letter for letter in out if letter in left and letter in right]
    summed = [letter for letter in left if letter not in out]
    rows, columns = ([x for x in axes if x in out and x not in shared] for axes in (left, right))
    sizes = dict(zip(left + right, (*a.shape, *b.shape), strict=True))

    def laid(ids: Ids, order: list[str], axes: str | list[str]) -> Ids:
        """Return ids with their axes in another order, and size 1 for absent ones."""
        shape = [sizes[letter] for letter in order] + [1] * (len(axes) - len(order))
        places = [*order, *(letter for letter in axes if letter not in order)]
        return ids.map(lambda numbers: numbers.reshape(shape).permute([places.index(letter) for letter in axes]))

    def matrices(ids: Ids, axes: str, *sides: list[str]) -> Ids:
        shape = [sizes[letter] for letter in shared] + [prod(sizes[letter] for letter in side) for side in sides]
        return laid(ids, [*axes], shared + sides[0] + sides[1]).map(lambda numbers: numbers.reshape(shape))

    x, view = matrices(solver.ids(a), left, rows, summed), solver.value(b)
    if isinstance(view, Ids):
        y = matrices(view, right, summed, columns)
        product = contract(solver, x, y, torch.Size((*x.scale.shape[:-1], y.scale.shape[-1])))
        return laid(product, shared + rows + columns, out)
    inward = solver.collapse(x, (*range(len(shared)), -1)).inverse()
    fresh = solver.fresh(prod(sizes[letter] for letter in shared + columns))
    if shared or len(summed) != 1:  # channels move along one axis
        solver.pin(inward.channel)
    if shared or len(columns) != 1:
        solver.pin(fresh.channel)
    solver.bind(view, laid(fresh, shared + columns, right), laid(inward, shared + summed, right))
    return laid(fresh, shared + columns, out).expand(call.result.shape)


def _gated(solver: Solver, kind: str, views: list[View | None], inward: Ids, hidden: int) -> Ids:
    """State the scales of one recurrent layer in one direction, and return those of its hidden channels.

    A channel may have a sign s = 1 or -1, as tanh(s x) = s tanh(x):

        LSTM    g -> s g,  c = f c + i g -> s c,  h = o tanh(c) -> s h
        GRU     n = tanh(a + r b) -> s n,  h = (1 - z) n + z h -> s h

    The first state is zeros. ReLU takes any positive scale instead of s.
    """
    own = solver.fresh(hidden)
    if kind != "rnn_relu":
        own = Ids(solver.scales.signs(hidden), own.channel)
    out = Ids(torch.cat([own.scale * carries for carries in GATES[kind]]), own.channel.repeat(len(GATES[kind])))
    _bind(solver, views[0], out.along(0, 2), inward.inverse().along(1, 2))
    _bind(solver, views[1], out.along(0, 2), own.inverse().along(1, 2))
    for bias in views[2:]:
        _bind(solver, bias, out)
    return own


def recurrent(solver: Solver, call: Call) -> Known:
    """nn.LSTM, nn.GRU, nn.RNN: hidden channels move, and have signs or scales, in all gates at once (`_gated`)."""
    if len(call.args) != 9:
        return opaque(solver, call)
    packed = isinstance(call.args[3], list | tuple)  # a packed sequence has the number of rows at each step too
    x, state, weights, biased, layers, dropout, _, both_ways, *_ = [call.args[0], *call.args[1 + packed :]]
    if x.dim() != 3 - packed or not isinstance(weights, list | tuple):
        return opaque(solver, call)
    each, ways = (4 if biased else 2), 1 + both_ways
    views = _views(solver, *weights)
    begun = [solver.ids(leaf) for leaf in tree_leaves(state)]
    if (
        views is None
        or len(views) != each * layers * ways
        or any(bool((state_ids.scale != ANY).any()) for state_ids in begun)
    ):
        return opaque(solver, call)
    inward = solver.collapse(solver.ids(x), (-1,)).map(lambda numbers: numbers.reshape(-1))
    hidden = list[Ids]()
    for layer in range(layers):
        firsts = [each * (layer * ways + way) for way in range(ways)]
        size = weights[1].shape[1]
        hidden += [_gated(solver, call.name, views[first : first + each], inward, size) for first in firsts]
        inward = _joined(hidden[-ways:])
        if dropout and layer + 1 < layers:  # random numbers drop the same channels as without a key
            solver.pin(inward.channel)
    last = Ids(
        *(torch.stack(numbers)[:, None] for numbers in zip(*((h.scale, h.channel) for h in hidden), strict=True))
    )
    output, *states = call.result
    return [inward.along(-1, x.dim()).expand(output.shape), *(last.expand(leaf.shape) for leaf in states)]


def packing(solver: Solver, call: Call) -> Known:
    """Packing sequences of different lengths, and padding them with zeros: each channel has one scale, which passes."""
    if call.name == "_pad_packed_sequence" and call.argument(3, "padding_value"):
        return opaque(solver, call)
    rows, lengths = call.result
    ids = solver.collapse(solver.ids(call.args[0]), (-1,)).map(lambda numbers: numbers.reshape(-1))
    return [ids.along(-1, rows.dim()).expand(rows.shape), constant(lengths.shape)]


def cell(solver: Solver, call: Call) -> Known:
    """nn.LSTMCell, nn.GRUCell, nn.RNNCell: a step of `recurrent`, whose state has equal scales before and after."""
    x, state, *weights = call.args
    views = _views(solver, *weights)
    if views is None or len(weights) != 4 or x.dim() != 2:
        return opaque(solver, call)
    inward, *before = (
        solver.collapse(solver.ids(leaf), (-1,)).map(lambda numbers: numbers.reshape(-1))
        for leaf in (x, *tree_leaves(state))
    )
    own = _gated(solver, call.name.removesuffix("_cell"), views, inward, weights[1].shape[1])
    for ids in before:
        solver.equate(ids, own)
    return [own.along(-1, 2).expand(leaf.shape) for leaf in tree_leaves(call.result)]


def _bind(solver: Solver, view: View | None, out: Ids, into: Ids | None = None) -> None:
    if view is not None:
        solver.bind(view, out, into)


def convolution(solver: Solver, call: Call) -> Known:
    """Convolutions of one to three dimensions, W[out, in / groups, ...]: R = s_out / s_in, bias s_out."""
    weight, groups = call.argument(1, "weight"), call.argument(6, "groups", 1)
    views = _views(solver, weight, call.argument(2, "bias"))
    if views is None:
        return opaque(solver, call)
    inward = _channel_ids(solver, call, weight.dim() - 2)
    outputs, dimensions = weight.shape[0], weight.dim()
    if groups == 1:
        out = solver.fresh(outputs)
        into = inward.along(1, dimensions)
    elif weight.shape[1] == 1 and outputs == groups:  # depthwise: each output has one input channel, and moves with it
        out = Ids(solver.scales.fresh(outputs), inward.channel)
        into = inward.still().along(0, dimensions)
    else:
        out, into = _grouped(solver, inward, outputs, groups, weight.shape)
    _bind(solver, views[0], out.along(0, dimensions), into.inverse())
    _bind(solver, views[1], out)
    return _spread(out, call.result, dimensions - 2)


def _grouped(solver: Solver, inward: Ids, outputs: int, groups: int, shape: torch.Size) -> tuple[Ids, Ids]:
    """Return the ids of outputs and inputs: channels of inputs stay, those of outputs move within their group."""
    solver.pin(inward.channel)
    group = torch.arange(outputs) // (outputs // groups)
    columns = group[:, None] * shape[1] + torch.arange(shape[1])
    into = inward.still().map(lambda numbers: numbers[columns].reshape(outputs, shape[1], *[1] * (len(shape) - 2)))
    return solver.fresh(outputs, groups), into


def transposed(solver: Solver, call: Call) -> Known:
    """Transposed convolutions, W[in, out / groups, ...]."""
    weight, groups = call.argument(1, "weight"), call.argument(6, "groups", 1)
    views = _views(solver, weight, call.argument(2, "bias"))
    if views is None or (views[0] is not None and solver.stored[views[0].name].normed):  # its rows are inputs
        return opaque(solver, call)
    inward = _channel_ids(solver, call, weight.dim() - 2)
    dimensions, rows = weight.dim(), torch.arange(weight.shape[0])
    if groups == 1:
        out = solver.fresh(weight.shape[1])
        term = out.along(1, dimensions)
    else:
        solver.pin(inward.channel)
        out = solver.fresh(weight.shape[1] * groups)
        solver.pin(out.channel)
        position = (rows // (weight.shape[0] // groups))[:, None] * weight.shape[1] + torch.arange(weight.shape[1])
        term = out.still().map(lambda numbers: numbers[position].reshape(*position.shape, *[1] * (dimensions - 2)))
    _bind(solver, views[0], term, inward.inverse().along(0, dimensions))
    _bind(solver, views[1], out)
    return _spread(out, call.result, dimensions - 2)


def _channel_ids(solver: Solver, call: Call, spatial: int) -> Ids:
    """Return the ids of the input along its channels, int64[channels]."""
    x = call.argument(0, "input")
    return solver.collapse(solver.ids(x), (x.dim() - spatial - 1,)).map(lambda numbers: numbers.reshape(-1))


def _spread(out: Ids, result: Tensor, spatial: int) -> Ids:
    return out.along(result.dim() - spatial - 1, result.dim()).expand(result.shape)


def batch_norm(solver: Solver, call: Call) -> Known:
    """Scale 1 in, so that eps is exact; weight and bias give a fresh scale out, which running statistics do not see."""
    x, mean, variance, weight, bias = (
        call.argument(i, name) for i, name in enumerate(["input", "running_mean", "running_var", "weight", "bias"])
    )
    if call.name == "instance_norm" and x.dim() < 3:
        return opaque(solver, call)
    views = _views(solver, weight, bias)
    if views is None:
        return opaque(solver, call)
    ids = solver.ids(x)
    solver.force(ids)
    channel = solver.collapse_channels(ids.channel, (1,)).reshape(-1)
    for buffer in (mean, variance):
        name = None if buffer is None else solver.buffers.get(id(buffer))
        if name is not None:
            solver.bind(View(name, buffer.shape), Ids(torch.zeros_like(channel), channel))
        elif buffer is not None:
            solver.pin(channel)
    out = _affine(solver, views, channel)
    return out.along(1, x.dim()).expand(x.shape)


def _affine(solver: Solver, views: list[View | None], channel: Tensor) -> Ids:
    """Return the ids after x^ * weight + bias: a fresh scale if there is a weight, else 1; the same channels."""
    fresh = views[0] is not None
    scale = solver.scales.fresh(channel.numel()).reshape(channel.shape) if fresh else torch.zeros_like(channel)
    out = Ids(scale, channel)
    for view in views:
        _bind(solver, view, out)
    return out


def group_norm(solver: Solver, call: Call) -> Known:
    """As batch normalisation; channels move only within their group."""
    x, groups = call.argument(0, "input"), call.argument(1, "num_groups")
    views = _views(solver, call.argument(2, "weight"), call.argument(3, "bias"))
    if views is None:
        return opaque(solver, call)
    ids = solver.ids(x)
    solver.force(ids)
    channel = solver.collapse_channels(ids.channel, (1,)).reshape(-1)
    if groups > 1:
        solver.channels.tag(channel, torch.arange(channel.numel()) // (channel.numel() // groups))
    return _affine(solver, views, channel).along(1, x.dim()).expand(x.shape)


def layer_norm(solver: Solver, call: Call) -> Known:
    """Layer and RMS normalisation over the last axes: scale 1 in; weight and bias give a fresh scale out."""
    x, shape, weight = call.argument(0, "input"), call.argument(1, "normalized_shape"), call.argument(2, "weight")
    views = _views(solver, weight, call.argument(3, "bias") if call.name == "layer_norm" else None)
    if views is None:
        return opaque(solver, call)
    ids = solver.ids(x)
    solver.force(ids)
    axes = [x.dim() - len(shape) + axis for axis in range(len(shape))]
    channel = solver.collapse_channels(ids.channel, axes)
    shown = [x.shape[axis] for axis in axes]
    out = _affine(solver, views, channel.reshape(shown))
    return out.map(lambda numbers: numbers.reshape([1] * (x.dim() - len(shape)) + shown).expand(x.shape))


def embedding(solver: Solver, call: Call) -> Known:
    """Rows of a table: each column has a fresh scale, the rows stay in their places."""
    index, weight = call.argument(0, "input"), call.argument(1, "weight")
    view = solver.value(weight)
    if not isinstance(view, View) or call.argument(3, "max_norm") is not None:
        return opaque(solver, call)
    out = solver.fresh(weight.shape[1])
    solver.bind(view, None, out.along(1, 2))
    return out.along(-1, index.dim() + 1).expand(call.result.shape)


def prelu(solver: Solver, call: Call) -> Known:
    """Slopes have no scale; one slope per channel moves with its channel."""
    x, weight = call.argument(0, "input"), call.argument(1, "weight")
    view = solver.value(weight)
    if not isinstance(view, View):
        return opaque(solver, call)
    ids = solver.ids(x)
    if weight.numel() == 1:
        solver.bind(view, None)
        return ids
    channel = solver.collapse_channels(ids.channel, (1,)).reshape(-1)
    solver.bind(view, Ids(torch.zeros_like(channel), channel))
    return ids


def attention(solver: Solver, call: Call) -> Known:
    """scaled_dot_product_attention: s_k = 1 / s_q, values pass."""
    q, k, v = (call.argument(i, name) for i, name in enumerate(["query", "key", "value"]))
    mask = call.argument(3, "attn_mask")
    shared = 1  # heads of queries that read one head of keys and values
    if call.argument(7, "enable_gqa", False) and q.shape[-3] % k.shape[-3] == 0:
        shared = q.shape[-3] // k.shape[-3]
    if q.shape[:-2] != (*k.shape[:-3], k.shape[-3] * shared) or k.shape[:-2] != v.shape[:-2]:
        return opaque(solver, call)
    if isinstance(mask, Tensor):
        solver.force(solver.ids(mask))
        solver.pin(solver.ids(mask).channel)
    keys, values = (
        solver.ids(tensor).map(lambda numbers: numbers.repeat_interleave(shared, -3) if shared > 1 else numbers)
        for tensor in (k, v)
    )
    keys = keys.map(lambda numbers: numbers.transpose(-1, -2))
    logits = contract(solver, solver.ids(q), keys, torch.Size((*q.shape[:-1], k.shape[-2])))
    solver.force(logits)
    weights = constant(logits.scale.shape)
    solver.pin(logits.channel)
    return contract(solver, weights, values, call.result.shape)


_ATTENTION = [
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v",
    "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights",
    "attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight",
]  # fmt: skip


def multi_head(solver: Solver, call: Call) -> Known:
    """nn.MultiheadAttention: queries s_q, keys 1 / s_q, values free, each channel in its head; out a fresh scale."""
    arguments = {name: call.argument(position, name) for position, name in enumerate(_ATTENTION)}
    views = {name: solver.value(arguments[name]) for name in _ATTENTION if isinstance(arguments[name], Tensor)}
    weights = [name for name in views if name.endswith(("weight", "bias")) or name.startswith("bias")]
    if any(isinstance(views[name], Ids) for name in weights):
        return opaque(solver, call)
    for mask in ("key_padding_mask", "attn_mask"):
        if mask in views:
            solver.force(solver.ids(arguments[mask]))
            solver.pin(solver.ids(arguments[mask]).channel)
    heads, width = arguments["num_heads"], arguments["out_proj_weight"].shape[0]
    pairs, values = solver.fresh(width, heads), solver.fresh(width, heads)
    parts = {"query": pairs, "key": pairs.inverse(), "value": values}
    inward = {
        name: solver.collapse(solver.ids(arguments[name]), (-1,)).map(lambda numbers: numbers.reshape(-1)).inverse()
        for name in parts
    }
    if "in_proj_weight" in views:
        rows = _joined([out.along(0, 2) for out in parts.values()])
        columns = _joined([inward[name].along(1, 2).expand((width, width)) for name in parts])
        solver.bind(_view(views["in_proj_weight"]), rows, columns.map(compress))
    else:
        for name, out in parts.items():
            solver.bind(_view(views[f"{name[0]}_proj_weight"]), out.along(0, 2), inward[name].along(1, 2))
    if "in_proj_bias" in views:
        solver.bind(_view(views["in_proj_bias"]), _joined(list(parts.values())))
    for name, out in {"bias_k": parts["key"], "bias_v": values}.items():
        if name in views:
            solver.bind(_view(views[name]), out.along(2, 3))
    out = solver.fresh(width)
    solver.bind(_view(views["out_proj_weight"]), out.along(0, 2), values.inverse().along(1, 2))
    if "out_proj_bias" in views:
        solver.bind(_view(views["out_proj_bias"]), out)
    result, *maps = [leaf for leaf in call.result if isinstance(leaf, Tensor)]
    return [out.along(-1, result.dim()).expand(result.shape), *(constant(leaf.shape) for leaf in maps)]


def _joined(parts: list[Ids]) -> Ids:
    return Ids(torch.cat([part.scale for part in parts]), torch.cat([part.channel for part in parts]))


def _view(value: Ids | View) -> View:
    if isinstance(value, Ids):
        raise TypeError("expected a parameter")
    return value


_PRODUCT: Rule = RULES["matmul"]

LAYERS: dict[str, Rule] = {
    **RULES,
    **dict.fromkeys(["conv1d", "conv2d", "conv3d"], convolution),
    **dict.fromkeys(["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"], transposed),
    **dict.fromkeys(["batch_norm", "instance_norm"], batch_norm),
    **dict.fromkeys(["layer_norm", "rms_norm"], layer_norm),
    **dict.fromkeys(GATES, recurrent),
    **{f"{name}_cell": cell for name in GATES},
    **dict.fromkeys(PACKING, packing),
    "linear": linear,
    "addmm": addmm,
    "matmul": matmul_by_parameter,
    "einsum": einsum,
    "_weight_norm": weight_norm,
    "group_norm": group_norm,
    "embedding": embedding,
    "prelu": prelu,
    "scaled_dot_product_attention": attention,
    "multi_head_attention_forward": multi_head,
}
