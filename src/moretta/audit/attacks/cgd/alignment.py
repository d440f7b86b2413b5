"""The relay of an alignment of rows, or a reader of its lists, tests a dictionary of ids against them.

A list contains a E(x) for each id x, in a secret order, with a drawn for this exchange; a run also seals it under the
row's key. For each id of a dictionary, half of it in the list, the attacker computes what needs no secret: hashes of
the id, with the number of its row and without, and the point E(x). An id's score is the number of bits that its closest
mark shares with any 32 bytes of the lists. If lists held marks without a secret, their ids would share all bits; a test
of this attack has such lists, and it finds every id.

**Membership** (`MEMBERSHIP`). A partner reads off which of its own ids the other holders of its row have. That is the
purpose of aligning, so it learns it exactly: its alignment lists its own rows that are shared. For a hospital and an
insurer this is which of the hospital's patients are insured there.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from moretta.audit.attacks.cgd.confined import aligned_order
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given
from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.intervals import Floats, auc, of_rate
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Array, Message
from moretta.data.alignment.curve import POINT_BYTES, encode
from moretta.data.alignment.exchange import Blinded, BlindedAgain
from moretta.data.alignment.partner import IdRules, Listing, Partner
from moretta.data.holders import grid_of
from moretta.errors import ParameterError

MOST = 200  # ids of the list in the dictionary, and as many others
OFFSETS = (0, 12)  # the possible starts of 32 bytes: a plain list, or behind a seal's nonce
SEED = 31


def fits(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    if not run.setting("align"):
        return "the run did not align rows ([protocol] align)"
    return "" if 1 in run.recorded else "round 1, in whose set-up rows were aligned, was not recorded"


def gather(truth: Truth) -> Given:
    """Return the relay's view of the first set-up, a blinded list as in a file, and a dictionary of ids."""
    listing = _listing(truth)
    words = [name for name, _ in dictionary(listing)]
    arrays = {
        "points": Partner(listing).blind(),
        "dictionary": np.frombuffer("\n".join(words).encode(), np.uint8),
    }
    return Given(
        views={"server": (1,)},
        arrays=arrays,
        view="the lists of ids that it relayed in the first set-up, and such a list without its seal",
        knowledge=f"a dictionary of {len(words)} ids, of which half are in the list, and how ids are normalised",
    )


def dictionary(listing: Listing) -> list[tuple[str, bool]]:
    """Return ids of the list and as many similar others, mixed, each with whether it is in the list."""
    members = sorted({name for name, _ in listing.elements})[:MOST]
    held = set(members)
    others = [f"{name[::-1]}{number}" for number, name in enumerate(members)]
    mixed = [(name, name in held) for name in (*members, *others)]
    return [mixed[place] for place in np.random.default_rng(SEED).permutation(len(mixed))]


def attack(case: Case) -> Claim:
    """Claim for each id of the dictionary the most bits of 256 that it shares with a part of the lists."""
    words = case.arrays["dictionary"].tobytes().decode().split("\n")
    seen = [entry.message for entry in case.heard("server", Message, "received")]
    sealed = [message.points for message in seen if isinstance(message, Blinded | BlindedAgain)]
    lists = [case.arrays["points"].reshape(-1), *sealed]
    blocks = np.concatenate([_blocks(points, offset) for points in lists for offset in OFFSETS])
    return {"closeness": np.max([_closest(marks, blocks) for marks in _marks(words)], axis=0)}


def _marks(words: Sequence[str]) -> list[Array]:
    """Return marks that follow from ids without a secret: uint8[ids, 32] of each kind."""
    numbered = [word.encode() + bytes(5) for word in words]
    kinds = (hashlib.sha256, hashlib.sha512, hashlib.blake2s, hashlib.sha3_256)
    marks = [
        np.frombuffer(b"".join(kind(text).digest()[:POINT_BYTES] for text in texts), np.uint8).reshape(-1, POINT_BYTES)
        for kind in kinds
        for texts in ([word.encode() for word in words], numbered)
    ]
    return [*marks, encode(numbered)]


def _blocks(content: Array, offset: int) -> Array:
    whole = (len(content) - offset) // POINT_BYTES
    return content[offset : offset + whole * POINT_BYTES].reshape(-1, POINT_BYTES)


