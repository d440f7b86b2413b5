"""What a record says of the sources that made it."""

import subprocess
from pathlib import Path
from typing import Any

from moretta.run.record import versions


def provenance() -> dict[str, Any]:
    """Return the versions that a record depends on, and the commit of this checkout, None outside of one.

    The commit ends in "-dirty" where files differed from it.
    """
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        told = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {"versions": versions(), "commit": None}
    return {"versions": versions(), "commit": told.strip()}
