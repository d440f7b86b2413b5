"""The result of a check.

A check is a function that returns a sentence, `Warned` where it passes and should be heeded, or raises one of
`moretta.errors` with what to do; it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moretta.errors import MorettaError

T = TypeVar("T")


class Warned(str):
    """A sentence about what passes and should be heeded."""


@dataclass(frozen=True)
class CheckResult:
    """One thing that was looked at. sentence: what was found, and where it does not pass what to do.

    warns: it passes, and should be heeded all the same.
    """

    what: str
    passes: bool
    sentence: str
    warns: bool = False

    def told(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"what": self.what, "passes": self.passes, "warns": self.warns, "sentence": self.sentence}

    def line(self) -> str:
        """Return it as a line."""
        return f"{'FAIL' if not self.passes else 'warn' if self.warns else 'ok  '} {self.what}: {self.sentence}"


def look(what: str, check: Callable[[], str]) -> CheckResult:
    """Make a result of what a check returns or raises."""
    try:
        said = check()
    except MorettaError as error:
        return CheckResult(what, False, str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("torch", "nvflare", "sklearn"):
            raise
        return CheckResult(
            what, False, f"cannot be told without {package}; install it by: pip install 'moretta[flare]'"
        )
    except OSError as error:
        return CheckResult(what, False, f"{error.filename or what}: {error.strerror or error}; give the right to it")
    return CheckResult(what, True, str(said), isinstance(said, Warned))


def loaded(what: str, path: Path, load: Callable[[], T]) -> tuple[T | None, CheckResult]:
    """Return what a file holds, or None, and the result of reading it."""
    found: list[T] = []

    def check() -> str:
        found.append(load())
        return f"{path} is right"

    result = look(what, check)
    return (found[0] if found else None), result
