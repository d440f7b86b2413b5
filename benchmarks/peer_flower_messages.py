"""What Flower's simulation does with the task of `peers.py` over its message interface, by plain FedAvg or Moretta's.

Run by a Python of its own that has flwr and ray, as `peer_flower.py`.
"""

from __future__ import annotations

from typing import Any

import peer_flower
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peer_task import WARM, Tally, Task

from moretta import SecureAggregation
from moretta.flower import SecureFedAvg, secure_sum


def client(task: Task) -> ClientApp:
    app = ClientApp(mods=[secure_sum()] if task.masks else [])

    @app.train()
    def train(message: Message, context: Any) -> Message:
        module = peer_flower.model(task)
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = peer_flower.rows(task)[int(context.node_config["partition-id"])]
        optimizer = torch.optim.SGD(module.parameters(), lr=task.rate)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
        metrics = MetricRecord({"num-examples": len(x)})
        return Message(RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics}), reply_to=message)

    return app


def play_rounds() -> None:
    task = Task.given()
    tally, server = Tally(task), ServerApp()

    @server.main()
    def play(grid: Any, context: Any) -> None:
        counted = peer_flower.CountingGrid(grid)

        def ended(number: int, arrays: ArrayRecord) -> None:
            if number:
                tally.round()
                counted.next_round()
            if number == task.rounds:  # while all processes are there
                weights = {name: array.numpy() for name, array in arrays.items()}
                tally.tell(weights, down=counted.down[: WARM - 1], up=counted.up[: WARM - 1])

        settings = {"fraction_evaluate": 0.0, "min_train_nodes": task.silos, "min_available_nodes": task.silos}
        strategy: FedAvg = FedAvg(**settings)
        if task.masks:
            secure = SecureAggregation(ring_bits=task.ring_bits)
            strategy = SecureFedAvg(secure=secure, most_examples=task.silos * task.rows + 1, **settings)
        strategy.start(counted, ArrayRecord(task.build().state_dict()), task.rounds, evaluate_fn=ended)

    resources = {"init_args": {"num_cpus": task.workers}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client(task), num_supernodes=task.silos, backend_config=resources)


if __name__ == "__main__":
    import peer_flower_messages  # by name, so that ray's actors import it

    peer_flower_messages.play_rounds()
