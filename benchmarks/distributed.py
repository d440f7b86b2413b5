"""What many machines cost: rounds over NVIDIA FLARE with mutual TLS, three sites and a server on one loopback.

    OMP_NUM_THREADS=1 python benchmarks/distributed.py --json [--only small,masked,..] [--data DIR]

small     a round of FedSGD with some 1,000 parameters, scheme "none" (one exchange a round): median and 95th percentile
          of milliseconds over 1,000 rounds, without the first ten; after each round one bare aux exchange of FLARE's
          between the same processes, with as many bytes each way (bare_exchange.py): `small_bare_ms`, and the ratio
masked    PBPFL with the same model and pairwise masks: `masked_ms`; compare with `small_ms`
large     FedSGD with 10 million parameters: median seconds of 5 rounds, without the first, and of the bare exchange
steady    5,000 rounds of the small one at ten a second: most threads in the server's job process, and its resident
          memory after 1,000 rounds and at the end
many      200 rounds with 15 sites: threads and resident MiB of the server's job after 50 rounds and at the end
killed    a site's job process killed (SIGKILL) while rounds go on: seconds until the server waits for it, or a round
          ended without it, and until one ended with it again; then the server, all of it, killed, and begun again by
          --resume: seconds from that command to the first new round
bank      FedSGD with pairwise masks on bank marketing (--data or MORETTA_DATA has bank_marketing/), 100 rounds:
          `bank_wall_ratio`, seconds of the rounds over those of the same run in-process, median of three pairs

What they are to stay within: small 12 ms and 1.5 times the bare exchange; masked twice small; large 1.5 s; 300 threads,
memory flat; a killed site noticed in 1 s and back in 5 s; 30 s to resume. All but the ratios are the machine's too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np
from measure import Figure, figure, main, ratio

from moretta.config import run_files
from moretta.data import datasets, partition
from moretta.data.settings import Data
from moretta.run.assembly import federation_of

SITES = ("north", "south", "west")
FIFTEEN = tuple(f"site-{number:02}" for number in range(1, 16))
MORETTA = (sys.executable, "-c", "from moretta.commands.main import main; main()")
WITH_BARE = (sys.executable, str(Path(__file__).with_name("bare_exchange.py")))
RUN = """[run]
name = "benchmark"
rounds = {rounds}
seed = 1
checkpoint-every = {checkpoint}
evaluate-every = 1000000
[data]
source = "sites"
inputs = [{inputs}]
classes = 2
batch-size = {batch}
standardise = false
[model]
source = "mlp"
hidden = {hidden}
[protocol]
name = "{protocol}"
loss = "mse"
learning-rate = 0.001
[secure-aggregation]
scheme = "{scheme}"
[engine]
name = "flare"
sites = {sites}
"""
SILO = '[silo]\nname = "{name}"\n[data]\nsource = "rows.npz"\n'
STEADY = {
    "steady_most_threads": "threads",
    "steady_early_mib": "MiB",
    "steady_late_mib": "MiB",
    "steady_rounds_per_s": "a second",
}
FULL = {"small": 1000, "masked": 300, "large": 6, "steady": 5000, "many": 200}
QUICK = {"small": 30, "masked": 30, "large": 2, "steady": 100, "many": 20}


class Hospitals:
    """A server and sites, each a process of its own, in a folder. moretta: the words that begin its commands."""

    def __init__(
        self, folder: Path, run: str, rows: dict[str, tuple[np.ndarray, np.ndarray]], moretta: Sequence[str]
    ) -> None:
        self.folder, self.out, self._moretta, self._sites = folder, folder / "run", moretta, list(rows)
        self._joined: list[subprocess.Popen[bytes]] = []
        self._server: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        (folder / "run.toml").write_text(run)
        for name, (x, y) in rows.items():
            (folder / name).mkdir()
            np.savez(folder / name / "rows.npz", x=x, y=y)
            (folder / name / "silo.toml").write_text(SILO.format(name=name))

    def serve(self, *more: str) -> None:
        """Start the server, and the first time the sites too."""
        words = ["serve", "run.toml", "--out", "run", "--port", str(self._port), *more]
        self._server = self._start(words, "serve.log")
        while not self._joined:
            time.sleep(0.1)
            self._check()
            kits = [self.folder / "run-kits" / name for name in self._sites]
            if all((kit / "local").is_dir() for kit in kits):
                time.sleep(1.0)
                words = [["join", str(kit), "--silo", f"{kit.name}/silo.toml", "--once"] for kit in kits]
                self._joined = [self._start(one, f"join-{one[1].rpartition('/')[2]}.log") for one in words]

    def _start(self, words: list[str], log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as sink:
            return subprocess.Popen((*self._moretta, *words), cwd=self.folder, stdout=sink, stderr=sink)

    def _check(self) -> None:
        if self._server is not None and self._server.poll() not in (None, 0):
            raise SystemExit((self.folder / "serve.log").read_text())

    def history(self) -> list[dict[str, Any]]:
        """Return the rounds so far."""
        with contextlib.suppress(OSError):
            return [
                json.loads(line) for line in (self.out / "history.jsonl").read_text().splitlines() if line[-1:] == "}"
            ]
        return []

    def count(self) -> int:
        """Return how many rounds there have been."""
        with contextlib.suppress(OSError):
            return (self.out / "history.jsonl").read_bytes().count(b"\n")
        return 0

    def until(self, what: Callable[[list[dict[str, Any]]], bool], look: Callable[[], None] = lambda: None) -> float:
        """Wait until the history is so; return the moment. look: called on the way."""
        while not what(self.history()):
            self._check()
            look()
            time.sleep(0.02)
        return time.monotonic()

    def end(self) -> list[dict[str, Any]]:
        """Wait for the run's end; return its history."""
        if self._server is not None and self._server.wait():
            self._check()
        for process in self._joined:
            process.wait(60)
        return self.history()

    def is_waiting(self) -> bool:
        """Return whether the server waits for a site without which masks do not let the round go on."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / "run-serve" / "status.json").read_text())["state"] == "waiting"
        return False

    def job(self, site: str | None = None) -> int:
        """Return the process id of a site's job, or of the server's."""
        mark = "runner_process" if site is None else "worker_process"
        folder = str(self.folder / "run-kits" / (site or "server"))
        return next(pid for pid, words in _processes() if any(mark in word for word in words) and folder in words)

    def kill_server(self) -> None:
        """Kill the server, all of it, as a power cut would."""
        folder = str(self.folder / "run-kits" / "server")
        found = [pid for pid, words in _processes() if folder in words]
        for pid in (*([self._server.pid] if self._server else []), *found):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._server is not None:
            self._server.wait()

    def close(self) -> None:
        """End what still runs."""
        for process in (*self._joined, *([self._server] if self._server else [])):
            process.terminate()
        for process in (*self._joined, *([self._server] if self._server else [])):
            process.wait(60)


def _processes() -> Iterator[tuple[int, list[str]]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                yield int(entry.name), (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")


@contextlib.contextmanager
def hospitals(
    run: str, rows: dict[str, tuple[np.ndarray, np.ndarray]], moretta: Sequence[str] = MORETTA
) -> Iterator[Hospitals]:
    """Make sites and a server in a folder of their own, and leave nothing behind."""
    folder = Path(tempfile.mkdtemp(prefix="moretta-distributed-"))
    made = Hospitals(folder, run, rows, moretta)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder)


def some_rows(count: int, inputs: int, sites: Sequence[str] = SITES) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return rows of noise for each site."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.standard_normal((count, inputs)).astype(np.float32), rng.integers(0, 2, count)) for name in sites
    }


def _run(
    rounds: int,
    inputs: int,
    hidden: list[int],
    batch: int,
    scheme: str = "none",
    checkpoint: int = 100_000,
    protocol: str = "fedsgd",
    sites: Sequence[str] = SITES,
) -> str:
    given = {"inputs": inputs, "hidden": hidden, "batch": batch, "scheme": scheme, "protocol": protocol}
    return RUN.format(rounds=rounds, checkpoint=checkpoint, sites=json.dumps(sites), **given)


def _beside_bare(
    run: str, rows: dict[str, tuple[np.ndarray, np.ndarray]], skip: int
) -> tuple[list[float], list[float]]:
    """Return milliseconds of each round and of each bare exchange, but for the first."""
    with hospitals(run, rows, WITH_BARE) as made:
        made.serve()
        rounds = [1e3 * line["seconds_total"] for line in made.end()[skip:]]
        bare = [json.loads(line)["ms"] for line in (made.out / "bare.jsonl").read_text().splitlines()[skip:]]
    return rounds, bare


def small(rounds: int) -> dict[str, Figure]:
    """Time rounds of some 1,000 parameters: 30 * 28 + 28 + 28 + 1 = 897."""
    times, bare = _beside_bare(_run(rounds, 30, [28], 8), some_rows(64, 30), 10)
    return {
        "small_ms": figure(times, "ms"),
        "small_p95_ms": figure(quantiles(times, n=20)[-1], "ms"),
        "small_bare_ms": figure(bare, "ms"),
        "small_over_bare_ratio": ratio(times, bare),
    }


def masked(rounds: int) -> dict[str, Figure]:
    """Time rounds of PBPFL with pairwise masks."""
    times, bare = _beside_bare(_run(rounds, 30, [28], 8, "pairwise", protocol="pbpfl"), some_rows(64, 30), 10)
    return {"masked_ms": figure(times, "ms"), "masked_over_bare_ratio": ratio(times, bare)}


def large(rounds: int) -> dict[str, Figure]:
    """Time rounds of 10 million parameters."""
    times, bare = _beside_bare(_run(rounds, 1000, [2700, 2700], 1), some_rows(8, 1000), 1)  # 9.996 million
    return {
        "large_s": figure(times, "s", 1e-3),
        "large_most_s": figure(max(times), "s", 1e-3),
        "large_bare_s": figure(bare, "s", 1e-3),
        "large_over_bare_ratio": ratio(times, bare),
    }


def steady(rounds: int) -> dict[str, Figure]:
    """Look at the server's job process while rounds go on at ten a second, by a stop in between."""
    found: dict[str, float] = {"steady_most_threads": 0.0}
    with hospitals(_run(rounds, 30, [28], 8), some_rows(64, 30)) as made:
        made.serve()
        made.until(lambda history: len(history) > 0)
        pid = made.job()

        def look() -> None:
            status = Path(f"/proc/{pid}/status").read_text()
            threads, resident = (int(status.split(f"{key}:")[1].split()[0]) for key in ("Threads", "VmRSS"))
            found["steady_most_threads"] = max(found["steady_most_threads"], threads)
            done = made.count()
            if done >= rounds // 5:
                found.setdefault("steady_early_mib", resident / 1024)
            found["steady_late_mib"] = resident / 1024
            # ten rounds a second: the job sleeps while it is ahead of them
            ahead = done / 10 - (time.monotonic() - began)
            if ahead > 0.05:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(min(ahead, 1.0))
                os.kill(pid, signal.SIGCONT)

        began = time.monotonic()
        with contextlib.suppress(OSError):  # the process has ended
            while made.count() < rounds:
                look()
                time.sleep(0.01)
        found["steady_rounds_per_s"] = rounds / (time.monotonic() - began)
        made.end()
    return {name: figure(value, STEADY[name]) for name, value in found.items()}


