"""Budgets of epsilon: a run ends before it passes one, silos keep to it by themselves, one round may be too much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from networks import seeded
from torch import nn

from moretta import FedAvg, Federation, FedSGD, Silo
from moretta.contract.messages import Stamp
from moretta.errors import ParameterError, RunFailed
from moretta.protocols.common.accountant import Accountant, epsilon
from moretta.protocols.common.lattice import Privacy
from moretta.protocols.common.noise import SiloNoise
from moretta.secure_aggregation.keystream import SecretRoot


def made(kind: Any = FedSGD, out: Any = None, run: Mapping[str, Any] = {}, **settings: Any) -> Federation:
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    silos = [Silo(name, x[start::3], np.arange(20) % 2) for start, name in enumerate(("north", "south", "east"))]
    with seeded():
        model = nn.Linear(4, 2)
    protocol = kind(**{"loss": "cross-entropy", "learning_rate": 0.1, "dp_noise": 1.0, "dp_clip": 1.0} | settings)
    return Federation(model, silos, protocol, batch_size=5, out=out, **run)


@pytest.mark.parametrize(("kind", "rate"), [(FedSGD, 0.25), (FedAvg, 1.0)])
def test_a_run_ends_before_it_passes_its_budget(kind: Any, rate: float) -> None:
    most = (epsilon(1.0, 1e-5, rate, 3) + epsilon(1.0, 1e-5, rate, 4)) / 2
    result = made(kind, dp_epsilon=most).train(9)
    assert len(result.history) == 3
    assert result.record["facts"]["epsilon"] == epsilon(1.0, 1e-5, rate, 3) <= most
    said = f"the run ended after round 3 of 9, as another would pass dp-epsilon = {most:g}"
    assert said in result.record["warnings"]
    assert result.model is not None


def test_a_budget_that_all_rounds_keep_to_changes_nothing() -> None:
    result = made(dp_epsilon=50.0).train(2)
    assert len(result.history) == 2
    assert not [one for one in result.record["warnings"] if "dp-epsilon" in one]


def test_a_round_that_costs_more_is_refused_with_the_noise_that_all_rounds_need() -> None:
    with pytest.raises(
        ParameterError, match=r"dp-epsilon = 0.5 is less than the .* of one round; for 5 rounds"
    ) as said:
        made(dp_epsilon=0.5).train(5)
    noise = float(str(said.value).split("dp-noise = ")[1].split()[0])
    assert epsilon(noise, 1e-5, 0.25, 5) <= 0.5 < epsilon(noise - 0.002, 1e-5, 0.25, 5)


def test_a_silo_uploads_nothing_that_would_pass_the_budget() -> None:
    """Whatever the server says: it counts the uploads that it sent."""
    most = (epsilon(1.0, 1e-5, 0.25, 2) + epsilon(1.0, 1e-5, 0.25, 3)) / 2
    silo = SiloNoise(Privacy(1.0, 1.0, 1e-5, most=most), 20, 5, SecretRoot.insecure(0, "north"), b"")
    for number in (1, 2):
        silo.uploading(Stamp("run", number, 0), b"upload")
    silo.uploading(Stamp("run", 2, 1), b"upload")  # the same again, in another attempt
    with pytest.raises(ParameterError, match="is spent by the uploads that this silo has sent; nothing was sent"):
        silo.uploading(Stamp("run", 2, 0), b"other")
    with pytest.raises(ParameterError, match="is spent"):
        silo.uploading(Stamp("run", 3, 0), b"upload")


def test_a_take_that_would_pass_the_budget_is_not_asked_for() -> None:
    most = (epsilon(1.0, 1e-5, 0.25, 1) + epsilon(1.0, 1e-5, 0.25, 2)) / 2
    accountant = Accountant(Privacy(1.0, 1.0, 1e-5, most=most), 0.25)
    assert accountant.allows(1)
    accountant.releases.add(Stamp("run", 1, 0), "north")
    assert not accountant.allows(2)
    with pytest.raises(RunFailed, match="is spent by 1 sums that may have been opened, and this take would pass it"):
        accountant.want(None, {"w": (3,)}, made().spec.secure_aggregation, 10)  # type: ignore[arg-type]


def test_a_resumed_run_ends_where_its_budget_did(tmp_path: Any) -> None:
    most = (epsilon(1.0, 1e-5, 0.25, 3) + epsilon(1.0, 1e-5, 0.25, 4)) / 2
    made(out=tmp_path / "run", dp_epsilon=most).train(2)
    whole = made(out=tmp_path / "run", dp_epsilon=most).train(9, resume=True)
    assert len(whole.history) == 3
    assert whole.record["facts"]["releases"] == 3


@pytest.mark.parametrize(("kind", "rate"), [(FedSGD, 0.25), (FedAvg, 1.0)])
@pytest.mark.parametrize("patience", [None, 50])
def test_the_last_round_within_a_budget_is_evaluated_and_kept(
    kind: Any, rate: float, patience: int | None, tmp_path: Any
) -> None:
    most = (epsilon(1.0, 1e-5, rate, 3) + epsilon(1.0, 1e-5, rate, 4)) / 2
    x, y = np.random.default_rng(1).normal(size=(20, 4)).astype(np.float32), np.arange(20) % 2
    run = {"test": (x, y), "validation": (x, y), "evaluate_every": 100, "early_stopping": patience}
    ends = [made(kind, tmp_path, run, dp_epsilon=most).train(9, resume=resume) for resume in (False, True)]
    for result in ends:  # a finished run that is resumed keeps its model
        assert [line["round"] for line in result.history if "validation_loss" in line] == [3]
        assert result.history[-1]["test_loss"] == result.test["loss"]
        assert result.record["facts"].get("best_round") == (None if patience is None else 3)
        assert [line for line in result.record["warnings"] if "dp-epsilon" in line] == [
            f"the run ended after round 3 of 9, as another would pass dp-epsilon = {most:g}"
        ]
    assert ends[0].test == ends[1].test


@pytest.mark.parametrize("settings", [{"dp_noise": None, "dp_clip": None}, {"dp_noise": 0.0}])
def test_a_budget_without_noise_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="dp-epsilon needs dp-noise, which is not set"):
        made(dp_epsilon=1.0, **settings)
