"""megasync: new weights from a trainer into live rollout engines, as XOR deltas applied in place, bit for bit.

The names below are the public ones. They are imported when first used, so that a rollout host never loads trainer code
and the ``megasync`` command never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megasync.adapters.megatron import MegatronExporter
    from megasync.adapters.torch_module import TorchModuleEngine
    from megasync.adapters.torch_trainer import TensorExporter
    from megasync.config import ApplyConfig, GatherKind, OnError, PublishConfig, SnapshotPlace, WhenFull
    from megasync.layout import probe
    from megasync.receiver.applier import Applier
    from megasync.receiver.engine import Engine
    from megasync.sinks import Sink, open_sink
    from megasync.trainer.callback import MegasyncCallback
    from megasync.trainer.exporter import Exporter, Piece
    from megasync.types import Box, TensorSpec

__version__ = "0.1.0"

_HOME = {
    "Applier": "megasync.receiver.applier",
    "ApplyConfig": "megasync.config",
    "Box": "megasync.types",
    "Engine": "megasync.receiver.engine",
    "Exporter": "megasync.trainer.exporter",
    "GatherKind": "megasync.config",
    "MegasyncCallback": "megasync.trainer.callback",
    "MegatronExporter": "megasync.adapters.megatron",
    "OnError": "megasync.config",
    "Piece": "megasync.trainer.exporter",
    "PublishConfig": "megasync.config",
    "Sink": "megasync.sinks",
    "SnapshotPlace": "megasync.config",
    "TensorExporter": "megasync.adapters.torch_trainer",
    "TensorSpec": "megasync.types",
    "TorchModuleEngine": "megasync.adapters.torch_module",
    "WhenFull": "megasync.config",
    "open_sink": "megasync.sinks",
    "probe": "megasync.layout",
}

__all__ = [
    "Applier",
    "ApplyConfig",
    "Box",
    "Engine",
    "Exporter",
    "GatherKind",
    "MegasyncCallback",
    "MegatronExporter",
    "OnError",
    "Piece",
    "PublishConfig",
    "Sink",
    "SnapshotPlace",
    "TensorExporter",
    "TensorSpec",
    "TorchModuleEngine",
    "WhenFull",
    "open_sink",
    "probe",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'megasync' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
