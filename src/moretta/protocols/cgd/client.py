"""A participant: its confined model, its displacement D, and the groups that share its layers.

**One z a take** (`Client._hold`): in a take of a round a participant repeats its answer, or refuses.

A row's z is masked by keystreams of its stamp. Two z under one stamp would give their difference, X_ij (D - D'), to
their relay; two under two attempts, or in two sessions, would give it to the row's head. A party that can choose D then
has X_ij. Two Delta under one sum give the difference of this participant's parts of it, and the head chooses Delta. So
the inputs of z (rows, weights and encoding), what is joined to z, and Delta keep their first values in a take. The
inputs of z are held, and not z: otherwise a refusal would show whether a change of D changes z. If all rows are used,
all takes of a round have the same rows, and the round has one z; Delta also follows from dropout, which each take draws
anew.

A digest of each is recorded before the answer leaves (`moretta.secure_aggregation.one_sum`), so a restart, an earlier
checkpoint or another session changes nothing. A round repeated from the same state has the same z.
"""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from moretta.contract.messages import Array, Message, Stamp, Tensors
from moretta.contract.roles import Phase, State, no_phase, over, under
from moretta.data.alignment.exchange import MESSAGES as ALIGNMENT
from moretta.errors import MisuseError, PeerError, SumSpent
from moretta.protocols.cgd import local, messages
from moretta.protocols.cgd.group_keys import GroupKeys, group_of
from moretta.protocols.cgd.layers import Group, Layers, summed
from moretta.protocols.cgd.messages import ROW_RING, Contribute, Descend, Done, Forward, Join, Scored
from moretta.protocols.cgd.params import CGD
from moretta.protocols.cgd.row_order import RowOrder
from moretta.protocols.common import modules, scoring
from moretta.protocols.common.clipping import Clip
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.overlap import AskApart, compared
from moretta.protocols.common.scoring import Score
from moretta.protocols.common.silo_rows import Begin, Ready
from moretta.protocols.common.silo_setup import SiloSetup
from moretta.protocols.common.statistics import NOTHING, Statistics
from moretta.secure_aggregation import agreement
from moretta.secure_aggregation.agreement import PeerKeys
from moretta.secure_aggregation.keyed_sums import Contributor
from moretta.secure_aggregation.keystream import SecretRoot, digest_of, encode_parts
from moretta.secure_aggregation.masks import add_masks
from moretta.secure_aggregation.sums import Query, Relayed, Sum, message_digest, query_of


def _digest(content: Array | bytes) -> bytes:
    return hashlib.sha256(content if isinstance(content, bytes) else np.ascontiguousarray(content).data).digest()


OF_A_ROW = (messages.DescribeRows, Forward, Join, messages.Backward)  # their answers are for the own row alone
BEFORE_ORDER = (
    messages.Where,
    messages.UseAlignment,
    messages.DrawKey,
    messages.TakeKey,
    *ALIGNMENT,
    *agreement.MESSAGES,
)
"""The messages that a participant answers before its rows are aligned; others are about the rows that holders share."""


@dataclass(frozen=True)
class GridPosition:
    """A participant's public place in the grid.

    Args:
        row: The holders of columns of the same rows, itself included.
        head: The participant with the labels; None if each participant has its own model.
        columns: The indices of its columns, empty for all.
        groups: The groups of its layers by name, also those with no other member.
    """

    me: str
    row: tuple[str, ...]
    head: str | None
    columns: tuple[int, ...]
    groups: Mapping[str, Group]