def _closest(marks: Array, blocks: Array) -> Floats:
    """Return the most bits that each mark shares with any block."""
    signs = [1.0 - 2.0 * np.unpackbits(values, axis=1).astype(np.float32) for values in (marks, blocks)]
    return np.asarray((256 + (signs[0] @ signs[1].T).max(axis=1)) / 2, dtype=np.float64)


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare the closeness of ids that are in the list with that of others."""
    inside = np.array([held for _, held in dictionary(_listing(truth))])
    area, interval = auc(claim["closeness"][inside], claim["closeness"][~inside])
    return AttackResult(
        measure="area under the ROC curve of which ids of a dictionary are in a list",
        score=area,
        chance=0.5,
        constant=0.5,
        interval=interval,
        sentence=f"The relay of lists distinguishes ids in a list from others of a dictionary of {len(inside)} with an "
        f"area under the ROC curve of {area:.2f}, where a coin has 0.50",
        figures={"ids": float(len(inside)), "closest_bits": float(claim["closeness"].max())},
    )


def _listing(truth: Truth) -> Listing:
    """Return the rows of the first silo that holds some columns of others' rows."""
    names = [silo.name for silo in truth.federation.silos if silo.columns and silo.subject_ids is not None]
    if not names:
        raise ParameterError("no silo holds columns of rows with ids")
    return _listings(truth)[names[0]]


def _listings(truth: Truth) -> Mapping[str, Listing]:
    """Return the rows of each silo whose rows have ids."""
    rules: IdRules = truth.federation.spec.protocol.id_rules  # type: ignore[attr-defined]  # `fits`: the run is CGD's
    ids = {silo.name: silo.subject_ids for silo in truth.federation.silos}
    return {name: Listing(own, rules, f"silo `{name}`") for name, own in ids.items() if own is not None}


DICTIONARY = Attack(
    name="alignment-dictionary",
    title="tests guessed ids against the lists by which partners match their rows",
    severity="members",
    role="server",
    source="a dictionary of ids against lists of private set intersection; docs/alignment.md",
    protocols=frozenset({"cgd"}),
    fits=fits,
    given=gather,
    attack=attack,
    score=score,
)


def gather_shared(truth: Truth) -> Given:
    """Return the alignment that the first holder of a shared row keeps itself."""
    name = _holders(truth)[0]
    return Given(
        views={},
        arrays={
            "order": np.asarray(aligned_order(truth, name)),
            "rows": np.array(len(_listings(truth)[name].elements)),
        },
        view=f"none but what {name} holds itself",
        knowledge="its own ids, and its alignment",
    )


def attack_shared(case: Case) -> Claim:
    """Claim for each own row whether all other holders have it."""
    shared = np.zeros(int(case.arrays["rows"]), dtype=bool)
    shared[case.arrays["order"]] = True
    return {"shared": shared}


def score_shared(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with all ids in the clear, beside the better of two constant answers."""
    name, *others = _holders(truth)
    listings = _listings(truth)
    theirs = [set(listings[other].elements) for other in others]
    true = np.array([all(own in held for held in theirs) for own in listings[name].elements])
    hits, rate = int((claim["shared"] == true).sum()), float(true.mean())
    return AttackResult(
        measure="rows for which a partner knows correctly whether the others have them",
        score=hits / len(true),
        chance=max(rate, 1 - rate),
        constant=max(rate, 1 - rate),
        interval=of_rate(hits, len(true)),
        sentence=f"For {hits} of its {len(true)} rows a partner knows correctly whether the other holders have them",
        figures={"rows": float(len(true)), "shared": float(true.sum())},
    )


def _holders(truth: Truth) -> tuple[str, ...]:
    for names in grid_of(truth.federation.silos).rows.values():
        if len(names) > 1:
            return names
    raise ParameterError("no row of the grid has several holders")


MEMBERSHIP = Attack(
    name="alignment-membership",
    title="learns which of its own ids a partner has too",
    severity="members",
    role="silo",
    source="what private set intersection is for; docs/alignment.md",
    protocols=frozenset({"cgd"}),
    fits=fits,
    given=gather_shared,
    attack=attack_shared,
    score=score_shared,
)
