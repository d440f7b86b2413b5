"""The `module:function` names of a run file, imported from beside the run file.

A module is searched in the run file's folder first, then on Python's path. The folder is on `sys.path` only while the
user's code is imported or called. Only names that the caller agrees to are imported, because a run file may come from
another machine.
"""

import importlib
import sys
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from moretta.contract.wording import did_you_mean
from moretta.errors import ParameterError


class _AllCode:
    def __contains__(self, source: object) -> bool:
        return True


OWN_CODE: Final[Container[str]] = _AllCode()
"""The agreement for this machine's own run file or Python program: every name."""

_ours: set[str] = set()  # top-level names that `resolve` imported from a run file's folder


def is_reference(source: str) -> bool:
    """Return whether `source` has the form `module:function`, with Python identifiers.

    >>> is_reference("my.models:net"), is_reference("table.csv")
    (True, False)
    """
    module, colon, function = source.partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


@contextmanager
def beside(base: Path) -> Iterator[None]:
    """Put the folder `base` first on `sys.path`, and remove it again at the end."""
    folder = str(base.resolve())
    sys.path.insert(0, folder)
    importlib.invalidate_caches()  # finds a file written a moment ago, too
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def resolve(source: str, base: Path, agreed: Container[str]) -> Callable[..., Any]:
    """Import `module:function`, looking beside the run file (in the folder `base`) first.

    Args:
        agreed: the names that this machine agreed to run: `OWN_CODE`, or at a site `[silo] models` of its silo.toml.

    Raises:
        ParameterError: nobody agreed to the name, the import failed (with the original error), or the name is not
            callable.
    """
    name, _, attribute = source.partition(":")
    if source not in agreed:
        raise ParameterError(f'"{source}" is code that this machine has not agreed to run')
    if not is_reference(source):
        raise ParameterError(f'expected "module:function", got "{source}"; write for example "my_models:build"')
    try:
        with beside(base):
            module = _import(name, base)
    except (Exception, SystemExit) as error:
        raise ParameterError(
            f'importing "{name}" (for "{source}", looked for in {base} first) failed with {cause(error)}; '
            "put the module beside the run file, or fix the error in it"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        raise ParameterError(f'module "{name}" has no function "{attribute}"; {did_you_mean(attribute, own)}')
    return function  # type: ignore[no-any-return]


def cause(error: BaseException) -> str:
    """Return an exception in one line: its kind and its message."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _import(name: str, base: Path) -> ModuleType:
    """Import `name` from `base` first, even if another module of that name is loaded.

    A library or standard module of that name is restored afterwards, so the other code keeps its own.
    """
    top = name.partition(".")[0]
    spec = PathFinder.find_spec(top, [str(base.resolve())])
    found_beside = spec is not None and spec.loader is not None
    cached = sys.modules.get(top)
    if (
        not found_beside
        or cached is None
        or getattr(cached.__spec__, "origin", None) == (spec.origin if spec else None)
    ):
        if found_beside:
            _ours.add(top)
        return importlib.import_module(name)
    others = {key: sys.modules.pop(key) for key in list(sys.modules) if key == top or key.startswith(f"{top}.")}
    foreign = top not in _ours
    try:
        module = importlib.import_module(name)
    except BaseException:
        sys.modules.update(others)
        raise
    if foreign:
        for key in [key for key in sys.modules if key == top or key.startswith(f"{top}.")]:
            del sys.modules[key]
        sys.modules.update(others)
    return module
