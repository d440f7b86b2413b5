"""Scripts that look like FLARE's Client API train at silos, each in a process of its own."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_contract import silos
from torch import nn

from moretta import FedAvg, Federation, client
from moretta.client import Script
from moretta.engines import frames
from moretta.errors import MisuseError, ParameterError

HEAD = """
import os, sys, torch
from torch import nn
import moretta.client as flare

flare.init()
net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
x, y = flare.rows()
done = 0
while flare.is_running():
    sent = flare.receive()
    assert sent is flare.receive() and sent.total_rounds == 3 and sent.current_round == done, sent
    net.load_state_dict(sent.params)
    optimizer = torch.optim.SGD(net.parameters(), float(sys.argv[1]))
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    done += 1
    print(flare.get_site_name(), os.getpid(), done)
    state = net.state_dict()
"""
FULL = HEAD + '    flare.send(flare.FLModel(params=state, metrics={"accuracy": 1.0}))\n'
DIFF = HEAD + (
    "    state = {name: one - sent.params[name] for name, one in state.items()}\n"
    "    flare.send(flare.FLModel(params_type=flare.ParamsType.DIFF, params=state,"
    ' meta={"NUM_STEPS_CURRENT_ROUND": len(y)}))\n'
)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def trained(fit: Any, rounds: int = 3, **given: Any) -> Any:
    held = silos({"north": 8, "south": 24, **given})
    protocol = FedAvg(loss="cross-entropy", fit=fit)
    return Federation(model(), held, protocol, batch_size=0, dtype="float64").train(rounds, 7, progress=False)


def by_hand(net: nn.Module, x: Any, y: Any, number: int) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net, len(x)


SLOW = pytest.mark.slow  # a process a silo, of PyTorch


@pytest.mark.parametrize("text", [pytest.param(FULL, id="weights"), pytest.param(DIFF, id="differences", marks=SLOW)])
def test_a_script_trains_as_a_loop_does_in_one_process_a_silo(
    text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "client.py").write_text(text)
    result = trained(Script(tmp_path / "client.py", "0.1"))
    torch.testing.assert_close(result.model.state_dict(), trained(by_hand).model.state_dict(), rtol=0, atol=1e-9)
    assert result.record["settings"]["protocol"]["fit"] == "moretta.client:client.py"
    out, err = capfd.readouterr()
    lines = [line.split() for line in err.splitlines() if line.startswith(("north ", "south "))]
    assert not out
    assert {(silo, done) for silo, _, done in lines} == {(s, str(n)) for s in ("north", "south") for n in (1, 2, 3)}
    assert len({process for _, process, _ in lines}) == 2
    until = time.monotonic() + 20
    while (alive := [pid for _, pid, _ in lines if Path(f"/proc/{pid}").exists()]) and time.monotonic() < until:
        del result
        result = None
        time.sleep(0.1)
    assert not alive  # what a run has started ends with it


def test_differences_by_another_name_are_not_taken_for_weights() -> None:
    """A run whose scripts sent WEIGHT_DIFF, as FLARE's data kinds are called, became their differences."""
    end = object.__new__(client._Silo)
    end._held = client.FLModel()
    with pytest.raises(MisuseError, match=r'params_type is \'WEIGHT_DIFF\'; expected "FULL" \(or None\) or "DIFF"'):
        end.send(client.FLModel("WEIGHT_DIFF", params={}))


WRONG = {
    "no weights": ("    flare.send(flare.FLModel(params={}))\n", "the weights lack `0.weight`"),
    "steps": (
        '    flare.send(flare.FLModel(params=state, meta={"NUM_STEPS_CURRENT_ROUND": 99}))\n',
        "expected a number of rows from 1 to 8",
    ),
    "an error": ("    raise SystemExit(3)\n", "the script client.py ended with exit code 3 before it sent a model"),
    "not finite": (
        "    flare.send(flare.FLModel(params={name: one * float('nan') for name, one in state.items()}))\n",
        "has NaN or infinity",
    ),
}


@pytest.mark.parametrize("name", ["an error", *(pytest.param(one, marks=SLOW) for one in WRONG if one != "an error")])
def test_a_script_that_fails_at_one_silo_costs_it_the_round(name: str, tmp_path: Path) -> None:
    line, said = WRONG[name]
    (tmp_path / "client.py").write_text(HEAD + line)
    held = silos({"north": 8, "south": 24, "west": 12, "east": 16})
    held[0] = replace(held[0], fit=Script(tmp_path / "client.py", "0.1"))
    protocol = FedAvg(loss="cross-entropy", fit=by_hand)
    result = Federation(model(), held, protocol, batch_size=0, dtype="float64").train(3, 7, progress=False)
    assert [line["rows"] for line in result.history] == [52.0] * 3
    assert said in str(result.history[0])


@SLOW
def test_a_script_that_ends_after_its_round_is_started_again(tmp_path: Path) -> None:
    once = FULL.replace("while flare.is_running():", "if flare.is_running():").replace(
        "sent.current_round == done", "1"
    )
    (tmp_path / "client.py").write_text(once)
    result = trained(Script(tmp_path / "client.py", "0.1"), rounds=3)
    torch.testing.assert_close(result.model.state_dict(), trained(by_hand).model.state_dict(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("ends", ["within a round", "after the last round"])
def test_a_script_ends_with_its_silo_within_a_round(ends: str, tmp_path: Path) -> None:
    """A silo in a process of several was killed at ctrl-c, and its script trained on to the end of its round."""
    last = "flare.send(flare.FLModel(params={}))\n" if ends == "after the last round" else ""
    (tmp_path / "client.py").write_text(
        "import pathlib, time, moretta.client as flare\nflare.init()\nflare.receive()\n"
        f"{last}pathlib.Path(__file__).with_suffix('.on').touch()\ntime.sleep(12)\n"
    )
    running = Script(tmp_path / "client.py").at("north", 3)
    own = running._started()
    process = running._end.detach()[2][0]
    frames.send(own, frames.packed({"round": 1, "rounds": 3, "silo": "north", "params": {}}))
    while not (tmp_path / "client.on").exists():
        assert process.poll() is None
        time.sleep(0.05)
    own.close()
    assert process.wait(30) == (0 if last else -signal.SIGTERM)


def test_outside_of_a_run_it_says_what_to_do(tmp_path: Path) -> None:
    assert client.SOCKET not in os.environ
    with pytest.raises(MisuseError, match=r"was not started by Moretta; pass it as fit=Script\(PATH\)"):
        client.init()
    with pytest.raises(MisuseError, match=r"call init\(\) first"):
        client.receive()
    with pytest.raises(ParameterError, match=r"Script: .*missing\.py is not a file"):
        Script(tmp_path / "missing.py")
