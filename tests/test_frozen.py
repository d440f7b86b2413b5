"""What is frozen is never changed: a model's parameters without a gradient keep their values, whatever their dtype.

Masks and places are kept as parameters by many models. Those that are moved by 2^-23 are no longer equal to 1, and a
place of 2.9999998 is 2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_cli import call
from torch import Tensor, nn

import moretta
from moretta import BAFFLE, CGD, PBPFL, Centralised, FedAvg, Federation, FedProx, FedSGD, Local, Silo
from moretta.errors import ParameterError
from moretta.protocols.common import modules
from moretta.protocols.pbpfl.exactness import Input, check
from moretta.protocols.pbpfl.scales import ScalePlan
from moretta.secure_aggregation.keystream import SecretRoot

PROTOCOLS: tuple[Any, ...] = (Centralised, Local, FedSGD, FedAvg, FedProx, PBPFL, CGD, BAFFLE)
DTYPES = (torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool)
CODE = """
from test_frozen import Ordered, torch

def build(dtype):
    torch.manual_seed(0)
    return Ordered(getattr(torch, dtype))
"""
RUN = """
[run]
rounds = 2
[data]
source = "rows.npz"
silos = 2
[model]
source = "ordered:build"
dtype = "{}"
[protocol]
name = "pbpfl"
loss = "cross-entropy"
"""


class Ordered(nn.Module):
    """Reads some columns, and hidden units in a given order, by a mask and places that are parameters."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        places = torch.arange(5, -1, -1)
        self.mask = nn.Parameter(torch.tensor([1, 1, 1, 1, 0, 0, 0, 0]).to(dtype), requires_grad=False)
        self.places = nn.Parameter(places % 2 if dtype == torch.bool else places.to(dtype), requires_grad=False)
        self.first, self.head = nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x * (self.mask == 1)))
        return self.head(hidden[:, self.places.long()])


def rows(seed: int, count: int = 30) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)
    return x, (x[:, :4].sum(1) > 0).astype(np.int64)


def ordered(dtype: torch.dtype) -> Ordered:
    torch.manual_seed(0)
    return Ordered(dtype)


def federation(model: Any, kind: Any, out: Path | None = None) -> Federation:
    settings: dict[str, Any] = {"k": 4} if kind is BAFFLE else {}
    silos = [Silo(name, *rows(seed)) for seed, name in enumerate(("north", "south"))]
    protocol = kind(loss="cross-entropy", learning_rate=0.3, **settings)
    return Federation(model, silos, protocol, test=rows(9), out=out)


@pytest.mark.parametrize("kind", PROTOCOLS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_frozen_keeps_its_values(kind: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    model = ordered(dtype)
    federation(model, kind, tmp_path / "run").train(1, seed=7)
    result = federation(model, kind, tmp_path / "run").train(2, seed=7, resume=True)
    own: dict[str, Any] = {"silo": "north"} if result.models else {}
    ours: Any = result.models["north"] if own else result.model
    loaded = moretta.load(result.save(tmp_path / "saved"), **own)
    for trained in (ours, loaded.network):
        for name in ("mask", "places"):
            kept, found = model.get_parameter(name), dict(trained.state_dict())
            (there,) = (value for key, value in found.items() if key.endswith(name))
            assert torch.equal(there.to(kept.dtype), kept)
            assert there.dtype == (kept.dtype if not kept.is_floating_point() else torch.float32)
        assert not torch.equal(trained.state_dict()["head.weight"], model.head.weight)
    assert (loaded.predict(rows(5)[0]) == result.predict(rows(5)[0], **own)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_such_a_model_is_checked_exported_and_predicts_alike(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    Path("ordered.py").write_text(CODE)
    np.savez("rows.npz", x_train=rows(0)[0], y_train=rows(0)[1], x_test=rows(1)[0], y_test=rows(1)[1])
    Path("run.toml").write_text(RUN.format(str(dtype).removeprefix("torch.")))
    assert check(ordered(dtype), [Input((8,))], 2, PBPFL(loss="cross-entropy"))["passes"]
    for words in (("train", "run.toml", "--out", "run"), ("export", "run", "--allow-code", "--out", "m.onnx")):
        done = call(*words)
        assert done.code == 0, done.err
    x = rows(5)[0]
    model = moretta.load("run", allow_code=True)
    with torch.no_grad():
        outputs = model(torch.tensor(x)).numpy()
    session = runtime.InferenceSession("m.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x})[0], outputs, atol=1e-5)


def test_the_initial_move_is_of_what_trains_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    start, before = modules.first_weights(model).state_dict(), model.state_dict()
    assert torch.equal(start["0.weight"].float(), before["0.weight"])
    moved = (start["2.weight"] - before["2.weight"].double()).abs()
    assert 0 < float(moved.max()) < 1e-5


def test_silos_are_sent_what_is_frozen_as_it_is_and_an_adapter_keeps_one_scale_a_rank() -> None:
    """Silos may know it, and else they have it as an average over rounds: then it opens the scales beside it."""
    frozen = nn.Linear(3, 3).double().requires_grad_(False)
    adapter = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)).double()
    model = nn.Sequential(nn.Linear(4, 3), frozen, adapter, nn.ReLU(), nn.Linear(3, 2)).double()
    plan = ScalePlan.of(model, (torch.zeros(2, 4),))
    key = plan.draw(SecretRoot.insecure(1, "frozen").stream("key"))
    sent = plan.perturb(dict(model.named_parameters()), key)
    assert all(torch.equal(sent[name], model.get_parameter(name)) for name in ("1.weight", "1.bias"))
    assert not torch.equal(sent["2.0.weight"], model.get_parameter("2.0.weight"))
    assert {one.tensor: one.because for one in plan.forced}["1.weight"].startswith("it is frozen")


def test_parameters_of_complex_numbers_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(8, 2))
    model.register_parameter("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    with pytest.raises(ParameterError, match=r"`phase`: expected real numbers, got torch.complex64; keep real and"):
        federation(model, FedSGD).train(1)
