"""What Moretta does with the task of `peers.py`: silos of the in-process engine, and no run folder."""

from __future__ import annotations

from peer_task import Tally, Task

from moretta import Engine, FedAvg, Federation, SecureAggregation, Silo


def main() -> None:
    task = Task.given()
    tally = Tally(task)
    federation = Federation(
        task.build(),
        [Silo(f"silo-{k:03}", x, y) for k, (x, y) in enumerate(task.data())],
        FedAvg(loss="cross-entropy", learning_rate=task.rate, local_epochs=1),
        aggregation=SecureAggregation(scheme="pairwise" if task.masks else "none"),
        engine=Engine(**({"workers": task.workers} if "workers" in Engine.model_fields else {})),
        batch_size=task.rows,
    )
    result = federation.train(task.rounds, progress=lambda *_: tally.round())
    tally.tell(result.model.state_dict())


if __name__ == "__main__":
    main()
