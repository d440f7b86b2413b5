"""The server of a living page: who gets in, what they get, and that a run does not mind it."""

import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import time

import psutil
import pytest

from moretta.engines.run_folder import RunFolder
from moretta.errors import ParameterError, RunFailed
from moretta.report import page_server
from moretta.report.living import Status
from moretta.report.page_server import MOST, PageServer, address_of, listening, page_beside

TOKEN = "a-token"


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin('[run]\nname = "mine"\nrounds = 5\n')
    folder.append({"round": 1, "dropped": []})
    return folder


@pytest.fixture
def server(run):
    made = PageServer(listening(0), TOKEN, run.path, Status(has_command=True))
    with made.serving():
        yield made


def port_of(server):
    return server.socket.getsockname()[1]


def ask(server, path=f"/{TOKEN}/", method="GET", headers=()):
    there = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=10)
    there.putrequest(method, path, skip_host="Host" in dict(headers))
    for name, value in headers:
        there.putheader(name, value)
    there.endheaders()
    answer = there.getresponse()
    return answer.status, answer.headers, answer.read()


class Stream:
    """News as a browser hears them."""

    def __init__(self, address, after=""):
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]+)/", address)
        assert found is not None
        port, token = found.groups()
        self._there = socket.create_connection(("127.0.0.1", int(port)), timeout=10)
        head = f"GET /{token}/events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        self._there.sendall((head + (f"Last-Event-ID: {after}\r\n" if after else "") + "\r\n").encode())
        self._file = self._there.makefile("rb")
        while self._file.readline().strip():
            pass

    def next(self):
        """Return the next event's kind, data and id."""
        fields = {}
        while text := self._file.readline():
            name, _, value = text.decode().rstrip("\n").partition(": ")
            if name:
                fields[name] = value
            elif "event" in fields:
                return fields["event"], json.loads(fields["data"]), fields.get("id")
        return None

    def until(self, kind):
        found = []
        while (event := self.next()) is not None:
            found.append(event)
            if event[0] == kind:
                break
        return found

    def close(self):
        self._file.close()
        self._there.close()


def test_the_page_and_its_parts_are_served_and_fetch_nothing_from_elsewhere(server):
    kinds = {"": "text/html", "living.css": "text/css", "living.js": "text/javascript"}
    for name, kind in kinds.items():
        status, headers, body = ask(server, f"/{TOKEN}/{name}")
        assert status == 200
        assert headers["Content-Type"].startswith(kind)
        text = body.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|[\"'(]//|@import|url\(|innerHTML|eval\(|<style|<script>|\son\w+=", text)
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        assert "Python" not in headers["Server"]


@pytest.mark.parametrize(
    "path",
    [
        *("/", f"/{TOKEN[:-1]}/", f"/{TOKEN}x/", "//", "/x/events", f"/{TOKEN.upper()}/", "/favicon.ico", "/\xff/"),
        *(f"/{TOKEN}/run.toml", f"/{TOKEN}/../", f"/{TOKEN}/../../etc/passwd", f"/{TOKEN}/%2e%2e/run.toml"),
        *(f"/?{TOKEN}", f"/{TOKEN}/living.js/", f"/{TOKEN}/events?x"),
    ],
)
def test_without_the_token_or_a_name_that_is_there_nothing_is_found(server, path):
    there = socket.create_connection(("127.0.0.1", port_of(server)), timeout=10)
    with there:
        there.sendall(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{port_of(server)}\r\n\r\n".encode("latin-1"))
        answer = there.makefile("rb").read()
    assert answer.split()[1] == b"404"
    assert TOKEN.encode() not in answer


def test_tokens_are_compared_in_constant_time(server, monkeypatch):
    compared = []

    def compare(one, other):
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(page_server.hmac, "compare_digest", compare)
    assert ask(server, "/wrong/")[0] == 404
    assert ask(server)[0] == 200
    assert compared == [(b"wrong", TOKEN.encode()), (TOKEN.encode(), TOKEN.encode())]


def test_another_hosts_name_is_refused_and_this_ones_two_are_not(server):
    for host in ("evil.example", "127.0.0.1", f"evil.example:{port_of(server)}", "", "127.0.0.1:1", "[::1]"):
        assert ask(server, headers=[("Host", host)])[0] == 403
    here = f"127.0.0.1:{port_of(server)}"
    assert ask(server, headers=[("Host", here), ("Host", "evil.example")])[0] == 403
    assert ask(server, headers=[("Host", here)])[0] == 200
    assert ask(server, headers=[("Host", f"localhost:{port_of(server)}")])[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "CONNECT", "TRACE", "BREW"])
def test_nothing_but_get_is_answered(server, method):
    status, headers, body = ask(server, method=method)
    assert (status, headers["Allow"]) == (405, "GET")
    assert b"<" not in body


def test_what_is_no_http_is_refused(server):
    for text in (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET " + b"x" * 70_000 + b"\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port_of(server)), timeout=10) as there:
            there.sendall(text)
            assert not there.makefile("rb").read().startswith(b"HTTP/1.0 200")
    assert ask(server)[0] == 200


def test_news_come_as_they_are_written_and_a_browser_that_comes_back_goes_on(server, run):
    stream = Stream(address_of(server.socket, TOKEN))
    first = stream.until("state")
    assert [kind for kind, *_ in first] == ["begin", "plan", "rounds", "result", "state"]
    run.append({"round": 2, "dropped": []})
    (kind, data, place) = stream.next()
    assert (kind, [one["round"] for one in data["rounds"]]) == ("rounds", [2])
    stream.close()
    run.append({"round": 3, "dropped": []})
    again = Stream(address_of(server.socket, TOKEN), place)
    told = again.until("state")
    assert [one["round"] for kind, data, _ in told if kind == "rounds" for one in data["rounds"]] == [3]
    assert "begin" not in [kind for kind, *_ in told]
    again.close()


