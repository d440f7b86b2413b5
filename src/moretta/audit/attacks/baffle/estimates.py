"""What BAFFLE's server sees of its rounds: parameters, directions, the loss differences x_k, and the seed's agreement.

The seed follows from contributions that the server relays, so directions are derived here as any role derives them
(`moretta.protocols.baffle.silo.seeds`, `moretta.protocols.baffle.silo.recipe`). Moves of blocks (`Moves`) replace
directions. Layers of units have neither: `moretta.audit.attacks.baffle.gradient_estimates` has silos' uploads of them.
The sum that a secure sum opened is the server's own result and in no message; `opened` recomputes it for the attacker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moretta.audit.evidence import truth as evidence
from moretta.audit.evidence.attack import Given, augmented, no_training
from moretta.audit.evidence.case import Case, Heard, PublicRun, torch_dtype
from moretta.audit.evidence.intervals import Floats
from moretta.audit.evidence.truth import Truth
from moretta.audit.evidence.uploads import from_heard, rows_of
from moretta.contract.messages import Array
from moretta.contract.roles import over, under
from moretta.data.rows import Rows
from moretta.errors import ParameterError
from moretta.protocols.baffle import cut, torch_blocks, torch_forward
from moretta.protocols.baffle.params import BAFFLE
from moretta.protocols.baffle.silo import blocks
from moretta.protocols.baffle.silo.blocks import LayerBlock, MovesBlocks
from moretta.protocols.baffle.silo.client import Client
from moretta.protocols.baffle.silo.directions import Directions
from moretta.protocols.baffle.silo.estimate import differences, directions_of
from moretta.protocols.baffle.silo.forward import Forward, Layout
from moretta.protocols.baffle.silo.messages import Agree, Estimate
from moretta.protocols.baffle.silo.recipe import Recipe
from moretta.protocols.baffle.silo.seeds import seed_of
from moretta.protocols.baffle.silo.work import differences as differences_of_blocks
from moretta.protocols.baffle.torch_forward import TorchForward, layout_of
from moretta.protocols.common import modules
from moretta.secure_aggregation.additive import SealedShares
from moretta.secure_aggregation.pairwise import MaskedUpload
from moretta.secure_aggregation.plain import PlainUpload
from moretta.secure_aggregation.unmasking import Unmask


@dataclass(frozen=True)
class Moves:
    """The moves of a round by blocks, each a direction d_k that is zero outside of its block: x_k = d_k . g.

    Attributes:
        recipe: The recipe of the blocks that have scalars, and of no others.
        keys: The keys of these blocks' signs.
    """

    recipe: Recipe
    layout: Layout
    keys: tuple[bytes, ...]

    @classmethod
    def of(cls, recipe: Recipe, layout: Layout, seed: bytes, *purpose: int | str | bytes) -> Moves:
        """Return those of one purpose, as `Recipe.keys`. Raises `ParameterError` where no such keys exist."""
        pairs = [(b, key) for b, key in zip(recipe.blocks, recipe.keys(seed, *purpose), strict=True) if b.scalars]
        if not pairs:
            raise ParameterError(
                'linear = "activations": all layers of this model move unit by unit, so silos upload no loss '
                "differences; own-estimate attacks their uploads"
            )
        some, keys = zip(*pairs, strict=True)
        return cls(replace(recipe, blocks=some), layout, keys)

    @property
    def count(self) -> int:
        """K, the number of moves."""
        return self.recipe.scalars

    @property
    def size(self) -> int:
        """n, of the whole flat array."""
        return self.layout.size

    @property
    def products(self) -> int:
        """The number of multiplications of x_1 .. x_K of a gradient."""
        return sum(block.repeats * size_of(block, self.layout) for block in self.recipe.blocks)

    @cached_property
    def covered(self) -> NDArray[np.bool_]:
        """Which of the n parameters some block moves, bool[n]."""
        names = {name for block in self.recipe.blocks for name in block.tensors}
        return np.concatenate([np.full(math.prod(s), name in names) for name, s in self.layout.shapes.items()])

    def by_row(self, forward: MovesBlocks, at: Array, x: Array, y: Array) -> Floats:
        """Return the x_k of each row, float64[K, rows]."""
        return differences_of_blocks(self.recipe, forward, at, [(x, y)], self.keys)[0].derivatives

    def estimate(self, scalars: Floats) -> Floats:
        """Return the estimate of the gradient, float64[n], zero where nothing moves."""
        return blocks.gradient(self.recipe.blocks, self.layout, scalars, None, self.keys)

    def along(self, gradient: Mapping[str, Tensor]) -> Tensor:
        """Return d_k . g of all moves, float64[K], differentiable. gradient: by tensor, float64."""
        products: list[Tensor] = []
        for block, signs in zip(self.recipe.blocks, self._signs, strict=True):
            parts = [gradient[name] for name in block.tensors]
            if block.kind == "rank-one":
                matrix = torch.cat([part.reshape(len(parts[0]), -1) for part in parts], dim=1)
                products.append((signs[0] @ matrix * signs[1]).sum(dim=1))
                continue
            lead = len(parts[0]) if block.kind == "channels" else 1
            each = [
                (s * part).reshape(block.repeats, lead, -1).sum(dim=2) for s, part in zip(signs, parts, strict=True)
            ]
            sums = torch.stack(each).sum(dim=0)
            pieces = block.channels_of(lead) if block.kind == "channels" else [slice(0, 1)]
            products.append(torch.stack([sums[:, piece].sum(dim=1) for piece in pieces], dim=1).reshape(-1))
        return torch.cat(products)

    def gain(self, target: Floats) -> float:
        """Return v . estimate(v) / |v|^2, learned relative to the average seed; v: `target`[n] where moves are."""
        parts = {name: torch.from_numpy(value) for name, value in self.layout.split(target).items()}
        shares = np.concatenate([np.full(block.scalars, 1 / block.repeats) for block in self.recipe.blocks])
        whole = float(np.square(target[self.covered]).sum())
        return float(np.square(self.along(parts).numpy()) @ shares) / whole if whole else 1.0

    @cached_property
    def _signs(self) -> Sequence[Sequence[Tensor]]:
        """The signs of each block: u and v for one of rank one, else on each tensor."""
        tensors, shapes = [], self.layout.shapes
        for block, key in zip(self.recipe.blocks, self.keys, strict=True):
            drawn = block.signs(shapes, key)
            rank_one = block.kind == "rank-one"
            signs = block.sides(shapes, drawn) if rank_one else block.by_tensor(shapes, drawn).values()
            tensors.append([torch.tensor(sign, dtype=torch.float64) for sign in signs])
        return tensors


def size_of(block: LayerBlock, layout: Layout) -> int:
    """Return the number of a block's parameters."""
    return sum(math.prod(layout.shapes[name]) for name in block.tensors)


