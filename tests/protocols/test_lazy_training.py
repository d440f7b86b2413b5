"""Rows that are read by batch train to the same bytes as the same rows in memory, and no more of them are ever made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from networks import seeded
from torch import nn

from moretta import (
    BAFFLE,
    CGD,
    PBPFL,
    Centralised,
    FedAvg,
    Federation,
    FedSGD,
    Local,
    Result,
    SecureAggregation,
    Silo,
)
from moretta.audit.evidence.truth import Truth
from moretta.contract import lazy_rows, memory
from moretta.contract.lazy_rows import LazyRows, as_array
from moretta.engines.settings import Engine
from moretta.errors import ParameterError
from moretta.protocols.common import modules

SHAPE, MOST = (2, 4, 4), 16  # of a sample; rows that may be made at once: a batch of 5 of each of three silos
PLAIN = SecureAggregation(scheme="none")

PROTOCOLS: dict[str, dict[str, Any]] = {
    "fedsgd": {"protocol": FedSGD(learning_rate=0.1)},
    "fedsgd standardised": {"protocol": FedSGD(learning_rate=0.1), "standardise": True},
    "fedsgd augmented": {"protocol": FedSGD(learning_rate=0.1), "augment": True},
    "fedsgd with noise": {"protocol": FedSGD(learning_rate=0.1, dp_noise=1.0, dp_clip=1.0)},
    "fedavg": {"protocol": FedAvg(learning_rate=0.1, local_epochs=2)},
    "local": {"protocol": Local(learning_rate=0.1)},
    "centralised": {"protocol": Centralised(learning_rate=0.1), "aggregation": PLAIN},
    "pbpfl": {"protocol": PBPFL(learning_rate=0.1)},
    "pbpfl mse": {"protocol": PBPFL(learning_rate=0.1, loss="mse")},
    "cgd": {"protocol": CGD(learning_rate=0.1, delta=0.1)},
    "baffle": {"protocol": BAFFLE(learning_rate=0.1, k=4)},
    "baffle by epochs": {"protocol": BAFFLE(learning_rate=0.1, k=4, local_epochs=1, optimizer="sgd")},
}


def images(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    y = random.integers(0, 3, count)
    return (random.random((count, *SHAPE)) + y[:, None, None, None]).astype(np.float32) / 4, y


def lazy(x: np.ndarray) -> np.ndarray:
    return as_array(LazyRows(lambda number: x[number], x.shape[1:], np.arange(len(x))))


def silos(*, held: bool) -> list[Silo]:
    made = [Silo(name, *images(seed, count)) for seed, (name, count) in enumerate([("a", 17), ("b", 21), ("c", 9)])]
    return [replace(silo, held_out=images(10 + k, 20)) if held else silo for k, silo in enumerate(made)]


def made_lazy(silo: Silo) -> Silo:
    held = silo.held_out and (lazy(silo.held_out[0]), silo.held_out[1])
    return replace(silo, x=lazy(silo.x), held_out=held)


def network() -> nn.Module:
    with seeded():
        layers = nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
        return nn.Sequential(*layers)


def train(*, read: bool, out: Path | None = None, **settings: Any) -> Result:
    """Train two rounds. read: from lazy rows, else from memory."""
    held = settings.get("score_at_silos", False)
    owners, test = silos(held=held), images(20, 19)
    given: dict[str, Any] = {
        "model": network(),
        "batch_size": 5,
        "insecure_secret_seed": 3,
        "evaluate_every": 1,
    } | settings
    return Federation(
        silos=[made_lazy(silo) for silo in owners] if read else owners,
        test=(lazy(test[0]), test[1]) if read else test,
        validation=(lazy(test[0][:11]), test[1][:11]) if read else (test[0][:11], test[1][:11]),
        out=out,
        **(given | settings),
    ).train(2, seed=5)


def bytes_of(result: Result) -> dict[str, bytes]:
    """Return what a run came to: parameters of all its models, and its scores."""
    modules = {"true": result.model, "released": result.released, **result.models}
    found = {
        f"{name}/{key}": tensor.numpy().tobytes()
        for name, module in modules.items()
        if module is not None
        for key, tensor in module.state_dict().items()
    }
    lines = [{key: value for key, value in line.items() if "second" not in key} for line in result.history]
    return found | {"test": json.dumps(result.test).encode(), "history": json.dumps(lines, default=str).encode()}


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have whatever makes more than `MOST` rows at once fail. Blocks are as small for rows in memory."""
    entries = int(np.prod(SHAPE))
    monkeypatch.setattr(modules, "CHUNK_NUMBERS", MOST * entries)
    monkeypatch.setattr(lazy_rows, "BLOCK_BYTES", MOST * entries * 4)
    monkeypatch.setattr(memory, "CHECKED_BYTES", 1)
    monkeypatch.setattr(memory, "free_memory", lambda: lazy_rows.COPIES * MOST * entries * 4)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("name", PROTOCOLS)
def test_rows_read_by_batch_train_to_the_same_bytes(name: str) -> None:
    settings = PROTOCOLS[name]
    assert bytes_of(train(read=True, **settings)) == bytes_of(train(read=False, **settings))


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("name", ["fedsgd", "cgd", "baffle"])
def test_scores_on_rows_held_back_are_the_same(name: str) -> None:
    settings = PROTOCOLS[name] | {"score_at_silos": True}
    read, there = (train(read=read, **settings) for read in (True, False))
    assert there.test["silos"]["rows"] == 60
    assert bytes_of(read) == bytes_of(there)


@pytest.mark.usefixtures("little_memory")
def test_a_round_of_all_rows_is_refused_where_they_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(
        ParameterError, match=r"17 rows at once take .* GiB of memory, and .* are free; use smaller batch"
    ):
        train(read=True, out=tmp_path / "out", batch_size=0, **PROTOCOLS["fedsgd"])
    assert not (tmp_path / "out").exists()


ALL_AT_ONCE: list[dict[str, Any]] = [
    {"batch_size": 0},
    {
        "engine": Engine(name="fused"),
        "protocol": CGD(delta=0.1),
        "model": nn.Sequential(nn.Flatten(), nn.Linear(32, 3)),
    },
]


@pytest.mark.parametrize("settings", ALL_AT_ONCE)
def test_what_needs_all_rows_loads_them(settings: dict[str, Any]) -> None:
    settings = PROTOCOLS["fedsgd"] | settings
    assert bytes_of(train(read=True, **settings)) == bytes_of(train(read=False, **settings))


def test_an_audit_has_the_rows_that_were_read(tmp_path: Path) -> None:
    found = []
    for read in (True, False):
        result = train(read=read, out=tmp_path / str(read), record_views=True, **PROTOCOLS["fedsgd"])
        assert result.played is not None
        truth = Truth(tmp_path / str(read), *result.played)
        found.append((truth.rows("b"), truth.background, truth.gradient("b", 2)))
    for one, other in zip(*(of[:2] for of in found), strict=True):
        np.testing.assert_array_equal(one.x, other.x)
    for name, gradient in found[0][2].items():
        np.testing.assert_array_equal(gradient, found[1][2][name])
