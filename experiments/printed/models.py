"""The tables of docs/models-measured.md: what PBPFL makes of models, by benchmarks/models.py."""

import json
from pathlib import Path

from printed import Table, joined

HEAD = (
    "model | input | parameters | free scales | tensors with a scale 1 | float64 | float32, cross-entropy | float32, mse "
    "| powers of two | own rounding | seconds"
)
MEASURED = json.loads((Path(__file__).parents[1] / "pbpfl" / "results" / "pbpfl-models.json").read_text("utf-8"))
ERRORS = ("float64", "float32, cross-entropy", "float32, mse", "powers of two", "own rounding")


def _row(model: str) -> str:
    place, of = f"pbpfl-models[models; {model}; ", MEASURED["models"][model]
    errors = [f"{{{place}{error}]:.0e}}" if of[error] is not None else "" for error in ERRORS]
    return joined(
        model, of["input"], f"{{{place}parameters]:,.0f}}", f"{{{place}free scales]:,.0f}}",
        f"{{{place}scale 1]:.0f}} of {{{place}tensors]:.0f}}", *errors, f"{{{place}seconds]:.1f}}",
    )  # fmt: skip


OURS = [model for model in MEASURED["models"] if " " in model or "-" in model]
TABLES = {
    "models-built-in": Table(HEAD, [_row(model) for model in OURS]),
    "models-torchvision": Table(HEAD, [_row(model) for model in MEASURED["models"] if model not in OURS]),
}
