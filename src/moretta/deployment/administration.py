"""What an administrator asks the server of a kit: to take a job, to say where it is, to end it, to end everybody."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moretta.deployment import kits
from moretta.deployment.server_connection import LOGIN, reach
from moretta.errors import MorettaError, ParameterError, RunFailed

COMMAND = 15.0  # seconds in which the server is to answer a command; stopping sites takes the longest


def submit(admin_kit: Path, job: Path, wait: float = LOGIN) -> str:
    """Hand a folder that holds a job to the server; returns the job's id. wait: seconds in which the server answers."""
    with logged_in(admin_kit, wait) as administrator:
        return administrator.submit(job)


def status(admin_kit: Path, job: str, wait: float = LOGIN) -> str:
    """Return a job's state as FLARE names it: SUBMITTED, DISPATCHED, RUNNING, or one that begins with FINISHED."""
    with logged_in(admin_kit, wait) as administrator, administrator.asked() as session:
        return str(session.get_job_status(job))


def abort(admin_kit: Path, job: str, wait: float = LOGIN) -> None:
    """End a job at the server and all sites; one that has ended stays as it is."""
    with logged_in(admin_kit, wait) as administrator, administrator.asked() as session:
        session.abort_job(job)


def connected(admin_kit: Path, wait: float = LOGIN) -> list[str]:
    """Return the names of the sites that the server has heard of within its heartbeat timeout."""
    with logged_in(admin_kit, wait) as administrator:
        return administrator.connected()


def shut_down(admin_kit: Path, wait: float = LOGIN) -> None:
    """End all sites and the server; what `start` gave ends by itself soon after."""
    with logged_in(admin_kit, wait) as administrator, administrator.asked() as session:
        session.shutdown("all", wait=False)


@contextlib.contextmanager
def logged_in(admin_kit: Path, wait: float = LOGIN) -> Iterator[Administrator]:
    """Log in once for several requests: a login takes FLARE more than a second of waiting.

    wait: seconds in which the server answers. Raises as `submit`.
    """
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    reach(admin_kit, wait)
    with _plain(admin_kit):
        session = new_secure_session(kits.name_of(admin_kit), str(admin_kit.resolve()), timeout=wait)
        session.set_timeout(COMMAND)
    try:
        yield Administrator(admin_kit, session)
    finally:
        with contextlib.suppress(Exception), _plain(admin_kit):  # a server that has just ended cannot be told of it
            session.close()


class Administrator:
    """One login at the server of a kit."""

    def __init__(self, admin_kit: Path, session: Any) -> None:
        self._kit, self._session = admin_kit, session

    def submit(self, job: Path) -> str:
        """Hand a folder that holds a job to the server; returns the job's id."""
        with self.asked() as session:
            return str(session.submit_job(str(job.resolve())))

    def connected(self) -> list[str]:
        """Return the names of the sites that the server has heard of within its heartbeat timeout."""
        with self.asked() as session:
            return sorted(client.name for client in session.get_connected_client_list())

    @contextlib.contextmanager
    def asked(self) -> Iterator[Any]:
        """Give FLARE's session for a request. Raises one sentence of ours, whatever FLARE does."""
        with _plain(self._kit):
            yield self._session


@contextlib.contextmanager
def _plain(admin_kit: Path) -> Iterator[None]:
    """Turn what FLARE raises into one sentence of ours. Nothing that FLARE prints is shown."""
    from nvflare.fuel.flare_api.api_spec import AuthenticationError, AuthorizationError, NoConnection

    host, port = kits.address_of(admin_kit)
    noise = io.StringIO()
    with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
        try:
            yield
        except (AuthenticationError, AuthorizationError) as error:
            raise ParameterError(
                f"the server at {host}:{port} does not let {kits.name_of(admin_kit)} do that: "
                "use an administrator's kit of this federation"
            ) from error
        except (NoConnection, ConnectionError, TimeoutError) as error:
            raise RunFailed(
                f"no server of this federation answers at {host}:{port}: start it, then do this again"
            ) from error
        except MorettaError:
            raise
        except Exception as error:  # FLARE raises classes of many kinds, and its own bare ones
            raise RunFailed(f"the server at {host}:{port} did not do what it was asked: {error}") from error
