"""The settings that all protocols share."""

import math
from typing import Any

import pytest
from pydantic import ValidationError
from refused_rows import Row, refused

from moretta.contract.settings import kebab
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.params import Centralised, FedAvg, FedSGD, Local
from moretta.protocols.pbpfl.params import PBPFL


@pytest.mark.parametrize("params", [FedSGD, FedAvg, Local, Centralised, PBPFL])
def test_every_protocol_has_the_shared_settings_with_the_same_defaults(params: type[Training]) -> None:
    shared = Training()
    made = params()
    for name in Training.model_fields:
        assert getattr(made, name) == getattr(shared, name), name
    assert made.model_dump()["name"] == params.__name__.lower()


@refused("training.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


def test_settings_are_frozen_and_have_both_spellings() -> None:
    made = Training.model_validate({"learning-rate": 0.5})
    assert made == Training(learning_rate=0.5)
    with pytest.raises(ValidationError, match="frozen"):
        made.learning_rate = 1.0  # type: ignore[misc]
    assert kebab("weight_decay") == "weight-decay"


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
