"""The script for a GPU: it resumes, says clearly that there is none, and its table in the docs is its record's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch

ROOT = Path(__file__).parents[1]


def counted(monkeypatch: pytest.MonkeyPatch, fails: str = "") -> list[str]:
    """Put pieces that note their names in the place of the real ones; one may fail."""
    played = list[str]()

    def piece(name: str) -> gpu.Piece:
        def play(device: str, quick: bool) -> dict[str, Any]:
            if name == fails:
                raise KeyboardInterrupt
            played.append(name)
            return {f"{name}_ms": gpu.figure([1.0, 2.0, 3.0, 4.0], "ms"), f"{name}_is": "met"}

        return play

    monkeypatch.setattr(gpu, "PIECES", {name: piece(name) for name in ("one", "two")})
    monkeypatch.setattr(gpu, "QUICK", ("one", "two"))
    return played


def test_it_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    counted(monkeypatch, fails="two")
    with pytest.raises(KeyboardInterrupt):
        gpu.run(path, "cpu", quick=True)
    assert list(json.loads(path.read_text())["pieces"]) == ["one"]
    played = counted(monkeypatch)
    record = gpu.run(path, "cpu", quick=True)
    assert played == ["two"]
    assert json.loads(json.dumps(record)) == json.loads(path.read_text())
    assert "| two ms | 2.5 ms | 1.25 to 3.75 | 4 |" in gpu.table(record)
    with pytest.raises(SystemExit, match="a record of something else"):
        gpu.run(path, "cpu", quick=False)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "record.json")])
    with pytest.raises(SystemExit, match="finds no GPU here"):
        gpu.main()
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu"])
    with pytest.raises(SystemExit, match="name another file by --out"):
        gpu.main()


def test_the_page_has_the_records_table() -> None:
    page, record = (ROOT / "docs" / "benchmarks.md").read_text(), gpu.read(gpu.RECORD)
    assert page.count(gpu.BEGIN) == page.count(gpu.END) == 1
    assert gpu.filled(page, record) == page, "run: python experiments/gpu.py --page docs/benchmarks.md"
    assert record is not None or gpu.NEVER in page


def test_it_plays_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    command = [sys.executable, "experiments/gpu.py", "--device", "cpu", "--quick", "--out", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=600)
    record = json.loads(path.read_text())
    assert tuple(record["pieces"]) == gpu.QUICK
    assert "nothing was missed" in done.stderr
    assert done.stdout.count("| met |") == 4
