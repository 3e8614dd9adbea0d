"""The specification of audit and dense XOR, in plain torch: what the Triton kernels must equal bit for bit.

Walks every box word by word through the packed records. Must import nothing of megasync but kernels.
"""

from __future__ import annotations

import torch

from megasync.kernels.planes import WORD_DTYPES
from megasync.kernels.scatter_reference import coordinates_reference, remap_reference, touch_reference
from megasync.kernels.walk_plan import WalkPlan
from megasync.kernels.weights import change_terms_reference, word_terms_reference

_CHUNK = 1 << 18


def walk_reference(
    plan: WalkPlan, mask: torch.Tensor | None, lanes: torch.Tensor | None, *, write: bool = True, after: bool = False
) -> None:
    """Digests the boxes of a plan, or XORs masks into them and digests what changes.

    Args:
        plan: The boxes.
        mask: uint8 ``[n]``, the decoded masks; None only reads.
        lanes: int64 ``[num_tensors, 4]``, added to: sums of all words into columns 0 and 1, or with a mask sums of
            the old words that change into 0 and 1 and of new minus old into 2 and 3. None sums nothing.
        write: With a mask: XOR it in, else only read.
        after: With a mask: sums of the words that change as they are after the XOR, into columns 0 and 1, instead.
    """
    records = plan.records
    w, device = records.word_nbytes, records.device
    words = None if mask is None else mask[: mask.numel() // w * w].view(WORD_DTYPES[w])
    for group, boxes in plan.boxes:
        parts = 2 * w if group.nibble else 1
        for i, record in enumerate(boxes.record.tolist()):
            low, high = torch.from_numpy(boxes.low[i]).to(device), torch.from_numpy(boxes.high[i]).to(device)
            for at in range(0, int((high - low).prod()), _CHUNK):
                count = min(_CHUNK, int((high - low).prod()) - at)
                position = torch.arange(at, at + count, device=device)
                coords = coordinates_reference(low.expand(count, -1), (high - low).expand(count, -1), position)
                value = torch.zeros(count, dtype=torch.int64, device=device)
                if words is not None and boxes.tile_start is not None and boxes.tile_extent is not None:
                    index = torch.zeros_like(position)
                    for a, x in enumerate(coords):
                        index = index * int(boxes.tile_extent[i][a]) + x - int(boxes.tile_start[i][a])
                    value = words[index + int(boxes.mask[i]) // w].to(torch.int64)
                    value = value if w == 8 else value & ((1 << (8 * w)) - 1)
                storage = records.storages[int(group.storage[record])]
                for part in range(parts):
                    rows = torch.full((count,), record, dtype=torch.int64, device=device)
                    inside, offset, flat = remap_reference(group, rows, coords, part, parts)
                    change = (value >> (4 * part)) & 15 if group.nibble else value
                    if mask is not None:
                        # Old sums are of whole touched words, nibbles that stay included.
                        inside &= (change if lanes is None else value) != 0
                    change = change[inside]
                    old = touch_reference(storage, offset[inside], change, w, group.nibble, write and mask is not None)
                    if lanes is not None and int(group.rows[record, 2]):
                        bit = 4 * part if group.nibble else None
                        if after:
                            terms = word_terms_reference(flat[inside], old ^ change, w, bit).sum(0)
                        else:
                            terms = change_terms_reference(flat[inside], old, old ^ change, w, bit).sum(0)
                        lanes[int(group.owners[record]), : len(terms)] += terms
