"""Engine adapters by name; other packages add theirs through the entry-point group ``megasync.engines``.

An entry point's name is the adapter's name, its value a callable that takes the live model and keyword options and gives an
``Engine``. Adapters are imported when first asked for. Must not import an engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from megasync.receiver.engine import Engine

GROUP = "megasync.engines"
_BUILT_IN = {
    "torch_module": "megasync.adapters.torch_module:TorchModuleEngine",
    "hugging_face": "megasync.adapters.torch_module_hf:TransformersEngine",
}


def known_engines() -> dict[str, str]:
    """Name and place of every adapter.

    Raises:
        ValueError: Two packages claim one name.
    """
    found = dict(_BUILT_IN)
    for entry in entry_points(group=GROUP):
        if found.get(entry.name, entry.value) != entry.value:
            raise ValueError(f"engine adapter {entry.name!r} is claimed by {found[entry.name]} and {entry.value}")
        found[entry.name] = entry.value
    return found


def make_engine(name: str, model: Any, **options: Any) -> Engine:
    """An engine over a live model.

    Args:
        name: Adapter name.
        model: What the adapter takes: a torch module for the built-in ones.
        **options: Arguments of the adapter.

    Raises:
        ValueError: Unknown name; the message lists the known ones.
    """
    known = known_engines()
    if name not in known:
        raise ValueError(f"engine adapter {name!r} is unknown; known: {', '.join(sorted(known))}")
    module, _, attribute = known[name].partition(":")
    factory: Callable[..., Engine] = getattr(importlib.import_module(module), attribute)
    return factory(model, **options)
