"""Ctrl-C waits for native code that would turn it into another error."""

from __future__ import annotations

import os
import signal

import pytest

from hopsparse.files import unbroken


def interrupted(done: list[str], error: Exception | None = None) -> None:
    with unbroken():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("after the signal")
        if error is not None:
            raise error


def test_an_interrupt_waits_for_the_end() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(done)
    assert done == ["after the signal"]


def test_an_interrupt_is_not_lost_when_the_block_fails() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted([], ValueError("what native code makes of it"))
    assert isinstance(caught.value.__context__, ValueError)


def test_without_an_interrupt_nothing_changes() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="own"), unbroken():
        raise ValueError("its own")
    assert signal.getsignal(signal.SIGINT) is before
