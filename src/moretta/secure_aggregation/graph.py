"""The graph of masks: all silos share masks with each other, or each silo with k neighbours (a k-regular graph).

**Theory** (Bell, Bonawitz, Gascón, Lepoint, Raykova, "Secure Single-Server Aggregation with (Poly)Logarithmic
Overhead", CCS 2020). n silos stand on a ring in random order; neighbours are at most k/2 steps apart (Harary's graph).
A silo's self-mask is shared among its m = k + 1 *members*, itself and its neighbours (all n in a complete graph), and
any t of them can restore it. C silos may be corrupt and collude with the server, D may drop out. As the order is
random, corrupt or dropped members follow the hypergeometric law. `plan` takes k and t that keep these chances small
over all silos:

    both   2^-40  a server that sends silos different survivors gets all masks of one silo, and so its upload, although
                  with a roster all survivors sign. An honest member gives its share of the self-mask or the mask
                  between them, never both. The silo itself gives masks with at most m - t members, as it insists on
                  t survivors. So c corrupt members are enough only where t <= (m - t) + c.
    split  2^-40  the server gets the sum of a part of the honest survivors. A part is separate only where k/2 places
                  on either side of it have no honest survivor. Its outermost silo then has at most k/2 + 1 honest
                  members, so at least t - 1 - k/2 corrupt ones must be among those places: twice, on disjoint arcs.
    retry  2^-20  more than m - t members drop out, so that a self-mask stays. It is less strict because no secret is
                  lost, only a round, which is tried again.

A sum over n silos bounds `both` and `retry`; `split` is below C(n, 2) P[one arc]^2, as counts on disjoint arcs of a
random permutation are negatively associated (Joag-Dev and Proschan 1983). From `both`, t > m / 2: of two disjoint sets
of members at most one reaches t.

Differs from the paper: there, `split` is bounded because dropouts are random. Here t bounds it, also against a server
that sees the graph and chooses the silos that it calls lost; k grows for it, by a tenth at 1000 silos, a third at 100.
It assumes that all silos that answer received the same survivors. All three assume that corrupt silos stand at random
places: `neighbourhoods` explains why they do, and the effect of repeated set-ups.

**The draw.** A sparse graph follows from random parts that silos commit to before they see keys::

    server                                     silo k
      AdvertiseCommitted             -->         fresh key pair, and 32 random bytes s_k
                                     <--       CommittedAdvert(public key, H(s_k), signature of both)
      CommittedKeys(all adverts)     -->         checks them
                                     <--       GraphPart(s_k), once for a key pair
      GraphParts(all s_j)            -->         checks each against its H(s_j); seeds with its neighbours
                                     <--       KeysAccepted(cohort digest)

The graph follows from the cohort's digest, which covers all names, keys and parts
(`moretta.secure_aggregation.cohort`). When silo k shows its part, the keys and commitments of its cohort are fixed, and
the part was random and secret. So the last to speak, server or silo, can choose nothing: the graph is a fair draw.

A party that dislikes the graph can still vanish, so that the set-up fails and another one begins: another draw. But
each draw takes a set-up of all honest silos. Their logs show it, as each silo shows one part at a stamp, and with a
roster the others' adverts are signed for that stamp. Without commitments, redrawing keys would need no other silo's
help. Without a roster keys are trusted, and a server that makes up silos needs no graph to read an upload.

Differs from the paper: there, the server draws the graph, or, against an active server, each silo draws neighbours of
its own once all have committed to their keys. Here all know one graph, to which every mask is bound.
"""

import hashlib
import hmac
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Annotated

from moretta.contract.messages import Digest, Digests, Message, Stamp, length, message
from moretta.errors import ParameterError, PeerError
from moretta.secure_aggregation.identity import Signature, Signatures, check_keys, check_public_key
from moretta.secure_aggregation.keystream import Keystream, derive, encode_purpose

PART_BYTES = 32


@message("secure-aggregation/advertise-committed")
class AdvertiseCommitted(Message):
    """Draw a fresh key pair and a part of the graph's seed; send the public key, and commit to the part."""


@message("secure-aggregation/committed-advert")
class CommittedAdvert(Message):
    """As `moretta.secure_aggregation.agreement.KeyAdvert`, with H(s_k), which the signature covers too."""

    public_key: Annotated[bytes, check_public_key]
    signature: Signature
    commitment: Digest


