"""A site's place in a run: its role, its state on disk, and the release that it receives.

    <out>/agreed.json            the settings that it has agreed to (`moretta.deployment.agreed_settings`)
    <out>/helped.jsonl           the sums that it has helped to open, of all runs
    <out>/<run id>/checkpoint/   the last two states of its role; secret    views/   if silo.toml asks for them
                   lasting.json          the part of its state that never goes back; secret
                   rows.json             a digest of its rows, which may not change during a run; secret
                   released.safetensors, inputs.json      the run's release, and the meaning of inputs
                   confined.safetensors                   under cgd: this participant's own model
                   privacy.json                           where it added noise: its own releases and epsilon
                   scores.json                            all models' scores on rows held back, where sums are blind
                   log.txt

An edge site (`moretta.edge`) imports no PyTorch and calls no code of the run's model: its silo is a process that only
runs the model forward. The server sends the model's graph, and with its hello the digest of the tensors, by which both
check that they have the same model.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save

from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.config.silo_file import SiloFile
from moretta.contract.codec import Codec
from moretta.contract.messages import Message, Tensors
from moretta.contract.roles import Client
from moretta.data.silo import digests_of
from moretta.deployment import shared_settings, site_policy
from moretta.deployment.agreed_settings import SiteAgreement, pinned_settings
from moretta.engines.checkpoint import CheckpointId, last_checkpoint, save_checkpoint
from moretta.engines.child import ChildClient
from moretta.engines.files import make_folder, write_atomically
from moretta.engines.flare.envelope import Hello
from moretta.engines.journal import HelpedFile
from moretta.engines.run_folder import PRIVACY, RunFolder
from moretta.engines.views import Recorder
from moretta.errors import CodecError, MorettaError, ParameterError, RowsError
from moretta.protocols.common.entry import load
from moretta.protocols.common.setting import Setting, check_tables, prepared_rows
from moretta.protocols.common.silo_rows import schema_of
from moretta.protocols.common.silo_setup import SiloSetup
from moretta.protocols.common.statistics import without_noise
from moretta.protocols.registry import edge_of, entry_of
from moretta.secure_aggregation.identity import Identity, fingerprint


class EdgeRole:
    """The role of an edge site.

    Args:
        run_file: The result of `moretta.deployment.site_policy.admit`.

    Attributes:
        silos: The run's silos, with the site's own rows.
        torch, model: None, for `moretta.deployment.site_policy.greet`: the process compares the graph's weights with
            the round's hash.

    Raises:
        ParameterError: The run, the site's file and its rows do not fit each other.
        MissingExtra: ONNX Runtime is not installed.
    """

    def __init__(self, run_file: RunFile, file: SiloFile) -> None:
        self._edge, self._run_file, self._file = edge_of(run_file.protocol), run_file, file
        self._spec = spec = shared_settings.specification_at(run_file, file)
        self._rows = prepared_rows(spec, shared_settings.silos_at(run_file, file)[0])
        self.silos = self._rows.silos
        (self._silo,) = (silo for silo in self.silos if not silo.remote)
        self._setup: SiloSetup | None = None
        self.torch = self.model = None

    def client(self, hello: Hello, helped: HelpedFile) -> tuple[Client, Sequence[type[Message]]]:
        """Return the role; its process starts with the first message."""
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
        """End the process, and write the noise of the silo's own rows."""
        if isinstance(client, ChildClient):
            if self._setup is not None and self._setup.privacy is not None:
                left_out = without_noise(self._file.helped.opened.answers.names(folder.path.name))
                folder.write_json(PRIVACY, self._edge.privacy_of(self._setup, client.state(), left_out))
            client.close()


class TorchRole:
    """The role of a site with PyTorch. Raises `moretta.errors.ParameterError` as `site_side` does."""

    def __init__(self, run_file: RunFile, file: SiloFile) -> None:
        import torch

        from moretta.protocols.common import modules
        from moretta.run import record
        from moretta.run.loop import SMALL

        self._run_file, self._name = run_file, file.silo.name
        self._federation = shared_settings.site_side(run_file, file)
        self.silos, self.torch = self._federation.silos, record.versions()["torch"]
        self.model = shared_settings.model_digest(self._federation, run_file)
        threads = file.limits.threads
        if threads is None and modules.size(self._federation.model) < SMALL:
            threads = 1
        if threads is not None:
            torch.set_num_threads(threads)

    def client(self, hello: Hello, helped: HelpedFile) -> tuple[Client, Sequence[type[Message]]]:
        """Build the role."""
        run = self._run_file.run
        place = CheckpointId(hello.run, hello.round, hello.session, hello.job)
        return self._federation.client(self._name, run.rounds, run.seed, place, helped)

    def leave(self, client: Client, folder: RunFolder) -> None:
        """Write the files that only this site gets (`moretta.protocols.common.roles.Left`)."""
        from moretta.protocols.common.roles import Left

        leaves = entry_of(self._run_file.protocol).leaves
        left = load(leaves)(client) if leaves else Left()
        if left.privacy:
            folder.write_json(PRIVACY, left.privacy)
        if left.model:
            folder.write_model("confined.safetensors", left.model)
        if left.scores:
            folder.write_json("scores.json", left.scores)


