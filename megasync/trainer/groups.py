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
from megasync.trainer.agree import agree
from megasync.trainer.agree_wait import PATIENCE, store_gone
from megasync.trainer.carrier import Carrier, GlooCarrier, NcclCarrier, end
from megasync.trainer.gather import writers_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ALL = "all"  # are here: the verdict of a roll call, else those that are not
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
            worker_ended: No thread is inside ``rounds`` and ``carrier`` any more; else they stay until this is called again,
                since a group must not go while a thread waits in it.
        """
        idle = [self.control]
        if worker_ended:
            idle.append(self.rounds)
            if isinstance(self.carrier, NcclCarrier):
                _take_down(self.carrier.group)
        for group in {id(g): g for g in idle if g is not None}.values():
            with suppress(ValueError, RuntimeError):  # gone already: the trainer destroyed all groups before
                dist.destroy_process_group(group)


def make_groups(config: PublishConfig, ranks: list[int] | None) -> Groups | None:
    """Make the groups. *Collective*: every rank of the world must call it.

    Args:
        config: Trainer-side configuration.
        ranks: Global ranks that take part; None for all.

    Returns:
        The groups; None on a rank that does not take part.

    Raises:
        ValueError: ``ranks`` that are none of this world; ``gather=nccl`` without CUDA or NCCL.
        RankFailedError: Naming the ranks that did not come within ``timeout_s``, or what kept one from its NCCL group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Groups(None, None, None)
    world = dist.get_world_size()
    if ranks is not None and (not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(world))):
        raise ValueError(f"ranks={ranks}: expected some of 0 to {world - 1}, each once; None stands for all")
    nccl = config.gather is GatherKind.NCCL
    if nccl and not (torch.cuda.is_available() and dist.is_nccl_available()):
        lacks = "CUDA devices" if not torch.cuda.is_available() else "a torch that was built with NCCL"
        raise ValueError(f"gather=nccl needs {lacks}: use gather=gloo (the default) or gather=direct")
    _roll_call(config.timeout_s)
    control = dist.new_group(ranks, backend="gloo")
    groups = Groups(control, None, None)
    try:
        rounds = dist.new_group(ranks, backend="gloo")
        groups = Groups(control, rounds, GlooCarrier(rounds, config.timeout_s))
        if nccl:
            carrier = _nccl_carrier(config, ranks, control, rounds)
            groups = Groups(control, rounds, carrier)
    except BaseException:
        groups.close()
        raise
    return groups if ranks is None or dist.get_rank() in ranks else None


def _nccl_carrier(
    config: PublishConfig, ranks: list[int] | None, control: ProcessGroup, rounds: ProcessGroup
) -> NcclCarrier | None:
    """A NCCL group of its own, connected before anything trains: see ``carrier``. The ranks agree after each step, so that none
    waits inside NCCL for one that failed. None on a rank that does not take part."""
    world = dist.group.WORLD
    bound = None if world is None else world.bound_device_id  # torch takes no other one then
    device = bound or torch.device("cuda", torch.cuda.current_device())
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # Waits end by the carrier's own deadline; torch's would end the process.
    options._timeout = limit = timedelta(seconds=config.timeout_s) + _WATCHDOG_MARGIN
    group = carrier = error = None
    try:
        group = dist.new_group(ranks, timeout=limit, backend="nccl", pg_options=options, device_id=device)
    except Exception as e:
        error = e
    if ranks is not None and dist.get_rank() not in ranks:
        return None
    try:
        agree(control, error, "making the NCCL group of gather=nccl", config.timeout_s)
        assert group is not None  # else this rank had an error to agree on
        try:
            carrier = NcclCarrier(group, rounds, device, config.timeout_s)
        except Exception as e:
            error = e
        agree(control, error, "taking device memory for gather=nccl", config.timeout_s)
        assert carrier is not None  # the same
        try:
            carrier.connect(writers_of(dist.get_world_size(group), config.num_writers))
        except Exception as e:
            error = e
        agree(control, error, "connecting the ranks of gather=nccl", PATIENCE * config.timeout_s)
    except BaseException:
        if group is not None:
            _take_down(group)
        raise
    return carrier


def _take_down(group: ProcessGroup) -> None:
    """Take a NCCL group down without the others: destroying it alone could wait for them."""
    end(group)
    with suppress(ValueError, RuntimeError):
        dist.destroy_process_group(group)


def _roll_call(timeout_s: float) -> None:
    """Wait for every rank of the world: ``new_group`` waits half an hour for one that is gone, and does not name it.

    One verdict for all, the first that is written. A rank that comes after it comes to the next start, where it meets those that
    try again.
    """
    world = dist.group.WORLD
    assert world is not None  # initialised, says the caller
    store, me, num = world.get_group_store(), dist.get_rank(), dist.get_world_size()
    try:
        # Counted in the store: no state here, and ranks that missed a start catch up.
        while True:
            prefix = f"megasync/start/{store.add(f'megasync/starts/{me}', 1)}"
            verdict, told = f"{prefix}/verdict", f"{prefix}/told"
            if not store.check([told]):
                break
        store.set(f"{prefix}/{me}", "here")
        if store.add(f"{prefix}/count", 1) == num:
            store.compare_set(verdict, "", _ALL)
            store.set(told, "")  # compare_set alone wakes nobody who waits at a TCPStore without libuv
        with suppress(RuntimeError):
            store.wait([told], timedelta(seconds=timeout_s))
        if not store.check([told]):
            silent = [str(r) for r in range(num) if not store.check([f"{prefix}/{r}"])]
            store.compare_set(verdict, "", ",".join(silent) or _ALL)
            store.set(told, "")
        said = store.get(verdict).decode()
    except RuntimeError as e:
        raise RankFailedError("starting a publisher", {}, store_gone(e)) from e
    if said != _ALL:
        why = f"did not come to the start within {timeout_s:g} s: on_train_start() must be called on every rank"
        missing = map(int, said.split(","))
        raise RankFailedError("starting a publisher", dict.fromkeys(missing, f"{why}; see its own log"))
