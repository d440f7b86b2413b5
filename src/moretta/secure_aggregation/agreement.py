"""Key agreement: a secret seed for every two neighbours of a cohort, by X25519 (RFC 7748) and HKDF-SHA256 (RFC 5869).

    server                              silo
      AdvertiseKey              -->       fresh key pair
                                <--     KeyAdvert(public key, signature)
      PeerKeys(all adverts)     -->       checks them; one shared secret with every neighbour
                                <--     KeysAccepted(cohort digest)

Keys are fresh at each set-up, come from the operating system, live in memory only, and never follow from a role's
root: a resumed run cannot repeat a mask. The server relays public keys and learns no seed.

With a roster every advert is signed by its silo's long-lived key (`moretta.secure_aggregation.identity`) together with
the roster's digest, run id, set-up and name. A server that puts a key of its own in a silo's place, brings an old
advert, or shows silos different rosters is refused by each silo that it tries this on, which names whose advert it was.
Without one, silos trust what they are relayed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from moretta.errors import MisuseError, ParameterError, PeerError, RunFailed
from moretta.keystream import SecretRoot, derive
from moretta.protocol import Aborted, Ask, Exchange, Message, Missing, Reason, Stamp, message
from moretta.secure_aggregation.cohort import Cohort, Credentials, Rules
from moretta.secure_aggregation.identity import Roster, verify
from moretta.secure_aggregation.masks import Labels
from moretta.secure_aggregation.sums import check_cohort

PUBLIC_KEY_BYTES = 32
PROBE = X25519PrivateKey.from_private_bytes(bytes(PUBLIC_KEY_BYTES))  # no secret: to see what a public key does
SIGNATURE_BYTES = 64
RUN_DIGEST = 16  # hex digits of the roster's digest that a run id ends with


@message("secure-aggregation/advertise-key")
class AdvertiseKey(Message):
    """Draw a fresh key pair and say its public key."""


@message("secure-aggregation/key-advert")
class KeyAdvert(Message):
    """A silo's public key of this set-up, 32 bytes of X25519, and with a roster its signature, else no bytes."""

    public_key: bytes
    signature: bytes

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless the key is one that hides something."""
        check_public_key(self.public_key)
        check_signature_length(self.signature)


@message("secure-aggregation/peer-keys")
class PeerKeys(Message):
    """The public keys of the whole cohort and their signatures, by silo."""

    keys: Mapping[str, bytes]
    signatures: Mapping[str, bytes]

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless two silos or more have good keys, all different."""
        if len(self.keys) < 2:
            raise PeerError(f"expected keys of at least 2 silos, got {len(self.keys)}")
        if set(self.signatures) != set(self.keys):
            raise PeerError("expected a signature, or no bytes, with each silo's key")
        for name, key in self.keys.items():
            try:
                check_public_key(key)
                check_signature_length(self.signatures[name])
            except PeerError as error:
                raise PeerError(f"silo `{name}`: {error}") from None
        if twins := sharing_a_key(self.keys):
            raise PeerError(f"expected a key of its own for each silo; {twins} have the same")


@message("secure-aggregation/keys-accepted")
class KeysAccepted(Message):
    """The silo has a seed with each of its neighbours, in the cohort of this digest."""

    cohort: bytes


MESSAGES = (AdvertiseKey, KeyAdvert, PeerKeys, KeysAccepted)


def check_public_key(key: bytes) -> None:
    """Raise `moretta.errors.PeerError` for a key that is not 32 bytes, or of low order.

    With a point of low order the shared secret is all zero whatever the other side's key (RFC 7748, section 6.1).
    Any private key shows that, so a constant one is tried.
    """
    if len(key) != PUBLIC_KEY_BYTES:
        raise PeerError(f"expected a public key of {PUBLIC_KEY_BYTES} bytes, got {len(key)}")
    _exchange(PROBE, key)


def check_signature_length(signature: bytes) -> None:
    """Raise `moretta.errors.PeerError` for what is neither a signature nor none."""
    if len(signature) not in (0, SIGNATURE_BYTES):
        raise PeerError(f"expected a signature of {SIGNATURE_BYTES} bytes or none, got {len(signature)}")


