"""A PBPFL silo's step as a ratio to a plain FedSGD silo's, interleaved in one run; and the server's own share.

Both sides load the round's model, run one batch and hand over their upload in the clear; the ratio is of whole answers.
With one thread time is the processor's, which others on the machine do not lengthen; with more it is the clock's.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measure import Figure, begin_peak, figure, interleaved, main, ratio, resident_mib
from torch import nn

from moretta.contract.messages import Message, Stamp
from moretta.models import catalogue
from moretta.protocols.common import enrolment, modules
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.passes import WHOLE, Passes
from moretta.protocols.common.silo_rows import TrainingRows
from moretta.protocols.fedsgd.client import Client as FedSGDClient
from moretta.protocols.fedsgd.messages import TrainOn as PlainTrainOn
from moretta.protocols.fedsgd.params import FedSGD
from moretta.protocols.pbpfl import softmax
from moretta.protocols.pbpfl.client import Client as PBPFLClient
from moretta.protocols.pbpfl.messages import Predictions, TrainOn
from moretta.protocols.pbpfl.params import PBPFL
from moretta.protocols.pbpfl.perturbation import Perturbation
from moretta.protocols.pbpfl.scales import ScalePlan
from moretta.secure_aggregation.keystream import SecretRoot
from moretta.secure_aggregation.schemes import contributor

BATCH = 32
NOW = Stamp("benchmark", 1, 0)


class Case:
    """One model with a silo's rows: the two clients on the same batch on a device, and the server's key."""

    def __init__(
        self,
        model: nn.Module,
        shape: tuple[int, ...],
        outputs: int,
        protocol: PBPFL,
        device: str = "cpu",
        *,
        batch: int = BATCH,
        passes: Passes = WHOLE,
    ) -> None:
        if len(shape) == 3:
            model = model.to(memory_format=torch.channels_last)
        random = np.random.default_rng(0)
        classes, x = random.integers(0, max(outputs, 2), batch), random.normal(size=(batch, *shape)).astype("f4")
        if len(shape) == 3:  # one copy, in the layout that is used
            x = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
        targets = enrolment.targets(classes, outputs, protocol.loss, "silo", torch.float32)
        own = TrainingRows(x, targets.numpy(), Batches(batch, 0, 0, "silo"))
        rows = SiloRows(own, torch.float32, device, passes=passes)
        if len(shape) == 3:
            rows.x = rows.x.to(memory_format=torch.channels_last)
        self.protocol, self.tensors = protocol, copy.deepcopy(model).double().state_dict(keep_vars=True)
        self.plan = ScalePlan.of(model, (torch.zeros(2, *shape),))
        self.perturbation = Perturbation(self.plan, protocol.partitions, protocol.form)
        self.stream = SecretRoot.fresh().stream("benchmark")
        self.key = self.perturbation.draw_key(self.stream, 0.1)
        self.plain_ask = PlainTrainOn(stamp=NOW, parameters=modules.arrays(model), encoding={})
        model = model.to(device)
        self.plain = FedSGDClient(FedSGD(loss=protocol.loss), model, rows, contributor("none", "silo"), 1)
        sums = contributor("none", "silo")
        blank = modules.blank(copy.deepcopy(model))  # as a silo has it
        self.perturbed = PBPFLClient(protocol.loss_function, blank, self.plan.head, rows, sums, protocol.variant)
        self.ask = TrainOn(
            stamp=NOW,
            parameters=self.perturbation.perturb(self.tensors, self.key, torch.float32),
            parts=self.key.parts,
            direction=self.key.direction,
            encoding={},
        )

    def fedsgd(self) -> Message:
        """Take a plain step."""
        return self.plain.answer(self.plain_ask)

    def pbpfl(self) -> Message:
        """Take a perturbed step; under cross-entropy the server's answer in between counts too."""
        answer = self.perturbed.answer(self.ask)
        if isinstance(answer, Predictions):
            true = softmax.true_softmax(answer, self.key.offset)
            answer = self.perturbed.answer(softmax.answer(true, self.key, self.protocol.variant, self.stream, NOW, {}))
        return answer

    def server(self) -> object:
        """Draw a key, perturb, and recover from one silo's upload."""
        key = self.perturbation.draw_key(self.stream, 0.1)
        self.perturbation.perturb(self.tensors, key, torch.float32)
        return self.perturbation.recover(self.means, key)

    def prepare_server(self) -> None:
        """Keep one upload for `server`."""
        self.means = {name: np.asarray(value, np.float64) for name, value in self.pbpfl().tensors.items()}


