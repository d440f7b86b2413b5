"""What a site plays: any protocol's client by PyTorch, or a silo in a process that only runs the model forward.

An edge site (`moretta.edge`) imports no PyTorch and calls no code of the run's model; the server sends its graph, and
with its hello the digest of its tensors, by which both know that they mean the same model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moretta.config.run_files import RunFile
from moretta.config.silo_file import SiloFile
from moretta.contract.messages import Message
from moretta.contract.roles import Client
from moretta.data.silo import digests_by_silo
from moretta.deployment import shared_settings
from moretta.deployment.site_policy import OwnSide
from moretta.engines.checkpoint import CheckpointId
from moretta.engines.child import ChildClient
from moretta.engines.flare.envelope import Hello
from moretta.engines.journal import HelpedFile
from moretta.engines.run_folder import PRIVACY, RunFolder
from moretta.protocols.common.entry import load
from moretta.protocols.common.setting import Setting, check_tables, prepared_rows
from moretta.protocols.common.silo_rows import schema_of
from moretta.protocols.common.silo_setup import SiloSetup
from moretta.protocols.common.statistics import without_noise
from moretta.protocols.registry import edge_of, entry_of


class EdgeRole:
    """What an edge site plays. silos: of the run, with the site's own rows.

    run_file: as `moretta.deployment.site_policy.admit` returned it.
    Raises `moretta.errors.ParameterError` where the run, the site's file and its rows do not fit each other, and
    `moretta.errors.MissingExtra` without ONNX Runtime.
    """

    def __init__(self, run_file: RunFile, file: SiloFile) -> None:
        self._edge, self._run_file, self._file = edge_of(run_file.protocol), run_file, file
        self._spec = spec = shared_settings.specification_at(run_file, file)
        self._rows = prepared_rows(spec, shared_settings.silos_at(run_file, file)[0])
        self.silos = self._rows.silos
        (self._silo,) = (silo for silo in self.silos if not silo.remote)
        self._setup: SiloSetup | None = None

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
        spec, name = self._spec, self._silo.name
        check_tables(spec, hello.outputs)
        setting = Setting(
            spec,
            None,  # type: ignore[arg-type]  # the model, which no edge site builds
            hello.outputs,
            *self._rows,
            session=hello.session,
            run_id="" if spec.run.insecure_secret_seed is not None else hello.run,
            helped=lambda name: helped,
        )
        statistics = setting.statistics(setting.columns, spec.protocol.lot(spec.data.batch_size))
        self._setup = setting.setup(self._silo, hello.tensors, statistics, setting.bound(hello.tensors))
        engine = self._file.edge_engine(spec.engine)
        client = self._edge.edge_client(spec.protocol, self._setup, engine, setting.insecure_root(name))
        return client, schema_of(self._edge.MESSAGES)

    def leave(self, client: Client, folder: RunFolder) -> None:
        """End the process, and write what noise the silo's own rows have had."""
        if isinstance(client, ChildClient):
            if self._setup is not None and self._setup.privacy is not None:
                left_out = without_noise(self._file.helped.opened.answers.names(folder.path.name))
                folder.write_json(PRIVACY, self._edge.privacy_of(self._setup, client.state(), left_out))
            client.close()


class TorchRole:
    """The same by PyTorch. Raises `moretta.errors.ParameterError` as `site_side` does."""

    def __init__(self, run_file: RunFile, file: SiloFile) -> None:
        import torch

        from moretta.protocols.common import modules
        from moretta.run.engine import SMALL

        self._run_file, self._name = run_file, file.silo.name
        self._federation = shared_settings.site_side(run_file, file)
        self._model = shared_settings.model_digest(self._federation, run_file)
        threads = file.limits.threads
        if threads is None and modules.size(self._federation.model) < SMALL:
            threads = 1
        if threads is not None:
            torch.set_num_threads(threads)

    def own(self, text: str) -> OwnSide:
        """Return what the site compares with a server's hello. text: of the run."""
        from moretta.run import record

        return OwnSide(text, self._run_file, record.versions()["torch"], self._model)

    def rows(self) -> Mapping[str, str]:
        """Return a digest of the site's own rows, by its name."""
        return digests_by_silo(self._federation.silos)

    def client(self, hello: Hello, helped: HelpedFile) -> tuple[Client, Sequence[type[Message]]]:
        """Build the role."""
        run = self._run_file.run
        place = CheckpointId(hello.run, hello.round, hello.session, hello.job)
        return self._federation.client(self._name, run.rounds, run.seed, place, helped)

    def leave(self, client: Client, folder: RunFolder) -> None:
        """Write what the run leaves at the site alone (`moretta.protocols.common.roles.Left`)."""
        from moretta.protocols.common.roles import Left

        leaves = entry_of(self._run_file.protocol).leaves
        left = load(leaves)(client) if leaves else Left()
        if left.privacy:
            folder.write_json(PRIVACY, left.privacy)
        if left.model:
            folder.write_model("confined.safetensors", left.model)
        if left.scores:
            folder.write_json("scores.json", left.scores)
