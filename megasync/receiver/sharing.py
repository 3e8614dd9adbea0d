"""Sharing the interpreter with an engine that decodes in the same process.

A thread that waits for the interpreter gets it when the one that has it lets go, or after Python's switch interval: 5 ms, a whole
token. While a version is made ready quietly the interval is short, so that what runs in plain Python here never holds a token up
for long. Used by ``applier``. Must import nothing of megasync.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

INTERVAL_S = 2e-5

_lock = Lock()
_inside: list[float] = []  # the interval found by the first, once for each that is inside


@contextmanager
def short_turns(on: bool) -> Iterator[None]:
    """Switch between threads every ``INTERVAL_S`` as long as anybody is inside; then as before.

    Args:
        on: False does nothing.
    """
    if not on:
        yield
        return
    with _lock:
        _inside.append(_inside[0] if _inside else sys.getswitchinterval())
        sys.setswitchinterval(min(INTERVAL_S, _inside[0]))
    try:
        yield
    finally:
        with _lock:
            before = _inside.pop()
            if not _inside:
                sys.setswitchinterval(before)
