"""Copies beside an engine that decodes: in stretches with a pause between them, and none where there is only one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megasync.receiver import scatter_passes
from megasync.receiver.scatter_passes import Pace, Passes


class OnDevice:
    """A plane that says it is on a GPU."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, plane: torch.Tensor) -> None:
        self.plane = plane

    def __len__(self) -> int:
        return len(self.plane)

    def __getitem__(self, at: slice) -> torch.Tensor:
        return self.plane[at]


@pytest.mark.parametrize(("num", "pauses"), [(0, 0), (1, 0), (100, 0), (101, 1), (350, 3)])
def test_a_copy_pauses_between_its_stretches_only(monkeypatch: pytest.MonkeyPatch, num: int, pauses: int) -> None:
    slept: list[float] = []
    monkeypatch.setattr(scatter_passes, "sleep", slept.append)
    source = torch.arange(num).to(torch.uint8)
    target: Any = OnDevice(torch.full((num,), 255, dtype=torch.uint8))
    Passes(pace=Pace(copied_nbytes=100, pause_s=0.25)).upload(target, source)
    assert torch.equal(target.plane, source)
    assert slept == [0.25] * pauses
