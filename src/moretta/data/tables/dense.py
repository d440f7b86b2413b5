"""What looks like an array and would be taken for another: sparse matrices and masked arrays.

Both are refused, wherever rows are given: as arrays, by name or as a frame's columns.
"""

from __future__ import annotations

import numpy as np

from moretta.errors import ParameterError


def check_dense(given: object, where: str, name: str = "") -> None:
    """Refuse what is no plain array and would be taken for one."""
    if is_sparse(given):
        raise ParameterError(f"{where}: got a sparse matrix; give all its numbers, as {name}.toarray()")
    if np.ma.isMaskedArray(given):  # as a plain array it would have what the mask hides
        raise ParameterError(f"{where}: got a masked array; say what stands for masked values, as {name}.filled(nan)")


def is_sparse(given: object) -> bool:
    """Whether this is a sparse matrix of SciPy."""
    return hasattr(given, "toarray")
