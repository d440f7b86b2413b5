"""What FLARE's own policy stops, and what ours does: other administrators, changed jobs, other sites, over processes.

    who                     what                                            stopped by
    another administrator   code in a job                                   FLARE at the site: the right `byoc`
                            a class of somebody's, with arguments           FLARE at the site: class_allow_list
                            Moretta's own classes, with other settings      Moretta: the server's key signs each job
                            any job, where a site lets them submit none     FLARE at the site, by what the server says
    the server's machine    a signed job that is changed                    FLARE at the site: signatures
    another site            a shell, what a machine is like, its logs       Moretta: `launcher.TOPICS`
                            a job of its own, rightly signed                Moretta: nothing is made before a hello

`docs/deploy.md` has the whole table. A slow peer, and a job that was changed and signed again: test_fault_scenarios.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

from cryptography.hazmat.primitives.serialization import load_pem_private_key
from hospitals import Hospitals, asked, connected, wait_for
from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
from nvflare.lighter.utils import Identity as Party
from nvflare.lighter.utils import generate_cert, serialize_cert, serialize_pri_key, sign_folders
from test_site_keys import OwnKeys

from moretta.deployment import (
    certificate_requests,
    checks,
    job,
    kits,
    processes,
    provisioning,
    server_connection,
    shared_settings,
)
from moretta.deployment.provisioning import CONTROLLER, EXECUTOR
from moretta.engines.flare.envelope import digest_of
from moretta.secure_aggregation.identity import Identity

pytestmark = pytest.mark.slow

LEAD = "lead@elsewhere.org"
MARKS = '''"""Code that nobody at the site has agreed to run."""

from pathlib import Path

Path({mark!r}).touch()


def mark(*given, **named):
    return 0.0
'''


class Shared(OwnKeys):
    """A FLARE that is there already, with an administrator of another organisation, who may submit jobs.

    North and west have kits of ours. South has FLARE's own policy, by which that administrator may bring code as well.
    """

    def begin(self) -> None:
        kit = self.server / "run-kits"
        provisioning.provision_authority(kit, "localhost", self.port)
        self.made, self.flare = self.serve_flare()
        self.lead = self._administrator(LEAD, "elsewhere", "lead")
        self.marks = self.folder / "marks"
        self.marks.mkdir()

    def _administrator(self, name: str, organisation: str, role: str) -> Path:
        """Give somebody an administrator's kit, as whoever has the root's key does."""
        authority, kit = self.made.server.parent / provisioning.AUTHORITY, self.folder / name
        shutil.copytree(self.made.admin, kit)
        root, key = (
            load_pem_private_key((authority / provisioning.ROOT_KEY).read_bytes(), None),
            certificate_requests.new_key(),
        )
        certificate = generate_cert(
            Party(name, organisation, role), Party(provisioning.PROJECT), root, key.public_key()
        )
        files = kits.certificates_of(kit)
        files.certificate.write_bytes(serialize_cert(certificate))
        files.key.write_bytes(serialize_pri_key(key))
        startup = kit / "startup" / "fed_admin.json"
        startup.write_text(startup.read_text().replace(kits.name_of(kit), name))
        return kit

    def mark(self, name: str) -> Path:
        """A file that exists once somebody's code has run."""
        return self.marks / name

    def submit(self, admin: Path, folder: Path) -> str:
        with suppress(FileNotFoundError):
            shutil.rmtree(admin / "transfer")
        (admin / "transfer").mkdir()
        return asked(admin, "submit", folder)

    def outcome(self, number: str) -> Mapping[str, Any]:
        """Wait for a job's end, and return what FLARE says of it."""
        with server_connection.logged_in(self.made.admin) as administrator:

            def ended() -> bool:
                with administrator.asked() as session:
                    return str(session.get_job_status(number)).startswith("FINISHED")

            wait_for(ended, f"FLARE ends {number}", lambda: self.said("server"))
            with administrator.asked() as session:
                return dict(session.get_job_meta(number))

    def details(self, number: str) -> str:
        return "\n".join(self.outcome(number).get("job_deploy_detail", []))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    made = Shared(tmp_path_factory.mktemp("shared") / "h", protocol="fedsgd", rounds=3)
    try:
        made.begin()
        for name in made.sites:
            made.certify(name)
        for file in ("resources.json", "authorization.json"):
            (made.kit("south") / "local" / file).unlink()
        made.join("north")
        made.join("south")
        wait_for(lambda: len(connected(made.made.admin)) == 2, "north and south are there", made.said)
        yield made
        processes.stop(made.flare)
    finally:
        made.end()


