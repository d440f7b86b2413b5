"""Key agreement: a secret seed for every two neighbours of a cohort, by X25519 (RFC 7748) and HKDF-SHA256 (RFC 5869).

    server                              silo
      AdvertiseKey              -->       fresh key pair
                                <--     KeyAdvert(public key, signature)
      PeerKeys(all adverts)     -->       checks them; one shared secret with every neighbour
                                <--     KeysAccepted(cohort digest)

This is the complete graph. In a sparse one silos also agree on the graph (`moretta.secure_aggregation.graph`).

Keys are drawn from the operating system, are fresh at each set-up, live in memory only, and never follow from a role's
root: a resumed run cannot repeat a mask. The server relays public keys and learns no seed.

With a roster each silo signs its advert by its long-lived key (`moretta.secure_aggregation.identity`), together with
the roster's digest, run id, set-up and name. Silos refuse a server's own key in another's place, an old advert, or
another roster, and name the advert's silo. Without a roster silos trust the received keys.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from moretta.contract.messages import Message, Stamp, message
from moretta.contract.roles import Aborted, Ask, Exchange, Missing, Reason
from moretta.errors import MisuseError, ParameterError, PeerError, RunFailed
from moretta.secure_aggregation import graph, identity
from moretta.secure_aggregation.cohort import Cohort, Origin, Rules
from moretta.secure_aggregation.identity import Roster, Signature, Signatures, shared_secret, verify
from moretta.secure_aggregation.keystream import Extracted, derive_once, encode_names
from moretta.secure_aggregation.masks import Labels, begun
from moretta.secure_aggregation.sums import check_cohort

RUN_DIGEST = 16  # hex digits of the roster's digest at the end of a run id


@message("secure-aggregation/advertise-key")
class AdvertiseKey(Message):
    """Draw a fresh key pair and send its public key."""


@message("secure-aggregation/key-advert")
class KeyAdvert(Message):
    """A silo's public key of this set-up, 32 bytes of X25519, and its signature (no bytes without a roster)."""

    public_key: Annotated[bytes, identity.check_public_key]
    signature: Signature


@message("secure-aggregation/peer-keys")
class PeerKeys(Message):
    """The public keys of the whole cohort and their signatures, by silo."""

    keys: Mapping[str, bytes]
    signatures: Signatures

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless at least two silos have valid keys, all different."""
        identity.check_keys(self.keys, self.signatures)


@message("secure-aggregation/keys-accepted")
class KeysAccepted(Message):
    """The silo has a seed with each of its neighbours, in the cohort of this digest."""

    cohort: bytes


MESSAGES = (AdvertiseKey, KeyAdvert, PeerKeys, KeysAccepted, *graph.MESSAGES)


def check_advert(
    roster: Roster | None, setup: Stamp, silo: str, key: bytes, signature: bytes, committed: bytes = b""
) -> None:
    """Check that a silo's key is signed for this set-up; without a roster, that it has no signature.

    Args:
        committed: The silo's commitment to its part of the graph's seed, signed with the key; empty in a complete
            graph.

    Raises:
        PeerError: It is not so, or the silo is not in the roster.
    """
    if roster is None:
        if signature:
            raise PeerError(f"the key of `{silo}` is signed, but no roster is set here; set the same everywhere")
        return
    if silo not in roster.keys:
        raise PeerError(f"silo `{silo}` is not in the roster; expected one of its {len(roster.keys)} silos")
    if not verify(roster.keys[silo], signature, *_statement(roster, setup, silo, key, committed)):
        raise PeerError(
            f"the key of silo `{silo}` is not signed for {setup} of this run by its identity in the roster; it may be "
            "another's or an old one, or the rosters differ"
        )


def run_mark(roster: Roster | None) -> str:
    """Return the end of run ids, by which silos with another roster refuse them."""
    return "" if roster is None else roster.digest[:RUN_DIGEST]


def fresh_run(roster: Roster | None) -> str:
    """Return a new run's id, drawn from the operating system."""
    return ".".join(filter(None, [secrets.token_hex(16), run_mark(roster)]))


