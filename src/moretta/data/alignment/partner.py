"""One partner's half of an alignment with one other, by ids that declared rules of both make comparable."""

from __future__ import annotations

import hashlib
import json
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import DIGEST_BYTES
from moretta.data.alignment import curve
from moretta.data.alignment.curve import POINT_BYTES, Points
from moretta.errors import MisuseError, ParameterError, PeerError, RowsError
from moretta.secure_aggregation.keystream import SecretRoot, encode_purpose


class NothingShared(RowsError):
    """Partners have no id in common, and the exchange ends."""


class Listing:
    """A partner's rows as alignments need them: each a different (normalised id, number of the row with it).

    Args:
        ids: The ids of all rows, in the file's order.
        where: The rows' owner, for errors.
        earlier: An alignment with others, whose rows alone are listed.

    Raises:
        ParameterError: Ids cannot be compared, or differ from those of `earlier`, or its rules do.
    """

    def __init__(
        self,
        ids: Sequence[str] | NDArray[np.generic],
        rules: IdRules,
        where: str,
        earlier: Alignment | None = None,
    ) -> None:
        self.rules, self.where, self.earlier = rules, where, earlier
        self.source = ids_digest(ids, where)
        written = rules.normalised(ids, where)
        if earlier is not None:
            earlier.check(ids, where)
            if earlier.rules != rules:
                raise ParameterError(f"{where}: the earlier alignment has other rules for ids; use the same")
        everything = list(zip(written, numbered(written), strict=True))
        self.rows = np.arange(len(written)) if earlier is None else earlier.order
        self.elements = [everything[row] for row in self.rows.tolist()]

    @property
    def messages(self) -> list[bytes]:
        """The messages encoded as points. Ids have no control characters, so none holds the byte that ends it."""
        return [name.encode() + b"\0" + number.to_bytes(4, "big") for name, number in self.elements]


class Partner:
    """Answers for one partner in one exchange: `blind`, then `again`, then `match`, each once.

    Args:
        pad_to: The length to which random points pad its list, so that the other does not learn the number of rows.
            None pads nothing.
        root: The root of its secrets; None draws it from the operating system.

    Raises:
        RowsError: The rows are more than `pad_to`.
    """

    def __init__(self, listing: Listing, pad_to: int | None = None, root: SecretRoot | None = None) -> None:
        count = len(listing.elements)
        if pad_to is not None and pad_to < count:
            raise RowsError(f"{listing.where}: pad-to is {pad_to}, fewer than the rows; increase it")
        self._listing, self._listed = listing, pad_to or count
        self._root = SecretRoot.fresh() if root is None else root
        self._own: Points | None = None  # the own list, as it was sent
        self._theirs: Points | None = None  # the other's list, under both secrets
        self._matched = False

    def blind(self) -> Points:
        """Return the own list under the own secret, in a secret order, uint8[points, 32]."""
        own = curve.blind(curve.encode(self._listing.messages), self._scalar)
        seeds = self._root.stream("padding").octets((self._listed - len(own)) * POINT_BYTES).reshape(-1, POINT_BYTES)
        padded = np.concatenate([own, curve.random_points(seeds)]) if len(seeds) else own
        self._own = padded[self._shuffled]
        return self._own

    def again(self, theirs: Points) -> Points:
        """Return the other's list under both secrets, in order; once, as many lists could be compared."""
        if self._theirs is not None:
            raise MisuseError(
                "this partner has already applied its secret to a list; begin another exchange for another list"
            )
        if self._own is not None and np.isin(curve.keys(theirs), curve.keys(self._own)).any():
            raise PeerError("expected the other partner's own list, got points of the list that it was sent")
        self._theirs = curve.blind(theirs, self._scalar)
        return self._theirs

    def resume(self, theirs: Points) -> None:
        """Restore the result of `again`, in another process with the same root."""
        self._theirs = theirs

    def match(self, own_again: Points) -> Alignment:
        """Return the alignment, from the own list under both secrets.

        Padding matches nothing and has no error of its own, by which partners could count rows.

        Raises:
            PeerError: The list is not as long as the own one.
            NothingShared: The partners share no id.
            MisuseError: The other's list is missing, or this one was matched before.
        """
        if self._theirs is None:
            raise MisuseError("expected the other partner's list before the own one comes back")
        if self._matched:
            raise MisuseError("this partner has matched its list before; begin another exchange for another")
        self._matched = True
        if len(own_again) != self._listed:
            raise PeerError(f"expected the own list of {self._listed} points back, got {len(own_again)}")
        own, theirs = curve.keys(own_again), curve.keys(self._theirs)
        matches = np.flatnonzero(np.isin(own, theirs))
        matches = matches[self._shuffled[matches] < len(self._listing.elements)]
        places = self._shuffled[matches]
        if not len(places):
            raise NothingShared(
                f"{self._listing.where}: the partners have no id in common under these rules; compare how both write "
                "ids, and declare rules that make them alike"
            )
        elements, rules = self._listing.elements, self._listing.rules
        ranked = sorted(range(len(places)), key=lambda at: elements[places[at]])
        digest = hashlib.sha256(encode_purpose("alignment", rules.digest, own_again[matches[ranked]].tobytes()))
        step = Disclosed(self._listed, len(self._theirs), len(places))
        before = () if self._listing.earlier is None else self._listing.earlier.steps
        order = self._listing.rows[places[ranked]]
        return Alignment(rules, order, digest.digest(), self._listing.source, (*before, step))

    @property
    def _scalar(self) -> bytes:
        return self._root.derive("scalar")

    @property
    def _shuffled(self) -> NDArray[np.int64]:
        return self._root.stream("order").permutation(self._listed)

    def __repr__(self) -> str:
        return f"Partner({self._listing.where!r}, <redacted>)"