def check_advert(roster: Roster | None, setup: Stamp, silo: str, key: bytes, signature: bytes) -> None:
    """Raise `moretta.errors.PeerError` unless a silo's key is signed for this set-up, or no roster is in use."""
    if roster is None:
        if signature:
            raise PeerError(f"the key of `{silo}` is signed, but no roster is set here; set the same everywhere")
        return
    if silo not in roster.keys:
        raise PeerError(f"silo `{silo}` is not in the roster; expected one of its {len(roster.keys)} silos")
    if not verify(roster.keys[silo], signature, *_statement(roster, setup, silo, key)):
        raise PeerError(
            f"the key of silo `{silo}` is not signed for {setup} of this run by the identity that the roster lists; "
            "it may have been put in its place, be an old one, or the rosters differ"
        )


def check_run(roster: Roster | None, run: str) -> None:
    """Raise `moretta.errors.PeerError` unless a run's id ends with the digest of one's own roster, if there is one."""
    if roster is not None and not run.endswith(f".{roster.digest[:RUN_DIGEST]}"):
        raise PeerError("the run's id is of another roster; expected every role to have the same roster file")


def _statement(roster: Roster, setup: Stamp, silo: str, key: bytes) -> tuple[int | str | bytes, ...]:
    return "key advert", roster.digest, setup.run, setup.round, setup.attempt, silo, key


def sharing_a_key(keys: Mapping[str, bytes]) -> list[str]:
    """Return the names of silos whose key is another's too."""
    uses = Counter(keys.values())
    return sorted(name for name, key in keys.items() if uses[key] > 1)


def pair_seed(secret: bytes, setup: Stamp, cohort: bytes, one: str, other: str) -> bytes:
    """Return HKDF(shared secret, "pair", run, round, attempt, cohort digest, lower name, higher name)."""
    lower, higher = sorted((one, other))
    return derive(secret, "pair", setup.run, setup.round, setup.attempt, cohort, lower, higher)


@dataclass(frozen=True, repr=False)
class Agreement:
    """What a silo holds after a set-up.

    setup: the set-up's stamp. me: the silo's name. seeds: by neighbour; secret.
    """

    setup: Stamp
    me: str
    cohort: Cohort
    seeds: Mapping[str, bytes]

    def __repr__(self) -> str:
        return f"Agreement({self.me!r}, {self.setup}, {len(self.seeds)} seeds <redacted>)"


class Offer:
    """A silo's key pair of one set-up, until the others' keys come.

    credentials: None trusts what is relayed. insecure, session: see `moretta.secure_aggregation.contributor`; None
    takes the key from the operating system.
    """

    def __init__(
        self, setup: Stamp, me: str, credentials: Credentials | None, insecure: SecretRoot | None, session: int
    ) -> None:
        self._setup, self._me = setup, me
        self._roster = None if credentials is None else credentials.roster
        check_run(self._roster, setup.run)
        private = os.urandom(32)
        if insecure is not None:
            private = insecure.derive("key agreement", setup.run, setup.round, setup.attempt, me, session)
        self._private = X25519PrivateKey.from_private_bytes(private)
        self.public_key = self._private.public_key().public_bytes_raw()
        self.signature = b""
        if credentials is not None:
            statement = _statement(credentials.roster, setup, me, self.public_key)
            self.signature = credentials.identity.sign(*statement)

    def agree(self, peers: PeerKeys, rules: Rules) -> Agreement:
        """Return the seeds with all neighbours. Raises `moretta.errors.PeerError` for keys not of this set-up."""
        if peers.stamp != self._setup:
            raise PeerError(f"expected the keys of {self._setup}, got those of {peers.stamp}")
        if peers.keys.get(self._me) != self.public_key:
            raise PeerError(f"expected the own key of `{self._me}` among the cohort's, unchanged")
        if len(peers.keys) < rules.min_survivors:
            raise PeerError(f"expected a cohort of at least {rules.min_survivors} silos, got {len(peers.keys)}")
        for name, key in peers.keys.items():
            check_advert(self._roster, self._setup, name, key, peers.signatures[name])
        cohort = Cohort.of(peers.keys, rules)
        seeds = {
            name: pair_seed(_exchange(self._private, peers.keys[name]), self._setup, cohort.digest, self._me, name)
            for name in sorted(cohort.neighbours[self._me])
        }
        return Agreement(self._setup, self._me, cohort, seeds)

    def __repr__(self) -> str:
        return f"Offer({self._me!r}, {self._setup}, <redacted>)"


