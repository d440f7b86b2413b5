"""The input and result of a secure sum of any scheme, the query of an upload, and the silos that are left out.

**The query** that a silo answers by its upload (`Query`) has a digest, which must be the same for all silos of a sum.
It is SHA-256 over the request, as decoded, without its stamp and the addressee's own fields (`Message.OWN`), and over
earlier agreements: at the set-up, or under cross-entropy in the message before it. The digest is used three times. In
every mask's label, it keeps uploads to different questions from adding up. Beside the upload, it names a difference
before anything is opened. In the label, it stands under the survivors' signatures. It does not detect one question that
is crafted for all silos alike.

The answer's encoding is part of it. If the server chose the rounding steps, sums of the same numbers under different
steps could reveal single ones. So the encoding follows from the number of silos in a round, not from the number
present.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array, Message, Stamp, Tensors
from moretta.contract.roles import Aborted, Ask, Exchange, Missing, Reason, Replies
from moretta.errors import MisuseError, ParameterError, PeerError
from moretta.secure_aggregation.keystream import encode_parts, encode_purpose
from moretta.secure_aggregation.removable_noise import Noise

Shapes = Mapping[str, tuple[int, ...]]
Asks = Message | Mapping[str, Message]
"""One message for all silos, or one for each."""


@dataclass(frozen=True)
class Wanted:
    """The plan of a sum; made by `Aggregator.want`.

    Args:
        fraction_bits: How each tensor is encoded. It travels unchanged as the field ``encoding: Mapping[str, int]`` of
            the message that asks. A scheme may add entries of its own; the scheme ``none`` has no entries.
        most_weight: An upper bound of N, the weight of all silos together.
        noise: The silos' noise that remains; the excess is removed.
    """

    shapes: Shapes
    fraction_bits: Mapping[str, int]
    most_weight: int
    noise: Noise | None = None  # to remain of silos' noise; the excess is removed


@dataclass(frozen=True)
class Sum:
    """The result of a sum.

    Args:
        means: sum_k N_k x_k / N by tensor, float64, in the original shapes.
        weight: N = sum_k N_k.
        steps: By tensor, the bound K / (2 * 2^f N) of the absolute error that fixed point adds to a mean of K silos;
            0.0 in the scheme ``none``.
        silos: The K silos in it, sorted.
        excess: Those whose surplus noise could not be removed.
    """

    means: Mapping[str, NDArray[np.float64]]
    weight: int
    steps: Mapping[str, float]
    silos: Sequence[str]
    excess: Sequence[str] = ()


@dataclass(frozen=True)
class Relayed:
    """A sum that its members read, not the aggregator that adds it up; made by `Aggregator.relay`.

    Args:
        tensors: By name, ring elements in the tensors' shapes, blinded like the uploads; under ``none`` the means.
        weight: Of all silos together, likewise.
        silos: The silos in the sum, sorted.
        excess: As in `Sum`.
    """

    tensors: Tensors
    weight: Array
    silos: Sequence[str]
    excess: Sequence[str] = ()


def gather(
    cohort: Sequence[str],
    ask: Asks,
    upload: type[Message],
    check: Callable[[str, Any], None],
    request: Wanted,
    expected: bytes | None,
) -> Exchange[tuple[Replies, bytes] | Aborted]:
    """Ask for uploads of one kind; return them, and the digest of their common query.

    Silos that were not asked, or whose upload answers another query, count as missing too. Aborts if a silo has helped
    to open another sum of the round.

    Raises:
        MisuseError: The cohort is empty, or a message is for another silo or has another encoding than the request.
    """
    if not cohort:
        raise MisuseError("a sum was asked for without a set-up; expected `setup` to have succeeded")
    asks = ask if isinstance(ask, Mapping) else dict.fromkeys(cohort, ask)
    if not asks or not set(asks) <= set(cohort):
        raise MisuseError(f"expected messages for silos of {sorted(cohort)!r:.200}, got {sorted(asks)!r:.200}")
    for message in asks.values():
        if getattr(message, "encoding", None) != request.fraction_bits:
            raise MisuseError(f"`{message.TAG}` does not carry the encoding of the sum it asks for")

    def check_all(silo: str, reply: Any) -> None:
        check(silo, reply)
        if expected is not None and reply.asked != expected:
            raise PeerError(_OTHERWISE.detail)

    replies = yield Ask(asks, upload, check_all)
    if spent := spent_of(replies):
        return Aborted(spent)
    missing = {silo: _EARLIER for silo in cohort if silo not in asks} | dict(replies.missing)
    digests = Counter(reply.asked for reply in replies.answers.values())
    most = max(digests, key=lambda digest: (digests[digest], digest), default=b"")
    digest = most if expected is None else expected
    others = {silo: _OTHERWISE for silo, reply in replies.answers.items() if reply.asked != digest}
    answers = {silo: reply for silo, reply in replies.answers.items() if silo not in others}
    return Replies(answers, missing | others, replies.empty), digest


_EARLIER = Missing(Reason.DISCONNECTED, "it was missing before and was not asked again")
_OTHERWISE = Missing(
    Reason.MALFORMED, "what it was asked, or agreed on before, is not what the others were: its upload answers that"
)


def again(ask: Ask, replies: Replies) -> Exchange[Replies]:
    """Ask silent silos once more; return all replies. Silos are bound to this sum, so no others can replace them."""
    silent = [silo for silo, why in replies.missing.items() if why.reason in (Reason.LATE, Reason.DISCONNECTED)]
    if not silent:
        return replies
    more = yield Ask({silo: ask.messages[silo] for silo in silent}, ask.reply, ask.check)
    missing = {silo: why for silo, why in replies.missing.items() if silo not in more.answers}
    return Replies({**replies.answers, **more.answers}, {**missing, **more.missing}, replies.empty)


def spent_of(replies: Replies) -> dict[str, Missing]:
    """Return the silos that have helped to open another sum of the round."""
    return {silo: why for silo, why in replies.missing.items() if why.reason is Reason.SPENT}


def to_leave_out(unopened: Mapping[str, Collection[str]]) -> dict[str, Missing]:
    """Return the silos to leave out, so that all shares between the others opened.

    In each pair of a holder and a maker, one of them or the server is at fault. The silo in most pairs is first: two
    honest silos are in no pair together, so a single silo at fault is in all of them. Where pairs are even, it is a
    maker.

    Args:
        unopened: By holder, the makers of shares that did not open there.
    """
    pairs = {(holder, maker) for holder, makers in unopened.items() for maker in makers}
    left_out = dict[str, Missing]()
    while pairs:
        counts, makers = Counter(name for pair in pairs for name in pair), {maker for _, maker in pairs}
        worst = min(counts, key=lambda name: (-counts[name], name not in makers, name))
        mine = {pair for pair in pairs if worst in pair}
        others = sorted({name for pair in mine for name in pair} - {worst})
        left_out[worst] = Missing(
            Reason.MALFORMED,
            f"a share sealed between it and {others!r:.200} did not open; it is left out, though nobody can tell "
            "who of them is at fault",
        )
        pairs -= mine
    return left_out


def stamp_of(ask: Asks) -> Stamp:
    """Return the stamp of a sum's asks, the same for all silos."""
    return next(iter(ask.values())).stamp if isinstance(ask, Mapping) else ask.stamp


