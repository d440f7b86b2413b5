"""What a shell user calls.

Every command takes ``--json``: one object on stdout, progress on stderr. Exit codes: 0 done, 1 failed, 2 bad usage or
input; a failure is one sentence on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from moretta.commands import machines as commands
from moretta.commands.terminal import (
    AllowCode,
    AsJson,
    Overrides,
    RunPath,
    allows_code,
    needs_torch,
    print_result,
    say,
    screen,
)
from moretta.config import run_files
from moretta.data.references import resolve
from moretta.errors import MorettaError, ParameterError, RunFailed
from moretta.protocols.pbpfl.params import PBPFL

if TYPE_CHECKING:
    from moretta.audit.auditor import Audit
    from moretta.run.federation import Result

HELP = """Train one PyTorch model across organisations, where nobody says more than the protocol needs.

Exit codes: 0 done, 1 failed, 2 bad usage or input.
"""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=HELP)
keys = typer.Typer(no_args_is_help=True, help="Make and show long-lived identities; both commands take --json.")
app.add_typer(keys, name="keys")


def main() -> None:
    """Run a command; turn what goes wrong into one sentence and an exit code."""
    try:
        app()
    except ParameterError as error:
        _fail(error, 2)
    except MorettaError as error:
        _fail(error, 1)
    except OSError as error:  # of a path that was given, or of the disk
        given = isinstance(error, FileNotFoundError | FileExistsError | NotADirectoryError | IsADirectoryError)
        where = "" if error.filename is None else f"{error.filename}: "
        _fail(f"{where}{error.strerror or error}", 2 if given or isinstance(error, PermissionError) else 1)


def _fail(error: object, code: int) -> None:
    screen.print(f"moretta: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        from moretta import __version__

        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def train(
    run: RunPath,
    out: Annotated[Path | None, typer.Option(help="The run folder; runs/NAME by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's last checkpoint.")] = False,
    overrides: Overrides = [],  # noqa: B006  # typer reads the default, nothing writes to it
    as_json: AsJson = False,
) -> None:
    """Train the model of a run file and leave a run folder."""
    run_file = run_files.load(run, overrides)
    folder = out or run_file.folder
    with needs_torch():
        result = _train(run_file, folder, resume)
    print_result([folder], {}, as_json, dict(result.record))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR... | RUN.toml", help="Run folders, or one run file.")],
    protocols: Annotated[
        str | None, typer.Option(help="With a run file: the protocols to run, for example fedsgd,pbpfl.")
    ] = None,
    variant: Annotated[
        list[str],
        typer.Option(
            metavar='"PROTOCOL KEY=VALUE ..."',
            help='A protocol with settings of its own, for example "pbpfl partitions=all". May repeat.',
        ),
    ] = [],  # noqa: B006  # typer reads the default, nothing writes to it
    audits: Annotated[
        bool, typer.Option("--audit", help="Also audit each run, and compare what each role could learn.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Where the runs and report.html go; runs/NAME by default.")] = None,
    allow_code: AllowCode = False,
    overrides: Overrides = [],  # noqa: B006  # typer reads the default, nothing writes to it
    as_json: AsJson = False,
) -> None:
    """Compare run folders, or run one run file by several protocols from the same seed and compare those."""
    with needs_torch():
        from moretta.run import comparison

        folders, home = runs, out
        if len(runs) == 1 and runs[0].suffix == ".toml":
            if not protocols and not variant:
                raise ParameterError("comparing by a run file needs --protocols, for example --protocols fedsgd,pbpfl")
            run_file = run_files.load(runs[0], overrides)
            home = out or run_file.folder
            named = [name.strip() for name in protocols.split(",")] if protocols else []
            if audits:
                run_file = comparison.recording(run_file)
            variants = comparison.variants(run_file, named, variant)
            folders = [home / name for name in variants]
            comparison.refuse_existing(folders)
            comparison.rehearse(list(variants.values()))
            for changed, folder in zip(variants.values(), folders, strict=True):
                _train(changed, folder, resume=False)
        elif protocols or variant or overrides:
            raise ParameterError("--protocols, --variant and --set go with one run file, not with run folders")
        if audits:
            from moretta.run import auditing

            own = folders is not runs  # just trained, by a run file that was given
            allowed = {folder: own or allows_code(folder, allow_code, data=True) for folder in folders}
            for folder in folders:
                auditing.check_folder(folder, allowed[folder])  # all of them, before the first is attacked
            for folder in folders:
                _audit(folder, allow_code=allowed[folder])
        page = None if home is None else home / "report.html"
        differences = comparison.weight_differences(folders)
        written = None
        if page is not None:
            from moretta.report.page import write_report

            written = write_report(folders, page, differences)
    _print_comparison(folders, differences, as_json, written, audits)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders.")],
    out: Annotated[Path | None, typer.Option(help="The page; DIR/report.html by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page about runs."""
    with needs_torch():
        from moretta.report.page import write_report
        from moretta.run import comparison

        page = write_report(folders, out or folders[0] / "report.html", comparison.weight_differences(folders))
    say({"report": str(page)}, as_json, lambda: print(page))


