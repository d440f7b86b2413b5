"""What PBPFL makes of the built-in models and of torchvision's: `moretta check` on each, in numbers.

Of every model: free scales, how many tensors have a scale fixed to 1 and for which reasons, the error of the recovered
gradient in float64 and float32, with powers of two where `check` needs them, the seconds of both checks together; or
the refusal. `own_rounding` is how far the model's own gradient in float32 lies from that in float64, on the same rows
and without PBPFL (`plain_errors`): no protocol that rounds otherwise can be closer.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Figure, figure, main
from torch import nn

from moretta.errors import ParameterError
from moretta.models import catalogue
from moretta.protocols.common import enrolment
from moretta.protocols.common.losses import Loss
from moretta.protocols.pbpfl.exactness import ROWS, Input, check, plain_errors
from moretta.protocols.pbpfl.params import PBPFL

sys.path.append(str(Path(__file__).parents[1] / "tests" / "protocols" / "pbpfl"))
from torchvision_stub import OUTPUTS, REASON, ZOO, build, torchvision

IMAGE = (3, 16, 16)
UNITS = {
    "parameters": "parameters",
    "free_scales": "scales",
    "fixed_tensors": "tensors",
    "own_rounding": "relative error",
    "seconds": "s",
}
BUILT_IN: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    **{f"mlp, {n} layers": ("mlp", (20,), {"layers": n, "width": 64}) for n in (3, 5, 7)},
    **{
        f"resnet-{depth}, {shortcut}, {norm}": (
            "resnet",
            IMAGE,
            {"depth": depth, "shortcut": shortcut, "norm": norm},
        )
        for depth, shortcut, norm in [
            *((20, shortcut, norm) for shortcut in ("A", "B", "concat") for norm in ("batch", "group", "none")),
            (32, "A", "batch"),
            (56, "A", "batch"),
        ]
    },
    **{f"densenet-40, {norm}": ("densenet", IMAGE, {"norm": norm}) for norm in ("batch", "group")},
}


class Words(nn.Module):
    """An embedding, a position, two layers of nn.TransformerEncoder, the mean over words, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(50, 32), nn.Parameter(0.1 * torch.randn(12, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, OUTPUTS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = self.head(self.encoder(self.embedding(tokens) + self.position).mean(1))
        return mean


def cases(names: Sequence[str]) -> Iterator[tuple[str, nn.Module, Input]]:
    """Yield each model with its input, those named or all that there are."""
    zoo = torchvision()
    if zoo is None:
        print(REASON, file=sys.stderr)
    for name, (source, shape, arguments) in BUILT_IN.items():
        if not names or name in names:
            yield name, catalogue.build(source, inputs=shape, outputs=OUTPUTS, **arguments), Input(shape)
    if not names or "transformer encoder" in names:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield "transformer encoder", Words(), Input((12,), 50)
    for name, (size, _) in ZOO.items() if zoo is not None else ():
        if not names or name in names:
            yield name, build(zoo, name), Input((3, size, size))


def reasons(forced: Sequence[Mapping[str, str]]) -> dict[str, int]:
    """Count the tensors by why their scale is 1: the operation, without the layer's path."""
    kinds = [re.sub(r" in \S+ \((\w+)\)| in the model \(\w+\)", r" in \1", entry["because"]) for entry in forced]
    return dict(Counter(kinds).most_common())


def measured(model: nn.Module, given: Input, partitions: int) -> dict[str, Any]:
    """Check one model under both losses."""
    report: dict[str, Any] = {"parameters": sum(one.numel() for one in model.parameters()), "input": list(given.shape)}
    began = time.perf_counter()
    for loss in ("cross-entropy", "mse"):
        try:
            found = check(model, [given], OUTPUTS, PBPFL(loss=loss, partitions=partitions), fall_back=True)
        except ParameterError as error:
            return report | {"refused": str(error)}
        forced = found.pop("forced_to_one")
        report |= {"free_scales": found.pop("free_scales"), "fixed_tensors": len(forced), "reasons": reasons(forced)}
        report[loss] = found
    report["seconds"] = time.perf_counter() - began
    report["tensors"] = sum(1 for _ in model.parameters())
    report["own_rounding"] = max(own_rounding(model, given, loss) for loss in ("cross-entropy", "mse"))
    return report


def own_rounding(model: nn.Module, given: Input, loss: str) -> float:
    """Return the largest of four of the plain model's errors in float32, on the rows of `check`."""
    generator = torch.Generator().manual_seed(0)
    x, classes = given.draw(generator), torch.randint(OUTPUTS, (ROWS,), generator=generator).numpy()
    double = copy.deepcopy(model).double()
    if given.vocabulary:
        double.register_forward_pre_hook(lambda module, arguments: (arguments[0].long(),))
    targets = enrolment.targets(classes, OUTPUTS, loss, "", torch.float64)
    return max(islice(plain_errors(double, x, targets, Loss(loss)), 4))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the models named, or all."""
    found = {}
    for name, model, given in cases(arguments.model or ()):
        print(name, file=sys.stderr, flush=True)
        found[name] = measured(model, given, arguments.partitions)
    zoo = sys.modules.get("torchvision")
    versions = {"numpy": np.__version__, "torchvision": str(zoo.__version__) if zoo else "none"}
    figures = {f"{name}: {key}": value for name, one in found.items() for key, value in figures_of(one)}
    return figures | {"models": found, "partitions": arguments.partitions, "versions": versions}


def figures_of(report: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Yield the numbers of a model's report; what is not a number stays in the report."""
    for key, unit in UNITS.items():
        if key in report:
            yield key, figure(report[key], unit)
    for loss in ("cross-entropy", "mse"):
        for key, value in report.get(loss, {}).items():
            if key.endswith(("float64", "float32", "continuous")) and isinstance(value, float):
                yield f"{loss}, {key}", figure(value, "relative error")


if __name__ == "__main__":
    main(
        __doc__ or "",
        run,
        ("--model", {"action": "append", "help": "only this one; may repeat"}),
        ("--partitions", {"type": int, "default": 1}),
    )
