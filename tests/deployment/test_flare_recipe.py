"""FLARE's own recipe and ours in FLARE's simulator: equal weights, and what goes wrong at a site costs it the round."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("nvflare", reason="the engine for many machines needs nvflare")

JOB = Path(__file__).parent / "flare_job"
sys.path.insert(0, str(JOB))
from net import Net, rows, train  # noqa: E402

from moretta.errors import ParameterError  # noqa: E402
from moretta.flare import SecureFedAvgRecipe  # noqa: E402
from moretta.secure_aggregation.settings import SecureAggregation  # noqa: E402

Weights = Mapping[str, Tensor]


def played(kind: str, folder: Path, sites: int, rounds: int, *wrong: str) -> str:
    """Play job.py in the simulator; return what it and its sites said."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= {
        "NVFLARE_POC_WORKSPACE": str(folder / "poc"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    words = [sys.executable, "job.py", kind, str(folder), str(sites), str(rounds), *wrong]
    ended = subprocess.run(words, cwd=JOB, env=environment, text=True, capture_output=True, timeout=600, check=False)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said[-3000:]
    return said


def weights_of(folder: Path) -> dict[str, Tensor]:
    [path] = folder.rglob("FL_global_model.pt")
    found = torch.load(path, weights_only=False)
    return dict(found["model"])


def by_hand(sites: int, *without: str, rounds: int) -> Weights:
    """Average by rows what sites come to, without those of "site:round"."""
    model = Net().state_dict()
    for number in range(rounds):
        names = [f"site-{one + 1}" for one in range(sites) if f"site-{one + 1}:{number}" not in without]
        if not names:
            continue
        total = {name: torch.zeros(one.shape, dtype=torch.float64) for name, one in model.items()}
        counts = [len(rows(site)[0]) for site in names]
        for site, count in zip(names, counts, strict=True):
            net = Net()
            net.load_state_dict(model)
            train(net, *rows(site))
            for name, one in net.state_dict().items():
                total[name] += one.double() * count / sum(counts)
        model = {name: one.to(model[name].dtype) for name, one in total.items()}
    return model


def assert_close(ours: Weights, theirs: Weights) -> None:
    for name, one in theirs.items():
        if one.dtype == torch.float32:  # FLARE sums in float32
            torch.testing.assert_close(ours[name].float(), one, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_our_recipe_comes_to_what_flares_comes_to(tmp_path: Path) -> None:
    said = played("secure", tmp_path / "ours", 3, 3)
    played("plain", tmp_path / "theirs", 3, 3)
    ours, theirs = weights_of(tmp_path / "ours"), weights_of(tmp_path / "theirs")
    assert_close(ours, theirs)
    assert_close(ours, by_hand(3, rounds=3))
    assert "is left out" not in said


@pytest.mark.slow
def test_flares_own_processes_of_a_server_and_sites_play_it(tmp_path: Path) -> None:
    played("secure", tmp_path, 3, 2, "poc")
    assert_close(weights_of(tmp_path), by_hand(3, rounds=2))


@pytest.mark.slow
@pytest.mark.parametrize("library", ["pytorch_lightning", "transformers"])
def test_scripts_that_flare_has_patched_train_as_any(tmp_path: Path, library: str) -> None:
    pytest.importorskip(library)
    script = {"pytorch_lightning": "lightning_client.py", "transformers": "hf_client.py"}[library]
    said = played("secure", tmp_path, 3, 2, f"script={script}")
    assert "is left out" not in said
    assert_close(weights_of(tmp_path), by_hand(3, rounds=2))


@pytest.mark.slow
def test_filters_change_a_result_before_it_is_summed(tmp_path: Path) -> None:
    for kind in ("secure", "plain"):
        played(kind, tmp_path / kind, 3, 2, "filter=PercentilePrivacy")
    ours, theirs = (weights_of(tmp_path / kind) for kind in ("secure", "plain"))
    assert_close(ours, theirs)
    assert float((ours["first.weight"] - by_hand(3, rounds=2)["first.weight"]).abs().max()) > 1e-3


WRONG = {"site-1:0": "nan", "site-2:1": "missing", "site-3:2": "integers", "site-4:3": "shape"}
TOLD = {
    "site-1": "this site cannot take part in this sum; its own log says why",
    "site-2": "expected the arrays of the model; ['first.weight'] differ",
    "site-3": "`first.weight`: expected float32 [6, 4], got int32 [6, 4]",
    "site-4": "`first.weight`: expected float32 [6, 4], got float32 [1, 6, 4]",
}


@pytest.mark.slow
def test_what_goes_wrong_at_a_site_costs_it_the_round(tmp_path: Path) -> None:
    said = played("secure", tmp_path, 4, 4, *(f"{where}={what}" for where, what in WRONG.items()))
    for site, sentence in TOLD.items():
        assert f"site `{site}` is left out: {sentence}" in said
    assert_close(weights_of(tmp_path), by_hand(4, *WRONG, rounds=4))


@pytest.mark.slow
def test_a_round_survives_a_site_that_is_killed_in_it(tmp_path: Path) -> None:
    said = played("secure", tmp_path, 4, 2, "site-4:1=kill")
    assert "is lost" not in said
    assert_close(weights_of(tmp_path), by_hand(4, "site-4:1", rounds=2))


@pytest.mark.slow
def test_a_round_of_too_few_is_lost_and_a_script_that_fails_tells_nothing(tmp_path: Path) -> None:
    said = played("secure", tmp_path, 3, 2, "site-3:1=error")
    assert re.search(r"round 1 is lost, and the model stays as it was: at least 3 silos must agree on keys", said)
    assert_close(weights_of(tmp_path), by_hand(3, rounds=1))
    at_server = (tmp_path / "job/server/log.txt").read_text()
    assert "4711" not in at_server


def test_settings_that_need_each_sites_result_are_refused() -> None:
    given: dict[str, Any] = {"model": Net(), "min_clients": 2, "train_script": str(JOB / "client.py")}
    for name, value in {"exclude_vars": "a", "aggregation_weights": {"site-1": 2.0}, "aggregator": object()}.items():
        with pytest.raises(ParameterError, match=f"{name} needs each site's own result at the server"):
            SecureFedAvgRecipe(**{**given, name: value})
    for secure in (SecureAggregation(scheme="none"), SecureAggregation(scheme="additive-shares")):
        with pytest.raises(ParameterError, match='SecureFedAvgRecipe sums with scheme = "pairwise"'):
            SecureFedAvgRecipe(**given, secure=secure)
