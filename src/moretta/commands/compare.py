"""`moretta compare` and `reproduce`: runs side by side, trained first if a run file is given; papers' experiments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moretta.commands.terminal import AllowCode, Overrides, allows_code, needs_torch, read, say, show, tell
from moretta.commands.train import audit_bar, bar_of, train_with_bar
from moretta.errors import ParameterError

if TYPE_CHECKING:
    from moretta.run.comparison import Cell


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR... | RUN.toml", help="Run folders, or one run file.")],
    protocols: Annotated[
        str | None, typer.Option(help="With a run file: the protocols to run, for example fedsgd,pbpfl.")
    ] = None,
    variant: Annotated[
        list[str],
        typer.Option(
            metavar='"PROTOCOL KEY=VALUE ..."',
            help='With a run file: a protocol with its own settings, such as "pbpfl partitions=all", or settings of '
            'any section, such as "data.batch-size=8 protocol.learning-rate=0.1". May repeat.',
        ),
    ] = [],  # noqa: B006  # typer reads the default, nothing writes to it
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER | LIST",
            help="With a run file: how many seeds to train each from, counted on from the run file's; or their list.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="With a run file: keep finished runs, and continue the others."),
    ] = False,
    audits: Annotated[
        bool, typer.Option("--audit", help="Also audit each run, and compare what each role could learn.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="The folder for runs and report.html; runs/NAME by default.")] = None,
    allow_code: AllowCode = False,
    overrides: Overrides = [],  # noqa: B006  # typer reads the default, nothing writes to it
) -> None:
    """Compare run folders, or train a run file with several protocols and compare those runs.

    --variant or --seeds without --audit makes a sweep: validation rows (data.validation-fraction) choose one variant,
    and the result has test scores of that variant alone.
    """
    run_path = runs[0] if len(runs) == 1 and runs[0].suffix == ".toml" else None
    if run_path is None and (protocols or variant or overrides or seeds or resume):
        raise ParameterError(
            "--protocols, --variant, --seeds, --resume and --set need one run file, got folders; remove them"
        )
    with needs_torch():
        from moretta.config import run_files
        from moretta.run import comparison

        if run_path is not None and not protocols and not variant and not seeds:
            raise ParameterError("--protocols is missing; a run file needs it, for example --protocols fedsgd,pbpfl")
        if seeds and audits:
            raise ParameterError("--audit needs one seed; remove --seeds, or audit a run by moretta audit")
        run_file = None if run_path is None else run_files.load(run_path, overrides)
        folders, home = runs, out or (run_file.folder if run_file is not None else None)
        if home is not None:
            comparison.refuse_a_run(home)
        if run_file is not None and run_path is not None and home is not None:
            named = [name.strip() for name in protocols.split(",")] if protocols else []
            if not named and not variant:
                named = [run_file.protocol.name]
            chosen = comparison.seeds_of(seeds, run_file.run.seed) if seeds else None
            variants = comparison.variants(run_path, overrides, named, variant)
            sweeps = not audits and bool(variant or seeds)
            if sweeps:
                comparison.check_validated(variants)
            runs_of = {
                name: comparison.recording(settings) if audits else settings for name, settings in variants.items()
            }
            cells = comparison.cells(runs_of, chosen, home)
            _train_each(cells, resume)
            if sweeps:
                return _print_sweep(cells, home)
            folders = [cell.folder for cell in cells]
        if audits:
            _audit_each(folders, run_path is not None, allow_code)
        differences, page = _write_page(folders, home)
    _print_comparison(folders, differences, page, audits)


def _train_each(cells: Sequence[Cell], resume: bool) -> None:
    """Train the runs that have not ended, after a rehearsal of all of them."""
    from moretta.engines.files import check_unused
    from moretta.run import comparison

    left = [cell for cell in cells if not (resume and cell.has_ended)]
    begun = {cell.folder for cell in left if resume and cell.has_begun}
    for folder in (cell.folder for cell in left if cell.folder not in begun):
        check_unused(folder, "; name another folder by --out")
    comparison.rehearse(cells if left else ())  # finished runs too, because all are judged on the same rows
    for number, cell in enumerate(cells, start=1):
        of = f"run {number} of {len(cells)}: {cell.name}, seed {cell.seed}"
        if cell not in left:
            tell(f"{of}, has ended before")
            continue
        if len(cells) > 1:
            tell(of)
        train_with_bar(cell.run_file, cell.folder, cell.folder in begun, opening=number == 1)


def _print_sweep(cells: Sequence[Cell], home: Path) -> None:
    """Write the page of the run that validation rows choose, and print the result of the sweep."""
    from rich.text import Text

    from moretta.report.folder import read_run
    from moretta.report.page import write_report
    from moretta.report.sweep import Sweep
    from moretta.report.table import OverSeeds, spread

    names, seeds = dict.fromkeys(cell.name for cell in cells), tuple(dict.fromkeys(cell.seed for cell in cells))
    of = {name: tuple(read_run(cell.folder) for cell in cells if cell.name == name) for name in names}
    sweep = Sweep({name: OverSeeds(name, seeds, records) for name, records in of.items()})
    among = None if len(names) == 1 else sweep  # nothing is chosen from one run
    chosen = sweep.runs[cells[0].name if among is None else sweep.chosen]
    several = [chosen] if len(seeds) > 1 else []
    page = write_report([chosen.records[0].folder], home / "report.html", spreads=several, sweep=among)
    result = {
        "seeds": seeds,
        "runs": [{"name": cell.name, "seed": cell.seed, "folder": str(cell.folder)} for cell in cells],
        **({"spread": {name: run.as_json() for name, run in sweep.runs.items()}} if among is None else sweep.as_json()),
        "report": str(page),
    }

    def plainly() -> None:
        if among is not None:
            table = among.table().rich()
            for column in table.columns[1:]:
                column.no_wrap = True
            show(table, *map(Text, among.sentences()))
        show(spread([chosen]).rich())
        print(f"mean ± standard deviation over runs from seeds {', '.join(map(str, seeds))}")
        print(f"report: {page}")

    say(result, plainly)


def _audit_each(folders: Sequence[Path], trained_here: bool, allow_code: bool) -> None:
    """Audit each run folder, after all of them are checked. trained_here: by a run file that the user gave."""
    from moretta.run import auditing

    allowed = {folder: trained_here or allows_code(folder, allow_code, data=True) for folder in folders}
    for folder in folders:
        auditing.check_folder(folder, allowed[folder])
    for folder in folders:
        with audit_bar(folder) as progress:
            auditing.audit_folder(folder, progress=progress, allow_code=allowed[folder])


def _write_page(folders: Sequence[Path], home: Path | None) -> tuple[dict[str, float], Path | None]:
    """Return the differences of final weights, and the path of the written page; None without a home."""
    from moretta.run import comparison

    differences = comparison.weight_differences(folders)
    if home is None:
        return differences, None
    from moretta.report.page import write_report

    return differences, write_report(folders, home / "report.html", differences)


def _print_comparison(
    folders: Sequence[Path], differences: Mapping[str, float], page: Path | None, audits: bool
) -> None:
    from moretta.engines.run_folder import as_json
    from moretta.protocols.registry import REFERENCE
    from moretta.report import table
    from moretta.report.audit import leaks_table, side_by_side
    from moretta.report.folder import read_run

    runs = [read(folder, "result.json") for folder in folders]
    result: dict[str, Any] = {
        "runs": runs,
        f"weight_difference_from_{REFERENCE}": as_json(differences),
        "report": None if page is None else str(page),
    }
    records = [read_run(folder) for folder in folders]
    if audits:
        result["runs"] = [
            run | {"audit": read(folder, "audit.json")} for run, folder in zip(runs, folders, strict=True)
        ]
        result["leaks"] = side_by_side(records)

    def plainly() -> None:
        show(table.comparison(records, differences).rich())
        if unlike := table.unlike_rows(records):
            print(unlike)
        if any(record.audit is not None for record in records):
            show(leaks_table(records))
        if page is not None:
            print(f"report: {page}")

    say(result, plainly)


def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The experiment; omit it to list all.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run the short form, minutes on two cores.")] = False,
    data: Annotated[Path | None, typer.Option(help="The folder of data sets.", envvar="MORETTA_DATA")] = None,
    out: Annotated[Path, typer.Option(help="The folder for results; a later call continues there.")] = Path(
        "runs/reproduce"
    ),
    epochs: Annotated[int | None, typer.Option(help="Train this many epochs instead.")] = None,
    only: Annotated[
        list[str], typer.Option(metavar="NAME", help="Train only cells whose row or column has this name. May repeat.")
    ] = [],  # noqa: B006  # typer reads the default, nothing writes to it
    experiments: Annotated[Path, typer.Option(help="The folder of experiments.")] = Path("experiments"),
    overrides: Overrides = [],  # noqa: B006  # typer reads the default, nothing writes to it
) -> None:
    """Run a paper's experiment, and show its figures beside the paper's."""
    from moretta.data.references import OWN_CODE, resolve

    if not (experiments / "reproduction.py").is_file():
        raise ParameterError(
            f"{experiments} holds no experiments, and pip does not install them; run this in a checkout of Moretta's "
            "repository, or name its folder by --experiments"
        )
    with needs_torch():
        choose = resolve("reproduction:choose", experiments, OWN_CODE)
        if name is None:
            listing, lines = (resolve(source, experiments, OWN_CODE) for source in ("play:listing", "play:lines"))
            entries = listing(experiments)
            say({"experiments": entries}, lambda: print(*lines(entries), sep="\n"))
            return
        chosen = choose(name, experiments, data, quick, epochs, overrides, only)
        interrupted = "interrupted; the same command continues with the remaining cells"
        with bar_of(name, interrupted, remaining=True) as watch:
            results = chosen.run(out, tell, watch)
    say(
        results,
        lambda: _print_reproduction(results, chosen.path(out), resolve("reproduction:table", experiments, OWN_CODE)),
    )


def _print_reproduction(results: Mapping[str, Any], kept: Path, table: Callable[..., Any]) -> None:
    show(table(results))
    print("why they differ:")
    for note in results["why_they_differ"]:
        print(f"  - {note}")
    print(f"results: {kept}")
