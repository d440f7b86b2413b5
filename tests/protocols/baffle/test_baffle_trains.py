"""BAFFLE's runs: they learn, and each of their steps is what the losses of perturbed models say it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from baffle_runs import (
    CLASSES,
    CLEAR,
    SEED,
    answering,
    client_of,
    farthest,
    learning,
    make,
    network,
    same_bytes,
    server_of,
    silos,
    table,
    weights,
)
from cast import casting
from forwards import FORMS
from networks import seeded
from numpy.typing import NDArray
from torch import nn

from moretta import BAFFLE, Engine, FedSGD, SecureAggregation, Silo
from moretta.contract.messages import Message
from moretta.contract.roles import answered
from moretta.errors import ParameterError
from moretta.protocols.baffle.silo.directions import Directions, keys_of
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.baffle.silo.messages import Estimate
from moretta.protocols.baffle.silo.recipe import LocalSteps
from moretta.protocols.baffle.silo.seeds import parameter_hash
from moretta.protocols.baffle.torch_forward import layout_of
from moretta.protocols.common.augmentation import cropped
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.modules import first_weights
from moretta.run.result import Result
from moretta.secure_aggregation.plain import PlainUpload

TEST = table(400, 5)
SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.2}

WAYS: dict[str, dict[str, Any]] = {
    **{form: {"form": form} for form in FORMS},
    "gaussian": {"direction": "gaussian"},
    "orthogonal": {"orthogonal": True, "form": "central"},
    "orthogonal, mean": {"orthogonal": True},
    "pool": {"seed_pool": 128, "learning_rate": 0.1},
    "pool, gaussian": {"seed_pool": 256, "direction": "gaussian"},
    "growing": {"k": 8, "k_last": 48},
    "falling": {"k": 48, "k_last": 8},
    "average": {"ema": 0.9},
    "sgd": SGD,
    "momentum": SGD | {"momentum": 0.5},
    "cosine": SGD | {"lr_schedule": "cosine", "learning_rate": 0.4},
    "clipped": SGD | {"clip_norm": 1.0},
    "smoothed": {"label_smoothing": 0.1},
    "class weights": {"class_weights": (1.0, 2.0, 0.5, 1.0)},
    "mse": {"loss": "mse", "learning_rate": 0.02},
    "epochs": SGD | {"local_epochs": 1},
    "epochs, adam": {"local_epochs": 1, "learning_rate": 0.02, "weight_decay": 1e-4},
    "own": {"directions": "own"},
    "own, gaussian, base": {"directions": "own", "direction": "gaussian", "form": "base"},
    "own, epochs": SGD | {"directions": "own", "local_epochs": 1},
    "epochs, base, gaussian": SGD | {"local_epochs": 2, "form": "base", "direction": "gaussian", "learning_rate": 0.1},
}


QUICK = {"mean", "base", "central", "gaussian", "orthogonal", "pool", "growing", "class weights", "epochs", "own"}


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way in QUICK else [pytest.mark.slow]) for way in WAYS])
def test_the_loss_falls_and_accuracy_is_beyond_chance(way: str) -> None:
    result = make(learning(**WAYS[way]), test=TEST, aggregation=CLEAR).train(30, SEED)
    losses = [line["loss"] for line in result.history]
    # Batches of 40 rows in all: their losses' means spread by some 15 %, so that a third less is no chance of them.
    assert np.mean(losses[-3:]) < (0.75 if way == "smoothed" else 0.65) * losses[0]
    assert result.test["accuracy"] > 0.25 + 5 * np.sqrt(0.25 * 0.75 / 400) + 0.2  # chance, 5 deviations, and something
    assert {line["rows"] for line in result.history} <= {40.0, 44.0, 48.0, 124.0, 28.0, 36.0, 32.0}


def test_numbers_are_learnt_too() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(0, 1, (90, 6))
    y = x @ generator.normal(0, 0.4, (6, 2))
    parts = [Silo(f"silo-{part}", x[part::3], y[part::3]) for part in range(3)]
    result = make(
        BAFFLE(loss="mse", k=24, learning_rate=0.05, ema=0.0),
        silos=parts,
        model=network(2),
        dtype="float64",
        test=(x, y),
    ).train(40, SEED)
    assert result.test["mse"] < 0.4 * np.square(y).mean()


# -- each step ---------------------------------------------------------------------------------------------------------


def row_losses(model: nn.Module, layout: Layout, at: NDArray[Any], x: Any, y: Any, protocol: BAFFLE) -> NDArray[Any]:
    """PyTorch's loss of each row at flat parameters."""
    state = {name: torch.tensor(value) for name, value in layout.split(at).items()}
    with torch.no_grad():
        outputs = torch.func.functional_call(model, state, (torch.tensor(x),))
    weight = torch.tensor(protocol.class_weights, dtype=torch.float64) if protocol.class_weights else None
    found = nn.functional.cross_entropy(
        outputs, torch.tensor(y), weight=weight, label_smoothing=protocol.label_smoothing, reduction="none"
    )
    return np.asarray(found)


