"""Whom rows are about. An edge client's process imports this, which has no pydantic, and so no schema of tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Subjects:
    """Whom rows are about: str[rows], each row's id and group, None where there are none. Never shown or printed."""

    ids: NDArray[np.str_] | None = field(default=None, repr=False)
    groups: NDArray[np.str_] | None = field(default=None, repr=False)

    def named(self) -> Mapping[str, NDArray[np.str_] | None]:
        """Return both by what sentences call them."""
        return {"ids": self.ids, "groups": self.groups}