log = logging.getLogger("moretta")

LASTING = "lasting.json"


class Site:
    """One site, for `moretta.engines.flare.site_worker.SiteWorker`.

    Args:
        file: The site's silo.toml.
        text: The shared settings, as TOML.
        certificate: The name in its startup kit's certificate.

    Raises:
        PolicyError: The site does not admit the run (`moretta.deployment.site_policy`). No row has been read.
        ParameterError: silo.toml does not fit the certificate, its rows or the run.
    """

    def __init__(self, file: SiloFile, text: str, certificate: str) -> None:
        self.name = file.silo.name
        self._roster, expected = file.load_roster(), file.engine_name
        if expected != certificate:
            raise ParameterError(
                f"silo.toml has name = {self.name!r}, and this site's certificate is of `{certificate}`; use the "
                f"startup kit of `{expected}`, or correct silo.toml"
            )
        self._file, self._text = file, text
        self.largest = file.limits.message_mib << 20
        self._run_file = site_policy.admit(text, file)
        self._agreement, self._settings = SiteAgreement(file.out), pinned_settings(self._run_file)
        self._agreement.open(self._settings)
        self.timed = self._run_file.protocol.privacy is None  # else seconds reveal a secret lot
        with self._reading_rows():
            played = self._run_file
            self._role: EdgeRole | TorchRole = EdgeRole(played, file) if file.silo.edge else TorchRole(played, file)
        identity = file.silo.identity
        self._key = b"" if identity is None else Identity.load(file.base / identity).public_key
        self.fingerprint = fingerprint(self._key) if self._key else ""
        self._folder: RunFolder | None = None
        self._recorder: Recorder | None = None
        self._place = CheckpointId("", 0, 0, "")
        self._round, self._began = 0, time.monotonic()
        self._helped: HelpedFile | None = None
        self._lasting = dict[str, bytes]()

    def enter(self, hello: Hello) -> tuple[Client, Codec]:
        """Enter a run at its present round: build the role, and restore its kept state.

        Raises:
            PolicyError: Versions, shared settings or the model differ from the server's, or the settings from an
                earlier session's.
            ParameterError: The site's record of sums is gone.
        """
        if self._roster is not None:
            self._roster.check_identity(self.name, self._key)
        self._agreement.open(self._settings)
        site_policy.greet(hello, self._text, self._run_file, self._role.torch, self._role.model)
        helped = self._helped = self._file.helped.begin(begun=any(self._file.out.glob("*/checkpoint")))
        site_policy.one_run(hello.run, self._run_file, helped.opened.answers)  # before any epsilon is spent
        site_policy.charge(hello.run, self._run_file, self._file)
        self._began = time.monotonic()
        path = self._file.out / hello.run
        make_folder(path, 0o700)
        self._folder = RunFolder(path)
        with self._reading_rows():
            client, messages = self._role.client(hello, helped)
            self._folder.hold_rows(digests_of(self._role.silos))
        self._place = CheckpointId(hello.run, hello.round, hello.session, hello.job)
        self._restore(client, hello)
        self._agreement.proved(self._settings)
        if self._file.silo.record_views:
            self._recorder = Recorder(path / "views", True, hello.session)
        return client, Codec(messages, self.largest)

    @contextmanager
    def _reading_rows(self) -> Iterator[None]:
        """Close the run's settings where rows do not fit them, but not for a missing file or a lack of memory."""
        try:
            yield
        except Exception as error:
            if _is_of_rows(error) and self._agreement.close(self._settings):
                error.add_note("the site takes no part in such runs until moretta accept")
            raise

    def refused(self, error: BaseException) -> bool:
        """Count a refused answer. Return whether the site now takes no part until its operator acts."""
        return _is_of_rows(error) and self._agreement.count(self._settings)

    def answered(self, client: Client, asked: Message, answer: Message | None) -> None:
        """Record the view, and at once save the state that must survive even a kill."""
        if asked.stamp.round != self._round:
            self._round = asked.stamp.round
            self._log_round()
        if self._recorder is not None and self._recorder.wants(asked.stamp.round):
            codec = Codec([type(message) for message in (asked, answer) if message is not None])
            self._recorder.saw(self.name, "received", "server", codec.encode(asked))
            if answer is not None:
                self._recorder.saw(self.name, "sent", "server", codec.encode(answer))
        self._remember(client)

    def _log_round(self) -> None:
        """Log the round, the seconds since the run began here, and the last score on the site's own rows."""
        rounds, seconds = self._run_file.run.rounds, time.monotonic() - self._began
        helped = None if self._file.silo.edge else self._helped  # an edge client's process opens the file itself
        figures = {} if helped is None else helped.opened.answers.scored
        own = " ".join(f"{name} {value:.4g}" for name, value in figures.items())
        at = f"round {self._round} of {rounds}" if self._round <= rounds else "release"
        log.info("%s, %.0f s%s", at, seconds, f"; on its own rows held back: {own}" if own else "")

    def keep(self, client: Client, round: int) -> None:
        """Save the role's state at the end of a round."""
        self._place = CheckpointId(self._place.run, round, self._place.session, self._place.digest)
        if self._folder is not None:
            save_checkpoint(self._folder.path / "checkpoint", self._place, {f"silo-{self.name}": client.state()})
        self._remember(client)
        if self._recorder is not None:
            self._recorder.flush()

    def _remember(self, client: Client) -> None:
        """Save the state that never goes back, whatever round the role is restored to.

        It is the secret root and, under baffle, the receivers of a revealed contribution. If only a checkpoint held it,
        a server that names an older round would get other noise for the same gradient, or a contribution twice.
        """
        lasting = {key: value for key, value in client.state().items() if isinstance(value, bytes)}
        if self._folder is not None and not lasting.items() <= self._lasting.items():
            self._lasting |= lasting
            text = json.dumps({key: value.hex() for key, value in self._lasting.items()}, sort_keys=True)
            write_atomically(self._folder.path / LASTING, text.encode(), mode=0o600)

    def end(self, client: Client, released: bytes) -> None:
        """Write the run's release, and under cgd the participant's own model."""
        if self._folder is None:
            return
        if self._recorder is not None:
            self._recorder.flush()
        write_atomically(self._folder.path / "run.toml", run_files.dump(self._run_file).encode())
        if released:
            inputs, tensors = unpack_released(released)
            self._folder.write_json("inputs.json", inputs)
            self._folder.write_model("released.safetensors", tensors)
        self._role.leave(client, self._folder)
        self._file.helped.half_done.unlink(missing_ok=True)
        log.info("the run has ended; this site's files are in %s", self._folder.path)

    def _restore(self, client: Client, hello: Hello) -> None:
        if self._folder is None:
            return
        folder = self._folder.path / "checkpoint"
        checkpoint, lasting = last_checkpoint(folder, up_to=hello.round), self._folder.path / LASTING
        self._lasting = {}
        if lasting.exists():
            self._lasting = {key: bytes.fromhex(value) for key, value in json.loads(lasting.read_text()).items()}
        if checkpoint is not None and checkpoint[0].run == hello.run:
            client.restore({**checkpoint[1][f"silo-{self.name}"], **self._lasting})
            log.info("continues its run; it takes part from the next set-up on, in which all get new keys")
        elif lasting.exists():
            raise ParameterError(
                f"has no state of this run at round {hello.round} or before, only later ones; resume with a younger "
                "checkpoint of the server, or begin another run"
            )
        else:
            if hello.round:
                log.warning("has no state of round %d or before; it begins again as a new silo", hello.round)
            self.keep(client, hello.round)