@app.command()
def audit(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A finished run with recorded views.")],
    thorough: Annotated[bool, typer.Option("--thorough", help="Also slow attacks; up to an hour.")] = False,
    background: Annotated[
        Path | None, typer.Option(help="Rows that attackers may have: .npz with x and y; else half of the test rows.")
    ] = None,
    fail_above: Annotated[
        list[str], typer.Option("--fail-above", metavar="NAME=SCORE", help="Exit 1 where an attack scores more.")
    ] = [],  # noqa: B006  # typer reads the default, nothing writes to it
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Attack what a run recorded, and say what each role could learn."""
    with needs_torch():
        from moretta.run import auditing

        limits = auditing.limits_of(fail_above)
        allowed = allows_code(folder, allow_code, data=True)
        found = _audit(folder, thorough, background, limits, allowed)
    say(_read(folder, "audit.json"), as_json, lambda: _print_audit(folder))
    if above := found.above(limits):
        raise RunFailed("; ".join(above.values()))


OfSilo = Annotated[str | None, typer.Option("--silo", help="Use this silo's own model, where each has one.")]


@app.command()
def predict(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A finished run.")],
    data: Annotated[Path, typer.Option(help="Rows to predict: .csv with the training columns, or .npz with x.")],
    out: Annotated[Path, typer.Option(help="Where the outputs go, a row each: .csv or .npy.")],
    true_model: Annotated[
        bool, typer.Option("--true-model", help="Use the server's true model, not the released one.")
    ] = False,
    silo: OfSilo = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Predict with the released model of a run."""
    with needs_torch():
        from moretta.run.prediction import predict as predict_rows

        allowed = allows_code(folder, allow_code)
        rows, outputs = predict_rows(folder, data, out, true_model=true_model, silo=silo, allow_code=allowed)
    told = {"rows": rows, "outputs": outputs, "out": str(out)}
    say(told, as_json, lambda: print(f"{rows} rows, {outputs} outputs each: {out}"))


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A finished run.")],
    out: Annotated[Path, typer.Option(help="A .safetensors state_dict, an .onnx graph, or of a history a new folder.")],
    true_model: Annotated[
        bool, typer.Option("--true-model", help="Export the server's true model, not the released one.")
    ] = False,
    silo: OfSilo = None,
    history: Annotated[
        bool, typer.Option("--history", help="Export the history, as TensorBoard's events, and no model.")
    ] = False,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Write the released model of a run as a state_dict or as ONNX, or its history for TensorBoard."""
    with needs_torch():
        from moretta.run.export import export as export_model
        from moretta.run.export import export_history

        if history:
            if true_model or silo is not None:
                raise ParameterError("--history exports no model; leave out --true-model and --silo")
            rounds = export_history(folder, out)
            say({"out": str(out), "rounds": rounds}, as_json, lambda: print(f"{out}   (tensorboard --logdir {out})"))
            return
        allowed = out.suffix == ".onnx" and allows_code(folder, allow_code)
        export_model(folder, out, true_model=true_model, silo=silo, allow_code=allowed)
    say({"out": str(out), "true_model": true_model}, as_json, lambda: print(out))


@app.command()
def check(
    model: Annotated[str, typer.Option(help='A built-in name or "module:function" that returns a module.')],
    inputs: Annotated[
        list[str], typer.Option("--input", help="The shape of one row: 3,32,32; of tokens: 16:int1000. May repeat.")
    ],
    classes: Annotated[int, typer.Option(help="How many outputs the model has.", min=1)],
    loss: Annotated[str, typer.Option(help="mse or cross-entropy.")] = "mse",
    partitions: Annotated[int, typer.Option(help="m, from 1 to the number of outputs.", min=1)] = 1,
    variant: Annotated[str, typer.Option(help="Under cross-entropy: probabilities or paper.")] = "probabilities",
    scales: Annotated[
        str | None,
        typer.Option(
            help="continuous or powers-of-two; by default the first, and both where float32 is too coarse for the "
            "model itself: then float64 with continuous scales is exact, and hides more; powers of two are exact at "
            "the price of most of what scales hide, see docs/models.md."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether PBPFL trains a model exactly, and what of it stays unperturbed."""
    with needs_torch():
        from moretta.models import catalogue
        from moretta.protocols.pbpfl.exactness import Input
        from moretta.protocols.pbpfl.exactness import check as check_model

        for flag, value, known in (
            ("--loss", loss, ("mse", "cross-entropy")),
            ("--variant", variant, ("probabilities", "paper")),
            ("--scales", scales, ("continuous", "powers-of-two", None)),
        ):
            if value not in known:
                raise ParameterError(f'{flag} "{value}": expected {" or ".join(filter(None, known))}')
        settings = {"loss": loss, "partitions": partitions, "variant": variant}
        protocol = PBPFL.model_validate(settings | ({} if scales is None else {"scales": scales}))
        shapes = [Input.parse(text) for text in inputs]
        module = catalogue.build(model, inputs=shapes[0].shape, outputs=classes, base=Path.cwd(), seed=0)
        found = check_model(module, shapes, classes, protocol, fall_back=scales is None)
    say(found, as_json, lambda: _print_check(found))
    if not found["passes"]:
        raise typer.Exit(1)


@app.command()
def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="An experiment; left out, they are listed.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The quick form, minutes on two cores.")] = False,
    data: Annotated[Path | None, typer.Option(help="The folder of data sets.", envvar="MORETTA_DATA")] = None,
    out: Annotated[Path, typer.Option(help="Where results are kept, and gone on from.")] = Path("runs/reproduce"),
    epochs: Annotated[int | None, typer.Option(help="Train so long instead.")] = None,
    experiments: Annotated[Path, typer.Option(help="The folder of experiments.")] = Path("experiments"),
    overrides: Overrides = [],  # noqa: B006  # typer reads the default, nothing writes to it
    as_json: AsJson = False,
) -> None:
    """Run an experiment of the papers, and show our figures beside theirs."""
    with needs_torch():
        listing, choose = (resolve(f"reproduction:{what}", experiments) for what in ("listing", "choose"))
        if name is None:
            found = listing(experiments)
            say({"experiments": found}, as_json, lambda: _print_experiments(found))
            return
        chosen = choose(name, experiments, data, quick, epochs, overrides)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=screen, transient=True) as bar:
            task = bar.add_task(name, total=None)

            def watch(cell: str, number: int, rounds: int) -> None:
                bar.update(task, description=cell, completed=number, total=rounds)

            def tell(line: str) -> None:
                bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

            try:
                results = chosen.run(out, tell, watch)
            except KeyboardInterrupt:
                raise RunFailed("interrupted; the same command goes on with the cells that are left") from None
    say(
        results,
        as_json,
        lambda: _print_reproduction(results, chosen.path(out), resolve("reproduction:table", experiments)),
    )


