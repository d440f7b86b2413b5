"""The demo, with fewer rounds: what its runs leave, and PBPFL's weights against FedSGD's."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from test_cli import call

from moretta.config import run_files
from moretta.engines import checkpoint, run_folder, views
from moretta.engines.run_folder import read_json, read_model

ROUNDS = 60


def compare(root: Path, out: Path, protocols: str, *changes: str) -> dict[str, Any]:
    sets = [word for change in (f"run.rounds={ROUNDS}", *changes) for word in ("--set", change)]
    done = call("compare", root / "examples" / "wdbc.toml", "--protocols", protocols, "--out", out, *sets, "--json")
    assert done.code == 0, done.err
    return done.told


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest) -> Path:
    return request.config.rootpath


@pytest.fixture(scope="module")
def demo(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo as `make demo` calls it."""
    out = tmp_path_factory.mktemp("demo")
    told = compare(root, out, "centralised,local,fedsgd,pbpfl")
    assert told["weight_difference_from_fedsgd"]["pbpfl"] <= 1e-3  # in float32; the rest is held below
    return out


def gap(out: Path) -> float:
    """The largest difference between a weight of PBPFL and of FedSGD."""
    ours, theirs = (read_model(out / name, "model.safetensors") for name in ("pbpfl", "fedsgd"))
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in theirs)


def test_in_float32_pbpfl_ends_where_fedsgd_does(demo: Path) -> None:
    ours, theirs = (read_model(demo / name, "model.safetensors") for name in ("pbpfl", "fedsgd"))
    for name, tensor in theirs.items():
        assert np.abs(ours[name] - tensor).max() <= 1e-3 * np.abs(tensor).max(), name
    accuracy = [read_json(demo / name / "result.json")["test"]["accuracy"] for name in ("pbpfl", "fedsgd")]
    assert accuracy[0] == accuracy[1] > 0.9


def test_in_float64_and_in_the_clear_it_ends_there_to_1e_8(root: Path, tmp_path: Path) -> None:
    told = compare(root, tmp_path, "fedsgd,pbpfl", "run.dtype=float64", "secure-aggregation.scheme=none")
    assert told["weight_difference_from_fedsgd"]["pbpfl"] <= 1e-8
    assert all("ring_weight_error" not in run["facts"] for run in told["runs"])


def test_in_float64_masks_cost_no_more_than_the_runs_state(root: Path, tmp_path: Path) -> None:
    told = compare(root, tmp_path, "fedsgd,pbpfl", "run.dtype=float64")
    stated = sum(run["facts"]["ring_weight_error"] for run in told["runs"])
    assert 0 < gap(tmp_path) <= stated < 1e-8


def test_the_page_is_written_and_holds_all_four(demo: Path) -> None:
    page = (demo / "report.html").read_text()
    assert page.startswith("<!")
    assert all(name in page for name in ("Centralised", "Local", "FedSGD", "PBPFL"))
    assert not re.search(r'(src|href)="(https?:)?//', page)  # it opens offline


def test_a_run_folder_is_whole_and_each_part_says_its_format(demo: Path) -> None:
    folder = demo / "pbpfl"
    assert call("report", folder).code == 0
    parts = {
        "run.toml",
        "result.json",
        "history.jsonl",
        "inputs.json",
        "log.txt",
        "report.html",
        "views",
        "truth",
        "checkpoint",
        "helped",
        "rows.json",
    }
    assert {path.name for path in folder.iterdir()} == parts | {"model.safetensors", "released.safetensors"}
    for name in ("result.json", "inputs.json"):
        assert json.loads((folder / name).read_text())["format"] == run_folder.FORMAT
    for name in ("model.safetensors", "released.safetensors"):
        with safe_open(folder / name, "numpy") as file:
            assert file.metadata()["format"] == str(run_folder.FORMAT)
    assert sorted(path.name for path in (folder / "checkpoint").iterdir()) == ["round-000050", "round-000060"]
    for place in (folder / "checkpoint").iterdir():
        assert json.loads((place / "run.json").read_text())["format"] == checkpoint.FORMAT
        assert {path.name for path in place.iterdir()} == {"run.json", "server.safetensors"} | {
            f"silo-silo-{number}.safetensors" for number in (1, 2, 3)
        }
        assert all(path.stat().st_mode & 0o077 == 0 for path in place.glob("*.safetensors"))
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [line["round"] for line in history] == list(range(1, ROUNDS + 1))


def test_views_are_recorded_in_the_rounds_of_the_run_file(demo: Path) -> None:
    folder = demo / "pbpfl" / "views"
    assert {path.name for path in folder.iterdir()} == {"server", "silo-1", "silo-2", "silo-3", "index.jsonl"}
    for role in filter(Path.is_dir, folder.iterdir()):
        assert sorted(path.name for path in role.iterdir()) == [f"round-{number:06d}.0.bin" for number in range(1, 21)]
    first = list(views.read(folder / "silo-2" / "round-000001.0.bin"))
    assert {seen.peer for seen in first} == {"server"}
    assert {seen.direction for seen in first} == {"sent", "received"}


def test_the_run_file_in_the_folder_is_the_run(demo: Path, root: Path) -> None:
    kept = run_files.load(demo / "pbpfl" / "run.toml")
    given = run_files.load(root / "examples" / "wdbc.toml", [f"run.rounds={ROUNDS}"])
    assert kept.model_dump(exclude={"base"}) == given.model_dump(exclude={"base"})
    assert kept.base.resolve() == given.base.resolve()
    written = tomllib.loads((demo / "pbpfl" / "run.toml").read_text())
    assert written == read_json(demo / "pbpfl" / "result.json")["settings"]


PHASES = {"perturbation", "preparation", "local_forward", "local_backward", "aggregation", "update", "delivery"}


@pytest.mark.parametrize("protocol", ["centralised", "local", "fedsgd", "pbpfl"])
def test_the_result_says_what_was_agreed(demo: Path, protocol: str) -> None:
    record = read_json(demo / protocol / "result.json")
    assert record["protocol"] == protocol
    assert (record["rounds"], record["silos"], record["parameters"]) == (ROUNDS, 3, 30 * 32 + 32 + 32 * 32 + 32 + 33)
    assert {"rows", "loss", "accuracy", "metrics", "per_silo"} <= record["test"].keys()
    assert {"auc", "balanced_accuracy"} <= record["test"]["metrics"].keys()
    assert record["test"]["per_silo"].keys() == {"silo-1", "silo-2", "silo-3"}
    assert {"up_per_silo_per_round", "down_per_silo_per_round", "secure_aggregation"} <= record["bytes"].keys()
    assert record["seconds"].keys() == PHASES | {"total"}
    assert record["dropped"] == []
    assert {"moretta", "python", "torch", "numpy"} <= record["versions"].keys()
    alone = protocol in ("local", "centralised")
    assert (demo / protocol / "models").exists() == (protocol == "local")
    assert alone or record["bytes"]["secure_aggregation"] > 0
    if protocol == "pbpfl":
        fedsgd = read_json(demo / "fedsgd" / "result.json")["bytes"]["up_per_silo_per_round"]
        # m + 2 gradients in the place of one
        assert record["bytes"]["up_per_silo_per_round"] / fedsgd == pytest.approx(3, rel=0.1)
        assert record["seconds"]["perturbation"] > 0
