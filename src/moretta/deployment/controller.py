"""The server's job in FLARE: it runs the rounds, and sends the server's messages to the sites' jobs."""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller as FlareController
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.fqcn import FQCN

from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.contract.codec import Codec
from moretta.data.references import OWN_CODE
from moretta.deployment import job, kits, shared_settings
from moretta.deployment.site import pack_released
from moretta.engines.checkpoint import CheckpointId
from moretta.engines.files import write_atomically
from moretta.engines.flare.cells import sender
from moretta.engines.flare.delivery import Sites
from moretta.engines.flare.envelope import Hello
from moretta.engines.run_folder import read_inputs, read_model
from moretta.engines.views import Recorder
from moretta.errors import MorettaError, ParameterError, RunFailed
from moretta.protocols.common import modules
from moretta.run import record
from moretta.run.federation import Federation
from moretta.run.result import Result
from moretta.secure_aggregation.identity import Roster

log = logging.getLogger("moretta")

SPEAK = 10.0  # seconds


class Controller(FlareController):
    """Carries out a run as the server.

    FLARE makes it with any arguments of a job, so the constructor does nothing: `moretta.deployment.job.check_signed`
    runs before a path is touched or a text is read. Its signing key is not an argument: it is beside the server's kit,
    or where the kit names it.

    Args:
        run: The run file as TOML, all of it.
        base: The folder beside which its paths resolve.
        digest: Of the shared settings.
        out: The run folder; empty for one in the job's own workspace.
        resume: Whether to continue from its last checkpoint.
        wait: Seconds to wait for sites.
        status: The file for the run's end; empty for none.
        made: The time at which the job was made, so that no two jobs have the same signature.
        signature: Of all these, by the server's key, in hex.
    """

    def __init__(
        self,
        run: str,
        base: str,
        digest: str,
        out: str = "",
        resume: bool = False,
        wait: float = 120.0,
        status: str = "",
        made: float = 0.0,
        signature: str = "",
    ) -> None:
        super().__init__()
        self._run, self._base, self._digest, self._out, self._resume, self._wait = run, base, digest, out, resume, wait
        self._signed = job.signed_part(
            run=run, base=base, digest=digest, out=out, resume=resume, wait=wait, status=status, made=made
        )
        self._named_status, self._signature = status, signature
        self._status: Path | None = None  # until the signature is checked

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing yet."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing more."""

    def process_result_of_unknown_task(self, *arguments: Any, **named: Any) -> None:
        """Ignore it: there are no tasks."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Carry out the run; each error ends the job with one sentence."""

        def aborted() -> None:
            if abort_signal.triggered:
                raise RunFailed("the job was aborted")

        try:
            self._play(fl_ctx, aborted)
        except ParameterError as error:
            self._fail(str(error), 2, fl_ctx)
        except MorettaError as error:
            self._fail(str(error), 1, fl_ctx)
        except Exception as error:  # FLARE would report no reason
            log.exception("the run failed")
            self._fail(f"{type(error).__name__}: {error}", 1, fl_ctx)

    def _play(self, fl_ctx: FLContext, aborted: Callable[[], None]) -> None:
        workspace = fl_ctx.get_engine().get_workspace()
        local = Path(workspace.get_site_config_dir())
        identity = kits.identity_of(local)
        job.check_signed(self._signed, self._signature, identity, local)
        self._status = Path(self._named_status) if self._named_status else None
        run_file = run_files.loads(self._run, Path(self._base, "run.toml"), OWN_CODE)
        out = Path(self._out or Path(workspace.get_run_dir(fl_ctx.get_job_id())) / "moretta")
        federation = shared_settings.server_side(run_file, out)
        path = run_file.secure_aggregation.roster
        roster = None if path is None else Roster.load(run_file.resolve(path))
        kits.check_listed(identity, roster)
        called = {silo: silo if roster is None else roster.engine_name(silo) for silo in run_file.engine.sites}
        # The sites connected when the job begins; others never arrive.
        there = {client.name: client.get_fqcn() for client in fl_ctx.get_engine().get_clients()}
        targets = {
            silo: FQCN.join([there[name], fl_ctx.get_job_id()]) for silo, name in called.items() if name in there
        }
        send = sender(fl_ctx.get_engine().get_cell(), targets)
        made, ended = list[Sites](), threading.Event()

        def transport(codec: Codec, place: CheckpointId, recorder: Recorder | None) -> Sites:
            sites = Sites(
                run_file.engine.sites,
                send,
                codec,
                _hello(federation, run_file, self._digest, place),
                identity,
                keys=None if roster is None else roster.keys,
                recorder=recorder,
                deadline=run_file.engine.deadline,
                largest=run_file.engine.message_mib << 20,
                absent=[silo for silo in called if silo not in targets],
                aborted=aborted,
                waiting=lambda sentence: self._tell({"state": "waiting", "sentence": sentence}),
            )

            def keep_in_touch() -> None:  # so that an idle site does not consider its server gone
                while not ended.wait(SPEAK):
                    sites.speak()

            threading.Thread(target=keep_in_touch, daemon=True).start()
            sites.gather(federation.summing.least, self._wait)
            job.play_once(self._signature, local)  # until here the same job may be submitted again
            self._tell({"state": "playing", "after": place.round})
            made.append(sites)
            return sites

        try:
            result = federation.train(
                run_file.run.rounds, run_file.run.seed, resume=self._resume, progress=False, transport=transport
            )
            made[0].end(_released(result, out))
        finally:
            ended.set()
        self._tell({"state": "done", "out": str(out)})

    def _fail(self, sentence: str, code: int, fl_ctx: FLContext) -> None:
        self._tell({"state": "failed", "sentence": sentence, "code": code})
        self.system_panic(sentence, fl_ctx)

    def _tell(self, state: Mapping[str, object]) -> None:
        if self._status is not None:
            write_atomically(self._status, json.dumps({"at": time.time(), **state}).encode())


def _hello(federation: Federation, run_file: RunFile, digest: str, place: CheckpointId) -> Hello:
    return Hello(
        run=place.run,
        round=place.round,
        session=place.session,
        job=digest,
        model=shared_settings.model_digest(federation, run_file),
        versions=record.versions(),
        torch=run_file.engine.torch_versions,
        tensors=modules.schema(federation.model),
        outputs=federation.outputs,
    )


def _released(result: Result, out: Path) -> bytes:
    """Return a finished run's release for sites; empty without one."""
    if result.released is None:
        return b""
    inputs = {name: value for name, value in read_inputs(out).items() if name != "format"}
    return pack_released(inputs, read_model(out, "released.safetensors"))
