"""What memory a large model takes: of the server, and of a silo as a ratio to one under FedSGD.

    OMP_NUM_THREADS=1 python benchmarks/large_models.py --json

Ten silos play two rounds with pairwise masks: in one process the server, in one the first silo, with batches of 32, and
in one the nine others. Messages are the codec's bytes through pipes, as with a silo in a process of its own. A fourth
process reads in /proc, some thousand times a second, how much memory the first two have (Linux).

*_server_times, *_silo_times   the peak over the model's bytes in float32, of memory that is no file's (RssAnon), less
                               what the process had once everything was imported. What is mapped from a file can be
                               given back at any time; `*_server_mapped_times` is the peak of resident file pages
*_silo_ratio                   a PBPFL silo's peak over a FedSGD silo's
*_import_mib                   what importing takes, which is not in the others

`rounds` are the rounds alone; `checkpoint` and `release` follow them. `built` is what the server has once its roles are
built, and `rest` after what building left on the heap was given back, as a run does: the model in float64 and, of small
models the most, Python's objects. Without `--plain-heap` the C library gives memory back at once in all processes, and
`built` says little. `whole` is from the imports to the end: building the model and solving its scales too.
Wanted: `*_rounds_server_times` at most 4, `*_rounds_silo_ratio` at most 1.5.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from measure import figure, main
from torch import Tensor, nn

from moretta.contract import framing
from moretta.contract.codec import Codec
from moretta.contract.messages import Message
from moretta.contract.roles import Ask, Replies, answered
from moretta.data.settings import Data
from moretta.data.silo import Silo
from moretta.data.tables.preparation import ColumnRules
from moretta.engines import mapped
from moretta.engines.checkpoint import CheckpointId, save_checkpoint
from moretta.engines.delivery import replies_of, valid
from moretta.engines.driver import Driver
from moretta.engines.settings import Run
from moretta.engines.usage import Clock, give_back_heap
from moretta.models import catalogue
from moretta.protocols.common.roles import Roles
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.specification import Specification
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.params import FedSGD
from moretta.protocols.pbpfl.params import PBPFL
from moretta.protocols.registry import build
from moretta.secure_aggregation.settings import SecureAggregation

SILOS, ROUNDS, BATCH, FEW, OUTPUTS, SHAPE = 10, 2, 32, 4, 10, (3, 32, 32)
SMALL = ("resnet8", "vit_small")  # for the benchmark's own test
NAMES = [f"silo-{k}" for k in range(SILOS)]
HOSTS = {"silo": NAMES[:1], "others": NAMES[1:]}
PAUSE = 5e-4  # seconds between two looks
RESIDENT = ("RssAnon", "RssFile")


class Patches(nn.Module):
    """An image as a sequence of patches, each with a place of its own."""

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(SHAPE[0], width, side, stride=side)
        self.places = nn.Parameter(0.02 * torch.randn(1, (SHAPE[1] // side) * (SHAPE[2] // side), width))

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, patches, width]."""
        patches: Tensor = self.project(x).flatten(2).transpose(1, 2) + self.places
        return patches


class Mean(nn.Module):
    """The mean over the patches."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, width]."""
        return x.mean(dim=1)


def vit(depth: int, width: int = 384) -> nn.Module:
    """Return a vision transformer: of depth 11 it has 20 million parameters."""
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(width, 6, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        for _ in range(depth)
    ]
    return nn.Sequential(Patches(width, 4), *layers, nn.LayerNorm(width), Mean(), nn.Linear(width, OUTPUTS))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet8": lambda: catalogue.build("resnet", inputs=SHAPE, outputs=OUTPUTS, depth=8),
    "vit_small": lambda: vit(1, 24),
    "resnet56": lambda: catalogue.build("resnet", inputs=SHAPE, outputs=OUTPUTS, depth=56),
    "vit_20m": lambda: vit(11),
}
PROTOCOLS: dict[str, Training] = {"fedsgd": FedSGD(loss="mse"), "pbpfl": PBPFL(loss="mse")}


def resident(process: int) -> dict[str, float]:
    """Return the resident memory of a process, in bytes by kind; nothing of one that has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: 1024.0 * int(line.split()[1]) for line in lines if line.startswith(RESIDENT)}


def roles(model: str, protocol: str, here: list[str]) -> Roles:
    """Build the roles of the server and of these silos."""
    random = np.random.default_rng(0)

    def silo(name: str) -> Silo:
        rows = (BATCH if name == NAMES[0] else FEW) if name in here else 0
        x, y = random.normal(size=(rows, *SHAPE)).astype("f4"), random.integers(0, OUTPUTS, rows)
        return Silo(name, x, y, remote=name not in here)

    silos, secure = [silo(name) for name in NAMES], SecureAggregation(scheme="pairwise")
    built, rules = MODELS[model](), ColumnRules.alike(0)
    data = Data(source="python", batch_size=BATCH)
    spec = Specification(Run(rounds=ROUNDS), data, PROTOCOLS[protocol], secure)
    return build(Setting(spec, built, OUTPUTS, silos, rules))


def settled() -> None:
    """Give back what building has left on the heap (glibc), as a run does, and circles of Python's objects."""
    gc.collect()
    give_back_heap()


