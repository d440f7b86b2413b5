"""What secure sums cost: masks, set-up, a lost silo, a round of training, memory; beside Flower's SecAgg+ if asked.

    OMP_NUM_THREADS=1 python benchmarks/secure_aggregation.py --flower OTHER/bin/python --large --json

Flower's functions (`flower_secagg.py`) run in a process of their own, under a Python that has flwr, in turns with ours;
without one their figures are left out. Everything is one thread, and its time is the processor's, which others on the
machine do not lengthen.

What the figures are to stay within: `masking_over_floor_ratio_*` 1.11 (the floor is keystream and addition alone),
`flower_over_ours_ratio_*` at least 5, `setup_ms` 150, `recovery_server_ms` 50,
`secure_over_plain_round_ratio` 1.2, `peak_over_input_plus_upload_ratio` 1.05.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cohort import Cohort, after_uploads
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from measure import begin_peak, figure, interleaved, main, ratio, resident_mib

from moretta.contract.codec import Codec
from moretta.data.settings import Data
from moretta.data.silo import Silo
from moretta.data.tables.preparation import ColumnRules
from moretta.engines.driver import Driver
from moretta.engines.in_process import InProcess
from moretta.engines.settings import Run
from moretta.models import catalogue
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.specification import Specification
from moretta.protocols.fedsgd.params import FedSGD
from moretta.protocols.registry import build
from moretta.secure_aggregation.encoding import CHUNK, Ring
from moretta.secure_aggregation.masks import add_masks
from moretta.secure_aggregation.settings import SecureAggregation

SILOS, BATCH, RECOVERED, LARGE = 10, 32, 1000, 100_000_000
KEY = bytes(range(32))
Figures = dict[str, Any]


class Flower:
    """Flower's functions in a process that has flwr."""

    def __init__(self, python: str, *sizes: int) -> None:
        script = str(Path(__file__).with_name("flower_secagg.py"))
        self._process = subprocess.Popen(
            [python, script, *map(str, sizes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._said()
        self.spent = 0.0

    def do(self, work: str) -> float:
        """Do a piece of work; return its seconds of processor time, which `spent` adds up."""
        print(work, file=self._process.stdin, flush=True)
        seconds = float(self._said())
        self.spent += seconds
        return seconds

    def _said(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("Flower's side has ended; it says above why")
        return line


def masking(parameters: int, bits: int, pairs: int) -> Figures:
    """Compare masks with their floor, a keystream of as many bytes and an addition, by chunks and as a whole."""
    words, dtype = np.zeros(parameters, Ring(bits).dtype), Ring(bits).dtype
    whole, zeros = np.empty_like(words), bytes(words.nbytes)

    def floor(chunk: int) -> None:
        cipher = Cipher(algorithms.AES(KEY[:16]), modes.CTR(KEY[16:])).encryptor()
        buffer, nothing = whole[:chunk], memoryview(zeros)[: chunk * dtype.itemsize]
        for start in range(0, parameters, chunk):
            part = words[start : start + chunk]
            cipher.update_into(nothing[: part.nbytes], buffer.view(np.uint8).data)
            np.add(part, buffer[: part.size], out=part)

    work = {
        "one": lambda: add_masks(words, [(True, KEY)]),
        "floor": lambda: floor(CHUNK),
        "ten": lambda: add_masks(words, [(True, KEY)] * SILOS),
        "whole": lambda: floor(parameters),
    }
    found = interleaved(work, pairs, warm_up=1, clock=time.process_time)
    each = [seconds / SILOS for seconds in found["ten"]]
    return {
        f"masking_over_floor_ratio_{bits}": ratio(found["one"], found["floor"]),
        f"masking_ten_over_floor_ratio_{bits}": ratio(each, found["floor"]),
        f"masking_over_whole_array_floor_ratio_{bits}": ratio(found["one"], found["whole"]),
        f"masking_giga_parameters_per_second_{bits}": figure([parameters / one for one in each], "10^9 a second", 1e-9),
    }


def uploads(parameters: int, flower: Flower | None, pairs: int) -> Figures:
    """Compare one silo's encoding and masks among ten, in both rings, with Flower's."""
    cohorts = {bits: Cohort(SILOS, parameters, bits=bits) for bits in (32, 64)}
    work: dict[str, Callable[[], object]] = {
        f"ours_{bits}": lambda cohort=cohort: cohort.upload(cohort.ask())  # type: ignore[misc]
        for bits, cohort in cohorts.items()
    }
    clock = time.process_time
    if flower is not None:
        work["flower"] = lambda: flower.do("mask")
        clock = lambda: time.process_time() + flower.spent  # noqa: E731
    found = interleaved(work, pairs, warm_up=1, clock=clock)
    theirs = found.get("flower")
    figures: Figures = {f"upload_seconds_{name}": figure(seconds, "s") for name, seconds in found.items()}
    if theirs is not None:
        figures |= {f"flower_over_ours_ratio_{bits}": ratio(theirs, found[f"ours_{bits}"]) for bits in cohorts}
    return figures


def dropouts(count: int, flower: Flower | None, pairs: int, signed: bool) -> Figures:
    """Time one silo's set-up in a large cohort, and what a lost silo costs the server and each other silo."""
    small, cohort = Cohort(count, 1, signed=signed), Cohort(count, RECOVERED, signed=signed)
    lost, kind = cohort.names[count // 2], "_signed" if signed else ""
    setups, ours, more, silos, theirs = [], [], [], [], defaultdict[str, list[float]](list)
    small.set_up()
    for _ in range(pairs):
        setups.append(small.set_up())
        whole, recovered = (after_uploads(cohort.sum(*gone)) for gone in ((), (lost,)))
        ours.append(recovered["server"])
        more.append(recovered["server"] - whole["server"])
        silos.append(recovered["silos"] / (count - 1) - whole["silos"] / count)
        for work in ("setup", "combine_seed", "recover") if flower is not None else ():
            theirs[work].append(flower.do(work))
    parts = zip(("advert", "agreement", "shares"), zip(*setups, strict=True), strict=True)
    figures: Figures = {f"setup_{name}_ms{kind}": figure(part, "ms", 1000) for name, part in parts}
    figures |= {
        f"setup_ms{kind}": figure(list(map(sum, setups)), "ms", 1000),
        f"recovery_server_ms{kind}": figure(ours, "ms", 1000),
        f"recovery_server_more_ms{kind}": figure(more, "ms", 1000),
        f"recovery_silo_more_ms{kind}": figure(silos, "ms", 1000),
    }
    if flower is not None:
        secrets = zip(theirs["combine_seed"], theirs["recover"], strict=True)
        recoveries = [(count - 1) * seed + rest for seed, rest in secrets]  # one seed is timed for all survivors'
        figures["flower_setup_ms"] = figure(theirs["setup"], "ms", 1000)
        figures["flower_recovery_ms"] = figure(recoveries, "ms", 1000)
        figures["flower_over_ours_setup_ratio"] = ratio(theirs["setup"], list(map(sum, setups)))
        figures["flower_over_ours_recovery_ratio"] = ratio(recoveries, ours)
    return figures


def rounds(pairs: int) -> Figures:
    """Compare rounds of ten silos that train ResNet-20, with masks and without."""
    random = np.random.default_rng(0)
    silos = [
        Silo(f"silo-{k}", random.normal(size=(BATCH, 3, 32, 32)).astype("f4"), random.integers(0, 10, BATCH))
        for k in range(SILOS)
    ]
    work = {}
    for scheme in ("none", "pairwise"):
        torch.manual_seed(0)
        model, last = catalogue.build("resnet", inputs=(3, 32, 32), outputs=10, depth=20), 2 * pairs + 1
        secure = SecureAggregation(scheme=scheme)
        protocol, data = FedSGD(loss="cross-entropy", learning_rate=0.01), Data(source="python", batch_size=BATCH)
        spec = Specification(Run(rounds=last), data, protocol, secure)
        players = build(Setting(spec, model, 10, silos, ColumnRules.alike(0)))
        engine = InProcess(players.clients, Codec(players.messages))
        playing = Driver(players.server, list(players.clients), "benchmark", engine, 1).rounds(1, last)
        work[scheme] = lambda playing=playing: next(playing)  # type: ignore[misc]
    found = interleaved(work, 2 * pairs, warm_up=1, clock=time.process_time)  # the first round has the set-up
    return {  # pairs differ by more than masks cost: look at the quartiles
        "plain_round_seconds": figure(found["none"], "s"),
        "secure_over_plain_round_ratio": ratio(found["pairwise"], found["none"]),
    }


def additive(parameters: int, pairs: int) -> Figures:
    """Compare whole sums of ten silos by additive shares with those by masks."""
    schemes = {scheme: Cohort(SILOS, parameters, scheme) for scheme in ("additive-shares", "pairwise")}
    found = interleaved(
        {scheme: cohort.sum for scheme, cohort in schemes.items()}, pairs, warm_up=1, clock=time.process_time
    )
    return {
        "additive_sum_seconds": figure(found["additive-shares"], "s"),
        "additive_over_pairwise_ratio": ratio(found["additive-shares"], found["pairwise"]),
    }


def peak_ratio(bits: int, answer: multiprocessing.Queue[float]) -> None:
    """Measure, in a process of its own, the peak of memory of an upload over the input's and its own size (Linux)."""
    cohort = Cohort(2, 1, bits=bits)
    cohort.upload(cohort.ask())
    before = begin_peak()
    cohort.tensors = {"model": np.full(LARGE, 0.5, "f4")}
    kept = cohort.upload(cohort.ask())
    answer.put((resident_mib("VmHWM") - before) * 2**20 / (LARGE * (4 + bits // 8)))
    del kept


def memory() -> Figures:
    """Return `peak_ratio` of both rings."""
    context, found = multiprocessing.get_context("spawn"), {}
    for name, bits in (("", 64), ("_32", 32)):
        answer: multiprocessing.Queue[float] = context.Queue()
        process = context.Process(target=peak_ratio, args=(bits, answer))
        process.start()
        found[f"peak_over_input_plus_upload_ratio{name}"] = figure(answer.get(), "times")
        process.join()
    return found


def run(arguments: argparse.Namespace) -> Figures:
    """Measure everything."""
    parameters, count, pairs, few = arguments.parameters, arguments.cohort, arguments.pairs, min(arguments.pairs, 3)
    sizes = parameters, SILOS, count, count * 2 // 3 + 1, RECOVERED
    flower = Flower(arguments.flower, *sizes) if arguments.flower else None
    figures: Figures = {"parameters": parameters, "cohort": count, "pairs": pairs}
    for bits in (32, 64):
        figures |= masking(parameters, bits, pairs)
    figures |= uploads(parameters, flower, pairs)
    figures |= dropouts(count, flower, pairs, signed=False) | dropouts(count, None, few, signed=True)
    figures |= rounds(pairs) | additive(parameters // 10, pairs)
    return figures | (memory() if arguments.large else {})


if __name__ == "__main__":
    main(
        __doc__ or "",
        run,
        ("--pairs", {"type": int, "default": 7, "help": "paired runs of each case"}),
        ("--parameters", {"type": int, "default": 10_000_000, "help": "of the model that is masked"}),
        ("--cohort", {"type": int, "default": 100, "help": "silos of set-up and recovery"}),
        ("--flower", {"default": "", "metavar": "PYTHON", "help": "a Python that has flwr"}),
        ("--large", {"action": "store_true", "help": "also the memory of 100 M parameters, which takes 1.3 GB"}),
    )