def write_job(
    folder: Path,
    sites: Sequence[str],
    executor: Mapping[str, Any],
    workflow: Mapping[str, Any],
    *,
    least: int = 1,
    custom: str = "",
    meta: Mapping[str, Any] = {},
) -> Path:
    """Write a job as anybody can. custom: code that it brings to the sites."""
    job._write(
        folder / "meta.json",
        {
            "name": folder.name, "resource_spec": {}, "min_clients": least,
            "deploy_map": {"of-server": ["server"], "of-site": list(sites)}, **meta,
        },
    )  # fmt: skip
    whole = {"format_version": 2, "task_data_filters": [], "task_result_filters": [], "components": []}
    job._write(folder / "of-server/config/config_fed_server.json", {**whole, "workflows": [{"id": "w", **workflow}]})
    executors = [{"tasks": ["none"], "executor": {"id": "e", **executor}}]
    job._write(folder / "of-site/config/config_fed_client.json", {**whole, "executors": executors})
    if custom:
        (folder / "of-site/custom").mkdir()
        (folder / "of-site/custom/brought.py").write_text(custom)
    return folder


WAITS = {"path": "nvflare.app_common.workflows.statistics_controller.StatisticsController", "args": {}}


def of_moretta(shared: Shared, told: str, key: Identity) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both halves of a job of ours, signed by a key."""
    job.write_job(shared.run_file(), shared.folder / "ours", key)
    halves = [json.loads((shared.folder / "ours" / name).read_text()) for name in (job.OF_SERVER, job.OF_SITE)]
    site = {"told": told, "digest": digest_of(told), "made": 2.0**40}
    return {"path": CONTROLLER, "args": halves[0]["workflows"][0]["args"]}, {"path": EXECUTOR, "args": site}


def test_code_that_a_job_brings(shared: Shared, tmp_path: Path) -> None:
    code = MARKS.format(mark=str(shared.mark("brought")))
    brought = {"path": "brought.mark", "args": {}}
    folder = write_job(tmp_path / "brings", ["north"], brought, WAITS, custom=code)
    assert "north: NVFLARE_ERROR: BYOC not permitted" in shared.details(shared.submit(shared.made.admin, folder))
    assert not shared.mark("brought").exists()


def test_known_limit_flares_own_policy_lets_a_lead_bring_code(shared: Shared, tmp_path: Path) -> None:
    """Which `moretta doctor` says of such a kit."""
    assert "may bring code" in str(checks.policy(shared.kit("south")))
    assert "may bring code" not in str(checks.policy(shared.kit("north")))
    code = MARKS.format(mark=str(shared.mark("lead")))
    brought = {"path": "brought.mark", "args": {}}
    shared.outcome(shared.submit(shared.lead, write_job(tmp_path / "lead", ["south"], brought, WAITS, custom=code)))
    assert shared.mark("lead").exists()


@pytest.mark.parametrize("path", ["os.makedirs", "moretta.engines.files.make_folder", f"{EXECUTOR}.handle_event"])
def test_a_callable_that_a_job_names(shared: Shared, tmp_path: Path, path: str) -> None:
    given = {"name": str(shared.mark("named"))} if path.startswith("os.") else {"path": str(shared.mark("named"))}
    meta = {"byoc": True, "launcher_spec": {"south": {"process": {"python_path": "/bin/false"}}}}
    folder = write_job(tmp_path / "names", ["south"], {"path": path, "args": given}, WAITS, meta=meta)
    shared.outcome(shared.submit(shared.lead, folder))
    assert not shared.mark("named").exists()
    log = (shared.site("south") / "moretta" / "flare.log").read_text()
    assert f"Component '{path}' at config path" in log or f"Can't load class {path}" in log


def test_settings_of_another_administrator(shared: Shared, tmp_path: Path) -> None:
    """South's policy lets him submit; on 516867f the settings' code ran before anybody had signed them."""
    place = shared.site("south")
    (place / "canary.py").write_text(MARKS.format(mark=str(shared.mark("settings"))))
    text = shared_settings.shared_text(shared.run_file())
    told = text.replace("[run]\n", '[run]\nmetrics = ["canary:mark"]\n')
    assert told != text
    workflow, executor = of_moretta(shared, told, Identity.fresh())
    workflow["args"] |= {"status": str(shared.mark("status"))}
    shared.outcome(shared.submit(shared.lead, write_job(tmp_path / "settings", ["south"], executor, workflow)))
    assert "the job is not signed by this server's key" in (shared.folder / "server.out").read_text()
    assert not shared.mark("settings").exists()
    assert not shared.mark("status").exists()
    # It had no turn in the site's folder, and pinned no settings there.
    assert not any((place / "moretta" / name).exists() for name in ("job.json", "agreed.json"))


def test_a_site_that_lets_only_its_server_submit(shared: Shared, tmp_path: Path) -> None:
    folder = write_job(tmp_path / "none", ["north"], {"path": EXECUTOR, "args": {}}, WAITS)
    assert "north: OK" in shared.details(shared.submit(shared.made.admin, folder))
    said = shared.details(shared.submit(shared.lead, folder))
    assert f"north: user '{LEAD}' is not authorized for 'submit_job'" in said


def test_a_signed_job_that_is_changed(shared: Shared, tmp_path: Path) -> None:
    """It waits at the server for a second site, and is changed there, in what only sites are sent."""
    folder = write_job(
        tmp_path / "changed", ["north", "west"], {"path": EXECUTOR, "args": {"told": "x"}}, WAITS, least=2
    )
    number = shared.submit(shared.made.admin, folder)
    stored = shared.made.server / "jobs-storage" / number / "data"
    with zipfile.ZipFile(stored) as whole:
        files = {name: whole.read(name) for name in whole.namelist()}
    name = next(name for name in files if name.endswith("of-site/config/config_fed_client.json"))
    files[name] = files[name].replace(b'"x"', b'"y"')
    with zipfile.ZipFile(stored, "w") as whole:
        for each, data in files.items():
            whole.writestr(each, data)
    shared.join("west")
    details = shared.details(number)
    for site in ("north", "west"):
        assert f"{site}: app of-site does not pass signature verification" in details


PLAYS_ANOTHER_SERVER = """
import os

