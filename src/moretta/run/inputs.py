"""The rows of a federation and its other inputs, checked against each other before anything runs.

Every check raises `moretta.errors.ParameterError`. `doubts` yields possible mistakes that do not prevent a run.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moretta.config.rules import SCALED_CLASSES
from moretta.contract.settings import check_rules, in_file, in_python
from moretta.contract.wording import enumerated, nearest, shown
from moretta.data.holders import grid_of
from moretta.data.layout import SampleLayout, Samples
from moretta.data.rows import Subjects, check_finite, positions_of
from moretta.data.silo import Silo, row_shape
from moretta.data.tables.preparation import ColumnRules, check_rounding
from moretta.engines.settings import Engine, Faults
from moretta.errors import ParameterError, RowsError
from moretta.models import hooks
from moretta.models.checks import copied, dtype_of
from moretta.models.hooks import is_standardised, is_unscaled
from moretta.protocols.common import modules
from moretta.protocols.common.augmentation import PADDING
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.own_loss import check as check_loss
from moretta.protocols.common.specification import Specification
from moretta.protocols.common.training import Training
from moretta.protocols.registry import entry_of
from moretta.run import metrics
from moretta.run.evaluation import LabelledRows
from moretta.run.raw_rows import Prepared
from moretta.secure_aggregation.identity import is_silo_name

LabelledSamples = tuple[Samples, NDArray[np.generic]]


@dataclass(frozen=True)
class RunRows:
    """The rows of a run and their names, groups and rules.

    Args:
        silos: Every silo that trains, local or remote.
        test, validation: Rows on which the server scores models, and by which early stopping judges.
        feature_names, class_names: Empty for the table's, if any.
        column_rules: The filling of absent values; None for the table's, or the specification's.
        tested: The subjects of the test rows, which are compared with silos' rows (`moretta.protocols.common.overlap`).
        test_groups: The same, resampled together for intervals; None for those of `tested`.
    """

    silos: Sequence[Silo]
    test: LabelledSamples | None = None
    validation: LabelledSamples | None = None
    feature_names: Sequence[str] = ()
    class_names: Sequence[str] = ()
    column_rules: ColumnRules | None = None
    tested: Subjects | None = None
    test_groups: NDArray[np.str_] | None = None


@dataclass(frozen=True)
class RowChecks:
    """Checks of rows.

    Attributes:
        shape: The shape of a row.
        names: The names of columns; empty without names.
        tokens: Whether rows are whole numbers.
    """

    shape: tuple[int, ...]
    rules: ColumnRules
    names: Sequence[str] = ()
    tokens: bool = False

    def check_rows(self, part: str, x: NDArray[np.generic], y: NDArray[np.generic]) -> None:
        """Raise `moretta.errors.ParameterError` unless x has one or more rows of this shape, and y as many targets."""
        if len(x) == 0 or len(x) != len(y) or x.shape[1:] != self.shape:
            raise RowsError(
                f"{part}: expected as many targets as rows, at least one, of shape {list(self.shape)} as the silos "
                f"have; got inputs of shape {list(x.shape)} and {len(y)} targets"
            )
        if self.tokens and x.dtype.kind == "f":
            raise RowsError(f"{part}: expected whole numbers, token ids, as the silos have; got {x.dtype}")
        self.check_finite(part, x)

    def check_finite(self, owner: str, x: NDArray[np.generic], columns: Sequence[int] = ()) -> None:
        """Raise RowsError for infinite values, and for absent ones (NaN) unless they are allowed.

        Args:
            columns: The indices of x's columns, if columns are split; empty for all.
        """
        held = list(columns or range(x.shape[-1]))
        names = [self.names[place] if place < len(self.names) else str(place) for place in held]
        may_lack = self.rules.fills[held] > 0 if self.rules.may_lack else False
        check_finite(x, names if x.ndim == 2 else (), owner, may_lack=may_lack)


def refuse_scaled_twice(model: nn.Module, standardise: bool | Sequence[str], *, targets: bool = False) -> None:
    """Raise ParameterError if inputs, or with `targets` those, would be scaled for a model that scales them itself."""
    own = (
        module.unscale is not None if isinstance(module, Prepared) else is_unscaled(module)
        for module in model.modules()
    )
    if targets and any(own):
        raise ParameterError(
            "standardise_targets = True, but this model came out of a run, so its outputs are in the targets' own "
            "units; to go on from it, pass its network, result.raw_model().network, with the settings of that run"
        )
    if standardise and any(isinstance(module, Prepared) or is_standardised(module) for module in model.modules()):
        raise ParameterError(
            "standardise = True, but this model came out of a run and scales its rows itself, so they would be scaled "
            "twice; leave standardise out, and training goes on from where that run was"
        )


def with_one_tensor(
    model: nn.Module, silos: Sequence[Silo], dtype: torch.dtype, targets: Iterable[NDArray[np.generic]] = ()
) -> nn.Module:
    """Return the model, changed to return one tensor [rows, outputs] of several.

    It returns the only one with the number of outputs that the targets need. `count_outputs` reports any failure.

    Args:
        targets: The targets of all rows.
    """
    hook = hooks.hook_of(model) or hooks.OneTensor()
    hooks.gives_all(model)
    positions = positions_of(targets)
    mask = (positions,) if positions else hook.mask
    clone, plain = modules.out_of_place(copy.deepcopy(model)), not hook.name and not mask
    for training in (True, False):
        with torch.no_grad(), torch.random.fork_rng(devices=()), suppress(Exception):
            output = clone.train(training)(_sample(silos, dtype))
            plain &= isinstance(output, torch.Tensor) and output.ndim == 2
            fits = hooks.that_fit(output, 2)
            if not hook.name and len(fits) > 1 and not set(hooks.USUAL) & set(fits):
                outputs = _needed_outputs(silos)
                alike = [name for name, output in fits.items() if output[0].numel() == outputs]
                hook = hooks.OneTensor(alike[0] if len(alike) == 1 else "")
            mask = hooks.mask_of(hook.chosen(output, 2), positions) or mask
            plain &= training or clone(_sample(silos, dtype)[:1]).ndim == 2  # squeeze also removes the axis of one row
    return model if plain else hooks.gives_one_tensor(model, hook.name, mask)


def _needed_outputs(silos: Sequence[Silo]) -> int:
    """Return the number of outputs that local silos' targets need; 0 without local silos."""
    targets = [silo.y for silo in silos if not silo.remote and len(silo.y)]
    if not targets or targets[0].ndim == 3:
        return 0
    if targets[0].ndim > 1:
        return int(np.prod(targets[0].shape[1:]))
    return max(int(y.max()) + 1 for y in targets) if targets[0].dtype.kind in "iub" else 1


