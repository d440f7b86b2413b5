"""What a site plays with PyTorch: any protocol's client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from moretta.config.run_files import RunFile
from moretta.config.silo_file import SiloFile
from moretta.contract.messages import Message
from moretta.contract.roles import Client
from moretta.data.silo import digests_by_silo
from moretta.deployment import shared_settings
from moretta.deployment.site_policy import OwnSide
from moretta.engines.checkpoint import CheckpointId
from moretta.engines.flare.envelope import Hello
from moretta.engines.journal import HelpedFile
from moretta.engines.run_folder import PRIVACY, RunFolder
from moretta.protocols.common import modules
from moretta.protocols.common.entry import load
from moretta.protocols.common.roles import Left
from moretta.protocols.registry import entry_of
from moretta.run import record
from moretta.run.loop import SMALL


class TorchRole:
    """A role as `moretta.deployment.site.Site` wants it. Raises `moretta.errors.ParameterError` as `site_side` does."""

    def __init__(self, run_file: RunFile, file: SiloFile) -> None:
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
        leaves = entry_of(self._run_file.protocol).leaves
        left = load(leaves)(client) if leaves else Left()
        if left.privacy:
            folder.write_json(PRIVACY, left.privacy)
        if left.model:
            folder.write_model("confined.safetensors", left.model)
        if left.scores:
            folder.write_json("scores.json", left.scores)
