"""Train one PyTorch model across organisations, none of which sends its rows.

Import the names below on first use, so that `import moretta` is quick, and works without torch.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from moretta.errors import MissingExtra

if TYPE_CHECKING:
    from moretta.data.alignment.exchange import align
    from moretta.data.alignment.partner import IdRules
    from moretta.data.silo import Silo
    from moretta.data.split import split_rows
    from moretta.data.tables.rows import read_table
    from moretta.data.tables.schema import Schema
    from moretta.engines.settings import Engine, Faults
    from moretta.protocols.baffle.params import BAFFLE
    from moretta.protocols.cgd.params import CGD
    from moretta.protocols.fedsgd.params import Centralised, FedAvg, FedProx, FedSGD, Local
    from moretta.protocols.pbpfl.params import PBPFL
    from moretta.run.federation import Federation
    from moretta.run.record import FinishedRound, StopTraining
    from moretta.run.result import Result
    from moretta.run.trained_model import load
    from moretta.secure_aggregation.secure_sum import SumClient, secure_sum
    from moretta.secure_aggregation.settings import SecureAggregation

__version__ = "0.1.0"

logging.getLogger("moretta").addHandler(logging.NullHandler())  # who shows what it says is the program's choice

__all__ = [
    "BAFFLE",
    "CGD",
    "PBPFL",
    "Centralised",
    "Engine",
    "Faults",
    "FedAvg",
    "FedProx",
    "FedSGD",
    "Federation",
    "FinishedRound",
    "IdRules",
    "Local",
    "Result",
    "Schema",
    "SecureAggregation",
    "Silo",
    "StopTraining",
    "SumClient",
    "align",
    "load",
    "read_table",
    "secure_sum",
    "split_rows",
]

_HOMES = {
    "BAFFLE": "moretta.protocols.baffle.params",
    "CGD": "moretta.protocols.cgd.params",
    "PBPFL": "moretta.protocols.pbpfl.params",
    "Centralised": "moretta.protocols.fedsgd.params",
    "Engine": "moretta.engines.settings",
    "Faults": "moretta.engines.settings",
    "FedAvg": "moretta.protocols.fedsgd.params",
    "FedProx": "moretta.protocols.fedsgd.params",
    "FedSGD": "moretta.protocols.fedsgd.params",
    "Federation": "moretta.run.federation",
    "IdRules": "moretta.data.alignment.partner",
    "Local": "moretta.protocols.fedsgd.params",
    "Result": "moretta.run.result",
    "FinishedRound": "moretta.run.record",
    "Schema": "moretta.data.tables.schema",
    "SecureAggregation": "moretta.secure_aggregation.settings",
    "Silo": "moretta.data.silo",
    "StopTraining": "moretta.run.record",
    "SumClient": "moretta.secure_aggregation.secure_sum",
    "align": "moretta.data.alignment.exchange",
    "load": "moretta.run.trained_model",
    "read_table": "moretta.data.tables.rows",
    "secure_sum": "moretta.secure_aggregation.secure_sum",
    "split_rows": "moretta.data.split",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'moretta' has no attribute {name!r}")
    try:
        home = importlib.import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise MissingExtra(f"moretta.{name} needs PyTorch; run: pip install 'moretta[torch]'") from None
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
