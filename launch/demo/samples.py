"""How samples get from the rollout process to the trainer: one file a batch, in a folder.

The trainer takes a file when it begins to learn from it, and ``put`` returns then: the next batch is generated while the
trainer computes the next weights. So the rollout is never more than one batch ahead.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

_LOOK_S = 0.002
_CHECK_S = 1.0


@dataclass(frozen=True)
class Made:
    """Facts of a batch.

    Attributes:
        version: Version of the weights that made it.
        reward: Mean reward.
        sha256: Of those weights, live in the engine.
        density: Changed share of the weights of the last version applied.
        payload_nbytes: Bytes that it took.
        pause_s: Seconds that generation stood still for it.
    """

    version: int
    reward: float
    sha256: str
    density: float
    payload_nbytes: int
    pause_s: float


@dataclass(frozen=True)
class Samples:
    """A batch.

    Attributes:
        tokens: int64 ``[rows, length]``, samples of a prompt side by side.
        rewards: float32 ``[rows]``.
        made: Facts.
    """

    tokens: torch.Tensor
    rewards: torch.Tensor
    made: Made


class SampleFolder:
    """Batches of one run.

    Args:
        folder: Where; made if absent.
        patience_s: Longest wait for the other process.
        check: Called every second of a wait and before one is given up; raises where waiting is in vain, for a reason that
            is not the other process.
    """

    def __init__(self, folder: Path, patience_s: float, check: Callable[[], None] = lambda: None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._patience_s, self._check = folder, patience_s, check

    def put(self, number: int, samples: Samples) -> None:
        """Hand over a batch and wait until the trainer takes it.

        Raises:
            TimeoutError: It did not.
        """
        path = self._path(number)
        draft = path.with_suffix(".draft")
        facts = {"made": json.dumps(asdict(samples.made))}
        save_file({"tokens": samples.tokens, "rewards": samples.rewards}, draft, metadata=facts)
        draft.rename(path)
        self.wait(lambda: not path.exists(), f"the trainer to take batch {number}")

    def take(self, number: int) -> Samples:
        """Wait for a batch and take it.

        Raises:
            TimeoutError: It did not come.
        """
        path = self._path(number)
        self.wait(path.exists, f"the rollout process to make batch {number}")
        with safe_open(path, framework="pt") as f:
            made = Made(**json.loads(f.metadata()["made"]))
            samples = Samples(f.get_tensor("tokens"), f.get_tensor("rewards"), made)
        path.unlink()
        return samples

    def finish(self, version: int) -> None:
        """Tell the rollout process which version is the last."""
        draft = self._folder / "last.draft"
        draft.write_text(str(version))
        draft.rename(self._folder / "last")

    def last_version(self) -> int | None:
        """What ``finish`` told; None before."""
        path = self._folder / "last"
        return int(path.read_text()) if path.exists() else None

    def wait(self, ready: Callable[[], Any], what: str, look_s: float = _LOOK_S) -> None:
        """Wait until something is ready, looking every so many seconds.

        Raises:
            TimeoutError: After the patience.
            Exception: What ``check`` raises.
        """
        deadline = time.monotonic() + self._patience_s
        checked = time.monotonic()
        while not ready():
            now = time.monotonic()
            if now > min(checked + _CHECK_S, deadline):
                checked = now
                self._check()
            if now > deadline:
                raise TimeoutError(f"waited {self._patience_s:.0f} s for {what} ({self._folder}): does it still run?")
            time.sleep(look_s)

    def _path(self, number: int) -> Path:
        return self._folder / f"batch-{number:06d}.safetensors"