def dense(protocol: BAFFLE, k: int, size: int, seed: bytes, *purpose: int | str | bytes) -> NDArray[np.float64]:
    """The round's directions as a matrix, from the seed that was agreed on."""
    count = 2 * k if protocol.form == "twice-forward" else k
    pool = protocol.seed_pool or 0
    keys = keys_of(seed, count, *purpose, orthogonal=protocol.orthogonal, pool=pool)
    of = Directions(keys, count, size, protocol.direction, orthogonal=protocol.orthogonal)
    return np.array([vector.copy() for together in of.perturbed(np.zeros(size), 1.0) for vector in together])


def own_estimate(protocol: BAFFLE, rows: NDArray[np.float64], losses: Any) -> NDArray[np.float64]:
    """The forms' table, of a function from parameters' displacement to the batch's mean loss."""
    sigma = protocol.sigma
    ahead = np.array([losses(sigma * row) for row in rows])
    if protocol.form == "mean":
        return (ahead - ahead.mean()) / sigma @ rows / (len(rows) - 1)
    if protocol.form == "central":
        behind = np.array([losses(-sigma * row) for row in rows])
        return (ahead - behind) / (2 * sigma) @ rows / len(rows)
    return (ahead - losses(0 * rows[0])) / sigma @ rows / len(rows)


@pytest.mark.parametrize("scheme", ["none", "pairwise"])
@pytest.mark.parametrize(
    "settings",
    [
        *({"form": form} for form in FORMS),
        {"direction": "gaussian", "form": "base"},
        {"orthogonal": True, "form": "central"},
        {"seed_pool": 32},
        {"label_smoothing": 0.2},
        {"class_weights": (1.0, 3.0, 0.5, 2.0)},
        {"class_weights": (1.0, 3.0, 0.5, 2.0), "label_smoothing": 0.2, "form": "base"},
    ],
    ids=str,
)
def test_a_round_is_a_step_along_the_estimate_of_the_union_of_the_batches(
    settings: dict[str, Any], scheme: Any
) -> None:
    protocol = learning(**{**SGD, "k": 10, **settings})
    secure = SecureAggregation(scheme=scheme)
    seen = list[Any]()
    with casting(answering("silo-0", Estimate, lambda honest, ask: (seen.append(ask), honest(ask))[1])) as players:
        result = make(protocol, aggregation=secure, dtype="float64").train(1, SEED)
    model, parts = first_weights(network()), silos()
    layout = layout_of(model)
    at = layout.flat({name: value.detach().numpy() for name, value in model.named_parameters()})
    index = {silo.name: Batches(len(silo.x), 16, SEED, silo.name).of_round(1) for silo in parts}
    x = np.concatenate([silo.x[index[silo.name]] for silo in parts]).astype(np.float64)
    y = np.concatenate([silo.y[index[silo.name]] for silo in parts])
    density = np.array(protocol.class_weights or (1.0,) * CLASSES)[y].sum()

    def loss(moved: NDArray[np.float64]) -> float:
        return float(row_losses(model, layout, at + moved, x, y, protocol).sum() / density)

    run = server_of(players[0])
    assert seen[0].parameter_hash == parameter_hash(layout, at)
    rows = dense(protocol, 10, len(at), run._seed.seed, seen[0].stamp.run, 1, seen[0].parameter_hash)
    wanted = layout.split(at - 0.2 * own_estimate(protocol, rows, loss))
    # Rounding of losses near 1 to 1e-16 is divided by sigma = 1e-3 and shared by the K; the ring's step is 1e-14.
    assert farthest(weights(result), dict(wanted)) < 1e-11
    assert result.history[0]["loss"] == pytest.approx(loss(np.zeros(len(at))), rel=1e-3)  # of w, or around it
    assert (
        result.record["facts"]["forwards"]
        == {"base": 11, "twice-forward": 21, "central": 20, "mean": 10}[protocol.form]
    )


