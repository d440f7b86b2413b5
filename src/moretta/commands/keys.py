"""`moretta keys`: long-lived identities, made and shown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from moretta.commands.terminal import AsJson, say

keys = typer.Typer(no_args_is_help=True, help="Make and show long-lived identities; both commands take --json.")


@keys.command("new")
def new_key(
    out: Annotated[Path, typer.Option(help="A new folder for identity.key, which stays there, and identity.pub.")],
    as_json: AsJson = False,
) -> None:
    """Make an identity: its private key for this silo alone, its public key for everybody's roster."""
    from moretta.secure_aggregation.identity import Identity

    identity = Identity.fresh()
    identity.save(out, alone=True)
    _say_key(identity.public_key, {"out": str(out)}, as_json)


@keys.command("show")
def show_key(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder of an identity, or one of its two files.")],
    as_json: AsJson = False,
) -> None:
    """Show the public key of an identity as a roster has it, and its fingerprint."""
    from moretta.secure_aggregation.identity import read_public_key

    _say_key(read_public_key(path), {}, as_json)


def _say_key(key: bytes, more: Mapping[str, str], as_json: bool) -> None:
    from moretta.secure_aggregation.identity import fingerprint, public_line

    marks = {"fingerprint": fingerprint(key), **more}
    lines = [public_line(key), *(f"{name}: {text}" for name, text in marks.items())]
    say({"key": lines[0], **marks}, as_json, lambda: print(*lines, sep="\n"))
