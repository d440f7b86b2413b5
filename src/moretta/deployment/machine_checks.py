"""Checks of a machine: what is installed on it, and what is free."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from moretta.contract.memory import free_memory
from moretta.deployment.check_result import Warned
from moretta.engines.confinement import landlock
from moretta.errors import MissingExtra, ParameterError

PYTHONS = ((3, 11), (3, 13))  # the first and the last
FLARE = (2, 9)
COPIES = 4  # of a model's parameters that a round takes at least: themselves, gradients, what is sent, what came
LEAST_DISK, KEPT = 100 * 2**20, 20  # bytes; or so many times the parameters: checkpoints, views, released models


def python() -> str:
    """Check that FLARE runs on this Python."""
    here, (first, last) = sys.version_info[:2], PYTHONS
    if not first <= here <= last:
        raise ParameterError(f"is {here[0]}.{here[1]}, and FLARE runs on 3.11 to 3.13; make an environment with one")
    return f"version {here[0]}.{here[1]}"


def pytorch(edge: bool) -> str:
    """Check that PyTorch is installed, where the silo is no edge client."""
    if edge:
        return "an edge site runs none, whether it is there or not"
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("is not installed; install it by: pip install 'moretta[torch]'")
    return f"version {metadata.version('torch')}; sites run the server's, or one of [engine] torch-versions"


def flare(extra: str) -> str:
    """Check that FLARE is installed. extra: of this package, with which it comes."""
    if importlib.util.find_spec("nvflare") is None:
        raise MissingExtra(f"is not installed; install it by: pip install 'moretta[{extra}]'")
    version = metadata.version("nvflare")
    found = tuple(int(part) if part.isdecimal() else 0 for part in version.split(".")[:2])
    if found < FLARE:
        raise ParameterError(
            f"is version {version}, and 2.9 at least is needed; run: pip install -U 'moretta[{extra}]'"
        )
    return f"version {version}"


def confinement() -> str:
    """Check that the kernel can confine a process that runs somebody else's graph."""
    if not landlock():
        return Warned("this kernel has no Landlock (Linux 5.13), so a graph's process is not kept from your files")
    return "Landlock keeps the process of a graph from your files"


def onnx_runtime() -> str:
    """Check that ONNX Runtime is installed."""
    if importlib.util.find_spec("onnxruntime") is None:
        raise MissingExtra("an edge client needs onnxruntime; install it by: pip install 'moretta[edge]'")
    return f"onnxruntime {metadata.version('onnxruntime')}"


def device_is_there(device: str) -> str:
    """Check that PyTorch finds a GPU."""
    import torch

    number = int(device.partition(":")[2] or 0)
    if not torch.cuda.is_available() or number >= torch.cuda.device_count():
        raise ParameterError(f'PyTorch finds no {device} here; correct [limits] device, for example to "cpu"')
    return f"{device} is there"


def memory(size: int, holders: int) -> str:
    """Check that a round fits. size: bytes of the parameters. holders: silos whose uploads are held at once."""
    free, needed = free_memory(), size * (COPIES + 2 * holders)  # what is sent has 8 bytes a number
    if not size:
        return f"{_shown(free)} free; give --run to compare with what a model takes"
    if free < needed:
        raise ParameterError(
            f"{_shown(free)} free, and this model takes {_shown(needed)} at least; end other programs, or use another "
            "machine"
        )
    return f"{_shown(free)} free; parameters are {_shown(size)}, and a round takes {_shown(needed)} at least"


def disk(out: Path, size: int) -> str:
    """Check that a run fits at a folder. size: bytes of the parameters."""
    free, needed = shutil.disk_usage(_nearest(out)).free, max(LEAST_DISK, KEPT * size)
    if free < needed:
        raise ParameterError(f"{_shown(free)} free, and {_shown(needed)} should be; make room, or name another folder")
    return f"{_shown(free)} free at {_nearest(out)}"


def writable(folder: Path) -> str:
    """Check that a folder can be written to, or made. Raises `moretta.errors.ParameterError`."""
    folder, there = folder.absolute(), _nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=there) as stream:
            stream.write(b"1")
    except OSError as error:
        raise ParameterError(
            f"{folder} cannot be written to ({error.strerror}); give the right to it, or name another folder"
        ) from None
    return f"{folder} can be {'written to' if there == folder else 'made'}"


def _nearest(folder: Path) -> Path:
    folder = folder.absolute()
    return next((one for one in (folder, *folder.parents) if one.exists()), folder)


def _shown(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"
