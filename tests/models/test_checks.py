"""A model that a run names does not exhaust who builds it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from moretta.errors import ParameterError
from moretta.models import catalogue
from moretta.models.checks import build_within, copied


def mlp(hidden: list[int]) -> nn.Module:
    return catalogue.build("mlp", inputs=(4,), outputs=3, hidden=hidden)


def test_a_model_within_the_limit_is_what_it_is_without() -> None:
    made, plain = build_within(43, lambda: mlp([5])), mlp([5])
    assert all(torch.equal(one, other) for one, other in zip(made.parameters(), plain.parameters(), strict=True))
    with pytest.raises(ParameterError, match=r"has 43 numbers or more in 4 tensors, but \[limits\]"):
        build_within(42, lambda: mlp([5]))


@pytest.mark.parametrize("hidden", [[2**31, 2**31], [2**28]])
def test_what_would_fill_the_memory_is_refused_before_it_takes_any(hidden: list[int]) -> None:
    """Of [2^31, 2^31] a site took 2^64 bytes, or what the machine had."""
    with pytest.raises(ParameterError, match="allows 100000000 in 10000 here; raise it"):
        build_within(100_000_000, lambda: mlp(hidden))


def test_as_many_layers_as_one_likes_are_refused_early() -> None:
    made: list[int] = []

    def build() -> nn.Module:
        layers = nn.ModuleList()
        for number in range(10**9):
            made.append(number)
            layers.append(nn.Linear(1, 1))
        return layers

    with pytest.raises(ParameterError, match="in 10001 tensors"):
        build_within(100_000_000, build)
    assert len(made) < 6000


def test_code_that_cannot_do_without_memory_is_counted_as_it_is_built() -> None:
    def build() -> nn.Module:
        return nn.ModuleList(nn.Linear(10, 10 + int(torch.zeros(1).item())) for _ in range(10**9))  # no `item` on meta

    with pytest.raises(ParameterError, match="allows 1000 in 10000"):
        build_within(1000, build)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds what a process reserves")
def test_a_job_that_reserves_more_than_its_limit_is_stopped_by_the_system() -> None:
    """Without ONNX Runtime, which a site with PyTorch may not have."""
    script = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "import numpy as np\nfrom moretta.engines.usage import cap\n"
        "cap(1.0)\n"
        "try:\n    np.ones(1 << 29, np.uint8)\nexcept MemoryError:\n    print('stopped')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "stopped\n"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_with_a_parametrization_is_refused_by_its_name(kind: Any) -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(kind(4, 5), "weight_hh_l0"))
    with pytest.raises(
        ParameterError,
        match=r"layer `0` cannot be copied, because a recurrent layer .*use torch\.nn\.utils\.weight_norm or",
    ):
        copied(model)
