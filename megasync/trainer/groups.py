"""The process groups of a publisher, each for one thread's work. Collective, at the start. Must not import an adapter."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megasync.config import GatherKind, PublishConfig
from megasync.errors import RankFailedError
from megasync.trainer.agree_wait import store_gone, text_of
from megasync.trainer.carrier import Carrier, GlooCarrier, NcclCarrier
from megasync.trainer.gather import writers_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_WATCHDOG_MARGIN = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Groups:
    """Who talks to whom.

    Attributes:
        control: Decisions at step ends (gloo); None for a process alone.
        rounds: The worker thread's exchanges (gloo).
        carrier: Takes payloads from rank to rank, over ``rounds`` or a NCCL group of its own; None for a process alone.
    """

    control: ProcessGroup | None
    rounds: ProcessGroup | None
    carrier: Carrier | None

    def close(self, *, worker_ended: bool = True) -> None:
        """Give the groups back, with the threads and sockets that each of them has. Local; idempotent.

        Args:
            worker_ended: No thread is inside ``rounds`` and ``carrier`` any more; else they stay until the process ends,
                since a group must not go while a thread waits in it.
        """
        carrier = None if self.carrier is None else self.carrier.group
        idle = [self.control, *([carrier, self.rounds] if worker_ended else [])]
        for group in {id(g): g for g in idle if g is not None}.values():
            with suppress(ValueError, RuntimeError):  # gone already: the trainer destroyed all groups before
                dist.destroy_process_group(group)


def make_groups(config: PublishConfig, ranks: list[int] | None) -> Groups:
    """Make the groups. *Collective*: every rank of the world must call it.

    Args:
        config: Trainer-side configuration.
        ranks: Global ranks that take part; None for all.

    Raises:
        ValueError: ``gather=nccl`` without CUDA.
        RankFailedError: Naming the ranks that did not come within ``timeout_s``; or NCCL's own error, on the rank that has it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Groups(None, None, None)
    nccl = config.gather is GatherKind.NCCL
    if nccl and not torch.cuda.is_available():
        raise ValueError("gather=nccl needs CUDA devices: use gather=gloo (the default) or gather=direct")
    _roll_call(config.timeout_s)
    control = dist.new_group(ranks, backend="gloo")
    rounds = dist.new_group(ranks, backend="gloo")
    if not nccl:
        return Groups(control, rounds, GlooCarrier(rounds, config.timeout_s))
    try:
        return Groups(control, rounds, _nccl_carrier(config, ranks, rounds))
    except BaseException:
        Groups(control, rounds, None).close()
        raise


def _nccl_carrier(config: PublishConfig, ranks: list[int] | None, rounds: ProcessGroup) -> NcclCarrier:
    """A NCCL group of its own, connected at once: see ``carrier``. Before a trainer's kernels its messages are short."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    device = torch.device("cuda", torch.cuda.current_device())
    # Waits end by the carrier's own deadline; torch's would end the process.
    limit = timedelta(seconds=config.timeout_s) + _WATCHDOG_MARGIN
    try:
        group = dist.new_group(ranks, timeout=limit, backend="nccl", pg_options=options, device_id=device)
    except RuntimeError as e:
        raise RankFailedError("making the NCCL group of gather=nccl", {dist.get_rank(): text_of(e)}) from e
    writers = writers_of(dist.get_world_size(group), config.num_writers)
    return NcclCarrier(group, rounds, writers, device, config.timeout_s)


def _roll_call(timeout_s: float) -> None:
    """Wait for every rank of the world: ``new_group`` waits half an hour for one that is gone, and does not name it."""
    world = dist.group.WORLD
    assert world is not None  # initialised, says the caller
    store, me, num = world.get_group_store(), dist.get_rank(), dist.get_world_size()
    try:
        # Counted in the store, so that every rank's own number of this start is the same without any state here.
        prefix = f"megasync/start/{store.add(f'megasync/starts/{me}', 1)}"
        store.set(f"{prefix}/{me}", "here")
        if store.add(f"{prefix}/count", 1) == num:
            store.set(f"{prefix}/all", "here")
        with suppress(RuntimeError):
            store.wait([f"{prefix}/all"], timedelta(seconds=timeout_s))
        missing = (
            [] if store.check([f"{prefix}/all"]) else [r for r in range(num) if not store.check([f"{prefix}/{r}"])]
        )
    except RuntimeError as e:
        raise RankFailedError("starting a publisher", {}, store_gone(e)) from e
    if missing:
        why = f"did not come to the start within {timeout_s:g} s: on_train_start() must be called on every rank"
        raise RankFailedError("starting a publisher", dict.fromkeys(missing, f"{why}; see its own log"))