def check_run(roster: Roster | None, run: str) -> None:
    """Raise `moretta.errors.PeerError` unless a run's id ends with the digest of this roster, if there is one."""
    if roster is not None and not run.endswith(f".{run_mark(roster)}"):
        raise PeerError("the run's id is of another roster; expected every role to have the same roster file")


def _statement(roster: Roster, setup: Stamp, silo: str, key: bytes, committed: bytes) -> tuple[int | str | bytes, ...]:
    more = (committed,) if committed else ()
    return "key advert", roster.digest, setup.run, setup.round, setup.attempt, silo, key, *more


def pair_seed(secret: bytes, setup: Stamp, cohort: bytes, first: str, other: str) -> bytes:
    """Return HKDF(shared secret, "pair", run, round, attempt, cohort digest, lower name, higher name)."""
    about = setup.run, setup.round, setup.attempt, cohort
    return derive_once(secret, begun("pair", about) + encode_names(*sorted((first, other))))


@dataclass(frozen=True, repr=False)
class Agreement:
    """A silo's result of a set-up. setup: its stamp. me: the silo's name. seeds: by neighbour; secret."""

    setup: Stamp
    me: str
    cohort: Cohort
    seeds: Mapping[str, bytes]

    @cached_property
    def extracted(self) -> Mapping[str, Extracted]:
        """The seeds in the form from which keys of masks and seals are derived."""
        return {name: Extracted(seed) for name, seed in self.seeds.items()}

    @cached_property
    def seals(self) -> Mapping[str, AESSIV]:
        """The ciphers that seal each neighbour's shares: AES-SIV (RFC 5297).

        A repeated request exposes at most whether two plaintexts are equal.
        """
        return {name: _seal(seed, self.me, name) for name, seed in self.extracted.items()}

    @cached_property
    def opens(self) -> Mapping[str, AESSIV]:
        """The ciphers that open each neighbour's sealed shares."""
        return {name: _seal(seed, name, self.me) for name, seed in self.extracted.items()}

    def __repr__(self) -> str:
        return f"Agreement({self.me!r}, {self.setup}, {len(self.seeds)} seeds <redacted>)"


def _seal(seed: Extracted, maker: str, holder: str) -> AESSIV:
    return AESSIV(seed.derive_for(begun("seal", ()) + encode_names(maker, holder)))


