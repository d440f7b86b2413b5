"""Models by their names, the settings `[model]`, and the construction and identity of any model.

A name is a built-in one, or code: `module:function` beside the run file, or
`transformers:BertForSequenceClassification`, `monai:UNet` and `timm:NAME` of libraries. Each is called with the
arguments of [model]. Known libraries need three things besides: the place of their models, arguments that would load
weights or code from elsewhere, and transformers' configurations. Weights are read from a folder on disk or drawn from
the seed. They are never downloaded, and never read by code that a folder or a server provides.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import re
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue, field_validator

from moretta.contract.settings import Section, Words, kebab
from moretta.contract.wording import did_you_mean, either, shown, unfit
from moretta.data.layout import SampleLayout
from moretta.data.references import OWN_CODE, beside, cause, is_reference, resolve
from moretta.data.tables.rows import expansion_of
from moretta.data.tables.schema import Schema
from moretta.errors import MissingExtra, ParameterError

if TYPE_CHECKING:
    from torch import nn

BUILT_IN = ("mlp", "embeddings", "resnet", "densenet", "lenet", "wrn", "mobilenet")

TAKEN = ("source", "inputs", "outputs", "base", "seed", "layout", "agreed")  # arguments of `build` itself


class Model(Section):
    """The model: what builds it, and its keyword arguments.

    Args:
        source: a built-in name, "module:function" of a module beside the run file or installed, or "package:Class" of a
            library.
        arguments: in a file these are the section's further keys, with underscores for dashes. One is not the
            constructor's: `output`, which tensor of an object or a dictionary is trained (`moretta.models.hooks`).
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
    """Return a model's arguments, with those that follow from a schema: the input columns of each category.

    Raises:
        ParameterError: The model is "embeddings", and its rows have no schema.
    """
    if source != "embeddings" or "categories" in arguments:
        return dict(arguments)
    if table is None:
        raise ParameterError(
            'model "embeddings" needs a schema: [data] schema, or from Python table=Schema.load(FILE); or categories, '
            "each one's first column and how many it has"
        )
    origins, worded = expansion_of(table).origins, (n for n, each in table.features.items() if each.kind == "category")
    return {**arguments, "categories": [[origins.index(name), origins.count(name)] for name in worded]}


def _has_table(value: object) -> bool:
    return isinstance(value, dict) or value is None or (isinstance(value, list) and any(map(_has_table, value)))


def code_of(source: str, base: Path, agreed: Container[str]) -> bytes:
    """Return the content of a function's file; empty for a built-in model or a function not written in Python.

    Args:
        agreed: As in `moretta.data.references.resolve`.
    """
    if source not in BUILT_IN:
        with suppress(TypeError, OSError):  # only Python code has a file
            return Path(inspect.getfile(inspect.unwrap(function_of(source, base, agreed)))).read_bytes()
    return b""


def source_digest(
    source: str, arguments: Mapping[str, Any], base: Path = Path("."), agreed: Container[str] = ()
) -> str:
    """Return the SHA-256, in hex, of a [model] section's name, arguments and code, without its weights."""
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
    """Build a model.

    Initial weights depend on `seed` alone; torch's global generator is unchanged.

    Args:
        source: A built-in name; `module:function`, searched first in `base` and called with `arguments` only; or
            `package:Class` of a library (`moretta.models.catalogue`).
        inputs: The shape of a sample.
        outputs: The number of outputs.
        base: The run file's folder.
        seed: Of the initial weights.
        layout: For samples of several arrays, which the model takes by keyword, and packed (`moretta.models.hooks`).
        agreed: The functions that may be called (`moretta.data.references.resolve`).
        arguments: Of [model]; dashes in their names become underscores.

    Raises:
        ParameterError: The model or an argument is unknown (the error names the nearest known word), or the function
            fails or returns no module.
        MissingExtra: PyTorch is not installed.
    """
    try:
        import torch
        from torch import nn
    except ImportError as error:
        raise MissingExtra('models need PyTorch; run: pip install "moretta[torch]"') from error
    arguments = {name.replace("-", "_"): value for name, value in arguments.items()}
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also seed accelerators, whose state is not forked here
        torch.default_generator.manual_seed(seed)
        if source in BUILT_IN:
            if layout is not None:
                raise ParameterError(
                    f'model "{source}" takes one array, but a sample has {layout}; use a "module:function" whose '
                    f"module takes them by keyword{layout.table_hint}"
                )
            return _built_in(source, inputs, outputs, arguments)
        if not is_reference(source):
            raise ParameterError(
                f'model source = "{source}" is neither built in nor "module:function"; {did_you_mean(source, BUILT_IN)}'
            )
        function = function_of(source, base, agreed)
        output = "" if takes(function, "output") else str(arguments.pop("output", ""))
        try:
            with beside(base):
                own = agreed is OWN_CODE
                model = construct(function, source, outputs, base, arguments, own=own)
        except ParameterError:
            raise
        except (Exception, SystemExit) as error:
            called = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
            raise ParameterError(
                f'"{source}" called with ({called}) failed with {cause(error)}; fix the function or the [model] section'
            ) from error
    if not isinstance(model, nn.Module):
        raise ParameterError(f'"{source}" must return a torch.nn.Module, got {type(model).__name__}')
    from moretta.models.checks import check_weights
    from moretta.models.hooks import gives_one_tensor, takes_packed  # these need torch

    check_weights(model)
    return gives_one_tensor(takes_packed(model, layout), output)


