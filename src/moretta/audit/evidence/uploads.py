"""A server's data of one round: each silo's upload as received, and their sum.

Under ``none`` uploads are in the clear. Under ``pairwise`` and ``additive-shares`` the sum is recomputed from the
recorded messages, as in `moretta.secure_aggregation`: the uploads, the shares of self-masks, and the keys that
survivors revealed for masks with lost silos. `Uploads.bare` is an upload without those: its words, read as unmasked.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moretta.audit.evidence.case import Case, Heard, PublicRun
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Array, Message, Stamp, Tensors
from moretta.contract.roles import under
from moretta.errors import ParameterError
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.lattice import Lattice, Privacy
from moretta.protocols.common.scoring import Question
from moretta.secure_aggregation.additive import TAG_BYTES, AddedShares, SealedShares
from moretta.secure_aggregation.agreement import KeysAccepted, PeerKeys
from moretta.secure_aggregation.encoding import MOST_WEIGHT, Ring, add_up, decode, shapes_of, unpacked
from moretta.secure_aggregation.graph import CommittedKeys
from moretta.secure_aggregation.masks import Label, label_of
from moretta.secure_aggregation.pairwise import MaskedUpload, NoisedUpload, seeds_of, summed, take_off_excess
from moretta.secure_aggregation.plain import PlainUpload
from moretta.secure_aggregation.settings import SecureAggregation
from moretta.secure_aggregation.sums import Sum, Wanted
from moretta.secure_aggregation.unmasking import (
    Confirmed,
    NoisedShares,
    SelfMaskShares,
    Unmask,
    put_together,
    recovered_masks,
)

PREFIX = "gradient/"  # of gradients in an upload
WHOLE = ("array", "weight")  # before the names of whole weights in one, as in other frameworks
SCALARS = "scalars"  # the room of an upload beside its other tensors
_UPLOADS = (PlainUpload, MaskedUpload, SealedShares)


@dataclass(frozen=True)
class Uploads:
    """One round as the server holds it.

    Attributes:
        parameters: The sent model's parameters, by name; empty if they travelled as one flat array.
        received: Uploads by silo, of the attempt that counted.
        later: The content of other messages of the same stamp.
        names, digest: The cohort of the last set-up, and its digest.
    """

    run: PublicRun
    stamp: Stamp
    parameters: Tensors
    encoding: Mapping[str, int]
    received: Mapping[str, PlainUpload | MaskedUpload | SealedShares]
    later: Sequence[tuple[str, Message]]
    names: tuple[str, ...]
    digest: bytes

    @property
    def counted(self) -> tuple[str, ...]:
        """The silos in the sum: those whose upload arrived, less those lost before their masks were removed."""
        requests = [message.survivors for _, message in self.later if isinstance(message, Unmask)]
        return tuple(silo for silo in sorted(self.received) if not requests or silo in requests[-1])

    def bare(self, silo: str, weight: int) -> dict[str, Array]:
        """Return a silo's upload by tensor, float64, divided by `weight`, its rows; masked words as unmasked."""
        upload = self.received[silo]
        if isinstance(upload, PlainUpload):
            return self._changes({name: np.asarray(value, np.float64) for name, value in upload.tensors.items()})
        ring = Ring(self.run.ring_bits or 64)
        if isinstance(upload, MaskedUpload):
            words = upload.tensors
        else:
            share = np.ascontiguousarray(upload.shares[min(upload.shares)][:-TAG_BYTES]).tobytes()
            words, _ = self._unpacked(np.frombuffer(share, dtype=ring.dtype))
        encoding = self.encoding
        decoded = {name: ring.decode(np.array(w, order="C"), encoding[name]) / weight for name, w in words.items()}
        return self._changes(decoded)

    def total(self) -> Sum:
        """Return the weighted mean over all silos whose uploads counted."""
        mean = self._mean()
        return replace(mean, means=self._changes(mean.means))

    def _changes(self, tensors: Tensors) -> dict[str, Array]:
        """Return tensors with changes of weights instead of whole ones."""
        changed, sent = dict[str, Array](), self.parameters
        for name, value in tensors.items():
            kind, _, of = name.partition("/")
            whole = kind in WHOLE and of in sent
            changed[PREFIX + of if whole else name] = sent[of].astype(np.float64) - value if whole else value
        return changed

    def _mean(self) -> Sum:
        uploads = {silo: self.received[silo] for silo in sorted(self.received)}
        if plain := {silo: upload for silo, upload in uploads.items() if isinstance(upload, PlainUpload)}:
            weight = sum(upload.weight for upload in plain.values())
            names = next(iter(plain.values())).tensors
            parts = [(upload.weight / weight, upload.tensors) for upload in plain.values()]
            means = {name: np.sum([share * held[name] for share, held in parts], axis=0) for name in names}
            return Sum(means, weight, dict.fromkeys(means, 0.0), tuple(plain))
        if any(isinstance(upload, SealedShares) for upload in uploads.values()):
            return self._added()
        return self._unmasked({silo: upload for silo, upload in uploads.items() if isinstance(upload, MaskedUpload)})

    @property
    def _public_weights(self) -> bool:
        return bool(self.run.setting("weights", "secure-aggregation") == "public")

    def _unmasked(self, uploads: Mapping[str, MaskedUpload]) -> Sum:
        requests = [message for _, message in self.later if isinstance(message, Unmask)]
        if not requests or not self.digest:
            raise ParameterError("the keys of this sum were agreed on in a round that was not recorded")
        counted = {silo: uploads[silo] for silo in requests[-1].survivors}
        first = next(iter(counted.values()))
        shapes = shapes_of(first.tensors)
        label = label_of(self.stamp, self.digest, shapes, self.encoding, first.asked)
        shares = {silo: message.by_maker for silo, message in self.later if isinstance(message, SelfMaskShares)}
        secrets = {silo: self._secret(silo, upload.committed, label, shares) for silo, upload in counted.items()}
        confirmed = [(silo, reply) for silo, reply in self.later if isinstance(reply, Confirmed) and silo in counted]
        keys = {silo: reply.keys for silo, reply in confirmed}  # the last of each
        masks = recovered_masks(label, tuple(counted), keys, secrets)
        total = summed(Ring(8 * first.weight.itemsize), counted, masks, shapes, public=self._public_weights)
        if isinstance(first, NoisedUpload):
            self._take_off_excess(total.tensors, label, counted)
        return self._decoded(total.tensors, int(total.weight), tuple(counted))

    def _take_off_excess(self, tensors: Tensors, label: Label, uploads: Mapping[str, MaskedUpload]) -> None:
        """Remove the noise that losses did not need from a sum, as the server did."""
        setting, part = self.run.setting, float(self.run.setting("participation", "run") or 1.0)
        secure = SecureAggregation.model_validate(self.run.settings.get("secure-aggregation", {}))
        silos, colluding = len(self.run.silos), int(setting("dp-colluding") or 0)
        privacy = Privacy(float(setting("dp-noise")), float(setting("dp-clip")), 0.0, colluding=colluding)
        least = secure.sharing_noise(silos, part).least
        privacy = privacy.among(secure.playing(silos, part), least)
        lattice = Lattice.of(privacy, sum(words.size for words in tensors.values()))
        levels = lattice.noise.levels(len(self.names), len(self.names) - least)
        first = levels.first_removed(len(self.names) - len(uploads))
        replies = {silo: message for silo, message in self.later if isinstance(message, NoisedShares)}
        if first > levels.removable or not replies:
            return
        points = {name: place for place, name in enumerate(self.names, 1)}
        tries = (seeds_of(label, uploads, replies, points, t, first) for t in range(len(replies), 1, -1))
        plan = Wanted(shapes_of(tensors), self.encoding, 0, lattice.noise)
        take_off_excess(tensors, plan, levels, first, max(tries, key=len).values())

    def _secret(self, maker: str, committed: bytes, label: Label, shares: Mapping[str, Mapping[str, bytes]]) -> bytes:
        """Return a survivor's secret. It tries thresholds: the right one gives what the maker committed to."""
        points = {self.names.index(holder) + 1: held[maker] for holder, held in shares.items() if maker in held}
        for threshold in range(len(points), 1, -1):
            if secret := put_together(points, threshold, label, maker, committed):
                return secret
        raise ParameterError("the recorded shares do not unmask this sum")

    def _added(self) -> Sum:
        added = {silo: message.words for silo, message in self.later if isinstance(message, AddedShares)}
        weight = sum(message.weight for message in self.received.values() if isinstance(message, SealedShares))
        tensors, first = self._unpacked(add_up(list(added.values())))
        return self._decoded(tensors, weight if self._public_weights else first, tuple(sorted(added)))

    def _unpacked(self, words: Array) -> tuple[dict[str, Array], int]:
        """Return concatenated tensors in the order of their names, and the weight before them."""
        words = np.array(words)
        shapes = {name: self._shape(name) for name in set(self.encoding) - {MOST_WEIGHT, SCALARS}}
        rest = words if self._public_weights else words[1:]
        if SCALARS in self.encoding:
            shapes[SCALARS] = (rest.size - sum(map(math.prod, shapes.values())),)
        return unpacked(rest, shapes), int(words[0])

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor of an upload: ``PREFIX/PARAMETER`` is as the parameter."""
        if "/" in name:
            return np.shape(self.parameters[name.rpartition("/")[2]])
        if name == "alpha_h":  # a term of the head's inputs, and of its bias if it has one
            return (np.shape(self.parameters[self.run.head])[1] + bool(self.run.head_bias),)
        return ()

    def _decoded(self, tensors: Mapping[str, Array], weight: int, silos: tuple[str, ...]) -> Sum:
        request = Wanted(shapes_of(tensors), self.encoding, self.encoding[MOST_WEIGHT])
        return decode(Ring(self.run.ring_bits or 64), tensors, weight, silos, request)


def of_round(case: Case, number: int) -> Uploads:
    """Return what the server of a case holds of a round. Raises ParameterError if no upload of it was recorded."""
    return from_heard(case.run, case.heard("server", Message), number)


def from_heard(run: PublicRun, heard: Sequence[Heard], number: int) -> Uploads:
    """Return what a server that heard these messages, in order, holds of a round. Raises as `of_round`."""
    heard = [entry for entry in heard if entry.round <= number]
    messages = [entry.message for entry in heard if entry.round == number and not isinstance(entry.message, Question)]
    # The request to train has its parameters and the encoding of uploads.
    asks = [message for message in messages if hasattr(message, "parameters") and hasattr(message, "encoding")]
    if not asks:
        raise ParameterError(f"no uploads of round {number} were recorded")
    ask: Any = asks[-1]  # of the attempt that counted
    place = [type(entry.message) is type(ask) and entry.message.stamp == ask.stamp for entry in heard].index(True)
    later = [(entry.peer, entry.message) for entry in heard[place:] if entry.message.stamp == ask.stamp]
    keys = [entry.message for entry in heard[:place] if isinstance(entry.message, PeerKeys | CommittedKeys)]
    accepted = [entry.message for entry in heard[:place] if isinstance(entry.message, KeysAccepted)]
    # In a round of several steps a later message has the encoding of the upload.
    encodings = [message.encoding for _, message in later if hasattr(message, "encoding")]
    return Uploads(
        run=run,
        stamp=ask.stamp,
        parameters=ask.parameters if isinstance(ask.parameters, Mapping) else {},
        encoding=encodings[-1],
        received={peer: message for peer, message in later if isinstance(message, _UPLOADS)},
        later=later,
        names=tuple(sorted(keys[-1].keys)) if keys else (),
        digest=accepted[-1].cohort if accepted else b"",
    )


def survivors(truth: Truth, number: int) -> tuple[str, ...]:
    """Return the silos whose uploads counted in a round, in the run's order; empty if no upload was recorded.

    The server sees it; other silos did not take part, or were lost.
    """
    try:
        counted = from_heard(truth.run, truth.heard("server", number), number).counted
    except ParameterError:
        return ()
    return tuple(silo for silo in truth.run.silos if silo in counted)


def first_rounds(truth: Truth, most: int, least: int = 1) -> dict[int, tuple[str, ...]]:
    """Return the first `most` recorded rounds with uploads of `least` silos, and these silos; or ParameterError."""
    rounds = dict[int, tuple[str, ...]]()
    for number in truth.recorded:
        if len(rounds) < most and len(counted := survivors(truth, number)) >= least:
            rounds[number] = counted
    if not rounds:
        raise ParameterError(
            f"in no recorded round did the uploads of {least} silos count"
            if least > 1
            else "in no recorded round did a silo's upload count"
        )
    return rounds


def sum_of(least: int, most: int | None = None) -> str:
    """Return "the sum of N silos" in words; "sums" if rounds had from least to most silos."""
    if most is not None and most > least:
        return f"sums of {least} to {most} silos"
    return "the sum of one silo" if least == 1 else f"the sum of {least} silos"


def rows_of(run: PublicRun, silo: str, number: int) -> int:
    """Return the rows of a silo's batch of a round, by public sizes; with dp-noise the expected number."""
    batches = Batches(run.rows[silo], int(run.setting("batch-size", "data") or 0), 0, silo, in_order=True)
    return batches.size if run.setting("dp-noise") else len(batches.of_round(number))


def gradient_of(tensors: Tensors, prefix: str = PREFIX) -> dict[str, Array]:
    """Return the gradient in an upload or a sum, by parameter, float64; for weighted classes per unit of weight."""
    density = float(np.asarray(tensors.get("density", 1.0)))
    return {name: np.asarray(value, np.float64) / density for name, value in under(prefix, tensors).items()}