@pytest.mark.parametrize("scheme", ["none", "pairwise"])
@pytest.mark.parametrize(
    "settings",
    [
        *({"form": form} for form in FORMS),
        {"direction": "gaussian", "form": "base"},
        {"class_weights": (1.0, 3.0, 0.5, 2.0), "seed_pool": 32},
    ],
    ids=str,
)
def test_with_own_directions_a_round_is_a_step_along_the_mean_of_the_silos_estimates(
    settings: dict[str, Any], scheme: Any
) -> None:
    protocol = learning(**{**SGD, "k": 10, "directions": "own", **settings})
    secure, seen = SecureAggregation(scheme=scheme), list[Any]()
    with casting(answering("silo-0", Estimate, lambda honest, ask: (seen.append(ask), honest(ask))[1])) as players:
        result = make(protocol, aggregation=secure, dtype="float64").train(1, SEED)
    model, parts = first_weights(network()), silos()
    layout = layout_of(model)
    at = layout.flat({name: value.detach().numpy() for name, value in model.named_parameters()})
    estimate, density, seeds = np.zeros(len(at)), 0.0, set[bytes]()
    for silo in parts:
        index = Batches(len(silo.x), 16, SEED, silo.name).of_round(1)
        x, y = silo.x[index].astype(np.float64), silo.y[index]

        def loss(moved: NDArray[np.float64], x: Any = x, y: Any = y) -> float:
            return float(row_losses(model, layout, at + moved, x, y, protocol).sum())

        seed = client_of(players[0], silo.name)._seed.own()
        rows = dense(protocol, 10, len(at), seed, seen[0].stamp.run, 1, seen[0].parameter_hash)
        estimate += own_estimate(protocol, rows, loss)
        density += np.array(protocol.class_weights or (1.0,) * CLASSES)[y].sum()
        seeds.add(seed)
    assert len(seeds) == len(parts)  # each its own
    assert farthest(weights(result), dict(layout.split(at - 0.2 * estimate / density))) < 1e-11


def test_own_directions_are_in_no_message() -> None:
    """Neither what they follow from, nor anything that follows from it but the estimate."""
    sent = list[bytes]()

    def wrap(players: Any) -> None:
        for client in players.clients.values():
            honest = client.answer

            def answer(message: Message, honest: Any = honest) -> Message:
                sent.append(repr(message).encode())
                sent.append(repr(found := answered(SimpleNamespace(answer=honest), message)).encode())
                return found

            client.answer = answer

    with casting(wrap) as players:
        make(learning(directions="own"), aggregation=CLEAR).train(2, SEED)
    secrets = [client_of(players[0], silo.name)._seed.own() for silo in silos()]
    assert sent
    assert not any(repr(secret).encode() in one for secret in secrets for one in sent)


