"""`moretta check`: whether PBPFL trains a model exactly, and which parts of the model stay unperturbed."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moretta.contract.messages import Stamp
from moretta.errors import MisuseError, ParameterError
from moretta.models.hooks import gives_one_tensor
from moretta.protocols.common import enrolment, modules
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.silo_rows import TrainingRows
from moretta.protocols.pbpfl import ideal, softmax
from moretta.protocols.pbpfl.client import Client
from moretta.protocols.pbpfl.graph import CastsToDouble
from moretta.protocols.pbpfl.head import refuse_dense
from moretta.protocols.pbpfl.messages import Predictions, TrainOn
from moretta.protocols.pbpfl.params import PBPFL
from moretta.protocols.pbpfl.perturbation import Perturbation
from moretta.protocols.pbpfl.scales import ScalePlan
from moretta.protocols.pbpfl.server import largest_rho
from moretta.protocols.pbpfl.sizes import Sizes
from moretta.protocols.pbpfl.terms import bounded_alpha
from moretta.protocols.pbpfl.work import Trunk
from moretta.secure_aggregation.keystream import Keystream, SecretRoot
from moretta.secure_aggregation.plain import PlainUpload
from moretta.secure_aggregation.schemes import contributor

ROWS = 8
# A silo receives weights of 41 bits of mantissa in float64, of 24 in float32 (`Perturbation.perturb`). So the gradient
# is recovered at weights with relative errors of up to 2^-41, or 2^-24, which deep networks amplify.
BARS = {"relative_error_float64": 1e-8, "relative_error_float32": 1e-4, "buffers_error_float64": 1e-6}
PLAIN_DRAWS = 16  # the most draws of `plain_errors`
# The plain model's error excuses one up to 5 times as large: a key rounds differently, and draws may miss the worst.
EXCUSED_FACTOR = 5.0
# If a plain model's error is larger, it is not rounding: the model drew other random numbers in float32.
LARGEST_ROUNDING = 0.1


@dataclass(frozen=True)
class Input:
    """An input of a model: the shape of a row, and its number of distinct tokens (0: numbers)."""

    shape: tuple[int, ...]
    vocabulary: int = 0

    @classmethod
    def parse(cls, text: str) -> Input:
        """Read ``3,32,32`` or ``16:int1000``. Raises `moretta.errors.ParameterError` for anything else."""
        match = re.fullmatch(r"(\d+(?:,\d+)*)(?::int(\d+))?", text)
        shape = tuple(int(part) for part in match[1].split(",")) if match else ()
        if not match or min(shape) < 1 or match[2] == "0":
            raise ParameterError(
                f"--input {text}: expected the shape of a row, as 3,32,32, or of tokens, as 16:int1000"
            )
        return cls(shape, int(match[2] or 0))

    def draw(self, generator: torch.Generator) -> Tensor:
        """Return random rows, in float64."""
        if self.vocabulary:
            return torch.randint(self.vocabulary, (ROWS, *self.shape), generator=generator).double()
        return torch.randn(ROWS, *self.shape, generator=generator, dtype=torch.float64)


def unpack(module: nn.Module, arguments: tuple[Tensor, ...], inputs: Sequence[Input]) -> tuple[Tensor, ...]:
    """Return a model's inputs from flat rows of numbers, [B, all entries]; used as a hook before its forward."""
    parts = torch.split(arguments[0], [math.prod(shape_of.shape) for shape_of in inputs], dim=1)
    shaped = [part.reshape(len(part), *shape_of.shape) for part, shape_of in zip(parts, inputs, strict=True)]
    return tuple(part.long() if shape_of.vocabulary else part for part, shape_of in zip(shaped, inputs, strict=True))


