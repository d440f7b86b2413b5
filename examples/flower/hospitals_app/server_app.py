"""The server's half: Flower's own loop with a strategy that sums."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from hospitals_app import task
from moretta import SecureAggregation
from moretta.flower import SecureFedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    secure = SecureAggregation(roster=config["roster"] or None)
    strategy = SecureFedAvg(min_available_nodes=int(config["clients"]), secure=secure)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({name: Array(array) for name, array in task.start().items()}),
        num_rounds=int(config["num-server-rounds"]),
    )
    np.savez(str(config["save"]), **{name: array.numpy() for name, array in result.arrays.items()})
