"""The head: the last linear layer of a model, which has the additive offset.

Its outputs are W h + b for rows h of features. For most models h is the layer's input, a row per sample. Two other
kinds of models have this form too:

- **A function S after the layer** picks a token, takes a mean or resizes an image. It does the same to each output, so
  S(W x + b) = W S(x) + b and h = S(x). The model returns S(x) if the layer returns its input.
- **Dense outputs.** The layer works at every position, or is a convolution, whose features are patches of its input.
  Every position is a row, z_p = W h_p + b. The squared error adds up over positions, so all identities hold.

A head with weight normalisation has W = g v / |v|. The server sends v^ = R o W + r and g^ = |v^|, so that a silo's W^
is v^. The silo returns the gradient of W. The chain rule gives the server those of v and g (`Head.chained`).

The model may add to the layer's outputs something that does not depend on the layer: y = W h + b + c. Examples are a
residual unit at the end, and the wide part of a wide and deep network. `find` checks all this on random rows, with the
layer's weights and with others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from moretta.contract.messages import Array
from moretta.errors import ParameterError, UnsupportedModel
from moretta.protocols.pbpfl.graph import FAILURES, CastsToDouble, Trace, YesOrNo
from moretta.protocols.pbpfl.selfcheck import FORWARD, close

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CANDIDATES = 3  # the number of last layers to try, the last first
WAY_OUT = "end the model with an nn.Linear whose output, [batch, outputs], is returned as it is"


@dataclass(frozen=True)
class Head:
    """The last linear layer.

    Attributes:
        module: Its path.
        weight, bias: The names of its parameters.
        outputs, inputs: The lengths of a row of outputs, and of h.
        tied: Whether another layer uses its parameters too.
        positions: Rows per sample.
        axis: The weight's axis for outputs.
        channels_last: Whether a sample's outputs are listed position by position.
        residual: Whether something is added to its outputs.
        answers: The traced answers to the model's questions about its inputs (`moretta.protocols.pbpfl.graph.YesOrNo`);
            empty without questions.
        magnitude: The parameter g of weight normalisation, whose v is `weight`.
        kept: The axis of v over which norms are not taken, -1 for the norm of all of it.
    """

    module: str
    weight: str
    bias: str | None
    outputs: int
    inputs: int
    tied: bool
    positions: int = 1
    axis: int = 0
    channels_last: bool = True
    residual: bool = False
    answers: frozenset[tuple[bool, ...]] = frozenset()
    magnitude: str | None = None
    kept: int = 0

    @property
    def above(self) -> tuple[str, ...]:
        """Return the names of its parameters that no other layer uses; empty if it is tied."""
        return () if self.tied else tuple(name for name in (self.weight, self.bias, self.magnitude) if name)

    @property
    def numbers(self) -> int:
        """Return the number of a sample's outputs."""
        return self.outputs * self.positions

    def rows(self, tensor: Tensor) -> Tensor:
        """Return each position of a sample as a row: from [B, ...] to [B positions, width]."""
        if self.channels_last:
            return tensor.reshape(len(tensor) * self.positions, -1)
        positioned = tensor.reshape(len(tensor), -1, self.positions).transpose(1, 2)
        return positioned.reshape(len(tensor) * self.positions, -1)

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the layer's weight as W, [outputs, inputs]."""
        return weight.movedim(self.axis, 0).flatten(1)

    def effective(self, model: nn.Module) -> Tensor:
        """Return the weight that the layer works with, in its own shape."""
        v = model.get_parameter(self.weight)
        return v if self.magnitude is None else torch._weight_norm(v, model.get_parameter(self.magnitude), self.kept)

    def joined(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return tensors by name with W in place of v and g, if the head has weight normalisation."""
        if self.magnitude is None or self.magnitude not in tensors:
            return tensors
        v, g = tensors[self.weight], tensors[self.magnitude]
        weight = torch._weight_norm(torch.as_tensor(v), torch.as_tensor(g), self.kept).detach()
        named = {name: value for name, value in tensors.items() if name != self.magnitude}
        return {**named, self.weight: weight.numpy() if isinstance(v, np.ndarray) else weight}

    def split(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return tensors by name with v = W and g = |W|, which give W again; undoes `joined` except for |v|."""
        if self.magnitude is None or self.weight not in tensors:
            return dict(tensors)
        v = tensors[self.weight]
        norms = torch.norm_except_dim(torch.as_tensor(v), 2, self.kept)
        return {**tensors, self.magnitude: norms.numpy() if isinstance(v, np.ndarray) else norms}

    def chained(self, gradients: dict[str, Array], model: nn.Module) -> dict[str, Array]:
        """Return gradients, float64 by name, with those of v and g in place of the gradient of W."""
        if self.magnitude is None:
            return gradients
        names = self.weight, self.magnitude
        v, g = (model.get_parameter(name).detach().double().requires_grad_() for name in names)
        seed = torch.from_numpy(gradients[self.weight]).to(v.device)
        each = torch.autograd.grad(torch._weight_norm(v, g, self.kept), (v, g), seed)
        return gradients | {name: value.numpy(force=True) for name, value in zip(names, each, strict=True)}

    def like(self, matrix: Any, shape: Sequence[int]) -> Any:
        """Return [outputs, inputs], a tensor or an array, in the weight's shape."""
        wide = list(shape)
        wide.insert(0, wide.pop(self.axis))
        return matrix.reshape(wide).swapaxes(0, self.axis)

    def run(self, model: nn.Module, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return h, [B positions, inputs], and the addend of the outputs, [B positions, outputs], if any."""
        layer, seen = model.get_submodule(self.module), list[Tensor]()

        def instead(x: Tensor, *_: Any, **__: Any) -> Tensor:
            seen.append(features(layer, x))
            if not self.residual:
                return seen[0]
            plain = isinstance(layer, nn.Linear)
            shape = (*x.shape[:-1], self.outputs) if plain else (len(x), self.outputs, *seen[0].shape[2:])
            return seen[0].new_zeros(shape)

        asked = YesOrNo()
        with _replaced(layer, instead), asked if self.answers else nullcontext():
            output = model(*inputs)
        if self.answers and tuple(asked.answers) not in self.answers:
            raise ParameterError(
                "these rows take another branch of the model than those for which its scales were solved (answers "
                f"{asked.answers}); pad rows, or write the branch with torch.where"
            )
        if not self.residual:
            return self.rows(output), None
        own = replace(self, channels_last=isinstance(layer, nn.Linear))  # the layer's own order
        return own.rows(seen[0]), self.rows(output)

    def outputs_of(self, model: nn.Module, h: Tensor, rest: Tensor | None) -> Tensor:
        """Return the outputs, [B positions, outputs]."""
        bias = None if self.bias is None else model.get_parameter(self.bias)
        outputs = F.linear(h, self.matrix(self.effective(model)), bias)
        return outputs if rest is None else outputs + rest


def refuse_dense(head: Head, loss: str, positions: int = 0, *, shown: bool = False) -> None:
    """Raise ParameterError for cross-entropy at several positions, and for masks of another shape than the outputs.

    Args:
        loss: "mse" or "cross-entropy".
        positions: Of target masks; 0 for other targets.
        shown: Whether the server may see the softmax at each position, as in a run of tests and audits that hides
            nothing.
    """
    if max(head.positions, positions) > 1 and loss != "mse" and not (shown and positions):
        raise ParameterError(
            f'loss = "{loss}": the model has outputs at {max(head.positions, positions)} positions, and the server '
            "would see the softmax at each: of an image its segmentation; use mse on one-hot targets, or another "
            "protocol"
        )
    if positions and positions != head.positions:
        raise ParameterError(
            f"masks have {positions} positions, but the model's last linear layer has {head.outputs} outputs at "
            f"{head.positions}; under pbpfl end it in a layer with one output a class at each position, or use "
            "one-hot rows of floats as targets"
        )


@contextmanager
def _replaced(layer: nn.Module, forward: Any) -> Iterator[None]:
    held = vars(layer).get("forward")
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward
        if held is not None:
            layer.forward = held


def features(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the features that a layer's weight multiplies.

    Args:
        layer: The head's module.
        x: Its input.

    Returns:
        For nn.Linear x itself, [..., inputs]. For a convolution the patches of x, [B, inputs, ...], in the order of the
        weight's entries.
    """
    if isinstance(layer, CONVOLUTIONS):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        padded = F.pad(x, layer._reversed_padding_repeated_twice, mode)
        return _patches(padded, layer.kernel_size, layer.stride, layer.dilation)
    if isinstance(layer, TRANSPOSED):  # a convolution of its input with zeros between the entries, kernel reversed
        between = list(zip(x.shape[2:], layer.stride, strict=True))
        wide = x.new_zeros(*x.shape[:2], *((size - 1) * stride + 1 for size, stride in between))
        inside: Any = (..., *(slice(None, None, stride) for _, stride in between))
        wide[inside] = x
        edges = list[int]()
        for axis in reversed(range(len(between))):
            edge = layer.dilation[axis] * (layer.kernel_size[axis] - 1) - int(layer.padding[axis])
            edges += [edge, edge + layer.output_padding[axis]]
        ones = (1,) * len(between)
        return _patches(F.pad(wide, edges), layer.kernel_size, ones, layer.dilation, reverse=True)
    return x


def _patches(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], *, reverse: bool = False
) -> Tensor:
    """Return the windows of each position, [B, channels window, ...]."""
    count = len(kernel)
    for axis, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True)):
        x = x.unfold(2 + axis, (size - 1) * gap + 1, step)[..., ::gap]
    windows = range(2 + count, 2 + 2 * count)
    x = x.flip(list(windows)) if reverse else x
    return x.permute(0, 1, *windows, *range(2, 2 + count)).flatten(1, 1 + count)


