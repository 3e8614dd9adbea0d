"""Refuses wrong arguments of ``MegatronExporter`` before anything is planned, in words.

Must not import Megatron, receiver or another adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, get_args

import torch

from megasync.adapters.arguments import kind_of, require_module
from megasync.adapters.megatron_leaves import unwrap
from megasync.adapters.names import NameTable
from megasync.quant.checkpoint import Checkpoint

_WHO = "MegatronExporter"


def checked_chunks(chunks: Any) -> list[Any]:
    """The model chunks as a list.

    Raises:
        TypeError: One chunk instead of a list, or what is no Megatron-core model.
        ValueError: None at all.
    """
    one = isinstance(chunks, torch.nn.Module) and not isinstance(chunks, torch.nn.ModuleList)
    if one or isinstance(chunks, str | Mapping) or not isinstance(chunks, Iterable):
        what = "[model]" if one else "the list that the trainer trains"
        raise TypeError(f"{_WHO} got {kind_of(chunks)} for its chunks, expected a list of model chunks: give {what}")
    found = list(chunks)
    if not found:
        raise ValueError("no model chunks to export: give those of this rank, as they are trained")
    for i, chunk in enumerate(found):
        model = unwrap(chunk)
        require_module(_WHO, model, f"chunk {i}")
        if not hasattr(model, "sharded_state_dict"):
            raise TypeError(
                f"{_WHO} got {kind_of(model)} for chunk {i}, which has no sharded_state_dict(), expected a Megatron-core model: "
                "give the chunk as it is trained, or take TensorExporter.of_module for a plain torch module"
            )
    return found


def check_choices(names: Any, vocab_size: Any, metadata: Any, checkpoint: Any) -> None:
    """Refuse the other arguments where they cannot be what they should.

    Raises:
        TypeError: Another kind.
        ValueError: An impossible vocabulary, or an unknown checkpoint.
    """
    if not isinstance(names, NameTable):
        raise TypeError(
            f"{_WHO} got {kind_of(names)} for names, expected a NameTable: give one of megasync.adapters.names_hf, such as "
            "LLAMA or table(name)"
        )
    if vocab_size is not None and (isinstance(vocab_size, bool) or not isinstance(vocab_size, Integral)):
        raise TypeError(
            f"{_WHO} got {kind_of(vocab_size)} for vocab_size, expected a whole number: give the checkpoint's rows, or None "
            "where nothing is padded"
        )
    if vocab_size is not None and int(vocab_size) < 1:
        raise ValueError(f"vocab_size must be positive, not {vocab_size}")
    if not isinstance(metadata, Mapping):
        raise TypeError(
            f"{_WHO} got {kind_of(metadata)} for metadata, expected a mapping for sharded_state_dict: leave it out, or give one"
        )
    if checkpoint not in get_args(Checkpoint):
        raise ValueError(f"checkpoint {checkpoint!r} is unknown: give one of {', '.join(get_args(Checkpoint))}")