@message("secure-aggregation/committed-keys")
class CommittedKeys(Message):
    """The public keys of the whole cohort, their signatures and commitments, by silo."""

    keys: Mapping[str, bytes]
    signatures: Signatures
    commitments: Digests

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless two silos or more have valid, different keys, and commitments."""
        check_keys(self.keys, self.signatures)
        if set(self.commitments) != set(self.keys):
            raise PeerError("expected a commitment with each silo's key")


@message("secure-aggregation/graph-part")
class GraphPart(Message):
    """A silo's part of the graph's seed, 32 bytes."""

    part: Annotated[bytes, length(PART_BYTES)]


@message("secure-aggregation/graph-parts")
class GraphParts(Message):
    """All parts, by silo."""

    parts: Annotated[Mapping[str, bytes], length(PART_BYTES)]


MESSAGES = (AdvertiseCommitted, CommittedAdvert, CommittedKeys, GraphPart, GraphParts)


def commitment(setup: Stamp, silo: str, part: bytes) -> bytes:
    """Return H(s_k), SHA-256 of the set-up, the silo's name and its part, whose 32 random bytes hide it."""
    purpose = "graph commitment", setup.run, setup.round, setup.attempt, setup.take, silo, part
    return hashlib.sha256(encode_purpose(*purpose)).digest()


def check_part(setup: Stamp, silo: str, part: bytes, committed: bytes) -> None:
    """Raise `moretta.errors.PeerError` unless a part is the one that its silo committed to."""
    if not hmac.compare_digest(commitment(setup, silo, part), committed):
        raise PeerError(f"the part of `{silo}` in the graph's seed is not the one it was committed to")


def check_parts(setup: Stamp, parts: Mapping[str, bytes], commitments: Mapping[str, bytes]) -> None:
    """Raise `moretta.errors.PeerError` unless each silo's part is present, and is the one committed to."""
    if set(parts) != set(commitments):
        raise PeerError("expected the part in the graph's seed of each silo that has committed itself, and no other")
    for silo, part in parts.items():
        check_part(setup, silo, part, commitments[silo])


COMPLETE_TO = 50  # silos, unless a degree is set
CORRUPT_RATE = DROPOUT_RATE = 0.1
SECRECY_BITS, RETRY_BITS = 40, 20