def warm_up(protocol: str) -> dict[str, float]:
    """Have torch load what it needs to train, by small models; return the memory that this process then has."""
    for name in SMALL:
        roles(name, protocol, NAMES[:1])
        model = MODELS[name]()
        model(torch.randn(2, *SHAPE)).sum().backward()
        torch.optim.SGD(model.parameters()).step()
    del model
    settled()
    return resident(os.getpid())


def tell(into: IO[bytes], **said: Any) -> None:
    """Write a line of JSON."""
    into.write(json.dumps(said).encode() + b"\n")
    into.flush()


def host(model: str, protocol: str, here: list[str]) -> None:
    """Play silos: each message comes behind its silo's name, and is answered."""
    began = warm_up(protocol)
    built = roles(model, protocol, here)
    clients, codec = dict(built.clients), Codec(built.messages)
    del built  # the server's half
    settled()
    framing.write(sys.stdout.buffer, json.dumps(began).encode())
    while (name := framing.read(sys.stdin.buffer)) is not None:
        message = codec.decode(framing.read(sys.stdin.buffer) or b"")
        answer = answered(clients[name.decode()], message)
        del message
        framing.write(sys.stdout.buffer, *codec.parts(answer))
        del answer


class Pipes:
    """Asks silos in other processes, one after the other. pipes: by silo, to it and from it."""

    peak_mib = None

    def __init__(self, pipes: Mapping[str, tuple[IO[bytes], BufferedReader]], codec: Codec) -> None:
        self.clock, self._pipes, self._codec = Clock(), pipes, codec

    def deliver(self, ask: Ask) -> Replies:
        """Hand each silo its message; return the answers."""

        def exchanged(silo: str, message: Message) -> Any:
            to, back = self._pipes[silo]
            framing.write(to, silo.encode())
            framing.write(to, *self._codec.parts(message))
            room = mapped.room(int.from_bytes(back.read(framing.WIDTH), "little"))
            if back.readinto(room) < len(room):
                raise EOFError(f"{silo} ended in the middle of its answer")
            return valid(silo, ask, message, self._codec.decode(room))

        return replies_of(ask, exchanged)

    def renewed(self) -> bool:
        """Return that no silo's process has ended."""
        return False

    def away(self, silos: Any) -> Mapping[str, Any]:
        """Return that all are here."""
        return {}

    def back(self, silos: Any, least: int) -> list[str]:
        """Return that none comes back."""
        return []


def serve(model: str, protocol: str, descriptors: list[int], folder: str) -> None:
    """Play the server, telling on standard output when what begins."""
    out = sys.stdout.buffer
    tell(out, began=warm_up(protocol))
    built = roles(model, protocol, [])
    pairs = zip(descriptors[::2], descriptors[1::2], strict=True)
    opened = [(os.fdopen(to, "wb"), os.fdopen(back, "rb")) for to, back in pairs]
    imports = [json.loads(framing.read(back) or b"") for _, back in opened]
    pipes = {name: pair for pair, names in zip(opened, HOSTS.values(), strict=True) for name in names}
    server, codec = built.server, Codec(built.messages)
    size = sum(4.0 * one.numel() for one in MODELS[model]().parameters())
    built_with = resident(os.getpid())
    settled()
    tell(out, silo=imports[0], size=size, built=built_with, rest=resident(os.getpid()), phase="rounds")
    driver = Driver(server, NAMES, "bench", Pipes(pipes, codec), SILOS)  # type: ignore[arg-type]  # the rest is not asked for
    for end in driver.rounds(1, ROUNDS):
        tell(out, phase=f"after {end.number}")
    save_checkpoint(Path(folder), CheckpointId("bench", ROUNDS, 0, ""), {"server": server.state()})
    tell(out, phase="release")
    driver.finish(ROUNDS + 1)
    tell(out, phase="end")


