import os
from pathlib import Path

import pytest


@pytest.fixture
def public(request: pytest.FixtureRequest) -> Path:
    """The folder of public data sets: MORETTA_DATA, or shared/data beside the checkout; the test skips without it."""
    folder = Path(os.environ.get("MORETTA_DATA") or request.config.rootpath.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("no public data sets here: set MORETTA_DATA to their folder")
    return folder