def many(rounds: int) -> dict[str, Figure]:
    """Look at the server's job process after a quarter of the rounds of 15 sites, and at the end."""
    found = dict[str, float]()
    with hospitals(_run(rounds, 30, [28], 8, sites=FIFTEEN), some_rows(64, 30, FIFTEEN)) as made:
        made.serve()
        for name, share in (("early", 0.25), ("late", 0.95)):
            made.until(lambda history, share=share: len(history) >= share * rounds)
            status = Path(f"/proc/{made.job()}/status").read_text()
            found[f"many_{name}_threads"] = int(status.split("Threads:")[1].split()[0])
            found[f"many_{name}_mib"] = int(status.split("VmRSS:")[1].split()[0]) / 1024
        times = [1e3 * line["seconds_total"] for line in made.end()[10:]]
    units = {name: figure(value, "threads" if name.endswith("threads") else "MiB") for name, value in found.items()}
    return {**units, "many_ms": figure(times, "ms")}


def killed(rounds: int) -> dict[str, Figure]:
    """Kill a site's job and then the server, and time what follows."""

    def without(history: list[dict[str, Any]]) -> bool:
        return bool(history) and any(gone["silo"] == "south" for gone in history[-1]["dropped"])

    with hospitals(_run(100_000, 30, [28], 8, "pairwise", 10), some_rows(64, 30)) as made:
        made.serve()
        made.until(lambda history: len(history) > 30)
        os.kill(made.job("south"), signal.SIGKILL)
        began = time.monotonic()
        noticed = made.until(lambda history: made.is_waiting() or without(history)) - began
        made.until(without)
        back = made.until(lambda history: not without(history)) - began
        made.kill_server()
        before = len(made.history())
        began = time.monotonic()
        made.serve("--resume")
        resumed = made.until(lambda history: len(history) > before or _has_new(made, before)) - began
    found = {"killed_noticed_s": noticed, "killed_back_s": back, "server_resumed_s": resumed}
    return {name: figure(seconds, "s") for name, seconds in found.items()}


