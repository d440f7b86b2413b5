"""Sums under keys: both halves, at a silo and at the server, of the schemes that hide the summands.

The set-up is that of `moretta.secure_aggregation.agreement`. A silo checks the request, encodes its part of the sum and
labels it, and the scheme hides that. The server asks for uploads, and the scheme adds them up. The difference between
masks (`moretta.secure_aggregation.pairwise`) and additive shares (`moretta.secure_aggregation.additive`) is one value,
a `Scheme`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from moretta.contract.messages import Array, Message, Stamp, Tensors
from moretta.contract.roles import Aborted, Exchange, Replies
from moretta.errors import MisuseError
from moretta.secure_aggregation.agreement import AdvertiseKey, Agreement, SetUp, agree_on_keys
from moretta.secure_aggregation.cohort import Cohort, Origin, Rules
from moretta.secure_aggregation.encoding import Range, Ring, Words, decode, encode, plan, shapes_of
from moretta.secure_aggregation.masks import (
    TAG,
    Label,
    Mask,
    blind_key,
    label_of,
    read,
    tag_of,
    tag_shape,
    tag_words,
)
from moretta.secure_aggregation.one_sum import HelpedSums
from moretta.secure_aggregation.plain import PlainAggregator, PlainContributor
from moretta.secure_aggregation.removable_noise import Levels, Noise, Removable
from moretta.secure_aggregation.sums import Asks, Query, Relayed, Shapes, Sum, Wanted, gather, stamp_of


@dataclass(frozen=True, repr=False)
class Summand:
    """A silo's part of one sum, N_k and 2^f N_k x_k by tensor as ring elements, which a scheme hides in place.

    Args:
        agreement: With the others, and its own name.
        asked: The query that it answers.
        public: Whether N_k may be seen.
        hidden: The vector of hidden numbers.
        blinds: Masks on that, which the members of the sum remove.
        helped: As for `moretta.secure_aggregation.schemes.contributor`.
        noise: The removable part of its noise.
    """

    stamp: Stamp
    agreement: Agreement
    label: Label
    asked: Query
    weight: Array
    tensors: Tensors
    public: bool
    hidden: Words
    blinds: Sequence[Mask]
    helped: HelpedSums
    origin: Origin
    noise: Removable | None = None  # the removable part of its noise


@dataclass(frozen=True)
class PlannedSum:
    """One sum that the server asks a cohort for. levels: of the silos' noise, if some may be removed."""

    stamp: Stamp
    cohort: Cohort
    ring: Ring
    request: Wanted
    rules: Rules
    levels: Levels | None = None

    @property
    def length(self) -> int:
        """The number of ring elements that a silo hides."""
        return _length(self.request.shapes, self.rules)


Answer = Callable[[Any], Message]


@dataclass(frozen=True)
class Scheme:
    """The parts in which schemes differ.

    Args:
        upload: The silos' message.
        opens: The messages by which the server opens a sum.
        early: The error of one of those before an upload.
        hide: Makes the upload of a silo's part, and the object that answers `opens`, or raises PeerError.
        check: Raises PeerError for an upload that does not fit the sum.
        add_up: The server's steps from the uploads, and the digest of their query, to their sum.
        reopen: Makes the object that answers `opens` again, for an upload of an earlier process; None if the scheme
            cannot.
        keys: The rules of the key agreement.
        noised: The upload with removable noise; None if the scheme bears no losses.
        check_size: Raises if a silo cannot hide so many bytes; None without a limit.
    """

    name: str
    upload: type[Message]
    opens: tuple[type[Message], ...]
    early: str
    hide: Callable[[Summand], tuple[Message, Answer]]
    check: Callable[[PlannedSum, str, Any], None]
    add_up: Callable[[PlannedSum, Replies, bytes], Exchange[Relayed | Aborted]]
    reopen: Callable[[Summand], Answer] | None = None
    keys: Callable[[Rules], Rules] = lambda rules: rules
    noised: type[Message] | None = None
    check_size: Callable[[int], None] | None = None


