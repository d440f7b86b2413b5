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
    rows = given if isinstance(given, list | tuple) else ()
    if np.ma.isMaskedArray(given) or any(map(np.ma.isMaskedArray, rows)):  # plain, they have what the mask hides
        what = "masked arrays in a list" if rows else "a masked array"
        remedy = "leave out the rows whose target is masked" if name == "y" else "say what stands for masked values"
        example = "" if name == "y" or rows else f", as {name}.astype(float).filled(nan)"
        raise ParameterError(f"{where}: got {what}; {remedy}{example}")


def is_sparse(given: object) -> bool:
    """Whether this is a sparse matrix of SciPy."""
    return hasattr(given, "toarray")
