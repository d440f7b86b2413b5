"""What BAFFLE refuses, by a sentence that says what to do, and what a silo that answers nonsense costs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from baffle_runs import (
    CLEAR,
    SEED,
    answering,
    client_of,
    learning,
    make,
    network,
    same_bytes,
    server_of,
    silos,
    weights,
)
from cast import cast_only, casting
from refused_rows import Row, refused
from torch import Tensor, nn

from moretta import BAFFLE, SecureAggregation, Silo
from moretta.config import run_files
from moretta.contract.codec import Codec
from moretta.contract.messages import Stamp
from moretta.engines.in_process import InProcess
from moretta.errors import MisuseError, ParameterError, PeerError
from moretta.protocols.baffle.silo.client import Client
from moretta.protocols.baffle.silo.messages import Commit, Committed, Estimate
from moretta.protocols.baffle.silo.recipe import Recipe
from moretta.protocols.baffle.silo.seeds import parameter_hash
from moretta.protocols.baffle.torch_forward import TorchForward, layout_of
from moretta.protocols.common.targets import RowLosses
from moretta.secure_aggregation.plain import PlainUpload

pytestmark = pytest.mark.usefixtures("quiet")

SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.1}


# -- settings ----------------------------------------------------------------------------------------------------------


RUN_FILE = """
[run]
rounds = 1
[data]
source = "wdbc"
[model]
source = "mlp"
[protocol]
name = "baffle"
"""


def test_a_run_file_takes_the_settings_and_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE + 'k = 20\nk-last = 40\nform = "central"\nseed-pool = 48\nema = 0.9\ntrainable = ["2"]')
    found = run_files.load(path).protocol
    assert found == BAFFLE(k=20, k_last=40, form="central", seed_pool=48, ema=0.9, trainable=("2",))
    path.write_text(run_files.dump(run_files.load(path)))
    assert run_files.load(path).protocol == found


@refused("baffle_bad_input.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


def test_a_model_of_which_nothing_is_trained() -> None:
    model = network()
    model[2].requires_grad_(False)
    with pytest.raises(ParameterError, match="expected trained tensors of float32 or of float64, at least one"):
        make(learning(trainable=("2",)), model=model).train(1, SEED)


@pytest.mark.parametrize(
    ("augment", "settings"), [("turn", {}), ("crop-flip", {"dp_noise": 1.0, "dp_clip": 1.0})], ids=["turn", "noise"]
)
def test_augmented_rows_are_refused(augment: str, settings: dict[str, Any]) -> None:
    x = np.zeros((12, 1, 4, 4), np.float32)
    parts = [Silo(name, x, np.zeros(12, np.int64)) for name in "ab"]
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
    with pytest.raises(
        ParameterError, match=r"under baffle it is crop-flip or reflect-crop-flip, and beside .*dp_noise"
    ):
        make(learning(**settings), silos=parts, model=model, augment=augment, aggregation=CLEAR).train(1, SEED)


@pytest.mark.parametrize(("dtype", "sigma", "works"), [("float32", 1e-9, "1e-07"), ("float64", 1e-18, "1e-16")])
def test_a_sigma_that_vanishes_is_refused_and_the_one_it_names_works(dtype: str, sigma: float, works: str) -> None:
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.75)
    settings: dict[str, Any] = {"model": model, "dtype": dtype}
    with pytest.raises(ParameterError, match=f"sigma = {sigma:g} is lost in the rounding of {dtype}") as caught:
        make(learning(k=8, sigma=sigma), **settings).train(1, SEED)
    named = str(caught.value).rpartition("sigma = ")[2].removesuffix(" works")
    assert float(named) == pytest.approx(float(works))
    assert make(learning(k=8, sigma=float(named)), **settings).train(1, SEED).history


# -- models ------------------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Draws in its forward pass, where no layer says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.randn(4)


def around(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), *layers, nn.Linear(5, 4))


def test_dropout_of_nothing_is_no_dropout() -> None:
    assert make(learning(k=8), model=around(nn.Dropout(0.0))).train(1, SEED).history


# -- rows --------------------------------------------------------------------------------------------------------------


def with_rows(value: float, which: int = 1) -> list[Silo]:
    parts = silos()
    x = parts[which].x.copy()
    x[:] = value
    parts[which] = Silo(parts[which].name, x, parts[which].y)
    return parts


def of_twos() -> nn.Linear:
    """A model whose outputs overflow where rows are near float32's largest number."""
    model = nn.Linear(6, 4)
    nn.init.constant_(model.weight, 2.0)
    return model


