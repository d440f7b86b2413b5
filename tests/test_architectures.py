"""The table of architectures on docs/models-measured.md is that of its record, and the list builds what it says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import architectures  # type: ignore[import-not-found]


def test_the_table_of_the_page_is_the_record_s() -> None:
    text = architectures.PAGE.read_text("utf-8")
    assert architectures.page(text, architectures.read(architectures.RECORD)) == text, (
        "run python benchmarks/architectures.py --page"
    )


def test_each_refusal_of_the_record_has_its_sentence() -> None:
    lines = architectures.read(architectures.RECORD)
    assert len(lines) >= 30
    for line in lines:
        for kind in architectures.KINDS:
            cell = line[kind]
            assert cell["passes"] or cell.get("refused") or cell.get("failed") or "differs" in cell


def test_architectures_of_its_own_train_from_a_run_file() -> None:
    for name in ("tcn", "ft-transformer"):
        assert architectures.trained(architectures.CASES[name], "fedsgd", "float32")["differs"] < 1e-4


@pytest.fixture
def libraries() -> None:
    """Skip without the libraries; transformers imports torchvision where that is installed, as its stub lets it."""
    architectures.torchvision()
    for name in ("transformers", "monai", "einops"):
        pytest.importorskip(name)


def within(found: dict[str, Any]) -> bool:
    return bool(found["differs"] <= architectures.CLOSE)


PLAYED: list[Callable[[Any], dict[str, Any]]] = [
    lambda case: architectures.trained(case, "fedsgd", "float32"),
    architectures.checked,
    architectures.cut,
]


@pytest.mark.slow
@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("played", PLAYED)
def test_bert_on_padded_text_trains_as_a_plain_run(played: Callable[[Any], dict[str, Any]]) -> None:
    case = architectures.CASES["bert"]
    assert within(played(replace(case, arguments={**case.arguments, **architectures.NO_DROPOUT})))


@pytest.mark.slow
@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", ["llama", "monai unet", "monai segresnet", "monai swin-unetr"])
def test_others_models_pass_the_check_unwrapped(name: str) -> None:
    assert within(architectures.checked(architectures.CASES[name]))
