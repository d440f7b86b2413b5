"""What the table of refused calls is written with: silos, models that cannot be trained, and a trained one."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import moretta
from moretta import (
    BAFFLE,
    CGD,
    PBPFL,
    Centralised,
    Engine,
    FedAvg,
    Federation,
    FedSGD,
    Local,
    Result,
    Schema,
    SecureAggregation,
    Silo,
    read_table,
    split_rows,
)
from moretta.data.tables.files import Format
from moretta.data.tables.schema import Number

__all__ = [
    "BAFFLE", "CGD", "PBPFL", "Centralised", "DataLoader", "Engine", "FedAvg", "FedSGD", "Format", "Local", "Schema",
    "SecureAggregation", "Silo", "moretta", "read_table", "sparse",
    "split_rows",
]  # fmt: skip

X = np.random.default_rng(0).normal(0, 1, (12, 4)).astype(np.float32)
Y = np.arange(12) % 3
SOFT = FedSGD(loss="cross-entropy")


def silos(**further: Any) -> list[Silo]:
    return [Silo("north", X, Y), Silo("south", X + 1, Y), *(Silo(name, *rows) for name, rows in further.items())]


def make(**settings: Any) -> Federation:
    chosen: dict[str, Any] = {"model": nn.Linear(4, 3), "silos": silos(), "protocol": SOFT}
    return Federation(**(chosen | settings))


class Pairs(Dataset[Any]):
    """Samples with their targets and one thing more."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Any:
        return self.rows[place]


class InPlace(nn.Linear):
    """A model that writes to the rows that it is given."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(1.5))


class Votes(nn.Linear):
    """A model that gives whole numbers."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) > 0).long()


class Detached(nn.Linear):
    """A model whose outputs have no gradient."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


class FollowedInTraining(nn.Linear):
    """A model whose outputs have a gradient when it trains alone."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(nn.functional.dropout(x, training=self.training))
        return outputs if self.training else outputs.detach()


class MadeLate(nn.Module):
    """A model that makes its last layer when it sees how wide that must be."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu()
        if self.last is None:
            self.last = nn.Linear(h.shape[1], 3).to(h)
        outputs: torch.Tensor = self.last(h)
        return outputs


class Saved(nn.Linear):
    """A model whose state_dict is another than its tensors."""

    def __init__(self, keeps: str = "", gives: Any = None) -> None:
        super().__init__(4, 3)
        self.keeps, self.gives = keeps, gives

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        saved = super().state_dict(*args, **kwargs)
        return {name: tensor for name, tensor in saved.items() if self.keeps in name}

    def get_extra_state(self) -> Any:
        return self.gives


def with_complex_buffer() -> nn.Module:
    model = nn.Linear(4, 3)
    model.register_buffer("turn", torch.polar(torch.ones(3), torch.ones(3)), persistent=False)
    return model


def with_masked_gradient() -> nn.Module:
    last = nn.Linear(4, 3)
    last.weight.register_hook(lambda gradient: gradient * 0)
    return nn.Sequential(last)


def with_nothing() -> nn.Module:
    model = nn.Linear(4, 3)
    model.nothing = nn.Parameter(torch.zeros(0, 3))
    return model


def frozen_head(part: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    model.get_parameter(f"2.{part}").requires_grad_(False)
    return model


class Locked(nn.Identity):
    """A layer with what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


class Broken(nn.Linear):
    """A model whose weights are no numbers."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        nn.init.constant_(self.weight, float("nan"))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


class Frozen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :3]


TENSORS = TensorDataset(torch.tensor(X), torch.tensor(Y))
WORDS = np.array(["benign", "malign", "benign"] * 4)
AGES: Schema = Schema(columns={"age": Number()})


@functools.cache
def trained() -> Result:
    """A model of the silos, trained for one round."""
    return make(model={"source": "mlp", "hidden": [3]}, feature_names=["a", "b", "c", "d"]).train(1, progress=False)
