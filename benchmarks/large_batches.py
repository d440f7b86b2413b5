"""What a step of ResNet-50 on images of 224 x 224 takes of memory and seconds: plain, FedSGD's and PBPFL's.

    OMP_NUM_THREADS=1 python benchmarks/large_batches.py --json

Each case runs in a process of its own and takes two steps on one batch. `plain` is PyTorch's forward and backward pass
alone. `fedsgd` and `pbpfl` are silos: they have rows, a message with the round's weights, and a model that takes them.

*_mib          the peak of resident memory over what importing takes: model, its copies, rows and the step
*_set_up_mib   the same while PBPFL solves and tries the model's scales, which is before the first step
*_seconds      the processor's, of the second step
*_ratio        of PBPFL over plain and over FedSGD, with the same passes

`recompute` has [engine] recompute = "blocks", `micro` has micro-batch = 4 (on GroupNorm: BatchNorm would not be exact).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from typing import Any

import torch
from measure import begin_peak, figure, main, resident_mib
from pbpfl import Case
from torch import Tensor, nn

from moretta.protocols.common import modules
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.passes import WHOLE, Passes
from moretta.protocols.pbpfl.params import PBPFL
from moretta.protocols.pbpfl.scales import ScalePlan

SHAPE, OUTPUTS, ROWS = (3, 224, 224), 10, 16
DEPTHS, WIDTHS = (3, 4, 6, 3), (64, 128, 256, 512)
PASSES = {"whole": WHOLE, "recompute": Passes(recomputes=True), "micro": Passes(rows=4)}


def norm(channels: int, kind: str) -> nn.Module:
    """Return what normalises, "batch" or "group"."""
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(32, channels)


class Bottleneck(nn.Module):
    """A block of He et al. 2016, with the stride on its 3 x 3 convolution."""

    def __init__(self, below: int, width: int, stride: int, kind: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(below, width, 1, bias=False), norm(width, kind), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), norm(width, kind), nn.ReLU()),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), norm(4 * width, kind)),
        )
        across = [nn.Conv2d(below, 4 * width, 1, stride, bias=False), norm(4 * width, kind)]
        self.across = nn.Sequential(*(across if stride > 1 or below != 4 * width else []))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's outputs."""
        return torch.relu(self.layers(x) + self.across(x))


def resnet50(kind: str) -> nn.Module:
    """Return ResNet-50, of 23.5 million parameters with 10 outputs."""
    torch.manual_seed(0)
    below, blocks = 64, list[nn.Module]()
    for stage, (depth, width) in enumerate(zip(DEPTHS, WIDTHS, strict=True)):
        for place in range(depth):
            blocks.append(Bottleneck(below, width, 2 if stage and not place else 1, kind))
            below = 4 * width
    stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False), norm(64, kind), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(below, OUTPUTS))


def measured(side: str, passes: str, answer: multiprocessing.Queue[tuple[float, float]]) -> None:
    """Measure one case in this process: the peak over what importing took in MiB, and the second step's seconds."""
    torch.set_num_threads(1)
    kind = "group" if passes == "micro" else "batch"
    small = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(72, OUTPUTS))
    Case(small, (3, 8, 8), OUTPUTS, PBPFL(loss="mse")).pbpfl()  # loads what PyTorch and tracing load as needed
    before, model = resident_mib("VmRSS"), resnet50(kind)
    begin_peak()
    began = time.process_time()
    if side == "set_up":
        ScalePlan.of(model, (torch.zeros(2, *SHAPE),))
    elif side == "plain":
        model, batch = model.train(), (torch.randn(ROWS, *SHAPE), torch.randn(ROWS, OUTPUTS))
        for _ in range(2):
            began = time.process_time()
            gradients, _ = modules.gradient(model, modules.trainable(model), Loss("mse"), batch, passes=PASSES[passes])
            del gradients
    else:
        case = Case(model, SHAPE, OUTPUTS, PBPFL(loss="mse"), batch=ROWS, passes=PASSES[passes])
        step = case.pbpfl if side == "pbpfl" else case.fedsgd
        for name in ("tensors", "plan", "perturbation"):
            delattr(case, name)  # the server's
        for name in ("plain", "plain_ask") if side == "pbpfl" else ("perturbed", "ask"):
            delattr(case, name)  # another silo's
        del model
        begin_peak()
        for _ in range(2):
            began = time.process_time()
            step()
    answer.put((resident_mib("VmHWM") - before, time.process_time() - began))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure each case, one after the other."""
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    context, found = multiprocessing.get_context("spawn"), dict[str, Any]({"rows": ROWS, "shape": SHAPE})
    cases = [(side, passes) for passes in PASSES for side in ("plain", "fedsgd", "pbpfl")] + [("set_up", "whole")]
    peaks, seconds = dict[tuple[str, str], float](), dict[tuple[str, str], float]()
    for case in cases:
        if arguments.only and arguments.only not in case:
            continue
        answer: multiprocessing.Queue[tuple[float, float]] = context.Queue()
        process = context.Process(target=measured, args=(*case, answer))
        process.start()
        peaks[case], seconds[case] = answer.get()
        process.join()
        found |= {
            f"{'_'.join(case)}_mib": figure(peaks[case], "MiB"),
            f"{'_'.join(case)}_seconds": figure(seconds[case], "s"),
        }
    for side, passes in peaks:
        if side in ("plain", "fedsgd") and ("pbpfl", passes) in peaks:
            for name, of in (("memory", peaks), ("seconds", seconds)):
                found[f"{passes}_{name}_over_{side}"] = figure(of["pbpfl", passes] / of[side, passes], "times")
    return found


if __name__ == "__main__":
    main(__doc__ or "", run, ("--only", {"default": "", "help": "only cases of this side or these passes"}))
