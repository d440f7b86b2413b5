"""What BAFFLE's server sees of its rounds: parameters, directions, the loss differences x_k, and the seed's agreement.

The seed follows from contributions that the server relays, so directions are derived here as any role derives them
(`moretta.protocols.baffle.silo.seeds`, `moretta.protocols.baffle.silo.recipe`). What a secure sum opened is the
server's own result and is in no message; `opened` computes it again for the attacker.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moretta.audit.evidence.case import Heard
from moretta.audit.evidence.public_run import PublicRun
from moretta.audit.evidence.uploads import from_heard
from moretta.contract.messages import Array
from moretta.errors import ParameterError
from moretta.protocols.baffle.silo.directions import Directions
from moretta.protocols.baffle.silo.estimate import differences, directions_of
from moretta.protocols.baffle.silo.messages import Agree, Estimate
from moretta.protocols.baffle.silo.recipe import Recipe
from moretta.protocols.common.row_losses import RowLosses
from moretta.secure_aggregation.additive import SealedShares
from moretta.secure_aggregation.keystream import derive, encode_parts
from moretta.secure_aggregation.pairwise import MaskedUpload
from moretta.secure_aggregation.plain import PlainUpload
from moretta.secure_aggregation.unmasking import Unmask

if TYPE_CHECKING:
    from torch import nn

    from moretta.audit.evidence.truth import Truth
    from moretta.protocols.baffle.silo.forward import Forward

ROUNDS = 12  # how many are attacked, the last ones
FIXED = "fixed/"
OPENED = "opened/"
DRAWN = 30.0  # multiplications that an entry of a direction is worth: it is drawn and added


@dataclass(frozen=True)
class Round:
    """One round as the server sees it.

    ask: what it asked. directions: d_1 .. d_K. uploads: in the clear, x_1 .. x_K by silo, none where they were masked.
    words: of pairwise masked uploads, by silo. silos: those whose uploads counted. seed: of the directions.
    """

    ask: Estimate
    directions: Directions
    uploads: Mapping[str, NDArray[np.float64]]
    words: Mapping[str, Array]
    silos: tuple[str, ...]
    seed: bytes = field(default=b"", repr=False)


def fits(run: PublicRun) -> str:
    """Say why loss differences of a run cannot be attacked."""
    if run.setting("local-epochs"):
        return "with local-epochs no loss differences are uploaded"
    if run.setting("directions") == "own":
        return 'with directions = "own" whole estimates are uploaded, and no loss differences'
    if run.setting("batch-statistics"):
        return "with batch-statistics a loss is of a whole batch, and no row's is computed again here"
    if run.scheme == "additive-shares" and run.setting("dp-noise"):
        return "the sums that the server opened have noise in them, and are not put together from shares again here"
    if run.augmented:
        return "rows are augmented anew in every round, and there is no record of what to compare with"
    return "" if run.recorded else "no round of training was recorded"


def recipe_of(run: PublicRun) -> Recipe:
    """Return the public settings that silos estimate by."""
    loss = RowLosses(run.loss, float(run.setting("label-smoothing") or 0.0), tuple(run.setting("class-weights") or ()))
    return Recipe(
        form=run.setting("form"),
        sigma=float(run.setting("sigma")),
        loss=loss,
        most=int(run.setting("k")),
        direction=run.setting("direction"),
        orthogonal=bool(run.setting("orthogonal")),
        seed_pool=int(run.setting("seed-pool") or 0),
        clip_entry=float(run.setting("clip-entry") or 0.0),
    )


def rounds_seen(truth: Truth, most: int = ROUNDS) -> tuple[int, ...]:
    """Return the last recorded rounds, and the first, in which the seed was agreed on."""
    return tuple(sorted({*truth.recorded[:1], *truth.recorded[-most:]}))


def seed_of(contributions: Mapping[str, bytes]) -> bytes:
    """Return the seed that follows from all roles' contributions, as each role derives it."""
    cohort = sorted(set(contributions) - {"server"})
    joined = encode_parts(*(part for name in sorted(contributions) for part in (name, contributions[name])))
    digest = hashlib.sha256(encode_parts("baffle cohort", *cohort)).digest()
    return derive(hashlib.sha256(joined).digest(), "baffle seed", digest)


def seeded_rounds(run: PublicRun, heard: Sequence[Heard]) -> Mapping[int, Round]:
    """Return the rounds of a server's view whose seed it shows, by number."""
    recipe, seed, found = recipe_of(run), b"", dict[int, Round]()
    ask: Estimate | None = None
    came: dict[str, Any] = {}
    for one in heard:
        match one.message:
            case Agree():
                seed = seed_of(one.message.contributions)
            case Estimate():
                came = {} if ask is None or ask.stamp != one.message.stamp else came
                ask = one.message
            case PlainUpload() | MaskedUpload() | SealedShares() if ask and seed and one.message.stamp == ask.stamp:
                came[one.peer] = one.message
                found[one.round] = _round(recipe, seed, ask, came)
            case Unmask() if one.round in found and one.message.stamp == found[one.round].ask.stamp:
                found[one.round] = replace(found[one.round], silos=one.message.survivors)  # others were lost since
    return found


