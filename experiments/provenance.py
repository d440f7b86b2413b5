"""What the record of a script says of the sources that made it."""

from pathlib import Path
from typing import Any

from reproduction import commit_of

from moretta.run.record import versions


def provenance() -> dict[str, Any]:
    """Return the versions that a record depends on, and the commit of this checkout, None outside of one."""
    return {"versions": versions(), "commit": commit_of(Path(__file__).parent)}
