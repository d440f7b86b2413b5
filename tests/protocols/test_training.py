"""The settings that all protocols share."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from moretta.contract.settings import kebab
from moretta.errors import ParameterError
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.params import Centralised, FedAvg, FedSGD, Local
from moretta.protocols.pbpfl.params import PBPFL


@pytest.mark.parametrize("params", [FedSGD, FedAvg, Local, Centralised, PBPFL])
def test_every_protocol_has_the_shared_settings_with_the_same_defaults(params: type[Training]) -> None:
    shared = Training()
    made = params()
    assert {name: getattr(made, name) for name in Training.model_fields} == shared.model_dump()
    assert made.model_dump()["name"] == params.__name__.lower()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("learning_rate", 0.0), ("learning_rate", -1.0), ("learning_rate", float("nan")),
        ("learning_rate", float("inf")), ("momentum", 1.0), ("momentum", -0.1), ("weight_decay", -1e-9),
        ("weight_decay", float("inf")), ("clip_norm", 0.0), ("lr_schedule", "linear"), ("label_smoothing", 1.0),
        ("betas", (0.9, 1.0)), ("betas", (0.9,)), ("milestones", (0,)), ("milestone_factor", 1.0),
        ("first_rate", 0.0), ("epoch_rounds", 0), ("class_weights", (1.0, 0.0)), ("loss", "mae"),
        ("optimizer", "rmsprop"), ("epochs", 3),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(setting: str, value: object) -> None:
    with pytest.raises(ValidationError, match=setting):
        Training.model_validate({setting: value})


def test_settings_are_frozen_and_have_both_spellings() -> None:
    made = Training.model_validate({"learning-rate": 0.5})
    assert made == Training(learning_rate=0.5)
    with pytest.raises(ValidationError, match="frozen"):
        made.learning_rate = 1.0  # type: ignore[misc]
    assert kebab("weight_decay") == "weight-decay"


def test_fedavg_steps_by_sgd_only() -> None:
    with pytest.raises(ParameterError, match='FedAvg: optimizer: expected "sgd", got "adam"'):
        FedAvg(optimizer="adam")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="FedAvg: local_epochs: expected 1 or more, got 0"):
        FedAvg(local_epochs=0)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [2.0] * 8),
        ("step", [2.0] * 4 + [0.2] * 2 + [0.02] * 2),
        ("cosine", [1 + math.cos(math.pi * number / 8) for number in range(8)]),
    ],
)
def test_the_rate_of_each_round(schedule: Any, rates: list[float]) -> None:
    settings = Training(learning_rate=2.0, lr_schedule=schedule)
    assert [settings.rate(number, 8) for number in range(1, 9)] == pytest.approx(rates, rel=1e-14)


def test_rates_fall_after_their_milestones() -> None:
    """Epochs of two rounds: a fifth of the rate after the first, and after the third."""
    by_epoch: dict[str, Any] = {"lr_schedule": "milestones", "milestones": (1, 3), "milestone_factor": 0.2}
    settings = Training(learning_rate=2.0, epoch_rounds=2, **by_epoch)
    assert [settings.rate(number, 9) for number in range(1, 10)] == pytest.approx([2.0] * 2 + [0.4] * 4 + [0.08] * 3)
    assert not settings.rate_depends_on_rounds
    first = Training(learning_rate=2.0, epoch_rounds=2, first_rate=0.02, **by_epoch)
    assert [first.rate(number, 9) for number in range(1, 4)] == pytest.approx([0.02] * 2 + [0.4])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_schedule": "milestones"}, "belong together; give both"),
        ({"milestones": (3,)}, "belong together; give both"),
        ({"lr_schedule": "milestones", "milestones": (3, 3)}, "in ascending order, such as"),
        ({"milestone_factor": 0.5}, 'milestone-factor belongs to lr-schedule = "milestones"; remove it'),
        ({"betas": (0.9, 0.99)}, 'betas belong to optimizer = "adam"; set it'),
    ],
)
def test_schedules_that_are_half_said_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Training(**settings)


@pytest.mark.parametrize(
    "settings",
    [{"optimizer": "adam", "momentum": 0.5}, {"label_smoothing": 0.1}, {"class_weights": (1.0, 2.0)}],
)
def test_settings_that_do_not_fit_each_other_are_one_sentence(settings: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=r"belong.*; remove"):
        Training(**settings)
