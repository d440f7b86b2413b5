"""`moretta predict`, `evaluate` and `export`: the model that a finished run released, on rows or as a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moretta.commands.rows import Absent, Decimal, FileEncoding, Separator, format_fields
from moretta.commands.terminal import AllowCode, allows_code, needs_torch, say
from moretta.errors import ParameterError

if TYPE_CHECKING:
    from moretta.data.tables.mapping import ColumnMapping

Architecture = Annotated[
    str | None,
    typer.Option("--model", metavar="MODULE:FUNCTION", help="For a run made from Python: builds its model."),
]
LEFT_OUT = 3  # the exit code if some rows are left out
TrueModel = Annotated[bool, typer.Option("--true-model", help="Use the server's true model, not the released one.")]
OfSilo = Annotated[str | None, typer.Option("--silo", help="Use this silo's own model, where each has one.")]
SiloFile = Annotated[
    Path | None,
    typer.Option(
        metavar="silo.toml",
        help="Read a table as this site reads its own, by \\[data] and \\[mapping] of its silo.toml.",
    ),
]


def predict(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A finished run.")],
    data: Annotated[
        Path,
        typer.Option(help="Rows to predict: a table with the training columns, .npz with x, or a folder of images."),
    ],
    out: Annotated[
        Path, typer.Option(help="The file for predictions, one a row: .csv, .npz for masks, or .npy for raw outputs.")
    ],
    true_model: TrueModel = False,
    silo: OfSilo = None,
    model: Architecture = None,
    silo_file: SiloFile = None,
    separator: Separator = None,
    decimal: Decimal = None,
    file_encoding: FileEncoding = None,
    absent: Absent = [],  # noqa: B006  # typer reads the default, nothing writes to it
    allow_code: AllowCode = False,
) -> None:
    """Predict with the released model of a run.

    A .csv file is read as in the run, unless options say otherwise. Rows that do not fit the schema, and rows
    whose outputs are not finite, are left out and listed, with exit code 3.
    """
    with needs_torch():
        from moretta.run.prediction import predict as predict_rows
        from moretta.run.trained_model import ModelChoice

        form, mapping = _as_written(silo_file, format_fields(separator, decimal, file_encoding, absent))
        choice = ModelChoice(true_model, silo, model, allows_code(folder, allow_code))
        rows, outputs, left_out = predict_rows(folder, data, out, choice, form=form, mapping=mapping)
    result = {"rows": rows, "outputs": outputs, "out": str(out)}
    _print_without(left_out, result, lambda: print(f"{rows} rows, {outputs} outputs each: {out}"))


def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A finished run.")],
    data: Annotated[
        Path, typer.Option(help="Labelled rows that were not trained on: a table with its target, .npz with x and y.")
    ],
    by: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Also score each value of this column, such as each ward.")
    ] = None,
    true_model: TrueModel = False,
    silo: OfSilo = None,
    model: Architecture = None,
    silo_file: SiloFile = None,
    separator: Separator = None,
    decimal: Decimal = None,
    file_encoding: FileEncoding = None,
    absent: Absent = [],  # noqa: B006  # typer reads the default, nothing writes to it
    allow_code: AllowCode = False,
) -> None:
    """Score a run's model on other labelled rows, with 95 % intervals, in all and by a column.

    Rows that do not fit the schema are left out and listed, with exit code 3.
    """
    with needs_torch():
        from moretta.run.metrics import UNSURE
        from moretta.run.prediction import evaluate as judge
        from moretta.run.trained_model import ModelChoice

        form, mapping = _as_written(silo_file, format_fields(separator, decimal, file_encoding, absent))
        choice = ModelChoice(true_model, silo, model, allows_code(folder, allow_code))
        scores, left_out = judge(folder, data, choice, by=by, form=form, mapping=mapping)

    def show() -> None:
        for part, scored in {"all rows": scores, **scores.get("parts", {})}.items():
            units = "" if scored["units"] == scored["rows"] else f" of {scored['units']} people or things"
            print(f"{part}: {scored['rows']} rows{units}")
            for name, figure in scored["figures"].items():
                why = "resampling rows only raises it" if name == UNSURE else "all resampled rows give this"
                sure = f"no interval: {why}"
                if "low" in figure:
                    sure = f"{figure['low']:.4g} to {figure['high']:.4g}"
                print(f"    {name} {figure['value']:.4g} ({sure})")
            if len(by_class := scored.get("classes", {}).get("by_class", ())) == 2:
                print(f"    f1, sensitivity and the like are about the second class, {by_class[1]['class']}")
            if "threshold" in scored:
                print(f"    it is predicted from a probability of {scored['threshold']:.3g} (by validation rows)")
            classes = "classes" in scored or "position_accuracy" in scored["figures"]
            print(f"    the {'commonest class' if classes else 'mean'} alone: {scored['baseline']:.4g}")
        if scores.get("parts_withheld"):
            print(f"{scores['parts_withheld']} values of {by} have too few rows to be shown")

    _print_without(left_out, scores, show)


def _as_written(silo_file: Path | None, options: dict[str, Any]) -> tuple[dict[str, Any], ColumnMapping]:
    """Return the form of a table and the mapping of its columns. options: of the command line; they have precedence."""
    from moretta.config.silo_file import load
    from moretta.data.tables.mapping import ColumnMapping

    if silo_file is None:
        return options, ColumnMapping()
    site = load(silo_file)
    return asdict(site.data.form) | options, site.mapping


def _print_without(left_out: Mapping[int, str], result: Mapping[str, object], show: Callable[[], None]) -> None:
    """Print a result, then the rows that were left out; if there are any, exit with 3."""

    def show_both() -> None:
        show()
        for row, why in left_out.items():
            print(f"left out: row {row}: {why}")

    rows = {"left_out": {str(row): why for row, why in left_out.items()}} if left_out else {}
    say({**result, **rows}, show_both)
    if left_out:
        raise typer.Exit(LEFT_OUT)


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A finished run.")],
    out: Annotated[Path, typer.Option(help="A .safetensors or .onnx file; with --history a new folder.")],
    true_model: Annotated[
        bool, typer.Option("--true-model", help="Export the server's true model, not the released one.")
    ] = False,
    silo: OfSilo = None,
    model: Architecture = None,
    history: Annotated[
        bool, typer.Option("--history", help="Export the history as TensorBoard events instead of a model.")
    ] = False,
    allow_code: AllowCode = False,
) -> None:
    """Write the released model of a run as a state_dict or as ONNX, or its history for TensorBoard."""
    with needs_torch():
        from moretta.run.export import export as export_model
        from moretta.run.export import export_history
        from moretta.run.trained_model import ModelChoice

        if history:
            if true_model or silo is not None:
                raise ParameterError("--history exports no model; remove --true-model and --silo")
            rounds = export_history(folder, out)
            say({"out": str(out), "rounds": rounds}, lambda: print(f"{out}   (tensorboard --logdir {out})"))
            return
        allowed = out.suffix.lower() == ".onnx" and allows_code(folder, allow_code)
        export_model(folder, out, ModelChoice(true_model, silo, model, allowed))
    say({"out": str(out), "true_model": true_model}, lambda: print(out))
