"""Untrained parameters, which travel once and are then identified by their digest.

    server -> silo   AskFrozen    the digest of the run's untrained tensors
    silo -> server   HoldsFrozen  whether it has them
    server -> silo   TakeFrozen   the tensors themselves, to silos without them
    silo -> server   HoldsFrozen

They end each set-up of a protocol whose server sends its model, if some parameters are untrained. A restarted silo has
none, and receives them in the set-up that its new keys need. Later the server sends only the other tensors, and a silo
adds its own. The digest is among what a set-up agrees on, so all uploads of one sum share a base. A silo takes tensors
only with the names, shapes and dtypes of its own model and the announced digest, and trains only on those announced
last.
"""

from collections.abc import Mapping, Sequence

from moretta.contract.messages import Digest, Message, Stamp, Tensors, message
from moretta.contract.roles import Aborted, Ask, Exchange
from moretta.errors import PeerError
from moretta.secure_aggregation.keystream import digest_of


@message("frozen/ask")
class AskFrozen(Message):
    """Report whether you hold the tensors with this digest (`moretta.secure_aggregation.keystream.digest_of`)."""

    digest: Digest


@message("frozen/take")
class TakeFrozen(Message):
    """The tensors with the announced digest."""

    tensors: Tensors


@message("frozen/holds")
class HoldsFrozen(Message):
    """Whether the silo holds them."""

    held: bool


MESSAGES = (AskFrozen, TakeFrozen, HoldsFrozen)


def brought(now: Stamp, cohort: Sequence[str], tensors: Tensors, digest: bytes) -> Exchange[Aborted | None]:
    """Send the frozen tensors to the silos of a cohort without them."""

    def check(silo: str, holds: HoldsFrozen) -> None:
        if not holds.held:
            raise PeerError("expected the silo to hold the frozen tensors that it was just sent")

    replies = yield Ask.all(cohort, AskFrozen(stamp=now, digest=digest), HoldsFrozen)
    lacking = [silo for silo, holds in replies.answers.items() if not holds.held]
    if lacking and not replies.missing:
        replies = yield Ask.all(lacking, TakeFrozen(stamp=now, tensors=tensors), HoldsFrozen, check)
    return Aborted(replies.missing) if replies.missing else None


class Frozen:
    """A silo's frozen tensors. kinds: shape and dtype of each in its own model, by name; empty for none."""

    def __init__(self, kinds: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        self._kinds, self._named = kinds, b""
        self._held: Tensors = {}
        self._digest = b""

    @property
    def agreed(self) -> Sequence[bytes]:
        """The digest announced last, as part of the set-up's agreement; empty if all parameters are trained."""
        return (self._named,) if self._kinds else ()

    def answer(self, message: Message) -> Message | None:
        """Answer a message about frozen tensors; None for others. Raises `moretta.errors.PeerError` for wrong ones."""
        if not isinstance(message, AskFrozen | TakeFrozen):
            return None
        if not self._kinds:
            raise PeerError("was asked about frozen tensors, and this silo trains all of its model")
        if isinstance(message, AskFrozen):
            self._named = message.digest
        else:
            self._take(message.tensors)
        return HoldsFrozen(stamp=message.stamp, held=self._digest == self._named)

    def _take(self, tensors: Tensors) -> None:
        if {name: (tensor.shape, tensor.dtype.name) for name, tensor in tensors.items()} != self._kinds:
            raise PeerError(f"expected the {len(self._kinds)} frozen tensors of the silo's model, with their shapes")
        if not self._named or digest_of(tensors) != self._named:
            raise PeerError("expected the frozen tensors whose digest was named before, got others")
        self._held, self._digest = tensors, self._named

    def beside(self, tensors: Tensors) -> Tensors:
        """Return a model's other tensors with these. Raises `moretta.errors.PeerError` without them."""
        if not self._kinds:
            return tensors
        if not self._digest or self._digest != self._named:
            raise PeerError(
                "the server names frozen tensors that this silo was never sent; expected them before the first round"
            )
        if double := sorted(set(tensors) & set(self._kinds)):
            raise PeerError(f"`{double[0]}` is frozen: expected it once, before the first round, and not with a model")
        return {**tensors, **self._held}
