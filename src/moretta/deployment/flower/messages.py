"""Messages between server and sites besides the secure sum's own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

from moretta.contract.codec import Codec
from moretta.contract.messages import Message, Spent, message, within
from moretta.errors import PeerError
from moretta.secure_aggregation.cohort import Rules
from moretta.secure_aggregation.identity import is_silo_name
from moretta.secure_aggregation.schemes import MESSAGES as SUM_MESSAGES
from moretta.secure_aggregation.secure_sum import AskSum
from moretta.secure_aggregation.sums import message_digest

SLOTS = 64  # numbers of metrics that a site may upload; the names travel with the upload, so the server plans for all
ARRAY, METRICS = "array/", "metrics"  # the tensors of a sum: one for each of the app's arrays, and one for all metrics


def check_name(name: str) -> None:
    """Raise `moretta.errors.PeerError` unless a silo may have this name."""
    if not is_silo_name(name):
        raise PeerError(f"expected a silo's name, got {name!r:.80}")


@message("flower/ask-name")
class AskName(Message):
    """Ask for the silo's name."""


@message("flower/silo-name")
class SiloName(Message):
    """The name of the silo that answers at this node."""

    name: Annotated[str, check_name]


@message("flower/terms")
class SumTerms(Message):
    """The terms of this run's sums, the same for all silos.

    Args:
        settings: [secure-aggregation], as TOML.
        silos: of the run, in its order.
        count, seed: the number of silos in a round, and the seed that chooses them.
        most_weight: a bound of all silos' examples together.
        weighted_by: the metric that counts a silo's examples.

    Their digest is in every mask's label, so silos with other terms do not add up. Otherwise a server could name
    another metric to one silo, whose weight would exceed all others'.
    """

    settings: str
    silos: tuple[str, ...]
    count: Annotated[int, within(2)]
    seed: Annotated[int, within(0)]
    most_weight: Annotated[int, within(1)]
    weighted_by: str

    def bound_to(self, rules: Rules) -> Rules:
        """Return the rules of a sum under these terms."""
        return replace(rules, settings=message_digest(self).hex())


@message("flower/upload-names")
class UploadNames(Message):
    """The metrics of an upload, in the order of their names. metrics: the length of each list; 0 for a number."""

    metrics: Mapping[str, int]

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` for more numbers than an upload has room for."""
        if min(self.metrics.values(), default=0) < 0 or self.slots > SLOTS:
            raise PeerError(f"expected metrics of up to {SLOTS} numbers together, got {self.slots}")

    @property
    def slots(self) -> int:
        """The count of numbers in all metrics."""
        return sum(width or 1 for width in self.metrics.values())


MESSAGES = (AskName, SiloName, SumTerms, UploadNames)
CODEC = Codec((*SUM_MESSAGES, AskSum, Spent, *MESSAGES))
