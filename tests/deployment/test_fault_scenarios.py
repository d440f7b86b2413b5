"""What goes wrong in hospitals, done to real ones: FLARE over mutual TLS, processes of their own, three sites or four.

    what happens                                        what is expected in the end
    nothing                                             the bytes of the same run in one process, message by message
    a site's job is killed, idle or at work             named for what it missed, back after a restart
    and in the middle of local epochs                   goes on from what it kept, to the bytes of one process
    a site's FLARE client is killed                     named, and the run ends without it
    and its `join` is begun again                       named, awaited where a round needs it, and back in the same run
    a site hangs, never ends, or sends broken bytes     named: disconnected, late, malformed; back when it is mended
    a site is killed after its upload                   its rows still count: the same bytes as in one process
    sites are killed at random moments                  the same bytes as in one process with the same sites missing
    the server's job, or all of the server, is killed   goes on from the checkpoint to the bytes of one process
    the network is cut, and healed                      named while it is cut, back after
    nothing, and then a second run                      joined by the sites as they are, without a command
    a site that does not fit, or does not come          one sentence with its name, and nobody's stack trace

Orders of events are asserted, and no seconds: those are the machine's. How long each took, up to the end of the first
round that shows it, is written into the JSON file that `MORETTA_FAULT_TIMES` names, if it does.
"""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("nvflare")

from hospitals import Hospitals, asked, connected, models_of, seen, state_of, wait_for

from moretta.contract.codec import Codec
from moretta.deployment import job, processes
from moretta.deployment.kits import identity_of
from moretta.engines import checkpoint
from moretta.engines.settings import Engine, Fault, Faults
from moretta.errors import CodecError
from moretta.secure_aggregation.identity import Identity, public_line
from moretta.secure_aggregation.pairwise import MaskedUpload
from moretta.secure_aggregation.schemes import MESSAGES

pytestmark = pytest.mark.slow

Measure = Callable[[str, float], None]


@pytest.fixture
def measure(record_property: Callable[[str, object], None]) -> Measure:
    """Record how many seconds something took."""

    def measured(what: str, seconds: float) -> None:
        record_property(what, round(seconds, 2))
        if place := os.environ.get("MORETTA_FAULT_TIMES"):
            path = Path(place)
            known = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps(known | {what: round(seconds, 2)}, indent=2) + "\n")

    return measured


@pytest.fixture
def hospitals(tmp_path: Path) -> Iterator[Callable[..., Hospitals]]:
    """Make hospitals; whatever they have started is ended."""
    made: list[Hospitals] = []

    def make(**settings: Any) -> Hospitals:
        made.append(Hospitals(tmp_path / f"hospitals-{len(made)}", **settings))
        return made[-1]

    yield make
    for each in made:
        each.end()


def check_ended(hospital: Hospitals, *without: str) -> None:
    """Everybody has ended well, but for some sites, and nothing is left running."""
    assert hospital.ends() == 0, hospital.said()
    for name in set(hospital.sites) - set(without):
        assert hospital.ends(name) == 0, hospital.said(name)
        assert not hospital.processes(name)
    assert not hospital.processes("server")
    assert [line["round"] for line in hospital.history()] == list(range(1, hospital.rounds + 1))
    check_plain(hospital)


def check_plain(hospital: Hospitals) -> None:
    """Nobody is shown a stack trace."""
    for who in ("server", *hospital.sites):
        assert "Traceback" not in hospital.said(who), hospital.said(who)


# -- nothing goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["pbpfl", "cgd", "baffle"])
def test_a_run_is_the_same_bytes_as_in_one_process(
    protocol: str, hospitals: Callable[..., Hospitals], tmp_path: Path
) -> None:
    hospital = hospitals(protocol=protocol, rounds=12)
    hospital.serve()
    hospital.join_all()
    check_ended(hospital)
    alone = hospital.in_process(tmp_path / "alone")
    assert seen(hospital.out) == seen(alone)
    expected = models_of(alone)
    # Of cgd the server has no model: one machine that plays all participants writes theirs, and what they moved by.
    assert models_of(hospital.out) == ({} if protocol == "cgd" else expected)
    for name in hospital.sites:
        kept = {Path(path).name: data for path, data in models_of(hospital.site(name) / "moretta").items()}
        if protocol == "cgd":
            assert kept == {"confined.safetensors": expected[f"participants/{name}/confined.safetensors"]}
        else:
            assert kept == {"released.safetensors": expected["released.safetensors"]}
    assert not any(line["dropped"] for line in hospital.history())
    logged = (hospital.server / "run-serve" / "server.log").read_text().partition("Try to schedule job")[0]
    assert logged.count("Created user session") == 1  # a login takes FLARE a second of waiting


