"""What a site plays without PyTorch: a silo in a process that only runs the model forward (`moretta.edge`).

No code of the run's model is called here; the server sends its graph, and with its hello the digest of its tensors, by
which both know that they mean the same model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from moretta.config.run_files import RunFile
from moretta.config.silo_file import SiloFile
from moretta.contract.messages import Array, Message
from moretta.contract.roles import Client
from moretta.data.silo import check_least, digests_by_silo
from moretta.deployment import shared_settings
from moretta.deployment.site_policy import OwnSide
from moretta.engines.child import ChildClient
from moretta.engines.flare.envelope import Hello
from moretta.engines.journal import HelpedFile
from moretta.engines.run_folder import PRIVACY, RunFolder
from moretta.engines.settings import Engine
from moretta.protocols.common.scoring import HeldOut, figures_of
from moretta.protocols.common.setting import (
    TABLES_TOO,
    check_look,
    check_scores,
    check_tables,
    settings_digest,
)
from moretta.protocols.common.silo_rows import schema_of
from moretta.protocols.common.statistics import without_noise
from moretta.protocols.common.targets import encode
from moretta.protocols.registry import edge_of
from moretta.secure_aggregation.identity import Roster


class EdgeRole:
    """A role as `moretta.deployment.site.Site` wants it. silos: of the run, with the site's own rows.

    run_file: as `moretta.deployment.site_policy.admit` returned it.
    Raises `moretta.errors.ParameterError` where the run, the site's file and its rows do not fit each other, and
    `moretta.errors.MissingExtra` without ONNX Runtime.
    """

    def __init__(self, run_file: RunFile, file: SiloFile) -> None:
        protocol, data = run_file.protocol, run_file.data
        self._edge = edge_of(protocol)
        self._protocol, self._run_file, self._file = protocol, run_file, file
        self._secure = shared_settings.aggregation_at(run_file, file)
        self.silos, _ = shared_settings.silos_at(run_file, file)
        if protocol.privacy is not None:
            self._secure = self._secure.sharing_noise(len(self.silos), run_file.run.participation)
        (self._silo,) = (silo for silo in self.silos if not silo.remote)
        check_least(self._silo, data.least_rows)
        if data.score_at_silos:
            check_scores(protocol, self.silos)
        if data.look:
            check_look(protocol, self.silos)
        self._roster = None if self._secure.roster is None else Roster.load(self._secure.roster)
        if self._roster is not None:
            self._roster.check(silo.name for silo in self.silos)

    def own(self, text: str) -> OwnSide:
        """Return what the site compares with a server's hello; no version of PyTorch matters, and no model is built.

        The process compares the graph's weights with the round's hash. text: of the run.
        """
        return OwnSide(text, self._run_file)

    def rows(self) -> Mapping[str, str]:
        """Return a digest of the site's own rows, by its name."""
        return digests_by_silo(self.silos)

    def client(self, hello: Hello, helped: HelpedFile) -> tuple[Client, Sequence[type[Message]]]:
        """Return the role, whose process starts with the first message."""
        run, data, limits, silo = self._run_file.run, self._run_file.data, self._file.limits, self._silo
        held_out = None
        if data.score_at_silos and silo.held_out is not None:
            tables, task = data.score_at_silos == TABLES_TOO, shared_settings.task_of(self._run_file)
            if tables:
                check_tables(self._secure, task, hello.outputs)
            figures = figures_of(self._protocol.loss, task, tables=tables)
            x, y = silo.held_out
            held_out = HeldOut(x, self._targets(y, hello), self._protocol.loss, figures, run.rounds)
        client = self._edge.edge_client(
            self._protocol,
            silo.name,
            (silo.x, self._targets(silo.y, hello)),
            held_out,
            secure=self._secure,
            roster=self._roster,
            engine=Engine(
                edge=(silo.name,),
                edge_precision=limits.edge_precision,
                memory_limit_mib=limits.memory_limit_mib,
                micro_batch=limits.micro_batch,
            ),
            schema=hello.tensors,
            table=shared_settings.table_of(self._run_file),
            batch_size=data.batch_size,
            seed=run.seed,
            rounds=run.rounds,
            session=hello.session,
            insecure=self._file.silo.insecure_secret_seed,
            rules=self._secure.rules(self._roster, shared_settings.players_of(self._run_file)),
            run="" if self._file.silo.insecure_secret_seed is not None else hello.run,
            helped=helped,
            bound=self._bound(hello),
            subjects=silo.subjects,
            statistics=shared_settings.statistics_at(self._run_file, self.silos, hello.outputs),
            augment=data.varied,
        )
        return client, schema_of(self._edge.MESSAGES)

    def leave(self, client: Client, folder: RunFolder) -> None:
        """End the process, and write what noise the silo's own rows have had."""
        if isinstance(client, ChildClient):
            if self._protocol.privacy is not None:
                left_out = without_noise(self._file.helped.opened.answers.names(folder.path.name))
                facts = self._edge.privacy_of(self._protocol, *self._noised(), client.state(), left_out)
                folder.write_json(PRIVACY, facts)
            client.close()

    def _noised(self) -> tuple[int, int, int]:
        """Return how many rows lots are drawn from, their expected size, and how many silos share the noise."""
        sharers = 1 if self._secure.scheme == "none" else self._secure.least
        return len(self._silo.x), self._run_file.data.batch_size, sharers

    def _bound(self, hello: Hello) -> bytes:
        run, data = self._run_file.run, self._run_file.data
        return settings_digest(
            self._protocol,
            self._secure,
            self._roster,
            [silo.name for silo in self.silos],
            schema=hello.tensors,
            batch_size=data.batch_size,
            augment=data.varied,
            seed=run.seed,
            layout=data.layout,
        )

    def _targets(self, y: NDArray[np.generic], hello: Hello) -> Array:
        return encode(y, hello.outputs, self._protocol.loss, self._silo.name, self._run_file.run.dtype)
