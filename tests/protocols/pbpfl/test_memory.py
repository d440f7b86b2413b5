"""What the server's arithmetic takes of memory: a tensor's worth beside its result, whatever the model's size."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from moretta.protocols.pbpfl.perturbation import Perturbation
from moretta.protocols.pbpfl.scales import ScalePlan
from moretta.secure_aggregation.keystream import Keystream

WIDTH, LAYERS = 96, 24
LARGEST = 8 * WIDTH**2  # bytes of the largest tensor in float64


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    inner = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*inner, nn.Linear(WIDTH, 3)).double()


def peak(work: Callable[[], object]) -> int:
    """Return the most memory that NumPy's arrays take while something works, beside what they took before."""
    work()  # what is cached is cached
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def test_the_server_perturbs_and_recovers_a_tensor_at_a_time() -> None:
    model = layers()
    perturbation = Perturbation(ScalePlan.of(model, (torch.zeros(2, WIDTH, dtype=torch.float64),)), 1, "squared-error")
    key = perturbation.draw_key(Keystream(bytes(32)), 0.1)
    tensors = model.state_dict(keep_vars=True)
    size = sum(4 * one.numel() for one in tensors.values())  # in float32
    assert size > 10 * LARGEST

    sent = peak(lambda: perturbation.perturb(tensors, key, torch.float32))
    assert size <= sent < size + 5 * LARGEST

    means = {"alpha_h": np.ones(WIDTH + 1)}
    for name, one in tensors.items():
        for prefix in ("noisy",) if name in ("48.weight", "48.bias") else ("noisy", "sigma/0", "beta"):
            means[f"{prefix}/{name}"] = np.random.default_rng(len(means)).normal(size=tuple(one.shape)) * 1e-3
    wanted = perturbation.recover(means, key)
    copies = {name: value.copy() for name, value in means.items()}
    found = perturbation.recover(copies, key, in_place=True)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)
        assert np.shares_memory(found[name], copies[f"noisy/{name}"])
    assert peak(lambda: perturbation.recover(copies, key, in_place=True)) < 7 * LARGEST  # of 24 in the result
