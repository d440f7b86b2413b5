"""Run folders with realistic numbers, as the federation writes them."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """make_run(protocol, folder=..., regression=..., rounds=..., key=value): further keys replace the result's own."""

    def make(
        protocol: str = "pbpfl", *, folder: str = "", regression: bool = False, rounds: int = 80, **replaced: Any
    ) -> Path:
        at = tmp_path / (folder or f"wdbc-{protocol}")
        at.mkdir()
        (at / "result.json").write_text(json.dumps(result(protocol, regression, rounds) | replaced))
        (at / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in history(regression, rounds)))
        return at

    return make


def result(protocol: str, regression: bool, rounds: int) -> dict[str, Any]:
    noisy = protocol == "pbpfl"
    alone = protocol in ("local", "centralised")
    score = {"mse": 0.0171} if regression else {"accuracy": 0.9737}
    settings: dict[str, dict[str, Any]] = {
        "run": {"name": "wdbc", "rounds": rounds, "seed": 7, "dtype": "float32"},
        "data": {"source": "wdbc", "silos": 3, "partition": "iid", "batch-size": 32},
        "model": {"source": "mlp", "hidden": [32, 32]},
        "protocol": {"name": protocol, "loss": "mse", "learning-rate": 0.1, **({"partitions": 2} if noisy else {})},
        "secure-aggregation": {"scheme": "none" if alone else "pairwise", "ring-bits": 64},
        "engine": {"name": "in-process", "strict": False},
    }
    return {
        "format": 1,
        "name": "wdbc",
        "run": "9f3c1a77b2d04e55",
        "protocol": protocol,
        "rounds": rounds,
        "silos": 3,
        "silo_names": ["silo-1", "silo-2", "silo-3"],
        "parameters": 2081,
        "task": "regression" if regression else "classification",
        "test": {
            "loss": 0.0312,
            **score,
            "metrics": {} if regression else {"auc": 0.9963, "balanced_accuracy": 0.9691},
            "per_silo": {f"silo-{number}": {"rows": 152, "loss": 0.03, **score} for number in (1, 2, 3)},
        },
        "bytes": {
            "up_per_silo_per_round": 0 if alone else 26224.0 if noisy else 16832.0,
            "down_per_silo_per_round": 0 if alone else 9120.5,
            "secure_aggregation": 0 if alone else 4420,
        },
        "seconds": {
            "total": 8.1,
            "perturbation": 0.9 if noisy else 0.0,
            "local_forward": 1.1,
            "local_backward": 3.2,
            "aggregation": 1.6,
            "update": 0.4,
        },
        "dropped": [{"round": 3, "silo": "silo-2", "reason": "refused: its rows are gone"}] if noisy else [],
        "versions": {"moretta": "0.1.0", "python": "3.11.2", "torch": "2.13.0", "numpy": "2.4.0"},
        "secure_aggregation": {"scheme": "none" if alone else "pairwise", "ring_bits": 64},
        "facts": {"ring_gradient_error": 2.9e-11, "free_scales": 64.0, "forced_to_one": 0.0} if noisy else {},
        "warnings": ["silo-3 has fewer rows than the others"] if noisy else [],
        "settings": settings,
        "insecure_secret_seed": False,
    }


def history(regression: bool, rounds: int) -> list[dict[str, Any]]:
    lines = []
    for number in range(1, rounds + 1):
        loss = 0.45 * math.exp(-number / 20) + 0.02 + 0.004 * math.sin(7 * number)
        line = {"round": number, "attempt": 0, "loss": loss, "seconds": {"total": 0.03}, "bytes": {"up": 3, "down": 4}}
        if number % 10 == 0:
            line |= {"test_loss": loss, **({"test_mse": loss} if regression else {"test_accuracy": 1 - loss})}
        lines.append(line)
    return lines
