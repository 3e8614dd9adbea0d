"""The warning about a snapshot in host memory where all CUDA streams share one hardware queue."""

import pytest

from megasync.config import SnapshotPlace
from megasync.trainer.device_snapshot import warn_of_one_queue


@pytest.mark.parametrize(
    ("place", "connections", "warned"),
    [
        (SnapshotPlace.HOST, "1", True),
        (SnapshotPlace.HOST, "8", False),
        (SnapshotPlace.HOST, None, False),
        (SnapshotPlace.DEVICE, "1", False),
    ],
)
def test_one_queue_and_a_snapshot_in_host_memory_are_warned_of(
    place: SnapshotPlace,
    connections: str | None,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if connections is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    warn_of_one_queue(place)
    assert ("snapshot=device" in caplog.text) == warned