def test_local_adam_is_pytorchs_over_all_rounds_between_which_weights_are_set() -> None:
    """Each silo's Adam goes on where it was, from the mean of all silos' weights."""
    settings: dict[str, Any] = {"learning_rate": 0.02, "weight_decay": 1e-2, "clip_norm": 1.0, "betas": (0.8, 0.99)}
    protocol = learning(k=8, local_epochs=1, **settings)
    at, seen, gradients = dict[tuple[str, int], Any](), list[Any](), dict[str, list[Any]]()

    class Kept(LocalSteps):
        def step(self, at: Any, gradient: Any, rate: float) -> None:
            gradients.setdefault(str(id(self)), []).append(gradient.copy())
            super().step(at, gradient, rate)

    def wrap(players: Any) -> None:
        for name in players.clients:
            client_of(players, name)._steps.__class__ = Kept
            answering(name, Estimate, lambda honest, ask, name=name: (
                seen.append(ask.parameters) if name == "silo-0" else None,
                at.__setitem__((name, ask.stamp.round), (ask.parameters.copy(), found := honest(ask))),
                found,
            )[-1])(players)  # fmt: skip

    with casting(wrap) as players:
        make(protocol, aggregation=CLEAR, dtype="float64").train(3, SEED)
    for silo in silos():
        taken = iter(gradients[str(id(client_of(players[0], silo.name)._steps))])
        parameter = torch.zeros(len(seen[0]), dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([parameter], lr=0.02, weight_decay=1e-2, betas=(0.8, 0.99))
        for number in (1, 2, 3):
            sent, upload = at[silo.name, number]
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(sent))
            for _ in range(-(-len(silo.x) // 16)):
                gradient = torch.from_numpy(next(taken))
                parameter.grad = gradient * min(1.0, 1.0 / float(gradient.norm()))
                optimizer.step()
            wanted = sent - parameter.detach().numpy()
            np.testing.assert_allclose(upload.tensors["difference"], wanted, rtol=0, atol=1e-12)
        assert next(taken, None) is None


@pytest.mark.parametrize(
    "settings",
    [{}, {"class_weights": (1.0, 3.0, 0.5, 2.0), "form": "central"}, {"clip_entry": 0.05}],
    ids=str,
)
def test_an_epoch_is_a_silos_own_steps_one_batch_after_the_other(settings: dict[str, Any]) -> None:
    protocol = learning(**{**SGD, "k": 10, "local_epochs": 2, "lr_schedule": "step", **settings})
    one, seen = silos()[0], list[Any]()
    with casting(answering("silo-0", Estimate, lambda honest, ask: (seen.append(ask), honest(ask))[1])) as players:
        result = make(protocol, silos=[one], aggregation=CLEAR, dtype="float64").train(2, SEED)
    model = first_weights(network())
    layout = layout_of(model)
    at = layout.flat({name: value.detach().numpy() for name, value in model.named_parameters()})
    batches, seed = Batches(len(one.x), 16, SEED, one.name), server_of(players[0])._seed.seed
    for number, ask in enumerate(seen, 1):
        np.testing.assert_allclose(ask.parameters, at, rtol=0, atol=1e-12)
        at, steps, total, weight = ask.parameters.copy(), 0, 0.0, 0.0
        for epoch in (2 * number - 2, 2 * number - 1):
            for index in batches.of_epoch(epoch):
                x, y = one.x[index].astype(np.float64), one.y[index]
                density = np.array(protocol.class_weights or (1.0,) * CLASSES)[y].sum()

                def loss(moved: NDArray[np.float64], at: Any = at, x: Any = x, y: Any = y, d: float = density) -> float:
                    return float(row_losses(model, layout, at + moved, x, y, protocol).sum() / d)

                purpose = (ask.stamp.run, number, ask.parameter_hash, one.name, steps)
                total, weight = total + loss(np.zeros(len(at))) * density, weight + density
                rate = 0.2 if number == 1 else 0.02
                along = own_estimate(protocol, dense(protocol, 10, len(at), seed, *purpose), loss)
                at = at - rate * min(1.0, (protocol.clip_entry or np.inf) / np.abs(along).max()) * along
                steps += 1
        assert result.history[number - 1]["loss"] == pytest.approx(total / weight, rel=1e-2)
    assert farthest(weights(result), dict(layout.split(at))) < 1e-11
    assert steps == 2 * 3


def test_images_are_varied_once_a_round_before_losses_are_compared() -> None:
    """The silo's estimate is that of one crop, the same whenever the round's rows are asked for."""
    generator = np.random.default_rng(2)
    x = generator.normal(size=(12, 1, 6, 6)).astype(np.float32)
    part = Silo("a", x, generator.integers(0, 4, 12))
    with seeded():
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
    protocol = learning(**SGD, k=10)
    given: dict[str, Any] = {"model": model, "silos": [part], "aggregation": CLEAR, "dtype": "float64", "batch_size": 4}
    seen = list[Any]()
    with casting(answering("a", Estimate, lambda honest, ask: (seen.append(ask), honest(ask))[1])) as players:
        result = make(protocol, augment="reflect-crop-flip", **given).train(1, SEED)
    layout, ask = layout_of(first_weights(model).double()), seen[0]
    batches = Batches(12, 4, SEED, "a")
    index = batches.of_round(1)
    rng = np.random.Generator(np.random.PCG64([*batches.entropy, 1, *index.tolist()]))
    inputs = cropped(x[index].astype(np.float64), "reflect-crop-flip", rng)
    seed = server_of(players[0])._seed.seed
    rows = dense(protocol, 10, layout.size, seed, ask.stamp.run, 1, ask.parameter_hash)

    def loss(moved: NDArray[np.float64]) -> float:
        start = first_weights(model).double()
        return float(row_losses(start, layout, ask.parameters + moved, inputs, part.y[index], protocol).mean())

    wanted = layout.split(ask.parameters - 0.2 * own_estimate(protocol, rows, loss))
    assert farthest(weights(result), dict(wanted)) < 1e-11
    plain = make(protocol, **given).train(1, SEED)
    assert farthest(weights(result), weights(plain)) > 1e-3


@pytest.mark.parametrize("weighted", [{}, {"class_weights": (1.0, 3.0, 0.5, 2.0)}], ids=["", "class weights"])
@pytest.mark.parametrize("scheme", ["none", "pairwise"])
def test_no_entry_of_a_silos_estimate_is_larger_than_asked(scheme: Any, weighted: dict[str, Any]) -> None:
    """One silo's estimate is scaled, and the others' stay, as their entries are smaller."""
    protocol = learning(**{**SGD, "k": 10, "form": "base", "direction": "gaussian", "ema": 0.0, **weighted})
    seen, parts = list[Any](), silos()
    parts[0] = Silo("silo-0", 10 * parts[0].x, parts[0].y)
    given: dict[str, Any] = {"silos": parts, "aggregation": SecureAggregation(scheme=scheme), "dtype": "float64"}
    with casting(answering("silo-0", Estimate, lambda honest, ask: (seen.append(ask), honest(ask))[1])) as players:
        free = make(protocol, **given).train(1, SEED)
    model = first_weights(network())
    layout, ask = layout_of(model), seen[0]
    at = layout.flat({name: value.detach().numpy() for name, value in model.named_parameters()})
    rows = dense(protocol, 10, len(at), server_of(players[0])._seed.seed, ask.stamp.run, 1, ask.parameter_hash)
    estimates, densities, sizes = [], [], []
    for silo in parts:
        index = Batches(len(silo.x), 16, SEED, silo.name).of_round(1)
        x, y = silo.x[index].astype(np.float64), silo.y[index]
        density = float(np.array(protocol.class_weights or (1.0,) * CLASSES)[y].mean())

        def loss(moved: NDArray[np.float64], x: Any = x, y: Any = y, d: float = density) -> float:
            return float(row_losses(model, layout, at + moved, x, y, protocol).mean() / d)

        estimates.append(own_estimate(protocol, rows, loss))
        densities.append(density)
        sizes.append(len(index))
    largest = [float(np.abs(one).max()) for one in estimates]
    most = (sorted(largest)[-2] + largest[0]) / 2
    assert largest.index(max(largest)) == 0
    clipped = make(protocol.model_copy(update={"clip_entry": most}), **given).train(1, SEED)
    weigh = np.array(sizes) * np.array(densities)
    bounded = [one * min(1.0, most / top) for one, top in zip(estimates, largest, strict=True)]
    step = sum(weight * one for weight, one in zip(weigh / weigh.sum(), bounded, strict=True))
    assert farthest(weights(clipped), dict(layout.split(at - 0.2 * step))) < 1e-10
    assert farthest(weights(free), weights(clipped)) > 1e-3
    assert clipped.history[0]["loss"] == pytest.approx(free.history[0]["loss"], rel=1e-12)


def test_the_epoch_levels_loss_is_the_class_weighted_mean() -> None:
    """With the same weight for every class the weighted mean is the mean."""
    protocol = SGD | {"local_epochs": 1, "class_weights": (4.0,) * CLASSES, "k": 10}
    weighted = make(learning(**protocol), aggregation=CLEAR, dtype="float64").train(1, SEED)
    plain = make(learning(**protocol | {"class_weights": ()}), aggregation=CLEAR, dtype="float64").train(1, SEED)
    assert farthest(weights(weighted), weights(plain)) < 1e-11
    assert weighted.history[0]["loss"] == pytest.approx(plain.history[0]["loss"], rel=1e-9)


def test_clip_norm_is_kept_or_refused_on_the_epoch_level() -> None:
    try:
        protocol = learning(**SGD, local_epochs=1, clip_norm=1e-6)
    except ParameterError:
        return
    result = make(protocol, aggregation=CLEAR, dtype="float64").train(1, SEED)
    start = {name: value.numpy() for name, value in first_weights(network()).state_dict().items()}
    assert farthest(weights(result), start) <= 0.2 * 1e-6 * 5


# -- what is averaged, what is trained ---------------------------------------------------------------------------------


def parameters_by_round(protocol: BAFFLE, rounds: int, **settings: Any) -> tuple[Result, list[NDArray[Any]]]:
    """The parameters that are stepped on, from the start on."""
    seen = list[NDArray[Any]]()
    with casting(lambda cast: seen.append(cast.server.state()["parameters"])) as players:
        result = make(protocol, **settings).train(
            rounds, SEED, progress=lambda *_: seen.append(players[0].server.state()["parameters"])
        )
    return result, seen


@pytest.mark.parametrize("ema", [0.3, 0.995])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_released_is_the_average_of_the_parameters_over_rounds(ema: float, dtype: str) -> None:
    result, seen = parameters_by_round(learning(ema=ema), 12, aggregation=CLEAR, dtype=dtype)
    average = seen[0].astype(np.float64)
    for number, at in enumerate(seen[1:], 1):
        kept = min(ema, number / (number + 9))
        average = kept * average + (1 - kept) * at
    wanted = dict(layout_of(network().to(getattr(torch, dtype))).split(average))
    unit = float(np.finfo(dtype).eps)
    assert farthest(weights(result), wanted) < 20 * unit * max(1.0, np.abs(average).max())
    assert farthest(weights(result), dict(layout_of(network()).split(seen[-1]))) > 1e-3
    assert result.released is not None
    assert same_bytes(weights(result), {name: value.numpy() for name, value in result.released.state_dict().items()})


def test_the_average_may_follow_each_epoch_as_the_authors_code_has_it() -> None:
    """torch_ema's count: after n epochs the kept part is at most (1 + n) / (10 + n)."""
    protocol = learning(ema=0.2, ema_each="epoch", epoch_rounds=4)
    result, seen = parameters_by_round(protocol, 14, aggregation=CLEAR, dtype="float64")
    average = seen[0].astype(np.float64)
    for epoch in (1, 2, 3):
        kept = min(0.2, (1 + epoch) / (10 + epoch))
        average = kept * average + (1 - kept) * seen[4 * epoch]
    assert farthest(weights(result), dict(layout_of(network().double()).split(average))) < 1e-14
    with pytest.raises(ParameterError, match=r"averages after each 15 rounds .*run has 14; lower epoch-rounds"):
        make(learning(ema=0.2, ema_each="epoch", epoch_rounds=15), aggregation=CLEAR).train(14, SEED)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_without_an_average_the_parameters_themselves_are_released(dtype: str) -> None:
    result, seen = parameters_by_round(learning(), 12, aggregation=CLEAR, dtype=dtype)
    layout = layout_of(network().to(getattr(torch, dtype)))
    assert same_bytes(weights(result), {name: np.array(value) for name, value in layout.split(seen[-1]).items()})


@pytest.mark.parametrize(
    ("trainable", "moved"),
    [
        (("2",), {"2.weight", "2.bias"}),
        (("0.bias", "2.weight"), {"0.bias", "2.weight"}),
        (("*.bias",), {"0.bias", "2.bias"}),
        ((), {"0.weight", "0.bias", "2.weight", "2.bias"}),
    ],
)
def test_what_is_not_to_be_trained_stays_bit_for_bit_and_does_not_travel(
    trainable: tuple[str, ...], moved: set[str]
) -> None:
    shaken, plain = (one.float().state_dict() for one in (first_weights(network()), network()))
    start = {name: (shaken if name in moved else plain)[name].numpy().copy() for name in plain}
    result = make(learning(trainable=trainable, k=8), aggregation=CLEAR).train(3, SEED)
    found = weights(result)
    assert {name for name in found if found[name].tobytes() != start[name].tobytes()} == moved
    whole = make(learning(k=8), aggregation=CLEAR).train(3, SEED)
    left = 4 * sum(start[name].size for name in set(start) - moved)
    saved = whole.history[1]["bytes"]["down"] - result.history[1]["bytes"]["down"]
    assert abs(saved - left) < 4 * 3  # but for how lengths are written
    assert result.history[1]["bytes"]["up"] == pytest.approx(whole.history[1]["bytes"]["up"], abs=8)


def test_frozen_parameters_are_as_if_they_were_not_named() -> None:
    model = network()
    model[0].requires_grad_(False)
    frozen = make(learning(k=8), model=model, aggregation=CLEAR).train(3, SEED)
    named = make(learning(k=8, trainable=("2",)), aggregation=CLEAR).train(3, SEED)
    assert same_bytes(weights(frozen), weights(named))


# -- sums --------------------------------------------------------------------------------------------------------------

SCHEMES: dict[str, dict[str, Any]] = {
    "pairwise": {"scheme": "pairwise"},
    "additive": {"scheme": "additive-shares"},
    "32 bits": {"scheme": "pairwise", "ring_bits": 32},
    "limit": {"scheme": "pairwise", "limit": 2.0**30},
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"local_epochs": 1},
        {"class_weights": (1.0, 3.0, 0.5, 2.0)},
        {"directions": "own"},
        {"directions": "own", "class_weights": (1.0, 3.0, 0.5, 2.0)},
    ],
    ids=str,
)
def test_a_masked_round_is_the_open_one_within_the_rings_step(scheme: str, settings: dict[str, Any]) -> None:
    """Of one round: the next one's directions follow from the hash of parameters, and are others after any rounding."""
    protocol = learning(**SGD, **settings)
    masked = make(protocol, aggregation=SecureAggregation(**SCHEMES[scheme]), dtype="float64").train(1, SEED)
    clear = make(protocol, aggregation=CLEAR, dtype="float64").train(1, SEED)
    step, k, rate = masked.history[0]["ring_step"], 24, 0.2
    assert 0 < step < {"32 bits": 1e-1}.get(scheme, 1e-6)
    assert clear.history[0]["ring_step"] == 0
    # An entry of the gradient adds K errors of at most a step, divided by K - 1; the sum of class weights, off by a
    # step too, divides it. On the epoch level the difference is off by a step.
    bound = (
        step if "local_epochs" in settings else rate * step * k / (k - 1) * (4 if "class_weights" in settings else 1)
    )
    assert farthest(weights(masked), weights(clear)) <= bound + 1e-12
    assert masked.history[0]["loss"] == pytest.approx(clear.history[0]["loss"], abs=4 * step + 1e-12)


