"""BatchNorm by forward passes: the statistics that normalise, and the running ones that the server keeps.

    silo c      each of its K losses is normalised by the statistics of its own batch at the perturbed parameters;
                it uploads mean m_c and variance v_c of each layer's inputs at w too, of one forward pass more
    masked sum  sum_c N_c m_c / N and sum_c N_c v_c / N, each v_c over N_c - 1, as in PyTorch
    server      running <- (1 - momentum) running + momentum times that; released and tested models have these

FedSGD's silos do so too: their running statistics are those of one update each from the server's. No silo needs the
running ones, so none receives them. A loss then belongs to a batch and not to a row, so it excludes all that separates
rows: noise on rows' scalars, edge clients that run a few rows at a time.

Differs from the paper, which advises against BatchNorm (its fourth guideline) and does not describe the comparison; the
authors' code perturbs the running statistics along with the parameters, and averages none.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from moretta.contract.messages import Array

RUNNING = ("running_mean", "running_var")
COUNTER = "num_batches_tracked"


def layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the layers with batch statistics and running ones, by name."""
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    return {name: norm for name, norm in norms.items() if norm.training and norm.running_mean is not None}


def moving(model: nn.Module) -> frozenset[str]:
    """Return the names of the buffers that change from round to round: running statistics and counters."""
    return frozenset(f"{name}.{key}" for name in layers(model) for key in (*RUNNING, COUNTER))


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a silo's statistics, by the names of the running ones."""
    return {f"{name}.{key}": (norm.num_features,) for name, norm in layers(model).items() for key in RUNNING}


def stepped(model: nn.Module, means: Mapping[str, Array]) -> dict[str, Array]:
    """Return the running statistics after a round. means: the silos', by the names of `shapes`."""
    buffers = {}
    for name, norm in layers(model).items():
        count = 0 if norm.num_batches_tracked is None else int(norm.num_batches_tracked)
        momentum = 1 / (count + 1) if norm.momentum is None else norm.momentum
        for key in RUNNING:
            old = getattr(norm, key).numpy(force=True).astype(np.float64)
            buffers[f"{name}.{key}"] = old + momentum * (means[f"{name}.{key}"] - old)
    return buffers


@contextmanager
def noted(model: nn.Module) -> Iterator[None]:
    """Have forward passes write a batch's own statistics into the buffers; outside they write nothing."""
    norms = layers(model).values()
    kept = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum, norm.track_running_stats = 1.0, True
    try:
        yield
    finally:
        for norm, momentum in zip(norms, kept, strict=True):
            norm.momentum, norm.track_running_stats = momentum, False