def check(
    model: nn.Module, inputs: Sequence[Input], outputs: int, protocol: PBPFL, *, fall_back: bool = False
) -> dict[str, Any]:
    """Perturb a model, run one batch of 8 random rows through client and server, and compare with the true gradient.

    In float32 the offset stays within the server's bound (`moretta.protocols.pbpfl.server.largest_rho`).

    Args:
        inputs: Of the model, in the order of its arguments.
        outputs: The expected number of outputs.
        fall_back: Also measure powers of two, if continuous scales miss only the bar of float32 and the plain model's
            own rounding excuses that (`excuse`). If powers of two reach all bars, the errors and "passes" are theirs.

    Returns:
        The errors of the concatenated gradient in float64 and float32, relative to its norm, and that of the
        concatenated running statistics; the number of free scales, and the tensors forced to scale 1.
        "passes_continuous" says whether continuous scales reach all bars, None if not measured. After a fall-back,
        "relative_error_float32_continuous" is the error that missed the bar, and "plain_error_float32" the plain
        model's error, which excuses it (`excuse`).

    Raises:
        UnsupportedModel: The model cannot be perturbed; the sentence names the layer.
        ParameterError: The model has another number of outputs, or `refuse_dense` refuses it.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = [input_of.draw(generator) for input_of in inputs]
    examples = [
        part[:2].long() if input_of.vocabulary else part[:2] for part, input_of in zip(drawn, inputs, strict=True)
    ]
    double = gives_one_tensor(copy.deepcopy(model).double())
    plan = ScalePlan.of(double, examples)
    if plan.head.outputs != outputs:
        raise ParameterError(f"expected a model with {outputs} outputs, got {plan.head.outputs}")
    refuse_dense(plan.head, protocol.loss)
    rows = drawn[0]
    if len(inputs) > 1 or inputs[0].vocabulary:  # silos hold one array of numbers
        rows = torch.cat([part.flatten(1) for part in drawn], dim=1)
        double.register_forward_pre_hook(partial(unpack, inputs=inputs))
    classes = torch.randint(max(outputs, 2), (ROWS,), generator=generator).numpy()
    if plan.head.positions > 1:  # targets at each
        shape = ROWS, outputs * plan.head.positions
        classes = torch.randn(shape, generator=generator, dtype=torch.float64).numpy()
    findings = _measured(double, plan, rows, classes, protocol)
    passes_continuous = findings["passes"] if protocol.scales == "continuous" else None
    if fall_back and protocol.scales == "continuous":
        findings |= _fallen_back(findings, double, plan, rows, classes, protocol)
    forced = [{"tensor": tensor.tensor, "because": tensor.because} for tensor in plan.forced]
    return {
        **findings, "passes_continuous": passes_continuous, "free_scales": plan.positive, "forced_to_one": forced
    }  # fmt: skip


def _fallen_back(
    findings: Mapping[str, Any],
    double: nn.Module,
    plan: ScalePlan,
    rows: Tensor,
    classes: NDArray[np.generic],
    protocol: PBPFL,
) -> dict[str, Any]:
    """Return the findings that powers of two change; empty if `check` does not fall back on them."""
    if [name for name in BARS if findings[name] > BARS[name]] != ["relative_error_float32"]:
        return {}
    continuous = findings["relative_error_float32"]
    targets = enrolment.targets(classes, plan.head.numbers, protocol.loss, "check", torch.float64)
    plain = excuse(continuous, plain_errors(double, rows, targets, protocol.loss_function))
    if plain is None:
        return {}
    exact = _measured(double, plan, rows, classes, protocol.model_copy(update={"scales": "powers-of-two"}))
    if not exact["passes"]:
        return {}
    return {**exact, "relative_error_float32_continuous": continuous, "plain_error_float32": plain}


def excuse(error: float, draws: Iterator[float]) -> float | None:
    """Return the plain model's own error in float32 if it excuses that of a perturbed model, else None.

    The plain error is the largest of up to `PLAIN_DRAWS` draws. It excuses the other error if it misses the bar itself
    and the other is at most `EXCUSED_FACTOR` times as large. A draw above `LARGEST_ROUNDING` excuses nothing.

    Args:
        error: Of the perturbed model, relative to the gradient's norm.
        draws: Errors of the plain model, as `plain_errors` yields them.
    """
    largest = 0.0
    for draw in islice(draws, PLAIN_DRAWS):
        if not draw <= LARGEST_ROUNDING:  # true of NaN too
            return None
        largest = max(largest, draw)
        if largest > BARS["relative_error_float32"] and error <= EXCUSED_FACTOR * largest:
            return largest
    return None


def _measured(
    double: nn.Module, plan: ScalePlan, rows: Tensor, classes: NDArray[np.generic], protocol: PBPFL
) -> dict[str, Any]:
    with CastsToDouble():
        error64, buffers = _errors(double, plan, rows, classes, protocol)
    error32, _ = _errors(double, plan, rows.float(), classes, protocol)
    findings = {"relative_error_float64": error64, "relative_error_float32": error32, "buffers_error_float64": buffers}
    passes = all(findings[name] <= bar for name, bar in BARS.items())
    return {**findings, "scales": protocol.scales, "passes": passes}


def plain_errors(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss) -> Iterator[float]:
    """Yield errors of the plain model's gradient in float32 against float64, relative to its norm, without end.

    From the second draw on, weights are moved by about their last bit, as in a perturbed model: only some roundings
    flip a ReLU.

    Args:
        model, inputs: In float64.
        targets: From `moretta.protocols.common.enrolment.targets` for float64.
    """
    generator = torch.Generator().manual_seed(0)

    def gradient(dtype: torch.dtype, jitter: float) -> dict[str, Tensor]:
        clone = copy.deepcopy(model).to(dtype).train()
        for layer in clone.modules():
            if isinstance(layer, nn.MultiheadAttention):
                layer.dropout = 0.0  # it draws other numbers in float32, unlike `nn.Dropout`
        with torch.no_grad():
            for parameter in clone.parameters():
                parameter.mul_(1.0 + jitter * torch.randn(parameter.shape, generator=generator))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return ideal.gradient(clone, inputs.to(dtype), targets.to(dtype) if loss.name == "mse" else targets, loss)

    true, last_bit = gradient(torch.float64, 0.0), float(torch.finfo(torch.float32).eps)
    for jitter in chain([0.0], repeat(last_bit)):
        rounded = gradient(torch.float32, jitter)
        yield _relative_error({name: value.double().numpy() for name, value in rounded.items()}, true)


def _errors(
    double: nn.Module, plan: ScalePlan, inputs: Tensor, classes: NDArray[np.generic], protocol: PBPFL
) -> tuple[float, float]:
    """Return the relative error of the gradient that the server recovers, and of the running statistics.

    double: the true model, as the server holds it. inputs: in the run's dtype. The expected gradient is computed in
    that dtype too, so that in float32 both are rounded.
    """
    model = copy.deepcopy(double).to(inputs.dtype).train()
    loss, root = protocol.loss_function, SecretRoot.insecure(0, "check")  # no secret: the same every time
    targets = enrolment.targets(classes, plan.head.numbers, loss.name, "check", inputs.dtype)
    rows = SiloRows(TrainingRows(inputs.numpy(), targets.numpy(), Batches(ROWS, 0, 0, "check")), inputs.dtype)
    true = copy.deepcopy(model)
    with rows.randomness(1):  # dropout draws the same in the true and in the noisy model
        expected = ideal.gradient(true, *rows.batch(1), loss)
    perturbation = Perturbation(plan, protocol.partitions, protocol.form, protocol.scales)
    with rows.randomness(1):
        size = _offset_size(model, perturbation, root.stream("size"), inputs, targets, protocol)
    key = perturbation.draw_key(root.stream("key"), size)
    held = model if perturbation.powers_of_two else double
    client = Client(loss, model, plan.head, rows, contributor("none", "check"), protocol.variant)
    ask = TrainOn(
        stamp=Stamp("check", 1, 0),
        parameters=perturbation.perturb(held.state_dict(), key, inputs.dtype),
        parts=key.parts,
        direction=key.direction,
        encoding={},
    )
    upload = client.answer(ask)
    if isinstance(upload, Predictions):
        true_values = softmax.true_softmax(upload, key.offset)
        upload = client.answer(softmax.answer(true_values, key, protocol.variant, root.stream("delta"), ask.stamp, {}))
    if not isinstance(upload, PlainUpload):
        raise MisuseError(f"expected an upload in the clear, got `{upload.TAG}`")
    density = float(upload.tensors.get("density", np.ones(())))
    means = {name: np.asarray(value, dtype=np.float64) for name, value in upload.tensors.items()}
    recovered = perturbation.recover(means, key)
    recovered = plan.head.chained({name: value / density for name, value in recovered.items()}, double)
    buffers = perturbation.recover_buffers(means, key)
    return _relative_error(recovered, expected), _relative_error(buffers, modules.running_buffers(true))


def _offset_size(
    model: nn.Module, perturbation: Perturbation, stream: Keystream, inputs: Tensor, targets: Tensor, protocol: PBPFL
) -> float:
    """Return |gamma r_a|: rho, within the server's bound, times |y| / alpha under some key."""
    plan, scaled = perturbation.plan, copy.deepcopy(model)
    modules.load(scaled, perturbation.perturb(model.state_dict(), perturbation.draw_key(stream, offset_size=0.0)))
    h, outputs = Trunk(scaled, plan.head).forward(inputs)
    alpha = bounded_alpha(h, bias=plan.head.bias is not None)
    centred = outputs.double() - outputs.double().mean(dim=1, keepdim=True)
    size, targets = (_rms(targets), plan.head.rows(targets)) if protocol.loss == "mse" else (_rms(centred), targets)
    rho, sizes = protocol.rho, Sizes(alpha, size)
    if inputs.dtype != torch.float64:
        error = _rms(outputs - targets) if protocol.loss == "mse" else 0.0
        rho = min(rho, largest_rho(model, plan, protocol.loss, sizes, error))
    return rho * size / alpha


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt()) or 1.0


def _relative_error(computed: Mapping[str, NDArray[np.float64]], expected: Mapping[str, Tensor]) -> float:
    """Return the error of all tensors, concatenated, relative to their norm."""
    if not expected:
        return 0.0
    true = {name: value.detach().double().cpu().numpy() for name, value in expected.items()}
    gaps = np.concatenate([(computed[name] - value).ravel() for name, value in true.items()])
    norm = float(np.linalg.norm(np.concatenate([value.ravel() for value in true.values()])))
    return float(np.linalg.norm(gaps)) / (norm or 1.0)
