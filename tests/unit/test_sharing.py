"""Short turns of the interpreter: as long as anybody is inside, and as before afterwards."""

from __future__ import annotations

import sys
from contextlib import ExitStack

import pytest

from megasync.receiver.sharing import INTERVAL_S, short_turns


def test_the_interval_is_short_until_the_last_has_left() -> None:
    before = sys.getswitchinterval()
    first, second = ExitStack(), ExitStack()
    with first:
        first.enter_context(short_turns(True))
        second.enter_context(short_turns(True))
        assert sys.getswitchinterval() == pytest.approx(INTERVAL_S)
    assert sys.getswitchinterval() == pytest.approx(INTERVAL_S)
    with pytest.raises(KeyError), second:
        raise KeyError
    assert sys.getswitchinterval() == pytest.approx(before)


def test_nothing_changes_where_it_is_not_wanted_or_short_already() -> None:
    before = sys.getswitchinterval()
    with short_turns(False):
        assert sys.getswitchinterval() == before
    try:
        sys.setswitchinterval(1e-5)
        with short_turns(True):
            assert sys.getswitchinterval() == pytest.approx(1e-5)
    finally:
        sys.setswitchinterval(before)
