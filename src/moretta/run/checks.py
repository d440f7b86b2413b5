"""What a federation is given, checked against each other before anything runs.

Every check raises `moretta.errors.ParameterError`; what runs and may not be meant is one of its `doubts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moretta.config.rules import KEYS_MISSING, SCALED_CLASSES
from moretta.contract.rules import check as check_rules
from moretta.contract.rules import in_file, in_python
from moretta.contract.wording import enumerated, nearest, shown
from moretta.data.holders import grid_of
from moretta.data.rows import positions_of
from moretta.data.silo import Silo, row_shape
from moretta.engines.settings import Engine, Faults
from moretta.errors import ParameterError, RowsError
from moretta.models.checks import copied, dtype_of
from moretta.protocols.common import modules
from moretta.protocols.common.augmentation import PADDING
from moretta.protocols.common.own_loss import check as check_loss
from moretta.protocols.common.specification import Specification
from moretta.protocols.common.training import Training
from moretta.protocols.registry import entry_of
from moretta.run import metrics
from moretta.run.inputs import RowChecks
from moretta.secure_aggregation.identity import is_silo_name


def check_silos(silos: Sequence[Silo], protocol: Training, inputs: RowChecks) -> None:
    """Check silos' names, and the rows of those that are here."""
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
            raise ParameterError(f"two silos are called `{silo.name}`; give each its own name")
        if folded[silo.name.casefold()] > 1:  # their files would be one where a disk knows no capitals
            raise ParameterError(
                f"silo `{silo.name}`: another silo's name differs from it by capitals alone; give each its own name"
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
        if not silo.columns and silo.x.shape[1:] != silos[0].x.shape[1:]:
            raise RowsError(
                f"silo `{silo.name}`: expected rows of shape {list(silos[0].x.shape[1:])}, as "
                f"`{silos[0].name}` has, got {list(silo.x.shape[1:])}"
            )


def _check_grid(silos: Sequence[Silo], protocol: Training) -> None:
    """Check who holds which columns, where any silo says so."""
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
                f"silo `{silo.name}`: expected the name of its row of the grid, and inputs [rows, columns] with "
                f"the indices of their columns; got row `{silo.row}`, inputs {list(silo.x.shape)} and "
                f"{len(silo.columns)} columns"
            )
    grid_of(silos).check(row_shape(silos)[0])


def check_keys(spec: Specification, silos: Sequence[Silo]) -> None:
    """Check that silos that are here have keys beside a roster; remote ones have their own."""
    if not all(silo.remote for silo in silos):
        check_rules((KEYS_MISSING,), spec, in_python)


def check_names(engine: Engine, silos: Sequence[Silo]) -> None:
    """Check that the silos exist that edge clients and faults name."""
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
    """Check that names of classes, where there are any, are one for each, and different."""
    classes = max(outputs, 2)  # of one output, the sides of a threshold
    if names and (len(names) != classes or len(set(names)) < classes):
        listing = enumerated(map(repr, names))
        raise ParameterError(f"class_names: expected {classes} different names, one for each class; got {listing:.200}")


def check_masks(spec: Specification, targets: Sequence[NDArray[np.generic]]) -> None:
    """Check that all targets are masks of as many positions or none is, and what does not go with masks."""
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
    """Check the settings of training against model, rows and machine. validated: there are rows for early stopping."""
    check_rules((SCALED_CLASSES,), spec, in_file if spec.text else in_python)
    metrics.check(spec.metrics, outputs, spec.task, dtype)
    if (own := spec.protocol.own_loss) is not None:
        gradients = not entry_of(spec.protocol).forward_only
        targets = next((silo.y for silo in silos if not silo.remote and len(silo.y)), None)
        check_loss(own, outputs, spec.protocol.loss, spec.task, dtype, differentiable=gradients, targets=targets)
    if spec.run.early_stopping is not None and not validated:
        raise ParameterError("early_stopping needs rows to judge by; give validation=(x, y), or validation_fraction")
    weights = len(spec.protocol.class_weights)
    outputs //= positions_of(silo.y for silo in silos) or 1
    if weights and weights != outputs:
        raise ParameterError(f"class-weights: expected {outputs}, one an output of the model, got {weights}")
    kind, _, number = spec.run.device.partition(":")
    there = torch.cuda.device_count() if kind == "cuda" and torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= there:
        raise ParameterError(f'device = "{spec.run.device}" is not there: this PyTorch finds {there} GPUs; use "cpu"')
    if spec.data.varied and silos[0].x.ndim != 4:
        raise ParameterError("augment is for images [rows, channels, height, width]; these inputs have another shape")
    if spec.data.varied == "reflect-crop-flip" and min(silos[0].x.shape[2:]) <= PADDING:
        raise ParameterError(f"augment mirrors {PADDING} pixels at each edge; images must be larger than that")


DARK = 0.02  # of the range of pixels: images that have nothing above it are nearly black


def doubts(spec: Specification, model: nn.Module, silos: Sequence[Silo]) -> Iterator[str]:
    """Yield what is odd of a model and the rows that are here, in sentences; they run all the same."""
    if spec.protocol.loss == "cross-entropy" and spec.protocol.own_loss is None and _gives_shares(model, silos):
        yield (
            "the model's outputs lie between 0 and 1 whatever it reads, as after a softmax or sigmoid, and "
            "cross-entropy takes their softmax once more, so that it learns little; leave out the last such layer"
        )
    for silo in silos:
        brightest = _brightest(silo.x)
        if 0 < brightest < DARK:
            yield (
                f"silo `{silo.name}`: its images are nearly black, no pixel is above {brightest:.1g} of 1; for DICOM "
                "files give [data] window, else scale them"
            )


def _brightest(x: NDArray[np.generic]) -> float:
    """Return the largest size of a pixel; 0 for what are no images in memory."""
    if not isinstance(x, np.ndarray) or x.ndim != 4 or x.dtype.kind != "f" or not x.size:
        return 0.0
    return max(float(np.fmax.reduce(x, axis=None)), -float(np.fmin.reduce(x, axis=None)))  # images are not copied


def _gives_shares(model: nn.Module, silos: Sequence[Silo]) -> bool:
    """Whether a model's outputs are in [0, 1] for rows of any size."""
    if silos[0].x.dtype.kind in "iu":
        return False
    generator = torch.Generator().manual_seed(0)
    rows = 100 * torch.randn(16, *row_shape(silos), generator=generator, dtype=torch.float64)
    try:
        outputs = modules.outputs_of(copied(model).cpu(), rows.to(dtype_of(model)))
    except Exception:  # noqa: BLE001  # a model of somebody's may take no such rows, and then nothing is said
        return False
    return outputs.shape[1] > 1 and bool((outputs.min() >= 0) & (outputs.max() <= 1))
