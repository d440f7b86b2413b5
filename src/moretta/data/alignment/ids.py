"""Ids of rows, made comparable between partners by rules that both declare."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
from numpy.typing import NDArray

from moretta.errors import ParameterError, RowsError
from moretta.secure_aggregation.keystream import encode_purpose

_REFUSED = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control and invisible characters, halves of characters, breaks of lines
_LONGEST = 1024  # characters of an id


@dataclass(frozen=True)
class IdRules:
    """Normalise ids before they are compared; all partners need the same rules.

    Args:
        strip: Remove white space at both ends.
        unicode: Bring to Unicode's form NFKC: full-width digits become digits, and composed accents equal combined
            ones.
        fold_case: Ignore case.
        drop_spaces: Remove all white space.
        drop_punctuation: Remove all punctuation (dashes, dots, slashes).
        drop_zeros: Remove leading zeros.
    """

    strip: bool = True
    unicode: bool = True
    fold_case: bool = True
    drop_spaces: bool = False
    drop_punctuation: bool = False
    drop_zeros: bool = False

    @classmethod
    def of(cls, names: Iterable[str]) -> IdRules:
        """Return the rules with these switches on and all others off, by their names with dashes or underscores.

        Raises `moretta.errors.ParameterError` for a name that is none.
        """
        given = {name.replace("-", "_") for name in names}
        if "none" in given and len(given) > 1:
            raise ParameterError("rules for ids: none stands alone, and here are others beside it; give either")
        given -= {"none"}
        known = {field.name for field in fields(cls)}
        if strange := sorted(given - known):
            raise ParameterError(
                f"no rule for ids is called {strange[0]!r:.40}; expected some of "
                f"{', '.join(sorted(known)).replace('_', '-')}, or none"
            )
        return cls(**{name: name in given for name in known})

    @classmethod
    def read(cls, switches: Mapping[str, object]) -> IdRules:
        """Return the rules that `asdict` wrote. Raises `moretta.errors.ParameterError` for others."""
        known = {field.name for field in fields(cls)}
        if set(switches) != known or not all(type(value) is bool for value in switches.values()):
            raise ParameterError(f"expected rules for ids, true or false for each of {', '.join(sorted(known))}")
        return cls(**{name: bool(value) for name, value in switches.items()})

    @property
    def digest(self) -> bytes:
        """SHA-256 of the rules, which partners compare."""
        said = [f"{name}={value}" for name, value in sorted(asdict(self).items())]
        return hashlib.sha256(encode_purpose("rules of ids", *said)).digest()

    def normalised(self, ids: Sequence[str] | NDArray[np.generic], where: str) -> list[str]:
        """Return the ids as they are compared. where: begins each error's sentence.

        Raises `moretta.errors.ParameterError`, which quotes none of them, for ids that are neither text nor whole
        numbers, empty, too long, or have line breaks, control or invisible characters.
        """
        written = _texts(ids, where)
        odd = {unicodedata.category(mark) for one in written if not one.isprintable() for mark in one}
        if odd & {*_REFUSED}:
            raise RowsError(
                f"{where}: some ids have line breaks, control or invisible characters; remove those from the id column"
            )
        found = [self._rewritten(one) for one in written]
        if empty := sum(not one for one in found):
            raise RowsError(f"{where}: {empty} of {len(found)} rows have no id; give each an id or leave it out")
        if max(map(len, found)) > _LONGEST:
            raise RowsError(f"{where}: some ids are longer than {_LONGEST} characters; is it the id column?")
        return found

    def _rewritten(self, one: str) -> str:
        if self.unicode:
            one = unicodedata.normalize("NFKC", one)
        if self.fold_case:
            one = one.casefold()
            one = unicodedata.normalize("NFKC", one) if self.unicode and not one.isascii() else one
        if self.drop_spaces or self.drop_punctuation:
            kinds = ("Z" if self.drop_spaces else "", "P" if self.drop_punctuation else "")
            one = "".join(mark for mark in one if unicodedata.category(mark)[0] not in kinds)
        one = one.strip() if self.strip else one
        return (one.lstrip("0") or one[:1]) if self.drop_zeros else one


def numbered(ids: Iterable[str]) -> list[int]:
    """Return of each id how many rows before it have the same, so that (id, number) is different for each row."""
    seen, found = Counter[str](), []
    for one in ids:
        found.append(seen[one])
        seen[one] += 1
    return found


def ids_digest(ids: Sequence[str] | NDArray[np.generic], where: str) -> bytes:
    """Return SHA-256 of ids as they are written, in order; not to be sent, as who knows all but one finds that one."""
    found = hashlib.sha256()
    for one in _texts(ids, where):
        content = one.encode("utf-8", "surrogatepass")
        found.update(len(content).to_bytes(4, "big") + content)
    return found.digest()


def _texts(ids: Sequence[str] | NDArray[np.generic], where: str) -> list[str]:
    if len(ids) and not (isinstance(ids, np.ndarray) and ids.dtype != object) and all(type(one) is str for one in ids):
        return [str(one) for one in ids]  # not by way of NumPy, which drops null characters at the end
    given = np.asarray(ids)
    if given.ndim != 1 or given.dtype.kind not in "Uiu" or not len(given):
        raise RowsError(
            f"{where}: expected ids as text or whole numbers, one a row and at least one; got "
            f"{given.dtype}{list(given.shape)}"
        )
    return [str(one) for one in given.tolist()]