def find(model: nn.Module, trace: Trace, inputs: Sequence[Tensor]) -> Head:
    """Return the head of a model in evaluation mode. Raises `moretta.errors.UnsupportedModel` if it has none."""
    if not isinstance(trace.output, Tensor):
        raise UnsupportedModel(f"the model returns a {type(trace.output).__name__} instead of one tensor: {WAY_OUT}")
    if not trace.calls:
        raise UnsupportedModel(f"the model computes nothing: {WAY_OUT}")
    last = next((call for call in reversed(trace.calls) if call.result is trace.output), trace.calls[-1])
    kinds = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
    layers = dict.fromkeys(
        call.module for call in reversed(trace.calls) if isinstance(model.get_submodule(call.module), kinds)
    )
    if trace.output.dim() == 2:
        for path in list(layers)[:CANDIDATES]:
            for head in _heads(model, trace, path):
                if all(_holds(model, head, inputs, training) for training in (False, True)):
                    return head
        if layers:
            path = next(iter(layers))
            weight: Any = model.get_submodule(path).weight  # under weight normalisation a new tensor, without uses
            uses = sum(any(leaf is weight for leaf in tree_leaves((call.args, call.kwargs))) for call in trace.calls)
            if uses > 1:
                raise UnsupportedModel(
                    f"the last layer {path} works {uses} times, and PBPFL's offset lies on one use of it alone: give "
                    "the outputs an nn.Linear of their own, which is called once"
                )
    raise UnsupportedModel(
        f"the model's output comes from {last.place} with shape {tuple(trace.output.shape)}: {WAY_OUT}"
    )


