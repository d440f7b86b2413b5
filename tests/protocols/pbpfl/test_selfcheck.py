"""What the self-check borrows of the process it gives back."""

from __future__ import annotations

import threading

import torch

from moretta.protocols.pbpfl.selfcheck import double_precision


def test_threads_that_cross_leave_the_default_dtype_as_it_was() -> None:
    inside, may_leave = threading.Event(), threading.Event()

    def first() -> None:
        with double_precision():
            inside.set()
            may_leave.wait(10)

    def second() -> None:
        with double_precision():
            assert torch.get_default_dtype() == torch.float64

    one, two = threading.Thread(target=first), threading.Thread(target=second)
    one.start()
    inside.wait(10)
    two.start()
    two.join(0.2)  # it has to wait
    may_leave.set()
    one.join()
    two.join()
    assert torch.get_default_dtype() == torch.float32
