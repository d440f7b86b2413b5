"""`moretta watch`: the living page of a run folder; and the same page beside a run that a command plays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from moretta.commands.terminal import AsJson, say, tell

Port = Annotated[int | None, typer.Option("--watch-port", help="The port of that page.", min=0, max=65535)]
Watch = Annotated[bool, typer.Option("--watch", help="Serve a page of the run on this machine, as it goes.")]


@contextmanager
def page_of(folder: Path, watch: bool, port: int | None) -> Iterator[Callable[[str], None]]:
    """Serve the page of a run where one is wanted, for as long as the block lasts; yields what tells it a sentence."""
    if not watch and port is None:
        yield lambda sentence: None
        return
    from moretta.report.page_server import page_beside

    with page_beside(folder, port or 0, tell) as note:
        yield note


def watch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder, of a run that goes on or has ended.")],
    port: Annotated[int, typer.Option(help="The page's port; any that is free by default.", min=0, max=65535)] = 0,
    as_json: AsJson = False,
) -> None:
    """Serve a page about a run on this machine, which follows it until ctrl-c."""
    import secrets
    import threading

    from moretta.report.living import Said, check_run_folder, state_of
    from moretta.report.page_server import PageServer, address_of, listening

    check_run_folder(folder)
    found, token = listening(port), secrets.token_urlsafe(32)
    with PageServer(found, token, folder, Said()).serving(), suppress(KeyboardInterrupt):
        tell(f"the run's page is at {address_of(found, token)} until ctrl-c")
        threading.Event().wait()
    say({"format": 1, "folder": str(folder), **state_of(folder, Said())}, as_json, lambda: None)