def test_a_second_run_is_joined_without_a_command_at_the_sites(hospitals: Callable[..., Hospitals]) -> None:
    hospital = hospitals(protocol="fedsgd", rounds=3)
    for path in (hospital.server / "run.toml", *(hospital.site(name) / "silo.toml" for name in hospital.sites)):
        path.write_text(re.sub("insecure-secret-seed.*", "", path.read_text()))
    hospital.serve()
    joined = [hospital.join(name, once=False) for name in hospital.sites]
    assert hospital.ends() == 0, hospital.said()
    first, hospital.out = hospital.out, hospital.server / "second"
    hospital.serve("--kits", str(hospital.kit("north").parent))
    assert hospital.ends() == 0, hospital.said()
    assert [one.poll() for one in joined] == [None] * 3
    released = [models_of(out)["released.safetensors"] for out in (first, hospital.out)]
    assert released[0] != released[1]
    for name, process in zip(hospital.sites, joined, strict=True):
        said = partial(hospital.said, name)
        wait_for(lambda said=said: said().count("waiting for its next one, until ctrl-c") == 2, name, said)
        process.send_signal(signal.SIGINT)
        assert hospital.ends(name) == 0, hospital.said(name)
        last = hospital.said(name).strip().splitlines()[-1]
        assert re.match(r"took part in 2 runs; the last one left \S+/released\.safetensors$", last), last
        assert Path(last.rpartition(" ")[2]).read_bytes() == released[1]
        assert sorted(models_of(hospital.site(name) / "moretta").values()) == sorted(released)
    check_plain(hospital)


# -- one site has a bad day, and the run goes on -----------------------------------------------------------------------

TAMPERED = """from moretta.engines.flare import site_worker
import os
from pathlib import Path

answer = site_worker.SiteWorker.answer

def tampered(self, data, limit):
    reply = answer(self, data, limit)
    try:
        how = Path(os.environ["MORETTA_TAMPER"]).read_text()
    except (OSError, KeyError):
        return reply
    end = 4 + 64 + int.from_bytes(reply[:4], "little")  # behind the header's length, the signature and the header
    if how == "message":
        return reply[:end] + bytes(byte ^ 0x55 for byte in reply[end:])
    return bytes(byte ^ 0x55 for byte in reply)

site_worker.SiteWorker.answer = tampered
"""
FOUR = ("north", "south", "east", "west")  # whose masked sums open without one of them; those of three need all
IDLE = 0.1  # seconds of a forward pass at west, so that the others wait most of a round


