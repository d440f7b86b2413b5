"""A server's exchange played against silos in memory, every message through the codec as on a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from moretta.contract.codec import Codec
from moretta.contract.messages import Message, Spent, Stamp, message
from moretta.contract.roles import Aborted, Exchange, Missing, Reason, Replies
from moretta.errors import MorettaError, SumSpent
from moretta.secure_aggregation.agreement import RUN_DIGEST
from moretta.secure_aggregation.cohort import Cohort, Credentials, Origin, Rules
from moretta.secure_aggregation.identity import Identity, Roster
from moretta.secure_aggregation.keyed_sums import Aggregator
from moretta.secure_aggregation.keystream import SecretRoot
from moretta.secure_aggregation.masks import Label, label_of
from moretta.secure_aggregation.one_sum import HelpedSums
from moretta.secure_aggregation.pairwise import MaskedUpload
from moretta.secure_aggregation.schemes import MESSAGES, RULES, aggregator, contributor
from moretta.secure_aggregation.sums import Query, Sum, Wanted
from moretta.secure_aggregation.sums import query_of as about_of
from moretta.secure_aggregation.unmasking import DIGEST_BYTES, SEALED_BYTES, Confirmed, Unmask, pieces

NOW = Stamp("test", 1, 0)


@message("test/train")
class Train(Message):
    encoding: Mapping[str, int]


CODEC = Codec((*MESSAGES, Train, Spent))
ASKED = Query(bytes(32))
"""What an upload answers in tests where nobody asks."""
Answer = Callable[[Message], Any]
Seen = list[tuple[str, Message]]
"""What the server received, by silo, also what came too late or was refused."""


class Vanished(Exception):
    """The silo cannot be reached."""


@dataclass(frozen=True)
class Late:
    """An answer that reaches the server after the deadline."""

    message: Message


def play(
    exchange: Exchange[Any],
    silos: Mapping[str, Answer],
    seen: Seen | None = None,
    gone: dict[str, Missing] | None = None,
    *,
    codec: bool = True,
) -> Any:
    """Drive an exchange to its end as an engine does: who raises, or sends what was not asked for, is missing.

    silos: each returns a message, bytes in the place of one, or something `Late`. gone: is told who was missing.
    codec: pass messages through bytes.
    """
    replies = None
    while True:
        try:
            ask = exchange.send(replies)  # type: ignore[arg-type]
        except StopIteration as end:
            return end.value
        answers, missing = {}, {}
        for name, asked in ask.messages.items():
            answer = _answer(silos[name], asked, codec)
            if isinstance(answer, Missing):
                missing[name] = answer
                continue
            late, reply = (True, answer.message) if isinstance(answer, Late) else (False, answer)
            if seen is not None:
                seen.append((name, reply))
            try:
                if not isinstance(reply, ask.reply) or reply.stamp != asked.stamp:
                    raise MorettaError("another message, or of another time")
                ask.check(name, reply)
            except MorettaError as error:
                missing[name] = Missing(Reason.MALFORMED, str(error))
                continue
            if late:
                missing[name] = Missing(Reason.LATE, "it came too late")
            else:
                answers[name] = reply
        replies = Replies(answers, missing)
        if gone is not None:
            gone |= missing


def _answer(silo: Answer, asked: Message, codec: bool) -> Message | Late | Missing:
    try:
        data = silo(CODEC.decode(CODEC.encode(asked)) if codec else asked)
    except Vanished:
        return Missing(Reason.DISCONNECTED, "it cannot be reached")
    except SumSpent as spent:
        said = Spent(stamp=asked.stamp, next_take=spent.next_take, survivors=spent.survivors, whole=spent.whole)
        return Missing(Reason.SPENT, str(said), CODEC.decode(CODEC.encode(said)))
    except MorettaError as error:
        return Missing(Reason.REFUSED, str(error))
    if isinstance(data, Late) or not codec:
        return data
    try:
        return CODEC.decode(data if isinstance(data, bytes) else CODEC.encode(data))
    except MorettaError as error:
        return Missing(Reason.MALFORMED, str(error))


class Silo:
    """Answers with its contributor; `Train` with its tensors and weight."""

    def __init__(
        self,
        scheme: str,
        name: str,
        bits: int,
        tensors: Mapping[str, Any],
        weight: int = 1,
        *,
        rules: Rules = RULES,
        credentials: Credentials | None = None,
        insecure: SecretRoot | None = None,
        helped: HelpedSums | None = None,
    ) -> None:
        origin = Origin(credentials, insecure)
        self.contributor = contributor(scheme, name, bits, rules, origin=origin, helped=helped)
        self.tensors, self.weight = {key: np.asarray(value) for key, value in tensors.items()}, weight

    def __call__(self, asked: Message) -> Any:
        if isinstance(asked, Train):
            about = about_of(asked)
            return self.contributor.upload(asked.stamp, self.tensors, self.weight, asked.encoding, asked=about)
        return self.contributor.answer(asked)


def agreed(
    silos: Mapping[str, Answer], scheme: str = "pairwise", bits: int = 64, rules: Rules = RULES, now: Stamp = NOW
) -> Aggregator:
    """Return a server after a set-up that succeeded."""
    server = aggregator(scheme, bits, rules)
    assert play(server.setup(now, list(silos)), silos) is None
    return server


def whole_sum(
    silos: Mapping[str, Silo],
    scheme: str,
    bits: int = 64,
    limit: float = 100.0,
    replaced: Mapping[str, Answer] | None = None,
    seen: Seen | None = None,
    missing: dict[str, Missing] | None = None,
    rules: Rules = RULES,
) -> Sum | Aborted:
    """Set up the cohort, then sum its tensors. replaced: silos that answer `Train` in their own way."""
    server = agreed(silos, scheme, bits, rules)
    ways = {name: at_upload(way, silos[name]) for name, way in (replaced or {}).items()}
    return one_sum(server, silos, NOW, limit, ways, seen, missing)


def at_upload(way: Answer, silo: Answer) -> Answer:
    """Return a silo that answers `Train` in one way, all else in another."""
    return lambda asked: (way if isinstance(asked, Train) else silo)(asked)


def one_sum(
    server: Aggregator,
    silos: Mapping[str, Silo],
    now: Stamp,
    limit: float = 100.0,
    replaced: Mapping[str, Answer] | None = None,
    seen: Seen | None = None,
    missing: dict[str, Missing] | None = None,
    *,
    asked: Sequence[str] | None = None,
    whole: bool = False,
    codec: bool = True,
) -> Sum | Aborted:
    """Sum the tensors of a server's cohort. replaced: silos that answer in their own way from here on.

    asked: some silos only, each by a message of its own.
    """
    shapes = {name: value.shape for name, value in next(iter(silos.values())).tensors.items()}
    wanted = server.want(shapes, dict.fromkeys(shapes, limit), sum(silo.weight for silo in silos.values()))
    ask = Train(stamp=now, encoding=wanted.fraction_bits)
    asks = ask if asked is None else dict.fromkeys(asked, ask)
    return play(server.sum(asks, wanted, whole=whole), {**silos, **(replaced or {})}, seen, missing, codec=codec)


def label_in(now: Stamp, cohort: Cohort, wanted: Wanted) -> Label:
    """Return the label of the sum that `Train` asks for."""
    about = about_of(Train(stamp=now, encoding=wanted.fraction_bits))
    return label_of(now, cohort.digest, wanted.shapes, wanted.fraction_bits, about.digest)


def exact_means(silos: Mapping[str, Silo], among: Sequence[str], name: str, fraction_bits: int) -> np.ndarray:
    """Return what a sum must come to, bit for bit: whole numbers added up, and one division in float64."""
    weight = sum(silos[silo].weight for silo in among)
    rows = [_integers(silos[silo], name, fraction_bits) for silo in among]
    total = [sum(column) for column in zip(*rows, strict=True)]
    return np.ldexp(np.array(total, dtype=np.float64), -fraction_bits) / weight


def _integers(silo: Silo, name: str, fraction_bits: int) -> list[int]:
    products = (silo.tensors[name].astype(np.float64) * silo.weight).ravel().tolist()
    return [round(Fraction(2) ** fraction_bits * Fraction(product)) for product in products]


def unmask_of(
    holder: str, survivors: Sequence[str], uploads: Mapping[str, MaskedUpload], signed: Mapping[str, Confirmed] = {}
) -> Unmask:
    """What a server asks a silo in the end, in a complete graph. signed: whose signatures it shows."""
    shown = [share_of(uploads, maker, holder) for maker in survivors if maker != holder]
    return Unmask(
        stamp=uploads[holder].stamp,
        survivors=tuple(survivors),
        signatures={name: reply.signature for name, reply in signed.items()},
        sealed=b"".join(sealed for sealed, _ in shown),
        digests=b"".join(digest for _, digest in shown),
    )


def share_of(uploads: Mapping[str, MaskedUpload], maker: str, holder: str) -> tuple[bytes, bytes]:
    """A share that one silo sealed for another, and the digest of it, in a complete graph."""
    holders = sorted(uploads)
    others = [name for name in holders if name != maker]
    sealed = dict(zip(others, pieces(uploads[maker].sealed, SEALED_BYTES), strict=True))
    digests = dict(zip(holders, pieces(uploads[maker].digests, DIGEST_BYTES), strict=True))
    return sealed[holder], digests[holder]


def rostered(names: Sequence[str], **rules: Any) -> tuple[Rules, dict[str, Credentials], str]:
    """Return rules with a roster of fixed identities, each silo's credentials, and a run id that goes with them."""
    identities = {name: Identity(bytes([place]) * 32) for place, name in enumerate(names)}
    roster = Roster({name: identity.public_key for name, identity in identities.items()})
    credentials = {name: Credentials(identity, roster) for name, identity in identities.items()}
    return Rules(**rules, roster=roster), credentials, f"test.{roster.digest[:RUN_DIGEST]}"
