"""Moretta on a GPU: is it right, and what does it take? One record, from which a table of docs/benchmarks.md is made.

    python experiments/gpu.py                              # on "cuda", in under ten minutes
    python experiments/gpu.py --device cpu --quick --out quick.json   # does it run?
    python experiments/gpu.py --page docs/benchmarks.md    # writes the table from the record; --check compares

*_error       after two rounds of three silos: the largest difference between the model of a run on the device and that
              of one on the CPU, over its largest weight, in float32 without TF32; wanted: 1e-5 at most
*_bits_are    whether BAFFLE's directions, and their sum, are the same bits as on the CPU
*_ratio       P1, of benchmarks/pbpfl.py: a PBPFL silo's step over a plain one's; P2, of
              benchmarks/secure_aggregation.py: masking over its floor (a processor's work on any machine)
combine_*_ms  P6, of benchmarks/baffle.py: the server's sum over 500 directions, on the device
round_*_s     a round of ten silos with pairwise masks, in one process

Each piece is written to the record as it ends, so that a script that was killed goes on where it was.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))  # taken out again below

import baffle as baffle_figures  # noqa: E402
import numpy as np  # noqa: E402
import pbpfl as pbpfl_figures  # noqa: E402
import secure_aggregation as masks  # noqa: E402
import torch  # noqa: E402
from measure import Figure, figure, interleaved, ratio  # noqa: E402
from torch import nn  # noqa: E402

from moretta import BAFFLE, CGD, PBPFL, FedAvg, FedSGD, Silo  # noqa: E402
from moretta.contract.codec import Codec  # noqa: E402
from moretta.contract.messages import Tensors  # noqa: E402
from moretta.data.settings import Data  # noqa: E402
from moretta.data.tables.preparation import ColumnRules  # noqa: E402
from moretta.engines.driver import Driver  # noqa: E402
from moretta.engines.files import write_atomically  # noqa: E402
from moretta.engines.in_process import InProcess  # noqa: E402
from moretta.engines.settings import Run  # noqa: E402
from moretta.models import catalogue  # noqa: E402
from moretta.protocols.baffle import torch_forward  # noqa: E402
from moretta.protocols.baffle.silo.directions import Directions, keys_of  # noqa: E402
from moretta.protocols.common.setting import Setting  # noqa: E402
from moretta.protocols.common.specification import Specification  # noqa: E402
from moretta.protocols.common.training import Training  # noqa: E402
from moretta.protocols.registry import build  # noqa: E402
from moretta.secure_aggregation.settings import SecureAggregation  # noqa: E402

sys.path.remove(str(ROOT / "benchmarks"))
RECORD, BEGIN, END = ROOT / "benchmarks" / "records" / "gpu.json", "<!-- gpu:begin -->", "<!-- gpu:end -->"
FORMAT, ERROR, SHAPE, OUTPUTS, BATCH = 1, 1e-5, (3, 32, 32), 10, 32
NEVER = "`experiments/gpu.py` was never run on a GPU: none was at hand.\n"
PROTOCOLS: dict[str, Training] = {
    "fedsgd": FedSGD(loss="cross-entropy"),
    "fedavg": FedAvg(loss="cross-entropy"),
    "pbpfl_mse": PBPFL(loss="mse"),
    "pbpfl_cross_entropy": PBPFL(loss="cross-entropy"),
    "cgd": CGD(loss="cross-entropy"),
    "baffle": BAFFLE(loss="cross-entropy", k=24, optimizer="sgd"),  # Adam makes much of the last digits
}
Piece = Callable[[str, bool], Mapping[str, Any]]


def resnet(depth: int) -> nn.Module:
    """Return a CIFAR ResNet whose rows do not mix, as BAFFLE wants it."""
    return catalogue.build("resnet", inputs=SHAPE, outputs=OUTPUTS, depth=depth, norm="group")


def played(protocol: Training, device: str, silos: int, rounds: int, depth: int) -> tuple[list[float], Tensors]:
    """Return the seconds of each round of a run, and the first of its models."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(silos, BATCH, *SHAPE)).astype("f4"), random.integers(0, OUTPUTS, (silos, BATCH))
    given = [Silo(f"silo-{number}", x[number], y[number]) for number in range(silos)]
    run, data = Run(rounds=rounds, device=device, insecure_secret_seed=1), Data(source="python", batch_size=BATCH)
    spec = Specification(run, data, protocol, SecureAggregation(scheme="pairwise"))
    players = build(Setting(spec, resnet(depth), OUTPUTS, given, ColumnRules.alike(0)))
    engine = InProcess(players.clients, Codec(players.messages))
    driver = Driver(players.server, list(players.clients), "gpu", engine, 2)
    seconds, began = list[float](), time.perf_counter()
    for _ in driver.rounds(1, rounds):
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
    return seconds, next(iter(players.models().values()))