def cosine_expected(some: Sequence[LayerBlock], layout: Layout, true: Floats, silos: int = 1) -> float:
    """Return the approximate score of the estimate of these blocks, by E|estimate|^2 of each (`silo.blocks`).

    Args:
        true: The gradient, float64[n].
        silos: The number of silos that draw moves of their own.
    """
    parts, whole, estimated = layout.split(true), 0.0, 0.0
    for block in some:
        square = sum(float(np.square(parts[name]).sum()) for name in block.tensors)
        entries, extra = size_of(block, layout), 0.0
        if block.kind == "channels":
            channels = layout.shapes[block.tensors[0]][0]
            entries = entries // channels * -(-channels // block.pieces)
        if block.repeats:
            extra = (entries - 1) / (block.repeats * silos)
        whole, estimated = whole + square, estimated + square * (1 + extra)
    return math.sqrt(whole / estimated) if estimated else 0.0


ROUNDS = 12  # attacked: the last ones
FIXED = "fixed/"
OPENED = "opened/"
DRAWN = 30.0  # cost of drawing and adding an entry of a direction, in multiplications


@dataclass(frozen=True)
class Round:
    """One round as the server sees it.

    Attributes:
        directions: d_1 .. d_K, or the moves of blocks.
        uploads: x_1 .. x_K by silo, in the clear; empty if uploads were masked.
        words: The words of pairwise masked uploads, by silo.
        silos: The silos whose uploads counted.
    """

    ask: Estimate
    directions: Directions | Moves
    uploads: Mapping[str, Floats]
    words: Mapping[str, Array]
    silos: tuple[str, ...]
    seed: bytes = field(default=b"", repr=False)