class Client:
    """Answers for one participant (Algorithms 1 and 2).

    Args:
        model: The whole architecture, the same for all.
        order: Its rows, in the order of its row of the grid.
        root: Of its start.
        contributors, statistics: By group.
        blind: Whether sums are hidden from their relay.
    """

    def __init__(
        self,
        params: CGD,
        position: GridPosition,
        model: nn.Module,
        order: RowOrder,
        root: SecretRoot,
        contributors: Mapping[str, Contributor],
        group_keys: GroupKeys,
        statistics: Mapping[str, Statistics],
        setup: SiloSetup,
        *,
        blind: bool,
    ) -> None:
        self.phase: Phase = no_phase
        self._params, self._position, self._order, self._root = params, position, order, root
        self._contributors, self._group_keys, self._setup, self._blind = contributors, group_keys, setup, blind
        self.scores: Mapping[str, float] = {}  # of all models together, where sums are blind
        self._template = copy.deepcopy(model)
        self._layers = Layers.of(model) if position.columns else None
        self._ties = modules.ties(model) if self._layers is None else {}
        self._module = self._own_module(model)
        self.displacement = {
            name: np.zeros(shape) for group in position.groups.values() for name, shape in group.shapes.items()
        }
        self._steps = dict.fromkeys(position.groups, 0)
        self._agreed = dict[str, bytes]()  # by group, the digest of its set-up's agreement
        self._moved = dict[str, bytes]()  # by group, the digest of D, until the next step
        # By group. All readers of the sums clip them alike.
        self._clips = {group: Clip(_summed_in(group)) for group in position.groups}
        self._start = self._confined()
        self._local: tuple[Stamp, local.Local] | None = None  # of this attempt; a group's name is not in the stamp
        self._own_z: tuple[Stamp, Tensor, Array] | None = None  # a joint row's batch, and this holder's part of z
        self._statistics = statistics

    def answer(self, message: Message) -> Message:
        """Answer one message."""
        group = group_of(message.stamp)
        if isinstance(message, PeerKeys):  # the peers of an upload's masks
            self._group_keys.membership.check(group, message.keys)
        if isinstance(message, OF_A_ROW):
            self._order.check_group(message.stamp)
        if not isinstance(message, BEFORE_ORDER):
            self._order.check()
        if (aligning := self._order.answer(message)) is not None:
            return aligning
        match message:
            case messages.Where():
                return messages.Here(stamp=message.stamp, steps=self._steps)
            case messages.DrawKey():
                return messages.GroupKey(
                    stamp=message.stamp, sealed=self._group_keys.draw(message.stamp, message.members)
                )
            case messages.TakeKey():
                opened = self._group_keys.take(message.stamp, message.maker, message.sealed)
                return messages.KeyTaken(stamp=message.stamp, opened=opened)
            case AskApart():
                return compared(message, self._rows.of.subjects, self._rows.answers)
            case messages.DescribeRows():
                if not self._others():
                    raise PeerError("expected to compare rows with another holder of them, but has no other")
                ids = self._order.ids
                digest = b"" if ids is None else self._group_keys.digest(message.stamp, ids)
                return messages.RowsDescribed(stamp=message.stamp, rows=self._rows.batches.rows, digest=digest)
            case Forward():
                return self._partial(message)
            case Join():
                return self._join(message)
            case messages.Backward():
                return self._backward(message)
            case Contribute():
                return self._contribute(message, group)
            case Descend():
                return self._descend(message, group)
            case messages.StepAlone():
                alone = self._group(group)
                if len(alone.members) > 1:  # the others would see the step as this one's own gradient
                    raise PeerError(f"expected the sum of group `{group}`, which others share, got a step alone")
                self._step(group, message.stamp, self._regularised(self._gradient(message.stamp), alone))
                return Done(stamp=message.stamp)
            case Score():
                return self._score(message, group)
            case Scored():
                return self._take_scores(message, group)
            case messages.ShowDisplacement():
                return self._show(message, group)
            case messages.CatchUp():
                return self._catch_up(message, group)
            case Begin() if group in self._contributors:
                return self._begin(message, group)
        reply = self._group_keys.answer(message) if group not in self._contributors else None
        if reply is not None:
            return reply
        with self.phase("aggregation"):
            return self._rows.answer(message, self._contributor(group), self._template, self._statistics.get(group))

    def _begin(self, ask: Begin, group: str) -> Message:
        # z under two preparations that the relay chose would show W_1, and with it the rows.
        if not self._rows.answers.hold(ask.stamp.run, "preparation", digest_of(ask.preparation.figures)):
            raise PeerError("expected the preparation of columns that this run began with, got another")
        self._agreed[group], statistics = message_digest(ask), self._statistics.get(group)
        if self._layers is None or self._layers.weight in self._group(group).shapes:
            return self._rows.answer(ask, self._contributor(group), self._template, statistics)
        if ask.schema != modules.schema(self._template):
            raise PeerError("the model here has other tensors than the others'; expected the same")
        self._rows.of.prepare(ask, statistics or NOTHING, inputs=False)
        self._rows.take_up()
        return Ready(stamp=ask.stamp)

    @property
    def _rows(self) -> SiloRows:
        return self._order.rows

    # Starts

    def _own_module(self, model: nn.Module) -> nn.Module | None:
        """Return the module that this participant runs alone; None if its row runs one together."""
        if self._position.head is not None:
            return None
        if self._layers is None:
            return copy.deepcopy(model).train()
        return local.narrowed(model, self._layers, len(self._position.columns)).train()

    def _confined(self) -> dict[str, Array]:
        """Return w_l(1) of all tensors that this participant holds."""
        shared = local.shared_biases(self._params, self._template)
        own = [name for name in self.displacement if name not in shared]
        return local.confined(self._params, self._around(), own, self._position.me, self._root)

    def _around(self) -> dict[str, Array]:
        around = local.centers(self._params, self._template, self._setup.seed)
        if self._layers is not None:
            weight = self._layers.weight
            around[weight] = around[weight][:, list(self._position.columns)]
            if self._position.head not in (None, self._position.me):
                around = {weight: around[weight]}
        return around

    def model(self) -> dict[str, Array]:
        """Return w_l(k) of this participant's tensors, which no other party may see."""
        return self._tied_together(summed(self._start, self.displacement))

    def displaced(self) -> dict[str, Array]:
        """Return D added to the centre of the starts, which all that share the layers know."""
        own = {name: value for name, value in self._start.items() if name not in self.displacement}
        return self._tied_together(summed(self._around() | own, self.displacement))

    def _tied_together(self, weights: dict[str, Array]) -> dict[str, Array]:
        """Return the weights with equal tied tensors under each name; the first name is the trained one."""
        return weights | {name: weights[first] for name, first in self._ties.items()}

    # One iteration

    def _gradient(self, stamp: Stamp) -> local.Local:
        """Return the gradient of this round: computed once an attempt, or left by the row's forward and backward."""
        if self._local is not None and _same_time(self._local[0], stamp):
            return self._local[1]
        if self._module is None:
            raise MisuseError("was asked for a gradient before the row's forward and backward passes were done")
        self._check_turn(stamp)
        passed = local.whole_gradient(
            self._module, self.model(), self._rows, self._params.loss_function, stamp.drawn, self.phase
        )
        self._local = stamp, passed
        return passed

    def _contribute(self, ask: Contribute, group: str) -> Message:
        passed, shared = self._gradient(ask.stamp), self._group(group)
        with self.phase("aggregation"):
            upload = self._regularised(passed, shared)
            if shared.tells_loss:
                upload["loss"] = np.asarray(passed.loss)
            key = self._group_keys.key(group) if self._blind else None
            about = self._asked(ask, group)
            return self._contributor(group).upload(ask.stamp, upload, passed.rows, ask.encoding, key, asked=about)

    def _regularised(self, passed: local.Local, group: Group) -> dict[str, Array]:
        """Return the gradients of a group's layers, each with the regulariser's of the own model (Eq. 4)."""
        decay = self._params.weight_decay
        if not decay:
            return {name: passed.gradients[name] for name in group.shapes}
        weights = self.model()
        return {name: passed.gradients[name] + np.asarray(decay * weights[name]) for name in group.shapes}

    def _asked(self, ask: Contribute, group: str) -> Query:
        """Return the query of an upload: the ask, the set-up's agreement, and the group's D and number of steps."""
        if group not in self._moved:
            self._moved[group] = digest_of({name: self.displacement[name] for name in self._group(group).shapes})
        agreed = (self._agreed.get(group, b""), self._moved[group], encode_parts(self._steps[group]))
        return query_of(ask, *agreed, whole=self._rows.batches.whole)

    def _descend(self, ask: Descend, group: str) -> Done:
        self._check_members(ask.silos, group)
        means = ask.tensors
        if self._blind:
            with self.phase("aggregation"):
                about = self._asked(Contribute(stamp=ask.stamp, encoding=ask.encoding), group)
                means = self._read(ask, group, about).means
        elif any(mean.dtype != np.float64 for mean in means.values()):
            raise PeerError(f"expected means of the layers of group `{group}` in float64")
        shapes = {name: mean.shape for name, mean in means.items()}
        if shapes != {name: tuple(shape) for name, shape in self._group(group).summed.items()}:
            raise PeerError(f"expected a sum of the layers of group `{group}`")
        gradients = {name: means[name] for name in self._group(group).shapes}
        self._check_order(group, ask.stamp)
        factor = self._clips[group].factor(gradients, ask.stamp.round)
        means = gradients if factor == 1.0 else {name: gradient * factor for name, gradient in gradients.items()}
        self._step(group, ask.stamp, means)
        return Done(stamp=ask.stamp)

    def _check_members(self, silos: Sequence[str], group: str) -> None:
        self._group_keys.membership.check(group, silos)
        if not silos:
            raise PeerError(f"expected a sum over members of group `{group}`")

    def _read(self, ask: Descend | Scored, group: str, about: Query) -> Sum:
        """Return the value of a blind sum. about: the query of its uploads."""
        relayed, key = Relayed(ask.tensors, ask.weight, ask.silos), self._group_keys.key(group)
        return self._contributor(group).read(ask.stamp, relayed, ask.encoding, key, asked=about)

    def _step(self, group: str, stamp: Stamp, means: Tensors) -> None:
        """Take line 10 of Algorithm 1 on one group's layers: D <- D - alpha_k sum n_l g_l / sum n_l."""
        self._check_order(group, stamp)
        with self.phase("update"):
            rate = self._params.rate(stamp.round, self._setup.rounds)
            for name in self._group(group).shapes:
                self.displacement[name] = self.displacement[name] - rate * means[name]
            if self._local is not None and _same_time(self._local[0], stamp):
                self._start |= self._local[1].buffers
            self._steps[group] = stamp.round
            self._moved.pop(group, None)

    def _check_order(self, group: str, stamp: Stamp) -> None:
        if self._steps[group] >= stamp.round:
            raise PeerError(f"round {stamp.round} of group `{group}` was stepped by before; expected a later one")

    def _check_turn(self, stamp: Stamp) -> None:
        if max(self._steps.values(), default=0) >= stamp.round:
            raise PeerError(f"round {stamp.round} was stepped by before; expected a later one")

    # A row's forward and backward passes

    def _partial(self, ask: Forward) -> messages.Partial:
        if self._position.head == self._position.me:
            raise MisuseError("was asked to send its part of z, which the head of a row joins to the others' itself")
        if ask.fraction_bits > (most := messages.bits_of_z(len(self._position.row))):
            # A refusal of z itself would show whether a value is out of a range that the relay chose.
            raise PeerError(f"expected an encoding of z of at most {most} fraction bits, got {ask.fraction_bits}")
        z = self._part_of_z(ask.stamp)
        self._hold_z(ask)
        words = ROW_RING.encode("z", z, 1, ask.fraction_bits, len(self._position.row), len(self._position.row))
        add_masks(words, self._group_keys.row_masks(ask.stamp, self._others(), words.shape, ask.fraction_bits))
        return messages.Partial(stamp=ask.stamp, words=words)

    def _part_of_z(self, stamp: Stamp) -> Array:
        layers = self._layers
        if layers is None or self._position.head is None:
            raise MisuseError("was asked for its part of a row's first layer, but has a model of its own")
        self._check_turn(stamp)
        index = self._rows.batches.of_round(*stamp.drawn)
        with self.phase("local_forward"):
            x = self._rows.x[torch.from_numpy(index)]
            z = local.part_of_z(x, self.model()[layers.weight])
        self._own_z, self._local = (stamp, x, z), None
        return z

    def _join(self, ask: Join) -> messages.Deltas:
        """Complete z, pass forward through the upper layers and backward to z, and take the own gradient."""
        if self._layers is None or self._position.head != self._position.me:
            raise MisuseError("was asked to join a row's first layer without having its labels")
        own = self._part_of_z(ask.stamp)
        z = own.astype(np.float64)
        others, joined = self._others(), np.empty(0)
        if others:
            if ask.words.shape != own.shape:
                raise PeerError(f"expected the others' parts of z, {list(own.shape)}, got {list(ask.words.shape)}")
            words = np.array(ask.words, order="C")
            add_masks(words, self._group_keys.row_masks(ask.stamp, others, words.shape, ask.fraction_bits))
            joined = ROW_RING.decode(words, ask.fraction_bits)
            z = z + joined
        self._hold_z(ask, joined)
        targets = self._rows.y[torch.from_numpy(self._rows.batches.of_round(*ask.stamp.drawn))]
        with self._rows.randomness(*ask.stamp.drawn):
            delta, passed = local.head_pass(
                self._layers,
                self.model(),
                torch.from_numpy(z).to(self._rows.device, self._rows.dtype),
                targets,
                self._params.loss_function,
                self.phase,
                self._rows.passes,
            )
        self._take_gradient(ask.stamp, delta, passed)
        content = delta.cpu().contiguous().numpy().tobytes() if others else b""
        sealed = (
            self._group_keys.seal(ask.stamp, "delta", self._position.me, content) if others else np.empty(0, np.uint8)
        )
        return messages.Deltas(stamp=ask.stamp, sealed=sealed)

    def _backward(self, ask: messages.Backward) -> Done:
        head = self._position.head
        if head is None or head == self._position.me:
            raise MisuseError("was sent Delta, which the head of its row makes itself")
        if self._own_z is None or not _same_time(self._own_z[0], ask.stamp):
            raise MisuseError("was sent Delta before it was asked for its part of z")
        _, x, z = self._own_z
        content = self._group_keys.open(ask.stamp, "delta", head, ask.sealed)
        if len(content) != x.element_size() * z.size:
            raise PeerError(f"expected Delta of shape {list(z.shape)}, got {len(content)} bytes")
        delta = torch.frombuffer(bytearray(content), dtype=x.dtype).reshape(z.shape).to(x.device)
        if not bool(torch.isfinite(delta).all()):
            raise PeerError("expected a finite Delta")
        self._hold(ask.stamp, "Delta", content, whole=False)
        self._take_gradient(ask.stamp, delta, local.Local({}, 0.0, len(x), {}))
        return Done(stamp=ask.stamp)

    def _take_gradient(self, stamp: Stamp, delta: Tensor, passed: local.Local) -> None:
        """Keep this attempt's gradients: the upper layers', and the own part of the first layer's."""
        if self._own_z is None or self._layers is None:
            raise MisuseError("a gradient was asked for before a forward pass")
        with self.phase("local_backward"):
            x = self._own_z[1]
            first = (delta.T @ x / len(x)).cpu().numpy()  # X_ij' Delta_i / n_i
        gradients = {**passed.gradients, self._layers.weight: first}
        self._local = stamp, local.Local(gradients, passed.loss, passed.rows, {})

    def _hold(self, stamp: Stamp, name: str, *content: Array | bytes, whole: bool) -> None:
        """Bind a take to this content before an answer from it leaves; if `whole`, bind all takes of the round.

        Raises `moretta.errors.SumSpent` for another content, with the next take; `moretta.errors.PeerError` if `whole`,
        because no take is free.
        """
        take = 0 if whole else stamp.take
        if self._setup.answers.hold(stamp.run, f"{name} of round {stamp.round}, take {take}", *map(_digest, content)):
            return
        if not whole:
            raise SumSpent(stamp.take + 1, (), False)
        raise PeerError(
            f"{stamp}: {name} differs from an earlier answer in this take, the only one of a round of all rows; "
            "expected the same, as from the state that the round started from before"
        )

    def _hold_z(self, ask: Forward | Join, *others: Array) -> None:
        """Bind a take to the inputs of its z. others: what a head joins to its own part."""
        layers = self._layers
        weights = np.empty(0) if layers is None else self.model()[layers.weight]
        follows = (self._rows.of.digest, weights, str(ask.fraction_bits).encode(), *others)
        self._hold(ask.stamp, "z", *follows, whole=self._rows.batches.whole)

    def _others(self) -> list[str]:
        return [name for name in self._position.row if name != self._position.me]

    # The end

    def _score(self, ask: Score, group: str) -> Message:
        if self._module is None:
            raise MisuseError("was asked for the score of its own model, but its row of the grid runs one together")
        modules.load(self._module, self.model())
        key = self._group_keys.key(group) if self._blind else None
        agreed, own = (self._agreed[group],), digest_of(self.model())
        return self._rows.score(ask, self._contributor(group), self._module, key, agreed, own)

    def _take_scores(self, ask: Scored, group: str) -> Done:
        self._check_members(ask.silos, group)
        about = scoring.asked_of(
            Score(stamp=ask.stamp, parameters={}, encoding=ask.encoding), (self._agreed.get(group, b""),)
        )
        self.scores = scoring.read(self._read(ask, group, about), self._setup.figures)
        return Done(stamp=ask.stamp)

    # Missed steps

    def _show(self, ask: messages.ShowDisplacement, group: str) -> messages.Displacement:
        parts = [self.displacement[name] for name in sorted(self._group(group).shapes)]
        content = b"".join(part.tobytes() for part in [*parts, self._clips[group].norms()])
        steps = self._steps[group]
        sealed = self._group_keys.seal(ask.stamp, _displacement_after(steps), self._position.me, content)
        return messages.Displacement(stamp=ask.stamp, sealed=sealed, steps=steps)

    def _catch_up(self, ask: messages.CatchUp, group: str) -> Done:
        shapes, own = self._group(group).shapes, self._steps[group]
        if not own < ask.steps < ask.stamp.round or ask.maker == self._position.me:
            raise PeerError(
                f"expected another member's D of group `{group}` after a round later than {own} and before "
                f"{ask.stamp.round}, got that of `{ask.maker:.64}` after {ask.steps}"
            )
        content = self._group_keys.open(ask.stamp, _displacement_after(ask.steps), ask.maker, ask.sealed)
        values = np.frombuffer(content, dtype=np.float64)
        size = sum(int(np.prod(shape)) for shape in shapes.values())
        norms = values[size:]  # at most one a round
        if not size <= len(values) <= size + ask.steps or not np.isfinite(values).all() or not (norms > 0).all():
            raise PeerError(f"expected D of the layers of group `{group}` and norms, got {len(values)} numbers")
        begin = 0
        for name in sorted(shapes):
            size = int(np.prod(shapes[name]))
            self.displacement[name] = values[begin : begin + size].reshape(shapes[name]).copy()
            begin += size
        self._clips[group] = Clip(_summed_in(group), norms.tolist())
        self._steps[group] = ask.steps
        self._moved.pop(group, None)
        return Done(stamp=ask.stamp)

    def _group(self, group: str) -> Group:
        if group not in self._position.groups:
            raise PeerError(f"`{self._position.me}` is in no group `{group:.80}`")
        return self._position.groups[group]

    def _contributor(self, group: str) -> Contributor:
        if group not in self._contributors:
            raise PeerError(f"`{self._position.me}` sums nothing in a group `{group:.80}`")
        return self._contributors[group]

    def state(self) -> State:
        """Return root, D, the number of steps in each group, and BatchNorm's buffers. Starts follow from the root."""
        return {
            **over("displacement/", self.displacement),
            **{f"buffer/{name}": self._start[name] for name in self._start if name not in self.displacement},
            **over("steps/", self._steps),
            **{f"norms/{group}": clip.norms() for group, clip in self._clips.items()},
            **self._order.state(),
            "root": self._root.reveal(),
        }

    def restore(self, state: State) -> None:
        """Restore what `state` returned."""
        self._order.restore(state)
        self._root = SecretRoot(state["root"])
        self._start = self._confined() | under("buffer/", state)
        self.displacement = {name: value.copy() for name, value in under("displacement/", state).items()}
        self._steps = {group: int(state[f"steps/{group}"]) for group in self._steps}
        self._moved.clear()
        self._clips = {group: Clip(_summed_in(group), state[f"norms/{group}"]) for group in self._clips}
        self._local = self._own_z = None


def _summed_in(group: str) -> str:
    return f"gradients in group `{group}`"


def _displacement_after(steps: int) -> str:
    """Return the purpose of a sealed D: one round's D cannot pass as another's."""
    return f"displacement after {steps}"


def _same_time(first: Stamp, other: Stamp) -> bool:
    return (first.round, first.attempt, first.take) == (other.round, other.attempt, other.take)
