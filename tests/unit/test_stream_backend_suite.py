"""The receiver's own suites over the streaming backend, its reference decoder and CPU tensors; small layouts only, since the
reference of the dense XOR goes word by word."""

from __future__ import annotations

import pytest

from megasync.receiver import backends
from tests.unit.test_receiver_layouts import (  # noqa: F401
    test_a_copy_that_differs_is_refused_before_any_write,
    test_case_43_second_swizzled_copy_of_a_scale_is_refreshed_too,
    test_nibbles_in_another_order,
)
from tests.unit.test_receiver_ranks import *  # noqa: F403
from tests.unit.test_receiver_shadow import *  # noqa: F403


@pytest.fixture(autouse=True)
def _stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends._KNOWN, "stream", ("tests.unit.stream_on_cpu", "reading_stream_on_cpu"))
    monkeypatch.setitem(backends._BY_DEVICE, "cpu", "stream")
