"""What a round over FLARE costs: its FedAvg recipe, its recipe with homomorphic encryption, and Moretta's sum.

    python -m venv FLARE; FLARE/bin/pip install tenseal==0.3.18 '.[flare]'     # torch by constraints.txt, as here
    OMP_NUM_THREADS=1 FLARE/bin/python benchmarks/flare_sums.py --json

`nvflare provision` makes kits of a server and sites with keys for the encryption; their processes run on this machine
from the first job to the last, and jobs of the recipes take turns. The network has 306,730 parameters; each site takes
one step on 30 rows a round. Plain FedAvg and ours end with the same weights up to the ring's step, or the benchmark
stops; FLARE writes the encrypted result encrypted, so that one is not compared.

A round is from its line in the server's log to the next round's; the first, with set-up of keys, is not counted, and
the last has no next. Bytes are of the loopback interface and processor seconds of all processes in the same time,
so nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from measure import figure, main, ratio
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.app_opt.pt.recipes.fedavg_he import FedAvgRecipeWithHE
from nvflare.recipe import ProdEnv
from peer_flare import ROWS, Wide

from moretta import SecureAggregation
from moretta.deployment import processes
from moretta.flare import SecureFedAvgRecipe

HERE = Path(__file__).parent
ADMIN = "admin@hospitals.org"
CASES = ("plain", "ours_64", "ours_32", "encrypted")
LOOK = 0.1  # seconds between two samples
STARTED = re.compile(r"^(\d{4}-\S+ \S+) |Round (\d+) started\.", re.MULTILINE)  # which may be lines apart
Samples = list[tuple[float, float, float]]  # the time, processor seconds, and bytes so far


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Play all cases in turns."""
    if arguments.rounds < 3:
        raise SystemExit(f"--rounds {arguments.rounds}: the first and the last are not timed; give 3 or more")
    about: dict[str, Any] = {"sites": arguments.sites, "rounds": arguments.rounds, "load": list(os.getloadavg())}
    rounds: dict[str, list[Mapping[str, float]]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder, kits(Path(folder), arguments.sites) as admin:
        for turn in range(arguments.repeats):
            ends = {}
            for name in CASES:
                print(f"turn {turn + 1} of {arguments.repeats}: {name}", file=sys.stderr, flush=True)
                out = Path(folder) / f"{name}-{turn}"
                rounds[name].append(play(name, admin, out, arguments))
                if name != "encrypted":
                    ends[name] = weights_of(out)
            about["weights_differ"] = max(about.get("weights_differ", 0.0), difference(**ends))
    for name, runs in rounds.items():
        about |= {f"{name}_{key}": figure([one[key] for one in runs], unit) for key, unit in UNITS.items()}
    for ours, theirs in (("ours_64", "plain"), ("ours_32", "plain"), ("encrypted", "plain"), ("ours_64", "encrypted")):
        for key in UNITS:
            pair = [[one[key] for one in rounds[name]] for name in (ours, theirs)]
            about[f"{ours}_over_{theirs}_{key}"] = ratio(*pair)
    return about


UNITS = {"seconds": "s", "processor": "s", "mib": "MiB"}


@contextmanager
def kits(folder: Path, sites: int) -> Iterator[Path]:
    """Provision kits and run their processes; yield the administrator's."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    names = [f"site-{number + 1}" for number in range(sites)]
    clients = "".join(f"  - {{name: {name}, type: client, org: hospitals}}\n" for name in names)
    (folder / "project.yml").write_text(PROJECT.format(port=port, clients=clients, admin=ADMIN))
    tool = [sys.executable, "-m", "nvflare.cli", "provision", "-p", "project.yml", "-w", "kits"]
    subprocess.run(tool, cwd=folder, check=True, capture_output=True)
    made = folder / "kits" / "hospitals" / "prod_00"
    parents = []
    try:
        for name in ("localhost", *names):
            parents.append(processes.start(made / name, folder / f"{name}.log"))
        yield made / ADMIN
    finally:
        for parent in parents:
            processes.stop(parent)


PROJECT = """
api_version: 3
name: hospitals
participants:
  - {{name: localhost, type: server, org: hospitals, fed_learn_port: {port}, admin_port: {port}}}
{clients}
  - {{name: {admin}, type: admin, org: hospitals, role: project_admin}}
builders:
  - path: nvflare.lighter.impl.workspace.WorkspaceBuilder
  - {{path: nvflare.lighter.impl.static_file.StaticFileBuilder, args: {{config_folder: config, scheme: grpc}}}}
  - path: nvflare.lighter.impl.he.HEBuilder
  - path: nvflare.lighter.impl.cert.CertBuilder
  - path: nvflare.lighter.impl.signature.SignatureBuilder
"""


def play(name: str, admin: Path, out: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Return a round's seconds, processor seconds of all processes and MiB over the network in one job."""
    given: dict[str, Any] = {"name": name, "model": Wide(), "min_clients": arguments.sites}
    given |= {"num_rounds": arguments.rounds, "train_script": "peer_flare.py"}
    if name == "encrypted":
        recipe = FedAvgRecipeWithHE(**given)
    elif name == "plain":
        recipe = FedAvgRecipe(**given)
    else:
        secure = SecureAggregation(ring_bits=int(name.removeprefix("ours_")))
        recipe = SecureFedAvgRecipe(secure=secure, most_weight=arguments.sites * ROWS + 1, **given)
    with sampled() as samples, redirect_stdout(sys.stderr):  # FLARE prints how the job goes
        job = recipe.execute(ProdEnv(str(admin), login_timeout=300, username=ADMIN))
        result = job.get_result()
    if result is None:
        raise SystemExit(f"the job {name} has no result")
    shutil.copytree(result, out)
    [log] = out.rglob("log.txt")
    starts, when = dict[int, float](), ""
    for now, number in STARTED.findall(log.read_text()):
        when = now or when
        starts |= {int(number): _seconds(when)} if number else {}
    if sorted(starts) != list(range(arguments.rounds)):
        raise SystemExit(f"the job {name} has started rounds {sorted(starts)} of {arguments.rounds}")
    times, processor, sent = map(np.array, zip(*samples, strict=True))
    begun = [starts[number] for number in range(1, arguments.rounds)]
    between = len(begun) - 1
    each = [np.interp((begun[0], begun[-1]), times, values) for values in (processor, sent)]
    seconds = median(later - earlier for earlier, later in itertools.pairwise(begun))
    return {
        "seconds": seconds,
        "processor": np.diff(each[0])[0] / between,
        "mib": np.diff(each[1])[0] / between / 2**20,
    }


def _seconds(when: str) -> float:
    return datetime.datetime.strptime(when, "%Y-%m-%d %H:%M:%S,%f").timestamp()


@contextmanager
def sampled() -> Iterator[Samples]:
    """Note the machine's processor seconds and the loopback interface's bytes while the block runs."""
    samples: Samples = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            busy = psutil.cpu_times()
            sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
            samples.append((time.time(), busy.user + busy.system, float(sent)))
            ended.wait(LOOK)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def weights_of(folder: Path) -> Mapping[str, Any]:
    """Return the weights that FLARE wrote."""
    [path] = folder.rglob("FL_global_model.pt")
    found: Mapping[str, Any] = torch.load(path, weights_only=True)["model"]
    return found


def difference(plain: Mapping[str, Any], **others: Mapping[str, Any]) -> float:
    """Return the largest difference of a weight. Raises SystemExit above 1e-4: then the work was not the same."""
    far = max(
        float((torch.as_tensor(one[name]) - torch.as_tensor(plain[name])).abs().max())
        for one in others.values()
        for name in plain
    )
    if not far <= 1e-4 or math.isnan(far):
        raise SystemExit(f"weights differ by {far:.2g}: not the same work")
    return far


if __name__ == "__main__":
    os.chdir(HERE)  # FLARE looks for the script where it is called
    main(
        __doc__ or "",
        run,
        ("--sites", {"type": int, "default": 5}),
        ("--rounds", {"type": int, "default": 8, "help": "of a job; the first and the last are not timed"}),
        ("--repeats", {"type": int, "default": 3}),
    )