def _has_new(made: Hospitals, before: int) -> bool:
    """Return whether a round was played after a resume, which first forgets those after its checkpoint."""
    status = made.out / "history.jsonl"
    return len(made.history()) < before and time.time() - status.stat().st_mtime < 0.5 and len(made.history()) % 10 > 0


def bank(folder: Path, pairs: int) -> dict[str, Figure]:
    """Compare the wall time of bank marketing's rounds with those of the same run in-process."""
    bank = Data(source="bank-marketing", path=str(folder))
    dealt = partition.distribute(datasets.load(bank, seed=1), bank, 1)
    rows = {name: (one.x, one.y) for name, one in zip(SITES, dealt.silos, strict=True)}
    inputs = dealt.silos[0].x.shape[1]
    run = _run(100, inputs, [32, 32], 256, "pairwise").replace("standardise = false", "standardise = true")
    ratios, walls = [], []
    for _ in range(pairs):
        with tempfile.TemporaryDirectory() as place:
            text = run.replace('source = "sites"', f'source = "bank-marketing"\npath = "{folder}"\nsilos = 3')
            text = text.replace(f"inputs = [{inputs}]\nclasses = 2\n", "")
            text = text.replace('name = "flare"\nsites = ["north", "south", "west"]\n', "strict = true\n")
            path = Path(place) / "run.toml"
            path.write_text(text)
            run_file = run_files.load(path)
            result = federation_of(run_file, None).train(run_file.run.rounds, run_file.run.seed)
            here = sum(line["seconds_total"] for line in result.history[1:])
        with hospitals(run, rows) as made:
            made.serve()
            walls.append(sum(line["seconds_total"] for line in made.end()[1:]))
        ratios.append(walls[-1] / here)
    return {"bank_wall_ratio": figure(ratios, "times"), "bank_wall_s": figure(walls, "s")}


def run(given: argparse.Namespace) -> dict[str, Figure]:
    """Measure what was asked for."""
    counts, found = QUICK if given.quick else FULL, dict[str, Figure]()
    for name in given.only.split(","):
        if name == "bank":
            found |= bank(Path(given.data) / "bank_marketing", 1 if given.quick else 3) if given.data else {}
        else:
            found |= {f.__name__: f for f in (small, masked, large, steady, many, killed)}[name](counts.get(name, 0))
    return found


if __name__ == "__main__":
    main(
        __doc__,
        run,
        ("--quick", {"action": "store_true", "help": "few rounds, to see that it works"}),
        ("--only", {"default": "small,masked,large,steady,many,killed,bank"}),
        ("--data", {"default": os.environ.get("MORETTA_DATA", "")}),
    )