def _exchange(private: X25519PrivateKey, public_key: bytes) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public_key))
    except ValueError:  # cryptography's way to say that the shared secret is all zero
        raise PeerError("expected a public key with a secret of its own, got a point of low order") from None


class SetUp:
    """A silo's half of the set-ups of a run, one after the other. For the arguments see `Offer` and its `agree`."""

    def __init__(
        self, me: str, rules: Rules, credentials: Credentials | None, insecure: SecretRoot | None, session: int
    ) -> None:
        self._me, self._rules, self._credentials = me, rules, credentials
        self._insecure, self._session = insecure, session
        self._offer: Offer | None = None
        self._agreed: tuple[Agreement, Labels] | None = None

    @property
    def members(self) -> Sequence[str]:
        """Who agreed on keys, sorted; nobody before."""
        return () if self._agreed is None else sorted(self._agreed[0].cohort.names)

    @property
    def agreed(self) -> tuple[Agreement, Labels]:
        """The last set-up's agreement, and the masks' labels used since. Raises `moretta.errors.MisuseError` before."""
        if self._agreed is None:
            raise MisuseError("an upload was asked for without a set-up; expected keys to be agreed on")
        return self._agreed

    def answer(self, message: Message) -> Message | None:
        """Answer the messages of the key agreement, None to any other. A new set-up forgets the last one's seeds.

        Raises `moretta.errors.PeerError` as `Offer`, `moretta.errors.MisuseError` for others' keys that come unasked.
        """
        match message:
            case AdvertiseKey():
                self._agreed = None
                self._offer = Offer(message.stamp, self._me, self._credentials, self._insecure, self._session)
                return KeyAdvert(
                    stamp=message.stamp, public_key=self._offer.public_key, signature=self._offer.signature
                )
            case PeerKeys():
                if self._offer is None:
                    raise MisuseError("others' keys came before the own key was asked for")
                agreement = self._offer.agree(message, self._rules)
                self._agreed = agreement, Labels(message.stamp)
                self._offer = None  # a key pair agrees once
                return KeysAccepted(stamp=message.stamp, cohort=agreement.cohort.digest)
        return None

    def __repr__(self) -> str:
        return f"SetUp({self._me!r}, <redacted>)"


def agree_on_keys(now: Stamp, cohort: Sequence[str], rules: Rules) -> Exchange[Cohort | Aborted]:
    """Relay public keys among silos, the server's half of a set-up. Aborts where one is missing or has a bad key.

    Raises `moretta.errors.ParameterError` for fewer than 2 silos.
    """
    check_cohort(cohort)
    if len(cohort) < 2:
        raise ParameterError('one silo needs scheme = "none": its sum would be its own data')
    if len(cohort) < rules.plan(len(cohort)).threshold:
        raise RunFailed(
            f"{now}: expected at least {rules.plan(len(cohort)).threshold} silos, the threshold of secure aggregation, "
            f"{len(cohort)} are left; bring the others back and go on with --resume"
        )

    def check_key(silo: str, advert: KeyAdvert) -> None:
        check_advert(rules.roster, now, silo, advert.public_key, advert.signature)

    adverts = yield Ask.all(cohort, AdvertiseKey(stamp=now), KeyAdvert, check_key)
    keys = {name: advert.public_key for name, advert in adverts.answers.items()}
    twins = dict.fromkeys(sharing_a_key(keys), Missing(Reason.MALFORMED, "expected a key of its own"))
    if missing := {**adverts.missing, **twins}:
        return Aborted(missing)
    agreed = Cohort.of(keys, rules)

    def check_cohort_digest(silo: str, accepted: KeysAccepted) -> None:
        if accepted.cohort != agreed.digest:
            raise PeerError(
                f"`{silo}` has other [secure-aggregation] settings than the server; expected threshold "
                f"{agreed.plan.threshold}, {agreed.plan.degree or 'all'} neighbours and min-survivors "
                f"{agreed.min_survivors} there too"
            )

    signatures = {name: advert.signature for name, advert in adverts.answers.items()}
    relayed = PeerKeys(stamp=now, keys=keys, signatures=signatures)
    accepted = yield Ask.all(cohort, relayed, KeysAccepted, check_cohort_digest)
    return Aborted(accepted.missing) if accepted.missing else agreed