def left_of(earlier: Alignment, later: Alignment) -> bytes:
    """Return the rows of an alignment left in a later one that continues it: its digest, and rising positions."""
    return later.digest + np.flatnonzero(np.isin(earlier.order, later.order)).astype(_POSITIONS).tobytes()


def narrowed(earlier: Alignment, left: bytes) -> Alignment:
    """Return the rest of an alignment after another partner aligned with the first one.

    Args:
        left: The bytes of `left_of`.

    Raises:
        PeerError: The bytes are malformed, or have positions outside the alignment.
    """
    if len(left) < DIGEST_BYTES or (len(left) - DIGEST_BYTES) % _POSITIONS.itemsize:
        raise PeerError("expected a digest and positions of rows")
    kept = np.frombuffer(left[DIGEST_BYTES:], dtype=_POSITIONS).astype(np.int64)
    if not len(kept) or kept.min() < 0 or kept.max() >= len(earlier.order) or (np.diff(kept) <= 0).any():
        raise PeerError(f"expected rising positions among the {len(earlier.order)} rows that were aligned")
    return replace(earlier, order=earlier.order[kept], digest=left[:DIGEST_BYTES])


_POSITIONS = np.dtype("<i8")


FORMAT = 1
KIND = "moretta alignment"


class Disclosed(NamedTuple):
    """The disclosure of one exchange between two partners: lengths of lists with padding, and rows in common."""

    listed: int
    listed_there: int
    common: int


