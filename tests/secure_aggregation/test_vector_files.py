from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "vectors"
GENERATOR = runpy.run_path(str(FOLDER / "generate.py"))


@pytest.mark.parametrize("name", GENERATOR["VECTORS"])
def test_files_are_what_the_generator_writes(name: str) -> None:
    kept = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert kept == json.loads(json.dumps(GENERATOR["VECTORS"][name]()))