if "MORETTA_PLAYS" in os.environ:
    import json
    import threading

    from moretta.deployment.executor import Executor

    handle = Executor.handle_event

    def begun(self, event, context):
        handle(self, event, context)
        if event == "_start_run":
            threading.Thread(target=play, args=(context.get_engine().get_cell(),), daemon=True).start()

    def play(cell):
        from nvflare.fuel.f3.cellnet.utils import new_cell_message
        from nvflare.private.admin_defs import Message
        from nvflare.private.defs import CellChannel

        with open(os.environ["MORETTA_PLAYS"] + ".told", "a") as sink:
            token = None
            for topic, body, headers in json.loads(open(os.environ["MORETTA_PLAYS"]).read()):
                request = Message(topic, bytes.fromhex(body[4:]) if str(body).startswith("hex:") else body)
                request.headers.update(headers | ({"_resource_reserve_token": token} if token else {}))
                given = {"channel": CellChannel.CLIENT_MAIN, "topic": topic, "target": "north", "timeout": 20.0}
                reply = cell.send_request(request=new_cell_message({}, request), **given)
                said = reply.payload
                token = getattr(said.body, "get_header", lambda *_: None)("_resource_reserve_token") or token
                sink.write(json.dumps([topic, str(said.body)]) + "\\n")
            sink.write("[]\\n")

    Executor.handle_event = begun