def count_outputs(
    model: nn.Module,
    silos: Sequence[Silo],
    layout: SampleLayout | None,
    dtype: torch.dtype,
    *,
    differentiable: bool = True,
) -> int:
    """Return the number of a model's outputs for a row.

    Args:
        differentiable: False for protocols of forward passes alone.

    Raises:
        ParameterError: The model refuses the silos' rows, writes to them, or mixes rows of a batch. Or it does not
            return [rows, outputs] of floats, with a gradient if the protocol needs one.
    """
    sample = _sample(silos, dtype)
    clone = modules.out_of_place(copy.deepcopy(model)).eval()
    try:
        with torch.enable_grad():  # the caller may be under no_grad
            outputs, written = clone(sample), sample._version
    except ParameterError:  # the hooks of inputs and outputs raise it with their own sentence
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if not sample.is_floating_point():
            reason += "; whole numbers are token ids, so give numbers as floats: x.astype(numpy.float32)"
        if layout is not None:
            reason += layout.table_hint
        raise ParameterError(
            f"the model cannot take {layout or f'rows of shape {list(sample.shape[1:])}'}: {reason}"
        ) from error
    before, after = ({name for name, _ in module.named_parameters()} for module in (model, clone))
    if before != after:
        raise ParameterError(
            f"model: `{min(before ^ after)}`: the model has other parameters once it has run, so that each copy would "
            "begin with its own; make all in __init__, or call the model once on a row"
        )
    if not isinstance(outputs, torch.Tensor) or outputs.ndim != 2 or len(outputs) != len(sample):
        shape = list(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        raise ParameterError(f"expected a model with outputs of shape [rows, outputs], got {shape}")
    recurrent = any(isinstance(layer, torch.nn.RNNBase) for layer in clone.modules())
    if recurrent and not torch.allclose(outputs[0], outputs[1], rtol=1e-4, atol=1e-6):  # the two rows are equal
        raise ParameterError(
            "the model reads the rows of a batch as the steps of one sequence, so a row's outputs follow from the "
            "rows before it; pass [rows, steps, columns] to its recurrent layer, with batch_first = True"
        )
    if written:
        raise ParameterError(
            "the model changes its input in place, and the next user of those rows has others; write x = x * 2 in "
            "the place of x.mul_(2)"
        )
    if not outputs.is_floating_point():
        raise ParameterError(f"expected a model with outputs of floats, got {outputs.dtype}; leave out argmax or round")
    with torch.enable_grad(), torch.random.fork_rng(devices=()):  # evaluation may have no gradient; dropout draws
        trainable = outputs.requires_grad or not differentiable or clone.train()(sample).requires_grad
    if not trainable:
        raise ParameterError(
            "expected outputs with a gradient, and these have none: the model detaches them, or computes them under "
            "torch.no_grad or inference_mode; leave that out, or use baffle, which needs no gradient"
        )
    return int(outputs.shape[1])


def _sample(silos: Sequence[Silo], dtype: torch.dtype) -> torch.Tensor:
    """Return two equal rows of ones, which are valid token ids, masks and lengths."""
    sample = torch.ones((2, *row_shape(silos)), dtype=torch.tensor(silos[0].x[:0]).dtype)
    return sample.to(dtype) if sample.is_floating_point() else sample


def check_batches(model: nn.Module, silos: Sequence[Silo], batch_size: int, dtype: torch.dtype) -> None:
    """Raise RowsError if a local silo has batches of one row and the model cannot train on one.

    Batch normalisation cannot if a row has one value a channel.
    """
    alone = [silo for silo in silos if len(silo.x) and Batches(len(silo.x), batch_size, 0, silo.name).fewest == 1]
    if not alone:
        return
    clone = modules.out_of_place(copy.deepcopy(model)).train()
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=()):
            clone(_sample(silos, dtype)[:1])
    except Exception as error:
        silo, reason = alone[0], f"{type(error).__name__}: {error}".splitlines()[0]
        raise RowsError(
            f"silo `{silo.name}`: a batch of its {len(silo.x)} rows has one row, on which the model cannot train "
            f"({reason}); use batches of two rows or more, and silos of as many, or leave out batch normalisation"
        ) from error


