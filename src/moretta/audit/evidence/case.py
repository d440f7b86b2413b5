"""An attacker's input, as one piece of bytes: views, public facts, knowledge, and the architecture."""

from __future__ import annotations

import copy
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from moretta.contract.codec import Codec, pack_arrays, unpack_arrays
from moretta.contract.messages import Array, Message, Tensors
from moretta.contract.roles import under
from moretta.data.layout import SampleLayout
from moretta.data.references import OWN_CODE
from moretta.engines import views
from moretta.errors import ParameterError
from moretta.models import catalogue, hooks
from moretta.models.hooks import with_one_argument
from moretta.protocols.common import silo_rows
from moretta.protocols.common.training import Training
from moretta.protocols.registry import ENTRIES

_VIEW, _ARRAY, _PROGRAM, _CASE = "view/", "array/", "program", "case"


@cache
def codec() -> Codec:
    """Return a codec of the messages of all protocols."""
    own = [kind for entry in ENTRIES.values() for kind in (*entry.own_messages(), *entry.own_messages("SET_UP"))]
    return Codec(dict.fromkeys((*silo_rows.schema_of(()), *own)))


@dataclass(frozen=True)
class PublicRun:
    """The public facts of a run; they travel to an attacker as JSON.

    Attributes:
        settings: [protocol], [secure-aggregation] and what silos must know of [data]; neither secrets nor paths.
        rows: The number of each silo's rows. Others' sizes count as known: they show in the lengths of messages under
            cross-entropy, and in the length of an epoch.
        shape: The shape of one row of inputs.
        dtype: "float32" or "float64".
        rounds: The number of rounds that ran.
        recorded: The rounds with views.
        head, head_bias: The names of the last linear layer's parameters; empty if no layer is of [outputs, ..].
        head_magnitude: The name of g of its weight normalisation, W = g v / |v|; `head` then names v.
        arrays: The arrays of a sample (`moretta.data.layout.SampleLayout.dump`); empty for a sample of one array.
        mask: The shape of target masks; empty for other targets.
    """

    id: str
    protocol: str
    task: str
    settings: Mapping[str, Mapping[str, Any]]
    silos: tuple[str, ...]
    rows: Mapping[str, int]
    shape: tuple[int, ...]
    outputs: int
    dtype: str
    scheme: str
    ring_bits: int | None
    rounds: int
    recorded: tuple[int, ...]
    head: str = ""
    head_bias: str = ""
    head_magnitude: str = ""
    arrays: Mapping[str, Any] = field(default_factory=dict)
    mask: tuple[int, ...] = ()

    def setting(self, key: str, section: str = "protocol") -> Any:
        """Return one setting, None if the run has none of that name."""
        return self.settings.get(section, {}).get(key)

    @property
    def layout(self) -> SampleLayout | None:
        """The packing of a sample of several arrays; None for one array."""
        return SampleLayout.load(self.arrays) if self.arrays else None

    @property
    def has_tokens(self) -> bool:
        """Whether token ids lie beside numbers in a packed row."""
        return self.layout is not None and self.layout.has_integers

    @property
    def masked(self) -> bool:
        """Whether uploads went through a secure sum."""
        return self.scheme != "none"

    @property
    def training(self) -> tuple[int, ...]:
        """The recorded rounds of training, without the release after the last."""
        return tuple(number for number in self.recorded if 1 <= number <= self.rounds)

    @property
    def augmented(self) -> bool:
        """Whether silos vary their rows anew in each round."""
        return self.setting("augment", "data") not in (None, "none")

    @property
    def optimizer(self) -> Training:
        """The optimizer, and the rate of each round of a protocol without a schedule of its own."""
        names = ["learning-rate", "lr-schedule", "milestones", "milestone-factor", "first-rate", "epoch-rounds"]
        names += ["optimizer", "betas", "momentum", "weight-decay", "clip-norm"]
        settings = {name: value for name in names if (value := self.setting(name)) is not None}
        return Training.model_validate(settings)

    @property
    def loss(self) -> str:
        """The loss, "mse" or "cross-entropy"."""
        return str(self.setting("loss"))


@dataclass(frozen=True)
class Heard:
    """A message that a role sent or received.

    Attributes:
        peer: The other end.
        number: The round in whose view the message is.
    """

    direction: str
    peer: str
    message: Message
    number: int

    @classmethod
    def of_round(cls, role: str, number: int, data: bytes, frozen: Tensors) -> list[Heard]:
        """Return the messages in the file of a role's view of a round. frozen: tensors that rounds omit."""
        reader, seen = codec(), views.parse(data, f"round {number} of {role}")
        return [cls(item.direction, item.peer, whole(reader.decode(item.data), frozen), number) for item in seen]

    @property
    def round(self) -> int:
        """Its round; other frameworks may stamp each round as the first of its own run."""
        return self.number if self.message.stamp.round else 0


FROZEN = "frozen/"  # before the names of untrained tensors, which all roles have


def whole(message: Message, frozen: Tensors) -> Message:
    """Return a message with the frozen tensors added to a model's others, which alone travel in rounds."""
    if not frozen or not message.BESIDE_FROZEN:
        return message
    fields = vars(message)
    return type(message)(**{**fields, "parameters": {**fields["parameters"], **frozen}})


