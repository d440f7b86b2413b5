"""All participants of a grid in one process, for the paper's scale: (1000 x 112) on full MNIST.

Every confined weight is w_l(k) = w_l(1) + D(k) with one D for all who share the layer, so a simulation holds D once,
and of the starts only what they come to: Z0 = X_i W1_i(1) + b1_i, made once. One iteration over a whole grid is then

    Z     = Z0 + X D1                    one product over all rows of all participants
    out   = upper(Z; U_i(1) + D_U)       small layers, batched over the models that have them
    Delta = d loss / d Z                 by autograd, like the upper layers' gradients
    G1    = Delta' X                     one product, which sums over participants inside
    D    -= alpha_k G

`fused` does that. `exact-ring` takes each participant's gradient apart, encodes it and adds in the ring, as secure
aggregation does. Both equal the message-passing protocol; a test runs all three.

Who learns what: nothing is hidden here, as one process holds everybody's rows and the roots of all starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moretta.errors import RunFailed
from moretta.keystream import SecretRoot
from moretta.protocol import Aborted, Array, Exchange, Outcome, Phase, Report, Stamp, State, Tensors, no_phase
from moretta.protocols import modules
from moretta.protocols.batches import Batches
from moretta.protocols.cgd.grid import Grid
from moretta.protocols.cgd.layers import Layers, joined, summed
from moretta.protocols.cgd.params import CGD
from moretta.protocols.cgd.start import centers, confined
from moretta.secure_aggregation.encoding import add_up, decode, encode, plan
from moretta.secure_aggregation.ring import Ring


@dataclass(frozen=True)
class Rows:
    """All rows, one row of the grid after the other.

    x: [n, d]. y: as the loss wants them. counts: how many each row of the grid has, by its name.
    """

    x: Tensor
    y: Tensor
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Adding:
    """How gradients are added: inside the products, or each participant's as whole numbers of the ring.

    limit: the largest |value| of a gradient's entry, from which the ring's step follows.
    """

    how: Literal["fused", "exact-ring"]
    ring: Ring
    limit: float


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


@dataclass(frozen=True)
class _Local:
    """What a forward and backward pass came to: d loss / dz, [n, H1]; per model, those of upper layers; the loss."""

    delta: Tensor
    upper: Mapping[str, Tensor]
    loss: float


class Simulation:
    """Plays all roles of `CGD` on a grid at once.

    insecure: the seed of all participants' roots, for tests; None draws one root, from which theirs follow.
    rounds: of the whole run. seed: of the batches.
    Raises `moretta.errors.ParameterError` for a model that is no N-layer network (`Layers.of`).
    """

    def __init__(
        self,
        params: CGD,
        model: nn.Module,
        grid: Grid,
        rows: Rows,
        adding: Adding,
        insecure: int | None,
        rounds: int,
        batch_size: int,
        seed: int,
    ) -> None:
        self.phase: Phase = no_phase
        self._params, self._grid, self._rows, self._adding = params, grid, rows, adding
        self._insecure, self._root = insecure, SecretRoot.fresh()
        self._rounds, self._batch_size = rounds, batch_size
        self._layers, self._centers = Layers.of(model), centers(params, model)
        self._displacement = {name: np.zeros(tuple(value.shape)) for name, value in modules.trainable(model).items()}
        self._batches = [Batches(count, batch_size, seed, row) for row, count in rows.counts.items()]
        self._upper = torch.vmap(self._upper_layers, randomness="different")
        self._models = list[_Models]()

    def setup(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        """Make what the starts come to; nobody is asked."""
        yield from ()
        if not self._models:
            self._models = [self._prepared(readers) for readers in self._readers()]
        return None

    def round(self, now: Stamp) -> Exchange[Report | Aborted]:
        """Take one iteration of Algorithm 2, or of Algorithm 1 where nothing is split by column."""
        yield from ()
        gradient, loss = self._gradient(now.round)
        if not np.isfinite(loss) or not all(np.isfinite(value).all() for value in gradient.values()):
            raise RunFailed(
                f"round {now.round}: expected finite gradients, got NaN or infinity, so the run has diverged; round "
                f"{now.round - 1} is kept: go on from it with --resume, a lower learning rate or a decaying schedule"
            )
        with self.phase("update"):
            rate = self._params.rate(now.round, self._rounds)
            for name, value in gradient.items():
                self._displacement[name] -= rate * value
        return Report({"loss": loss, "rows": float(len(self._batch(now.round)))})

    def finish(self, now: Stamp) -> Exchange[Outcome | Aborted]:
        """Release nothing: confined models are made when they are looked at."""
        yield from ()
        return Outcome(parameters={}, facts={"simulation": self._adding.how})

    def displaced(self) -> Tensors:
        """Return D as a model of its own, about the point that starts are confined around: what needs no start."""
        return summed(self._centers, self._displacement)

    def models(self) -> Mapping[str, Tensors]:
        """Return the confined models as they stand, each made when it is asked for.

        By row of a joint grid, else by participant; columns that a model does not read have weight 0.
        """
        owners = {
            (row if len(names) > 1 or self._params.vertical == "joint" else names[0]): (row, names)
            for readers in self._readers()
            for row, names in readers.items()
        }
        return Confined(owners, lambda owner: summed(self._start(*owners[owner]), self._read(owners[owner][1])))

    def state(self) -> State:
        """Return D, and the root from which starts are made again."""
        moved: State = {f"displacement/{name}": value for name, value in self._displacement.items()}
        return {**moved, "root": self._root.reveal()}

    def restore(self, state: State) -> None:
        """Take up what `state` returned."""
        self._root = SecretRoot(state["root"])
        self._displacement = {name: value.copy() for name, value in modules.under("displacement/", state).items()}

    # Starts

    def _readers(self) -> list[Mapping[str, tuple[str, ...]]]:
        if self._params.vertical == "joint":
            return [self._grid.rows]
        groups = self._grid.column_groups.values()
        return [{self._grid.parts[name].row: (name,) for name in names} for names in groups]

    def _prepared(self, readers: Mapping[str, tuple[str, ...]]) -> _Models:
        layers, columns = self._layers, self._columns(next(iter(readers.values())))
        x = self._rows.x if len(columns) == layers.columns else self._rows.x[:, columns].contiguous()
        start = torch.empty(len(x), layers.width, dtype=x.dtype)
        upper: dict[str, list[Array]] = {name: [] for name in self._displacement if name not in layers.first}
        begin = 0
        for row, names in readers.items():
            model, rows = self._start(row, names), slice(begin, begin + self._rows.counts[row])
            torch.mm(x[rows], torch.from_numpy(model[layers.weight][:, columns]).T, out=start[rows])
            if layers.bias:
                start[rows] += torch.from_numpy(model[layers.bias])
            for name, stack in upper.items():
                stack.append(model[name])
            begin = rows.stop
        stacks = {name: torch.from_numpy(np.stack(stack)) for name, stack in upper.items()}
        return _Models(readers, columns, x, start, stacks)

    def _root_of(self, name: str) -> SecretRoot:
        if self._insecure is not None:
            return SecretRoot.insecure(self._insecure, name)
        return SecretRoot(self._root.derive("participant", name))

    def _columns(self, names: Sequence[str]) -> NDArray[np.int64]:
        return np.sort(np.concatenate([np.array(self._held(name), dtype=np.int64) for name in names]))

    def _held(self, name: str) -> Sequence[int]:
        return self._grid.parts[name].columns or range(self._layers.columns)

    def _start(self, row: str, names: Sequence[str]) -> dict[str, Array]:
        """Return w(1) of a model: its first layer's parts from those who hold the columns, the rest from its head."""
        layers, weights = self._layers, list[Array]()
        head = self._grid.heads[row] if self._params.vertical == "joint" else names[0]
        rest: dict[str, Array] = {}
        for name in names:
            around = {**self._centers, layers.weight: self._centers[layers.weight][:, list(self._held(name))]}
            trained = tuple(self._displacement) if name == head else (layers.weight,)
            start = confined(self._params, around, trained, name, self._root_of(name))
            weights.append(start[layers.weight])
            if name == head:
                rest = start
        return rest | {layers.weight: joined(weights, [self._held(name) for name in names], layers.columns)}

    def _read(self, names: Sequence[str]) -> dict[str, Array]:
        """Return D, with 0 for the columns that these participants do not hold."""
        seen = np.zeros(self._layers.columns)
        seen[self._columns(names)] = 1.0
        return {**self._displacement, self._layers.weight: self._displacement[self._layers.weight] * seen}

    # One iteration

    def _batch(self, number: int) -> NDArray[np.int64]:
        begins = np.cumsum([0, *self._rows.counts.values()])
        return np.concatenate([batch.of_round(number) + begins[i] for i, batch in enumerate(self._batches)])

    def _gradient(self, number: int) -> tuple[dict[str, NDArray[np.float64]], float]:
        """Return sum n_l g_l / sum n_l by tensor, over those who share it, and the mean loss."""
        batch = torch.from_numpy(self._batch(number)) if self._batch_size else None
        counts = [len(one.of_round(number)) for one in self._batches]
        y = self._rows.y if batch is None else self._rows.y[batch]
        first, rest = self._layers.weight, list[tuple[Tensors, int]]()
        total: dict[str, NDArray[np.float64]] = {first: np.zeros_like(self._displacement[first])}
        losses = list[float]()
        for models in self._models:
            x, start = (models.x, models.start) if batch is None else (models.x[batch], models.start[batch])
            local = self._local(models, x, y, start, counts)
            losses.append(local.loss)
            if self._adding.how == "fused":
                total[first][:, models.columns] = (local.delta.T @ x).double().numpy()
                sums = {name: value.sum(0) for name, value in local.upper.items()}
                if self._layers.bias:
                    sums[self._layers.bias] = local.delta.sum(0)
                rest.append(({name: value.double().numpy() for name, value in sums.items()}, 1))
            else:
                rest += self._taken_apart(models, local, x, counts, total[first])
        if self._adding.how == "fused":
            total |= {name: np.mean([tensors[name] for tensors, _ in rest], axis=0) for name in rest[0][0]}
        else:
            total |= self._ring_mean(rest)
        return total, float(np.mean(losses))

    def _local(self, models: _Models, x: Tensor, y: Tensor, start: Tensor, counts: Sequence[int]) -> _Local:
        first = {name: torch.from_numpy(self._displacement[name]).to(x.dtype) for name in self._layers.first}
        with self.phase("local_forward"):
            z = torch.addmm(start, x, first[self._layers.weight][:, models.columns].T)
            if self._layers.bias:
                z += first[self._layers.bias]
            z.requires_grad_()
            upper = {
                name: (stack + torch.from_numpy(self._displacement[name]).to(stack)).requires_grad_()
                for name, stack in models.upper.items()
            }
            loss = self._params.loss_function(self._outputs(upper, z, counts), y)
        with self.phase("local_backward"):
            delta, *gradients = torch.autograd.grad(loss, [z, *upper.values()])
        return _Local(delta, dict(zip(upper, gradients, strict=True)), float(loss.detach()))

    def _outputs(self, upper: Mapping[str, Tensor], z: Tensor, counts: Sequence[int]) -> Tensor:
        """Return all models' outputs, [n, outputs]; those with equally many rows go through their layers at once."""
        outputs, model, row = list[Tensor](), 0, 0
        for count, alike in itertools.groupby(counts):
            many = len(list(alike))
            layers = {name: stack[model : model + many] for name, stack in upper.items()}
            block = z[row : row + many * count].view(many, count, -1)
            outputs.append(self._upper(layers, block).flatten(0, 1))
            model, row = model + many, row + many * count
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _upper_layers(self, parameters: dict[str, Tensor], z: Tensor) -> Tensor:
        outputs: Tensor = torch.func.functional_call(self._layers.upper, parameters, (z,))
        return outputs

    # The ring

    def _taken_apart(
        self, models: _Models, local: _Local, x: Tensor, counts: Sequence[int], first: NDArray[np.float64]
    ) -> list[tuple[Tensors, int]]:
        """Add the first layer's gradient into `first`, column group by column group; return the rest by model."""
        parts: dict[tuple[int, ...], list[tuple[Tensors, int]]] = {}
        rest, begin, weight = list[tuple[Tensors, int]](), 0, self._layers.weight
        place = {column: index for index, column in enumerate(models.columns)}
        for number, (names, count) in enumerate(zip(models.readers.values(), counts, strict=True)):
            rows, own = slice(begin, begin + count), len(x) / count  # the mean over a participant's own rows
            delta = local.delta[rows] * own
            for name in names:
                held = tuple(self._held(name))
                gradient = delta.T @ x[rows][:, [place[column] for column in held]]
                parts.setdefault(held, []).append(({weight: gradient.numpy()}, count))
            tensors = {name: (value[number] * own).numpy() for name, value in local.upper.items()}
            if self._layers.bias:
                tensors[self._layers.bias] = delta.sum(0).numpy()
            rest.append((tensors, count))
            begin = rows.stop
        for held, group in parts.items():
            first[:, held] = self._ring_mean(group)[weight]
        return rest

    def _ring_mean(self, parts: Sequence[tuple[Tensors, int]]) -> dict[str, NDArray[np.float64]]:
        """Return the weighted mean that secure aggregation comes to."""
        ring, shapes = self._adding.ring, {name: value.shape for name, value in parts[0][0].items()}
        weight, silos = sum(count for _, count in parts), [str(number) for number in range(len(parts))]
        wanted = plan(ring, len(parts), shapes, dict.fromkeys(shapes, self._adding.limit), weight)
        words = [encode(ring, tensors, count, wanted.fraction_bits, len(parts)) for tensors, count in parts]
        added = {name: add_up([one[name] for one in words]) for name in shapes}
        return dict(decode(ring, added, weight, silos, wanted).means)


class Confined(Mapping[str, Tensors]):
    """Confined models by owner, each made when it is asked for: at the paper's scale they do not fit in memory."""

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