class Trainable(Protocol):
    """The part of `moretta.run.federation.Federation` that the loop of rounds reads.

    Args:
        spec: The settings.
        model: The architecture, with the initial weights.
        outputs: Their number.
        silos: Every silo that trains, local or remote.
        layout: The packing of a sample's several arrays; None for one array.
        test, validation: Rows on which the server scores models, and by which early stopping judges.
        test_groups: The subjects of the test rows, if known.
        column_rules: The preparation of input columns.
        class_names, feature_names: Empty without names.
    """

    spec: Specification
    model: nn.Module
    outputs: int
    silos: Sequence[Silo]
    layout: SampleLayout | None
    test: LabelledRows | None
    validation: LabelledRows | None
    test_groups: NDArray[np.str_] | None
    column_rules: ColumnRules
    class_names: Sequence[str]
    feature_names: Sequence[str]


def check_silos(silos: Sequence[Silo], protocol: Training, inputs: RowChecks) -> None:
    """Check silos' names, and the rows of local silos."""
    names = Counter(silo.name for silo in silos)
    folded = Counter(name.casefold() for name in names)
    _check_grid(silos, protocol)
    for silo in silos:
        if not is_silo_name(silo.name):
            raise ParameterError(
                f"silo name {silo.name!r:.80}: expected 1 to 64 letters, digits, dots, dashes and underscores, "
                'not "server"'
            )
        if names[silo.name] > 1:
            raise ParameterError(f"two silos have the name `{silo.name}`; expected each name once: rename one")
        if folded[silo.name.casefold()] > 1:  # a disk may not distinguish capitals in their files' names
            raise ParameterError(
                f"silo `{silo.name}`: another silo's name differs from it by capitals alone; rename one"
            )
        if silo.fit is not None and (silo.remote or "fit" not in protocol.OWN):
            why = "its rows are on another machine" if silo.remote else f"{protocol.name} has built-in steps alone"
            raise ParameterError(
                f"silo `{silo.name}`: fit trains a silo that is here, under fedavg or fedprox, and {why}; remove fit"
            )
        if silo.remote:
            continue
        unlabelled = bool(silo.columns) and not len(silo.y)
        if len(silo.x) == 0 or (len(silo.x) != len(silo.y) and not unlabelled):
            raise RowsError(
                f"silo `{silo.name}`: expected as many targets as rows, and at least one; got {len(silo.x)} rows "
                f"and {len(silo.y)} targets"
            )
        inputs.check_finite(f"silo `{silo.name}`", silo.x, silo.columns)
        check_rounding(silo.x, f"silo `{silo.name}`: x", silo.names)
        check_rounding(silo.y, f"silo `{silo.name}`: y")
        if not silo.columns and silo.x.shape[1:] != silos[0].x.shape[1:]:
            raise RowsError(
                f"silo `{silo.name}`: expected rows of shape {list(silos[0].x.shape[1:])}, as "
                f"`{silos[0].name}` has, got {list(silo.x.shape[1:])}"
            )