EVERYBODY = SecureAggregation(scheme="none", min_survivors=3)


@pytest.mark.parametrize("settings", [{}, SGD | {"local_epochs": 1}], ids=str)
@pytest.mark.parametrize("form", ["mean", "base", "central"])
def test_losses_that_overflow_name_the_silo_and_the_directions(settings: dict[str, Any], form: str) -> None:
    protocol = learning(**{"loss": "mse", "k": 8, "form": form, **settings})
    said = "round 1: silo-1: the losses of silo `silo-1` are NaN or infinite in some of 8 directions; look at its rows"
    with pytest.raises(ParameterError, match=said):
        make(protocol, silos=with_rows(3e38), model=of_twos(), aggregation=EVERYBODY).train(1, SEED)


def test_a_silo_whose_losses_overflow_is_left_out_where_others_are_enough() -> None:
    result = make(learning(loss="mse", k=8), silos=with_rows(3e38), model=of_twos(), aggregation=CLEAR).train(2, SEED)
    dropped = [(gone["silo"], gone["reason"]) for gone in result.record["dropped"]]
    assert [silo for silo, _ in dropped] == ["silo-1"] * 2
    assert all(reason.startswith("bad input: the losses of silo `silo-1` are NaN") for _, reason in dropped)
    assert all(np.isfinite(value).all() for value in weights(result).values())


# -- peers -------------------------------------------------------------------------------------------------------------


def shorter(honest: Callable[[Any], Any], ask: Estimate) -> Any:
    """A silo that takes another K, in round 2."""
    return honest(replace(ask, k=ask.k - 1) if ask.stamp.round == 2 else ask)


@pytest.mark.parametrize("scheme", ["none", "pairwise"])
def test_a_silo_with_another_k_is_missing_as_malformed_and_the_round_goes_on(scheme: Any) -> None:
    secure = SecureAggregation(scheme=scheme)
    with casting(answering("silo-3", Estimate, shorter)):
        result = make(learning(k=8), silos=silos((16,) * 5), aggregation=secure).train(3, SEED)
    ((number, silo, reason),) = [(gone["round"], gone["silo"], gone["reason"]) for gone in result.record["dropped"]]
    assert (number, silo) == (2, "silo-3")
    assert reason.startswith("malformed: `scalars`: expected shape [9], got [8]")
    assert [line["rows"] for line in result.history] == [80, 64, 80]


def cast_agreed(**settings: Any) -> tuple[Client, Any, Any]:
    """A silo that has agreed on a seed, the server, and an honest first round's ask."""
    asks: list[Estimate] = []
    with casting(answering("silo-0", Estimate, lambda honest, ask: (asks.append(ask), honest(ask))[1])) as players:
        make(learning(**{"k": 8, **settings}), aggregation=CLEAR).train(1, SEED)
    client = client_of(players[0])
    vars(client).pop("answer")
    return client, server_of(players[0]), asks[0]


def test_an_honest_ask_is_answered_the_same_twice() -> None:
    client, _, ask = cast_agreed()
    first, again = client.answer(ask), client.answer(ask)
    assert isinstance(first, PlainUpload)
    assert isinstance(again, PlainUpload)
    assert same_bytes(dict(first.tensors), dict(again.tensors))


