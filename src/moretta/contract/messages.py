"""Messages between roles, the stamp that places them in a run, and the kinds of their fields."""

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar, dataclass_transform

import numpy as np
from numpy.typing import NDArray

from moretta.errors import PeerError

Array = NDArray[Any]
Tensors = Mapping[str, Array]
"""Named arrays, for example the parameters of a model by their PyTorch names."""


@dataclass(frozen=True, order=True)
class Stamp:
    """The place of a message: the run, the round, the attempt, and the take.

    A new attempt repeats the same question with new keys and masks. A new take asks for something else, because rows,
    dropout, keys of a perturbation, lots and noise follow `drawn`. So two takes of a round share no upload
    (`moretta.secure_aggregation.one_sum`). Every message carries a stamp, every mask is labelled with one, and a stamp
    is never used for two uploads.

    Attributes:
        run: 1 to 128 characters.
        round, attempt, take: From 0 to 2^31 - 1; round 0 precedes the first.

    Raises:
        PeerError: A value is out of its range.
    """

    run: str
    round: int
    attempt: int
    take: int = 0

    def __post_init__(self) -> None:
        if not _is_text(self.run, 1, 128):
            raise PeerError(f"run id: expected a string of 1 to 128 characters, got {self.run!r:.80}")
        for name, value in (("round", self.round), ("attempt", self.attempt), ("take", self.take)):
            if type(value) is not int or not 0 <= value < 2**31:
                raise PeerError(f"{name}: expected a whole number from 0 to 2^31 - 1, got {value!r:.80}")

    @property
    def drawn(self) -> tuple[int, ...]:
        """The round, and the take unless it is the first: the seed of everything that each take draws anew."""
        return (self.round, self.take) if self.take else (self.round,)

    def check_run(self, run: str) -> None:
        """Refuse a stamp of another run; the run "" accepts any.

        A silo's past answers are kept by run: under another name it would answer the same question twice.

        Raises:
            PeerError: The stamp is of another run.
        """
        if run not in ("", self.run):
            raise PeerError(f"expected messages of the run {run!r}, got one of {self.run!r}")

    def __str__(self) -> str:
        return f"round {self.round}, attempt {self.attempt}" + (f", take {self.take}" if self.take else "")


# The kinds of a message's fields. The codec encodes exactly these.
DTYPES = frozenset(
    np.dtype(name) for name in ("bool", "uint8", "int32", "int64", "uint32", "uint64", "float16", "float32", "float64")
)


NAME_LIMIT = 512  # characters in a tensor's or silo's name
TEXT_LIMIT = 1 << 20  # characters or bytes in a plain field (an ONNX graph travels as a uint8 array instead)


def _array(value: object) -> None:
    if not isinstance(value, np.ndarray) or value.dtype not in DTYPES:
        raise PeerError(f"expected an array of {', '.join(sorted(map(str, DTYPES)))}; got {_describe(value)}")
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise PeerError("expected finite numbers; got NaN or infinity")


def _plain(expected: str, fits: Callable[[Any], bool]) -> Callable[[object], None]:
    """Return the check of a value that is not an array."""

    def check(value: object) -> None:
        if not fits(value):
            endless = type(value) is float and not np.isfinite(value)
            raise PeerError(f"expected {expected}; got {'NaN or infinity' if endless else _describe(value)}")

    return check


_integer = _plain("a 64-bit whole number", lambda value: type(value) is int and -(2**63) <= value < 2**63)
_number = _plain("a finite float", lambda value: type(value) is float and bool(np.isfinite(value)))
_SURROGATE = re.compile("[\ud800-\udfff]")


def _is_text(value: object, least: int, most: int) -> bool:
    # JSON can write half of a surrogate pair, which is not a character and cannot be encoded.
    return type(value) is str and least <= len(value) <= most and not _SURROGATE.search(value)


_text = _plain(f"text of at most {TEXT_LIMIT} characters", lambda value: _is_text(value, 0, TEXT_LIMIT))
_octets = _plain(f"at most {TEXT_LIMIT} bytes", lambda value: type(value) is bytes and len(value) <= TEXT_LIMIT)


def _mapping_of(check: Callable[[object], None], value: object) -> None:
    if not isinstance(value, Mapping):
        raise PeerError(f"expected named values; got {_describe(value)}")
    if not _are_names(value):
        wrong = next(name for name in value if not _is_text(name, 1, NAME_LIMIT))
        raise PeerError(f"expected a name of 1 to {NAME_LIMIT} characters; got {_describe(wrong)}")
    for name, item in value.items():
        try:
            check(item)
        except PeerError as error:
            raise PeerError(f"`{name}`: {error}") from None


def _are_names(value: Collection[object]) -> bool:
    """Return whether all are names, by one search over them, as a round has thousands."""
    names = [name for name in value if type(name) is str and 1 <= len(name) <= NAME_LIMIT]
    return len(names) == len(value) and not _SURROGATE.search("".join(names))


FIELD_KINDS: Mapping[Any, Callable[[Any], None]] = {
    Array: _array,
    Tensors: functools.partial(_mapping_of, _array),
    int: _integer,
    float: _number,
    bool: _plain("true or false", lambda value: type(value) is bool),
    str: _text,
    bytes: _octets,
    Mapping[str, int]: functools.partial(_mapping_of, _integer),
    Mapping[str, float]: functools.partial(_mapping_of, _number),
    Mapping[str, str]: functools.partial(_mapping_of, _text),
    Mapping[str, bytes]: functools.partial(_mapping_of, _octets),
    tuple[str, ...]: _plain("a tuple of names", lambda value: isinstance(value, tuple) and _are_names(value)),
}


