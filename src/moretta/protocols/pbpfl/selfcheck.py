"""A numerical check of the rules: each solved plan is tried on random weights in float64 before it is used."""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.stateless import _reparametrize_module

from moretta.errors import UnsupportedModel
from moretta.protocols.common import modules
from moretta.protocols.pbpfl.graph import Call, CastsToDouble, Trace, YesOrNo, record
from moretta.protocols.pbpfl.solver import Ids
from moretta.protocols.pbpfl.terms import alpha_size, least_alpha
from moretta.secure_aggregation.keystream import Keystream, SecretRoot

ROWS = 4
TRIAL = SecretRoot.insecure(1, "trial")  # no secret: its keys are tried here and used nowhere
FORWARD, BACKWARD = 1e-9, 1e-7
"""Bars for the relative error in float64: rounding stays far below them, a wrong rule far above."""

_DEFAULT_DTYPE = threading.RLock()


class _Head(Protocol):  # `moretta.protocols.pbpfl.head.Head`, whose module calls this one
    @property
    def module(self) -> str: ...
    @property
    def bias(self) -> str | None: ...
    @property
    def magnitude(self) -> str | None: ...
    @property
    def weight(self) -> str: ...
    def run(self, model: nn.Module, inputs: Sequence[Tensor], /) -> tuple[Tensor, Tensor | None]: ...


class _Plan(Protocol):  # `moretta.protocols.pbpfl.scales.ScalePlan`, whose module calls this one
    @property
    def head(self) -> _Head: ...
    def draw(self, stream: Keystream, /) -> Any: ...
    def perturb(self, tensors: Mapping[str, Any], key: Any, /) -> dict[str, Any]: ...
    def recover(self, tensors: Iterable[tuple[str, Any]], key: Any, /) -> dict[str, Any]: ...
    def recover_buffers(self, tensors: Mapping[str, Any], key: Any, /) -> dict[str, Any]: ...


