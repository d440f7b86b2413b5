"""A cohort: the silos that agreed on keys, their neighbours, and the fewest that a revealed sum needs.

All roles compute it from the same public keys and rules, so it need not be sent. Its digest is part of every mask's
label: with another graph, threshold or key there is no common mask.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from moretta.contract.messages import Stamp
from moretta.errors import MisuseError, ParameterError, PeerError
from moretta.secure_aggregation import graph
from moretta.secure_aggregation.graph import Plan
from moretta.secure_aggregation.identity import Identity, Roster
from moretta.secure_aggregation.keystream import SecretRoot, encode_purpose

NONE: Mapping[str, bytes] = {}


@dataclass(frozen=True)
class Participation:
    """A round's silos, alike at all roles by public values: `count` of `silos`, in order, by the training seed."""

    silos: tuple[str, ...]
    count: int
    seed: int = 0

    def of_round(self, number: int) -> list[str]:
        """Return the silos of a round, in the run's order."""
        if self.count >= len(self.silos):
            return list(self.silos)
        generator = np.random.Generator(np.random.PCG64([self.seed, number]))
        return [self.silos[index] for index in sorted(generator.permutation(len(self.silos))[: self.count])]


@dataclass(frozen=True)
class Rules:
    """Settings of secure aggregation that must be the same for all roles of a run, with defaults filled in.

    Args:
        degree, threshold, corrupt_rate, dropout_rate: As in `moretta.secure_aggregation.settings.SecureAggregation`.
        min_survivors: The fewest silos whose sum may be revealed. With masks it is at least 2, as a threshold is a
            majority.
        limit: The least range of values in an encoding that a silo accepts
            (`moretta.secure_aggregation.encoding.Range`).
        public_weights: Whether a silo's weight is uploaded in the clear.
        roster: The silos' long-lived keys; None trusts any keys that the server relays.
        participation: The silos of a round. Degree and threshold follow from their number, and stay where silos are
            missing from a cohort. If the threshold shrank too, a server that omits silos could read sums of two. None
            takes the cohort for all silos.
        settings: The digest of all settings that sites share, so that masks of silos with different ones do not cancel.
            Empty where one process has the settings of all.
    """

    degree: int | None = None
    threshold: int | None = None
    corrupt_rate: float = 0.1
    dropout_rate: float = 0.1
    min_survivors: int = 1
    limit: float = 0.0
    public_weights: bool = False
    roster: Roster | None = None
    participation: Participation | None = None
    settings: str = ""

    def check(self, silos: int) -> None:
        """Raise `moretta.errors.ParameterError` unless degree and threshold, if set, fit a cohort of all silos."""
        if silos < 2:
            raise ParameterError('one silo needs scheme = "none": its sum would be its own data')
        graph.plan(silos, self.corrupt_rate, self.dropout_rate, self.degree, self.threshold)

    def plan(self, silos: int) -> Plan:
        """Return a cohort's degree and threshold. Raises ParameterError for one silo, unless a degree is set."""
        least = silos
        silos = self.parties(silos)
        degree = self.degree if self.degree is not None and self.degree < silos - 1 else None
        if self.degree is not None and degree is None:  # all others, even if the rates would allow fewer
            chosen = Plan(None, silos * 2 // 3 + 1)
        else:
            chosen = graph.plan(silos, self.corrupt_rate, self.dropout_rate, degree)
        members = silos if chosen.degree is None else chosen.degree + 1
        threshold = chosen.threshold if self.threshold is None else max(members // 2 + 1, self.threshold)
        if self.participation is None:
            threshold = min(threshold, members)
        thinned = chosen.degree is not None and chosen.degree < least - 1
        return Plan(chosen.degree if thinned else None, threshold)

    def least(self, scheme: str) -> int:
        """Return the fewest silos of a round: the threshold of masks, or `min_survivors` if that is more."""
        if self.participation is None or scheme != "pairwise":
            return self.min_survivors
        return max(self.min_survivors, self.plan(self.participation.count).threshold)

    def parties(self, there: int) -> int:
        """Return the most silos whose entries a sum has. there: silos that are present."""
        return max(there, self.participation.count if self.participation else 0)

    def check_playing(self, stamp: Stamp, cohort: Iterable[str]) -> None:
        """Raise `moretta.errors.PeerError` for a cohort with silos outside the round."""
        playing = self.participation
        if playing is not None and (strangers := sorted(set(cohort).difference(playing.of_round(stamp.round)))):
            raise PeerError(
                f"{stamp}: expected a sum of silos that take part in this round, by seed and participation, got also "
                f"{strangers!r:.200}"
            )


def complete(rules: Rules) -> Rules:
    """Return the rules with the complete graph, and no threshold beyond the silos that are present."""
    return replace(rules, degree=2**62, threshold=None, participation=None)


@dataclass(frozen=True, repr=False)
class Credentials:
    """A silo's proof of identity: its own long-lived key, and the public keys of all."""

    identity: Identity
    roster: Roster

    @classmethod
    def of(cls, name: str, identity: str, roster: Roster | None) -> Credentials | None:
        """Return those of a silo with an identity, under a roster; None without one of them.

        Args:
            identity: Its folder; empty for no identity.

        Raises:
            ParameterError: The identity cannot be read, or differs from the roster's.
        """
        if roster is None or not identity:
            return None
        own = Identity.load(identity)
        roster.check_identity(name, own.public_key)
        return cls(own, roster)


@dataclass(frozen=True, repr=False)
class Origin:
    """The source of a silo's secrets.

    Args:
        credentials: None trusts the keys that the server relays.
        insecure: A root from which key pairs, self-masks and shares follow, for tests; None draws them from the
            operating system. A role that is another process for each message has one too, drawn from the operating
            system for each set-up and each upload, and kept in memory alone.
        session: How often the run was resumed, so that no key is used twice.
    """

    credentials: Credentials | None = None
    insecure: SecretRoot | None = None
    session: int = 0

    def key(self, *purpose: int | str | bytes) -> bytes:
        """Return 32 secret bytes for one purpose, used once: from the operating system, or the insecure root."""
        return os.urandom(32) if self.insecure is None else self.insecure.derive(*purpose, self.session)


_neighbourhoods = lru_cache(maxsize=4)(graph.neighbourhoods)  # the same for all silos of a process


@dataclass(frozen=True)
class Cohort:
    """The silos of one set-up, sorted. keys: public, by silo. plan: degree, threshold. neighbours: by silo."""

    names: tuple[str, ...]
    keys: Mapping[str, bytes] = field(repr=False)
    plan: Plan
    min_survivors: int
    digest: bytes = field(repr=False)
    neighbours: Mapping[str, frozenset[str]] = field(repr=False)

    @classmethod
    def of(cls, keys: Mapping[str, bytes], rules: Rules, seed_parts: Mapping[str, bytes] = NONE) -> Cohort:
        """Return the cohort of these keys.

        Args:
            seed_parts: By silo, the parts of the graph's seed (`moretta.secure_aggregation.graph`); empty for the
                complete graph.

        Raises:
            PeerError: The silos are fewer than the threshold of a round.
            MisuseError: The parts are of other silos than the graph's.
        """
        plan, names = rules.plan(len(keys)), tuple(sorted(keys))
        if len(names) < plan.threshold and rules.participation is not None:
            raise PeerError(
                f"expected a cohort of at least {plan.threshold} silos, the threshold of a round's "
                f"{rules.participation.count}, got {len(names)}; bring the others back, or set a lower threshold in "
                "[secure-aggregation]"
            )
        if set(seed_parts) != (set() if plan.degree is None else set(names)):
            raise MisuseError(
                "expected each silo's part of the seed for a graph that is drawn, and none for a complete one"
            )
        parts = [part for name in names for part in (name, keys[name])]
        parts += [seed_parts[name] for name in names if seed_parts]
        roster = "" if rules.roster is None else rules.roster.digest
        settings = (plan.degree or 0, plan.threshold, rules.min_survivors, int(rules.public_weights), roster)
        shared = [rules.settings] if rules.settings else []
        digest = hashlib.sha256(encode_purpose("cohort", *settings, *shared, *parts)).digest()
        neighbours = _neighbourhoods(names, plan.degree, digest)
        return cls(names, keys, plan, rules.min_survivors, digest, neighbours)

    def point(self, silo: str) -> int:
        """Return the x of a silo's Shamir shares: its place among the sorted names, from 1."""
        return self._points[silo]

    def circle(self, silo: str) -> frozenset[str]:
        """Return a silo and its neighbours: the holders of shares of its self-mask's secret."""
        return self.neighbours[silo] | {silo}

    def holders(self, silo: str) -> Sequence[str]:
        """Return the same in the order of their names, the order of shares and their digests in an upload."""
        if silo not in self._holders:
            self._holders[silo] = tuple(sorted(self.circle(silo)))
        return self._holders[silo]

    @property
    def losses(self) -> int:
        """The most of its silos that may be missing from a sum under masks."""
        return max(0, len(self.names) - max(self.min_survivors, 0 if self.plan.degree else self.plan.threshold))

    def shortage(self, survivors: Collection[str]) -> str | None:
        """Return why the sum of these silos may not be revealed; None if it may."""
        left = frozenset(survivors)
        if len(left) == len(self.names):
            return None
        if len(left) < self.min_survivors:
            return f"expected at least {self.min_survivors} silos in a sum, {len(left)} are left"
        for silo in left if self.plan.degree is not None else sorted(left)[:1]:
            present = len(self.circle(silo) & left)
            if present < self.plan.threshold:
                return (
                    f"expected at least {self.plan.threshold} of the {len(self.circle(silo))} silos that hold shares "
                    f"of `{silo}`, {present} are left"
                )
        if not graph.connected(self.neighbours, left):
            return "the silos that are left no longer share masks with each other"
        return None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_points", {name: number for number, name in enumerate(self.names, 1)})

    _points: Mapping[str, int] = field(init=False, repr=False, compare=False)
    _holders: dict[str, Sequence[str]] = field(init=False, repr=False, compare=False, default_factory=dict)