def test_the_last_news_are_told_before_the_end(run):
    server = PageServer(listening(0), TOKEN, run.path, Status(has_command=True))
    with server.serving():
        stream = Stream(address_of(server.socket, TOKEN))
        stream.until("state")
        server.status = Status(failed="the disk is full", has_command=True)
    told = stream.until("bye")
    assert [kind for kind, *_ in told] == ["state", "bye"]
    assert (told[0][1]["state"], told[0][1]["sentence"]) == ("failed", "the disk is full")
    assert stream.next() is None
    stream.close()


def test_connections_are_bounded_and_given_back(server):
    held = [Stream(address_of(server.socket, TOKEN)) for _ in range(MOST)]
    assert ask(server)[0] == 503
    for one in held:
        one.close()
    until = time.monotonic() + 30
    while ask(server)[0] != 200:
        assert time.monotonic() < until


@pytest.mark.parametrize("sent", [b"", b"GET /", b"GET /another-token/ HTTP/1.1\r\n"])
def test_who_has_no_token_takes_no_slot_from_who_has(server, sent):
    here = Stream(address_of(server.socket, TOKEN))
    strangers = []
    for _ in range(3 * MOST):
        strangers.append(socket.create_connection(("127.0.0.1", port_of(server)), timeout=10))
        strangers[-1].sendall(sent)
    time.sleep(0.5)
    assert [ask(server)[0] for _ in range(3)] == [200] * 3
    assert len(server._strangers) <= MOST
    for one in strangers[: 2 * MOST]:
        assert one.recv(1) == b""
    here.until("state")  # or whatever comes first: it was not closed
    here.close()
    for one in strangers:
        one.close()


def test_a_request_that_never_ends_is_closed_however_steadily_it_comes(server, monkeypatch):
    monkeypatch.setattr(page_server, "PATIENCE", 0.5)
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=0.05) as there:
        there.sendall(f"GET /{TOKEN}/ HTTP/1.1\r\nX: ".encode())
        until = time.monotonic() + 10
        while not is_closed(there):
            there.sendall(b"y")
            assert time.monotonic() < until


def is_closed(there):
    """Return whether a connection's other end is closed; wait for that as long as its timeout."""
    try:
        return there.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def test_a_whole_request_may_take_as_long_as_its_parts():
    assert page_server._Request.timeout == page_server.PATIENCE


def test_a_connection_that_says_nothing_is_closed(server, monkeypatch):
    monkeypatch.setattr(page_server._Request, "timeout", 0.2)
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=10) as there:
        there.sendall(b"GET /")
        assert there.recv(1) == b""


def test_a_port_in_use_is_one_sentence():
    with listening(0) as found:
        port = found.getsockname()[1]
        assert found.getsockname()[0] == "127.0.0.1"
        with pytest.raises(ParameterError, match=f"at port {port} of 127.0.0.1: Address already in use; name another"):
            listening(port)


# -- Beside a run ------------------------------------------------------------------------------------------------------


def test_beside_a_run_the_page_hears_how_it_ended(run):
    told: list[str] = []
    streams: list[Stream] = []

    def play():
        with page_beside(run.path, 0, told.append) as note:
            stream = Stream(told[0].rsplit(" ", 1)[1])
            streams.append(stream)
            assert stream.until("state")[-1][1]["here"] is True
            note("waiting for north")
            assert stream.until("state")[-1][1]["sentence"] == "waiting for north"
            raise RunFailed("too few silos are left")

    with pytest.raises(RunFailed):
        play()
    (stream,) = streams
    events = stream.until("bye")
    assert [data["sentence"] for kind, data, _ in events if kind == "state"] == ["too few silos are left"]
    assert events[-1][0] == "bye"
    stream.close()
    with pytest.raises(ConnectionRefusedError):
        Stream(told[0].rsplit(" ", 1)[1])


def test_every_run_has_a_token_of_its_own_which_no_argument_shows(run, monkeypatch):
    found = []
    started = subprocess.Popen

    def start(words, **more):
        found.append(words)
        return started(words, **more)

    monkeypatch.setattr(subprocess, "Popen", start)
    told: list[str] = []
    for _ in range(2):
        with page_beside(run.path, 0, told.append):
            pass
    tokens = [sentence.rsplit("/", 2)[1] for sentence in told]
    assert len(set(tokens)) == 2
    assert not [token for token in tokens if token in str(found)]
    assert len(secrets.token_urlsafe(32)) == len(tokens[0])


def test_a_run_goes_on_without_its_page(run, monkeypatch):
    told: list[str] = []
    with page_beside(run.path, 0, told.append) as note:
        pid = page()
        os.kill(pid, signal.SIGKILL)
        for _ in range(50_000):
            note("x" * 100)  # more than any pipe holds
    assert len(told) == 1

    def nothing(*words, **more):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", nothing)
    with page_beside(run.path, 0, told.append) as note:
        note("still here")
    assert "the run continues without it" in told[1]


def page():
    """Return the number of the page's process, which this one has started."""
    (found,) = [one.pid for one in psutil.Process().children() if "moretta.report.page_server" in one.cmdline()]
    return found


def test_a_page_that_does_not_read_never_holds_the_run(run):
    with page_beside(run.path, 0, lambda sentence: None) as note:
        pid = page()
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(5_000):
            note("x" * 100)
        assert time.monotonic() - began < 60  # would be for ever
        os.kill(pid, signal.SIGCONT)