def _check_grid(silos: Sequence[Silo], protocol: Training) -> None:
    """Check which silo holds which columns, if any silo states its columns."""
    if not any(silo.columns or silo.row for silo in silos):
        return
    if not entry_of(protocol).grids:
        raise ParameterError(
            "silos that hold different columns of the same rows train by cgd; of the other protocols, centralised "
            f"alone puts the columns together, {getattr(protocol, 'name', 'this one')} does not"
        )
    for silo in silos:
        if not isinstance(silo.row, str):
            raise ParameterError(
                f'silo `{silo.name}`: row: expected a name, such as row="north"; got {shown(silo.row)}'
            )
        if not silo.row or not silo.columns or silo.x.shape[1:] != (len(silo.columns),):
            raise ParameterError(
                f"silo `{silo.name}`: got row `{silo.row}`, inputs {list(silo.x.shape)} and {len(silo.columns)} "
                "columns; expected the name of its row of the grid, and inputs [rows, columns] with the indices of "
                "their columns"
            )
    grid_of(silos).check(row_shape(silos)[0])


def check_names(engine: Engine, silos: Sequence[Silo]) -> None:
    """Check that edge clients and faults name existing silos."""
    faults = engine.faults or Faults()
    rows = (("drop", faults.drop), ("delay", faults.delay), ("corrupt", faults.corrupt))
    named = [("[engine] edge", name) for name in engine.edge]
    named += [(f"[engine.faults] {key}", row.silo) for key, listed in rows for row in listed]
    names = [silo.name for silo in silos]
    for key, name in named:
        if name not in names:
            close = nearest(name, names)
            hint = f"did you mean `{close}`?" if close else f"the silos are {', '.join(names):.200}"
            raise ParameterError(f"{key}: no silo is called `{name}`; {hint}")


