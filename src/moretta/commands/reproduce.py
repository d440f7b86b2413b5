"""`moretta reproduce`: the papers' experiments, which stand beside the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moretta.commands.terminal import AsJson, Overrides, needs_torch, say, screen, show
from moretta.errors import ParameterError, RunFailed


def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="An experiment; left out, they are listed.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The quick form, minutes on two cores.")] = False,
    data: Annotated[Path | None, typer.Option(help="The folder of data sets.", envvar="MORETTA_DATA")] = None,
    out: Annotated[Path, typer.Option(help="Where results are kept, and gone on from.")] = Path("runs/reproduce"),
    epochs: Annotated[int | None, typer.Option(help="Train so long instead.")] = None,
    only: Annotated[
        list[str], typer.Option(metavar="LEVEL", help="Train only cells of this level; may be repeated.")
    ] = [],  # noqa: B006  # typer reads the default, nothing writes to it
    experiments: Annotated[Path, typer.Option(help="The folder of experiments.")] = Path("experiments"),
    overrides: Overrides = [],  # noqa: B006  # typer reads the default, nothing writes to it
    as_json: AsJson = False,
) -> None:
    """Run an experiment of the papers, and show our figures beside theirs."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from moretta.data.references import OWN_CODE, resolve

    if not (experiments / "reproduction.py").is_file():
        raise ParameterError(
            f"{experiments} holds no experiments, which are in Moretta's repository and not in what pip installs; run "
            "this in a checkout, or name its folder by --experiments"
        )
    with needs_torch():
        listing, choose = (resolve(f"reproduction:{what}", experiments, OWN_CODE) for what in ("listing", "choose"))
        if name is None:
            found = listing(experiments)
            say({"experiments": found}, as_json, lambda: _print_experiments(found))
            return
        chosen = choose(name, experiments, data, quick, epochs, overrides, only)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=screen, transient=True) as bar:
            task = bar.add_task(name, total=None)

            def watch(cell: str, number: int, rounds: int) -> None:
                bar.update(task, description=cell, completed=number, total=rounds)

            def tell(line: str) -> None:
                bar.console.print(line, soft_wrap=True)

            try:
                results = chosen.run(out, tell, watch)
            except KeyboardInterrupt:
                raise RunFailed("interrupted; the same command goes on with the cells that are left") from None
    say(
        results,
        as_json,
        lambda: _print_reproduction(results, chosen.path(out), resolve("reproduction:table", experiments, OWN_CODE)),
    )


def _print_experiments(found: Sequence[Mapping[str, Any]]) -> None:
    width = max(len(one["name"]) for one in found)
    for one in found:
        print(f"{one['name']:{width}}  {one['title']} ({one['paper']})")
    print("moretta reproduce NAME --data DIR runs one, with --quick in minutes")


def _print_reproduction(results: Mapping[str, Any], kept: Path, table: Callable[..., Any]) -> None:
    show(table(results))
    print("why they differ:")
    for note in results["why_they_differ"]:
        print(f"  - {note}")
    print(f"results: {kept}")