def _is_of_rows(error: BaseException) -> bool:
    """Return whether an error may depend on rows, and not on a missing file or a lack of memory."""
    if isinstance(error, MorettaError) and not isinstance(error, RowsError):
        return False
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError | MemoryError):
        cause = cause.__cause__ or cause.__context__
    return cause is None


def log_to(path: Path) -> None:
    """Send Moretta's log of this process to a file, a line each, which only its owner reads: it may quote cells."""
    path.touch(mode=0o600)
    path.chmod(0o600)  # a log of an earlier version
    handler = logging.FileHandler(path, encoding="utf-8", errors="replace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def pack_released(inputs: Mapping[str, object], tensors: Tensors) -> bytes:
    """Return a released model and the meaning of its inputs in the form of `Site.end`."""
    text = json.dumps(inputs).encode()
    arrays = {name: np.ascontiguousarray(value).reshape(value.shape) for name, value in tensors.items()}
    return len(text).to_bytes(4, "little") + text + save(arrays)


def unpack_released(data: bytes) -> tuple[Mapping[str, object], Tensors]:
    """Undo `pack_released`. Raises `moretta.errors.CodecError` for other bytes."""
    end = 4 + int.from_bytes(data[:4], "little")
    try:
        inputs, tensors = json.loads(data[4:end]), load_tensors(data[end:])
    except (ValueError, RecursionError, SafetensorError) as error:
        raise CodecError(f"expected a released model; {error}") from None
    if not isinstance(inputs, dict):
        raise CodecError("expected a released model with the meaning of its inputs")
    return inputs, tensors
