"""What silos are not to hold: the true start, and two released models under one key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from moretta import PBPFL, Federation, SecureAggregation, Silo
from moretta.audit.attacks.pbpfl.scales import bits_of
from moretta.contract.messages import Stamp
from moretta.engines.checkpoint import last_checkpoint
from moretta.protocols.pbpfl import softmax
from moretta.protocols.pbpfl.messages import Predictions
from moretta.protocols.pbpfl.perturbation import Perturbation
from moretta.protocols.pbpfl.scales import ScalePlan
from moretta.protocols.registry import build
from moretta.run.inputs import RunRows
from moretta.secure_aggregation.keystream import SecretRoot


def federation_of(out: Path | None = None) -> Federation:
    random = np.random.default_rng(0)
    silos = [Silo(name, random.normal(size=(20, 4)), random.integers(0, 2, 20)) for name in "ab"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    return Federation(model, silos, PBPFL(), aggregation=SecureAggregation(scheme="none"), dtype="float64", out=out)


def test_a_silo_begins_without_the_true_weights() -> None:
    federation = federation_of()
    players = build(federation._setting(0, 3))
    for client in players.clients.values():
        assert all((parameter == 0).all() for parameter in client._noisy.own.parameters())


def test_two_releases_of_one_run_are_under_two_keys(tmp_path: Path) -> None:
    """Under one key their quotient would be that of the true weights, to the last digit."""
    federation = federation_of(tmp_path / "run")
    first = federation.train(3)
    second = federation.train(6, resume=True)

    def scales(result: object) -> np.ndarray:
        true, released = (next(module.parameters()).detach().numpy() for module in (result.model, result.released))
        return np.sort(np.abs(np.linalg.norm(released, axis=1) / np.linalg.norm(true, axis=1)))

    assert not np.allclose(scales(first), scales(second))


def test_the_exponents_of_powers_of_two_average_out_over_rounds() -> None:
    """What the report says of ``scales = "powers-of-two"``: signs and mantissas are plain, in time exponents too."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5))
    perturbation = Perturbation(ScalePlan.of(model, (torch.zeros(2, 3),)), 1, "probabilities", "powers-of-two")
    stream = SecretRoot.insecure(0, "server").stream("powers of two")
    true = model[0].weight.detach().numpy()
    keys = [perturbation.draw_key(stream, 1.0) for _ in range(300)]
    noisy = np.stack([perturbation.perturb(model.state_dict(), key)["0.weight"] for key in keys])
    assert not np.array_equal(noisy[0], noisy[1])
    mantissa, exponent = np.frexp(noisy)
    np.testing.assert_array_equal(mantissa, np.broadcast_to(np.frexp(true)[0], noisy.shape))
    # The mean of 300 exponents from -1, 0 and 1 is 10 of its deviations away from 1/2.
    np.testing.assert_array_equal(np.ldexp(mantissa[0], np.rint(exponent.mean(0)).astype(int)), true)


