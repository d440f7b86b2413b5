"""The schemes by their names, and both halves of each; `moretta.secure_aggregation` has the theory and threat model."""

from moretta.errors import ParameterError
from moretta.secure_aggregation import additive, agreement, pairwise, plain, statistics, unmasking
from moretta.secure_aggregation.additive import ADDITIVE
from moretta.secure_aggregation.cohort import Origin, Rules
from moretta.secure_aggregation.encoding import Ring
from moretta.secure_aggregation.keyed_sums import Aggregator, Contributor, KeyedAggregator, KeyedContributor, Scheme
from moretta.secure_aggregation.one_sum import HelpedSums
from moretta.secure_aggregation.pairwise import PAIRWISE
from moretta.secure_aggregation.plain import PlainAggregator, PlainContributor

MESSAGES = (
    *agreement.MESSAGES,
    *pairwise.MESSAGES,
    *unmasking.MESSAGES,
    *additive.MESSAGES,
    *plain.MESSAGES,
    *statistics.MESSAGES,
)
"""The messages of this room, part of every protocol's schema."""


SCHEMES = ("pairwise", "additive-shares", "none")
RULES, ORIGIN = Rules(), Origin()


def aggregator(scheme: str, ring_bits: int = 64, rules: Rules = RULES) -> Aggregator:
    """Return the server's half of a scheme. ring_bits: b, 32 or 64. Raises ParameterError for an unknown scheme."""
    if scheme == "none":
        return PlainAggregator(rules.min_survivors)
    return KeyedAggregator(_keyed(scheme), Ring(ring_bits), rules)


def contributor(
    scheme: str,
    name: str,
    ring_bits: int = 64,
    rules: Rules = RULES,
    *,
    origin: Origin = ORIGIN,
    helped: HelpedSums | None = None,
    run: str = "",
) -> Contributor:
    """Return the half of the silo `name`.

    Args:
        helped: The sums that the silo has helped to open (`moretta.secure_aggregation.one_sum`), kept by the caller;
            None begins empty, for this object.
        run: The id of the run, as in stamps; empty for any.

    Raises:
        ParameterError: The scheme is unknown.
    """
    if scheme == "none":
        return PlainContributor(run)
    helped = HelpedSums() if helped is None else helped
    return KeyedContributor(_keyed(scheme), name, Ring(ring_bits), rules, origin, helped, run)


def _keyed(name: str) -> Scheme:
    for scheme in (PAIRWISE, ADDITIVE):
        if scheme.name == name:
            return scheme
    raise ParameterError(f'scheme = "{name}" is unknown; expected one of {", ".join(SCHEMES)}')