@dataclass(frozen=True)
class Architecture:
    """How to build the model, without weights: a run file's [model], or an exported program if it is from Python.

    Attributes:
        source, arguments, base: As in `moretta.models.catalogue.build`.
        program: The bytes of `torch.export`'s program, with weights of zero; empty for a run file's model.
    """

    source: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    base: str = "."
    program: bytes = field(default=b"", repr=False)

    def built(self, run: PublicRun, seed: int = 0) -> nn.Module:
        """Return the model of a run file, in the run's dtype, with weights drawn by a seed."""
        made = catalogue.build(
            self.source,
            inputs=run.shape,
            outputs=run.outputs // math.prod(run.mask),
            base=Path(self.base),
            seed=seed,
            layout=run.layout,
            agreed=OWN_CODE,
            **self.arguments,
        )
        if run.mask and (hook := hooks.hook_of(made)):
            made = hooks.gives_one_tensor(hooks.gives_all(made), hook.name, run.mask)
        return made.to(torch_dtype(run))


@dataclass(frozen=True)
class Case:
    """The input of one attack.

    Attributes:
        views: The bytes of a role's recorded files, by role and round.
        arrays: The declared knowledge, read-only.
        thorough: Whether the attack may take long.
    """

    run: PublicRun
    views: Mapping[str, Mapping[int, bytes]] = field(repr=False)
    arrays: Mapping[str, Array] = field(repr=False)
    architecture: Architecture
    thorough: bool = False

    @cached_property
    def _heard(self) -> Mapping[str, Sequence[Heard]]:
        return {
            role: [
                item
                for number in sorted(files)
                for item in Heard.of_round(role, number, files[number], under(FROZEN, self.arrays))
            ]
            for role, files in self.views.items()
        }

    def heard(self, role: str, kind: type[Any], direction: str | None = None) -> Sequence[Heard]:
        """Return a role's messages of one kind in order, sent or received."""
        return [
            item for item in self._heard[role] if isinstance(item.message, kind) and direction in (None, item.direction)
        ]

    def last_of_each_round(self, role: str, kind: type[Any], direction: str | None = None) -> Mapping[int, Any]:
        """Return the last message of one kind of each round: of the attempt that counted."""
        return {item.round: item.message for item in self.heard(role, kind, direction)}

    def model(self) -> nn.Module:
        """Return the architecture in the run's dtype, in train mode, with weights of zero; a module of its own."""
        if not self.architecture.program:
            return copy.deepcopy(self._built)
        return torch.export.load(io.BytesIO(self.architecture.program)).module().to(torch_dtype(self.run))

    @cached_property
    def _built(self) -> nn.Module:
        """Built once: a user's model may read files as it is built, which an attack may not."""
        made = self.architecture.built(self.run).train()
        with torch.no_grad():  # a run's seed would give its own first weights
            for parameter in made.parameters():
                parameter.zero_()
        return made

    def pack(self) -> bytes:
        """Return the case as bytes."""
        arrays = {
            f"{_VIEW}{role}/{number}": np.frombuffer(data, np.uint8)
            for role, files in self.views.items()
            for number, data in files.items()
        }
        arrays |= {f"{_ARRAY}{name}": np.array(value, order="C", copy=None) for name, value in self.arrays.items()}
        if self.architecture.program:
            arrays[_PROGRAM] = np.frombuffer(self.architecture.program, np.uint8)
        made = self.architecture
        plain = {
            "run": asdict(self.run),
            "thorough": self.thorough,
            "roles": list(self.views),
            "model": {"source": made.source, "arguments": dict(made.arguments), "base": made.base},
        }
        arrays[_CASE] = np.frombuffer(json.dumps(plain).encode(), np.uint8)
        return b"".join(pack_arrays(arrays))

    @classmethod
    def unpack(cls, data: bytes) -> Case:
        """Return the case of `pack`, with read-only arrays."""
        arrays = dict(sorted(unpack_arrays(memoryview(data)).items()))  # the order of a loaded model varies
        plain = json.loads(arrays.pop(_CASE).tobytes())
        seen: dict[str, dict[int, bytes]] = {role: {} for role in plain["roles"]}
        for name, array in arrays.items():
            if name.startswith(_VIEW):
                role, _, number = name.removeprefix(_VIEW).rpartition("/")
                seen[role][int(number)] = array.tobytes()
        inputs = {name.removeprefix(_ARRAY): array for name, array in arrays.items() if name.startswith(_ARRAY)}
        program = arrays[_PROGRAM].tobytes() if _PROGRAM in arrays else b""
        run = plain["run"] | {name: tuple(plain["run"][name]) for name in ("silos", "shape", "recorded", "mask")}
        return cls(PublicRun(**run), seen, inputs, Architecture(**plain["model"], program=program), plain["thorough"])


def torch_dtype(run: PublicRun) -> torch.dtype:
    """Return the dtype of the model."""
    return {"float32": torch.float32, "float64": torch.float64}[run.dtype]


def exported(model: nn.Module, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """Return the program of a model without a run file, with weights of zero.

    Args:
        shape, dtype: The shape and dtype of a row of inputs.

    Raises:
        ParameterError: PyTorch cannot export the model.
    """
    blank = with_one_argument(copy.deepcopy(model).train())
    with torch.no_grad():
        for parameter in blank.parameters():
            parameter.zero_()
    sample = torch.zeros((2, *shape), dtype=torch.from_numpy(np.zeros(0, dtype)).dtype)
    if sample.is_floating_point():
        sample = sample.to(next(blank.parameters()).dtype)
    try:
        program = torch.export.export(blank, (sample,), dynamic_shapes=({0: torch.export.Dim("rows")},), strict=False)
        stream = io.BytesIO()
        torch.export.save(program, stream)
    except Exception as error:
        line = str(error).partition("\n")[0]
        raise ParameterError(
            f"torch.export failed on this model, whose graph attackers receive ({type(error).__name__}: {line}); set "
            '[model] source = "module:function" in a run file'
        ) from error
    return stream.getvalue()