def check_class_names(names: Sequence[str], outputs: int) -> None:
    """Check that names of classes, if any, are distinct and one for each class."""
    classes = max(outputs, 2)  # one output has two, the sides of a threshold
    if names and (len(names) != classes or len(set(names)) < classes):
        listing = enumerated(map(repr, names))
        raise ParameterError(f"class_names: expected {classes} different names, one for each class; got {listing:.200}")


def check_masks(spec: Specification, targets: Sequence[NDArray[np.generic]]) -> None:
    """Check that all or no targets are masks of the same number of positions, and that masks fit the other settings."""
    local = [y for y in targets if len(y)]
    positions = {y.shape[1] if y.ndim == 3 else 0 for y in local}
    if len(positions) > 1:
        counts = enumerated(str(count) for count in sorted(positions))
        raise RowsError(
            f"masks have {counts} positions at different silos or test rows (0: no masks); expected the same"
        )
    if not positions or not positions.pop():
        return
    for key, value in (("augment", spec.data.varied), ("standardise-targets", spec.data.standardise_targets)):
        if value:
            raise ParameterError(f"{key} = {shown(value)}: masks would not change with it; remove it")


def check_training(
    spec: Specification, silos: Sequence[Silo], outputs: int, dtype: torch.dtype, *, validated: bool
) -> None:
    """Check the settings of training against model, rows and machine. validated: whether early stopping has rows."""
    check_rules((SCALED_CLASSES,), spec, in_file if spec.text else in_python)
    metrics.check(spec.metrics, outputs, spec.task, dtype)
    if (own := spec.protocol.own_loss) is not None:
        gradients = not entry_of(spec.protocol).forward_only
        targets = next((silo.y for silo in silos if not silo.remote and len(silo.y)), None)
        check_loss(own, outputs, spec.protocol.loss, spec.task, dtype, differentiable=gradients, targets=targets)
    if spec.run.early_stopping is not None and not validated:
        raise ParameterError("early_stopping needs rows to judge by; set validation=(x, y), or validation_fraction")
    weights = len(spec.protocol.class_weights)
    outputs //= positions_of(silo.y for silo in silos) or 1
    if weights and weights != outputs:
        raise ParameterError(f"class-weights: expected {outputs}, one an output of the model, got {weights}")
    kind, _, number = spec.run.device.partition(":")
    gpus = torch.cuda.device_count() if kind == "cuda" and torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= gpus:
        raise ParameterError(
            f'device = "{spec.run.device}" is not available: this PyTorch finds {gpus} GPUs; use "cpu"'
        )
    if spec.data.varied and silos[0].x.ndim != 4:
        raise ParameterError("augment is for images [rows, channels, height, width]; these inputs have another shape")
    if spec.data.varied == "reflect-crop-flip" and min(silos[0].x.shape[2:]) <= PADDING:
        raise ParameterError(f"augment mirrors {PADDING} pixels at each edge; images must be larger than that")


MOST_COMPARED = 20_000_000  # numbers in the compared rows
DARK = 0.02  # of the range of pixels; images without a pixel above it are nearly black