def _heads(model: nn.Module, trace: Trace, path: str) -> Iterator[Head]:
    """Yield the ways in which a layer could be the head, likeliest first."""
    layer: Any = model.get_submodule(path)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    plain = isinstance(layer, nn.Linear)
    weight, numbers = layer.weight, trace.output.shape[1]
    axis = int(isinstance(layer, TRANSPOSED))
    outputs = weight.shape[axis]
    if numbers % outputs or (not plain and layer.groups != 1):
        return
    normed: dict[str, Any] = {}
    made = {id(call.result): call for call in trace.calls if call.name == "_weight_norm"}
    for call in trace.calls:
        if call.module == path and (norm := made.get(id(call.argument(1, "weight")))) is not None:
            v, g, kept = (norm.argument(place, name) for place, name in enumerate(("v", "g", "dim")))
            if id(v) in names and id(g) in names:
                weight, normed = v, {"magnitude": names[id(g)], "kept": kept}
    if id(weight) not in names:
        raise UnsupportedModel(
            f"the weight of the last layer {path} is computed from others, as spectral_norm and prune do, and PBPFL "
            "adds its offset to the weight itself; remove that from this layer "
            "(torch.nn.utils.parametrize.remove_parametrizations, or remove_spectral_norm)"
        )
    users = [call for call in trace.calls if any(leaf is weight for leaf in tree_leaves((call.args, call.kwargs)))]
    tied = len(users) > 1 or not (normed or names[id(weight)] == f"{path}.weight".lstrip("."))
    if tied and normed:
        return
    bias = None if layer.bias is None else names[id(layer.bias)]
    inputs = weight.numel() // outputs
    head = Head(path, names[id(weight)], bias, outputs, inputs, tied, numbers // outputs, axis, plain, **normed)
    for residual in (False,) if tied else (False, True):
        for last in (plain, not plain) if head.positions > 1 else (plain,):
            yield replace(head, residual=residual, channels_last=last)


def _holds(model: nn.Module, head: Head, inputs: Sequence[Tensor], training: bool) -> bool:
    """Whether the model's outputs are W h + b (+ c), with the layer's weights and with others."""
    weight, drawn = model.get_parameter(head.weight), torch.Generator().manual_seed(0)
    held = {name: tensor.detach().clone() for name, tensor in model.state_dict(keep_vars=True).items()}
    moves = [torch.zeros_like(weight), torch.randn(weight.shape, generator=drawn, dtype=weight.dtype)]

    def run(move: Tensor, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, on the same random numbers and statistics each time."""
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.copy_(held[name])
        weight.add_(move)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return work()

    agree = True
    model.train(training)
    try:
        with torch.no_grad(), CastsToDouble():
            for move in moves:
                expected = run(move, lambda: model(*inputs))
                h, rest = run(move, lambda: head.run(model, inputs))
                agree &= close(head.outputs_of(model, h, rest), head.rows(expected), FORWARD)
    except FAILURES:
        return False
    finally:
        with torch.no_grad():
            run(moves[0], lambda: None)
    return agree
