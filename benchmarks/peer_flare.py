"""The network of `flare_sums.py`, and one step of SGD by a script of FLARE's Client API, whatever sums the weights."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

INPUTS, WIDTH, CLASSES, ROWS = 16, 540, 10, 30


class Wide(nn.Sequential):
    """306,730 parameters, the same at each start."""

    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            first, second, last = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        super().__init__(first, nn.ReLU(), second, nn.ReLU(), last)


def train() -> None:
    """Take one step on this site's rows in each round."""
    import nvflare.client as flare  # the benchmark's own process needs none of it

    torch.set_num_threads(1)
    flare.init()
    random = np.random.default_rng(int(flare.get_site_name().rpartition("-")[2]))
    x = torch.from_numpy(random.normal(size=(ROWS, INPUTS)).astype("f4"))
    y = torch.from_numpy(random.integers(CLASSES, size=ROWS))
    network = Wide()
    while flare.is_running():
        network.load_state_dict(flare.receive().params)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        torch.nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        flare.send(flare.FLModel(params=network.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": ROWS}))


if __name__ == "__main__":
    train()