class KeyedContributor:
    """A silo's half of a scheme.

    Args:
        helped, run: As for `moretta.secure_aggregation.schemes.contributor`.
        agreement: Of the last set-up, if an earlier role of this silo made it.
    """

    def __init__(
        self,
        scheme: Scheme,
        name: str,
        ring: Ring,
        rules: Rules,
        origin: Origin,
        helped: HelpedSums,
        run: str,
        agreement: Agreement | None = None,
    ) -> None:
        self._scheme, self._name, self._ring, self._rules = scheme, name, ring, rules
        self._helped, self._origin, self._run = helped, origin, run
        self._keys = SetUp(name, scheme.keys(rules), origin, run, agreement)
        self._range = Range(rules.limit, one_weight=rules.participation is not None)
        self._open: Answer | None = None  # of the last upload, until its sum is opened

    @property
    def members(self) -> Sequence[str]:
        """The silos of the last set-up's keys, sorted; empty before one, and if the scheme needs no keys."""
        return self._keys.members

    @property
    def agreement(self) -> Agreement | None:
        """The last set-up's seeds, which never change; secret."""
        return self._keys.agreed[0] if self._keys.members else None

    def levels(self, noise: Noise) -> Levels:
        """Return the components of the silo's noise in a sum of the last set-up's cohort."""
        return levels_in(self._keys.agreed[0].cohort, noise, self._scheme)

    def answer(self, message: Message) -> Message | None:
        """Answer a message of this room; None for others. A new set-up forgets the last one's secrets."""
        if isinstance(message, self._scheme.opens):
            if self._open is None:
                raise MisuseError(self._scheme.early)
            return self._open(message)
        if isinstance(message, AdvertiseKey):
            self._open = None
        return self._keys.answer(message)

    def check(self, stamp: Stamp, asked: Query, *, answers: bool = False) -> None:
        """Check, before an upload is computed, that it would not be refused.

        Args:
            asked: As for `upload`.
            answers: Whether this is a question that the silo answers before it uploads; in a take it answers one.

        Raises:
            SumSpent: The silo has helped to open another sum, or has answered another such question.
            PeerError: The stamp is of another run, or the cohort has silos outside the round.
        """
        stamp.check_run(self._run)
        if not asked.once:
            self._rules.check_playing(stamp, self._keys.members)
        self._helped.ask(stamp, asked, self._keys.members)
        if answers:
            self._helped.answer(stamp, asked)

    def upload(
        self,
        stamp: Stamp,
        tensors: Tensors,
        weight: int,
        encoding: Mapping[str, int],
        blind: bytes | None = None,
        *,
        asked: Query,
        least: float | None = None,
        origin: Origin | None = None,
        noise: Removable | None = None,
    ) -> Message:
        """Return the answer to an ask of `Aggregator.sum`.

        Args:
            tensors: Real arrays of the ask's shapes; never written to.
            weight: N_k, 1 or more.
            encoding: From the ask.
            blind: For `Aggregator.relay`, a secret of the members; its keystream for this silo and sum is added, and a
                tag (`moretta.secure_aggregation.masks`).
            asked: The query (`moretta.secure_aggregation.sums`).
            least: The least limit of every entry; None is the limit of the settings.
            origin: Of this upload's secrets; None is the contributor's own.
            noise: The removable part of the noise in `tensors`; None without one.

        Raises:
            RangeError: A value is not finite or out of range; nothing is sent then.
            PeerError: As `check`; or the encoding has a narrower range (`moretta.secure_aggregation.encoding.Range`) or
                other tensors.
            SumSpent: The silo has helped to open another sum of this round.
            MisuseError: No set-up came before; the stamp and name were uploaded before; the scheme of a blind has no
                ring; or noise is to be removed from a blinded upload.
            ParameterError: The weight is not from 1 to the encoding's total, or additive shares have 2 GiB or more.
        """
        agreement, labels = self._keys.agreed
        self.check(stamp, asked)
        self._range.check(self._ring, encoding, len(agreement.cohort.names), least, once=bool(asked.once))
        if blind is not None:
            if noise is not None:
                raise MisuseError("noise of a blinded upload cannot be removed: its tag is of all of it")
            tensors = {**tensors, TAG: np.zeros(tag_shape(self._ring))}
        whole, words = encode(self._ring, tensors, weight, encoding, len(agreement.cohort.names))
        public = self._rules.public_weights
        hidden = whole[public:]
        if self._scheme.check_size is not None:
            self._scheme.check_size(hidden.nbytes)
        labels.use(stamp, words)
        label = label_of(stamp, agreement.cohort.digest, shapes_of(words), encoding, asked.digest)
        origin, blinds = origin or self._origin, list[Mask]()
        if blind is not None:
            blinds = [(True, blind_key(blind, label, self._name))]
            tag = tag_of(blind, label, weight, words)
            words[TAG][:] = tag_words(self._ring, tag, origin.key("tag", *label))
        encoded = whole[:1].reshape(()), words, public, hidden
        part = Summand(stamp, agreement, label, asked, *encoded, blinds, self._helped, origin, noise)
        upload, self._open = self._scheme.hide(part)
        return upload

    def reopen(self, stamp: Stamp, shapes: Shapes, encoding: Mapping[str, int], asked: Query, origin: Origin) -> None:
        """Resume an upload that an earlier process of this silo sent, to answer what opens its sum; needs no numbers.

        Args:
            shapes: Of its tensors.
            encoding, asked: As for `upload`.
            origin: That upload's.

        Raises:
            MisuseError: The scheme cannot.
        """
        if self._scheme.reopen is None:
            raise MisuseError(f'scheme = "{self._scheme.name}" needs one process from an upload to its sum')
        agreement, labels = self._keys.agreed
        labels.use(stamp, shapes)
        label = label_of(stamp, agreement.cohort.digest, shapes, encoding, asked.digest)
        nothing = np.zeros((), self._ring.dtype)
        encoded = nothing, dict[str, Array](), self._rules.public_weights, nothing
        part = Summand(stamp, agreement, label, asked, *encoded, (), self._helped, origin)
        self._open = self._scheme.reopen(part)

    def read(
        self,
        stamp: Stamp,
        relayed: Relayed,
        encoding: Mapping[str, int],
        blind: bytes | None = None,
        *,
        asked: Query,
    ) -> Sum:
        """Return a relayed sum's result. Arguments as of its uploads. Raises PeerError for an impossible sum."""
        agreement, _ = self._keys.agreed
        label = label_of(stamp, agreement.cohort.digest, shapes_of(relayed.tensors), encoding, asked.digest)
        return read(self._ring, relayed, encoding, blind, label, public_weights=self._rules.public_weights)

    def __repr__(self) -> str:
        return f"KeyedContributor({self._scheme.name!r}, {self._name!r}, {self._ring}, <redacted>)"