CHANGES: dict[str, tuple[Callable[[Estimate], Estimate], type[Exception], str]] = {
    "another model": (
        lambda ask: replace(ask, parameter_hash=bytes(32)), PeerError, "parameter hash does not fit these parameters"
    ),
    "other parameters": (
        lambda ask: replace(ask, parameters=ask.parameters + np.float32(1)),
        PeerError,
        "parameter hash does not fit these",
    ),
    "fewer parameters": (
        lambda ask: replace(ask, parameters=ask.parameters[:-1]), PeerError,
        r"expected 59 parameters of float32, got float32\[58\]"
    ),
    "another dtype": (
        lambda ask: replace(ask, parameters=ask.parameters.astype(np.float64)), PeerError,
        r"of float32, got float64\[59\]"
    ),
    "more directions": (
        lambda ask: replace(ask, k=9), PeerError, "expected a K of at most 8, as this silo is set, got 9"
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_silo_refuses_what_does_not_fit_its_set_up(change: str) -> None:
    client, _, ask = cast_agreed()
    changed, error, said = CHANGES[change]
    with pytest.raises(error, match=said):
        client.answer(changed(ask))


def test_a_silo_refuses_parameters_that_swallow_its_sigma() -> None:
    client, _, ask = cast_agreed()
    at = ask.parameters * np.float32(1e9)
    with pytest.raises(ParameterError, match=r"sigma = 0.001 is lost in the rounding of float32 parameters"):
        client.answer(replace(ask, parameters=at, parameter_hash=parameter_hash(layout_of(network()), at)))


@pytest.mark.parametrize(
    "fields",
    [
        {"k": 1}, {"k": 2**16}, {"parameters": np.zeros((2, 2), np.float32)}, {"parameters": np.zeros(4, np.float16)},
        {"parameters": np.zeros(4, np.int64)}, {"parameters": np.full(4, np.nan, np.float32)},
    ],
    ids=str,
)  # fmt: skip
def test_an_impossible_ask_is_no_message(fields: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "stamp": Stamp("run", 1, 0),
        "parameters": np.zeros(4, np.float32),
        "parameter_hash": bytes(32),
        "k": 8,
        "encoding": {},
    }
    Estimate(**good)
    with pytest.raises(PeerError, match="baffle/estimate"):
        Estimate(**good | fields)


def test_a_silo_with_a_seed_of_no_set_up_does_not_run() -> None:
    _, _, ask = cast_agreed()
    fresh = client_of(cast_only(make(learning(k=8), aggregation=CLEAR)))
    with pytest.raises(MisuseError, match="expected a set-up before the first round"):
        fresh.answer(ask)
    fresh.answer(Commit(stamp=Stamp("run", 1, 0), cohort=("silo-0", "silo-1")))
    with pytest.raises(MisuseError, match="expected a set-up before the first round"):
        fresh.answer(ask)


@pytest.mark.parametrize("scheme", ["pairwise", "additive-shares"])
def test_the_seeds_cohort_is_that_of_the_keys(scheme: str) -> None:
    """Or a server could make up names, and with each set of them have another seed of the same silos."""
    cast = cast_only(make(learning(k=8), aggregation=SecureAggregation(scheme=scheme)))
    engine = InProcess(cast.clients, Codec(cast.messages))
    exchange, replies = cast.server.setup(Stamp("run", 1, 0), list(cast.clients)), None
    with contextlib.suppress(StopIteration):
        while True:
            replies = engine.deliver(exchange.send(replies))
    now, names = Stamp("run", 1, 1), tuple(cast.clients)
    for cohort in ((*names, "dora"), names[:-1]):
        with pytest.raises(PeerError, match=f"expected the {len(names)} silos of the secure sum"):
            client_of(cast).answer(Commit(stamp=now, cohort=cohort))
    assert isinstance(client_of(cast).answer(Commit(stamp=now, cohort=names)), Committed)


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4, bias=False)),
        nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double(),
    ],
    ids=["without a bias", "float64"],
)
def test_a_silo_with_another_model_is_told_so(other: nn.Module) -> None:
    def wrap(players: Any) -> None:
        client_of(players, "silo-1")._forward = TorchForward(other, layout_of(other))

    with (
        casting(wrap),
        pytest.raises(ParameterError, match="silo-1: the silo's model has other tensors, or other fixed"),
    ):
        make(learning(k=8), aggregation=EVERYBODY).train(1, SEED)


def test_a_silo_with_other_frozen_weights_is_told_so() -> None:
    def wrap(players: Any) -> None:
        model = network()
        with torch.no_grad():
            model[0].weight[0, 0] += 1e-6
        model[0].requires_grad_(False)
        client_of(players, "silo-1")._forward = TorchForward(model, layout_of(model))

    with casting(wrap), pytest.raises(ParameterError, match="or other fixed ones, than the server's model"):
        make(learning(k=8, trainable=("2",)), aggregation=EVERYBODY).train(1, SEED)


def test_a_recipe_takes_twice_as_many_directions_where_the_form_does() -> None:
    for form, count in (("mean", 9), ("twice-forward", 18)):
        recipe = Recipe(form, 1e-3, RowLosses("mse"), 9)  # type: ignore[arg-type]
        assert recipe.directions(9, 40, bytes(32), "run", 1).count == count