def correctness(name: str) -> Piece:
    """Return the piece that compares a protocol's model with the CPU's."""

    def piece(device: str, quick: bool) -> Mapping[str, Any]:
        (_, found), (_, wanted) = (played(PROTOCOLS[name], where, 3, 2, 8) for where in (device, "cpu"))
        largest = max(float(np.abs(value).max(initial=0.0)) for value in wanted.values())
        error = max(float(np.abs(found[key] - value).max(initial=0.0)) for key, value in wanted.items()) / largest
        return {f"{name}_error": figure(error, "of the largest weight"), f"{name}_is": _met(error <= ERROR)}

    return piece


def directions(device: str, quick: bool) -> Mapping[str, Any]:
    """Compare directions, and their sum, bit by bit."""
    size, count, there, met = 1_001 if quick else 300_001, 20, torch.device(device), dict[str, bool]()
    random = np.random.default_rng(0)
    at, coefficients = random.normal(size=size).astype("f4"), random.normal(size=count)
    for name, distribution, orthogonal in (
        ("rademacher", "rademacher", False),
        ("orthogonal", "rademacher", True),
        ("gaussian", "gaussian", False),
    ):
        keys = keys_of(bytes(32), count, "gpu", orthogonal=orthogonal)
        drawn = Directions(keys, count, size, distribution, orthogonal=orthogonal)
        wanted = np.concatenate([vectors.copy() for vectors in drawn.perturbed(at, 1e-3)])
        found = np.concatenate([np.array(one.cpu().numpy()) for one in torch_forward.perturbed(drawn, at, 1e-3, there)])
        summed = np.array_equal(torch_forward.combine(drawn, coefficients, there), drawn.combine(coefficients))
        met[f"{name}_bits_are"] = bool(np.array_equal(found, wanted)) and summed
    return {name: _met(same) for name, same in met.items()}


def step(name: str) -> Piece:
    """Return the piece that times a silo's step, P1."""

    def piece(device: str, quick: bool) -> Mapping[str, Any]:
        build_model, shape, outputs, protocol = pbpfl_figures.CASES[name]
        case = pbpfl_figures.Case(build_model(), shape, outputs, protocol, device)
        work, pairs = {"plain": case.fedsgd, "pbpfl": case.pbpfl}, 1 if quick else 21
        # An answer is an array of the CPU's, so each waits for the device.
        seconds = interleaved(work, pairs, warm_up=1 if quick else 5)
        return {
            f"{name}_ratio": ratio(seconds["pbpfl"], seconds["plain"]),
            f"{name}_plain_ms": figure(seconds["plain"], "ms", 1000),
        }

    return piece


def masking(device: str, quick: bool) -> Mapping[str, Any]:
    """Time masks over their floor, P2, and what it takes to bring a gradient from the device."""
    size = 10_000 if quick else 10_000_000
    name, gradient = "masking_over_floor_ratio_64", torch.zeros(size, device=device)
    took = interleaved({"copy": gradient.cpu}, 1 if quick else 7)["copy"]
    return {name: masks.masking(size, 64, 1 if quick else 7)[name], "copy_10m_ms": figure(took, "ms", 1000)}


