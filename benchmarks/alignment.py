"""What it costs two partners to put their rows in one order: microseconds an id, and seconds for two lists of ids.

    OMP_NUM_THREADS=1 python benchmarks/alignment.py --ids 1000000 --json

encode_us_per_id, blind_us_per_id, normalise_us_per_id    one core's wall-clock time for an id of 50,000
align_seconds            from ids to alignments at both partners, each a process of its own, which hand each other bytes
align_core_seconds       of the partner that took more of them, its processor's time, which others do not lengthen
align_peak_mib           the most resident memory of one partner's process (Linux)
align_mib_sent           what one partner sends

Half of each partner's ids are shared. What is wanted: a million ids each in 600 seconds at most on two cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from measure import figure, main, resident_mib

from moretta.data.alignment import curve
from moretta.data.alignment.partner import IdRules, Listing, Partner

EACH = 50_000
SECRET = bytes(range(32))


def ids(count: int, first: int) -> list[str]:
    """Return ids as a hospital writes them."""
    return [f"P-{number:09d}" for number in range(first, first + count)]


def per_id(repeats: int) -> dict[str, Any]:
    """Return what the parts take for an id."""
    taken: dict[str, list[float]] = {"normalise": [], "encode": [], "blind": []}
    for _ in range(repeats):
        began = time.perf_counter()
        messages = Listing(ids(EACH, 0), IdRules(), "here").messages
        then = time.perf_counter()
        points = curve.encode(messages)
        after = time.perf_counter()
        curve.blind(points, SECRET)
        for name, seconds in zip(taken, (then - began, after - then, time.perf_counter() - after), strict=True):
            taken[name].append(seconds / EACH)
    return {f"{name}_us_per_id": figure(each, "us", 1e6) for name, each in taken.items()}


def play(line: Connection, count: int, first: int) -> None:
    """Play one partner: its part of the exchange, and then what it came to."""
    sent = 0

    def swap(points: curve.Points) -> curve.Points:
        nonlocal sent
        sent += points.nbytes
        line.send_bytes(points.tobytes())
        return curve.as_points(line.recv_bytes())

    partner = Partner(Listing(ids(count, first), IdRules(), f"partner {first}"))
    theirs = swap(partner.blind())
    found = partner.match(swap(partner.again(theirs)))
    peak = resident_mib("VmHWM") if sys.platform == "linux" else 0.0
    line.send_bytes(f"{len(found.order)} {sent} {peak} {time.process_time()}".encode())


def aligned(count: int) -> dict[str, Any]:
    """Return what two partners take together, each in a process."""
    context = multiprocessing.get_context("spawn")
    lines, partners = [], []
    began = time.perf_counter()
    for first in (0, count // 2):
        ours, theirs = context.Pipe()
        lines.append(ours)
        partners.append(context.Process(target=play, args=(theirs, count, first)))
        partners[-1].start()
    for _ in range(2):  # the lists, and the lists under both secrets
        said = [line.recv_bytes() for line in lines]
        for line, other in zip(lines, reversed(said), strict=True):
            line.send_bytes(other)
    shared, sent, peak, core = zip(*[map(float, line.recv_bytes().split()) for line in lines], strict=True)
    seconds = time.perf_counter() - began
    for partner in partners:
        partner.join()
    assert set(shared) == {count - count // 2}
    return {
        "align_seconds": figure(seconds, "s"),
        "align_core_seconds": figure(max(core), "s"),
        "align_peak_mib": figure(max(peak), "MiB"),
        "align_mib_sent": figure(max(sent) / 2**20, "MiB"),
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure both."""
    return {
        "ids": arguments.ids,
        "load_before": os.getloadavg()[0],
        **per_id(arguments.repeats),
        **aligned(arguments.ids),
        "load_after": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main(
        __doc__ or "",
        run,
        ("--ids", {"type": int, "default": EACH, "help": "of each partner"}),
        ("--repeats", {"type": int, "default": 5}),
    )
