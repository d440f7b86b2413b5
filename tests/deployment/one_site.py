"""A site's folder with its kit, a run file and rows, and a server that answers as FLARE's does."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from test_runs_with_a_roster import enrol

from moretta.deployment import kits, provisioning

RUN = """
[run]
rounds = 2
seed = 7
[data]
source = "sites"
inputs = [2]
classes = 2
batch-size = 16
[model]
source = "mlp"
hidden = [4]
[protocol]
name = "fedsgd"
learning-rate = 0.2
[engine]
name = "flare"
sites = ["north", "south"]
"""
SILO = '[silo]\nname = "north"\n{silo}\n[data]\nsource = "rows.npz"\n'


def make(folder: Path) -> Path:
    """Make kits of two federations, a run file and a site's folder."""
    provisioning.provision(folder / "kits", "localhost", 8102, ["north", "south"])
    provisioning.provision(folder / "others", "localhost", 8102, ["north"])
    (folder / "run.toml").write_text(RUN)
    (folder / "silo.toml").write_text(SILO.format(silo=""))
    np.savez(folder / "rows.npz", x=np.zeros((9, 2), np.float32), y=np.arange(9) % 2)
    enrol(folder, ["north", "south"])
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def aim(kit: Path, port: int, host: str = "localhost") -> None:
    """Have a kit name another server's address."""
    for file in (kit / "startup/fed_client.json", kit / "startup/fed_server.json"):
        if file.exists():
            startup = json.loads(file.read_text())
            startup["servers"][0]["service"]["target"] = f"{host}:{port}"
            file.write_text(json.dumps(startup))


@contextlib.contextmanager
def answering(kit: Path, port: int = 0) -> Iterator[int]:
    """Answer as FLARE's server does, by gRPC with the certificate of a kit."""
    import grpc

    files = kits.certificates_of(kit)
    key, certificate, root = (path.read_bytes() for path in (files.key, files.certificate, files.root))
    server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    credentials = grpc.ssl_server_credentials([(key, certificate)], root, require_client_auth=True)
    found = server.add_secure_port(f"127.0.0.1:{port}", credentials)
    server.start()
    try:
        yield found
    finally:
        server.stop(None).wait()


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