def _built_in(source: str, inputs: tuple[int, ...], outputs: int, arguments: dict[str, Any]) -> nn.Module:
    if not inputs or any(size < 1 for size in inputs) or outputs < 1:
        raise ParameterError(f"expected sizes of 1 or more, got inputs {inputs} and outputs {outputs}")
    # imported here, because it defines torch modules
    constructor: Callable[..., nn.Module] = getattr(importlib.import_module("moretta.models.architectures"), source)
    known = list(inspect.signature(constructor).parameters)[2:]
    for name in arguments:
        if name not in known:
            raise ParameterError(f'model "{source}" has no argument "{name}"; {did_you_mean(name, known)}')
    return constructor(inputs, outputs, **arguments)


# The modules in which each library has its models; empty: the package itself.
HOMES: Mapping[str, tuple[str, ...]] = {
    "transformers": (),
    "monai": ("monai.networks.nets",),
    "timm": ("timm.models",),
    "torchvision": ("torchvision.models", "torchvision.models.segmentation", "torchvision.models.video"),
    "segmentation_models_pytorch": (),
}
FROM_THE_NET = (
    "pretrained", "weights", "weights_backbone", "encoder_weights", "pretrained_backbone", "checkpoint_path"
)  # fmt: skip
# The implementations of transformers that load no kernels.
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")


def function_of(source: str, base: Path, agreed: Container[str]) -> Callable[..., Any]:
    """Return the function that `package:Class` or `module:function` names (`moretta.data.references.resolve`).

    Raises:
        MissingExtra: A known library is not installed.
        ParameterError: As `resolve` does.
    """
    package, _, name = source.partition(":")
    if package not in HOMES or source not in agreed:
        return resolve(source, base, agreed)
    try:
        for home in HOMES[package]:
            if hasattr(importlib.import_module(home), name):
                return resolve(f"{home}:{name}", base, OWN_CODE)
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise ParameterError(f'importing "{package}" failed: {error}; fix its installation') from error
        installed = package.replace("_", "-")
        raise MissingExtra(f'model source = "{source}" needs {installed}; run: pip install {installed}') from None
    return resolve(source, base, OWN_CODE)


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has an argument of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # only Python code has a signature
        return False


def construct(
    function: Callable[..., Any], source: str, outputs: int, base: Path, arguments: Mapping[str, Any], *, own: bool
) -> Any:
    """Call the function that `function_of` returned.

    Args:
        outputs: The number that the rows need; a configuration of transformers takes it as its number of labels.
        base: The folder that holds a folder of weights.
        arguments: Of [model].
        own: Whether these are this machine's own; another's may name no folder outside `base`.

    Raises:
        ParameterError: An argument requests weights from the net, is unknown, or names a folder without a model.
    """
    if source.partition(":")[0] not in HOMES:
        return function(**arguments)
    arguments = dict(arguments)
    for name, value in arguments.items():
        _check_plain(name, value, own=own)
    for name in FROM_THE_NET:
        if arguments.get(name):
            raise ParameterError(
                f"[model] {kebab(name)} = {shown(arguments[name])} loads weights from the net, which a run does not; "
                "remove it, and set [protocol] warm-start to weights"
            )
        if takes(function, name):
            arguments[name] = False if name.startswith("pretrained") else None
    if hasattr(function, "config_class"):
        return _of_transformers(function, outputs, base, arguments, own=own)
    return function(**arguments)


def _check_plain(name: str, value: object, *, own: bool) -> None:
    """Raise `moretta.errors.ParameterError` for a library's argument that names a place to load from.

    transformers runs the code of a repository in `attn_implementation`. timm reads a model from "hf-hub:" or a path.
    own: whether it is this machine's own argument, which may choose kernels that transformers downloads by their name.
    """
    fetches = "implementation" in name and not own and value not in IMPLEMENTATIONS
    if fetches or (name != "folder" and re.search("[/:]", json.dumps(value))):
        raise ParameterError(
            f"[model] {kebab(name)} = {shown(value)} may load code or weights from elsewhere, which a run does not; "
            f"expected {either(IMPLEMENTATIONS) if fetches else 'words without / and :'}"
        )


def _of_transformers(kind: Any, outputs: int, base: Path, arguments: dict[str, Any], *, own: bool) -> Any:
    """Return a model of transformers by its configuration: from the arguments, or from a `folder` and the arguments."""
    if "trust_remote_code" in arguments:
        raise ParameterError("[model] trust-remote-code: a folder's code is never run; remove it")
    configuration = kind.config_class
    folder = arguments.pop("folder", None)
    known = {*vars(configuration()), *configuration.attribute_map, "num_labels"}
    for name in set(arguments) - known:  # some models read further arguments, which their configurations do not declare
        if close := get_close_matches(name, known, n=1, cutoff=0.85):
            raise ParameterError(f'{configuration.__name__} has no setting `{name}`; did you mean "{close[0]}"?')
    if any(name.startswith("num_") and "experts" in name for name in known):  # others read rows, or lack float64
        arguments = {"experts_implementation": "batched_mm"} | arguments
    if folder is None:
        return kind(configuration(**{"num_labels": outputs} | arguments))
    path = (base / str(folder)).resolve()
    if not own and not path.is_relative_to(base.resolve()):
        raise ParameterError(f"[model] folder = {shown(folder)}: expected one within the run's own folder")
    if not (path / "config.json").is_file():
        raise ParameterError(f"[model] folder = {shown(folder)}: expected a folder with config.json, in {base}")
    config = configuration.from_pretrained(path, local_files_only=True, **arguments)
    if not list(path.glob("*.safetensors")):
        return kind(config)
    return kind.from_pretrained(path, config=config, local_files_only=True, use_safetensors=True)