"""


def test_another_site_asks_a_site_s_client_of_flare(tmp_path: Path) -> None:
    """FLARE's server relays it, whoever it is from: south read north's files, and started jobs with code there."""
    hospital = Hospitals(
        tmp_path / "h", protocol="fedsgd", sites=("north", "south"), rounds=60, secure='scheme = "none"'
    )
    try:
        (tmp_path / "sitecustomize.py").write_text(PLAYS_ANOTHER_SERVER)
        path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
        asked, mark, place = tmp_path / "asked", tmp_path / "mark", hospital.site("north")
        (place / "canary.py").write_text(MARKS.format(mark=str(mark)))
        hospital.pace("north", 0.3)
        hospital.serve()
        asked.write_text(json.dumps([*_curious(place), *_starting_a_job(hospital, tmp_path)]))
        hospital.join("north")
        hospital.join("south", {"MORETTA_PLAYS": str(asked), "PYTHONPATH": path})
        told = asked.with_name("asked.told")
        wait_for(lambda: told.exists() and told.read_text().endswith("[]\n"), "the attacks", hospital.said)
        assert hospital.ends() == 0, hospital.said()
        answers = [json.loads(each) for each in told.read_text().splitlines()]
        curious, (deployed, _, started) = answers[:6], answers[6:9]
        assert [each[1] for each in curious] == ["invalid_request"] * 6
        assert deployed[1] == "deployed of-site to north", deployed  # signed by a certificate of the federation
        assert started[1] == "Start the client app...", started
        assert not mark.exists()
        assert not any(line["dropped"] for line in hospital.history())
    finally:
        hospital.end()


def _curious(place: Path) -> list[tuple[str, str, dict[str, str]]]:
    shell = [f"cat {place / 'silo.toml'}", f"ls -a {place}", f"grep -n name {place / 'silo.toml'}"]
    rest = [("sys.report_env", ""), ("sys.info", ""), ("train.configure_job_log", "DEBUG")]
    asked: list[tuple[str, str, dict[str, str]]] = [("sys.shell", words, {}) for words in shell]
    return asked + [(topic, body, {}) for topic, body in rest]


def _starting_a_job(hospital: Hospitals, folder: Path) -> list[tuple[str, object, dict[str, object]]]:
    """What a site that has its own key and certificate asks for to start a job of ours elsewhere."""
    told = shared_settings.shared_text(hospital.run_file()).replace("[run]\n", '[run]\nmetrics = ["canary:mark"]\n')
    site = {"told": told, "digest": digest_of(told), "made": 2.0**40}
    app = write_job(folder / "theirs", ["north"], {"path": EXECUTOR, "args": site}, WAITS) / "of-site"
    files = kits.certificates_of(hospital.kit("south"))
    sign_folders(str(app), load_pem_private_key(files.key.read_bytes(), None), str(files.certificate))
    meta = {
        "job_id": "of-south",
        "resource_spec": {},
        "submitter_name": provisioning.ADMIN,
        "submitter_role": "project_admin",
    }
    about: dict[str, object] = {"job_id": "of-south", "job_meta": meta, "app_name": "of-site"}
    data = "hex:" + zip_directory_to_bytes(str(app), "").hex()
    return [("train.deploy", data, about), ("scheduler.check_resource", {}, about), ("train.start_job", {}, about)]