def test_the_upload_has_k_numbers_and_the_epoch_levels_a_models() -> None:
    uploads: dict[str, list[Any]] = {"batch": [], "twice": [], "epoch": [], "own": []}
    ways = {"batch": {}, "twice": {"form": "twice-forward"}, "epoch": {"local_epochs": 1}, "own": {"directions": "own"}}
    for name, settings in ways.items():

        def keep(honest: Any, ask: Message, to: list[Any] = uploads[name]) -> Message:
            to.append(honest(ask))
            return to[-1]

        with casting(answering("silo-1", Estimate, keep)):
            make(learning(**settings), aggregation=CLEAR).train(1, SEED)
    shapes = {name: {key: value.shape for key, value in found[0].tensors.items()} for name, found in uploads.items()}
    size = sum(value.numel() for value in network().parameters())
    assert shapes["batch"] == {"scalars": (24 + 1,)}
    assert shapes["twice"] == {"scalars": (48 + 1,)}
    assert shapes["epoch"] == {"difference": (size,), "loss": ()}
    assert shapes["own"] == {"estimate": (size,), "spoken": (1,)}
    assert isinstance(uploads["batch"][0], PlainUpload)


def test_k_grows_by_the_same_factor_each_round() -> None:
    result = make(learning(k=8, k_last=128), aggregation=CLEAR).train(5, SEED)
    assert [line["k"] for line in result.history] == [8, 16, 32, 64, 128]
    assert result.record["facts"]["forwards"] == 248
    assert BAFFLE(k=8, k_last=128).k_of(1, 1) == 8


