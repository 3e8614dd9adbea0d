"""How much memory is left: of the host, within the control groups of this process, and of a device.

Read by the memory plan. Linux only; elsewhere the host's room is unknown. Must not import receiver or an adapter.
"""

from __future__ import annotations

import socket
from pathlib import Path, PurePosixPath

import torch

_V2, _V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
_UNLIMITED = 1 << 60


def host_room(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still take on its host.

    The least of ``MemAvailable`` and of what each control group above the process leaves, its page cache counted as free.

    Args:
        root: Where ``proc`` and ``sys`` are mounted.

    Returns:
        Bytes, or None where the system does not tell.
    """
    found = [n for n in (_available(root), *_group_rooms(root)) if n is not None]
    return min(found) if found else None


def _available(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    values = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return values[0] << 10 if values else None


def _group_rooms(root: Path) -> list[int]:
    """What is left below each limit, for both versions of control groups."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    out: list[int] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            names = ("memory.max", "memory.current", ("inactive_file", "active_file"))
            out += _rooms(root / _V2, path, *names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
            out += _rooms(root / _V1, path, *names)
    return out


def _rooms(mount: Path, path: str, limit: str, usage: str, cached: tuple[str, ...]) -> list[int]:
    """Rooms of a group and of all above it; inside a container the mount itself is the group."""
    out = []
    inner = PurePosixPath(path.lstrip("/"))
    for group in {mount, *(mount / p for p in (inner, *inner.parents))}:
        try:
            most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
            if most == "max" or int(most) >= _UNLIMITED:
                continue
            stat = dict(x.split() for x in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        out.append(max(0, int(most) - used + sum(int(stat.get(name, 0)) for name in cached)))
    return out


def device_room(device: torch.device) -> int | None:
    """Bytes that this process can still take on a device: free ones, and whole unused segments of torch's allocator.

    Returns:
        Bytes, or None for the CPU.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    held = {k: stats.get(f"{k}_bytes.all.current", 0) for k in ("reserved", "active", "inactive_split")}
    return int(free + max(0, held["reserved"] - held["active"] - held["inactive_split"]))


def host_name(root: Path = Path("/")) -> str:
    """What ranks of one host have in common."""
    try:
        boot = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


def device_name(device: torch.device) -> str:
    """What ranks that share a device of a host have in common; empty for the CPU."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device))
