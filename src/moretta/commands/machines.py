"""What a shell user calls for many machines; `moretta.commands.main` adds these to its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from moretta.commands.terminal import (
    AsJson,
    Overrides,
    RunPath,
    interruptible,
    needs_torch,
    print_result,
    say,
    tell,
)
from moretta.commands.watch import Port, Watch, page_of
from moretta.errors import MissingExtra

kit = typer.Typer(no_args_is_help=True, help="Startup kits of NVIDIA FLARE; every command takes --json.")

KitPath = Annotated[Path, typer.Argument(metavar="KIT", help="A startup kit: a folder with startup/ and local/.")]
SiloPath = Annotated[Path, typer.Option("--silo", metavar="silo.toml", help="What the site says of itself.")]


@contextmanager
def _needs_flare() -> Iterator[None]:
    """Say which extra is missing where FLARE cannot be imported."""
    with needs_torch():
        try:
            yield
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "nvflare":
                raise
            raise MissingExtra("this command needs nvflare; install it by: pip install 'moretta[flare]'") from None


def serve(
    run: RunPath,
    out: Annotated[Path | None, typer.Option(help="The run folder; runs/NAME by default.")] = None,
    kits: Annotated[
        Path | None, typer.Option(help="Where startup kits are made or found; OUT-kits by default.")
    ] = None,
    host: Annotated[str, typer.Option(help="The name or address by which sites reach this machine.")] = "localhost",
    port: Annotated[int, typer.Option(help="The port that sites connect to.", min=1, max=65535)] = 8002,
    wait: Annotated[float, typer.Option(help="Seconds that sites may take to connect.", min=0)] = 600.0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's last checkpoint.")] = False,
    watch: Watch = False,
    watch_port: Port = None,
    overrides: Overrides = [],  # noqa: B006  # typer reads the default, nothing writes to it
    as_json: AsJson = False,
) -> None:
    """Play a run with sites on machines of their own, and leave a run folder."""
    from moretta.config import run_files

    run_file = run_files.load(run, overrides)
    folder = out or run_file.folder
    with _needs_flare():
        from moretta.deployment import serve as serving
        from moretta.engines.run_folder import read_json
        from moretta.run.progress import round_line

        places = serving.Places(folder, kits or folder.with_name(f"{folder.name}-kits"))

        with (
            interruptible(f"interrupted; {folder} goes on from its last checkpoint by --resume"),
            page_of(folder, watch, watch_port) as note,
        ):

            def told(sentence: str) -> None:
                tell(sentence)
                note(sentence)

            def progress(number: int, rounds: int, line: Mapping[str, Any]) -> None:
                tell(round_line(number, rounds, line))
                note("")  # whatever the run waited for

            serving.serve(run_file, places, host, port, wait, told, progress, resume=resume)
        print_result([folder], {}, as_json, read_json(folder / "result.json"))


def join(
    kit: KitPath,
    silo: SiloPath,
    edge: Annotated[
        bool, typer.Option("--edge", help="Take part in baffle by a process with ONNX Runtime and without PyTorch.")
    ] = False,
    memory_limit_mib: Annotated[
        float | None, typer.Option("--memory-limit-mib", help="The most memory of that process.", min=1)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Take part in runs as one site, until the server ends them."""
    with _needs_flare():
        from moretta.deployment.join import join as take_part

        with interruptible("interrupted; joining again takes part in the next run"):
            out = take_part(kit, silo, tell, edge=edge, memory_limit_mib=memory_limit_mib)
    say({"out": str(out)}, as_json, lambda: print(f"ended; what is this site's is in {out}"))


def job(
    run: RunPath,
    out: Annotated[Path, typer.Option(help="The job folder.")],
    overrides: Overrides = [],  # noqa: B006  # typer reads the default, nothing writes to it
    as_json: AsJson = False,
) -> None:
    """Write a job folder for sites that already run FLARE."""
    from moretta.config import run_files

    run_file = run_files.load(run, overrides)
    with _needs_flare():
        from moretta.deployment.job import write_job

        write_job(run_file, out)
    say({"job": str(out)}, as_json, lambda: print(f"{out}   (nvflare job submit -j {out})"))


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
    as_json: AsJson = False,
) -> None:
    """Let a FLARE startup kit run Moretta's jobs: allow-list, launcher, communication settings, the server's key."""
    with _needs_flare():
        from moretta.deployment import patching

        changes = patching.patch(kit, silo, server_key)
    say({"kit": str(kit), "changes": changes}, as_json, lambda: print(*(changes or ["nothing to do"]), sep="\n"))


def doctor(
    kit: Annotated[Path | None, typer.Option(help="The startup kit, of a site or of the server.")] = None,
    silo: Annotated[Path | None, typer.Option("--silo", metavar="silo.toml", help="Of a site: its silo.toml.")] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN.toml", help="The run file: of the server, or for a site's rows to fit.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Of the server: the port that sites connect to.", min=1, max=65535)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look whether this machine could take part: versions, certificates, clock, reachability, data, model, memory."""
    from moretta.deployment.doctor import examine

    findings = examine(kit=kit, silo=silo, run=run, port=port)  # what is not installed is one of them
    told = {"findings": [finding.told() for finding in findings], "passes": all(one.passes for one in findings)}
    say(told, as_json, lambda: print(*(finding.line() for finding in findings), sep="\n"))
    if not told["passes"]:
        raise typer.Exit(1)