@dataclass(frozen=True)
class Alignment:
    """The rows that partners share, from one partner's side.

    It holds no id, and no row number of another partner.

    Args:
        rules: of the ids.
        order: int64[rows], its own row numbers from 0, in the order of all partners.
        digest: of the exchange, the same at each partner.
        source: the digest of its ids as written, in the file's order.
        steps: one for each partner that it aligned with.
    """

    rules: IdRules
    order: NDArray[np.int64]
    digest: bytes
    source: bytes
    steps: tuple[Disclosed, ...]

    def check(self, ids: Sequence[str] | NDArray[np.generic] | None, where: str) -> None:
        """Raise `moretta.errors.ParameterError` unless these are the ids of the rows that were aligned."""
        if ids is None:
            raise RowsError(f"{where}: the rows have no ids, which an alignment needs; name the id column")
        if ids_digest(ids, where) != self.source:
            raise RowsError(
                f"{where}: the ids have changed since the alignment, so its row numbers point to other rows; align "
                "again, or restore the rows"
            )

    def normalised(self, ids: Sequence[str] | NDArray[np.generic] | None, where: str) -> NDArray[np.str_]:
        """Return the shared rows' normalised ids in the partners' order."""
        self.check(ids, where)
        written: NDArray[np.str_] = np.array(self.rules.normalised([] if ids is None else ids, where), dtype=np.str_)
        return written[self.order]

    def save(self, path: Path) -> None:
        """Write it as JSON, for its owner alone (mode 0600). Raises `FileExistsError` for an existing file."""
        write_new(path, self.dump())

    def dump(self) -> bytes:
        """Return it as JSON."""
        content = {
            "format": FORMAT,
            "kind": KIND,
            "rules": asdict(self.rules),
            "rows": len(self.order),
            "digest": self.digest.hex(),
            "source": self.source.hex(),
            "steps": [step._asdict() for step in self.steps],
            "order": self.order.tolist(),
        }
        return json.dumps(content).encode()

    @classmethod
    def load(cls, path: Path) -> Alignment:
        """Read it. Raises `moretta.errors.ParameterError` for a file without an alignment."""
        try:
            return cls._read(json.loads(path.read_text()))
        except (ParameterError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise ParameterError(f"{path}: expected an alignment as `moretta align` writes it; align again") from None

    @classmethod
    def _read(cls, content: Mapping[str, Any]) -> Alignment:
        order = np.array(content["order"], dtype=np.int64)
        if content["kind"] != KIND or content["format"] != FORMAT or order.ndim != 1 or len(order) != content["rows"]:
            raise ValueError
        if not len(order) or order.min() < 0 or len(np.unique(order)) < len(order):
            raise ValueError
        digest, source = bytes.fromhex(content["digest"]), bytes.fromhex(content["source"])
        if len(digest) != 32 or len(source) != 32:
            raise ValueError
        steps = tuple(Disclosed(**{name: int(step[name]) for name in Disclosed._fields}) for step in content["steps"])
        return cls(IdRules.read(content["rules"]), order, digest, source, steps)


def write_new(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all. Raises `FileExistsError` for an existing one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
    except OSError:
        path.unlink(missing_ok=True)
        raise


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

        Args:
            names: Names of switches, or "none" alone.

        Raises:
            ParameterError: A name is unknown, or "none" has others beside it.
        """
        chosen = {name.replace("-", "_") for name in names}
        if "none" in chosen and len(chosen) > 1:
            raise ParameterError("rules for ids: none excludes all others; remove it, or the others")
        chosen -= {"none"}
        known = {field.name for field in fields(cls)}
        if strange := sorted(chosen - known):
            raise ParameterError(
                f"unknown rule for ids {strange[0]!r:.40}; expected some of "
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
        """Return normalised ids.

        Args:
            where: The start of each error's sentence.

        Raises:
            ParameterError: Ids are neither text nor whole numbers, are empty or too long, or have line breaks, control
                or invisible characters. The sentence quotes no id.
        """
        written = _texts(ids, where)
        odd = {unicodedata.category(mark) for text in written if not text.isprintable() for mark in text}
        if odd & {*_REFUSED}:
            raise RowsError(
                f"{where}: some ids have line breaks, control or invisible characters; remove those from the id column"
            )
        rewritten = [self._rewritten(text) for text in written]
        if empty := sum(not text for text in rewritten):
            raise RowsError(
                f"{where}: {empty} of {len(rewritten)} rows have no id; add their ids, or leave these rows out"
            )
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
    """Return the number of rows before each row with its id, so that (id, number) is different for each row."""
    seen, numbers = Counter[str](), []
    for identifier in ids:
        numbers.append(seen[identifier])
        seen[identifier] += 1
    return numbers


def ids_digest(ids: Sequence[str] | NDArray[np.generic], where: str) -> bytes:
    """Return SHA-256 of ids in form NFC, in order. Never send it: from it and all other ids, one id can be guessed."""
    digest = hashlib.sha256()
    for text in _texts(ids, where):
        content = unicodedata.normalize("NFC", text).encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(4, "big") + content)
    return digest.digest()


def _texts(ids: Sequence[str] | NDArray[np.generic], where: str) -> list[str]:
    if (
        len(ids)
        and not (isinstance(ids, np.ndarray) and ids.dtype != object)
        and all(type(text) is str for text in ids)
    ):
        return [str(text) for text in ids]  # NumPy would drop null characters at the end
    array = np.asarray(ids)
    if array.ndim != 1 or array.dtype.kind not in "Uiu" or not len(array):
        raise RowsError(
            f"{where}: expected ids as text or whole numbers, one a row and at least one; got "
            f"{array.dtype}{list(array.shape)}"
        )
    return [str(text) for text in array.tolist()]
