"""Sites whose targets the run brings to scale: they train as one machine does, and predict in their own units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loopback import SEED, SERVER, Machines
from test_cli import call

from moretta import Engine, Federation, Silo
from moretta.config import silo_file
from moretta.deployment import shared_settings as told
from moretta.deployment import site_policy
from moretta.engines.run_folder import read_model
from moretta.errors import PolicyError
from moretta.models import catalogue
from moretta.secure_aggregation.identity import public_line

NAMES = ("north", "south", "west")
RUN = """
[run]
name = "run"
rounds = 3
seed = 7
insecure-secret-seed = 3
[data]
source = "sites"
inputs = [3]
outputs = 1
test = "test.npz"
batch-size = 8
standardise = true
standardise-targets = true
score-at-silos = true
[model]
source = "mlp"
hidden = [5]
[protocol]
{protocol}
[engine]
name = "flare"
sites = ["north", "south", "west"]
"""
SILO = """
[silo]
name = "{name}"
out = "kept"
insecure-secret-seed = 3
server-key = "{key}"
{edge}
[data]
source = "rows.npz"
test-fraction = 0.2
"""
PROTOCOLS = {
    "fedsgd": 'name = "fedsgd"\nlearning-rate = 0.1',
    "pbpfl": 'name = "pbpfl"\nlearning-rate = 0.1',
    "edge": 'name = "baffle"\nlearning-rate = 0.05\nk = 8',
}


def rows(seed: int) -> dict[str, Any]:
    drawn = np.random.default_rng(seed)
    x = drawn.normal(20, 5, (30, 3)).astype(np.float32)
    return {"x": x, "y": (50_000 + 900 * x[:, 0] + drawn.normal(0, 500, 30)).astype(np.float32)}


class Sites(Machines):
    """Three sites with costs of about 70,000; under "edge" one has no PyTorch."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.rounds, self.names = folder, 3, list(NAMES)
        (folder / "many.toml").write_text(RUN.format(protocol=PROTOCOLS[kind]))
        np.savez(folder / "test.npz", **rows(9))
        for number, name in enumerate(NAMES):
            (folder / name).mkdir()
            np.savez(folder / name / "rows.npz", **rows(number))
            edge = "edge = true" if (kind, name) == ("edge", "north") else ""
            text = SILO.format(name=name, key=public_line(SERVER.public_key), edge=edge)
            (folder / name / "silo.toml").write_text(text)
        self.read()


@pytest.mark.parametrize("kind", PROTOCOLS)
def test_sites_train_on_scaled_targets_as_one_machine_does(kind: str, tmp_path: Path, one_process: None) -> None:
    if kind == "edge":
        pytest.importorskip("onnxruntime")
    sites = Sites(tmp_path, kind)
    sites.start()
    try:
        ended = sites.serve(tmp_path / "many", least=3)
    finally:
        sites.stop()
    silos = []
    for name in NAMES:
        mine = next(
            one
            for one in told.silos_at(sites.run_file, silo_file.load(tmp_path / name / "silo.toml"))[0]
            if one.name == name
        )
        silos.append(Silo(name, mine.x, mine.y, held_out=mine.held_out))
    test = rows(9)
    here = Federation(
        catalogue.build("mlp", inputs=(3,), outputs=1, seed=SEED, hidden=[5]),
        silos,
        sites.run_file.protocol,
        test=(test["x"], test["y"]),
        batch_size=8,
        standardise=True,
        standardise_targets=True,
        score_at_silos=True,
        engine=Engine(edge=("north",)) if kind == "edge" else Engine(),
        insecure_secret_seed=3,
    ).train(3, SEED)
    ours = read_model(tmp_path / "many", "released.safetensors")
    assert here.released is not None
    for name, one in ours.items():
        np.testing.assert_allclose(one, here.raw_model().network.state_dict()[name].numpy(), rtol=0, atol=1e-6)
    assert ended.test["mse"] == pytest.approx(here.test["mse"], rel=1e-4)
    assert ended.test["silos"]["mse"] == pytest.approx(here.test["silos"]["mse"], rel=1e-4)
    assert ended.test["silos"]["mse"] > 1e5
    np.savez(tmp_path / "new.npz", x=test["x"])
    for name in NAMES:  # by what was released to it
        out = tmp_path / f"{name}.npy"
        assert call("predict", sites.kept(name), "--data", tmp_path / "new.npz", "--out", out).code == 0
        np.testing.assert_allclose(np.load(out)[:, 0], np.asarray(here.predict(test["x"]), np.float64), rtol=1e-5)


def test_the_scale_of_targets_is_pinned_by_a_sites_first_run(tmp_path: Path) -> None:
    """Else a server would have the statistics of targets by another run; a run without them is as it ever was."""
    sites = Sites(tmp_path, "fedsgd")
    site = silo_file.load(tmp_path / "north" / "silo.toml")
    plain = sites.text.replace("standardise-targets = true\n", "")
    assert "standardise-targets" not in plain
    site_policy.admit(plain, site)
    with pytest.raises(PolicyError, match=r"\[data\] standardise-targets: not set -> true.*moretta accept"):
        site_policy.admit(sites.text, site)
    classes = sites.text.replace("outputs = 1", "classes = 3")
    with pytest.raises(PolicyError, match="standardise-targets is for targets that are numbers"):
        site_policy.admit(classes, site)
