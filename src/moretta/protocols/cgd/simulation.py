"""All participants of a grid in one process, for the paper's scale: (1000 x 112) on full MNIST.

Every confined weight is w_l(k) = w_l(1) + D(k) with one D for all who share the layer. So a simulation holds D once,
and instead of the first layers' starts Z0 = X_i W1_i(1) + b1_i, computed once. One iteration of a grid is then

    Z     = Z0 + X D1                    one product over the rows of many participants
    out   = upper(Z; U_i(1) + D_U)       small layers, batched over the models that have them
    Delta = d loss / d Z                 by autograd, like the upper layers' gradients
    G1    = Delta' X                     one product, which sums over participants inside
    D    -= alpha_k G

block by block of participants, so that only Z0 is as long as the data and a block stays in the processor's cache.
`fused` does that. `exact-ring` separates each participant's gradient, encodes it and adds in the ring, as secure
aggregation does. Both equal the message-passing protocol; a test runs all three. Nothing is hidden here: one process
holds all rows and the roots of all starts.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moretta.contract.messages import Array, Stamp, Tensors
from moretta.contract.roles import Aborted, Exchange, Outcome, Phase, Report, State, no_phase, over, under
from moretta.contract.wording import LARGE_TARGETS
from moretta.data.holders import Grid
from moretta.errors import ParameterError, RangeError, RunFailed
from moretta.protocols.cgd.layers import Layers, joined, summed
from moretta.protocols.cgd.local import centers, confined, shared_biases
from moretta.protocols.cgd.params import CGD
from moretta.protocols.common import modules
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.specification import Specification
from moretta.secure_aggregation.encoding import Ring, add_up, decode, encode, plan
from moretta.secure_aggregation.keystream import SecretRoot

BLOCK = 8192
"""The rows in one pass through the layers, unless a single model has more."""


@dataclass(frozen=True)
class _Models:
    """Models whose first layers read the same columns: all of a joint grid, one column group of an independent one.

    readers: by row of the grid, the participants whose columns a model reads. columns: theirs, sorted. x: [n, columns].
    start: Z0, [n, H1]. upper: U(1) by name, [models, ...].
    """

    readers: Mapping[str, tuple[str, ...]]
    columns: NDArray[np.int64]
    x: Tensor
    start: Tensor
    upper: Mapping[str, Tensor]


_Block = tuple[Tensor, Tensor, Mapping[str, Tensor], float]


class Simulation:
    """Runs all roles of `CGD` on a grid at once. One drawn root, or the tests' seed, determines all roots.

    Args:
        x, y: All rows, one row of the grid after the other, [n, d] and encoded for the loss.
        counts: The number of rows of each row of the grid, by its name.

    Raises:
        ParameterError: The model is no N-layer network (`Layers.of`), or has dropout.
    """

    def __init__(
        self,
        params: CGD,
        spec: Specification,
        model: nn.Module,
        grid: Grid,
        x: Tensor,
        y: Tensor,
        counts: dict[str, int],
    ) -> None:
        self.phase: Phase = no_phase
        self._params, self._spec, self._grid = params, spec, grid
        self._x, self._y, self._counts = x, y, counts
        self._root, seed, size = SecretRoot.fresh(), spec.run.seed, spec.data.batch_size
        self._layers, self._centers = Layers.of(model), centers(params, model, seed)
        self._shared, self._mean_starts = shared_biases(params, model), dict[tuple[int, ...], Tensors]()
        if any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules()):
            raise ParameterError(
                'a simulation does not draw what each participant would; remove dropout, or use engine = "in-process"'
            )
        self._displacement = {name: np.zeros(tuple(value.shape)) for name, value in modules.trainable(model).items()}
        in_order = params.batches == "in-order"
        self._batches = [Batches(count, size, seed, row, in_order=in_order) for row, count in counts.items()]
        self._upper = torch.vmap(partial(torch.func.functional_call, self._layers.upper))
        self._models = list[_Models]()

    def setup(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        """Compute what follows from the starts, without an ask."""
        yield from ()
        if not self._models:
            self._models = [self._prepared(readers) for readers in self._readers()]
        return None

    def round(self, now: Stamp) -> Exchange[Report | Aborted]:
        """Take one iteration of Algorithm 2, or of Algorithm 1 where nothing is split by column."""
        yield from ()
        counts, drawn = self._batch(now.round)
        try:
            gradient, loss = (self._added if self._in_ring else self._multiplied)(counts, drawn)
            finite = np.isfinite(loss) and all(np.isfinite(value).all() for value in gradient.values())
        except RangeError:  # values that are not finite, or far too large, do not fit the ring
            finite = False
        if not finite:
            raise RunFailed(
                f"round {now.round}: gradients are not finite or outside the ring's range, so the run has probably "
                f"diverged; round {now.round - 1} is kept: continue from it by --resume with a lower learning rate or "
                f"a decaying schedule, or begin {LARGE_TARGETS}"
            )
        if self._params.weight_decay:
            starts = self._mean_start(tuple(counts))
            gradient = {
                name: value + self._params.weight_decay * (starts[name] + self._displacement[name])
                for name, value in gradient.items()
            }
        with self.phase("update"):
            rate = self._params.rate(now.round, self._spec.run.rounds)
            for name, value in gradient.items():
                self._displacement[name] = self._displacement[name] - rate * value  # not in place: `state` returned it
        return Report({"loss": loss, "rows": float(sum(counts))})

    def finish(self, now: Stamp) -> Exchange[Outcome | Aborted]:
        """Release nothing: confined models are made on demand."""
        yield from ()
        return Outcome(parameters={}, facts={"simulation": "exact-ring" if self._in_ring else "fused"})

    def displaced(self) -> Tensors:
        """Return D as a model of its own, added to the centre of the starts; it needs no start."""
        return summed(self._centers, self._displacement)

    def models(self) -> Mapping[str, Tensors]:
        """Return the confined models, computed on request, by joint row or else participant."""
        owners = {
            (row if len(names) > 1 or self._params.vertical == "joint" else names[0]): (row, names)
            for readers in self._readers()
            for row, names in readers.items()
        }
        return Confined(owners, lambda owner: summed(self._start(*owners[owner]), self._read(owners[owner][1])))

    def state(self) -> State:
        """Return D, and the root of the starts."""
        return {**over("displacement/", self._displacement), "root": self._root.reveal()}

    def restore(self, state: State) -> None:
        """Restore what `state` returned."""
        self._root = SecretRoot(state["root"])
        self._displacement = {name: value.copy() for name, value in under("displacement/", state).items()}

    # Starts

    def _readers(self) -> list[Mapping[str, tuple[str, ...]]]:
        if self._params.vertical == "joint":
            return [self._grid.rows]
        place = {row: number for number, row in enumerate(self._grid.rows)}  # of its rows of data and counts
        rows = [{self._grid.parts[name].row: (name,) for name in names} for names in self._grid.column_groups.values()]
        return [dict(sorted(readers.items(), key=lambda reader: place[reader[0]])) for readers in rows]

    def _prepared(self, readers: Mapping[str, tuple[str, ...]]) -> _Models:
        layers, columns = self._layers, self._columns(next(iter(readers.values())))
        x = self._x if len(columns) == layers.columns else self._x[:, columns].contiguous()
        start = torch.empty(len(x), layers.width, dtype=x.dtype)
        upper: dict[str, list[Array]] = {name: [] for name in self._displacement if name not in layers.first}
        begin = 0
        for row, names in readers.items():
            model, rows = self._start(row, names), slice(begin, begin + self._counts[row])
            torch.mm(x[rows], torch.from_numpy(model[layers.weight][:, columns]).T, out=start[rows])
            if layers.bias:
                start[rows] += torch.from_numpy(model[layers.bias])
            for name, stack in upper.items():
                stack.append(model[name])
            begin = rows.stop
        stacks = {name: torch.from_numpy(np.stack(stack)) for name, stack in upper.items()}
        return _Models(readers, columns, x, start, stacks)

    def _root_of(self, name: str) -> SecretRoot:
        if (insecure := self._spec.run.insecure_secret_seed) is not None:
            return SecretRoot.insecure(insecure, name)
        return SecretRoot(self._root.derive("participant", name))

    def _columns(self, names: Sequence[str]) -> NDArray[np.int64]:
        return np.sort(np.concatenate([np.array(self._held(name), dtype=np.int64) for name in names]))

    def _held(self, name: str) -> Sequence[int]:
        return self._grid.parts[name].columns or range(self._layers.columns)

    def _start(self, row: str, names: Sequence[str]) -> dict[str, Array]:
        """Return w(1) of a model: its first layer's parts from the columns' holders, the rest from its head."""
        layers, weights = self._layers, list[Array]()
        head = self._grid.heads[row] if self._params.vertical == "joint" else names[0]
        rest: dict[str, Array] = {}
        for name in names:
            around = {**self._centers, layers.weight: self._centers[layers.weight][:, list(self._held(name))]}
            own = [tensor for tensor in self._displacement if tensor not in self._shared]
            noised = own if name == head else [layers.weight]
            start = confined(self._params, around, noised, name, self._root_of(name))
            weights.append(start[layers.weight])
            if name == head:
                rest = start
        return rest | {layers.weight: joined(weights, [self._held(name) for name in names], layers.columns)}

    def _mean_start(self, counts: tuple[int, ...]) -> Tensors:
        """Return the mean of all starts by rows in the batch; the regulariser's gradient has their sum.

        It is computed once for equal counts. In the ring's form it is added outside the ring, because it is no row's.
        """
        if counts not in self._mean_starts:
            total = {name: np.zeros_like(value) for name, value in self._displacement.items()}
            readers = self._readers()
            for some in readers:
                for count, (row, names) in zip(counts, some.items(), strict=True):
                    for name, value in self._start(row, names).items():
                        if name in total:
                            often = 1 if name == self._layers.weight else len(readers)
                            total[name] += value * (count / sum(counts) / often)
            self._mean_starts = {counts: total}
        return self._mean_starts[counts]

    def _read(self, names: Sequence[str]) -> dict[str, Array]:
        """Return D, with 0 for the columns that these participants do not hold."""
        seen = np.zeros(self._layers.columns)
        seen[self._columns(names)] = 1.0
        return {**self._displacement, self._layers.weight: self._displacement[self._layers.weight] * seen}

    # One iteration

    def _batch(self, number: int) -> tuple[Sequence[int], Tensor | None]:
        """Return how many rows each row of the grid uses, and their indices among all; None is all, in order."""
        if not self._spec.data.batch_size:
            return list(self._counts.values()), None
        begins = np.cumsum([0, *self._counts.values()])
        drawn = [batch.of_round(number) + begins[i] for i, batch in enumerate(self._batches)]
        return [len(rows) for rows in drawn], torch.from_numpy(np.concatenate(drawn))

    def _multiplied(self, counts: Sequence[int], drawn: Tensor | None) -> tuple[Tensors, float]:
        """Return sum n_l g_l / sum n_l by tensor, over its participants, and the mean loss: sums inside products."""
        total = {name: np.zeros_like(value) for name, value in self._displacement.items()}
        loss = 0.0
        for models in self._models:
            first = torch.zeros(self._layers.width, len(models.columns), dtype=models.x.dtype)
            for x, delta, others, share in self._passes(models, counts, drawn):
                first.addmm_(delta.flatten(0, 1).T, x.flatten(0, 1))
                for name, value in others.items():
                    total[name] += value.sum(0).numpy() / len(self._models)
                loss += share / len(self._models)
            total[self._layers.weight][:, models.columns] = first.numpy()
        return total, loss

    def _passes(self, models: _Models, counts: Sequence[int], drawn: Tensor | None) -> Iterator[_Block]:
        """Pass forward and backward by block: yield each block's share of the mean loss and of its gradients.

        Those are inputs, [models, each, columns], d loss / dz, [models, each, H1], gradients of all tensors but the
        first layer's weight, [models, ...], and the loss.
        """
        layers, bias = self._layers, self._layers.bias if self._layers.bias in self._displacement else ""  # or frozen
        moved = {name: torch.from_numpy(value).to(models.x.dtype) for name, value in self._displacement.items()}
        first = moved[layers.weight][:, models.columns].T
        for some, rows, each in _blocks(counts):
            own = rows if drawn is None else drawn[rows]
            x, y, start = models.x[own], self._y[own], models.start[own]
            with self.phase("local_forward"):
                z = start + moved[bias] if bias else start.clone()
                z = z.addmm_(x, first).view(-1, each, layers.width).requires_grad_()
                upper = {name: (weight[some] + moved[name]).requires_grad_() for name, weight in models.upper.items()}
                loss = self._params.loss_function(self._upper(upper, z).flatten(0, 1), y) * (len(x) / sum(counts))
            with self.phase("local_backward"):
                delta, *gradients = torch.autograd.grad(loss, [z, *upper.values()])
                rest = dict(zip(upper, gradients, strict=True)) | ({bias: delta.sum(1)} if bias else {})
            yield x.view(-1, each, x.shape[1]), delta, rest, float(loss.detach())

    # The ring

    @property
    def _in_ring(self) -> bool:
        return self._spec.engine.name == "exact-ring"

    def _added(self, counts: Sequence[int], drawn: Tensor | None) -> tuple[Tensors, float]:
        """Return the same as `_multiplied`, from each participant's gradient; the first layer's by column group."""
        total = {self._layers.weight: np.zeros_like(self._displacement[self._layers.weight])}
        rest, parts, loss = list[tuple[Tensors, int]](), dict[tuple[int, ...], list[tuple[Tensors, int]]](), 0.0
        for models in self._models:
            readers, place = iter(models.readers.values()), {column: i for i, column in enumerate(models.columns)}
            for inputs, deltas, others, share in self._passes(models, counts, drawn):
                loss += share / len(self._models)
                for number, (x, delta) in enumerate(zip(inputs, deltas, strict=True)):
                    count, own = len(x), sum(counts) / len(x)  # the mean over a participant's own rows
                    rest.append(({name: (value[number] * own).numpy() for name, value in others.items()}, count))
                    for held in (tuple(self._held(name)) for name in next(readers)):
                        gradient = (delta * own).T @ x[:, [place[column] for column in held]]
                        parts.setdefault(held, []).append(({self._layers.weight: gradient.numpy()}, count))
        for held, group in parts.items():
            total[self._layers.weight][:, held] = self._ring_mean(group)[self._layers.weight]
        return total | self._ring_mean(rest), loss

    def _ring_mean(self, parts: Sequence[tuple[Tensors, int]]) -> dict[str, NDArray[np.float64]]:
        """Return the weighted mean that secure aggregation would return."""
        secure, shapes = self._spec.secure_aggregation, {name: value.shape for name, value in parts[0][0].items()}
        ring = Ring(secure.ring_bits)
        weight, silos = sum(count for _, count in parts), [str(number) for number in range(len(parts))]
        request = plan(ring, len(parts), shapes, dict.fromkeys(shapes, secure.largest), weight)
        words = [encode(ring, tensors, count, request.fraction_bits, len(parts))[1] for tensors, count in parts]
        added = {name: add_up([word[name] for word in words]) for name in shapes}
        return dict(decode(ring, added, weight, silos, request).means)


def _blocks(counts: Sequence[int]) -> Iterator[tuple[slice, slice, int]]:
    """Cut models into runs of neighbours with equally many rows: the models, their rows, and the rows of each."""
    model, row = 0, 0
    for each, alike in itertools.groupby(counts):
        last = model + len(list(alike))
        while model < last:
            many = min(last - model, max(1, BLOCK // each))
            yield slice(model, model + many), slice(row, row + many * each), each
            model, row = model + many, row + many * each


class Confined(Mapping[str, Tensors]):
    """Confined models by owner, each computed on request: at the paper's scale they do not fit in memory."""

    def __init__(self, owners: Mapping[str, object], make: Callable[[str], Tensors]) -> None:
        self._owners, self._make = owners, make

    def __getitem__(self, owner: str) -> Tensors:
        if owner not in self._owners:
            raise KeyError(owner)
        return self._make(owner)

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)