# -- who is there ------------------------------------------------------------------------------------------------------


def dropping(*rows: tuple[int, str, str]) -> Engine:
    drop = [{"round": number, "silo": silo, "phase": phase} for number, silo, phase in rows]
    return Engine.model_validate({"strict": True, "faults": {"drop": drop}})


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("phase", ["set-up", "upload", "unmasking"])
@pytest.mark.parametrize(
    "settings", [{}, SGD | {"local_epochs": 1}, {"local_epochs": 1}, {"directions": "own"}], ids=str
)
def test_a_round_goes_on_without_a_silo_that_vanishes(phase: str, settings: Mapping[str, Any]) -> None:
    engine = dropping((2, "silo-3", phase))
    made = make(learning(**settings, k=8), silos=silos((16, 16, 16, 16, 16)), engine=engine)
    result = made.train(4, SEED)
    assert [(gone["round"], gone["silo"]) for gone in result.record["dropped"]] == [(2, "silo-3")]
    rows = [line["rows"] for line in result.history]
    assert rows == [80, 80 if phase == "unmasking" else 64, 80, 80]
    assert [line["attempt"] for line in result.history] == [0] * 4


@pytest.mark.usefixtures("quiet")
def test_too_few_silos_are_named() -> None:
    engine = dropping((2, "silo-0", "upload"), (2, "silo-2", "upload"))
    (lost,) = make(engine=engine).train(3, SEED).record["lost"]
    assert re.search(r"round 2 cannot be completed by 1 of 3 silos.*silo-0.*silo-2", lost["reason"])


