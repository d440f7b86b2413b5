"""Rows that a small network learns, and runs of BAFFLE on them that a test can see into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from networks import perceptron
from numpy.typing import NDArray
from torch import nn

from moretta import BAFFLE, Engine, Federation, SecureAggregation, Silo
from moretta.contract.messages import Message
from moretta.protocols.baffle.server import Server
from moretta.protocols.baffle.silo.client import Client
from moretta.protocols.common import modules
from moretta.protocols.common.roles import Roles
from moretta.run.result import Result

SEED = 3
CLASSES, COLUMNS = 4, 6
CLEAR = SecureAggregation(scheme="none")
Rows = tuple[NDArray[np.float32], NDArray[np.int64]]


def table(rows: int, seed: int = 0) -> Rows:
    """Rows of four classes around centres that lie two deviations apart."""
    generator = np.random.default_rng(seed)
    y = generator.integers(0, CLASSES, rows)
    centres = 1.5 * np.random.default_rng(99).normal(0, 1, (CLASSES, COLUMNS))
    return (centres[y] + generator.normal(0, 0.7, (rows, COLUMNS))).astype(np.float32), y.astype(np.int64)


def silos(rows: Sequence[int] = (40, 24, 60)) -> list[Silo]:
    x, y = table(sum(rows))
    cuts = np.split(np.arange(sum(rows)), np.cumsum(rows)[:-1])
    return [Silo(f"silo-{number}", x[index], y[index]) for number, index in enumerate(cuts)]


def network(outputs: int = CLASSES, hidden: int = 5) -> nn.Sequential:
    return perceptron(COLUMNS, hidden, outputs)


def normalised() -> nn.Sequential:
    """The network with BatchNorm."""
    model = network()
    return nn.Sequential(model[0], nn.BatchNorm1d(5), *list(model)[1:])


def make(protocol: BAFFLE | None = None, **settings: Any) -> Federation:
    """A federation with strict messages and an insecure secret seed unless settings say otherwise."""
    chosen: dict[str, Any] = {
        "model": network(),
        "silos": silos(),
        "protocol": protocol or learning(),
        "batch_size": 16,
        "evaluate_every": 1000,
        "engine": Engine(strict=True),
        "insecure_secret_seed": 1,
    } | settings
    return Federation(**chosen)


def learning(**settings: Any) -> BAFFLE:
    """Settings with which the table is learnt in some fifty rounds."""
    return BAFFLE(**({"loss": "cross-entropy", "learning_rate": 0.05, "k": 24, "ema": 0.0} | settings))


def weights(result: Result) -> dict[str, NDArray[Any]]:
    assert result.model is not None
    return modules.arrays(result.model)


def same_bytes(one: dict[str, NDArray[Any]], other: dict[str, NDArray[Any]]) -> bool:
    return {name: (value.dtype, value.tobytes()) for name, value in one.items()} == {
        name: (value.dtype, value.tobytes()) for name, value in other.items()
    }


def farthest(one: dict[str, NDArray[Any]], other: dict[str, NDArray[Any]]) -> float:
    assert set(one) == set(other)
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def client_of(players: Roles, name: str = "silo-0") -> Client:
    found = players.clients[name]
    assert isinstance(found, Client)
    return found


def server_of(players: Roles) -> Server:
    assert isinstance(players.server, Server)
    return players.server


def answering(name: str, kind: type[Message], by: Callable[[Callable[[Any], Message], Any], Message]) -> Any:
    """Have a silo answer one kind of message by a function of its honest answer and the message."""

    def wrap(players: Roles) -> None:
        honest = players.clients[name].answer

        def answer(message: Message) -> Message:
            return by(honest, message) if isinstance(message, kind) else honest(message)

        players.clients[name].answer = answer  # type: ignore[method-assign]

    return wrap
