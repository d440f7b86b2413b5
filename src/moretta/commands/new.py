"""`moretta new`: a project to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moretta.commands.terminal import AsJson, say


def new(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="The project's folder, which is made.")],
    as_json: AsJson = False,
) -> None:
    """Write a project: made-up tables, a model, a run file, and a test that runs."""
    from moretta.run.project import create

    files = [path.relative_to(name) for path in create(name)]

    def plainly() -> None:
        print(f"{name}: {', '.join(map(str, files))}")
        print(f"cd {name}; moretta train run.toml --out runs/{name.absolute().name}")

    say({"format": 1, "folder": str(name), "files": list(map(str, files))}, as_json, plainly)
