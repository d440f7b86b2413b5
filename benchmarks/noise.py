"""What noise and its removal cost a round of ten silos, beside gradients row by row and the keystream that draws read.

`dp-noise` needs each row's gradient anyway, clipped and added up: the bar is that noise takes no longer. Each of ten
silos, of whom three may be lost, draws what stays and three further parts. Where none is lost, the server draws again
all further parts of all ten to take them off, which is the most that it ever does. Times are the processor's, of all
silos and the server together, and the floor is the keystream's bytes alone.

    OMP_NUM_THREADS=1 python benchmarks/noise.py --json > benchmarks/records/noise.json
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import numpy as np
import torch
from measure import figure, interleaved, main, ratio
from torch import nn

from moretta.protocols.common.batches import Batches
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.lattice import Lattice, Privacy
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.noise import SiloNoise
from moretta.protocols.common.silo_rows import TrainingRows
from moretta.protocols.fedsgd.private import PrivateGradient
from moretta.secure_aggregation.discrete_gaussian import discrete_gaussian
from moretta.secure_aggregation.keystream import Keystream, SecretRoot
from moretta.secure_aggregation.removable_noise import Removable, removable_noise

SILOS, LOSSES, INPUTS, CLASSES = 10, 3, 784, 10
LOTS = (32, 128)
PRIVACY = Privacy(1.0, 1.0, 1e-5).among(SILOS, SILOS - LOSSES)


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Time a silo's gradients and noise, and the removal of its noise at the server."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, given.hidden), nn.ReLU(), nn.Linear(given.hidden, CLASSES))
    entries, draw = sum(parameter.numel() for parameter in model.parameters()), np.random.default_rng(0)
    levels, root = Lattice.of(PRIVACY, entries).noise.levels(SILOS, LOSSES), SecretRoot.insecure(0, "silo")
    chain = Removable.of(levels, root.stream("seeds"))
    base = discrete_gaussian(math.sqrt(levels.variances[0]))
    parts = [discrete_gaussian(math.sqrt(variance)) for variance in levels.variances]
    octets = {"silo": 4 * entries * sum(part.levels for part in parts)}
    octets["server"] = 4 * entries * sum(part.levels for part in parts[1:])

    def gradients(lot: int) -> object:
        rows = TrainingRows(draw.normal(size=(lot, INPUTS)).astype("f4"), draw.integers(0, CLASSES, lot),
                            Batches(lot, 0, 0, "silo"))  # fmt: skip
        noise = SiloNoise(PRIVACY, lot, 0, root, b"")
        private = PrivateGradient(noise, SiloRows(rows, torch.float32), Loss("cross-entropy"))
        return lambda: private.clipped_sum(model, np.arange(lot))

    seconds = interleaved(
        {
            **{f"gradients_{lot}": gradients(lot) for lot in LOTS},
            "noise": lambda: (
                base.draw(root.stream("base"), entries) + removable_noise(chain.seeds[0], 1, levels, entries)
            ),
            "removal": lambda: removable_noise(chain.seeds[0], 1, levels, entries),
            "keystream": lambda: Keystream(bytes(32)).octets(sum(octets.values())),
        },
        given.pairs,
        warm_up=1,
        clock=time.process_time,
    )  # type: ignore[arg-type]
    both = [first + second for first, second in zip(seconds["noise"], seconds["removal"], strict=True)]
    found: dict[str, Any] = {f"{name}_ms": figure(each, "ms", 1e3 * SILOS) for name, each in seconds.items()}
    found["noise_over_keystream_ratio"] = ratio(both, seconds["keystream"])
    for lot in LOTS:
        found[f"noise_over_gradients_{lot}_ratio"] = ratio(both, seconds[f"gradients_{lot}"])
    about = {
        "parameters": entries,
        "silos": SILOS,
        "losses": LOSSES,
        "parts": len(parts),
        "draws": [part.levels for part in parts],
    }
    return found | about | {"keystream_bytes": SILOS * sum(octets.values()), "pairs": given.pairs}


if __name__ == "__main__":
    main(
        (__doc__ or "").partition("\n")[0],
        run,
        ("--pairs", {"type": int, "default": 7, "help": "turns; 7 by default"}),
        ("--hidden", {"type": int, "default": 378, "help": "units, which make 0.3 million parameters by default"}),
    )
