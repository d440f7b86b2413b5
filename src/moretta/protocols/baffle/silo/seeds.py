"""The seed of the directions, which no role can choose: each commits to its part before it sees another's.

    server                                         silo k
      Commit(cohort)                         -->     draws its contribution c_k
                                             <--   Committed(H(c_k))
      Reveal(all H(c_j), the server's too)   -->     checks that its own is among them
                                             <--   Revealed(c_k)
      Agree(all c_j, H(graph) of each kind)  -->     checks each against its H(c_j), and the graph that it runs
                                             <--   Agreed(digest of the seed)

    seed = HKDF(H(all c_j))          a round's directions: HKDF(seed, run, round, parameter hash)

Differs from the paper, whose server sends the seed: a party that chooses it chooses the directions, and with them the
uploaded part of the silos' gradient. If a server omits a silo and asks again, each silo has a new contribution for the
new cohort. For one cohort a contribution is always the same, so that a resumed run has the same directions. A silo
reveals it only for the commitments it saw first: otherwise a server that stopped after it had seen all contributions
could choose its own anew.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from moretta.contract.messages import Array, Message, Stamp
from moretta.contract.roles import Aborted, Ask, Exchange, Missing, Reason, State, under
from moretta.errors import ParameterError, PeerError
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.baffle.silo.messages import RUNS_TORCH, Agree, Agreed, Commit, Committed, Reveal, Revealed
from moretta.secure_aggregation.keystream import SecretRoot, derive, encode_parts

SERVER = "server"  # no silo's name


def parameter_hash(layout: Layout, parameters: Array) -> bytes:
    """Return SHA-256 over the layout and the flat parameters, which identifies a round's model."""
    digest = hashlib.sha256(encode_parts("baffle parameters", layout.digest, parameters.dtype.str))
    digest.update(np.ascontiguousarray(parameters).data)
    return digest.digest()


class Seed:
    """One role's part in agreeing on the seed. name: of the silo, or `SERVER`. root: of its contributions."""

    def __init__(self, name: str, root: SecretRoot) -> None:
        self._name, self._root = name, root
        self._cohort, self._names = b"", frozenset[str]()
        self._contribution = b""
        self._commitments: Mapping[str, bytes] = {}
        self._revealed_for: dict[str, bytes] = {}  # the digest of the commitments, by that of the cohort
        self.seed = b""

    def begin(self, run: str, cohort: Sequence[str]) -> bytes:
        """Return this role's commitment for a cohort."""
        self._names, self._cohort = frozenset(cohort), _digest_of(cohort)
        self._contribution = self._root.derive("baffle contribution", run, self._cohort)
        self._commitments, self.seed = {}, b""
        return commitment(self._name, self._contribution)

    def reveal(self, commitments: Mapping[str, bytes]) -> bytes:
        """Return this role's contribution. Raises `moretta.errors.PeerError` for wrong commitments."""
        own = commitment(self._name, self._contribution)
        if commitments.get(self._name) != own or set(commitments) != self._names | {SERVER}:
            raise PeerError(
                "expected the commitments of the server and of the cohort's silos, one's own as it was sent"
            )
        shown = hashlib.sha256(_in_order(commitments)).digest()
        if self._revealed_for.setdefault(self._cohort.hex(), shown) != shown:
            raise PeerError(
                "these silos had shown other commitments before; expected the same, as this contribution was revealed "
                "for those"
            )
        self._commitments = dict(commitments)
        return self._contribution

    def agree(self, contributions: Mapping[str, bytes]) -> bytes:
        """Set the seed from all contributions; return its digest. Raises `moretta.errors.PeerError`."""
        if not self._commitments or set(contributions) != set(self._commitments):
            raise PeerError("expected a contribution for each commitment that was shown")
        for name, value in contributions.items():
            if not hmac.compare_digest(commitment(name, value), self._commitments[name]):
                raise PeerError(f"the contribution of `{name}` is not the one it was committed to")
        self.seed = seed_of(contributions)
        return hashlib.sha256(self.seed).digest()

    def own(self) -> bytes:
        """Return the secret of this role's own directions, which no message carries."""
        return self._root.derive("baffle own directions")

    def state(self) -> State:
        """Return the root, and the commitments for which its contributions were revealed."""
        revealed = {f"revealed-for/{key}": value for key, value in self._revealed_for.items()}
        return {"secret_root": self._root.reveal(), **revealed}

    def restore(self, state: State) -> None:
        """Restore what `state` returned."""
        self._root = SecretRoot(state["secret_root"])
        self._revealed_for = under("revealed-for/", state)


