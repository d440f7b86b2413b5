"""What Moretta takes before it does anything: processor seconds of processes of their own, which take turns.

`import moretta`; the help of the commands; one round of `examples/wdbc.toml`, with its run folder, over a process that
only imports what such a run needs, in a command of typer (`NEEDED`). Bytecode is written where it is missing, as after
any installation, by turns that are not measured.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from measure import figure, interleaved, main, ratio

from moretta.commands.main import app

ROOT = Path(__file__).parents[1]
NEEDED = """
import pathlib, typer

def command(path: pathlib.Path) -> None:
    import numpy, pydantic, rich.progress, rich.table, safetensors.numpy, torch
    import cryptography.hazmat.primitives.asymmetric.x25519, cryptography.hazmat.primitives.ciphers.aead

typer.run(command)
"""
COMMAND = "from moretta.commands.main import main; main()"


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all of them in turn."""
    commands = ["", *typer.main.get_command(app).commands]  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        demo = f"train examples/wdbc.toml --set run.rounds=1 --json --out {folder}/run"
        work = {
            "python": ["-c", "pass"],
            "import": ["-c", "import moretta"],
            "needed": ["-c", NEEDED, "run.toml"],
            "demo": ["-c", f"import shutil; shutil.rmtree('{folder}/run', True); {COMMAND}", *demo.split()],
            **{f"help_{name}": ["-c", COMMAND, *name.split(), "--help"] for name in commands},
        }
        seconds = interleaved(
            {name: lambda words=words: _python(words) for name, words in work.items()},  # type: ignore[misc]
            arguments.repeats,
            warm_up=1,
            clock=_processor_seconds_of_children,
        )
    helps = [seconds.pop(f"help_{name}") for name in commands]
    return {
        "load": list(os.getloadavg()),
        "commands": len(commands),
        **{f"{name}_s": figure(each, "s") for name, each in seconds.items()},
        "help_s": figure([second for each in helps for second in each], "s"),
        "slowest_help_s": figure(max(helps, key=sorted), "s"),
        "demo_over_needed_ratio": ratio(seconds["demo"], seconds["needed"]),
    }


def _python(words: Sequence[str]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, check=True)


def _processor_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main(__doc__ or "", run, ("--repeats", {"type": int, "default": 7}))
