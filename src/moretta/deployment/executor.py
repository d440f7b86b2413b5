"""A site's job in FLARE: a worker that answers the server, with the silo's role behind it."""

import json
import logging
import os
import threading
import time
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor as FlareExecutor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from moretta.config import silo_file
from moretta.config.silo_file import SiloFile
from moretta.deployment.kits import SILO, trust_of
from moretta.deployment.site import Site, log_to
from moretta.deployment.site_policy import check_job
from moretta.engines.flare.cells import receive
from moretta.engines.flare.site_worker import SiteWorker
from moretta.engines.folder_lock import take_turn
from moretta.engines.usage import cap
from moretta.errors import ParameterError

log = logging.getLogger("moretta")

SILENCE = 600.0  # seconds without a message from the server after which a job ends
LOOK, HEARD = 5.0, 15.0  # seconds; its server speaks to a site at least every ten


class Executor(FlareExecutor):
    """Runs a silo's role.

    Args:
        told: The shared settings, as TOML.
        digest: Their digest.
        made: The time at which the job was made, in seconds since 1970.
    """

    def __init__(self, told: str, digest: str, made: float) -> None:
        super().__init__()
        self._text, self._digest, self._made = told, digest, made
        self._worker: SiteWorker | None = None
        self._holder: Path | None = None  # in the site's folder, which this process locks

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Make the worker when the job starts, and close it when it ends."""
        if event_type == EventType.START_RUN:
            name = fl_ctx.get_identity_name()
            folder = Path(fl_ctx.get_engine().get_workspace().get_site_config_dir())
            self._worker = SiteWorker(lambda: self._site(folder, name), lambda: trust_of(file_of(folder), folder))
            receive(fl_ctx.get_engine().get_cell(), self._worker.answer)
            threading.Thread(target=self._look_after, args=(self._worker,), daemon=True).start()
        elif event_type == EventType.END_RUN and self._worker is not None:
            self._worker.close()

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Refuse: there are no tasks."""
        return make_reply(ReturnCode.TASK_UNKNOWN)

    def _look_after(self, worker: SiteWorker) -> None:
        """Mark the locked folder while the server speaks; end this process once it has been silent for long."""
        while not worker.ended.is_set():
            time.sleep(LOOK)
            silent = time.monotonic() - worker.last_heard
            if self._holder is not None and silent < HEARD:
                self._holder.touch()
            if silent > SILENCE:
                log.warning("the server has sent nothing for %g s; this job ends", SILENCE)
                os._exit(0)  # FLARE's own threads would keep the process; all state is on disk, whole

    def _site(self, folder: Path, name: str) -> Site:
        check_job(self._text, self._digest)
        file = file_of(folder)
        if self._holder is None:
            self._holder = take_turn(file.out, self._digest, self._made)
            log_to(file.out / "log.txt")
            if file.limits.memory_limit_mib is not None and not file.silo.edge:  # an edge client's process has its own
                cap(file.limits.memory_limit_mib)
        return Site(file, self._text, name)


def file_of(folder: Path) -> SiloFile:
    """Return the silo.toml of a kit's local folder, changed by `moretta join`. Raises ParameterError without one."""
    try:
        content = json.loads((folder / SILO).read_text())
        path = Path(content["silo"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ParameterError(
            f"{folder / SILO} does not name this site's silo.toml; run: moretta kit patch KIT --silo silo.toml"
        ) from None
    file = silo_file.load(path)
    changed = {"edge": True} if content.get("edge") else {}
    limit = content.get("memory-limit-mib")
    limits = {} if limit is None else {"memory_limit_mib": float(limit)}
    return file.model_copy(
        update={
            "silo": file.silo.model_copy(update=changed),
            "limits": file.limits.model_copy(update=limits),
        }
    )