def check_tensors(shapes: Shapes, tensors: Tensors) -> None:
    """Raise `moretta.errors.PeerError` unless the tensors have exactly these names and shapes."""
    if set(tensors) != set(shapes):
        different = sorted(set(tensors) ^ set(shapes))
        raise PeerError(f"expected the {len(shapes)} tensors asked for; {different!r:.200} differ")
    for name, shape in shapes.items():
        if tensors[name].shape != tuple(shape):
            raise PeerError(f"`{name}`: expected shape {list(shape)}, got {list(tensors[name].shape)}")


def check_limits(shapes: Shapes, limits: Mapping[str, float], most_weight: int) -> None:
    """Raise `moretta.errors.MisuseError` for an empty or impossible plan of a sum."""
    if not shapes or set(shapes) != set(limits):
        raise MisuseError(f"expected one limit for each of {len(shapes)} tensors, got {len(limits)}; at least one")
    if most_weight < 1:
        raise MisuseError(f"expected an upper bound of the weight of at least 1, got {most_weight}")


def check_weight(weight: int) -> None:
    """Raise `moretta.errors.ParameterError` unless the silo's weight is a whole number of at least 1.

    A silo of weight 0 would reveal that it adds nothing; it should not take part.
    """
    if type(weight) is not int or weight < 1:
        raise ParameterError(f"expected a silo's weight to be a whole number of at least 1, got {weight!r:.40}")