def test_two_rounds_under_powers_of_two_give_the_offset_of_the_head_without_labels() -> None:
    """What the report says of them: what two consecutive models show is enough, no label and no true value besides.

    With q_j = s'_j / s_j from what feeds input j of the head, q_j W^'_ij - W^_ij = r'_i q_j - r_i + (step_ij / s_j).
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)).double()
    perturbation = Perturbation(ScalePlan.of(model, (torch.zeros(2, 10),)), 1, "probabilities", "powers-of-two")
    stream = SecretRoot.insecure(0, "server").stream("two rounds")
    first, second = (perturbation.draw_key(stream, 0.3) for _ in range(2))
    before = model[4].weight.detach().numpy().copy()
    seen = [perturbation.perturb(model.state_dict(), first)]
    loss = nn.functional.cross_entropy(model(torch.randn(64, 10).double()), torch.arange(64) % 3)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter -= 0.02 * gradient
    seen.append(perturbation.perturb(model.state_dict(), second))

    q = 2.0 ** np.rint(np.log2(seen[1]["2.bias"] / seen[0]["2.bias"]))
    assert len(set(q)) > 2
    heads = [one["4.weight"] for one in seen]
    unknowns = np.stack([q, -np.ones(32)], axis=1)
    for output in range(3):
        found, *_ = np.linalg.lstsq(unknowns, q * heads[1][output] - heads[0][output], rcond=None)
        np.testing.assert_allclose(found, [second.offset[output], first.offset[output]], rtol=0.01)
        # .. and what is left of the head is its weights, up to powers of two that average out.
        left = (heads[0][output] - found[1]) / perturbation.plan.multiplier("4.weight", first.scales)[0]
        assert np.linalg.norm(left - before[output]) <= 0.01 * np.linalg.norm(before[output])


def test_deltas_are_of_one_prediction_of_one_silo_in_one_take() -> None:
    federation = federation_of()
    server = build(federation._setting(0, 3)).server

    def drawn(number: int = 1, attempt: int = 0, take: int = 0, silo: str = "a", z: float = -1.0) -> list[float]:
        now = Stamp("run", number, attempt, take)
        found = Predictions(stamp=now, z=np.array([[0.0, z]]), alpha=np.ones(1))
        values: list[float] = server._deltas(now, silo, found).uniform(4).tolist()
        return values

    others = [drawn(number=2), drawn(take=1), drawn(silo="b"), drawn(z=-2.0)]
    assert len({tuple(values) for values in [drawn(), *others]}) == 5
    # Another attempt asks for the same sum: were its softmax another, it would be another sum of the same rows.
    assert drawn(attempt=1) == drawn()


def test_delta_stays_within_one_and_p_is_what_is_left() -> None:
    model = nn.Linear(3, 5).double()
    plan = ScalePlan.of(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5)), (torch.zeros(2, 3),))
    perturbation = Perturbation(plan, 2, "paper")
    stream = SecretRoot.insecure(0, "server").stream("test")
    key = perturbation.draw_key(stream, 1.0)
    from moretta.contract.messages import Stamp

    now = Stamp("run", 1, 0)
    z = model(torch.randn(50, 3).double()).detach().numpy()
    found = Predictions(stamp=now, z=z - z.max(1, keepdims=True), alpha=np.ones(50))
    true = softmax.true_softmax(found, key.offset)
    told = softmax.answer(true, key, "paper", stream, now, {})
    ratio = np.log(true.p / told.y)  # delta, of each row and part
    assert np.abs(ratio).max() <= 1 + 1e-12
    assert np.abs(ratio).max() > 0.9
    # p = y* - xi y~, with y~ = y* k
    np.testing.assert_allclose(told.y - (key.xi * told.k)[:, key.parts] * told.y, true.p, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_server_holds_more_bits_than_it_ever_sends(tmp_path: Path, dtype: str) -> None:
    """Neither a checkpoint, nor a step, nor the release brings W to the floats that are sent."""
    made = federation_of(tmp_path / "run")
    spec = replace(made.spec, run=made.spec.run.model_copy(update={"dtype": dtype}), protocol=PBPFL(momentum=0.9))
    federation = Federation.of(spec, made.model, RunRows(made.silos, made.test), made.out)
    result = federation.train(2)
    place, states = last_checkpoint(tmp_path / "run" / "checkpoint")
    assert place.round == 2
    kept = {name: value for name, value in states["server"].items() if isinstance(value, np.ndarray) and value.ndim}
    of_model = {name.removeprefix("model/"): value for name, value in kept.items() if name.startswith("model/")}
    assert {name.rpartition("/")[2] for name in kept} >= {"momentum_buffer"}
    for name, value in kept.items():
        if name.startswith(("model/", "optimizer/")):
            assert value.dtype == np.float64, name
    for name, parameter in result.model.named_parameters():
        assert parameter.dtype == getattr(torch, dtype)
        np.testing.assert_array_equal(parameter.detach().numpy(), of_model[name].astype(dtype))
        # Of four values or more, the low four bits of all are 0 once in 2^16; of fewer, more often.
        assert bits_of(of_model[name]) > (48 if of_model[name].size >= 4 else 41)
    bits = {"float32": 24, "float64": 41}[dtype]
    assert max(bits_of(one.detach().double().numpy()) for one in result.released.parameters()) == bits