@keys.command("new")
def new_key(
    out: Annotated[Path, typer.Option(help="The folder for identity.key, which stays there, and identity.pub.")],
    as_json: AsJson = False,
) -> None:
    """Make an identity: its private key for this silo alone, its public key for everybody's roster."""
    from moretta.secure_aggregation.identity import Identity

    identity = Identity.fresh()
    identity.save(out)
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


def _train(run_file: run_files.RunFile, folder: Path, resume: bool) -> Result:
    from moretta.run.assembly import federation_of

    federation = federation_of(run_file, folder)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=screen) as bar:
        task = bar.add_task(run_file.protocol.name, total=run_file.run.rounds, figures="")

        def progress(number: int, rounds: int, line: Mapping[str, Any]) -> None:
            for gone in line["dropped"]:
                bar.console.print(f"round {gone['round']}: {gone['silo']} {gone['reason']}", markup=False)
            figures = {"loss": line.get("loss"), "test": line.get("test_accuracy", line.get("test_mse"))}
            text = "  ".join(f"{name} {value:.4f}" for name, value in figures.items() if value is not None)
            bar.update(task, completed=number)
            if text:
                bar.update(task, figures=text)

        try:
            return federation.train(run_file.run.rounds, run_file.run.seed, resume=resume, progress=progress)
        except KeyboardInterrupt:  # typer would only say that it aborted
            raise RunFailed(f"interrupted; {folder} goes on from its last checkpoint by --resume") from None
        except (MorettaError, OSError):
            bar.live.transient = not bar.tasks[task].completed  # what never began is told by its sentence alone
            raise