def rebuilding(device: str, quick: bool) -> Mapping[str, Any]:
    """Time the server's sum over directions, P6, on the device and on the CPU."""
    found, there = dict[str, Any](), torch.device(device)
    for label, size in baffle_figures.SIZES.items():
        count, size = (16, size // 100) if quick else (baffle_figures.COMBINED, size)
        drawn = Directions(keys_of(bytes(32), count, "gpu"), count, size)
        coefficients = np.random.default_rng(0).normal(size=count)
        work = {
            "there": lambda: torch_forward.combine(drawn, coefficients, there),  # noqa: B023  # called before the next
            "cpu": lambda: drawn.combine(coefficients),  # noqa: B023
        }
        seconds = interleaved(work, 1 if quick else 9, warm_up=1)
        found |= {f"combine_{label}_ms": figure(seconds["there"], "ms", 1000)}
        found |= {f"combine_{label}_cpu_ms": figure(seconds["cpu"], "ms", 1000)}
    return found


def round_of_ten(name: str) -> Piece:
    """Return the piece that times a round of ten silos."""

    def piece(device: str, quick: bool) -> Mapping[str, Any]:
        silos, rounds, depth = (2, 2, 8) if quick else (10, 6, 20)
        seconds, _ = played(PROTOCOLS[name], device, silos, rounds, depth)
        return {f"round_{name}_s": figure(seconds[1:], "s")}  # the first has the set-up

    return piece


PIECES: dict[str, Piece] = {
    "directions": directions,
    **{f"correctness of {name}": correctness(name) for name in PROTOCOLS},
    **{f"step of {name}": step(name) for name in ("mlp4_mse_m1", "resnet20_mse_m1", "resnet56_mse_m1")},
    "masks": masking,
    "rebuilding": rebuilding,
    **{f"round of {name}": round_of_ten(name) for name in ("fedsgd", "pbpfl_mse", "cgd", "baffle")},
}
QUICK = ("directions", "correctness of fedsgd", "step of mlp4_mse_m1", "masks", "rebuilding", "round of fedsgd")


def _met(met: bool) -> str:
    return "met" if met else "missed"


def begun(path: Path, device: str, quick: bool) -> dict[str, Any]:
    """Return the record that is there, if it is of the same device and versions, or a new one."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    about = {"device": name, "torch": str(torch.__version__), "quick": quick}
    if path.exists():
        kept: dict[str, Any] = json.loads(path.read_text())
        if kept.get("format") == FORMAT and kept.get("about") == about:
            return kept
        raise SystemExit(f"{path} is a record of something else ({kept.get('about')}); name another file by --out")
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "about": about,
        "pieces": {},
    }


def run(path: Path, device: str, quick: bool) -> dict[str, Any]:
    """Play what the record lacks."""
    record = begun(path, device, quick)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    pieces = {name: piece for name, piece in PIECES.items() if not quick or name in QUICK}
    for number, (name, piece) in enumerate(pieces.items(), start=1):
        if name in record["pieces"]:
            continue
        print(f"{number} of {len(pieces)}: {name}", file=sys.stderr, flush=True)
        began = time.perf_counter()
        found = {
            key: value.told() if isinstance(value, Figure) else value for key, value in piece(device, quick).items()
        }
        record["pieces"][name] = {"seconds": time.perf_counter() - began, "figures": found}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
    return record


def table(record: Mapping[str, Any] | None) -> str:
    """Return the page's text of a record; of None that there is none."""
    if record is None:
        return NEVER
    about, rows = record["about"], ["| figure | median | quartiles | runs |", "|---|---|---|---|"]
    for piece in record["pieces"].values():
        for name, value in piece["figures"].items():
            if isinstance(value, str):
                rows.append(f"| {name.replace('_', ' ')} | {value} | | |")
                continue
            between = " to ".join(f"{one:.3g}" for one in value.get("quartiles", ()))
            rows.append(
                f"| {name.replace('_', ' ')} | {value['median']:.3g} {value['unit']} | {between} | {value['runs']} |"
            )
    said = f"`python experiments/gpu.py`, {record['date']}, {about['device']}, PyTorch {about['torch']}"
    return "\n".join([f"{said}{', --quick' if about['quick'] else ''}.", "", *rows, ""])


def filled(page: str, record: Mapping[str, Any] | None) -> str:
    """Return a page with the table between its marks."""
    text = f"{BEGIN}\n\n{table(record)}\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: text, page, flags=re.DOTALL)


def read(path: Path) -> dict[str, Any] | None:
    """Return a record, None where there is none."""
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found


def main() -> int:
    """Run, or write a page's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help='"cuda", "cuda:1", or "cpu" to try the script')
    parser.add_argument("--quick", action="store_true", help="small sizes, once each: does it run?")
    parser.add_argument("--out", type=Path, default=RECORD, help="the record")
    parser.add_argument("--page", type=Path, help="write the record's table into this page, and run nothing")
    parser.add_argument("--check", action="store_true", help="with --page: write nothing, exit 1 where it differs")
    given = parser.parse_args()
    if given.page is not None:
        text = given.page.read_text()
        wanted = filled(text, read(given.out))
        if not given.check:
            given.page.write_text(wanted)
        return int(given.check and wanted != text)
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit(
            f"PyTorch {torch.__version__} finds no GPU here; bring one, or try the script: --device cpu --quick"
        )
    if given.device == "cpu" and given.out == RECORD:
        raise SystemExit("the record is of a GPU; name another file by --out to play this on the CPU")
    record = run(given.out, given.device, given.quick)
    print(table(record))
    missed = [
        name for piece in record["pieces"].values() for name, value in piece["figures"].items() if value == "missed"
    ]
    print(f"missed: {', '.join(missed)}" if missed else "nothing was missed", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