def fits(run: PublicRun) -> str:
    """Return why loss differences of a run cannot be attacked; empty if they can."""
    if run.setting("local-epochs"):
        return "with local-epochs no loss differences are uploaded"
    if draws_own(run):
        return 'with directions = "own" whole estimates are uploaded, and no loss differences'
    if run.setting("batch-statistics"):
        return "with batch-statistics a loss is of a whole batch, and no row's is computed again here"
    if run.scheme == "additive-shares" and run.setting("dp-noise"):
        return "the sums that the server opened have noise in them, and are not put together from shares again here"
    return augmented(run) or no_training(run)


def settings_of(run: PublicRun) -> BAFFLE:
    """Return the protocol's settings, which are all public."""
    return BAFFLE.model_validate({key: value for key, value in run.settings["protocol"].items() if value is not None})


def recipe_of(run: PublicRun, forward: Forward | None = None) -> Recipe:
    """Return the public settings of silos' estimates. forward: of `forward_of`, which has the model's blocks."""
    recipe = settings_of(run).recipe(run.rounds)
    return recipe.by(forward.blocks, forward.layout.shapes) if isinstance(forward, MovesBlocks) else recipe


def directions_at(recipe: Recipe, layout: Layout, ask: Estimate, seed: bytes) -> Directions | Moves:
    """Return the directions of an ask and a seed, or the moves of blocks."""
    purpose = (ask.stamp.run, ask.stamp.round, ask.parameter_hash)
    if recipe.rule:
        return Moves.of(recipe, layout, seed, *purpose)
    return recipe.directions(ask.k, layout.size, seed, *purpose)


def drawn_at(directions: Directions | Moves) -> float:
    """Return the cost of directions and their products with a gradient (`moretta.audit.evidence.network`)."""
    return 4.0 * directions.products if isinstance(directions, Moves) else DRAWN * directions.count * directions.size


def by_blocks(run: PublicRun) -> bool:
    """Return whether layers move one after the other."""
    return bool(run.setting("perturb") == "blocks")


def draws_own(run: PublicRun) -> bool:
    """Return whether each silo draws its own directions, and uploads its estimate."""
    return bool(run.setting("directions") == "own")


def uploads_layers(run: PublicRun) -> bool:
    """Return whether silos upload estimates of linear layers, without noise of directions."""
    return by_blocks(run) and run.setting("linear") == "activations"


def rounds_seen(truth: Truth) -> tuple[int, ...]:
    """Return the last recorded rounds, and the first, in which the seed was agreed on."""
    return tuple(sorted({*truth.recorded[:1], *truth.recorded[-ROUNDS:]}))


def seeded_rounds(run: PublicRun, heard: Sequence[Heard], forward: Forward) -> Mapping[int, Round]:
    """Return the rounds of a server's view that shows their seed, by number. forward: of `forward_of`."""
    recipe, seed, seen = recipe_of(run, forward), b"", dict[int, Round]()
    ask: Estimate | None = None
    came: dict[str, Any] = {}
    for entry in heard:
        match entry.message:
            case Agree():
                seed = seed_of(entry.message.contributions)
            case Estimate():
                came = {} if ask is None or ask.stamp != entry.message.stamp else came
                ask = entry.message
            case PlainUpload() | MaskedUpload() | SealedShares() if ask and seed and entry.message.stamp == ask.stamp:
                came[entry.peer] = entry.message
                seen[entry.round] = _round(directions_at(recipe, forward.layout, ask, seed), seed, ask, came)
            case Unmask() if entry.round in seen and entry.message.stamp == seen[entry.round].ask.stamp:
                seen[entry.round] = replace(seen[entry.round], silos=entry.message.survivors)  # others were lost since
    return seen