def doubts(
    spec: Specification, model: nn.Module, silos: Sequence[Silo], count: int, test: LabelledRows | None = None
) -> Iterator[str]:
    """Yield sentences on possible mistakes of a model and local rows that do not prevent a run.

    Args:
        count: The number of the model's outputs.
        test: Rows, if any.
    """
    if test is not None and (known := _known(test[0], silos)) > len(test[0]) / 2:
        yield (
            f"{known} of {len(test[0])} test rows are among the training rows of the silos, so their scores do not "
            "show how the model does on new rows; use other test rows"
        )
    targets = [silo.y for silo in silos if len(silo.y)]
    if targets and not any(silo.remote for silo in silos) and all((y == targets[0][0]).all() for y in targets):
        yield "all rows have the same target, so that there is nothing to learn; look at the target's column"
    hook = hooks.hook_of(model)
    if hook is not None and len(hook.mask) == 1 and count == (size := hook.mask[0]) ** 2:
        yield (
            f"the model's outputs are [rows, {size}, {size}] for masks of {size} positions, so classes are taken to be "
            "on the first of these axes; if positions are on it, return outputs.transpose(1, 2)"
        )
    outputs, alone = _outputs(model, silos)
    rounding = 0.01 * float(outputs.abs().max()) if outputs.numel() else 0.0
    if math.isfinite(rounding) and not torch.allclose(outputs[: len(alone)], alone, atol=rounding):
        yield (
            "in evaluation the model's outputs for a row change with the rows beside it, or each time, and so do "
            "scores and predictions; leave dropout to training (training=self.training), and use running statistics"
        )
    shares = outputs.shape[1] > 1 and bool(((outputs >= 0) & (outputs <= 1)).all())
    if spec.protocol.loss == "cross-entropy" and spec.protocol.own_loss is None and shares:
        yield (
            "all outputs of the model lie between 0 and 1, as after a softmax or sigmoid; cross-entropy takes their "
            "softmax once more, so it learns little; leave out the last such layer"
        )
    scoring = {"held_out": bool(spec.data.score_at_silos), "validation": spec.data.silos_validate}
    for silo in silos:
        if unused := [part for part, scored in scoring.items() if getattr(silo, part) is not None and not scored]:
            yield (
                f"silo `{silo.name}`: nothing scores its rows of {' and '.join(unused)}, and nothing trains on them; "
                "set score_at_silos or validation_fraction, or leave them out"
            )
        x, brightest = silo.x, 0.0
        if isinstance(x, np.ndarray) and x.ndim == 4 and x.dtype.kind == "f" and x.size:  # images in memory
            brightest = max(float(np.fmax.reduce(x, axis=None)), -float(np.fmin.reduce(x, axis=None)))  # without a copy
        if 0 < brightest < DARK:
            yield (
                f"silo `{silo.name}`: its images are nearly black, no pixel is above {brightest:.1g} of 1; for DICOM "
                "files set [data] window, else scale them"
            )


def _known(x: NDArray[np.generic], silos: Sequence[Silo]) -> int:
    """Return how many rows equal a silo's in each number; 0 if rows are remote, or are split by column."""
    own = [silo.x for silo in silos if isinstance(silo.x, np.ndarray) and len(silo.x) and not silo.columns]
    parts = [x, *own] if isinstance(x, np.ndarray) else []
    if len(parts) < 2 or sum(part.size for part in parts) > MOST_COMPARED:
        return 0
    weights = np.random.default_rng(0).normal(size=x[0].size)  # rows with equal sums are equal
    flat = (np.ascontiguousarray(part).reshape(len(part), -1) for part in parts)  # as the order of a sum rounds it
    first, *others = (np.nansum(part * weights, axis=1) for part in flat)
    return int(np.isin(first, np.concatenate(others)).sum())


def _outputs(model: nn.Module, silos: Sequence[Silo]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a model's outputs for made-up rows, and for the first two each alone, NaN if it fails on one alone.

    Both have no rows if the model refuses such rows.
    """
    outputs = alone = torch.zeros(0, 1)
    generator, layout = torch.Generator().manual_seed(0), silos[0].layout
    rows = 100 * torch.randn(16, *row_shape(silos), generator=generator, dtype=torch.float64)
    rows = rows if layout is None else torch.from_numpy(layout.plausible(rows.numpy()))
    own = copied(model).cpu()
    rows = (rows > 0).long() if silos[0].x.dtype.kind in "iu" else rows.to(dtype_of(own))  # any vocabulary has 0 and 1
    with suppress(Exception), torch.random.fork_rng(devices=()):  # a user's model may refuse such rows
        outputs = modules.outputs_of(own, rows)
        alone = torch.full_like(outputs[:2], torch.nan)
        alone = modules.outputs_of(own, rows[:2], 1)
    return outputs, alone