class Offer:
    """A silo's key pair of one set-up, until the others' keys arrive. commits: to a part of the graph's seed too."""

    def __init__(self, setup: Stamp, me: str, origin: Origin, *, commits: bool = False) -> None:
        self._setup, self._me, credentials = setup, me, origin.credentials
        self._roster = None if credentials is None else credentials.roster
        check_run(self._roster, setup.run)
        private = origin.key("key agreement", setup.run, setup.round, setup.attempt, me)
        self._private = X25519PrivateKey.from_private_bytes(private)
        self.public_key = self._private.public_key().public_bytes_raw()
        about = setup.run, setup.round, setup.attempt, setup.take, me
        self._part = origin.key("graph part", *about) if commits else b""
        self.commitment = graph.commitment(setup, me, self._part) if commits else b""
        self._shown: graph.CommittedKeys | None = None  # the keys for which the part was revealed
        self.signature = b""
        if credentials is not None:
            statement = _statement(credentials.roster, setup, me, self.public_key, self.commitment)
            self.signature = credentials.identity.sign(*statement)

    def agree(self, peers: PeerKeys, rules: Rules) -> Agreement:
        """Return the seeds with all neighbours, in the complete graph.

        Raises:
            PeerError: The keys are of another set-up, lack the own key or a valid signature, or are too few; or the
                cohort needs a drawn graph.
        """
        self._check(peers, rules, {})
        return self._agreement(Cohort.of(peers.keys, rules))

    def reveal(self, peers: graph.CommittedKeys, rules: Rules) -> bytes:
        """Return this silo's part of the graph's seed, once. Raises `moretta.errors.PeerError` as `agree`."""
        if self._shown is not None:
            raise PeerError("the part in the graph's seed was revealed for the keys that were shown first; set up anew")
        if peers.commitments.get(self._me) != self.commitment:
            raise PeerError(f"expected the own commitment of `{self._me}` among the cohort's, unchanged")
        self._check(peers, rules, peers.commitments)
        self._shown = peers
        return self._part

    def agree_on_graph(self, sent: graph.GraphParts, rules: Rules) -> Agreement:
        """Return the seeds with neighbours in the graph of all parts. Raises PeerError for uncommitted parts."""
        if self._shown is None or sent.stamp != self._setup:
            raise PeerError(f"expected all parts in the graph's seed of {self._setup}, after the keys of the cohort")
        graph.check_parts(self._setup, sent.parts, self._shown.commitments)
        return self._agreement(Cohort.of(self._shown.keys, rules, sent.parts))

    def _check(self, peers: PeerKeys | graph.CommittedKeys, rules: Rules, commitments: Mapping[str, bytes]) -> None:
        if peers.stamp != self._setup:
            raise PeerError(f"expected the keys of {self._setup}, got those of {peers.stamp}")
        if (rules.plan(len(peers.keys)).degree is not None) != bool(commitments):
            raise PeerError(
                f"expected {'no ' if commitments else ''}commitments with the keys of {len(peers.keys)} silos, as the "
                f"neighbours of each are {'all others' if commitments else 'to be drawn'} by [secure-aggregation] here"
            )
        if peers.keys.get(self._me) != self.public_key:
            raise PeerError(f"expected the own key of `{self._me}` among the cohort's, unchanged")
        if len(peers.keys) < rules.min_survivors:
            raise PeerError(f"expected a cohort of at least {rules.min_survivors} silos, got {len(peers.keys)}")
        for name, key in peers.keys.items():
            check_advert(self._roster, self._setup, name, key, peers.signatures[name], commitments.get(name, b""))

    def _agreement(self, cohort: Cohort) -> Agreement:
        seeds = {
            name: pair_seed(shared_secret(self._private, cohort.keys[name]), self._setup, cohort.digest, self._me, name)
            for name in sorted(cohort.neighbours[self._me])
        }
        return Agreement(self._setup, self._me, cohort, seeds)

    def __repr__(self) -> str:
        return f"Offer({self._me!r}, {self._setup}, <redacted>)"


class SetUp:
    """A silo's half of the set-ups of a run, one after the other.

    Args:
        me, rules, origin: As for `Offer` and its `agree`.
        run: The only accepted run, after its group's name in CGD; empty for any.
        agreement: Of an earlier role's last set-up.
    """

    def __init__(
        self, me: str, rules: Rules, origin: Origin, run: str = "", agreement: Agreement | None = None
    ) -> None:
        self.origin, self._me, self._rules, self._run = origin, me, rules, run
        self._offer: Offer | None = None
        self._revealed = set[Stamp]()  # the set-ups at which a part of a graph's seed was shown
        self._agreed = None if agreement is None else (agreement, Labels(agreement.setup))

    @property
    def members(self) -> Sequence[str]:
        """The silos that agreed on keys, sorted; empty before."""
        return () if self._agreed is None else self._agreed[0].cohort.names

    @property
    def agreed(self) -> tuple[Agreement, Labels]:
        """The last set-up's agreement and mask labels used since. Raises `moretta.errors.MisuseError` before one."""
        if self._agreed is None:
            raise MisuseError("an upload was asked for without a set-up; expected keys to be agreed on")
        return self._agreed

    def answer(self, message: Message) -> Message | None:
        """Answer the messages of the key agreement, None to any other. A new set-up forgets the last one's seeds.

        Raises:
            PeerError: As `Stamp.check_run` and `Offer`.
            MisuseError: Peers' keys arrive without a set-up.
        """
        match message:
            case AdvertiseKey(stamp=now) | graph.AdvertiseCommitted(stamp=now):
                now.check_run(self._run)
                commits = isinstance(message, graph.AdvertiseCommitted)
                if commits and now in self._revealed:  # else one silo's parts could be redrawn until the graph suits
                    raise PeerError(f"the part in the graph's seed of {now} was shown; set up as another attempt")
                self._agreed = None
                own = Offer(now, self._me, self.origin, commits=commits)
                self._offer, key, signature = own, own.public_key, own.signature
                if not commits:
                    return KeyAdvert(stamp=now, public_key=key, signature=signature)
                return graph.CommittedAdvert(stamp=now, public_key=key, signature=signature, commitment=own.commitment)
            case PeerKeys():
                return self._accept(message.stamp, self._offered().agree(message, self._rules))
            case graph.CommittedKeys():
                part = self._offered().reveal(message, self._rules)
                self._revealed.add(message.stamp)
                return graph.GraphPart(stamp=message.stamp, part=part)
            case graph.GraphParts():
                return self._accept(message.stamp, self._offered().agree_on_graph(message, self._rules))
        return None

    def _offered(self) -> Offer:
        if self._offer is None:
            raise MisuseError("others' keys came before the own key was asked for")
        return self._offer

    def _accept(self, setup: Stamp, agreement: Agreement) -> KeysAccepted:
        self._agreed = agreement, Labels(setup)
        self._offer = None  # a key pair agrees once
        return KeysAccepted(stamp=setup, cohort=agreement.cohort.digest)

    def __repr__(self) -> str:
        return f"SetUp({self._me!r}, <redacted>)"


