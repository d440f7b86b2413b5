"""`moretta audit --views` of what real processes of another framework recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]


def audited(folder: Path, described: str) -> tuple[dict[str, float], dict[str, NDArray[Any]]]:
    """Audit a folder of views by the command; return each attack's score, and the final model that views lead to.

    described: a module whose function `federation` returns the run.
    """
    (folder / "theirs.py").write_text(described)
    words = [sys.executable, "-m", "moretta", "audit", str(folder), "--views", "--federation", "theirs:federation"]
    given = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=given, text=True, capture_output=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / "audit.json").read_text())
    assert found["protocol"] == "fedavg"
    return {one["attack"]: one["score"] for one in found["attacks"]}, load_file(folder / "released.safetensors")
