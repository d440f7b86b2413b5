"""`moretta report`: one page about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moretta.commands.terminal import AsJson, needs_torch, say


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders.")],
    out: Annotated[Path | None, typer.Option(help="The page, an .html file; DIR/report.html by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page about runs."""
    with needs_torch():
        from moretta.report.page import write_report
        from moretta.run import comparison

        page = write_report(folders, out or folders[0] / "report.html", comparison.weight_differences(folders))
    say({"report": str(page)}, as_json, lambda: print(page))