def _round(recipe: Recipe, seed: bytes, ask: Estimate, came: Mapping[str, Any]) -> Round:
    count = directions_of(recipe.form, ask.k)
    purpose = (ask.stamp.run, ask.stamp.round, ask.parameter_hash)
    directions = recipe.directions(ask.k, ask.parameters.size, seed, *purpose)
    clear, words = dict[str, NDArray[np.float64]](), dict[str, Array]()
    for silo, upload in came.items():
        if isinstance(upload, PlainUpload):
            clear[silo] = np.asarray(upload.tensors["scalars"][:count], np.float64)
        elif isinstance(upload, MaskedUpload):
            words[silo] = upload.tensors["scalars"]
    return Round(ask, directions, clear, words, tuple(sorted(came)), seed)


def partly_trained(model: nn.Module, run: PublicRun) -> nn.Module:
    """Return the model with only those parameters to be trained that the run's `trainable` names."""
    wanted = tuple(run.setting("trainable") or ())
    for name, parameter in model.named_parameters():
        chosen = any(fnmatch.fnmatchcase(name, one) or fnmatch.fnmatchcase(name, f"{one}.*") for one in wanted)
        parameter.requires_grad_(parameter.requires_grad and (chosen or not wanted))
    return model


def forward_of(model: nn.Module, run: PublicRun, fixed: Mapping[str, Array]) -> Forward:
    """Return what runs the architecture at flat parameters. fixed: tensors that are not trained, by name."""
    import torch

    from moretta.protocols.baffle.torch_forward import TorchForward, layout_of

    model = partly_trained(model, run)
    held = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, value in fixed.items():
            held[name].copy_(torch.tensor(value))
    return TorchForward(model, layout_of(model))


def fixed_of(truth: Truth) -> dict[str, Array]:
    """Return the tensors that the run did not train, which every role holds."""
    from moretta.protocols.baffle.torch_forward import layout_of

    model = partly_trained(_copied(truth), truth.run)
    held = {name: value.detach().cpu().numpy() for name, value in model.state_dict().items()}
    return {name: value for name, value in held.items() if name not in layout_of(model).shapes}


def opened(truth: Truth, rounds: Sequence[int]) -> dict[str, Array]:
    """Return what the server's secure sums opened to, float64[K] by ``opened/ROUND``.

    Computed again from the rows, or where silos added noise, from the recorded messages.
    """
    if truth.run.setting("dp-noise"):
        return _unmasked(truth, rounds)
    heard = [one for number in rounds for one in truth.heard("server", number)]
    forward, found = forward_of(_copied(truth), truth.run, {}), dict[str, Array]()
    for number, seen in seeded_rounds(truth.run, heard).items():
        parts = {silo: truth.rows(silo).part(truth.batch(silo, number)) for silo in seen.silos}
        x, y = (np.concatenate([getattr(part, key) for part in parts.values()]) for key in ("x", "y"))
        found[f"{OPENED}{number}"] = scalars(recipe_of(truth.run), forward, seen, x, y)
    return found


def _unmasked(truth: Truth, rounds: Sequence[int]) -> dict[str, Array]:
    """Return the noised sums of rounds, as `evidence.uploads` puts them together from the server's messages."""
    upto = [number for number in truth.run.recorded if number <= max(rounds)]
    heard = [one for number in upto for one in truth.heard("server", number)]
    found = dict[str, Array]()
    for number in rounds:
        held = from_heard(truth.run, heard, number)
        ask = [one.message for one in heard if isinstance(one.message, Estimate) and one.round == number][-1]
        total = held.total().means["scalars"]
        found[f"{OPENED}{number}"] = np.asarray(total[: directions_of(recipe_of(truth.run).form, ask.k)], np.float64)
    return found


def used(truth: Truth, seen: Round, silo: str) -> NDArray[np.int64]:
    """Return the numbers of the rows in a silo's upload: its batch, or under dp-noise the lot that it drew."""
    number = seen.ask.stamp.round
    if not truth.run.setting("dp-noise"):
        return truth.batch(silo, number)
    from moretta.protocols.baffle.silo.client import Client

    client = truth.role(silo, number)
    if not isinstance(client, Client):
        raise ParameterError(f"expected a silo of baffle, got {type(client).__name__}")
    agreed = [one for at in truth.recorded for one in truth.heard("server", at) if isinstance(one.message, Agree)]
    graphs = [one.message.graph for one in agreed if one.peer == silo and isinstance(one.message, Agree)]
    return client.lot(seen.ask, seen.seed, graphs[-1].tobytes() if graphs else b"")


def cost_of(seen: Round, model: nn.Module, shape: tuple[int, ...], rows: int, *, tokens: bool) -> float:
    """Return what a round's K numbers of so many rows cost (`moretta.audit.evidence.work`)."""
    from moretta.audit.evidence import work

    count = seen.directions.count
    forward = work.of_passes(model, work.of_row(model, shape, tokens=tokens), rows, 1.0)
    return count * (forward + DRAWN * seen.directions.size)


def scalars(recipe: Recipe, forward: Forward, seen: Round, x: Array, y: Array) -> NDArray[np.float64]:
    """Return the x_k that these rows would give in a round, float64[K]: those of their mean loss."""
    return np.asarray(by_row(recipe, forward, seen, x, y).mean(axis=1))


def by_row(recipe: Recipe, forward: Forward, seen: Round, x: Array, y: Array) -> NDArray[np.float64]:
    """Return the x_k that each of these rows would give in a round, float64[K, rows]."""
    found, _ = differences(recipe.form, recipe.sigma, seen.directions, forward, recipe.loss, seen.ask.parameters, x, y)
    return found


def _copied(truth: Truth) -> nn.Module:
    import copy

    return copy.deepcopy(truth.federation.model)