def _round(directions: Directions | Moves, seed: bytes, ask: Estimate, came: Mapping[str, Any]) -> Round:
    clear, words = dict[str, Floats](), dict[str, Array]()
    for silo, upload in came.items():
        if isinstance(upload, PlainUpload):
            clear[silo] = np.asarray(upload.tensors["scalars"][: directions.count], np.float64)
        elif isinstance(upload, MaskedUpload):
            words[silo] = upload.tensors["scalars"]
    return Round(ask, directions, clear, words, tuple(sorted(came)), seed)


def partly_trained(model: nn.Module, run: PublicRun) -> nn.Module:
    """Return a copy of the model that trains only the parameters in the run's `trainable`."""
    return torch_forward.partly_trained(model, run.setting("trainable") or ())


def forward_of(model: nn.Module, run: PublicRun, fixed: Mapping[str, Array], *, tokens: bool = False) -> Forward:
    """Return the runner of the architecture at flat parameters, which moves its blocks where the run does.

    Args:
        fixed: Untrained tensors, by name.
        tokens: Whether inputs are whole numbers.
    """
    model = partly_trained(model, run)
    held = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, value in fixed.items():
            held[name].copy_(torch.tensor(value))
    layout, rule = layout_of(model), settings_of(run).rule()
    if rule is None:
        return TorchForward(model, layout)
    graph = cut.cut_of(model, layout, run.shape, torch.int64 if tokens else torch_dtype(run))
    return torch_blocks.TorchBlocks(model, layout, graph, cut.blocks_of(graph, layout, rule))


def forward_in(case: Case, *, tokens: bool) -> Forward:
    """Return `forward_of` a case's model, with the tensors of `fixed_of`."""
    return forward_of(case.model(), case.run, under(FIXED, case.arrays), tokens=tokens)


def forward_at(truth: Truth) -> Forward:
    """Return `forward_of` the run's own model."""
    tokens = truth.rows(truth.run.silos[0]).x.dtype.kind in "iu"
    return forward_of(truth.network(), truth.run, {}, tokens=tokens)


def check_scalars(truth: Truth) -> None:
    """Raise `moretta.errors.ParameterError` where the model's blocks have no scalars."""
    if by_blocks(truth.run):
        forward = forward_at(truth)
        Moves.of(recipe_of(truth.run, forward), forward.layout, b"")


def fixed_of(truth: Truth) -> dict[str, Array]:
    """Return the tensors that the run did not train, which every role holds, by ``fixed/TENSOR``."""
    model = partly_trained(truth.network(), truth.run)
    held = {name: value.detach().cpu().numpy() for name, value in model.state_dict().items()}
    return over(FIXED, {name: value for name, value in held.items() if name not in layout_of(model).shapes})


def gather_numbers(truth: Truth, more: Mapping[str, Array], knowledge: str) -> Given:
    """Return the server's view of `rounds_seen`, its opened sums, the fixed tensors, and more."""
    check_scalars(truth)
    rounds = rounds_seen(truth)
    arrays = {**fixed_of(truth), **(opened(truth, rounds) if truth.run.masked else {}), **more}
    return Given(
        views={"server": rounds},
        arrays=arrays,
        view=f"{len(rounds)} rounds of the server's messages, and the sums that it opened in them",
        knowledge=knowledge,
    )