def mlp(layers: int, outputs: int = 1) -> nn.Module:
    """Return the papers' MLP-n on 17 inputs."""
    return catalogue.build("mlp", inputs=(17,), outputs=outputs, layers=layers, width=64)


def resnet(depth: int, norm: str = "batch") -> nn.Module:
    """Return a CIFAR ResNet with 10 outputs."""
    return catalogue.build("resnet", inputs=(3, 32, 32), outputs=10, depth=depth, norm=norm)


def mse(partitions: int) -> PBPFL:
    """Return the protocol under squared error."""
    return PBPFL(loss="mse", partitions=partitions)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, PBPFL]] = {
    "mlp4_mse_m1": (lambda: mlp(4), (17,), 1, mse(1)),
    "mlp5_mse_m1": (lambda: mlp(5), (17,), 1, mse(1)),
    "resnet20_mse_m1": (lambda: resnet(20), (3, 32, 32), 10, mse(1)),
    "resnet20_mse_m2": (lambda: resnet(20), (3, 32, 32), 10, mse(2)),
    "resnet20_cross_entropy_m1": (lambda: resnet(20), (3, 32, 32), 10, PBPFL(loss="cross-entropy")),
    "resnet56_mse_m1": (lambda: resnet(56), (3, 32, 32), 10, mse(1)),
    "resnet56_mse_m2": (lambda: resnet(56), (3, 32, 32), 10, mse(2)),
    "resnet56_cross_entropy_m1": (lambda: resnet(56), (3, 32, 32), 10, PBPFL(loss="cross-entropy")),
}


def peak_mib(name: str, side: str, answer: multiprocessing.Queue[float]) -> None:
    """Measure, in a process of its own, by how many MiB three steps raise resident memory at its peak (Linux)."""
    torch.set_num_threads(1)
    build, shape, outputs, protocol = CASES[name]
    case = Case(build(), shape, outputs, protocol)
    before = begin_peak()  # solving the scales is not a step
    for _ in range(3):
        getattr(case, side)()
    answer.put(resident_mib("VmHWM") - before)


def memory_ratio(name: str) -> dict[str, Figure]:
    """Return what both sides add to the peak, and their ratio."""
    # Memory that is freed goes back at once, so that the peak is what is in use and not what the heap has kept.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    context = multiprocessing.get_context("spawn")
    found = {}
    for side in ("fedsgd", "pbpfl"):
        answer: multiprocessing.Queue[float] = context.Queue()
        process = context.Process(target=peak_mib, args=(name, side, answer))
        process.start()
        found[side] = answer.get()
        process.join()
    return {
        f"{name}_memory_mib_fedsgd": figure(found["fedsgd"], "MiB"),
        f"{name}_memory_mib_pbpfl": figure(found["pbpfl"], "MiB"),
        f"{name}_memory_ratio": figure(found["pbpfl"] / found["fedsgd"], "times"),
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure each case."""
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    figures: dict[str, Any] = {"batch": BATCH, "pairs": arguments.pairs}
    for name, (build, shape, outputs, protocol) in CASES.items():
        if arguments.only and arguments.only not in name:
            continue
        case = Case(build(), shape, outputs, protocol)
        case.prepare_server()
        calls = 20 if len(shape) == 1 else 1
        pairs = arguments.pairs * (4 if len(shape) == 1 else 1)
        work = {"fedsgd": case.fedsgd, "pbpfl": case.pbpfl, "server": case.server}
        seconds = interleaved(work, pairs, calls, clock=clock)
        figures[f"{name}_ratio"] = ratio(seconds["pbpfl"], seconds["fedsgd"])
        figures[f"{name}_server_ratio"] = ratio(seconds["server"], seconds["pbpfl"])
        figures[f"{name}_fedsgd_ms"] = figure(seconds["fedsgd"], "ms", 1000)
    if not arguments.only:
        figures |= memory_ratio("resnet20_mse_m1")
    return figures


if __name__ == "__main__":
    main(
        __doc__ or "",
        run,
        ("--pairs", {"type": int, "default": 11, "help": "paired runs of each case"}),
        ("--only", {"default": "", "help": "only the cases whose name contains this"}),
    )