def watched(model: str, protocol: str, folder: str) -> dict[str, Any]:
    """Play a case in three processes; return what they told, and the peaks by role and phase."""
    processes, ends = {}, []
    for name in HOSTS:
        command = [sys.executable, __file__, "--part", name, "--only", model, "--protocol", protocol]
        processes[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        ends += [processes[name].stdin.fileno(), processes[name].stdout.fileno()]  # type: ignore[union-attr]
    given = ["--descriptors", *map(str, ends), "--folder", folder]
    command = [sys.executable, __file__, "--part", "server", "--only", model, "--protocol", protocol, *given]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=ends)
    for one in processes.values():
        one.stdin.close()  # type: ignore[union-attr]  # the server has them
        one.stdout.close()  # type: ignore[union-attr]
    os.set_blocking(server.stdout.fileno(), False)  # type: ignore[union-attr]
    watch, phase, told = {"server": server.pid, "silo": processes["silo"].pid}, "building", dict[str, Any]()
    peaks: dict[str, dict[str, dict[str, float]]] = {}
    for line in _lines(server):
        if line:
            said = json.loads(line)
            phase = said.get("phase", phase)
            told |= said
        for role, process in watch.items():
            most = peaks.setdefault(phase, {}).setdefault(role, dict.fromkeys(RESIDENT, 0.0))
            for kind, value in resident(process).items():
                most[kind] = max(most[kind], value)
        time.sleep(PAUSE)
    for one in (server, *processes.values()):
        if one.wait():
            raise SystemExit("a part of the benchmark failed")
    return told | {"peaks": peaks}


def _lines(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """Yield a process's lines as they come, nothing where there is none yet, until it ends."""
    kept = b""
    while True:
        ended = process.poll() is not None
        kept += process.stdout.read() or b""  # type: ignore[union-attr]
        *whole, kept = kept.split(b"\n")
        yield from whole
        if ended:
            return
        yield b""


def case(model: str, protocol: str, folder: str) -> dict[str, float]:
    """Return the figures of one model under one protocol, in times of its bytes, and what importing takes in MiB."""
    told = watched(model, protocol, folder)
    size = told["size"]
    found = {"mib": size / 2**20, "server_import_mib": told["began"]["RssAnon"] / 2**20}
    for name in ("built", "rest"):
        found[f"{name}_server_times"] = (told[name]["RssAnon"] - told["began"]["RssAnon"]) / size
    parts = {"rounds": ("rounds", "after 1"), "checkpoint": ("after 2",), "release": ("release",)}
    parts["whole"] = tuple(told["peaks"])
    for role, base in (("server", told["began"]), ("silo", told["silo"])):
        for name, phases in parts.items():
            peaks = [told["peaks"][one][role] for one in phases]
            found[f"{name}_{role}_times"] = (max(one["RssAnon"] for one in peaks) - base["RssAnon"]) / size
            found[f"{name}_{role}_mapped_times"] = (max(one["RssFile"] for one in peaks) - base["RssFile"]) / size
    return found


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure each model, or play the part of one process."""
    if arguments.part == "server":
        serve(arguments.only, arguments.protocol, arguments.descriptors, arguments.folder)
    elif arguments.part:
        host(arguments.only, arguments.protocol, HOSTS[arguments.part])
    if arguments.part:
        raise SystemExit(0)
    if not arguments.plain_heap:  # memory that is freed goes back at once: the peak is what is in use, not what is kept
        os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    found: dict[str, Any] = {"silos": SILOS, "batch": BATCH, "rounds": ROUNDS}
    for model in MODELS if not arguments.only else [arguments.only]:
        if model in SMALL and not arguments.only:
            continue
        by_protocol = {protocol: case(model, protocol, arguments.folder) for protocol in PROTOCOLS}
        for protocol, figures in by_protocol.items():
            for name, value in figures.items():
                found[f"{model}_{protocol}_{name}"] = figure(value, "MiB" if name.endswith("mib") else "times")
        for part in ("rounds", "whole"):
            ours, plain = (by_protocol[name][f"{part}_silo_times"] for name in ("pbpfl", "fedsgd"))
            found[f"{model}_{part}_silo_ratio"] = figure(ours / plain, "times")
    return found


if __name__ == "__main__":
    main(
        __doc__ or "",
        run,
        ("--only", {"default": "", "choices": ["", *MODELS], "help": "one model"}),
        ("--folder", {"default": "/tmp", "help": "where the checkpoint is written"}),
        ("--plain-heap", {"action": "store_true", "help": "leave the C library's settings as they are"}),
        ("--part", {"default": "", "help": argparse.SUPPRESS}),
        ("--protocol", {"default": "", "help": argparse.SUPPRESS}),
        ("--descriptors", {"type": int, "nargs": "*", "help": argparse.SUPPRESS}),
    )
