"""`moretta train`: the model of a run file, trained in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moretta.commands.progress import train_with_bar
from moretta.commands.terminal import AsJson, Overrides, RunPath, needs_torch, print_result
from moretta.commands.watch import Port, Watch, page_of


def train(
    run: RunPath,
    out: Annotated[Path | None, typer.Option(help="The run folder; runs/NAME by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's last checkpoint.")] = False,
    watch: Watch = False,
    watch_port: Port = None,
    overrides: Overrides = [],  # noqa: B006  # typer reads the default, nothing writes to it
    as_json: AsJson = False,
) -> None:
    """Train the model of a run file and leave a run folder."""
    from moretta.config import run_files

    run_file = run_files.load(run, overrides)
    folder = out or run_file.folder
    with needs_torch(), page_of(folder, watch, watch_port):
        result = train_with_bar(run_file, folder, resume)
    print_result([folder], {}, as_json, dict(result.record))
