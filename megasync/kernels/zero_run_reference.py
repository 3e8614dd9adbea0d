"""Zero-run blocks in plain torch: the specification of the GPU encoder, and the steps it shares with it.

The rules are those of ``zero_run_rules``. Three steps: find the changed bytes; cut the blocks into sequences, with the
size of each and where its bytes go (work on changed bytes only, a thousandth of the mask, so plain torch on any device);
write every output byte by itself, from the sequence it belongs to. The first and the last step read or write much and
have Triton twins in ``_zero_run_triton``. Must import nothing above kernels, and no triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megasync.kernels.zero_run_rules import END_RULES, MIN_MATCH_NBYTES, BlockKind


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """The sequences of some blocks and where their bytes go; all on the mask's device.

    Attributes:
        literal_start: int32 ``[S]``, mask position of the first literal.
        literal_nbytes: int32 ``[S]``.
        match_nbytes: int32 ``[S]``, 0 in the last sequence of a block.
        header_nbytes: int32 ``[S]``, the block's mask bytes where a Snappy length header goes before it, else 0.
        offsets: int64 ``[S + 1]``, first output byte of each sequence; the last is the size of the output.
        block_bounds: int64 ``[B + 1]``, where each block starts and ends in the output.
    """

    literal_start: torch.Tensor
    literal_nbytes: torch.Tensor
    match_nbytes: torch.Tensor
    header_nbytes: torch.Tensor
    offsets: torch.Tensor
    block_bounds: torch.Tensor


def changed_positions_reference(mask: torch.Tensor) -> torch.Tensor:
    """Positions of the bytes of a mask that are not 0.

    Args:
        mask: uint8 ``[n]``, any device.

    Returns:
        int64, ascending, on the mask's device.
    """
    return torch.nonzero(mask).squeeze(1)


def plan_sequences(kind: BlockKind, positions: torch.Tensor, bounds: torch.Tensor) -> SequencePlan:
    """Cut blocks into sequences and lay out their bytes.

    Args:
        kind: Block format.
        positions: int64 ``[n]``, changed bytes, ascending, inside the bounds.
        bounds: int64 ``[B + 1]``, block bounds in the mask, strictly ascending, on the same device.

    *Stream*: the current stream; waits once, for the number of sequences.
    """
    rule, starts, ends = END_RULES[kind], bounds[:-1], bounds[1:]
    num_blocks, num_entries = len(starts), len(positions)
    block = torch.arange(num_blocks, device=bounds.device)
    first_entry = torch.searchsorted(positions, bounds)
    counts = first_entry.diff()
    # Each entry ends a run of zeros; each block has a trailing run, then an empty one for its last sequence.
    trailing = first_entry[1:] + 2 * block
    closing = trailing + 1
    run_block = torch.repeat_interleave(block, counts + 2, output_size=num_entries + 2 * num_blocks)
    entry_run = torch.arange(num_entries, device=bounds.device)
    entry_run += torch.repeat_interleave(2 * block, counts, output_size=num_entries)
    run_end = torch.empty_like(run_block)
    run_end[entry_run] = positions
    run_end[trailing] = ends
    run_end[closing] = ends
    match_start = torch.roll(run_end, 1) + 2  # past the entry before the run, and past the zero that stays a literal
    match_start[first_entry[:-1] + 2 * block] = starts + 1
    block_end = ends[run_block]
    match_nbytes = torch.minimum(run_end, block_end - rule.last_literals) - match_start
    match_nbytes[(match_nbytes < MIN_MATCH_NBYTES) | (match_start > block_end - rule.match_guard)] = 0
    match_nbytes[closing] = 0
    match_start[closing] = ends
    is_last = torch.zeros_like(match_nbytes, dtype=torch.bool)
    is_last[closing] = True
    chosen = torch.nonzero((match_nbytes > 0) | is_last).squeeze(1)
    match_start, match_nbytes, last = match_start[chosen], match_nbytes[chosen], torch.searchsorted(chosen, closing)
    literal_start = torch.cat((starts[:1], (match_start + match_nbytes)[:-1]))
    literals = match_start - literal_start
    header = torch.zeros_like(literals)
    if kind == "lz4":
        size = 1 + literals + (literals + 240) // 255 + (match_nbytes + 236) // 255 + 2 * (match_nbytes > 0)
    else:
        header[torch.cat((last.new_zeros(1), last[:-1] + 1))] = bounds.diff()
        rest = match_nbytes % 64
        size = _varint_nbytes(header) + _tag_nbytes(literals) + literals
        size += 3 * (match_nbytes // 64) + 2 * (rest > 0) + (rest > 11)
    offsets = torch.cat((size.new_zeros(1), torch.cumsum(size, 0)))
    return SequencePlan(
        literal_start=literal_start.to(torch.int32),
        literal_nbytes=literals.to(torch.int32),
        match_nbytes=match_nbytes.to(torch.int32),
        header_nbytes=header.to(torch.int32),
        offsets=offsets,
        block_bounds=torch.cat((offsets[:1], offsets[last + 1])),
    )


def emit_reference(kind: BlockKind, mask: torch.Tensor, plan: SequencePlan) -> torch.Tensor:
    """The bytes of planned blocks, each output byte from its sequence alone.

    Args:
        kind: Block format.
        mask: uint8 ``[n]``, contiguous.
        plan: Of this mask.

    Returns:
        uint8, all blocks one after the other.
    """
    out = torch.arange(int(plan.offsets[-1]), device=mask.device)
    of = torch.searchsorted(plan.offsets[1:], out, right=True)
    at = out - plan.offsets[of]
    literals, match, header = (x[of].long() for x in (plan.literal_nbytes, plan.match_nbytes, plan.header_nbytes))
    start = plan.literal_start[of].long()
    # Bytes are written in reverse order of precedence: what belongs nearest to a sequence's begin is written last.
    if kind == "lz4":
        extra = (literals + 240) // 255
        literal_at = at - 1 - extra
        match_at = literal_at - literals
        value = torch.where(match_at == (match + 236) // 255 + 1, (match + 236) % 255, 255)
        value = torch.where(match_at == 1, 0, value)
        value = torch.where(match_at == 0, 1, value)
        value = torch.where(match_at < 0, _gather(mask, start + literal_at, literal_at, match_at), value)
        value = torch.where(literal_at < 0, torch.where(at == extra, (literals + 240) % 255, 255), value)
        token = literals.clamp(max=15) * 16 + (match - MIN_MATCH_NBYTES).clamp(0, 15)
        return torch.where(at == 0, token, value).to(torch.uint8)
    tag_nbytes = _tag_nbytes(literals)
    tag_at = at - _varint_nbytes(header)
    literal_at = tag_at - tag_nbytes
    copy_at = literal_at - literals
    num_full, rest = match // 64, match % 64
    tiny = (rest > 0) & (rest < 4)  # no copy is shorter than 4: the full copy before it gives 4 bytes
    length = rest + 4 * tiny
    value = torch.where(rest < 12, (length - 4) * 4 + 1, (length - 1) * 4 + 2)
    full = torch.where(tiny & (copy_at // 3 == num_full - 1), 0xEE, 0xFE)
    value = torch.where(copy_at < 3 * num_full, full, value)
    in_copy = torch.where(copy_at < 3 * num_full, copy_at % 3, copy_at - 3 * num_full)
    value = torch.where(in_copy > 0, 2 - in_copy, value)  # offset 1, then 0
    value = torch.where(copy_at < 0, _gather(mask, start + literal_at, literal_at, copy_at), value)
    tag = torch.where(tag_nbytes == 1, (literals - 1) * 4, (58 + tag_nbytes) * 4)
    tag = torch.where(tag_at > 0, ((literals - 1) >> (8 * (tag_at - 1).clamp(0, 3))) & 255, tag)
    value = torch.where(literal_at < 0, tag, value)
    more = torch.where(at < _varint_nbytes(header) - 1, 128, 0)
    return torch.where(tag_at < 0, ((header >> (7 * at.clamp(0, 3))) & 127) | more, value).to(torch.uint8)


def _gather(mask: torch.Tensor, at: torch.Tensor, literal_at: torch.Tensor, after_at: torch.Tensor) -> torch.Tensor:
    inside = (literal_at >= 0) & (after_at < 0)
    return mask[torch.where(inside, at, 0)].long()


def _varint_nbytes(value: torch.Tensor) -> torch.Tensor:
    return (value > 0).long() + (value >= 1 << 7) + (value >= 1 << 14)


def _tag_nbytes(literals: torch.Tensor) -> torch.Tensor:
    return (literals > 0).long() + (literals > 60) + (literals > 256) + (literals > 65536)