def uploads_of(case: Case, seen: Mapping[int, Round]) -> list[tuple[int, int, Floats, int]]:
    """Return the server's data: a round's number, a silo's (-1: all together), x_k, and the number of rows."""
    run, uploads = case.run, list[tuple[int, int, Floats, int]]()
    for number, view in seen.items():
        rows = {silo: rows_of(run, silo, number) for silo in view.silos}
        if run.masked:
            uploads.append((number, -1, np.asarray(case.arrays[f"{OPENED}{number}"]), sum(rows.values())))
        else:
            uploads += [(number, run.silos.index(silo), x, rows[silo]) for silo, x in view.uploads.items()]
    return uploads


def opened(truth: Truth, rounds: Sequence[int]) -> dict[str, Array]:
    """Return the server's opened sums, float64[K] by ``opened/ROUND``, from the rows, or under noise from messages."""
    forward, sums = forward_at(truth), dict[str, Array]()
    if truth.run.setting("dp-noise"):
        return _unmasked(truth, rounds, forward)
    for number, seen in seeded_rounds(truth.run, truth.heard("server", *rounds), forward).items():
        rows = truth.joined({silo: truth.batch(silo, number) for silo in seen.silos})
        sums[f"{OPENED}{number}"] = scalars(recipe_of(truth.run), forward, seen, rows.x, rows.y)
    return sums


def _unmasked(truth: Truth, rounds: Sequence[int], forward: Forward) -> dict[str, Array]:
    """Return the noised sums of rounds, which `evidence.uploads` computes from the server's messages."""
    upto = [number for number in truth.run.recorded if number <= max(rounds)]
    sums, recipe = dict[str, Array](), recipe_of(truth.run, forward)
    for number in rounds:
        held = from_heard(truth.run, truth.heard("server", *upto), number)
        count = recipe.scalars or directions_of(recipe.form, truth.messages("server", number, Estimate)[-1].k)
        sums[f"{OPENED}{number}"] = np.asarray(held.total().means["scalars"][:count], np.float64)
    return sums


def used(truth: Truth, seen: Round, silo: str) -> NDArray[np.int64]:
    """Return the numbers of the rows in a silo's upload: its batch, or under dp-noise the lot that it drew."""
    number = seen.ask.stamp.round
    if not truth.run.setting("dp-noise"):
        return truth.batch(silo, number)
    client = cast(Client, truth.role(silo, number))
    graphs = [message.graph for at in truth.recorded for message in truth.messages("server", at, Agree, silo)]
    return client.lot(seen.ask, seen.seed, graphs[-1].tobytes() if graphs else b"")


def scalars(recipe: Recipe, forward: Forward, seen: Round, x: Array, y: Array) -> Floats:
    """Return the x_k of these rows in a round, float64[K]: those of their mean loss."""
    return np.asarray(by_row(recipe, forward, seen, x, y).mean(axis=1))


def by_row(recipe: Recipe, forward: Forward, seen: Round, x: Array, y: Array) -> Floats:
    """Return the x_k of each of these rows in a round, float64[K, rows]."""
    if isinstance(seen.directions, Moves):
        return seen.directions.by_row(cast(MovesBlocks, forward), seen.ask.parameters, x, y)
    return differences(recipe.form, recipe.sigma, seen.directions, forward, recipe.loss, seen.ask.parameters, x, y)[0]


def true_gradient(truth: Truth, layout: Layout, at: Array, rows: Rows) -> Floats:
    """Return the gradient of rows' mean loss at flat parameters, float64[n]."""
    model = truth.network()
    tensors = {**modules.arrays(model), **layout.split(np.asarray(at))}
    for tied, name in modules.ties(model).items():
        tensors[tied] = tensors[name]
    gradients = evidence.gradient(model, tensors, rows, truth.loss)
    return np.concatenate([gradients[name].ravel() for name in layout.shapes]).astype(np.float64)


def cosine(a: Array, b: Floats) -> float:
    """Return the cosine between two flat arrays, 0 where one is zero."""
    scale = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(np.dot(a.astype(np.float64), b)) / scale if scale else 0.0