def binary(rows: tuple[int, ...] = (16, 24, 16)) -> list[Silo]:
    return [Silo(silo.name, silo.x, silo.y % 2) for silo in silos(rows)]


def of_32_parameters() -> nn.Sequential:
    with seeded():
        return nn.Sequential(nn.Linear(6, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("settings", [{}, {"class_weights": (1.0, 3.0)}, {"loss": "mse", "momentum": 0.5}], ids=str)
@pytest.mark.parametrize("scheme", ["none", "pairwise"])
def test_along_a_whole_basis_it_is_fedsgd_also_where_a_silo_vanishes(settings: dict[str, Any], scheme: Any) -> None:
    """Central differences along as many orthogonal directions as parameters are the gradient, up to sigma^2."""
    shared: dict[str, Any] = {"loss": "cross-entropy", "optimizer": "sgd", "learning_rate": 0.2} | settings
    ends, two = [], {"threshold": 2} if scheme == "pairwise" else {}
    for protocol in (
        BAFFLE(**shared, k=32, form="central", orthogonal=True, sigma=1e-4, ema=0.0),
        FedSGD(**shared),
    ):
        made = make(
            protocol,
            silos=binary(),
            model=of_32_parameters(),
            dtype="float64",
            engine=dropping((2, "silo-1", "upload")),
            aggregation=SecureAggregation(scheme=scheme, min_survivors=2, **two),
        )
        result = made.train(4, SEED)
        assert [gone["silo"] for gone in result.record["dropped"]] == ["silo-1"]
        ends.append(result)
    assert [line["rows"] for line in ends[0].history] == [line["rows"] for line in ends[1].history]
    # sigma^2 / 6 of a third derivative of some 10, and rounding of 1e-16 / sigma, in each of four steps of 0.2.
    assert farthest(weights(ends[0]), weights(ends[1])) < 1e-7


def test_a_part_of_the_silos_takes_part_in_each_round() -> None:
    result = make(silos=silos((16,) * 6), participation=0.5, test=TEST).train(24, SEED)
    assert {line["rows"] for line in result.history} == {48.0}
    assert result.test["accuracy"] > 0.25 + 5 * np.sqrt(0.25 * 0.75 / 400) + 0.2


# -- determinism -------------------------------------------------------------------------------------------------------


def test_a_test_seed_makes_the_same_bytes_and_another_seed_others() -> None:
    first, again = (make().train(4, SEED) for _ in range(2))
    assert same_bytes(weights(first), weights(again))
    loose = make(engine=Engine(strict=False)).train(4, SEED)
    assert same_bytes(weights(first), weights(loose))
    other, fresh = make(insecure_secret_seed=2).train(4, SEED), make(insecure_secret_seed=None).train(4, SEED)
    assert not same_bytes(weights(first), weights(other))
    assert not same_bytes(weights(first), weights(fresh))


def test_the_model_that_was_given_is_not_touched_nor_torchs_generator() -> None:
    model = network()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    make(model=model).train(2, SEED)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), state)