def length(*allowed: int) -> Callable[[Any], None]:
    """Return the check of a field: its bytes, or each of its bytes by name, have one of these lengths."""

    def check(value: bytes | Mapping[str, bytes]) -> None:
        for name, entry in value.items() if isinstance(value, Mapping) else [("", value)]:
            if len(entry) not in allowed:
                raise _not_in(name, " or ".join(map(str, allowed)) + " bytes", len(entry))

    return check


def within(least: int, most: int | None = None) -> Callable[[Any], None]:
    """Return the check of a field: its whole number, or each of its numbers by name, is in a range."""

    def check(value: int | Mapping[str, int]) -> None:
        for name, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            if number < least or (most is not None and number > most):
                raise _not_in(name, f"at least {least}" if most is None else f"{least} to {most}", number)

    return check


def _not_in(name: str, expected: str, got: int) -> PeerError:
    return PeerError(f"{f'`{name}`: ' if name else ''}expected {expected}, got {got}")


def shaped(axes: int, *dtypes: str) -> Callable[[Array], None]:
    """Return the check of a field: its array has this number of axes and one of these dtypes."""

    def check(value: Array) -> None:
        if value.ndim != axes or value.dtype.name not in dtypes:
            raise PeerError(f"expected {' or '.join(dtypes)}[{', '.join('*' * axes)}], got {_describe(value)}")

    return check


DIGEST_BYTES = 32  # of SHA-256

Digest = Annotated[bytes, length(DIGEST_BYTES)]
Digests = Annotated[Mapping[str, bytes], length(DIGEST_BYTES)]
Octets = Annotated[Array, shaped(1, "uint8")]
"""More bytes than fit a plain field."""
Vector = Annotated[Array, shaped(1, "float64")]
Indices = Annotated[Array, shaped(1, "int64")]


def _describe(value: object) -> str:
    """Name a value's type and size, never the value: it may be a secret."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Message:
    """One arrow of a protocol's figure; subclasses are declared with `message`.

    Fields have the kinds of `FIELD_KINDS` and are checked when the message is built, from a peer's bytes or by our own
    code. So a role never sees an invalid message. A further rule on one field is in its type, ``Annotated[bytes,
    length(32)]``; `check` has rules between fields.

    Raises:
        PeerError: A field breaks a rule.
    """

    TAG: ClassVar[str] = ""
    KINDS: ClassVar[Mapping[str, Any]] = {}
    CHECKS: ClassVar[Mapping[str, Sequence[Callable[[Any], None]]]] = {}
    """The checks by field: that of its kind, and those in its type."""
    SHARES: ClassVar[frozenset[str]] = frozenset()
    """The plain fields whose bytes count as keys and shares, not as the message's content."""
    BESIDE_FROZEN: ClassVar[bool] = False
    """Whether `parameters` is a model without its frozen tensors (`moretta.protocols.common.frozen`)."""
    OWN: ClassVar[frozenset[str]] = frozenset()
    """The fields of an ask that differ between addressees; all others are the same for all."""

    stamp: Stamp

    def __post_init__(self) -> None:
        if not isinstance(self.stamp, Stamp):
            raise PeerError(f"{self.TAG}: expected a stamp; got {_describe(self.stamp)}")
        for name, checks in self.CHECKS.items():
            try:
                for check in checks:
                    check(getattr(self, name))
            except PeerError as error:
                raise PeerError(f"{self.TAG}, field `{name}`: {error}") from None
        self.check()

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` if well-typed fields contradict each other."""

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}: {_describe(getattr(self, name))}" for name in self.KINDS)
        return f"<{self.TAG} {self.stamp}; {fields}>"


M = TypeVar("M", bound=type[Message])


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=False)
def message(tag: str) -> Callable[[M], M]:
    """Declare a message with the tag that replaces its class name on the wire: ``@message("fedsgd/train-on")``."""

    def declare(cls: M) -> M:
        declared = dataclass(frozen=True, kw_only=True, eq=False, repr=False)(cls)
        hints = typing.get_type_hints(declared, include_extras=True)
        kinds, checks = dict[str, Any](), dict[str, Sequence[Callable[[Any], None]]]()
        for name in [field.name for field in dataclasses.fields(declared) if field.name != "stamp"]:
            hint = hints[name]
            kind, *more = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
            if kind not in FIELD_KINDS:
                raise TypeError(f"{cls.__name__}.{name}: {kind} is not a kind of field the codec knows")
            kinds[name], checks[name] = kind, (FIELD_KINDS[kind], *more)
        declared.TAG, declared.KINDS, declared.CHECKS = tag, kinds, checks
        return declared  # type: ignore[return-value]  # dataclass() returns its argument

    return declare


@message("spent")
class Spent(Message):
    """The silo has helped to open a sum of this round; it can repeat those answers, or take part in another take.

    Args:
        next_take: The first take that the silo has not spent. If `whole`, the take of the opened sum.
        survivors: The silos of the opened sum, sorted; empty if the silo no longer knows them.
        whole: Whether the silo uploads all its rows, the same in every take. Then it repeats only the same sum over the
            same survivors.
    """

    next_take: int
    survivors: tuple[str, ...]
    whole: bool

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` for an impossible take, or unsorted survivors."""
        least = 0 if self.whole else self.stamp.take + 1
        if not least <= self.next_take < 2**31 or list(self.survivors) != sorted(set(self.survivors)):
            raise PeerError(f"{self.TAG}: expected a take after this one, and survivors in order, each once")

    def __str__(self) -> str:
        over = f" over {len(self.survivors)} silos" if self.survivors else ""
        only = "only the same silos may repeat it" if self.whole else f"the next take is {self.next_take}"
        return f"it has helped to open a sum of this round{over} before; {only}"
