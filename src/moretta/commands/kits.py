"""`moretta keys` and `kit`: long-lived identities; startup kits, and an authority that certifies sites' own keys."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from moretta.commands.machines import Fingerprint, KitPath, compared, needs_flare
from moretta.commands.terminal import say

keys = typer.Typer(no_args_is_help=True, help="Make and show long-lived identities; both commands take --json.")


@keys.command("new")
def new_key(
    out: Annotated[Path, typer.Option(help="A new folder for identity.key, which stays there, and identity.pub.")],
) -> None:
    """Make an identity: its private key for this silo alone, its public key for everybody's roster."""
    from moretta.secure_aggregation.identity import Identity

    identity = Identity.fresh()
    identity.save(out, alone=True)
    _say_key(identity.public_key, {"out": str(out)})


@keys.command("show")
def show_key(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder of an identity, or one of its two files.")],
) -> None:
    """Show the public key of an identity as a roster has it, and its fingerprint."""
    from moretta.secure_aggregation.identity import read_public_key

    _say_key(read_public_key(path), {})


def _say_key(key: bytes, more: Mapping[str, str]) -> None:
    from moretta.secure_aggregation.identity import fingerprint, public_line

    marks = {"fingerprint": fingerprint(key), **more}
    lines = [public_line(key), *(f"{name}: {text}" for name, text in marks.items())]
    say({"key": lines[0], **marks}, lambda: print(*lines, sep="\n"))


kit = typer.Typer(no_args_is_help=True, help="Startup kits of NVIDIA FLARE; every command takes --json.")

KitsPath = Annotated[Path, typer.Argument(metavar="KITS", help="The folder of kits, which serve takes by --kits.")]


@kit.command("patch")
def patch(
    kit: KitPath,
    silo: Annotated[Path | None, typer.Option("--silo", metavar="silo.toml", help="Of a site: its silo.toml.")] = None,
    server_key: Annotated[
        list[str],
        typer.Option(
            "--server-key",
            metavar="KEY",
            help="Of a site: the server's public line or file, or two while it changes; of the server: its own key.",
        ),
    ] = [],  # noqa: B006  # typer reads the default, nothing writes to it
) -> None:
    """Let a FLARE startup kit run Moretta's jobs: allow-list, launcher, communication settings, the server's key."""
    with needs_flare():
        from moretta.deployment import provisioning

        changes = provisioning.patch(kit, silo, server_key)
    say({"kit": str(kit), "changes": changes}, lambda: print(*(changes or ["nothing to do"]), sep="\n"))


@kit.command("new")
def new(
    kits: KitsPath,
    host: Annotated[str, typer.Option(help="The name or address by which sites reach the server.")],
    port: Annotated[int, typer.Option(help="The port that sites connect to.", min=1, max=65535)] = 8002,
) -> None:
    """Make a server's kit, and an authority that signs the requests of sites, who make their own keys."""
    with needs_flare():
        from moretta.deployment.provisioning import provision_authority
        from moretta.secure_aggregation.identity import fingerprint, read_public_key

        provision_authority(kits, host, port)
        server_key = fingerprint(read_public_key(kits))
    lines = [
        f"{kits} has the server's kit and the authority   (at each site: moretta join KIT --silo silo.toml --request)",
        f"server's key: {server_key}   (read it out to each site by telephone, or another second way)",
    ]
    say({"kits": str(kits), "server-key": server_key}, lambda: print(*lines, sep="\n"))


@kit.command("sign")
def sign(
    request: Annotated[Path, typer.Argument(metavar="REQUEST", help="What the site has sent.")],
    kits: Annotated[Path, typer.Option("--kits", help="The folder that moretta kit new has made.")],
    fingerprint: Fingerprint = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="Let a site that has a certificate have another, for another key.")
    ] = False,
) -> None:
    """Certify a site's own key, once its fingerprint was compared with what the site has read out."""
    with needs_flare():
        from moretta.deployment import certificate_requests

        signed, reply = certificate_requests.sign(
            request,
            kits,
            lambda pending: compared(f"the request of {pending.name}", pending.fingerprint, fingerprint),
            datetime.now(UTC),
            renew=renew,
        )
    result = {"name": signed.name, "fingerprint": signed.fingerprint, "reply": str(reply)}
    say(result, lambda: print(f"reply: {reply}   (send it to {signed.name}; nothing in it is secret)"))
