"""Which backend places and writes: chosen by name, or by one rule, and reported in every result.

``auto`` takes ``cpu`` where all live weights are in host memory; ``mask`` is the plain reference for any device.
Backends of other devices are given as a callable, or named here by their module. Must import nothing above backend.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from megasync.receiver.backend import Backend
from megasync.receiver.bind import Binding

BackendChoice = str | Callable[[Binding], Backend]

_KNOWN: dict[str, tuple[str, str]] = {
    "cpu": ("megasync.receiver.cpu", "CpuBackend"),
    "mask": ("megasync.receiver.dense", "MaskBackend"),
    "scatter": ("megasync.receiver.scatter", "ScatterBackend"),
}
_BY_DEVICE: dict[str, str] = {"cpu": "cpu"}


def make_backend(binding: Binding, choice: BackendChoice) -> Backend:
    """The backend of a bound engine rank.

    Args:
        binding: The rank.
        choice: ``auto``, a known name, or a callable that makes one.

    Raises:
        ValueError: Unknown name, weights on several kinds of device, or a device that no known backend writes.
    """
    if callable(choice):
        return choice(binding)
    if choice == "auto":
        kinds = {d.type for d in binding.devices} or {"cpu"}
        if len(kinds) > 1 or not kinds <= _BY_DEVICE.keys():
            raise ValueError(
                f"no backend writes weights on {sorted(kinds)} by itself (known: {_BY_DEVICE}): name one of "
                f"{', '.join(_KNOWN)} (mask works on any device, slowly), or give a callable"
            )
        choice = _BY_DEVICE[kinds.pop()]
    if choice not in _KNOWN:
        raise ValueError(f"backend {choice!r} is unknown; known: auto, {', '.join(_KNOWN)}")
    module, name = _KNOWN[choice]
    made: Backend = getattr(import_module(module), name)(binding)
    return made
