"""A wheelhouse: what `make wheelhouse` makes is all that a machine without a way out needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALONE = ("unshare", "--map-root-user", "--net")  # a network namespace that has nothing, its own loopback included
NO_WAY = "import socket\ntry: socket.create_connection(('192.0.2.1', 443), 5)\nexcept OSError as e: print(e.strerror)"


def bare() -> dict[str, str]:
    """The environment, without what would lead pip or Python to anything else."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_COMPILE": "1"}


def alone(*words: object) -> str:
    done = subprocess.run([*ALONE, *map(str, words)], env=bare(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of which nothing is kept: wheels and an environment are a gigabyte."""
    yield tmp_path
    for path in tmp_path.iterdir():
        shutil.rmtree(path)


@pytest.mark.slow
def test_moretta_is_installed_where_there_is_no_way_out(folder: Path) -> None:
    """Minutes: PyTorch is fetched and installed."""
    if shutil.which("unshare") is None or subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine makes no network namespaces for its users")
    if not (ROOT / ".venv/bin/python").exists():
        pytest.skip("make wheelhouse is for a checkout with its environment")
    assert alone(sys.executable, "-c", NO_WAY) == "Network is unreachable\n"
    house, words = folder / "wheelhouse", ["make", "-C", str(ROOT), "wheelhouse", f"WHEELHOUSE={folder / 'wheelhouse'}"]
    # a machine whose pip has wheels of its own has PyTorch among them, and need not reach that index
    words += ["TORCH_INDEX=https://pypi.org/simple"] if "PIP_FIND_LINKS" in os.environ else []
    made = subprocess.run(words, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    wheels = {path.name.partition("-")[0].lower() for path in house.iterdir()}
    assert {"moretta", "torch", "nvflare", "grpcio", "onnx", "pydicom"} <= wheels
    assert not [name for name in wheels if name.startswith(("nvidia", "triton"))]
    assert all(path.suffix == ".whl" for path in house.iterdir())
    venv.create(folder / "env", with_pip=True, symlinks=True)
    programs = folder / "env/bin"
    alone(programs / "python", "-m", "pip", "install", "--no-index", "--find-links", house, "moretta[flare]")
    shutil.rmtree(house)
    assert alone(programs / "python", "-c", "import moretta, torch, nvflare; print(moretta.__file__)").startswith(
        str(folder)
    )
    assert alone(programs / "moretta", "--version")