def check_cohort(cohort: Sequence[str]) -> None:
    """Raise `moretta.errors.MisuseError` unless the names are all different, and at least one."""
    if not cohort or len(set(cohort)) != len(cohort):
        raise MisuseError(f"expected a cohort of different names, got {list(cohort)!r:.200}")


def as_summed(mean: Array, dtype: np.dtype[Any]) -> Array:
    """Return a mean in the dtype of the summed arrays; for whole numbers the nearest one."""
    return np.asarray(np.rint(mean) if dtype.kind in "iu" else mean).astype(dtype)


def as_real(name: str, values: Array) -> Array:
    """Return a tensor as an array of real numbers. Raises `moretta.errors.MisuseError` for anything else."""
    array = np.asarray(values)
    if array.dtype.kind not in "fiu":
        raise MisuseError(f"`{name}`: expected real numbers, got {array.dtype}")
    return array


STATISTICS = "statistics"  # beside it stands each of them: two sets would reveal the numbers of their difference


@dataclass(frozen=True)
class Query:
    """The query that an upload answers.

    Args:
        digest: 32 bytes.
        once: The name of a sum that is taken once a run; empty for the upload of a round.
        whole: Whether the upload is of the same rows in every take of the round.
        lasting: Whether it depends on rows alone, and so is the same in every run.
        beside: The name of another sum of the same rows, which must be over the same silos in this run, or for
            `STATISTICS` in every run.
        own: A digest of the content that this silo alone received and its upload depends on; empty without such
            content, or while it is unknown. It differs between silos, so no label has it; the silo records it.
    """

    digest: bytes
    once: str = ""
    whole: bool = False
    lasting: bool = False
    beside: str = ""
    own: bytes = b""


def query_of(
    message: Message, *agreed: bytes, once: str = "", whole: bool = False, lasting: bool = False, beside: str = ""
) -> Query:
    """Return the query of an upload that answers this message. agreed: digests of earlier agreements."""
    digest = hashlib.sha256(encode_purpose("asked", message_digest(message), *agreed)).digest()
    return Query(digest, once, whole, lasting, beside)


def same(first: Message, other: Message) -> bool:
    """Return whether a message repeats another, word for word."""
    return first.stamp == other.stamp and message_digest(first) == message_digest(other)


def message_digest(message: Message) -> bytes:
    """Return SHA-256, cached, of a message's tag and fields, without stamp and addressee's own fields."""
    known: bytes | None = getattr(message, "_digest", None)
    if known is None:
        digest = hashlib.sha256(encode_purpose("message", message.TAG))
        for name in sorted(set(message.KINDS) - message.OWN):
            digest.update(encode_parts(name))
            _add(digest, getattr(message, name))
        known = digest.digest()
        object.__setattr__(message, "_digest", known)  # the message is frozen, so its digest never changes
    return known


def _add(digest: hashlib._Hash, value: Any) -> None:
    """Add a field's value: a prefix for its kind, then lengths before contents."""
    match value:
        case np.ndarray():
            little = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
            digest.update(encode_parts("array", little.dtype.str, str(value.shape)))
            digest.update(little.reshape(-1).view(np.uint8).data)
        case Mapping():
            digest.update(encode_parts("mapping", len(value)))
            for name in sorted(value):
                digest.update(encode_parts(name))
                _add(digest, value[name])
        case tuple():
            digest.update(encode_parts("names", len(value), *value))
        case float():
            digest.update(encode_parts("number", value.hex()))
        case _:  # a whole number, a boolean, text or bytes
            digest.update(encode_parts("plain", value))
