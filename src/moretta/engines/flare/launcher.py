"""The launcher of a site's job process, which restarts a dead one, so that a crash costs the site only a few rounds.

FLARE's own launcher reports a dead job process, and the server then ends the job for all sites. This one starts the
process again, in the same job and with the same arguments; the new process announces itself by answering. If the site's
FLARE client itself was ended, the next client starts its job again, because FLARE's server does not assign a running
job to a late client. If that job has ended meanwhile, the server ends it here too.

It also closes an access that FLARE leaves open. A site's FLARE client checks the site's policy only if the request asks
for it, and accepts requests from the server and, by its relay, from every other site. One of them runs `cat` on any
file.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, FLMetaKey, JobConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec, JobReturnCode
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.private.defs import TrainingTopic
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.utils.job_launcher_utils import add_custom_dir_to_path, get_credential_env

from moretta.engines.flare.cells import guard

PAUSES = tuple(min(0.2 * 1.5**n, 30.0) for n in range(20))  # seconds before each new start: 20 of them, 5 min in all
BEGUN = "begun.moretta"  # in a job's folder, from the job's start at this site to its end
HOPELESS = (JobReturnCode.CONFIG_ERROR, JobReturnCode.UNSAFE_COMPONENT)  # a new process would end the same way
TOPICS = {  # requests that begin, follow and end jobs and the client; a site's FLARE client answers no others
    TrainingTopic.CHECK_RESOURCE,
    TrainingTopic.CANCEL_RESOURCE,
    TrainingTopic.DEPLOY,
    TrainingTopic.START_JOB,
    TrainingTopic.NOTIFY_JOB_STATUS,
    TrainingTopic.CHECK_STATUS,
    TrainingTopic.ABORT,
    TrainingTopic.ABORT_TASK,
    TrainingTopic.DELETE_RUN,
    TrainingTopic.RESTART,
    TrainingTopic.SHUTDOWN,
}


class Respawned(JobHandleSpec):
    """A job process, and its successors.

    Args:
        start: Starts a process.
        forget: Removes a dead one's files, which would be read as the job's outcome.
        ended: Called when the job has ended here.
        pauses: Seconds to wait before each new start; after the last the site stays away, and the job continues without
            it.
    """

    def __init__(
        self,
        start: Callable[[], subprocess.Popen[bytes]],
        forget: Callable[[], None],
        pauses: Sequence[float] = PAUSES,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.starts = 1
        self._start, self._forget, self._pauses, self._over = start, forget, pauses, ended
        self._ended = threading.Event()
        self._lock = threading.Lock()  # held while a process starts or is killed: none starts after the last kill
        self._process = start()

    def wait(self) -> None:
        """Return when the job has ended here: its process regularly, by `terminate`, or too often."""
        for pause in (*self._pauses, None):
            code = self._process.wait()
            if code == 0 or self._ended.is_set():
                break
            self._forget()
            if pause is None or code in HOPELESS or self._ended.wait(pause):
                break
            with self._lock:
                if self._ended.is_set():
                    break
                self._process = self._start()
                self.starts += 1
        if self._process.returncode != 0:
            self._forget()
        self._over()

    def poll(self) -> int:
        """Return the outcome; any but a regular end is "unknown", because FLARE fails a job for all others."""
        return int(JobReturnCode.SUCCESS if self._process.poll() == 0 else JobReturnCode.UNKNOWN)

    def terminate(self) -> None:
        """Kill the process and its children; no other starts."""
        self._ended.set()
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)


class Launcher(ClientProcessJobLauncher):
    """FLARE's process launcher of a site, which restarts dead job processes.

    FLARE makes a kit's components before its client answers requests, so making one restricts the client to `TOPICS`.
    """

    def __init__(self) -> None:
        super().__init__()
        processors = ClientRequestProcessors.request_processors
        processors[:] = [each for each in processors if TOPICS.issuperset(each.get_topics())]

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Offer itself for jobs; when the client starts, restart jobs of its predecessor."""
        super().handle_event(event_type, fl_ctx)
        if event_type != EventType.SYSTEM_START:
            return
        guard(fl_ctx.get_engine().get_cell())
        workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
        for begun in Path(workspace.get_root_dir()).glob(f"*/{BEGUN}"):
            job = begun.parent.name
            answer = fl_ctx.get_engine().start_app(
                job, job_meta=json.loads(Path(workspace.get_job_meta_path(job)).read_text())
            )
            self.logger.info(f"run ({job}): resumed: {answer}")

    def launch_job(self, job_meta: dict[str, object], fl_ctx: FLContext) -> Respawned:
        """Start a site's process of a job."""
        workspace, job = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT), job_meta.get(JobConstants.JOB_ID)
        environment = os.environ.copy()
        add_custom_dir_to_path(workspace.get_app_custom_dir(job), environment)
        environment.update(get_credential_env(fl_ctx.get_prop(FLContextKey.JOB_PROCESS_ARGS) or {}))
        words = shlex.split(self.get_command(job_meta, fl_ctx), True)
        folder = Path(workspace.get_run_dir(job))
        outcome, begun = folder / FLMetaKey.PROCESS_RC_FILE, folder / BEGUN
        begun.touch()

        def start() -> subprocess.Popen[bytes]:
            process = subprocess.Popen(words, env=environment, start_new_session=True)
            self.logger.info(f"run ({job}): started process {process.pid}")
            return process

        return Respawned(start, lambda: outcome.unlink(missing_ok=True), ended=lambda: begun.unlink(missing_ok=True))