def _audit(
    folder: Path,
    thorough: bool = False,
    background: Path | None = None,
    needed: Iterable[str] = (),
    allow_code: bool = False,
) -> Audit:
    from moretta.run import auditing

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task(f"audit of {folder.name}", total=None)

        def progress(done: int, of: int, name: str) -> None:
            bar.update(task, description=f"audit of {folder.name}: {name}", completed=done, total=of)

        try:
            return auditing.audit_folder(
                folder,
                thorough=thorough,
                background=background,
                progress=progress,
                needed=needed,
                allow_code=allow_code,
            )
        except KeyboardInterrupt:
            raise RunFailed("interrupted; nothing was written of this audit") from None


def _read(folder: Path, name: str) -> dict[str, Any]:
    from moretta.engines.run_folder import read_json

    return dict(read_json(folder / name))


def _print_comparison(
    folders: Sequence[Path], differences: Mapping[str, float], as_json: bool, page: Path | None, audits: bool
) -> None:
    from moretta.report.audit import leaks_table, side_by_side
    from moretta.report.folder import read_run
    from moretta.report.table import comparison_table

    runs = [_read(folder, "result.json") for folder in folders]
    told: dict[str, Any] = {
        "runs": runs,
        "weight_difference_from_fedsgd": dict(differences),
        "report": None if page is None else str(page),
    }
    records = [read_run(folder) for folder in folders]
    if audits:
        told["runs"] = [run | {"audit": _read(folder, "audit.json")} for run, folder in zip(runs, folders, strict=True)]
        told["leaks"] = side_by_side(records)

    def plainly() -> None:
        Console().print(comparison_table(records, differences))
        if any(record.audit is not None for record in records):
            Console().print(leaks_table(records))
        if page is not None:
            print(f"report: {page}")

    say(told, as_json, plainly)


def _print_experiments(found: Sequence[Mapping[str, Any]]) -> None:
    width = max(len(one["name"]) for one in found)
    for one in found:
        print(f"{one['name']:{width}}  {one['title']} ({one['paper']})")
    print("moretta reproduce NAME --data DIR runs one, with --quick in minutes")


def _print_reproduction(results: Mapping[str, Any], kept: Path, table: Callable[..., Any]) -> None:
    Console().print(table(results))
    print("why they differ:")
    for note in results["why_they_differ"]:
        print(f"  - {note}")
    print(f"results: {kept}")


def _print_check(found: Mapping[str, Any]) -> None:
    fell_back = "plain_error_float32" in found
    if fell_back:
        print(
            f'passes only with scales = "{found["scales"]}" in float32 (the default, continuous, misses: '
            f"{found['relative_error_float32_continuous']:.1e})"
        )
        print(f"  free scales: {found['free_scales']}")
    else:
        verdict = "passes: PBPFL trains this model exactly" if found["passes"] else "does not pass"
        print(f"{verdict} ({found['free_scales']} free scales, {found['scales']})")
    for name in ("relative_error_float64", "relative_error_float32", "buffers_error_float64"):
        print(f"  {name.replace('_', ' ')}: {found[name]:.1e}")
    if fell_back:
        print(
            "  with continuous scales this model is as exact as its own float32 rounding "
            f"({found['relative_error_float32_continuous']:.1e}, the plain model's own "
            f'{found["plain_error_float32"]:.1e}); to reach the bar set dtype = "float64" (exact, and hides more), or '
            f'scales = "{found["scales"]}" at the price of most of what scales hide, see docs/models.md'
        )
    for forced in found["forced_to_one"]:
        print(f"  unperturbed: {forced['tensor']}: {forced['because']}")


def _print_audit(folder: Path) -> None:
    from moretta.report.audit import audit_lines
    from moretta.report.folder import read_run

    found = read_run(folder).audit
    if found is None:  # it was just written
        raise RunFailed(f"{folder / 'audit.json'} is gone")
    Console().print(audit_lines(found))
    for one in found.not_run:
        print(f"{one.role}: {one.attack} did not run: {one.because}")
    print(f"audit: {folder / 'audit.json'}   (moretta report {folder} shows it)")


for command in (commands.serve, commands.join, commands.job, commands.doctor):
    app.command()(command)
app.add_typer(commands.kit, name="kit")
