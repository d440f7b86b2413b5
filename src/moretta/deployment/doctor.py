"""`moretta doctor`: looks whether a machine could take part, and says of each thing that keeps it how to mend it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. sentence: what was found, and where it does not pass what to do."""

    what: str
    passes: bool
    sentence: str

    def told(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"what": self.what, "passes": self.passes, "sentence": self.sentence}

    def line(self) -> str:
        """Return it as a line."""
        return f"{'ok  ' if self.passes else 'FAIL'} {self.what}: {self.sentence}"


def examine(*, kit: Path | None, silo: Path | None, run: Path | None) -> list[Finding]:
    """Look at everything that can be looked at with what is given."""
    raise NotImplementedError
