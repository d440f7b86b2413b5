"""What pfl-research does with the task of `peers.py`: run by a Python of its own that has pfl.

All silos take part in every round, by `SimulatedBackend` in this one process; what is evaluated in its first round is
not timed. Rows are tensors from the beginning.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from peer_task import Tally, Task
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel


def loss(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(self(x), y)


def metrics(self: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    return {"loss": Weighted.from_unweighted(loss(self, x, y).item())}


class Rounds(TrainingProcessCallback):
    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def after_central_iteration(self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int) -> Any:
        self._tally.round()
        return False, Metrics()


def main() -> None:
    task = Task.given()
    tally, module = Tally(task), task.build()
    module.loss, module.metrics = MethodType(loss, module), MethodType(metrics, module)  # type: ignore[assignment]
    rows = {
        f"silo-{k}": Dataset((torch.from_numpy(x), torch.from_numpy(y)), user_id=f"silo-{k}")
        for k, (x, y) in enumerate(task.data())
    }
    data = FederatedDataset(rows.__getitem__, get_user_sampler("minimize_reuse", list(rows)))
    server = torch.optim.SGD(module.parameters(), lr=1.0)  # adds the mean of the differences as it is
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=task.rounds,
            evaluation_frequency=task.rounds,
            train_cohort_size=task.silos,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]),
        PyTorchModel(module, torch.optim.SGD, server),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=task.rate, local_batch_size=None),
        callbacks=[Rounds(tally)],
        send_metrics_to_platform=False,  # it would print them
    )
    tally.tell({name: value.detach() for name, value in module.named_parameters()})


if __name__ == "__main__":
    main()
