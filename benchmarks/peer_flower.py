"""What Flower's simulation does with the task of `peers.py`: run by a Python of its own that has flwr and ray.

As many actors of ray play the silos as there are workers, each with one thread. With masks it is `SecAggPlusWorkflow`
with as many shares and the threshold as Moretta has for so many silos, and with the least largest weight, as weights
cost it precision. Both workflows are of Flower's older interface, as the newer one has no secure aggregation. A silo's
rows and model are made once in each actor.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import torch
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import Context, ndarrays_to_parameters
from flwr.common.serde import recorddict_to_proto
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from peer_task import WARM, Tally, Task


class Silo(NumPyClient):
    def __init__(self, task: Task, number: int) -> None:
        (self._x, self._y), self._model, self._rate = rows(task)[number], model(task), task.rate

    def fit(self, parameters: Any, config: Any) -> Any:
        for held, given in zip(self._model.parameters(), parameters, strict=True):
            held.data.copy_(torch.from_numpy(given))
        optimizer = torch.optim.SGD(self._model.parameters(), lr=self._rate)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self._model(self._x), self._y).backward()
        optimizer.step()
        return arrays(self._model), len(self._x), {}


@functools.cache
def rows(task: Task) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in task.data()]


@functools.cache
def model(task: Task) -> torch.nn.Module:
    torch.set_num_threads(1)
    return task.build()


def arrays(module: torch.nn.Module) -> list[Any]:
    return [value.detach().numpy() for value in module.parameters()]


class CountingGrid:
    """A grid that counts the bytes of messages' contents, as Flower serialises them, each round by itself.

    Counting takes time, so only rounds that are not timed are counted.
    """

    def __init__(self, grid: Any) -> None:
        self._grid, self._round = grid, 0
        self.down, self.up = [0], [0]  # by round

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def next_round(self) -> None:
        self.down.append(0)
        self.up.append(0)

    def send_and_receive(self, messages: Any, **options: Any) -> Any:
        return self._count(self.up, self._grid.send_and_receive(self._count(self.down, messages), **options))

    def push_messages(self, messages: Any) -> Any:
        return self._grid.push_messages(self._count(self.down, messages))

    def pull_messages(self, ids: Any) -> Any:
        return self._count(self.up, self._grid.pull_messages(ids))

    def _count(self, counts: list[int], messages: Any) -> list[Any]:
        counted = list(messages)
        if len(self.down) < WARM:
            counts[-1] += sum(map(_length, counted))
        return counted


def _length(message: Any) -> int:
    return int(recorddict_to_proto(message.content).ByteSize()) if message.has_content() else 0


def play_rounds() -> None:
    """Play the task over Flower's older interface, with or without SecAgg+."""
    task = Task.given()
    tally, module = Tally(task), task.build()
    names = [name for name, _ in module.named_parameters()]

    grids = list[CountingGrid]()

    def ended(number: int, parameters: Any, config: Any) -> None:
        if number:
            tally.round()
            grids[0].next_round()
        if number == task.rounds:  # while all processes are there
            weights = dict(zip(names, parameters, strict=True))
            tally.tell(weights, down=grids[0].down[: WARM - 1], up=grids[0].up[: WARM - 1])

    server = ServerApp()

    @server.main()
    def play(grid: Any, context: Context) -> None:
        grids.append(CountingGrid(grid))
        strategy = FedAvg(
            min_fit_clients=task.silos,
            min_available_clients=task.silos,
            fraction_evaluate=0.0,
            initial_parameters=ndarrays_to_parameters(arrays(module)),
            evaluate_fn=ended,
        )
        secure = SecAggPlusWorkflow(task.shares, task.threshold, max_weight=float(task.rows)) if task.masks else None
        DefaultWorkflow(secure)(grids[0], LegacyContext(context, ServerConfig(task.rounds), strategy))

    logging.getLogger("flwr").setLevel(logging.ERROR)
    client = ClientApp(
        lambda context: Silo(task, int(context.node_config["partition-id"])).to_client(),
        mods=[secaggplus_mod] if task.masks else [],
    )
    resources = {"init_args": {"num_cpus": task.workers}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=task.silos, backend_config=resources)


if __name__ == "__main__":
    import peer_flower  # by name, so that ray's actors import it, with what it keeps

    peer_flower.play_rounds()