def commitment(name: str, contribution: bytes) -> bytes:
    """Return H(c), 32 bytes; a contribution has 32 bytes of the operating system's entropy, which hides it."""
    return hashlib.sha256(encode_parts("baffle commitment", name, contribution)).digest()


def seed_of(contributions: Mapping[str, bytes]) -> bytes:
    """Return the seed of all roles' contributions."""
    joined = hashlib.sha256(_in_order(contributions)).digest()
    return derive(joined, "baffle seed", _digest_of(contributions.keys() - {SERVER}))


def _digest_of(cohort: Iterable[str]) -> bytes:
    return hashlib.sha256(encode_parts("baffle cohort", *sorted(cohort))).digest()


def _in_order(values: Mapping[str, bytes]) -> bytes:
    return encode_parts(*(part for name in sorted(values) for part in (name, values[name])))


def agree(
    now: Stamp, cohort: Sequence[str], seed: Seed, layout: Layout, graph_of: Callable[[str], bytes]
) -> Exchange[Aborted | Sequence[bytes]]:
    """Agree on a seed with a cohort, the server's half; return `agreed_graphs`. graph_of: ONNX, by precision."""
    own = seed.begin(now.run, cohort)
    commitments = {SERVER: own}
    replies = yield Ask.all(cohort, Commit(stamp=now, cohort=tuple(sorted(cohort))), Committed)
    if replies.missing:
        return Aborted(replies.missing)
    runs = {silo: reply.runs for silo, reply in replies.answers.items()}
    commitments |= {silo: reply.commitment for silo, reply in replies.answers.items()}

    def opens(silo: str, reply: Revealed) -> None:
        if commitment(silo, reply.contribution) != commitments[silo]:
            raise PeerError("the contribution is not the one the silo was committed to")

    replies = yield Ask.all(cohort, Reveal(stamp=now, commitments=commitments), Revealed, opens)
    if replies.missing:
        return Aborted(replies.missing)
    contributions = {silo: reply.contribution for silo, reply in replies.answers.items()}
    contributions[SERVER] = seed.reveal(commitments)
    digest = seed.agree(contributions)
    graphs, without = dict[str, Array](), dict[str, Missing]()
    for kind in sorted(set(runs.values())):
        try:
            graphs[kind] = np.frombuffer(graph_of(kind), dtype=np.uint8)
        except ParameterError as error:  # a silo's own choice of precision must not stop the others
            asked = [silo for silo, its in runs.items() if its == kind]
            without |= {silo: Missing(Reason.BAD_INPUT, str(error)) for silo in asked}
    if without:
        return Aborted(without)

    def same(silo: str, reply: Agreed) -> None:
        if reply.digest != digest:
            raise PeerError("the silo arrived at another seed")

    digests = {kind: hashlib.sha256(graph.data).digest() for kind, graph in graphs.items() if kind != RUNS_TORCH}
    asks: dict[str, Message] = {
        silo: Agree(
            stamp=now,
            contributions=contributions,
            layout=layout.digest,
            graph=graphs[runs[silo]],
            graphs=digests,
        )
        for silo in cohort
    }
    replies = yield Ask(asks, Agreed, same)
    return Aborted(replies.missing) if replies.missing else agreed_graphs(digests)


def agreed_graphs(digests: Mapping[str, bytes]) -> Sequence[bytes]:
    """Return the digest of a cohort's graphs, to which each upload is bound; empty if no silo runs one.

    Without it a server could send one silo another graph, with outputs of its choice, and read that silo's out of two
    sums.
    """
    return (hashlib.sha256(encode_parts("baffle graphs", _in_order(digests))).digest(),) if digests else ()
