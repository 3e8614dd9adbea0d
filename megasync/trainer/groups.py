"""The process groups of a publisher, each for one thread's work. Collective, at the start. Must not import an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megasync.config import GatherKind, PublishConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Groups:
    """Who talks to whom.

    Attributes:
        control: Decisions at step ends (gloo); None for a process alone.
        rounds: The worker thread's exchanges (gloo).
        carrier: Carries payloads: ``rounds``, or an NCCL group.
        device: Where payload messages lie.
    """

    control: ProcessGroup | None
    rounds: ProcessGroup | None
    carrier: ProcessGroup | None
    device: torch.device


def make_groups(config: PublishConfig, ranks: list[int] | None) -> Groups:
    """Make the groups. *Collective*: every rank of the world must call it.

    Args:
        config: Trainer-side configuration.
        ranks: Global ranks that take part; None for all.

    Raises:
        ValueError: ``gather=nccl`` without CUDA.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Groups(None, None, None, torch.device("cpu"))
    control = dist.new_group(ranks, backend="gloo")
    rounds = dist.new_group(ranks, backend="gloo")
    if config.gather is not GatherKind.NCCL:
        return Groups(control, rounds, rounds, torch.device("cpu"))
    if not torch.cuda.is_available():
        raise ValueError("gather=nccl needs CUDA devices: use gather=gloo (the default) or gather=direct")
    carrier = dist.new_group(ranks, backend="nccl")
    return Groups(control, rounds, carrier, torch.device("cuda", torch.cuda.current_device()))
