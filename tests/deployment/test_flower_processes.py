"""The secure sum in Flower's own processes: SuperLink, SuperNodes, an app for each message, and the simulation.

They are of an environment with Flower and Ray, which MORETTA_FLOWER names by its Python. Without it this environment is
used where it has both, and otherwise one is made from PyPI.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from audited import ROOT, audited

from moretta.secure_aggregation.identity import Identity, public_line

APP = ROOT / "examples" / "flower"
TASK = runpy.run_path(str(APP / "hospitals_app" / "task.py"))
SITES = ("north", "south", "east", "west")
PATIENCE = 1200.0  # seconds; a SuperNode starts Python for each message
WITHIN = 2e-6  # of weights near 1, which travel as float32

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Return the variables under which Flower's commands and this Moretta are found."""
    python = os.environ.get("MORETTA_FLOWER", "")
    if not python and all(map(importlib.util.find_spec, ("flwr", "ray"))):
        python = sys.executable
    if not python:
        made = tmp_path_factory.mktemp("flower")
        subprocess.run([sys.executable, "-m", "venv", made], check=True)
        python = str(made / "bin" / "python")
        subprocess.run(
            [python, "-m", "pip", "install", "-q", f"{ROOT}[flower]", "flwr[simulation]==1.42.0"], check=True
        )
    return os.environ | {
        "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "FLWR_HOME": str(tmp_path_factory.mktemp("home")),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }


class Processes:
    """What a test started, each in a session of its own, with a log by its name."""

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        self.path, self._environment = path, environment
        self._running = dict[str, subprocess.Popen[bytes]]()

    def start(self, name: str, *words: object, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        with (self.path / f"{name}.log").open("wb") as log:
            self._running[name] = subprocess.Popen(
                list(map(str, words)), env=self._environment, cwd=cwd, stdout=log, stderr=log, start_new_session=True
            )
        return self._running[name]

    def log(self, name: str) -> str:
        return (self.path / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._running[name].pid, signal.SIGKILL)
        self._running.pop(name).wait()

    def end(self) -> None:
        for name in list(self._running):
            self.kill(name)


def until(reached: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < deadline, f"waited {PATIENCE:g} s for {what}"
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def superlink(path: Path, environment: Mapping[str, str], *options: str) -> Iterator[tuple[Processes, int]]:
    """Run a SuperLink, to which `flwr run APP here` goes, and end with it what was started beside it."""
    processes, port = Processes(path, environment), free_port()
    settings = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    (Path(environment["FLWR_HOME"]) / "config.toml").write_text(settings)
    try:
        processes.start(
            "superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", port,
            "--disable-runtime-dependency-installation", *options,
        )  # fmt: skip
        until(lambda: "Uvicorn running" in processes.log("superlink"), "the SuperLink")
        yield processes, port
    finally:
        processes.end()


DESCRIBED = """
import runpy

import torch
from torch import nn

from moretta import FedAvg, Federation, Silo

task = runpy.run_path({task!r})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(task["FEATURES"])), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        score = x @ self.weight + self.bias
        return torch.stack([torch.zeros_like(score), score], dim=1)


def rows(hospital):
    x, y = task["rows"](hospital)
    return x, y.astype("int64")


def federation():
    silos = [Silo(name, *rows(hospital)) for hospital, name in enumerate({names!r})]
    steps = FedAvg(loss="cross-entropy", learning_rate=0.5, local_epochs=20)
    return Federation(Net(), silos, steps, test=rows(99), batch_size=0)
"""


def assert_audited(folder: Path, names: tuple[str, ...], found: Mapping[str, np.ndarray]) -> None:
    """Audit what the nodes recorded: its last model is the strategy's, and an attack on members fits it."""
    task = str(APP / "hospitals_app" / "task.py")
    attacks, last = audited(folder, DESCRIBED.format(task=task, names=names))
    assert "membership-inference" in attacks
    for name, one in last.items():
        np.testing.assert_allclose(one, found[name], rtol=0, atol=WITHIN)


def app_in(path: Path, **config: object) -> Path:
    """Copy the app of the examples, with other values of its configuration, and have it record views beside it."""
    folder = path / "app"
    shutil.copytree(APP, folder)
    text = (folder / "pyproject.toml").read_text()
    for key, value in config.items():
        text, count = re.subn(rf"(?m)^{key.replace('_', '-')} = [^#\n]*", f"{key.replace('_', '-')} = {value} ", text)
        assert count == 1
    (folder / "pyproject.toml").write_text(text)
    client = folder / "hospitals_app" / "client_app.py"
    text = client.read_text().replace("import secure_sum", "import record_views, secure_sum")
    client.write_text(text.replace("mods=[", f"mods=[record_views({str(path / 'recorded')!r}), "))
    return folder


def averaged(rounds: list[tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return what Flower's FedAvg makes of the app: the mean of each round's hospitals by their patients."""
    model = TASK["start"]()
    for hospitals in rounds:
        rows = {one: TASK["rows"](one) for one in hospitals}
        weights = {one: len(x) / sum(len(each) for each, _ in rows.values()) for one, (x, _) in rows.items()}
        trained = {one: TASK["train"](model, x, y) for one, (x, y) in rows.items()}
        model = {name: sum(trained[one][name] * weights[one] for one in hospitals).astype("f4") for name in model}
    return model


def test_a_supernode_that_is_killed_in_a_round_is_survived(tmp_path: Path, environment: Mapping[str, str]) -> None:
    entries = ""
    for name in SITES:
        identity = Identity.fresh()
        identity.save(tmp_path / name / "key")
        entries += f'[[silo]]\nname = "{name}"\nkey = "{public_line(identity.public_key)}"\n'
        text = f'[silo]\nname = "{name}"\nidentity = "key"\nroster = "../roster.toml"\n'
        (tmp_path / name / "silo.toml").write_text(text)
    (tmp_path / "roster.toml").write_text(entries)
    model = tmp_path / "model.npz"
    folder = app_in(tmp_path, clients=6, roster=f'"{tmp_path}/roster.toml"', save=f'"{model}"', num_server_rounds=2)
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / "silo.toml").write_text('[silo]\nname = "stranger"\n')
    with superlink(tmp_path, environment) as (processes, port):
        for number, name in enumerate((*SITES, "stranger", "homeless")):
            own = f'moretta="{tmp_path}/{name}/silo.toml" ' if name != "homeless" else ""
            config = f"{own}partition-id={number}"
            processes.start(
                name, "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", "--port", free_port(),
                "--node-config", config,
            )  # fmt: skip
        run = processes.start("run", "flwr", "run", ".", "here", "--stream", cwd=folder)
        # Its name, two for keys, three for each sum of the first round: the next is the second round's training.
        until(lambda: processes.log("west").count("Receiving:") >= 10 or run.poll() is not None, "the second round")
        processes.kill("west")
        until(lambda: run.poll() is not None, "the run's end")
        log = processes.log("run")
    assert run.returncode == 0, log[-3000:]
    assert len(re.findall("summed 4 clients of 4", log)) == 2, log
    assert "this sum is without `west`: disconnected" in log
    assert re.search("takes no part: its name `stranger` is not in the roster", log)
    assert re.search("takes no part: this SuperNode names no silo.toml", log)
    found, expected = np.load(model), averaged([(0, 1, 2, 3), (0, 1, 2)])
    assert set(found) == set(expected)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=WITHIN)
    assert_audited(tmp_path / "recorded", SITES, found)


SPOILT = """
    number, hospital = message.content["config"]["server-round"], context.node_config["partition-id"]
    if (number, hospital) == (2, 0):
        model["weight"] = model["weight"] * np.nan
    elif (number, hospital) == (3, 1):
        del model["bias"]
    elif (number, hospital) == (4, 2):
        model["weight"] = model["weight"][None]
    elif (number, hospital) == (5, 3):
        model["weight"] = model["weight"].astype("int32")
    arrays = """
WITHOUT = {
    "silo-0": "this site cannot take part in this sum; its own log says why",
    "silo-1": "expected the arrays that were sent back from the app; ['bias'] differ",
    "silo-2": "`weight`: expected the shape that was sent, (12,), from the app; got (1, 12)",
    "silo-3": "`weight`: expected the kind of numbers that was sent, 'f', from the app; got 'i'",
}


def test_a_simulation_sums_too_and_goes_on_without_what_does_not_fit(
    tmp_path: Path, environment: Mapping[str, str]
) -> None:
    model = tmp_path / "model.npz"
    folder = app_in(tmp_path, clients=5, save=f'"{model}"', num_server_rounds=5)
    client = folder / "hospitals_app" / "client_app.py"
    text = client.read_text().replace("    arrays = ", SPOILT.removeprefix("\n"))
    client.write_text(text.replace("from flwr.app", "import numpy as np\nfrom flwr.app", 1))
    with superlink(tmp_path, environment, "--simulation") as (processes, _):
        config = "num-supernodes=5 client-resources-num-cpus=1 init-args-num-cpus=2"
        run = processes.start(
            "run", "flwr", "run", ".", "here", "--stream", "--federation-config", config, cwd=folder
        )  # fmt: skip
        until(lambda: run.poll() is not None, "the run")
        log = processes.log("run")
    assert run.returncode == 0, log[-3000:]
    assert (log.count("summed 5 clients of 5"), log.count("summed 4 clients of 5")) == (6, 4)
    for name, sentence in WITHOUT.items():
        assert re.search(f"this sum is without `{name}`: .*{re.escape(sentence)}", log), name
    everybody = set(range(5))
    found, expected = np.load(model), averaged([(*everybody,), *((*(everybody - {one}),) for one in range(4))])
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=WITHIN)
    assert_audited(tmp_path / "recorded", tuple(f"silo-{number}" for number in range(5)), found)
