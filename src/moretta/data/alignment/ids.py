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

        Raises `moretta.errors.ParameterError` for an unknown name.
        """
        chosen = {name.replace("-", "_") for name in names}
        if "none" in chosen and len(chosen) > 1:
            raise ParameterError("rules for ids: none stands alone, and here are others beside it; give either")
        chosen -= {"none"}
        known = {field.name for field in fields(cls)}
        if strange := sorted(chosen - known):
            raise ParameterError(
                f"no rule for ids is called {strange[0]!r:.40}; expected some of "
                f"{', '.join(sorted(known)).replace('_', '-')}, or none"
            )
        return cls(**{name: name in chosen for name in known})

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
        switches = [f"{name}={value}" for name, value in sorted(asdict(self).items())]
        return hashlib.sha256(encode_purpose("rules of ids", *switches)).digest()

    def normalised(self, ids: Sequence[str] | NDArray[np.generic], where: str) -> list[str]:
        """Return the ids as they are compared. where: begins each error's sentence.

        Raises `moretta.errors.ParameterError`, which quotes none of them, for ids that are neither text nor whole
        numbers, empty, too long, or have line breaks, control or invisible characters.
        """
        written = _texts(ids, where)
        odd = {unicodedata.category(mark) for text in written if not text.isprintable() for mark in text}
        if odd & {*_REFUSED}:
            raise RowsError(
                f"{where}: some ids have line breaks, control or invisible characters; remove those from the id column"
            )
        rewritten = [self._rewritten(text) for text in written]
        if empty := sum(not text for text in rewritten):
            raise RowsError(f"{where}: {empty} of {len(rewritten)} rows have no id; give each an id or leave it out")
        if max(map(len, rewritten)) > _LONGEST:
            raise RowsError(f"{where}: some ids are longer than {_LONGEST} characters; is it the id column?")
        return rewritten

    def _rewritten(self, text: str) -> str:
        if self.unicode:
            text = unicodedata.normalize("NFKC", text)
        if self.fold_case:
            text = text.casefold()
            text = unicodedata.normalize("NFKC", text) if self.unicode and not text.isascii() else text
        if self.drop_spaces or self.drop_punctuation:
            kinds = ("Z" if self.drop_spaces else "", "P" if self.drop_punctuation else "")
            text = "".join(mark for mark in text if unicodedata.category(mark)[0] not in kinds)
        text = text.strip() if self.strip else text
        return (text.lstrip("0") or text[:1]) if self.drop_zeros else text


def numbered(ids: Iterable[str]) -> list[int]:
    """Return of each id how many rows before it have the same, so that (id, number) is different for each row."""
    seen, numbers = Counter[str](), []
    for identifier in ids:
        numbers.append(seen[identifier])
        seen[identifier] += 1
    return numbers


def ids_digest(ids: Sequence[str] | NDArray[np.generic], where: str) -> bytes:
    """Return SHA-256 of ids as they are written, in order; not to be sent, as who knows all but one finds that one."""
    digest = hashlib.sha256()
    for text in _texts(ids, where):
        content = text.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(4, "big") + content)
    return digest.digest()


def _texts(ids: Sequence[str] | NDArray[np.generic], where: str) -> list[str]:
    if (
        len(ids)
        and not (isinstance(ids, np.ndarray) and ids.dtype != object)
        and all(type(text) is str for text in ids)
    ):
        return [str(text) for text in ids]  # not by way of NumPy, which drops null characters at the end
    array = np.asarray(ids)
    if array.ndim != 1 or array.dtype.kind not in "Uiu" or not len(array):
        raise RowsError(
            f"{where}: expected ids as text or whole numbers, one a row and at least one; got "
            f"{array.dtype}{list(array.shape)}"
        )
    return [str(text) for text in array.tolist()]
