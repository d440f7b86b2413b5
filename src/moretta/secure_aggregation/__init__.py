"""Secure aggregation: the server learns what a cohort's silos sum to, and no silo's own numbers.

**Theory** (Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017,
section 4). Silo k holds tensors x_k and a weight N_k. It rounds 2^f N_k x_k to integers of the ring Z_2^b
(`moretta.secure_aggregation.ring`). Every two silos agree on a secret seed by X25519
(`moretta.secure_aggregation.agreement`) and expand it to a mask; the one whose name sorts first adds the mask, the
other subtracts it (`moretta.secure_aggregation.pairwise`)::

    y_k = 2^f N_k x_k + sum_{j > k} mask(k, j) - sum_{j < k} mask(j, k)   mod 2^b

Each y_k alone is uniform in the ring; in their sum all masks cancel, exactly and in any order. N_k travels in the
same upload, masked alike, so the server divides by N = sum N_k without having seen any N_k.

    server                              silo k
      AdvertiseKey              -->       draws a key pair
                                <--     KeyAdvert(public key)
      PeerKeys(all public keys) -->       agrees on a seed with every peer
                                <--     KeysAccepted
      a protocol's own ask      -->       computes x_k, N_k
                                <--     MaskedUpload(y_k)         sum -> means, N

**Threat model.** Server and silos are honest but curious: they follow the protocol and look at what they see. The
server and up to K - 2 silos together learn the sum over the others and nothing else of them. Revealed to the server:
the sum, the total weight N, which silos took part and when, the lengths of messages, and the sentence of a silo that
refuses (for a value out of range that names the value's magnitude). A silo sees the others' names and public keys.
What an *active* server could do until silos hold identities: hand each silo keys of its own making and so read every
upload; or leave all but one silo out. A silo that lies about its numbers is not caught here. Every silo of a cohort
must answer: when one is missing, the sum is aborted and begins again, with fresh keys, without it.

**Numbers.** Means carry a fixed-point error of at most K / (2 * 2^f N), stated by `Sum.steps`, beside float64's own
rounding. No sum can wrap: a value outside its range is refused before it is masked.

The scheme ``none`` (`moretta.secure_aggregation.plain`) has the same faces without the masks: the server sees
everything, and a single silo is allowed.
"""

from moretta.errors import ParameterError
from moretta.keystream import SecretRoot
from moretta.secure_aggregation import agreement, pairwise, plain, statistics
from moretta.secure_aggregation.pairwise import PairwiseAggregator, PairwiseContributor
from moretta.secure_aggregation.plain import PlainAggregator, PlainContributor
from moretta.secure_aggregation.ring import Ring
from moretta.secure_aggregation.statistics import Moments, answer_moments, moments
from moretta.secure_aggregation.sums import Aggregator, Contributor, Sum, Wanted

MESSAGES = (*agreement.MESSAGES, *pairwise.MESSAGES, *plain.MESSAGES, *statistics.MESSAGES)
"""The messages of this room, part of every protocol's schema."""

SCHEMES = ("pairwise", "none")

__all__ = [
    "MESSAGES",
    "SCHEMES",
    "Aggregator",
    "Contributor",
    "Moments",
    "Sum",
    "Wanted",
    "aggregator",
    "answer_moments",
    "contributor",
    "moments",
]


def aggregator(scheme: str, ring_bits: int = 64) -> Aggregator:
    """Return the server's half of a scheme. Raises `moretta.errors.ParameterError` for one that is not there.

    ring_bits: 32 or 64, the b of Z_2^b; without meaning for the scheme ``none``.
    """
    match scheme:
        case "pairwise":
            return PairwiseAggregator(Ring(ring_bits))
        case "none":
            return PlainAggregator()
    raise _unknown(scheme)


def contributor(
    scheme: str, name: str, ring_bits: int = 64, *, insecure: SecretRoot | None = None, session: int = 0
) -> Contributor:
    """Return the half of the silo `name`. Raises `moretta.errors.ParameterError` for a scheme that is not there.

    insecure: for tests only, a root from which key pairs follow; None draws them from the operating system.
    session: how often the run was resumed, so that even then no key is used twice.
    """
    match scheme:
        case "pairwise":
            return PairwiseContributor(name, Ring(ring_bits), insecure, session)
        case "none":
            return PlainContributor()
    raise _unknown(scheme)


def _unknown(scheme: str) -> ParameterError:
    return ParameterError(f'scheme = "{scheme}" is not there; expected one of {", ".join(SCHEMES)}')