@contextmanager
def double_precision() -> Iterator[None]:
    """Make float64 the default for tensors that the model itself creates, in one thread at a time."""
    with _DEFAULT_DTYPE:  # a process has one default, so two threads at once could leave float64 behind
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def stand_in(model: nn.Module, inputs: Sequence[Tensor]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a float64 copy of the model with noise on its trained parameters, and at least four distinct input rows.

    Without noise, parameters that start at 0 or 1 would hide a wrong rule.

    Raises:
        UnsupportedModel: The inputs have no common batch axis.
    """
    if len({tuple(tensor.shape[:1]) for tensor in inputs}) != 1 or inputs[0].dim() == 0:
        raise UnsupportedModel("expected one example input or more, each with the batch as axis 0")
    clone, generator = modules.out_of_place(copy.deepcopy(model)).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in clone.parameters():
            if parameter.is_floating_point() and parameter.requires_grad:
                fan_in = max(parameter.numel() // max(len(parameter), 1), 1) if parameter.dim() else 1
                size = min(float(parameter.square().mean().sqrt()) + 0.1, fan_in**-0.5)
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.5 * size)
    return clone.cpu(), tuple(_rows(tensor.detach().cpu(), generator) for tensor in inputs)


def _rows(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return at least four rows, random ones in place of constant ones.

    Batch normalisation over fewer rows is too ill-conditioned to compare gradients. Four or more rows stay as they are:
    they may be packed arrays, whose masks and lengths factors would break. Fewer are repeated, times random factors.
    """
    repeats = -(-ROWS // max(len(tensor), 1))
    rows = torch.cat([tensor.roll(turn, tensor.dim() - 1) for turn in range(repeats)])
    if not rows.is_floating_point():
        return rows
    if bool((rows == rows.reshape(-1)[0]).all()):
        return torch.randn(rows.shape, generator=generator, dtype=torch.float64)
    if repeats <= 1:
        return rows.double()
    return rows.double() * (0.5 + torch.rand(rows.shape, generator=generator, dtype=torch.float64))


def refuse_non_finite(model: nn.Module, inputs: Sequence[Tensor], trace: Trace) -> None:
    """Raise UnsupportedModel, naming the layer, if an output is NaN or infinite and cannot be compared."""
    if not isinstance(trace.output, Tensor) or bool(trace.output.isfinite().all()):
        return
    calls = record(model, inputs, keep=True).calls
    # Minus infinity may be intended, as in a mask.
    results = ((call.place, copy) for call in calls for copy in call.copies if copy.is_floating_point())
    place = next((place for place, copy in results if (copy.isnan() | copy.isposinf()).any()), "the model")
    raise UnsupportedModel(
        f"the model's output on the example inputs is not finite (first from {place}): use inputs that it is made for"
    )


def refuse_unsteady(model: nn.Module, inputs: Sequence[Tensor], before: Trace) -> None:
    """Raise UnsupportedModel if the model's output in evaluation differs from the earlier run's."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), CastsToDouble():
        torch.manual_seed(1)
        again = model.eval()(*inputs)
    if isinstance(before.output, Tensor) and not close(again, before.output, FORWARD):
        raise UnsupportedModel(
            "in evaluation the model's outputs for the same rows vary: it draws random numbers, or counts its runs; "
            "draw in training alone, as F.dropout(x, p, self.training) does, and keep no count"
        )


def refuse_mixed_rows(model: nn.Module, inputs: Sequence[Tensor], together: Trace) -> None:
    """Raise UnsupportedModel, naming the layer, if a row's output in evaluation depends on the other rows."""
    if any(isinstance(layer, _NormBase) and layer.running_mean is None for layer in model.modules()):
        return  # a batch normalisation without running statistics depends on other rows
    first = [tensor[:1] for tensor in inputs]
    same = close(record(model, first).output, together.output[:1], FORWARD)
    if same and together.answers:  # a question about all rows may have the same answer for the first row alone
        others = [
            torch.cat([rows[:1], -rows[1:] if rows.is_floating_point() else rows[1:].flip(-1)]) for rows in inputs
        ]
        with suppress(UnsupportedModel):  # such as negative token ids
            same, inputs = close(record(model, others).output[:1], together.output[:1], FORWARD), others
    if same:
        return
    calls = zip(record(model, first, keep=True).calls, record(model, inputs, keep=True).calls, strict=False)
    place = next((whole.place for alone, whole in calls if _differs(alone, whole)), "the model")
    raise UnsupportedModel(
        f"the output for a row depends on the other rows of its batch ({place}): silos would not compute the same "
        "function; only batch normalisation may look across rows, and inputs must have the batch as axis 0"
    )


def _differs(alone: Call, whole: Call) -> bool:
    """Whether a result for one row differs from that for all rows; results of equal shapes have no batch axis."""
    pairs = zip(alone.copies, whole.copies, strict=False)
    return any(not close(a, b if a.shape == b.shape else b[:1], FORWARD) for a, b in pairs)


def close(computed: Tensor, expected: Tensor, bar: float) -> bool:
    """Whether two tensors agree relative to the largest element."""
    if computed.shape != expected.shape:
        return False
    if not expected.numel():
        return True
    # Equal masks of minus infinity agree; their differences are NaN.
    error = (computed.double() - expected.double()).abs().masked_fill(computed == expected, 0.0)
    size = expected.double().abs().masked_fill(~expected.isfinite(), 0.0)
    return bool(error.max() <= bar * max(float(size.max()), 1e-300))


def refuse_vanishing_alpha(plan: _Plan, model: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Raise UnsupportedModel if alpha is 0 under a key for all rows: then no offset hides the outputs."""
    tensors = {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    noisy, head = plan.perturb(tensors, plan.draw(TRIAL.stream("alpha"))), plan.head
    with torch.no_grad(), CastsToDouble(), _reparametrize_module(model.eval(), noisy, tie_weights=True):
        h, _ = head.run(model, tuple(inputs))
    if alpha_size(h, bias=head.bias is not None) < least_alpha(h):
        raise UnsupportedModel(
            f"the inputs of the last layer {head.module} add up to 0 in every row, as behind a normalisation without "
            "weights; PBPFL's offset would hide no output: add a bias to that layer, or weights to the normalisation"
        )


def agrees(plan: _Plan, model: nn.Module, inputs: Sequence[Tensor], turned: frozenset[int] = frozenset()) -> bool:
    """Whether a random key leaves outputs, gradients and buffers unchanged. turned: see `graph.YesOrNo`."""
    asked = YesOrNo(turned)
    hook = model.register_forward_pre_hook(lambda *_: asked.answers.clear())
    try:
        with CastsToDouble(), asked if turned else nullcontext():
            return _agrees(plan, model, inputs)
    finally:
        hook.remove()


def _agrees(plan: _Plan, model: nn.Module, inputs: Sequence[Tensor]) -> bool:
    key = plan.draw(TRIAL.stream("scales"))
    parameters = {name: tensor.detach() for name, tensor in model.named_parameters()}
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        outputs = [
            functional_call(model.eval(), dict(tensors), tuple(inputs))
            for tensors in ({**parameters, **buffers}, plan.perturb({**parameters, **buffers}, key))
        ]
    if not close(outputs[1], outputs[0], FORWARD):
        return False
    true, true_buffers = _train_step(model, parameters, buffers, inputs)
    if not all(bool(gradient.isfinite().all()) for gradient in true.values()):
        raise UnsupportedModel(
            "the model's gradient on the example inputs is not finite: use inputs that it is made for, or keep it "
            "from the edge of what its operations are defined on (as sqrt at 0)"
        )
    noisy, noisy_buffers = _train_step(model, plan.perturb(parameters, key), plan.perturb(buffers, key), inputs)
    whole = max((float(gradient.norm()) for gradient in true.values()), default=0.0)
    # Each noisy gradient is freed before the next is recovered: for a large model they take much memory.
    recovered = plan.recover(((name, noisy.pop(name)) for name in list(noisy)), key)
    if plan.head.magnitude:  # silos upload the gradient of W, not those of v and g; it is not tried here
        true = {n: value for n, value in true.items() if n not in (plan.head.weight, plan.head.magnitude)}
    errors = [float((recovered[name] - gradient).norm()) for name, gradient in true.items()]
    sizes = [float(gradient.norm()) + 1e-3 * whole for gradient in true.values()]
    statistics = plan.recover_buffers(noisy_buffers, key)
    return all(error <= BACKWARD * size for error, size in zip(errors, sizes, strict=True)) and all(
        close(statistics[name] + 1.0, buffer + 1.0, BACKWARD)  # a mean may be 0 but for rounding
        for name, buffer in true_buffers.items()
    )


def _train_step(
    model: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Sequence[Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients of a fixed function of the outputs in training, and the buffers afterwards."""
    leaves = {
        name: tensor.detach().requires_grad_() for name, tensor in parameters.items() if tensor.is_floating_point()
    }
    after = {name: tensor.clone() for name, tensor in buffers.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Until the backward pass ends: checkpointed layers run again in it.
        with _reparametrize_module(model.train(), {**parameters, **leaves, **after}, tie_weights=True):
            outputs = model(*inputs)
            weights = torch.linspace(-1.0, 1.0, outputs.numel(), dtype=outputs.dtype).reshape(outputs.shape)
            loss = (outputs * weights).sum() + 0.5 * outputs.square().mean()
            gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True, allow_unused=True)
    return dict(zip(leaves, gradients, strict=True)), after


def first_deviation(
    plan: _Plan, model: nn.Module, inputs: Sequence[Tensor], predict: Callable[[Ids, Any], Tensor],
    history: Sequence[Sequence[Ids | None]],
) -> str:  # fmt: skip
    """Return a message that names the first call of the model whose result has another scale than predicted."""
    key = plan.draw(TRIAL.stream("scales"))
    true = record(model, inputs, keep=True)
    noisy = copy.deepcopy(model)
    with torch.no_grad():
        for name, value in plan.perturb(dict(model.named_parameters()), key).items():
            noisy.get_parameter(name).copy_(value)
    calls = zip(true.calls, record(noisy, inputs, keep=True).calls, history, strict=False)
    place = next((was.place for was, now, ids in calls if _deviates(was, now, ids, predict, key)), "its backward pass")
    return (
        f"the scales found for the model do not leave it unchanged, first at {place}: replace this operation by a "
        "layer of torch.nn, or wrap it in an autograd-free form; please report it"
    )


def _deviates(was: Call, now: Call, ids: Sequence[Ids | None], predict: Callable[[Ids, Any], Tensor], key: Any) -> bool:
    return any(
        ids_of_copy is not None
        and before.is_floating_point()
        and not close(after, before * predict(ids_of_copy, key), FORWARD)
        for before, after, ids_of_copy in zip(was.copies, now.copies, ids, strict=False)
    )
