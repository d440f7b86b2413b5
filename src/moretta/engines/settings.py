"""Settings of where silos run, and of the faults to inject."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import PositiveInt, model_validator

from moretta.contract.settings import Fraction, Positive, Section, Seed, Unit, Words, kebab
from moretta.contract.wording import shown
from moretta.errors import ParameterError

FaultPhase = Literal["set-up", "upload", "unmasking"]


class Fault(Section):
    """One silo's fault in one round.

    round: counted from 1; the release after the last round is one more. silo: its name.
    phase: "set-up", where keys and common statistics are agreed on; "upload", the silo's answers of the round itself;
        "unmasking", after it has uploaded, where the secure sum of those who did is completed.
    """

    round: PositiveInt
    silo: Words
    phase: FaultPhase = "upload"


class Delay(Fault):
    """A silo's answers of one phase come so many seconds later.

    seconds: they count towards the deadline, but nobody waits for them; without a deadline they are only logged.
    """

    seconds: Annotated[Positive, Unit("seconds")]


class Faults(Section):
    """Faults to inject, to show that a federation survives them.

    drop: the silo cannot be reached from that phase on to the end of that round. In "upload" it vanishes before it
        uploads, in "unmasking" after. "set-up" takes hold in a round without one too; a round whose sum is not masked
        has no unmasking to vanish in.
    drop_probability: how likely each silo is, in each round, to vanish in its upload or, where the round has one, in
        its unmasking, either equally likely.
    delay: answers that come later.
    corrupt: answers that arrive without their last byte, as when a connection breaks.
    seed: what follows from it are the faults that are drawn. They depend on seed, round and silo alone, so a resumed
        run meets the same ones.
    """

    drop: tuple[Fault, ...] = ()
    drop_probability: Fraction = 0.0
    delay: tuple[Delay, ...] = ()
    corrupt: tuple[Fault, ...] = ()
    seed: Seed = 0


EngineName = Literal["in-process", "flare", "fused", "exact-ring"]
Precision = Literal["float32", "float16", "int8-activations"]


class Engine(Section):
    """Where the silos live.

    name: "in-process": silos on this machine that pass messages. "fused" and "exact-ring" are for cgd alone, on an
        N-layer network: one process plays all participants without messages, at the paper's scale
        (`moretta.protocols.cgd.simulation`). "flare": silos on machines of their own, over NVIDIA FLARE
        (`moretta.deployment`).
    sites: the silos' names, with "flare"; those of a grid row by row.
    torch_versions: versions of PyTorch that sites may run beside the server's own, with "flare", by their first two
        numbers, for example "2.12".
    workers: processes of this machine that silos play in, each on one thread; never more than silos, or stacks of silos
        that compute together (`moretta.engines.silos_here`). None: one a core, or 1 where the model is large enough for
        PyTorch's own threads, or the run too short to gain by it (`moretta.run.engine`). With a number, also 1, the
        whole run computes on one thread. Results are the same with any number.
    strict: pass every message through the codec, as a network would.
    deadline: how many seconds an answer may take; None waits, for the process of an edge client and over "flare" ten
        minutes at most.
    message_mib: how many MiB a message has at most that the server takes from a site, with "flare"; a longer one counts
        as malformed. A site's own limit is in its silo.toml.
    edge: the names of silos that take part as edge clients, under baffle: each is a process of its own with ONNX
        Runtime and without PyTorch (`moretta.edge`). The others run PyTorch in this process.
    edge_precision: what edge clients compute in; "float16" and "int8-activations" round to what such hardware has
        (`moretta.protocols.baffle.onnx_export`).
    memory_limit_mib: the most memory, resident, that the process of an edge client may take; None: no limit.
    micro_batch: how many rows an edge client runs at a time; None: as many as the limit allows, or without one 4.
    faults: faults to inject; None: none. They happen to silos, so centralised training has none.
    """

    name: EngineName = "in-process"
    sites: tuple[Words, ...] = ()
    torch_versions: tuple[Words, ...] = ()
    workers: PositiveInt | None = None
    strict: bool = False
    deadline: Annotated[Positive | None, Unit("seconds")] = None
    message_mib: Annotated[PositiveInt, Unit("MiB")] = 1024
    edge: tuple[Words, ...] = ()
    edge_precision: Precision = "float32"
    memory_limit_mib: Annotated[Positive | None, Unit("MiB")] = None
    micro_batch: Annotated[PositiveInt | None, Unit("rows")] = None
    faults: Faults | None = None

    @property
    def simulates(self) -> bool:
        """Whether one process plays all silos without messages."""
        return self.name in ("fused", "exact-ring")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self._check_sites()
        for key in ("edge_precision", "memory_limit_mib", "micro_batch"):
            if not self.edge and getattr(self, key) != type(self).model_fields[key].default:
                raise ParameterError(
                    f"[engine] {kebab(key)} is for edge clients, and there are none; name some, for example "
                    'edge = ["silo-1"], or remove it'
                )
        return self

    def _check_sites(self) -> None:
        if self.name != "in-process" and self.workers is not None:
            raise ParameterError(f'[engine] workers is for name = "in-process", not "{self.name}"; remove it')
        if self.name != "flare":
            for key in ("sites", "torch_versions", "message_mib"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ParameterError(f'[engine] {kebab(key)} is for name = "flare", not "{self.name}"; remove it')
            return
        if not self.sites:
            raise ParameterError(
                '[engine] sites is missing; name = "flare" needs the names of the silos, for example '
                'sites = ["north", "south"]'
            )
        for site in self.sites:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", site) or site in ("server", "admin"):
                raise ParameterError(
                    f"[engine] sites: {shown(site)} cannot be the name of a site; expected 1 to 63 "
                    'letters, digits, dashes and underscores, and not "server" or "admin"'
                )
        if len(set(self.sites)) < len(self.sites):
            raise ParameterError("[engine] sites has a name twice; give each site its own")
        if len({site.casefold() for site in self.sites}) < len(self.sites):
            raise ParameterError("[engine] sites: two names differ by capitals alone; give each site its own")
        if self.faults is not None:
            raise ParameterError('[engine.faults] are injected in-process; with name = "flare" remove them')
        if self.edge:
            raise ParameterError('[engine] edge: with name = "flare" a site says so itself, by moretta join --edge')
