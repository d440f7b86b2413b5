"""Fused, exact-ring and the messages themselves come to the same models, which are those of the paper's boxes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from grids import (
    CLASSES,
    FIRST,
    SEED,
    Run,
    Seen,
    apart,
    columns_of,
    contributor_of,
    furthest,
    grid,
    network,
    oracle,
    participants,
    run,
    table,
    watched,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from moretta import CGD, SecureAggregation, Silo
from moretta.contract.messages import Tensors
from moretta.data.holders import grid_of
from moretta.errors import ParameterError
from moretta.protocols.cgd import local as local_module
from moretta.protocols.cgd import simulation
from moretta.protocols.cgd.messages import Deltas, Join, Partial
from moretta.protocols.cgd.roles import WholeModels
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.roles import Roles

DELTA = (0.1, 0.3)
JOINT = grid([9, 5, 12], [4, 1, 3], holders=[1, 0, 2], order=[3, 0, 7, 5, 2, 6, 1, 4])
INDEPENDENT = grid([9, 5, 12], [4, 1, 3], joint=False, order=[3, 0, 7, 5, 2, 6, 1, 4])
SHUFFLED = [INDEPENDENT[n] for n in (7, 0, 5, 8, 3, 1, 2, 6, 4)]
ROWS = grid([9, 5, 12, 1], [6])

AUTHORS = {"hidden_bias": "shared", "batches": "in-order", "weight_decay": 0.1}
CASES: dict[str, tuple[list[Silo], dict[str, Any], dict[str, Any]]] = {
    "joint": (JOINT, {}, {}),
    "joint, one delta": (JOINT, {"delta": 0.2}, {}),
    "joint, a delta each": (JOINT, {"delta": {silo.name: 0.05 * (n + 1) for n, silo in enumerate(JOINT)}}, {}),
    "joint, a batch": (JOINT, {}, {"batch_size": 5}),
    "joint, two rows": (grid([4, 11], [3, 2], holders=1), {}, {}),
    "joint, around the model": (JOINT, {"around": "model"}, {}),
    "joint, one column part alone": (grid([7, 6], [5, 1], holders=1), {}, {"batch_size": 4}),
    "joint, decaying": (JOINT, {"schedule": "inverse-square", "mu": 0.2, "decay_from": 1}, {}),
    "joint, not blind": (JOINT, {"blind": False}, {}),
    "joint, standardised": (JOINT, {}, {"standardise": True}),
    "joint, in the clear": (JOINT, {}, {"scheme": "none"}),
    "joint, shares": (JOINT, {}, {"scheme": "additive-shares"}),
    "joint, shares, not blind": (JOINT, {"blind": False}, {"scheme": "additive-shares"}),
    "one row": (grid([9], [4, 2, 3], holders=2), {}, {}),
    "one row, standardised": (grid([9], [4, 2, 3], holders=2), {}, {"standardise": True}),
    "independent": (INDEPENDENT, {"vertical": "independent"}, {}),
    "independent, silos in any order": (SHUFFLED, {"vertical": "independent"}, {"batch_size": 5}),
    "independent, a batch": (INDEPENDENT, {"vertical": "independent"}, {"batch_size": 5}),
    "independent, standardised": (INDEPENDENT, {"vertical": "independent"}, {"standardise": True}),
    "independent, one row": (grid([9], [4, 2], joint=False), {"vertical": "independent"}, {"standardise": True}),
    "independent, shares": (INDEPENDENT, {"vertical": "independent"}, {"scheme": "additive-shares"}),
    "rows": (ROWS, {}, {}),
    "rows, a batch": (ROWS, {}, {"batch_size": 5}),
    "rows, standardised": (ROWS, {}, {"standardise": True}),
    "rows, not blind": (ROWS, {"blind": False}, {}),
    "rows, shares": (ROWS, {}, {"scheme": "additive-shares"}),
    "rows, independent": (ROWS, {"vertical": "independent"}, {}),
    "rows, as the authors' code": (ROWS, AUTHORS, {"batch_size": 5}),
    "joint, as the authors' code": (JOINT, AUTHORS, {"batch_size": 5}),
    "independent, as the authors' code": (INDEPENDENT, {**AUTHORS, "vertical": "independent"}, {"batch_size": 5}),
    "one row, regularised": (grid([9], [4, 2, 3], holders=2), {"weight_decay": 0.1}, {}),
    "joint, a shared bias of the model": (JOINT, {"around": "model", "hidden_bias": "shared"}, {}),
}
ENGINES = ("fused", "exact-ring", "in-process")


def by_all(silos: list[Silo], protocol: dict[str, Any], rest: dict[str, Any], rounds: int = 4) -> dict[str, Run]:
    settings = CGD.model_validate({"delta": DELTA, **protocol})
    return {engine: run(silos, rounds, settings, engine, **rest) for engine in ENGINES}


IN_32_BITS = {"joint, a batch", "joint, standardised", "independent", "rows"}


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "float64") for case in CASES), *((case, "float32") for case in sorted(IN_32_BITS))]
)
def test_three_ways_to_the_same_models(case: str, dtype: str) -> None:
    most = {"float64": 1e-9, "float32": 1e-5}[dtype]
    silos, protocol, rest = CASES[case]
    found = by_all(silos, protocol, {**rest, "dtype": dtype})
    joint, split = protocol.get("vertical") != "independent", bool(silos[0].columns)
    assert set(found["fused"].models) == {silo.row if joint and split else silo.name for silo in silos}
    for engine in ENGINES[1:]:
        assert apart(found[engine], found["fused"]) < most
    lines = [[line.get("loss") for line in one.result.history] for one in found.values()]
    np.testing.assert_allclose(lines[0], lines[1], rtol=1e-5)
    if protocol.get("blind") is False or rest.get("scheme") == "none":
        np.testing.assert_allclose(lines[0], lines[2], rtol=1e-5)
    else:
        assert lines[2] == [None] * len(lines[0])
    if rest.get("standardise"):
        return
    # And all are what the boxes of Algorithms 1 and 2 come to.
    settings = CGD.model_validate({"delta": DELTA, **protocol})
    rates = [settings.rate(number, 4) for number in range(1, 5)]
    fused = found["fused"]
    kind = {"decay": settings.weight_decay, "in_order": settings.batches == "in-order"}
    models, displacement = oracle(fused.starts, silos, rates, batch_size=rest.get("batch_size", 0), **kind)
    assert set(models) == set(fused.models)
    assert all(furthest(fused.models[owner], models[owner]) < most for owner in models)
    if not {"around", "hidden_bias"} & set(protocol):
        assert furthest(fused.displacement, displacement) < most


@pytest.mark.parametrize("scheme", ["pairwise", "additive-shares"])
@pytest.mark.parametrize("case", ["joint", "independent", "rows"])
def test_in_32_bits_the_ring_and_the_messages_agree(case: str, scheme: str) -> None:
    silos, protocol, _ = CASES[case]
    secure = SecureAggregation.model_validate({"scheme": scheme, "ring_bits": 32})
    found = by_all(silos, protocol, {"aggregation": secure})
    assert apart(found["in-process"], found["exact-ring"]) < 1e-9  # they round to the same whole numbers
    assert 1e-9 < apart(found["exact-ring"], found["fused"]) < 1e-5  # 4 steps of 0.5 * 2^-26 or so, on D of 0.01 and up


def test_uneven_batches_of_32_bits() -> None:
    secure = SecureAggregation.model_validate({"ring_bits": 32})
    found = by_all(JOINT, {}, {"aggregation": secure, "batch_size": 5})
    assert apart(found["in-process"], found["exact-ring"]) < 1e-5


PHASES = (Phase.explicit, Phase.generate)  # a grid that fails is small as it is


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[Silo], dict[str, Any], dict[str, Any]]:
    rows = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    columns = draw(st.lists(st.integers(1, 4), min_size=1 if len(rows) > 1 else 2, max_size=4))
    joint = draw(st.booleans())
    holders = draw(st.lists(st.integers(0, len(columns) - 1), min_size=len(rows), max_size=len(rows)))
    order = draw(st.permutations(range(sum(columns))))
    silos = draw(st.permutations(grid(rows, columns, joint=joint, holders=holders, order=order)))
    protocol = {"vertical": "joint" if joint else "independent"}
    rest = {"batch_size": draw(st.sampled_from([0, 1, 3])), "standardise": draw(st.booleans())}
    return silos, protocol, rest


@settings(derandomize=True, database=None, phases=PHASES)
@given(grids())
def test_any_grid(case: tuple[list[Silo], dict[str, Any], dict[str, Any]]) -> None:
    found = by_all(*case, rounds=3)
    assert apart(found["exact-ring"], found["fused"]) < 1e-8  # D is as small as it likes
    assert apart(found["in-process"], found["fused"]) < 1e-8


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(grids())
def test_any_grid_at_length(case: tuple[list[Silo], dict[str, Any], dict[str, Any]]) -> None:
    found = by_all(*case, rounds=5)
    assert apart(found["exact-ring"], found["fused"]) < 1e-8
    assert apart(found["in-process"], found["fused"]) < 1e-8


# -- limits of the grid ------------------------------------------------------------------------------------------------


def begin_at(starts: dict[str, Tensors]) -> Any:
    """Have participants of a grid that is split by rows alone begin at given models."""

    def wrap(players: Roles) -> None:
        for name, client in participants(players).items():
            client._start = {tensor: np.array(value) for tensor, value in starts[name].items()}

    return wrap


def test_a_split_of_columns_changes_nothing() -> None:
    split = grid([9, 5, 12], [4, 1, 3], holders=1, order=[3, 0, 7, 5, 2, 6, 1, 4])
    whole = grid([9, 5, 12], [8])
    with_parts = run(split, 6)
    composed = {f"silo-{row.removeprefix('row-')}": tensors for row, tensors in with_parts.starts.items()}
    side_by_side = run(whole, 6, wrap=begin_at(composed))
    for row, tensors in with_parts.models.items():
        assert furthest(tensors, side_by_side.models[f"silo-{row.removeprefix('row-')}"]) < 1e-9
    # The composed starts are of everybody's own noise: one holder's part says nothing of another's.
    parts = [with_parts.starts["row-0"][FIRST][:, list(silo.columns)] for silo in split[:3]]
    assert len({part.tobytes() for part in parts}) == 3
    assert {tensors[FIRST].tobytes() for tensors in with_parts.starts.values()} != {parts[0].tobytes()}
    assert len({tensors[FIRST].tobytes() for tensors in with_parts.starts.values()}) == 3


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("columns", [[6], [4, 2]])
def test_one_row_is_plain_gradient_descent(engine: str, columns: list[int]) -> None:
    silos = grid([17], columns, holders=len(columns) - 1)
    protocol = CGD(delta=0.2, learning_rate=0.4)
    for rounds in (1, 4):
        found = run(silos, rounds, protocol, engine, scheme="none")
        (start,), (end,) = found.starts.values(), found.models.values()
        model, (x, y) = network(6).double(), table(17, 6)
        model.load_state_dict({name: torch.tensor(value) for name, value in start.items()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
        for _ in range(rounds):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.tensor(x)), torch.tensor(y)).backward()
            optimizer.step()
        assert furthest(end, {name: value.numpy() for name, value in model.state_dict().items()}) < 1e-11


@pytest.mark.parametrize(("vertical", "loss"), [("joint", "mse"), ("independent", "cross-entropy")])
def test_networks_without_biases_and_of_one_layer(vertical: str, loss: str) -> None:
    joint = vertical == "joint"
    silos = grid([9, 5, 12], [4, 1, 3], joint=joint, holders=1)
    protocol = {"vertical": vertical, "loss": loss}
    one_layer = nn.Sequential(nn.Linear(8, CLASSES))
    flat = nn.Sequential(nn.Flatten(), *network(8))
    for model in (network(8, bias=False), one_layer, nn.Sequential(*flat, nn.LayerNorm(CLASSES))):
        found = by_all(silos, protocol, {"model": model}, rounds=2)
        assert apart(found["exact-ring"], found["fused"]) < 1e-9
        assert apart(found["in-process"], found["fused"]) < 1e-9


@pytest.mark.parametrize("vertical", ["joint", "independent"])
def test_a_first_layer_may_have_a_frozen_bias_but_no_frozen_weight(vertical: str) -> None:
    """Both ended with a KeyError."""
    silos = grid([9, 5, 12], [4, 1, 3], joint=vertical == "joint", holders=1)
    model, protocol = network(8), {"vertical": vertical, "around": "model"}
    model.get_parameter("0.bias").requires_grad_(False)
    found = by_all(silos, protocol, {"model": model}, rounds=2)
    assert apart(found["exact-ring"], found["fused"]) < 1e-9
    assert apart(found["in-process"], found["fused"]) < 1e-9
    model.get_parameter(FIRST).requires_grad_(False)
    for engine in ENGINES:
        with pytest.raises(ParameterError, match=r"trains its first layer; `0\.weight` is frozen"):
            run(silos, 1, CGD.model_validate(protocol), engine, model=model)


def test_samples_of_two_dimensions_are_standardised_alike() -> None:
    """The simulation ended with a ValueError: it had flattened them before it looked for their columns."""
    silos = [dataclasses.replace(silo, x=silo.x.reshape(-1, 2, 3)) for silo in grid([9, 5, 12], [6])]
    found = by_all(silos, {}, {"model": nn.Sequential(nn.Flatten(), *network(6)), "standardise": True})
    assert apart(found["exact-ring"], found["fused"]) < 1e-9
    assert apart(found["in-process"], found["fused"]) < 1e-9


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("case", ["joint", "joint, a batch", "independent"])
def test_blocks_of_any_length_come_to_the_same(case: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    silos, protocol, rest = CASES[case]
    settings = CGD.model_validate({"delta": DELTA, **protocol})
    at_once = run([*silos, *twins(silos)], 3, settings, "fused", **rest)
    monkeypatch.setattr(simulation, "BLOCK", rows)
    for engine in ENGINES[:2]:
        assert apart(run([*silos, *twins(silos)], 3, settings, engine, **rest), at_once) < 1e-9


def twins(silos: list[Silo]) -> list[Silo]:
    """As many rows of the grid again, so that neighbours have equally many rows."""
    last = silos[-3:]
    return [
        dataclasses.replace(silo, name=f"{silo.name}-{n}", row=f"{silo.row}-{n}") for n in range(4) for silo in last
    ]


def test_losses_fall_and_models_differ() -> None:
    found = run(JOINT, 60, CGD(delta=0.2), "exact-ring")
    losses = [line["loss"] for line in found.result.history]
    assert losses[-1] < 0.5 * losses[0]
    assert len({tensors[FIRST].tobytes() for tensors in found.models.values()}) == 3


# -- step by step ------------------------------------------------------------------------------------------------------


def test_each_step_of_the_messages_is_the_fused_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """z, Delta, G_U and G1 of DESIGN.md, section 5, steps 2 to 8, against one product over all rows."""
    heads: list[tuple[Any, Any, Any]] = []
    sums: list[tuple[str, str, int, Any]] = []
    head_pass = local_module.head_pass

    def noted(layers: Any, weights: Any, z: Any, targets: Any, loss: Any, phase: Any, passes: Any) -> Any:
        before = torch.as_tensor(z).clone().numpy()
        delta, local = head_pass(layers, weights, z, targets, loss, phase, passes)
        heads.append((before, delta.numpy().copy(), local))
        return delta, local

    monkeypatch.setattr(local_module, "head_pass", noted)
    seen = Seen()

    def wrap(players: Roles) -> None:
        watched(seen)(players)
        for name, client in participants(players).items():
            for group in client._contributors:
                contributor = contributor_of(client, group)
                read = contributor.read

                def reading(
                    stamp: Any, *args: Any, asked: Any, read: Any = read, name: str = name, group: str = group
                ) -> Any:
                    total = read(stamp, *args, asked=asked)
                    sums.append((name, group, stamp.round, total))
                    return total

                monkeypatch.setattr(contributor, "read", reading)

    silos, rounds, rate = JOINT, 3, 0.5
    found = run(silos, rounds, CGD(delta=DELTA, learning_rate=rate), wrap=wrap)

    x, y = table(26, 8)
    begins = np.cumsum([0, 9, 5, 12])
    model = network(8).double()
    displacement = {name: np.zeros(tuple(value.shape)) for name, value in model.named_parameters()}
    for number in range(1, rounds + 1):
        joins = [ask for _, ask in seen.asked(Join) if ask.stamp.round == number]
        assert len(joins) == 3
        total = {name: np.zeros_like(value) for name, value in displacement.items()}
        for row in range(3):
            own = {
                name: torch.tensor(found.starts[f"row-{row}"][name] + value, requires_grad=True)
                for name, value in displacement.items()
            }
            order = Batches(int(begins[row + 1] - begins[row]), 0, SEED, f"row-{row}").of_round(number)
            rows = begins[row] + order
            before = torch.tensor(x[rows]) @ own[FIRST].T
            z = before.detach().requires_grad_()
            upper = {name: value for name, value in own.items() if name != FIRST}
            hidden = torch.tanh(z + upper["0.bias"])
            hidden = torch.tanh(hidden @ upper["2.weight"].T + upper["2.bias"])
            outputs = hidden @ upper["4.weight"].T + upper["4.bias"]
            summed = nn.functional.cross_entropy(outputs, torch.tensor(y[rows]), reduction="sum")
            delta, *gradients = torch.autograd.grad(summed, [z, *upper.values()])
            seen_z, seen_delta, local = heads[3 * (number - 1) + row]
            np.testing.assert_allclose(seen_z, before.detach().numpy(), rtol=0, atol=1e-11)
            np.testing.assert_allclose(seen_delta, delta.numpy(), rtol=0, atol=1e-11)
            assert local.rows == len(z)
            assert local.loss * len(z) == pytest.approx(float(summed.detach()), rel=1e-11)
            assert set(local.gradients) == set(upper)
            for name, gradient in zip(upper, gradients, strict=True):
                np.testing.assert_allclose(local.gradients[name] * len(z), gradient.numpy(), rtol=0, atol=1e-10)
                total[name] += gradient.numpy()
            total[FIRST] += delta.numpy().T @ x[rows]
        for name, group, at, one in sums:
            if at != number:
                continue
            assert one.weight == 26
            columns = next(silo.columns for silo in silos if silo.name == name)
            expected = {FIRST: total[FIRST][:, list(columns)]} if group != "heads" else total
            assert set(one.means) == ({FIRST} if group != "heads" else {*total, "loss"} - {FIRST})
            for tensor in set(one.means) - {"loss"}:
                np.testing.assert_allclose(one.means[tensor] * 26, expected[tensor], rtol=0, atol=1e-9)
        assert {(name, group) for name, group, at, _ in sums if at == number} == {
            *((silo.name, f"columns-{n % 3 + 1}") for n, silo in enumerate(silos)),
            *((silo.name, "heads") for silo in silos if len(silo.y)),
        }
        displacement = {name: value - rate * total[name] / 26 for name, value in displacement.items()}
    assert furthest(found.displacement, displacement) < 1e-9
    # What travels is the ring's: uniform words in, one sealed Delta a row out, never z or Delta themselves.
    partials = [answer for _, answer in seen.answered(Partial)]
    assert len(partials) == rounds * 6
    words = np.concatenate([partial.words.ravel() for partial in partials])
    assert abs(np.mean(words / 2.0**64) - 0.5) < 5 / np.sqrt(12 * words.size)
    sealed = [answer.sealed for _, answer in seen.answered(Deltas)]
    assert [one.size for one in sealed[:3]] == [9 * 7 * 8 + 28, 5 * 7 * 8 + 28, 12 * 7 * 8 + 28]
    assert columns_of(silos) == 8


def test_a_server_whose_participants_are_at_sites_has_no_confined_models() -> None:
    """It ended with a KeyError where it evaluates."""
    assert WholeModels(grid_of(JOINT), {}, [], None, True, {}, {}).models() == {}