@pytest.fixture(scope="module")
def bad_day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hospitals]:
    """Yield hospitals in the middle of a long run; north is the one to be harmed. It ends well, whatever was done."""
    folder = tmp_path_factory.mktemp("day")
    (folder / "sitecustomize.py").write_text(TAMPERED)
    hospital = Hospitals(folder / "hospitals", sites=FOUR, rounds=900, every=20, deadline=6.0)
    tampered = {"MORETTA_TAMPER": str(folder / "tamper")}
    tampered["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    try:
        hospital.pace("west", IDLE)
        hospital.serve()
        for name in hospital.sites:
            hospital.join(name, tampered if name == "north" else {})
        hospital.reach(3)
        yield hospital
        hospital.pace("west", 0)
        check_ended(hospital)
        missed = hospital.missed("north")
        assert missed
        assert hospital.rounds not in missed
        assert not any(hospital.missed(name) for name in FOUR[1:])
    finally:
        hospital.end()


def last_reason(hospital: Hospitals, name: str = "north") -> str:
    missed = hospital.missed(name)
    return missed[max(missed)].partition(":")[0]


def noticed_and_back(hospital: Hospitals, since: float, mend: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds until the server misses north, and from its mending until a round ends with it again.

    mend: called once it is missed; returns the moment from which its coming back counts.
    """
    missed = set(hospital.missed("north"))
    noticed = hospital.until_noticed("north", since)
    mended = mend()
    wait_for(lambda: set(hospital.missed("north")) != missed, "the round that missed north", hospital.said)
    return noticed, hospital.until_back("north", mended)


def test_a_site_whose_job_is_killed_while_idle(bad_day: Hospitals, measure: Measure) -> None:
    killed = bad_day.kill(bad_day.job("north"))
    noticed, back = noticed_and_back(bad_day, killed, lambda: killed)
    assert last_reason(bad_day) == "disconnected"
    measure("site job killed while idle: noticed", noticed)
    measure("site job killed while idle: back", back)


def test_a_site_whose_job_is_killed_at_work(bad_day: Hospitals, measure: Measure) -> None:
    def mend() -> float:
        bad_day.pace("north", 0)
        return killed

    bad_day.pace("north", 3.0)
    time.sleep(1.5)
    killed = bad_day.kill(bad_day.job("north"))
    noticed, back = noticed_and_back(bad_day, killed, mend)
    assert last_reason(bad_day) == "disconnected"
    measure("site job killed at work: noticed", noticed)
    measure("site job killed at work: back", back)


def test_a_site_whose_job_is_killed_at_half_an_epoch_loses_an_interval_at_most(
    hospitals: Callable[..., Hospitals], tmp_path: Path
) -> None:
    """West has 44 rows, so at a batch of 4 four epochs are 44 steps, of 0.5 s at least; they are kept every 6 s."""
    hospital = hospitals(protocol="fedavg", rounds=2, every=1)
    run, steps, half = hospital.server / "run.toml", 44, 22 + 11 // 2  # in the third epoch
    text = run.read_text().replace("batch-size = 16", "batch-size = 4")
    run.write_text(text.replace("local-epochs = 2", "local-epochs = 4"))
    hospital.pace("west", 0.5)
    hospital.serve()
    hospital.join_all()
    wait_for(lambda: hospital.passes("west", 4) >= half, "half an epoch", hospital.said)
    hospital.kill(job := hospital.job("west"))
    wait_for(lambda: not psutil.pid_exists(job), "west's job is gone")
    done = hospital.passes("west", 4)
    kept = int(checkpoint._unpack((hospital.site("west") / "moretta" / "helped.half-done").read_bytes())["steps"])
    assert 11 < kept <= done <= kept + 13  # twelve in an interval, and the one on its way
    hospital.pace("west", 0)
    check_ended(hospital)
    assert hospital.passes("west", 4) == done + (steps - kept) + steps
    assert models_of(hospital.out) == models_of(hospital.in_process(tmp_path / "alone"))
    rounds = [[one["silos"] for one in line["sums"] if one["of"] == "round"] for line in hospital.history()]
    assert rounds == [[list(hospital.sites)]] * 2  # of each one sum is opened


def test_a_site_whose_job_is_frozen(bad_day: Hospitals, measure: Measure) -> None:
    pid = bad_day.job("north")
    frozen = bad_day.kill(pid, signal.SIGSTOP)
    noticed, back = noticed_and_back(bad_day, frozen, lambda: bad_day.kill(pid, signal.SIGCONT))
    assert last_reason(bad_day) in ("disconnected", "late")
    measure("site job frozen: noticed", noticed)
    measure("site job thawed: back", back)


def test_a_site_whose_computation_never_ends(bad_day: Hospitals, measure: Measure) -> None:
    def mend() -> float:
        bad_day.pace("north", 0)
        return time.monotonic()

    bad_day.pace("north", 3600.0)
    late, back = noticed_and_back(bad_day, time.monotonic(), mend)
    assert last_reason(bad_day) == "late"
    measure("site never done: late", late)
    measure("site done after all: back", back)


@pytest.mark.parametrize(("how", "what"), [("message", "a broken message"), ("envelope", "no envelope")])
def test_a_site_that_sends_garbage(how: str, what: str, bad_day: Hospitals, measure: Measure) -> None:
    def mend() -> float:
        tamper.unlink()
        return time.monotonic()

    tamper = bad_day.folder.parent / "tamper"
    tamper.write_text(how)
    noticed, back = noticed_and_back(bad_day, time.monotonic(), mend)
    assert last_reason(bad_day) == "malformed"
    measure(f"site sends {what}: noticed", noticed)
    measure("site sends whole messages again: back", back)


def test_a_site_whose_flare_client_is_killed(hospitals: Callable[..., Hospitals], measure: Measure) -> None:
    hospital = hospitals(sites=FOUR, rounds=200)
    hospital.pace("west", IDLE)
    hospital.serve()
    hospital.join_all()
    hospital.reach(5)
    killed = hospital.kill(hospital.parent("north"))
    noticed = hospital.until_missed("north", killed)
    assert last_reason(hospital) == "disconnected"
    hospital.pace("west", 0)
    assert hospital.ends("north") == 1
    assert "FLARE's client ended with exit code -9" in hospital.said("north")
    check_ended(hospital, "north")
    assert hospital.rounds in hospital.missed("north")
    measure("site's FLARE client killed: noticed", noticed)


def test_a_site_whose_join_is_begun_again(hospitals: Callable[..., Hospitals], measure: Measure) -> None:
    """Of three sites a round needs all: the run waits, and goes on with the one that came back, without `--resume`."""
    hospital = hospitals(rounds=80)
    hospital.pace("west", IDLE)
    hospital.serve()
    hospital.join_all()
    hospital.reach(5)
    killed = time.monotonic()
    for pid in hospital.processes("north"):  # as when the machine is switched off
        with suppress(ProcessLookupError):
            hospital.kill(pid)
    hospital.until_noticed("north", killed)
    assert "for north to come back" in hospital.said()
    joined = time.monotonic()
    hospital.join("north")
    wait_for(lambda: "restarted, and back: north" in hospital.said(), "north is back", hospital.said)
    wait_for(lambda: "continues its run" in hospital.said("north"), "north says so", lambda: hospital.said("north"))
    measure("site's join begun again: back", hospital.until_back("north", joined))
    hospital.pace("west", 0)
    check_ended(hospital)
    assert not any("lost" in line for line in hospital.history())
    assert not hospital.missed("south") | hospital.missed("west")


# -- sums of those who uploaded, whoever vanishes then -----------------------------------------------------------------


def test_the_rows_of_sites_killed_after_their_upload_still_count(
    hospitals: Callable[..., Hospitals], tmp_path: Path
) -> None:
    """Three sites in turn are killed while the slowest still works: they have uploaded, and unmask no more."""
    hospital = hospitals(protocol="fedsgd", sites=FOUR, rounds=60)
    hospital.pace("west", 1.0)
    hospital.serve()
    hospital.join_all()
    for name in ("north", "south", "east"):
        number = hospital.round()
        wait_for(lambda number=number: hospital.round() > number, "a round", hospital.said)
        time.sleep(0.6)  # all but west have uploaded
        hospital.until_back(name, hospital.kill(hospital.job(name)) - hospital.until_missed(name, time.monotonic()))
    hospital.pace("west", 0)
    check_ended(hospital)
    vanished = [name for number, name in uploads_of(hospital) if number in hospital.missed(name)]
    assert {"north", "south", "east"} <= set(vanished)
    assert models_of(hospital.out) == models_of(hospital.in_process(tmp_path / "alone", without_uploads(hospital)))


def test_sums_are_exact_whoever_is_killed_when(hospitals: Callable[..., Hospitals], tmp_path: Path) -> None:
    """Sites are killed at random moments, also while they start, also two at a time."""
    hospital = hospitals(protocol="fedsgd", sites=FOUR, rounds=200)
    hospital.pace("west", IDLE)
    hospital.serve()
    hospital.join_all()
    hospital.reach(2)
    chance = random.Random(5)
    for _ in range(10):
        time.sleep(chance.uniform(0.1, 3.0))
        for pid in hospital.processes(chance.choice(hospital.sites), "worker_process"):
            hospital.kill(pid)
    hospital.pace("west", 0)
    check_ended(hospital)
    assert sum(bool(hospital.missed(name)) for name in hospital.sites) > 1
    assert models_of(hospital.out) == models_of(hospital.in_process(tmp_path / "alone", without_uploads(hospital)))


def uploads_of(hospital: Hospitals) -> set[tuple[int, str]]:
    """Rounds and who uploaded in the attempt that succeeded, as the server's views have it."""
    attempts = {line["round"]: line["attempt"] for line in hospital.history()}
    codec, found = Codec(MESSAGES), set[tuple[int, str]]()
    for peer, messages in seen(hospital.out).items():
        for _, direction, data in messages:
            if direction == "received":
                with suppress(CodecError):  # not a message of secure aggregation
                    message = codec.decode(data)
                    if isinstance(message, MaskedUpload) and message.stamp.attempt == attempts.get(message.stamp.round):
                        found.add((message.stamp.round, peer))
    return found


def without_uploads(hospital: Hospitals) -> Engine:
    """What has the same silos' rows missing from the same rounds in one process."""
    uploads = uploads_of(hospital)
    rounds = range(1, hospital.rounds + 1)
    absent = [(number, name) for number in rounds for name in hospital.sites if (number, name) not in uploads]
    return Engine(faults=Faults(drop=tuple(Fault(round=number, silo=name) for number, name in absent)))


# -- the server dies ---------------------------------------------------------------------------------------------------


def test_a_server_whose_job_is_killed(hospitals: Callable[..., Hospitals], tmp_path: Path, measure: Measure) -> None:
    hospital = hospitals(rounds=40)
    hospital.pace("west", IDLE)
    hospital.serve()
    hospital.join_all()
    hospital.reach(14)
    killed = hospital.kill(hospital.job())
    number = hospital.round()
    hospital.reach(number + 1)
    new = time.monotonic() - killed
    hospital.pace("west", 0)
    check_ended(hospital)
    assert "restarts from its last checkpoint" in hospital.said()
    assert models_of(hospital.out) == models_of(hospital.in_process(tmp_path / "alone"))
    measure("server job killed: new rounds", new)


def test_a_server_of_which_nothing_is_left(
    hospitals: Callable[..., Hospitals], tmp_path: Path, measure: Measure
) -> None:
    hospital = hospitals(rounds=40)
    hospital.pace("west", IDLE)
    serving = hospital.serve()
    hospital.join_all()
    hospital.reach(14)
    for pid in (serving.pid, hospital.parent(), hospital.job()):
        hospital.kill(pid)
    serving.wait()
    number = hospital.round()
    wait_for(lambda: not hospital.processes("server"), "the server is gone")
    hospital.serve("--resume")
    began = time.monotonic()
    hospital.reach(number + 1)
    new = time.monotonic() - began
    hospital.pace("west", 0)
    check_ended(hospital)
    assert models_of(hospital.out) == models_of(hospital.in_process(tmp_path / "alone"))
    measure("server killed, served again: new rounds", new)


# -- the network is cut ------------------------------------------------------------------------------------------------


class Network:
    """A bridge of this machine with a network namespace for each party."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._mark = f"m{secrets.token_hex(3)}"
        self._names = names
        self.addresses = {name: f"10.213.7.{number}" for number, name in enumerate(names, 1)}

    def build(self) -> None:
        """Make it. Raises CalledProcessError or OSError where that is not allowed."""
        ip("link", "add", self._mark, "type", "bridge")
        ip("link", "set", self._mark, "up")
        for number, name in enumerate(self._names, 1):
            space, near, far = self.space(name), f"{self._mark}-{number}", f"{self._mark}-{number}x"
            ip("netns", "add", space)
            ip("link", "add", near, "type", "veth", "peer", "name", far)
            ip("link", "set", far, "netns", space)
            ip("link", "set", near, "master", self._mark)
            ip("link", "set", near, "up")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", far, "up")
            ip("-n", space, "addr", "add", f"{self.addresses[name]}/24", "dev", far)

    def space(self, name: str) -> str:
        """The namespace of a party."""
        return f"{self._mark}-{name}"

    def near(self) -> Mapping[str, tuple[str, ...]]:
        """The words that begin a command of each party."""
        return {name: ("ip", "netns", "exec", self.space(name)) for name in self._names}

    def switch(self, name: str, how: str) -> float:
        """Cut a party off ("down") or connect it again ("up"); return the moment."""
        ip("link", "set", f"{self._mark}-{self._names.index(name) + 1}", how)
        return time.monotonic()

    def remove(self) -> None:
        """Remove it, as far as it was made."""
        for name in self._names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", self.space(name))
        with suppress(subprocess.CalledProcessError):
            ip("link", "delete", self._mark)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network(("server", *FOUR))
    try:
        try:
            made.build()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield made
    finally:
        with suppress(OSError):
            made.remove()


def test_a_site_whose_network_is_cut_and_healed(
    network: Network, hospitals: Callable[..., Hospitals], measure: Measure
) -> None:
    hospital = hospitals(sites=FOUR, rounds=600, every=20, host=network.addresses["server"], near=network.near())
    hospital.pace("west", IDLE)
    hospital.serve()
    hospital.join_all()
    hospital.reach(5)
    cut = network.switch("north", "down")
    noticed = hospital.until_missed("north", cut)
    assert last_reason(hospital) in ("disconnected", "late")
    time.sleep(20)  # longer than FLARE's heartbeats are apart
    healed = network.switch("north", "up")
    back = hospital.until_back("north", healed)
    hospital.pace("west", 0)
    check_ended(hospital)
    assert not hospital.missed("south")
    measure("network cut: noticed", noticed)
    measure("network healed: back", back)


# -- what cannot work --------------------------------------------------------------------------------------------------


def test_sites_that_do_not_come(hospitals: Callable[..., Hospitals]) -> None:
    hospital = hospitals()
    hospital.serve("--wait", "3")
    hospital.join("north")
    assert hospital.ends() == 1
    assert "missing are south, west" in hospital.said() or "missing are north, south, west" in hospital.said()
    check_plain(hospital)
    assert not hospital.processes("server")


def test_sites_that_do_not_fit(hospitals: Callable[..., Hospitals], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import moretta\nmoretta.__version__ = '0.0.1'\n")
    older = {"PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))}
    hospital = hospitals()
    other = hospital.site("south") / "paced.py"
    other.write_text(other.read_text().replace("nn.ReLU()", "nn.Tanh()"))
    hospital.serve()
    for name in hospital.sites:
        hospital.join(name, older if name == "north" else {})
    assert hospital.ends() == 2, hospital.said()
    last = hospital.said().strip().splitlines()[-1]
    assert "1 of 3 sites" in last
    assert "north: runs Moretta 0.0.1" in last
    assert "south: builds another model than the server from [model] source (digests " in last
    check_plain(hospital)


def test_a_site_with_another_identity_than_the_roster_has(hospitals: Callable[..., Hospitals]) -> None:
    hospital = hospitals(sites=FOUR, secure='roster = "roster.toml"', rounds=5)
    own = {name: Identity.fresh() for name in hospital.sites}
    other = Identity.fresh()
    rosters = {False: roster_of(own), True: roster_of(own | {"north": other})}
    (hospital.server / "roster.toml").write_text(rosters[False])
    for name in hospital.sites:
        (other if name == "north" else own[name]).save(hospital.site(name) / "key")
        (hospital.site(name) / "roster.toml").write_text(rosters[False])
        silo = hospital.site(name) / "silo.toml"
        silo.write_text(silo.read_text().replace("[data]", 'identity = "key"\nroster = "roster.toml"\n\n[data]'))
    hospital.serve()
    hospital.join("north")
    assert hospital.ends("north") == 2  # by its own roster it is refused at its own machine
    assert "the key of north" in hospital.said("north")
    (hospital.site("north") / "roster.toml").write_text(rosters[True])
    hospital.join_all()
    check_ended(hospital)
    assert set(hospital.missed("north")) == set(range(1, hospital.rounds + 1))
    assert re.match("refused.*roster", hospital.missed("north")[1])
    assert not hospital.missed("south")


def roster_of(identities: Mapping[str, Identity]) -> str:
    """The file of everybody's public keys."""
    return "".join(
        f'[[silo]]\nname = "{name}"\nkey = "{public_line(identity.public_key)}"\n'
        for name, identity in identities.items()
    )


def test_a_job_that_was_edited_by_hand(hospitals: Callable[..., Hospitals]) -> None:
    """An administrator's tool signs it for FLARE as it is by then."""
    hospital = hospitals()
    kit, parent = hospital.serve_flare()
    key = identity_of(kit.server / "local")
    hospital.join_all()
    wait_for(lambda: len(connected(kit.admin)) == 3, "sites are connected")
    folder, status = hospital.folder / "job", hospital.folder / "status.json"
    for file in (job.OF_SERVER, job.OF_SITE):
        job.write_job(hospital.run_file(), folder, key, status=str(status), out=str(hospital.out))
        path = folder / file
        path.write_text(path.read_text().replace("rounds = 60", "rounds = 61"))
        number = asked(kit.admin, "submit", folder)
        wait_for(lambda number=number: state_of(kit.admin, number).startswith("FINISHED"), "FLARE ends it")
        if file == job.OF_SERVER:
            assert "the job is not signed by this server's key: it was edited by hand" in hospital.said()
            assert not status.exists()  # where it lies is of the job too
            assert not hospital.out.exists()
        else:
            told = json.loads(status.read_text())
            assert told["state"] == "failed"
            assert told["sentence"].count("edited by hand") == 3, told
    processes.stop(parent)
    for name in hospital.sites:
        assert "Traceback" not in hospital.said(name)