class KeyedAggregator:
    """The server's half of a scheme, set up for a cohort, then for many sums. cohort: of the last successful set-up."""

    def __init__(self, scheme: Scheme, ring: Ring, rules: Rules) -> None:
        self.scheme, self._own = scheme.name, scheme
        self._ring, self._rules = ring, rules
        self._agreed: Cohort | None = None
        self.cohort: Sequence[str] = ()

    @property
    def parties(self) -> int:
        """The most silos whose entries a sum has: all of a round, even if some are missing."""
        return self._rules.parties(len(self.cohort))

    def setup(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        """Agree with a cohort. Raises `moretta.errors.ParameterError` for a cohort that the scheme cannot protect."""
        self._agreed, self.cohort = None, ()
        agreed = yield from agree_on_keys(now, cohort, self._own.keys(self._rules))
        if isinstance(agreed, Aborted):
            return agreed
        self._agreed, self.cohort = agreed, tuple(cohort)
        return None

    def want(self, shapes: Shapes, limits: Mapping[str, float], most_weight: int, *, blinded: bool = False) -> Wanted:
        """Plan a sum over the cohort of the last set-up (`moretta.secure_aggregation.encoding`).

        Args:
            limits: The largest |value| of each tensor, positive and finite.
            blinded: Whether uploads are blinded, and so have a tag.

        Raises:
            RangeError: The ring has no headroom for a tensor; the message names tensor and range.
            ParameterError: Additive shares would have 2 GiB or more.
            MisuseError: A tensor has the name of the tag.
        """
        if TAG in shapes:
            raise MisuseError(f"`{TAG}` is reserved; expected another name of a tensor")
        if blinded:
            shapes = {**shapes, TAG: tag_shape(self._ring)}
            limits = {**limits, TAG: max(limits.values())}
        if self._own.check_size is not None:
            self._own.check_size(_length(shapes, self._rules) * self._ring.dtype.itemsize)
        return plan(self._ring, self.parties, shapes, limits, most_weight)

    def sum(
        self, ask: Asks, request: Wanted, expected: bytes | None = None, *, whole: bool = False
    ) -> Exchange[Sum | Aborted]:
        """Ask the cohort of the last set-up and sum the survivors' uploads; abort if they are too few.

        It also aborts if any silo has helped to open another sum of this round (`Reason.SPENT`).

        Args:
            ask: The protocol's own message, one for all or one for each silo, whose field ``encoding`` is
                ``request.fraction_bits``. A silo without one counts as missing.
            expected: The digest of the query (`moretta.secure_aggregation.sums.Query`); None if the aggregator does not
                know all of it. Silos whose digest differs from most others' are then left out.
            whole: Abort if any silo is missing.

        Raises:
            MisuseError: No set-up succeeded before, or a message has another encoding.
        """
        relayed = yield from self.relay(ask, request, expected, whole=whole)
        if isinstance(relayed, Aborted):
            return relayed
        result = decode(self._ring, relayed.tensors, int(relayed.weight), relayed.silos, request)
        return replace(result, excess=relayed.excess) if relayed.excess else result

    def relay(
        self, ask: Asks, request: Wanted, expected: bytes | None = None, *, whole: bool = False
    ) -> Exchange[Relayed | Aborted]:
        """Ask and add up as `sum` does, for the members to read by `Contributor.read`.

        If they blinded their uploads, the aggregator sees uniform ring elements, also for the weight.
        """
        if self._agreed is None:
            raise MisuseError("a sum was asked for without a set-up; expected `setup` to have succeeded")
        levels = None if request.noise is None else levels_in(self._agreed, request.noise, self._own)
        levels = levels if levels and levels.removable else None
        planned = PlannedSum(stamp_of(ask), self._agreed, self._ring, request, self._rules, levels)
        check, upload = partial(self._own.check, planned), (levels and self._own.noised) or self._own.upload
        gathered = yield from gather(self.cohort, ask, upload, check, request, expected)
        if isinstance(gathered, Aborted):
            return gathered
        replies, asked = gathered
        if whole and replies.missing:
            return Aborted(replies.missing)
        return (yield from self._own.add_up(planned, replies, asked))


Aggregator = KeyedAggregator | PlainAggregator
"""The server's half of any scheme."""

Contributor = KeyedContributor | PlainContributor
"""A silo's half of any scheme."""


def levels_in(cohort: Cohort, noise: Noise, scheme: Scheme) -> Levels:
    """Return the components of each silo's noise in a sum of a cohort."""
    return noise.levels(len(cohort.names), 0 if scheme.noised is None else cohort.losses)


def _length(shapes: Shapes, rules: Rules) -> int:
    return sum(map(math.prod, shapes.values())) + (not rules.public_weights)
