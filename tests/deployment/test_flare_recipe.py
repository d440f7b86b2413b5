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
from audited import audited
from torch import Tensor

pytest.importorskip("nvflare", reason="the engine for many machines needs nvflare")

JOB = Path(__file__).parent / "flare_job"
sys.path.insert(0, str(JOB))
from hospitals import free_port  # noqa: E402
from net import Net, rows, train  # noqa: E402

from moretta.deployment import processes, provisioning  # noqa: E402
from moretta.errors import ParameterError  # noqa: E402
from moretta.flare import SecureFedAvgRecipe  # noqa: E402
from moretta.secure_aggregation.identity import Identity, public_line  # noqa: E402
from moretta.secure_aggregation.settings import SecureAggregation  # noqa: E402

Weights = Mapping[str, Tensor]
DESCRIBED = """
import sys

sys.path.insert(0, {folder!r})
from net import Net, rows

from moretta import FedAvg, Federation, Silo


def federation():
    silos = [Silo(name, *rows(name)) for name in ("site-1", "site-2", "site-3")]
    steps = FedAvg(loss="cross-entropy", learning_rate=0.1, local_epochs=2)
    return Federation(Net(), silos, steps, test=rows("site-9"), batch_size=0)
"""


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
    said = played("secure", tmp_path / "ours", 3, 3, f"views={tmp_path}/seen-ours")
    played("plain", tmp_path / "theirs", 3, 3, f"views={tmp_path}/seen-theirs")
    ours, theirs = weights_of(tmp_path / "ours"), weights_of(tmp_path / "theirs")
    assert_close(ours, theirs)
    assert_close(ours, by_hand(3, rounds=3))
    assert "is left out" not in said
    for who, final in {"ours": ours, "theirs": theirs}.items():
        attacks, last = audited(tmp_path / f"seen-{who}", DESCRIBED.format(folder=str(JOB)))
        assert "membership-inference" in attacks
        assert_close({name: torch.tensor(one) for name, one in last.items()}, final)


PROJECT = """
api_version: 3
name: hospitals
participants:
  - {{name: localhost, type: server, org: hospitals, fed_learn_port: {port}, admin_port: {port}}}
  - {{name: site-1, type: client, org: hospitals}}
  - {{name: site-2, type: client, org: hospitals}}
  - {{name: site-3, type: client, org: hospitals}}
  - {{name: admin@hospitals.org, type: admin, org: hospitals, role: project_admin}}
builders:
  - path: nvflare.lighter.impl.workspace.WorkspaceBuilder
  - {{path: nvflare.lighter.impl.static_file.StaticFileBuilder, args: {{config_folder: config, scheme: grpc}}}}
  - path: nvflare.lighter.impl.cert.CertBuilder
  - path: nvflare.lighter.impl.signature.SignatureBuilder
"""


@pytest.mark.slow
def test_kits_that_flare_provisions_play_it_under_a_roster_and_floors(tmp_path: Path) -> None:
    sites, entries = [f"site-{number}" for number in (1, 2, 3)], ""
    (tmp_path / "project.yml").write_text(PROJECT.format(port=free_port()))
    tool = [sys.executable, "-m", "nvflare.cli", "provision", "-p", "project.yml", "-w", "kits"]
    subprocess.run(tool, cwd=tmp_path, check=True, capture_output=True)
    made = tmp_path / "kits" / "hospitals" / "prod_00"
    for name in sites:
        identity = Identity.fresh()
        identity.save(tmp_path / name / "key")
        entries += f'[[silo]]\nname = "{name}"\nkey = "{public_line(identity.public_key)}"\n'
        of_silo = f'name = "{name}"\nout = "kept"\nidentity = "key"\nroster = "../roster.toml"'
        text = f"[silo]\n{of_silo}\n[privacy]\nfewest-silos = 3\nroster = true\n"
        (tmp_path / name / "silo.toml").write_text(text)
        provisioning.patch(made / name, tmp_path / name / "silo.toml")
    (tmp_path / "roster.toml").write_text(entries)
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parents = list[processes.Parent]()
    try:
        for name in ("localhost", *sites):
            parents.append(processes.start(made / name, tmp_path / f"{name}.log", given))
        played("secure", tmp_path, 3, 2, f"admin={made}/admin@hospitals.org", f"roster={tmp_path}/roster.toml")
    finally:
        for parent in parents:
            processes.stop(parent)
    assert_close(weights_of(tmp_path / "result"), by_hand(3, rounds=2))
    for name in sites:
        assert len(list((tmp_path / name / "kept").rglob("*.jsonl"))) == 1  # which sums it has helped to open


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
        with pytest.raises(ParameterError, match=f"{name} needs each site's own result, which the server never sees"):
            SecureFedAvgRecipe(**{**given, name: value})
    for secure in (SecureAggregation(scheme="none"), SecureAggregation(scheme="additive-shares")):
        with pytest.raises(ParameterError, match='SecureFedAvgRecipe needs scheme = "pairwise"'):
            SecureFedAvgRecipe(**given, secure=secure)
