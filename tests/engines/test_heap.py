"""What was freed goes back to the system when it is asked for."""

import platform
import subprocess
import sys

import pytest

HOLED = """
from moretta.engines.memory import give_back_heap, status

pieces = [b"x" * 60_000 for _ in range(1000)]  # too small for mappings of their own, so they lie on the heap
full, last = status("RssAnon"), pieces[-1]
del pieces  # the heap's end is in use, so it stays as long as it was
kept = status("RssAnon")
give_back_heap()
print(full - kept, full - status("RssAnon"))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the C library of GNU can be asked")
def test_what_lies_free_within_the_heap_is_given_back() -> None:
    told = subprocess.run([sys.executable, "-c", HOLED], capture_output=True, text=True, check=True)
    by_itself, asked = map(float, told.stdout.split())
    assert by_itself < 10 < 50 < asked  # MiB, of 57