def agree_on_keys(now: Stamp, cohort: Sequence[str], rules: Rules) -> Exchange[Cohort | Aborted]:
    """Relay silos' public keys, the server's half; abort if one is missing or bad. Below 2 silos: ParameterError."""
    check_cohort(cohort)
    if len(cohort) < 2:
        raise ParameterError('one silo needs scheme = "none": its sum would be its own data')
    if len(cohort) < rules.plan(len(cohort)).threshold:
        raise RunFailed(
            f"{now}: expected at least {rules.plan(len(cohort)).threshold} silos, the threshold of secure aggregation, "
            f"{len(cohort)} are left; bring the others back"
        )

    sparse = rules.plan(len(cohort)).degree is not None

    def check_key(silo: str, advert: KeyAdvert | graph.CommittedAdvert) -> None:
        committed = advert.commitment if isinstance(advert, graph.CommittedAdvert) else b""
        check_advert(rules.roster, now, silo, advert.public_key, advert.signature, committed)

    if sparse:
        adverts = yield Ask.all(cohort, graph.AdvertiseCommitted(stamp=now), graph.CommittedAdvert, check_key)
    else:
        adverts = yield Ask.all(cohort, AdvertiseKey(stamp=now), KeyAdvert, check_key)
    keys = {name: advert.public_key for name, advert in adverts.answers.items()}
    twins = dict.fromkeys(identity.sharing_a_key(keys), Missing(Reason.MALFORMED, "expected a key of its own"))
    if missing := {**adverts.missing, **twins}:
        return Aborted(missing)
    signatures = {name: advert.signature for name, advert in adverts.answers.items()}
    parts = dict[str, bytes]()
    relayed: Message = PeerKeys(stamp=now, keys=keys, signatures=signatures)
    if sparse:
        commitments = {name: advert.commitment for name, advert in adverts.answers.items()}

        def opens(silo: str, reply: graph.GraphPart) -> None:
            graph.check_part(now, silo, reply.part, commitments[silo])

        shown = graph.CommittedKeys(stamp=now, keys=keys, signatures=signatures, commitments=commitments)
        revealed = yield Ask.all(cohort, shown, graph.GraphPart, opens)
        if revealed.missing:
            return Aborted(revealed.missing)
        parts = {name: reply.part for name, reply in revealed.answers.items()}
        relayed = graph.GraphParts(stamp=now, parts=parts)
    agreed = Cohort.of(keys, rules, parts)

    def check_cohort_digest(silo: str, accepted: KeysAccepted) -> None:
        if accepted.cohort != agreed.digest:
            raise PeerError(
                f"`{silo}` has other settings than the server; expected threshold {agreed.plan.threshold}, "
                f"{agreed.plan.degree or 'all'} neighbours and min-survivors {agreed.min_survivors} at both, and the "
                "same run file at all sites"
            )

    accepted = yield Ask.all(cohort, relayed, KeysAccepted, check_cohort_digest)
    return Aborted(accepted.missing) if accepted.missing else agreed
