"""The audit on a GPU: digest sums of whole live tensors through the layout, by kernels, at the speed of memory.

Nothing is copied to the host but the sums. Used by ``audit``, which tallies them over the ranks and compares. Must import
nothing above scatter_layout but kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megasync.errors import BaseMismatchError
from megasync.kernels.records import PackedRecords
from megasync.kernels.walk import audit_
from megasync.kernels.walk_plan import plan_audit
from megasync.receiver.bind import Binding
from megasync.receiver.scatter_layout import DeviceLayout, WordLayout, device_layout, some_layout
from megasync.receiver.sums import Sums
from megasync.schema import names_of


def gpu_of(binding: Binding) -> torch.device | None:
    """The one GPU that holds this rank's weights, tensors in host memory aside; None where the kernels cannot do it: no
    GPU, several, a tensor with copies on both sides, or storage off the boundaries that they need."""
    gpus = {s.device for s in binding.storages.values() if s.device.type == "cuda"}
    aligned = all(s.data_ptr() % 8 == 0 for s in binding.storages.values() if s.device.type == "cuda")
    if len(gpus) != 1 or not aligned:
        return None
    kind = {n: s.device.type for n, s in binding.storages.items()}
    mixed = any(len({kind[r.storage] for r in h.layout.records}) > 1 for h in binding.held.values())
    return None if mixed else gpus.pop()


def split_ids(binding: Binding, ids: Sequence[int]) -> tuple[list[int], list[int], torch.device | None]:
    """Held tensors by where they are audited: on the GPU, on the host; and the GPU."""
    device = gpu_of(binding)
    if device is None:
        return [], list(ids), None
    kind = {n: s.device.type for n, s in binding.storages.items()}
    on_gpu = {i: kind[binding.held[i].layout.records[0].storage] == "cuda" for i in ids}
    return [i for i in ids if on_gpu[i]], [i for i in ids if not on_gpu[i]], device


def device_sums(binding: Binding, ids: Sequence[int], device: torch.device) -> list[Sums]:
    """Digest sums of all live words of some tensors on this rank: primaries by tensor, replicas by ``replica_id``.

    Args:
        binding: The rank.
        ids: Tensors, all on ``device``.
        device: Where they are.

    Raises:
        BaseMismatchError: Copies on this rank differ.
        ValueError: Storage that the kernels cannot address.

    *Stream*: one of its own; waits for the result. *Memory*: tables of about 500 bytes a tensor on the device meanwhile.
    """
    whole = device_layout(binding, device)
    on_device = sum(len(x.ids) for x in whole.words.values())
    layout = whole if len(ids) == on_device else some_layout(binding, device, ids)
    if device.type != "cuda":
        return _sums(layout)
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream(device))
        return _sums(layout)


def _sums(layout: DeviceLayout) -> list[Sums]:
    out: list[Sums] = []
    for words in layout.words.values():
        out.append(Sums(words.ids, _read(words.places)))
        if words.replicas is not None:
            has = np.unique(np.concatenate([g.owners for g in words.replicas.groups]))
            ids = words.ids[has] + len(layout.binding.schema.tensors)
            out.append(Sums(ids, _read(words.replicas)[has]))
        _check_copies(layout, words)
    return out


def _check_copies(layout: DeviceLayout, words: WordLayout) -> None:
    for copy, lead in words.copies:
        wrong = (_read(copy) != _read(lead)).any(axis=1)
        if wrong.any():
            raise BaseMismatchError(
                f"{names_of(layout.binding.schema, words.ids[wrong])}: the engine's copies differ from the first ones: load the "
                "weights anew, or correct the adapter's list of copies"
            )


def _read(records: PackedRecords) -> np.ndarray:
    """uint64 ``[num_tensors, 2]``, sums of the words that a pack marks."""
    lanes = torch.zeros((records.num_tensors, 4), dtype=torch.int64, device=records.device)
    audit_(plan_audit(records), lanes)
    return lanes[:, :2].cpu().numpy().view(np.uint64)
