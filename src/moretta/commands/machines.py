"""The commands for many machines: runs over them, long-lived identities, startup kits."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from moretta.commands.terminal import (
    Overrides,
    RunPath,
    interruptible,
    needs,
    needs_torch,
    print_result,
    say,
    screen,
    tell,
    wants_json,
)
from moretta.commands.train import Port, Watch, page_of
from moretta.errors import ParameterError
from moretta.report.terminal import one_line

KitPath = Annotated[Path, typer.Argument(metavar="KIT", help="A startup kit: a folder with startup/ and local/.")]
Fingerprint = Annotated[
    str | None,
    typer.Option("--fingerprint", metavar="DIGITS", help="The fingerprint that the other side read out."),
]
SiloPath = Annotated[Path, typer.Option("--silo", metavar="silo.toml", help="The site's own settings.")]


@contextmanager
def needs_flare(extra: str = "flare") -> Iterator[None]:
    """Name the missing extra if FLARE, or a package that comes with it, cannot be imported."""
    with needs_torch(), needs(extra, "nvflare"):
        yield


def serve(
    run: RunPath,
    out: Annotated[Path | None, typer.Option(help="The run folder; runs/NAME by default.")] = None,
    kits: Annotated[
        Path | None, typer.Option(help="The folder of startup kits, made if missing; OUT-kits by default.")
    ] = None,
    host: Annotated[str, typer.Option(help="The name or address by which sites reach this machine.")] = "localhost",
    port: Annotated[int, typer.Option(help="The port that sites connect to.", min=1, max=65535)] = 8002,
    wait: Annotated[float, typer.Option(help="Seconds to wait for sites to connect.", min=0)] = 600.0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the folder's last checkpoint.")] = False,
    watch: Watch = False,
    watch_port: Port = None,
    overrides: Overrides = [],  # noqa: B006  # typer reads the default, nothing writes to it
) -> None:
    """Serve a run to sites on other machines, and write a run folder."""
    from moretta.config import run_files

    run_file = run_files.load(run, overrides)
    folder = out or run_file.folder
    with needs_flare():
        from moretta.deployment import serve as serving
        from moretta.engines.run_folder import read_json
        from moretta.run.progress import round_line

        places = serving.Places(folder, kits or folder.with_name(f"{folder.name}-kits"))

        with (
            interruptible(f"interrupted; --resume continues {folder} from its last checkpoint"),
            page_of(folder, watch, watch_port) as note,
        ):

            def report(sentence: str) -> None:
                tell(sentence)
                note(sentence)

            def progress(number: int, rounds: int, line: Mapping[str, Any]) -> None:
                tell(round_line(number, rounds, line))
                note("")  # clears the note of what the run waited for

            serving.serve(run_file, places, host, port, wait, report, progress, resume=resume)
        result = read_json(folder / "result.json")
        for sentence in result["warnings"]:  # otherwise only the log of the server's job has them
            tell(f"warning: {sentence}")
        print_result([folder], {}, result)


def join(
    kit: KitPath,
    silo: SiloPath,
    edge: Annotated[
        bool, typer.Option("--edge", help="Take part in baffle with ONNX Runtime and without PyTorch.")
    ] = False,
    memory_limit_mib: Annotated[
        float | None, typer.Option("--memory-limit-mib", help="The most memory that training may take, in MiB.", min=1)
    ] = None,
    request: Annotated[
        bool, typer.Option("--request", help="Make this site's key in a new folder KIT, and a request to sign it.")
    ] = False,
    reply: Annotated[
        Path | None,
        typer.Option("--reply", metavar="FILE", help="Complete KIT with the server's reply."),
    ] = None,
    fingerprint: Fingerprint = None,
    once: Annotated[
        bool, typer.Option("--once", help="End after one run of the server, without waiting for the next.")
    ] = False,
) -> None:
    """Take part in a server's runs as one site until ctrl-c. --request and --reply first certify the site's key."""
    if request or reply is not None:
        if request and reply is not None:
            raise ParameterError("--request and --reply exclude each other; add --reply once the server has answered")
        return _ask_for_certificate(kit, silo) if reply is None else _complete(kit, silo, reply, fingerprint)
    with needs_flare("edge-flare" if edge else "flare"):
        from moretta.deployment.join import join as take_part

        with interruptible("interrupted; the same command continues this run, or joins the next one"):
            done = take_part(kit, silo, tell, edge=edge, memory_limit_mib=memory_limit_mib, once=once)
    say(done.as_json(), lambda: print(done.sentence()))


def _ask_for_certificate(kit: Path, silo: Path) -> None:
    from moretta.config import silo_file
    from moretta.deployment import certificate_requests

    made, path = certificate_requests.request(kit, silo_file.load(silo), datetime.now(UTC))
    result = {"request": str(path), "name": made.name, "fingerprint": made.fingerprint}
    lines = [
        f"request: {path}   (send it to the server's operator; the key beside it stays here)",
        f"fingerprint: {made.fingerprint}   (read it out to the operator by telephone, or another second way)",
        f"then: moretta join {kit} --silo {silo} --reply {made.name}.reply",
    ]
    say(result, lambda: print(*lines, sep="\n"))


def _complete(kit: Path, silo: Path, reply: Path, fingerprint: str | None) -> None:
    from moretta.config import silo_file

    with needs_flare():
        from moretta.deployment import certificate_requests
        from moretta.secure_aggregation.identity import fingerprint as of_key

        server_key = certificate_requests.complete(
            kit, silo_file.load(silo), reply, lambda key: compared("the server's key", of_key(key), fingerprint)
        )
    result = {"kit": str(kit), "server-key": server_key}
    say(result, lambda: print(f"{kit} is complete, of the server {server_key}   (moretta join {kit} --silo {silo})"))


def compared(owner: str, own: str, read_out: str | None) -> bool:
    """Return whether a fingerprint is the one that the other side read out, by option or answer in a terminal."""
    from moretta.deployment.certificate_requests import same_fingerprint

    if read_out is not None:
        return same_fingerprint(read_out, own)
    if not (sys.stdin.isatty() and screen.is_terminal):
        raise ParameterError(
            f"the fingerprint of {owner} has not been compared; set --fingerprint to the one that was read out"
        )
    return typer.confirm(f"The fingerprint of {owner} is\n    {own}\nDid the other side read out the same?", err=True)


def job(
    run: RunPath,
    out: Annotated[Path, typer.Option(help="The job folder.")],
    server_key: Annotated[
        Path,
        typer.Option("--server-key", metavar="KEY", help="The server's private key, a file or folder, to sign by."),
    ],
    overrides: Overrides = [],  # noqa: B006  # typer reads the default, nothing writes to it
) -> None:
    """Write a job folder for sites that already run FLARE."""
    from moretta.config import run_files

    run_file = run_files.load(run, overrides)
    with needs_flare():
        from moretta.deployment import job as jobs
        from moretta.secure_aggregation.identity import Identity

        jobs.check_replaced(out)
        jobs.write_job(run_file, out, Identity.load(server_key))
    say({"job": str(out)}, lambda: print(f"{out}   (nvflare job submit -j {out})"))


def accept(
    silo: SiloPath,
    yes: Annotated[bool, typer.Option("--yes", help="Accept the settings shown without asking.")] = False,
) -> None:
    """Show how a waiting run differs from the settings that a site agreed to, and accept it."""
    from moretta.config import silo_file
    from moretta.deployment.agreed_settings import SiteAgreement, differences

    agreement = SiteAgreement(silo_file.load(silo).out)
    agreed, waiting = agreement.agreed(), agreement.waiting()
    closed = [entry.closed for entry in agreed if entry.closed]
    changes = (
        list(differences(agreed[-1].settings, waiting.settings)) if agreed and waiting and waiting.settings else []
    )
    lines = [f"closed since {moment}, as this site's rows did not fit" for moment in closed] + changes
    if waiting is not None and not waiting.settings:
        lines.append(f"refused by this site's silo.toml, which accepting does not change: {waiting.sentence}")
    if closed and changes:
        lines.append("closed settings stay closed while others wait; run moretta accept again to open them")
    for line in lines or ["nothing waits"]:
        if not wants_json():
            tell(line)
    if (closed or changes) and not yes:
        if not (sys.stdin.isatty() and screen.is_terminal):
            raise ParameterError("nobody has accepted the settings above; run this in a terminal, or add --yes")
        yes = typer.confirm("Accept it?", err=True)
    if yes:
        agreement.accept(waiting)
    result = {"waiting": lines, "accepted": yes and bool(closed or changes), "agreed": len(agreement.agreed())}
    say(result, lambda: print(f"this site has agreed to {result['agreed']} sets of settings"))


def doctor(
    kit: Annotated[Path | None, typer.Option(help="The startup kit of a site or of the server.")] = None,
    silo: Annotated[Path | None, typer.Option("--silo", metavar="silo.toml", help="At a site: its settings.")] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN.toml", help="The server's run file; at a site, to check its rows.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="At the server: the port that sites connect to.", min=1, max=65535)
    ] = None,
) -> None:
    """Check whether this machine could take part: versions, certificates, clock, reachability, data, model, memory."""
    from moretta.deployment.doctor import examine

    findings = examine(kit=kit, silo=silo, run=run, port=port)  # a missing package is one of them
    result = {"findings": list(map(asdict, findings)), "passes": all(finding.passes for finding in findings)}
    say(result, lambda: print(*(one_line(finding.line()) for finding in findings), sep="\n"))
    if not result["passes"]:
        raise typer.Exit(1)


keys = typer.Typer(no_args_is_help=True, help="Make and show long-lived identities; both commands take --json.")


@keys.command("new")
def new_key(
    out: Annotated[Path, typer.Option(help="A new folder for identity.key, which is private, and identity.pub.")],
) -> None:
    """Make an identity: a private key that stays at this silo, and a public key for the roster."""
    from moretta.secure_aggregation.identity import Identity

    identity = Identity.fresh()
    identity.save(out, alone=True)
    _print_key(identity.public_key, {"out": str(out)})


@keys.command("show")
def show_key(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder of an identity, or one of its two files.")],
) -> None:
    """Show an identity's public key, as a line for the roster, and its fingerprint."""
    from moretta.secure_aggregation.identity import read_public_key

    _print_key(read_public_key(path), {})


