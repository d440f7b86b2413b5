"""Models of other libraries by their names: `transformers:BertForSequenceClassification`, `monai:UNet`, `timm:NAME`.

Any `package:Class` is called with the arguments of [model], as a function beside the run file is. Known libraries need
three things besides: where their models are, what would load weights from the net, and transformers' configurations.
Weights come from a folder on disk or from the seed, never from the net, and never by code that a folder holds.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Container, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from moretta.contract.wording import shown
from moretta.data.references import OWN_CODE, resolve
from moretta.errors import MissingExtra, ParameterError

# Where a library has its models, and what it is called where it is installed from.
HOMES: Mapping[str, tuple[str, ...]] = {
    "transformers": (),
    "monai": ("monai.networks.nets",),
    "timm": ("timm.models",),
    "torchvision": ("torchvision.models", "torchvision.models.segmentation", "torchvision.models.video"),
    "segmentation_models_pytorch": (),
}
FROM_THE_NET = ("pretrained", "weights", "weights_backbone", "encoder_weights", "pretrained_backbone")


def found(source: str, base: Path, agreed: Container[str]) -> Callable[..., Any]:
    """Return what `package:Class` or `module:function` names (`moretta.data.references.resolve`).

    Raises:
        MissingExtra: a known library is not installed.
        ParameterError: as `resolve` does.
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
    """Whether a function has an argument of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # of what Python code did not define
        return False


def construct(
    function: Callable[..., Any], source: str, outputs: int, base: Path, arguments: Mapping[str, Any], *, own: bool
) -> Any:
    """Call what `found` returned.

    Args:
        outputs: how many the rows need; a configuration of transformers takes it as its number of labels.
        base: in which a folder of weights is looked for.
        arguments: of [model].
        own: whether these are this machine's own; another's names no folder outside of `base`.

    Raises:
        ParameterError: an argument asks for weights from the net, is unknown, or names no folder of a model.
    """
    if source.partition(":")[0] not in HOMES:
        return function(**arguments)
    given = dict(arguments)
    for name in FROM_THE_NET:
        if takes(function, name):
            if given.get(name):
                raise ParameterError(
                    f"[model] {name.replace('_', '-')} = {shown(given[name])} loads weights from the net, which a run "
                    "does not; remove it, and give weights by [protocol] warm-start"
                )
            given[name] = False if name.startswith("pretrained") else None
    if hasattr(function, "config_class"):
        return _of_transformers(function, outputs, base, given, own=own)
    return function(**given)


def _of_transformers(kind: Any, outputs: int, base: Path, arguments: dict[str, Any], *, own: bool) -> Any:
    """Return a model of transformers by its configuration: of the arguments, or of a `folder` and the arguments."""
    if "trust_remote_code" in arguments:
        raise ParameterError("[model] trust-remote-code: a folder's code is never run; remove it")
    configuration = kind.config_class
    folder = arguments.pop("folder", None)
    known = {*vars(configuration()), *configuration.attribute_map, "num_labels"}
    for name in set(arguments) - known:  # some models read further ones, which their configurations do not declare
        if close := get_close_matches(name, known, n=1, cutoff=0.85):
            raise ParameterError(f'{configuration.__name__} has no setting `{name}`; did you mean "{close[0]}"?')
    if any(name.startswith("num_") and "experts" in name for name in known):  # of others one reads rows, one no float64
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