def test_frozen_batchnorm_keeps_its_statistics() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4))
    model[1].running_mean.fill_(0.25)
    model[1].eval()
    result = make(learning(k=8), model=model).train(3, SEED)
    found = weights(result)
    assert (found["1.running_mean"] == 0.25).all()
    assert found["1.num_batches_tracked"] == 0
    assert (found["1.weight"] != 1).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_round_that_is_played_again_starts_from_the_same_moments(dtype: Any) -> None:
    generator = np.random.default_rng(1)
    gradients = generator.normal(size=(6, 5))

    def played(steps: LocalSteps, rounds: list[tuple[int, list[int]]]) -> Any:
        at = np.zeros(5, dtype)
        for number, of in rounds:
            at = np.zeros(5, dtype)
            steps.begin(number)
            for index in of:
                steps.step(at, gradients[index], 0.1)
        return at

    once = played(LocalSteps(adam=True), [(1, [0, 1]), (2, [2, 3])])
    again = LocalSteps(adam=True)
    played(again, [(1, [4]), (1, [0, 1]), (2, [5, 4, 3])])
    other = LocalSteps(adam=True)
    other.restore(again.state())
    assert {type(value) for value in again.state().values()} == {bytes}
    for steps in (again, other):
        assert played(steps, [(2, [2, 3])]).tobytes() == once.tobytes()