def _print_key(key: bytes, more: Mapping[str, str]) -> None:
    from moretta.secure_aggregation.identity import fingerprint, public_line

    marks = {"fingerprint": fingerprint(key), **more}
    lines = [public_line(key), *(f"{name}: {text}" for name, text in marks.items())]
    say({"key": lines[0], **marks}, lambda: print(*lines, sep="\n"))


kit = typer.Typer(no_args_is_help=True, help="Make and patch startup kits of NVIDIA FLARE; every command takes --json.")

KitsPath = Annotated[Path, typer.Argument(metavar="KITS", help="The folder of kits, for serve --kits.")]


@kit.command("patch")
def patch(
    kit: KitPath,
    silo: Annotated[Path | None, typer.Option("--silo", metavar="silo.toml", help="At a site: its settings.")] = None,
    server_key: Annotated[
        list[str],
        typer.Option(
            "--server-key",
            metavar="KEY",
            help="At a site: the server's public key, a line or file (two while it changes); at the server: its own.",
        ),
    ] = [],  # noqa: B006  # typer reads the default, nothing writes to it
) -> None:
    """Patch a FLARE startup kit to run Moretta's jobs: allow-list, launcher, communication, the server's key."""
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
    """Make a server's kit, and an authority that certifies the keys that sites make themselves."""
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
    request: Annotated[Path, typer.Argument(metavar="REQUEST", help="The request file that the site sent.")],
    kits: Annotated[Path, typer.Option("--kits", help="The folder that moretta kit new made.")],
    fingerprint: Fingerprint = None,
    renew: Annotated[bool, typer.Option("--renew", help="Certify a new key of a site that has a certificate.")] = False,
) -> None:
    """Certify a site's own key, once you have compared its fingerprint with the one that the site read out."""
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
