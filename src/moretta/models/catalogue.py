"""The built-in models by their names, the settings `[model]`, and how any model is built and identified."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import re
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue, field_validator

from moretta.contract.settings import Section, Words, kebab
from moretta.contract.wording import did_you_mean, shown, unfit
from moretta.data.layout import SampleLayout
from moretta.data.references import OWN_CODE, beside, cause, is_reference
from moretta.data.tables.rows import expansion_of
from moretta.data.tables.schema import Schema
from moretta.errors import MissingExtra, ParameterError
from moretta.models import libraries

if TYPE_CHECKING:
    from torch import nn

BUILT_IN = ("mlp", "embeddings", "resnet", "densenet", "lenet", "wrn", "mobilenet")

TAKEN = ("source", "inputs", "outputs", "base", "seed", "layout", "agreed")  # by `build` itself


class Model(Section):
    """The model: what builds it, and the keyword arguments that it is built with.

    source: a built-in name, "module:function" of a module beside the run file or installed, or "package:Class" of a
    library. arguments: in a file these are the section's further keys, their dashes made underscores. One is not the
    constructor's: `output`, which tensor of an object or a dictionary is trained (`moretta.models.one_tensor`).
    """

    source: Words
    arguments: dict[str, JsonValue] = {}  # noqa: RUF012  # pydantic copies it

    @field_validator("arguments")
    @classmethod
    def _are_arguments(cls, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name, value in arguments.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name in TAKEN:
                raise ParameterError(f"[model] {name} cannot be the name of a constructor's argument; rename it")
            expected = "a number, a string, true, false or a list" if _has_table(value) else unfit(value)
            if expected:
                raise ParameterError(f"[model] {kebab(name)}: expected {expected}, got {shown(value)}")
        return arguments


def of_schema(source: str, arguments: Mapping[str, Any], table: Schema | None) -> dict[str, Any]:
    """Return a model's arguments with what follows from a schema: which columns of the inputs are of one category.

    Raises `moretta.errors.ParameterError` for embeddings of rows without a schema.
    """
    if source != "embeddings" or "categories" in arguments:
        return dict(arguments)
    if table is None:
        raise ParameterError(
            'model "embeddings" needs a schema: [data] schema, or from Python table=Schema.load(FILE); or categories, '
            "each one's first column and how many it has"
        )
    origins, worded = expansion_of(table).origins, (n for n, one in table.features.items() if one.kind == "category")
    return {**arguments, "categories": [[origins.index(name), origins.count(name)] for name in worded]}


def _has_table(value: object) -> bool:
    return isinstance(value, dict) or value is None or (isinstance(value, list) and any(map(_has_table, value)))


def code_of(source: str, base: Path, agreed: Container[str]) -> bytes:
    """Return the content of a function's file; empty for a built-in model or a function not written in Python.

    agreed: see `moretta.data.references.resolve`.
    """
    if source not in BUILT_IN:
        with suppress(TypeError, OSError):  # what Python code did not define has no file
            return Path(inspect.getfile(inspect.unwrap(libraries.found(source, base, agreed)))).read_bytes()
    return b""


def source_digest(
    source: str, arguments: Mapping[str, Any], base: Path = Path("."), agreed: Container[str] = ()
) -> str:
    """Return SHA-256, in hex, of what a [model] section builds but for its weights: name, arguments and code."""
    named = json.dumps([source, dict(arguments)], sort_keys=True, default=str)
    return hashlib.sha256(named.encode() + b"\0" + code_of(source, base, agreed)).hexdigest()


def build(
    source: str,
    *,
    inputs: tuple[int, ...],
    outputs: int,
    base: Path = Path("."),
    seed: int = 0,
    layout: SampleLayout | None = None,
    agreed: Container[str] = (),
    **arguments: Any,
) -> nn.Module:
    """Build a model for samples of shape `inputs`, with `outputs` outputs.

    `source` is a built-in name, or `module:function`, looked for first in `base`, the run file's folder, and called
    with `arguments` only, or `package:Class` of a library (`moretta.models.libraries`). Dashes in argument names become
    underscores. Initial weights depend on `seed` alone; torch's global generator is unchanged. layout: of samples of
    several arrays, which the model takes by keyword, and packed (`moretta.models.by_keyword`). agreed: which functions
    may be called (`moretta.data.references.resolve`).
    Raises ParameterError, naming the nearest known word, for an unknown model or argument, or with the original error
    for a function that fails or returns no module; MissingExtra without torch.
    """
    try:
        import torch
        from torch import nn
    except ImportError as error:
        raise MissingExtra('models need PyTorch; run: pip install "moretta[torch]"') from error
    arguments = {name.replace("-", "_"): value for name, value in arguments.items()}
    with torch.random.fork_rng(devices=[]):
        # not torch.manual_seed: that would also seed accelerators, whose state is not forked here
        torch.default_generator.manual_seed(seed)
        if source in BUILT_IN:
            if layout is not None:
                raise ParameterError(
                    f'model "{source}" takes one array, and a sample has {layout}; give a "module:function" whose '
                    f"module takes them by keyword{layout.table_hint}"
                )
            return _built_in(source, inputs, outputs, arguments)
        if not is_reference(source):
            raise ParameterError(
                f'model source = "{source}" is neither built in nor "module:function"; {did_you_mean(source, BUILT_IN)}'
            )
        function = libraries.found(source, base, agreed)
        output = "" if libraries.takes(function, "output") else str(arguments.pop("output", ""))
        try:
            with beside(base):
                own = agreed is OWN_CODE
                model = libraries.construct(function, source, outputs, base, arguments, own=own)
        except ParameterError:
            raise
        except (Exception, SystemExit) as error:
            called = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
            raise ParameterError(
                f'"{source}" called with ({called}) failed with {cause(error)}; fix the function or the [model] section'
            ) from error
    if not isinstance(model, nn.Module):
        raise ParameterError(f'"{source}" must return a torch.nn.Module, got {type(model).__name__}')
    from moretta.models.by_keyword import takes_packed  # these need torch
    from moretta.models.checks import check_weights
    from moretta.models.one_tensor import gives_one_tensor

    check_weights(model)
    return gives_one_tensor(takes_packed(model, layout), output)


def _built_in(source: str, inputs: tuple[int, ...], outputs: int, arguments: dict[str, Any]) -> nn.Module:
    if not inputs or any(size < 1 for size in inputs) or outputs < 1:
        raise ParameterError(f"expected sizes of 1 or more, got inputs {inputs} and outputs {outputs}")
    # imported only now, because it defines torch modules
    constructor: Callable[..., nn.Module] = getattr(importlib.import_module("moretta.models.architectures"), source)
    known = list(inspect.signature(constructor).parameters)[2:]
    for name in arguments:
        if name not in known:
            raise ParameterError(f'model "{source}" has no argument "{name}"; {did_you_mean(name, known)}')
    return constructor(inputs, outputs, **arguments)