def neighbourhoods(names: Iterable[str], degree: int | None, seed: bytes) -> dict[str, frozenset[str]]:
    """Return each silo's neighbours, without itself; the same for every order of the names.

    Every party computes the graph, so the server cannot dictate it. The last to speak cannot choose it either, as the
    parts of its seed are committed to before keys are seen (`moretta.secure_aggregation.graph`). A server can make a
    set-up fail and begin another, also without some silos: G set-ups raise the chances of `both` and `split` at most
    G-fold, from 2^-40. Each takes all honest silos' time and is in their logs, so G stays small.

    Args:
        names: All different.
        degree: Of a plan; None, or at least the number of other silos, for the complete graph.
        seed: 32 public bytes that no party chose, the digest of the cohort's names, fresh keys and parts of its seed.
    """
    ordered = sorted(names)
    count = len(ordered)
    if degree is None or degree >= count - 1:
        everyone = frozenset(ordered)
        return {name: everyone - {name} for name in ordered}
    ring = [ordered[place] for place in Keystream(derive(seed, "graph")).permutation(count).tolist()]
    steps = [step for far in range(1, degree // 2 + 1) for step in (far, -far)]
    return {name: frozenset(ring[(place + step) % count] for step in steps) for place, name in enumerate(ring)}


def connected(neighbourhoods: Mapping[str, Collection[str]], among: Collection[str]) -> bool:
    """Return whether the silos `among` are connected by edges between them; zero or one silo is."""
    unseen = set(among)
    at_edge = {unseen.pop()} if unseen else set()
    while at_edge:
        reached = unseen.intersection(neighbourhoods[at_edge.pop()])
        unseen -= reached
        at_edge |= reached
    return not unseen


@dataclass(frozen=True)
class Plan:
    """degree: k, None for the complete graph. threshold: t, the members of k + 1 (or of all silos) that reconstruct."""

    degree: int | None
    threshold: int


def plan(
    silos: int,
    corrupt_rate: float = CORRUPT_RATE,
    dropout_rate: float = DROPOUT_RATE,
    degree: int | None = None,
    threshold: int | None = None,
) -> Plan:
    """Return degree and threshold for a cohort.

    Args:
        silos: n >= 2.
        corrupt_rate, dropout_rate: In [0, 1); C and D are these fractions of n, rounded up.
        degree, threshold: None for automatic ones. Up to 50 silos that is the complete graph and t = floor(2 m / 3) +
            1, for all rates: with a roster it withstands 2 t - n - 1 corrupt silos, and n - t dropouts. Above 50 it is
            the smallest k that meets the bounds, with the largest t that keeps `retry` low, or the complete graph where
            no k does. With a degree but no threshold, t is floor(2 m / 3) + 1. Set values are checked for range only.

    Raises:
        ParameterError: An argument is out of its range; the message has the possible values.

    >>> plan(10)
    Plan(degree=None, threshold=7)
    >>> plan(1000).degree < 999
    True
    """
    if silos < 2:
        raise ParameterError(f"expected at least 2 silos, got {silos}; one alone has nobody to hide among")
    corrupt, dropped = _part(silos, corrupt_rate, "corrupt"), _part(silos, dropout_rate, "dropout")
    if degree is not None:
        if degree % 2 or not 2 <= degree < silos:
            raise ParameterError(
                f"degree = {degree}: expected an even number from 2 to {silos - 1} for {silos} silos, half of them on "
                "either side on a ring; leave it out for the complete graph"
            )
        chosen = Plan(degree if degree < silos - 1 else None, 2 * (degree + 1) // 3 + 1)
    elif silos <= COMPLETE_TO:
        chosen = Plan(None, 2 * silos // 3 + 1)
    else:
        chosen = _search(silos, corrupt, dropped)
    if threshold is None:
        return chosen
    members = _members(silos, chosen.degree)
    if not members < 2 * threshold <= 2 * members:
        raise ParameterError(
            f"threshold = {threshold}: expected from {members // 2 + 1} to {members}, a majority of a silo's {members} "
            "members (itself and its neighbours), so that no two disjoint sets of them can both reconstruct"
        )
    return Plan(chosen.degree, threshold)


def tail(population: int, marked: int, drawn: int, least: int) -> Fraction:
    """Return the exact chance of at least `least` marked among `drawn` of a population: hypergeometric."""
    ways = (ways for x, ways in _ways(population, marked, drawn) if x >= least)
    return Fraction(sum(ways), math.comb(population, drawn))


def _ways(population: int, marked: int, drawn: int) -> Iterator[tuple[int, int]]:
    """Yield x and the number of draws with x marked, from the largest x down to 0."""
    x = min(marked, drawn)
    ways = math.comb(marked, x) * math.comb(population - marked, drawn - x)
    while x >= 0:
        yield x, ways
        # Both binomials change by small factors; the quotient is a whole number, 0 where no draw has x marked.
        ways = ways * x * (population - marked - drawn + x) // ((marked - x + 1) * (drawn - x + 1))
        x -= 1


def _most(population: int, marked: int, drawn: int, bits: int) -> int:
    """Return the smallest x with population * P[more than x marked among the drawn] <= 2^-bits."""
    above, allowed = 0, math.comb(population, drawn) // (population << bits)
    for x, ways in _ways(population, marked, drawn):
        above += ways
        if above > allowed:
            return x
    return 0


def _split(silos: int, corrupt: int, degree: int, threshold: int) -> Fraction:
    return math.comb(silos, 2) * tail(silos, corrupt, degree // 2, threshold - 1 - degree // 2) ** 2


@lru_cache(maxsize=256)
def _search(silos: int, corrupt: int, dropped: int) -> Plan:
    def largest_threshold(degree: int) -> int:
        return degree + 1 - _most(silos, dropped, degree + 1, RETRY_BITS)

    def suffices(degree: int) -> bool:
        t = largest_threshold(degree)
        if 2 * t <= degree + 1 + _most(silos, corrupt, degree + 1, SECRECY_BITS):
            return False
        return _split(silos, corrupt, degree, t) <= Fraction(1, 2**SECRECY_BITS)

    degrees = range(2, silos - 1, 2)
    index = bisect_left(degrees, True, key=suffices)
    if index < len(degrees):
        # Rounding makes the bounds not quite monotone in k: a few smaller k may meet them where the next does not.
        best = next(degree for degree in degrees[max(index - 4, 0) :] if suffices(degree))
        return Plan(best, largest_threshold(best))
    if 2 * (silos - dropped) > silos + corrupt:
        return Plan(None, silos - dropped)
    most = max((silos - corrupt - 1) // 2, 0)
    raise ParameterError(
        f"with {corrupt} of {silos} silos corrupt at most {most} may drop out, got {dropped}: survivors must outnumber "
        "half of all silos and of the corrupt ones; lower one of the rates"
    )


def _members(silos: int, degree: int | None) -> int:
    return silos if degree is None else degree + 1


def _part(silos: int, rate: float, what: str) -> int:
    if not 0 <= rate < 1:
        raise ParameterError(f"{what} rate = {rate}: expected a part of the silos, from 0 to below 1")
    return math.ceil(round(silos * rate, 9))  # 0.07 * 100 is a little above 7 in float64
