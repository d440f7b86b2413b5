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


def audited(folder: Path, described: str) -> tuple[set[str], dict[str, NDArray[Any]]]:
    """Audit a folder of views by the command; return which attacks fit, and the final model that views lead to.

    described: a module whose function `federation` returns the run. An attack that a busy machine leaves no time fits.
    """
    (folder / "theirs.py").write_text(described)
    words = [sys.executable, "-m", "moretta", "audit", str(folder), "--views", "--federation", "theirs:federation"]
    given = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=given, text=True, capture_output=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / "audit.json").read_text())
    assert found["protocol"] == "fedavg"
    late = [one for one in found["not_run"] if one["because"].startswith("it had not ended")]
    return {one["attack"] for one in (*found["attacks"], *late)}, load_file(folder / "released.safetensors")
