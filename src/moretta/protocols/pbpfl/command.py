"""`moretta check`, PBPFL's own command: it prints what `exactness` finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moretta.errors import ParameterError

if TYPE_CHECKING:
    from moretta.protocols.pbpfl.params import PBPFL

Say = Callable[[Mapping[str, Any], Callable[[], None]], None]


def add_to(app: typer.Typer, needs_torch: Callable[[], AbstractContextManager[None]], say: Say) -> None:
    """Add `check`. needs_torch: names a missing extra. say: prints a result, as JSON or for a person."""

    @app.command()
    def check(
        model: Annotated[str, typer.Option(help='A built-in name or "module:function" that returns a module.')],
        inputs: Annotated[
            list[str], typer.Option("--input", help="The shape of one row: 3,32,32; of tokens: 16:int1000. May repeat.")
        ],
        classes: Annotated[int, typer.Option(help="How many outputs the model has.", min=1)],
        loss: Annotated[str, typer.Option(help="mse or cross-entropy.")] = "mse",
        partitions: Annotated[int, typer.Option(help="From 1 to the number of outputs.", min=1)] = 1,
        variant: Annotated[str, typer.Option(help="Under cross-entropy: probabilities or paper.")] = "probabilities",
        scales: Annotated[
            str | None,
            typer.Option(
                help="continuous or powers-of-two. Default: continuous, and powers-of-two too where float32 is too "
                "coarse for the model itself. Powers of two are exact but hide much less (docs/pbpfl.md); float64 "
                "with continuous scales is exact and hides more."
            ),
        ] = None,
    ) -> None:
        """Check whether PBPFL trains a model exactly, and list tensors without a free scale on some side."""
        with needs_torch():
            from moretta.data.references import OWN_CODE
            from moretta.models import catalogue
            from moretta.protocols.pbpfl import exactness

            settings = _settings(loss, partitions, variant, scales)
            shapes = [exactness.Input.parse(text) for text in inputs]
            module = catalogue.build(model, inputs=shapes[0].shape, outputs=classes, base=Path.cwd(), agreed=OWN_CODE)
            findings = exactness.check(module, shapes, classes, settings, fall_back=scales is None)
        say(findings, lambda: _print_check(findings))
        if not findings["passes"]:
            raise typer.Exit(1)


def _settings(loss: str, partitions: int, variant: str, scales: str | None) -> PBPFL:
    """Return PBPFL's settings of the command's options. Raises `moretta.errors.ParameterError` for unknown words."""
    from moretta.protocols.pbpfl.params import PBPFL

    for flag, value, known in (
        ("--loss", loss, ("mse", "cross-entropy")),
        ("--variant", variant, ("probabilities", "paper")),
        ("--scales", scales, ("continuous", "powers-of-two", None)),
    ):
        if value not in known:
            raise ParameterError(f'{flag} "{value}": expected {" or ".join(filter(None, known))}')
    settings = {"loss": loss, "partitions": partitions, "variant": variant}
    return PBPFL.model_validate(settings | ({} if scales is None else {"scales": scales}))


def _print_check(findings: Mapping[str, Any]) -> None:
    fell_back = "plain_error_float32" in findings
    if fell_back:
        print(
            f'passes only with scales = "{findings["scales"]}" in float32 (the default, continuous, misses: '
            f"{findings['relative_error_float32_continuous']:.1e})"
        )
        print(f"  free scales: {findings['free_scales']}")
    else:
        verdict = "passes: PBPFL trains this model exactly" if findings["passes"] else "does not pass"
        print(f"{verdict} ({findings['free_scales']} free scales, {findings['scales']})")
    for name in ("relative_error_float64", "relative_error_float32", "buffers_error_float64"):
        what = name.replace("buffers_error", "relative error of running statistics").replace("_", " ")
        print(f"  {what}: {findings[name]:.1e}")
    if fell_back:
        print(
            "  with continuous scales this model is as exact as its own float32 rounding "
            f"({findings['relative_error_float32_continuous']:.1e}, the plain model's own "
            f'{findings["plain_error_float32"]:.1e}). To reach the bar set dtype = "float64" (exact, and hides more), '
            f'or scales = "{findings["scales"]}" at the price of most of what scales hide, see docs/pbpfl.md'
        )
    for forced in findings["forced_to_one"]:
        print(f"  no free scale on one side or both: {forced['tensor']}: {forced['because']}")
