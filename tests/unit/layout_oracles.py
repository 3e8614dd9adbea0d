"""What engines do to weights at load, restated in plain torch from the engines' documented behaviour.

Each case has canonical tensors, a loader that makes the live tensors of one rank, and the named layouts that must describe it.
The loaders share no code with megasync: they slice, stack, permute and index as the engines' Python does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megasync.layout import Layout, arrange, with_copies
from megasync.layout import experts as E
from megasync.layout import named as N

BF16, U8, FP8, F32, I32 = torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.float32, torch.int32
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    specs: dict[str, tuple[tuple[int, ...], torch.dtype]]
    layouts: dict[str, Layout]
    load: Callable[[Tensors], dict[str, torch.Tensor]]


def raw(t: torch.Tensor) -> torch.Tensor:
    """FP8 as bytes: indexing and padding of FP8 tensors is not implemented everywhere."""
    return t.contiguous().view(torch.uint8) if t.dtype == FP8 else t


def pad_to(t: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    out = torch.zeros(rows, cols, dtype=t.dtype)
    out[: t.shape[0], : t.shape[1]] = t
    return out


def up(n: int, multiple: int) -> int:
    return (n + multiple - 1) // multiple * multiple


def swizzle_blockscale(t: torch.Tensor) -> torch.Tensor:
    """128x4: rows padded to 128, columns to 4, then 32x4x4 tiles."""
    m, k = up(t.shape[0], 128), up(t.shape[1], 4)
    padded = pad_to(t, m, k).reshape(m // 128, 4, 32, k // 4, 4)
    return padded.permute(0, 3, 2, 1, 4).contiguous().reshape(m, k)


MAP_16 = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
MAP_32 = [
    *[0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27],
    *[4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31],
]


def shuffle_matrix(t: torch.Tensor, table: list[int]) -> torch.Tensor:
    """Old row ``i`` of a block goes to row ``table[i]`` of the block."""
    out = torch.empty_like(t)
    size = len(table)
    for old in range(t.shape[0]):
        out[old // size * size + table[old % size]] = t[old]
    return out


def interleave_halves(t: torch.Tensor) -> torch.Tensor:
    """Row ``i`` of the first half goes to ``2 i``, of the second half to ``2 i + 1``."""
    out, half = torch.empty_like(t), t.shape[0] // 2
    out[0::2], out[1::2] = t[:half], t[half:]
    return out


def interleave_groups(first: torch.Tensor, second: torch.Tensor, group: int) -> torch.Tensor:
    rows = up(first.shape[0], group)
    parts = []
    for lo in range(0, rows, group):
        for half in (first, second):
            parts.append(pad_to(half[lo : lo + group], group, half.shape[1]))
    return torch.cat(parts)


def block_layout(t: torch.Tensor, block: int) -> torch.Tensor:
    m, k = t.shape
    return t.reshape(m, k // block, block).permute(1, 0, 2).contiguous()


def marlin_repack(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K/2], low nibble = even k, to Marlin int32 [K/16, 2 N], through the reference permutation tables."""
    n, k = packed.shape[0], packed.shape[1] * 2
    q = torch.stack((packed & 15, packed >> 4), dim=-1).reshape(n, k).t().to(torch.int32)
    perm = []
    for i in range(32):
        one = []
        col = i // 4
        for block in (0, 1):
            for row in (2 * (i % 4), 2 * (i % 4) + 1, 2 * (i % 4 + 4), 2 * (i % 4 + 4) + 1):
                one.append(16 * row + col + 8 * block)
        for j in range(4):
            perm += [p + 256 * j for p in one]
    table = torch.tensor(perm).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
    q = q.reshape(k // 16, 16, n // 16, 16).permute(0, 2, 1, 3).reshape(k // 16, n * 16)
    q = q.reshape(-1, 1024)[:, table].reshape(k // 16, n * 16)
    out = torch.zeros(k // 16, n * 2, dtype=torch.int64)
    for i in range(8):
        out |= q[:, i::8].to(torch.int64) << (4 * i)
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32)


def cpu_pack(t: torch.Tensor) -> torch.Tensor:
    """Tiles of 16 rows, K-major inside; the shape stays."""
    n, k = t.shape
    return t.reshape(n // 16, 16, k).permute(0, 2, 1).contiguous().reshape(n, k)


def qkv_case(tp_rank: int, tp_size: int, kv_heads: int, head: int = 8, heads: int = 8, hidden: int = 24) -> Case:
    q_shape, kv_shape = (heads * head, hidden), (kv_heads * head, hidden)
    names = {"q": q_shape, "k": kv_shape, "v": kv_shape}

    def load(w: Tensors) -> dict[str, torch.Tensor]:
        q = w["q"][tp_rank * heads * head // tp_size :][: heads * head // tp_size]
        if kv_heads >= tp_size:
            rows = [slice(tp_rank * kv_heads // tp_size * head, (tp_rank + 1) * kv_heads // tp_size * head)] * 2
        else:
            mine = tp_rank // (tp_size // kv_heads)
            rows = [slice(mine * head, (mine + 1) * head)] * 2
        return {"qkv": torch.cat([q, w["k"][rows[0]], w["v"][rows[1]]])}

    layouts = {
        p: N.fused_qkv(
            p,
            q_shape=q_shape,
            kv_shape=kv_shape,
            num_kv_heads=kv_heads,
            word_nbytes=2,
            storage="qkv",
            tp_rank=tp_rank,
            tp_size=tp_size,
        )
        for p in ("q", "k", "v")
    }
    return Case(f"qkv-tp{tp_size}r{tp_rank}-kv{kv_heads}", {n: (s, BF16) for n, s in names.items()}, layouts, load)


def dense_cases() -> list[Case]:
    cases = [qkv_case(0, 1, 2), qkv_case(1, 2, 2), qkv_case(2, 4, 2), qkv_case(3, 4, 2), qkv_case(3, 4, 8)]
    shape, half = (48, 40), {"gate": ((48, 40), BF16), "up": ((48, 40), BF16)}
    for rank in (0, 1):
        rows, cols = slice(24 * rank, 24 * (rank + 1)), slice(20 * rank, 20 * (rank + 1))
        cases.append(
            Case(
                f"gate-up-r{rank}",
                dict(half),
                {
                    p: N.fused_gate_up(p, shape, word_nbytes=2, storage="gate_up", tp_rank=rank, tp_size=2)
                    for p in ("gate", "up")
                },
                lambda w, rows=rows: {"gate_up": torch.cat([w["gate"][rows], w["up"][rows]])},
            )
        )
        cases.append(
            Case(
                f"row-parallel-r{rank}",
                {"o": (shape, BF16)},
                {"o": N.row_parallel(shape, word_nbytes=2, storage="o", tp_rank=rank, tp_size=2)},
                lambda w, cols=cols: {"o": w["o"][:, cols].contiguous()},
            )
        )
    for rank in range(4):
        # 70 words padded to 128: rank 2 holds 6 of its 32 rows, rank 3 none.
        def vocab(w: Tensors, rank: int = rank) -> dict[str, torch.Tensor]:
            out = torch.zeros(32, 12, dtype=BF16)
            mine = w["embed"][32 * rank : 32 * (rank + 1)]
            out[: mine.shape[0]] = mine
            return {"embed": out}

        layout = N.vocab_parallel((70, 12), word_nbytes=2, storage="embed", tp_rank=rank, tp_size=4)
        cases.append(Case(f"vocab-r{rank}", {"embed": ((70, 12), BF16)}, {"embed": layout}, vocab))
    cases += [
        Case(
            "norm-and-tied",
            {"norm": ((40,), BF16), "embed": ((30, 8), BF16), "scale": ((), F32)},
            {
                "norm": N.replicated((40,), word_nbytes=2, storage="norm"),
                "embed": arrange((30, 8), word_nbytes=2).to("embed"),
                "scale": N.replicated((), word_nbytes=4, storage="scale"),
            },
            _tied,
        ),
        Case(
            "nvfp4-dense-cutlass",
            {"w": ((50, 40), U8), "s": ((50, 5), FP8)},
            {
                "w": N.padded_matrix(arrange((50, 40), word_nbytes=1), "w"),
                "s": N.swizzled_scales(arrange((50, 5), word_nbytes=1), "s"),
            },
            lambda w: {"w": pad_to(w["w"], 64, 64), "s": swizzle_blockscale(raw(w["s"])).view(FP8)},
        ),
        Case(
            "nvfp4-dense-trtllm",
            {"w": ((200, 40), U8), "s": ((200, 10), FP8)},
            {
                "w": N.shuffled_rows(arrange((200, 40), word_nbytes=1), "w"),
                "s": N.shuffled_swizzled_scales(arrange((200, 10), word_nbytes=1), "s"),
            },
            lambda w: {
                "w": shuffle_matrix(pad_to(w["w"], 256, 40), MAP_32),
                "s": swizzle_blockscale(shuffle_matrix(pad_to(raw(w["s"]), 256, 10), MAP_32)).view(FP8),
            },
        ),
        Case(
            "fp8-transposed",
            {"w": ((24, 40), FP8)},
            {"w": N.transposed(arrange((24, 40), word_nbytes=1), "w")},
            lambda w: {"w": raw(w["w"]).t().contiguous().view(FP8)},
        ),
        Case(
            "fp8-transposed-view",
            {"w": ((24, 40), FP8)},
            {"w": arrange((24, 40), word_nbytes=1).to("w")},
            lambda w: {"w": raw(w["w"]).clone().view(FP8).t()},
        ),
        Case(
            "marlin",
            {"w": ((128, 24), U8)},
            {"w": N.marlin_nibbles((128, 24), storage="w")},
            lambda w: {"w": marlin_repack(w["w"])},
        ),
        Case(
            "swizzle-160x450-tp-slice",
            {"s": ((320, 450), U8)},
            {
                "s": N.swizzled_scales(
                    N.cut_evenly((320, 450), 0, word_nbytes=1, tp_rank=1, tp_size=2).interleave(0, 64, 1), "s"
                )
            },
            lambda w: {"s": swizzle_blockscale(interleave_groups(torch.zeros(160, 450, dtype=U8), w["s"][160:], 64))},
        ),
    ]
    return cases


def _tied(w: Tensors) -> dict[str, torch.Tensor]:
    embed = w["embed"].clone()
    return {"norm": w["norm"].clone(), "embed": embed, "lm_head": embed, "scale": w["scale"].clone()}


def moe_case(
    name: str,
    *,
    inner: int,
    hidden: int,
    dtype: torch.dtype,
    w13: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    w2: Callable[[torch.Tensor], torch.Tensor],
    w13_layout: Callable[..., Layout],
    w2_layout: Callable[..., Layout],
    tp_rank: int = 0,
    tp_size: int = 1,
) -> Case:
    """Three experts, stacked; the loaders get the rank's raw rows and columns."""
    specs, layouts = {}, {}
    for e in range(3):
        place = E.Place(e, 3, tp_rank, tp_size)
        for part in ("gate", "up"):
            specs[f"{e}.{part}"] = ((inner, hidden), dtype)
            layouts[f"{e}.{part}"] = w13_layout(part, (inner, hidden), place, "w13")
        specs[f"{e}.down"] = ((hidden, inner), dtype)
        layouts[f"{e}.down"] = w2_layout((hidden, inner), place, "w2")
    rows = slice(inner // tp_size * tp_rank, inner // tp_size * (tp_rank + 1))

    def load(w: Tensors) -> dict[str, torch.Tensor]:
        a = [w13(raw(w[f"{e}.gate"])[rows], raw(w[f"{e}.up"])[rows]) for e in range(3)]
        b = [w2(raw(w[f"{e}.down"])[:, rows]) for e in range(3)]
        return {"w13": torch.stack(a), "w2": torch.stack(b)}

    return Case(name, specs, layouts, load)


def expert_cases() -> list[Case]:
    def w2_plain(nbytes: int) -> Callable[..., Layout]:
        return lambda s, p, st: E.w2_stack(s, p, st, word_nbytes=nbytes)

    def w2_steps(nbytes: int, steps: E.Steps, **pads: int) -> Callable[..., Layout]:
        return lambda s, p, st: E.stacked(E.w2_rows(s, p, word_nbytes=nbytes, **pads), p, st, steps)

    def w13_steps(nbytes: int, order: E.Order, steps: E.Steps, **pads: int) -> Callable[..., Layout]:
        return lambda part, s, p, st: E.stacked(
            E.w13_rows(part, s, p, word_nbytes=nbytes, order=order, **pads), p, st, steps
        )

    return [
        moe_case(
            "moe-triton-gate-first-tp2",
            inner=24,
            hidden=20,
            dtype=BF16,
            tp_rank=1,
            tp_size=2,
            w13=lambda g, u: torch.cat([g, u]),
            w2=lambda d: d.contiguous(),
            w13_layout=lambda part, s, p, st: E.w13_stack(part, s, p, st, word_nbytes=2),
            w2_layout=w2_plain(2),
        ),
        moe_case(
            "moe-cutlass-w31",
            inner=24,
            hidden=20,
            dtype=BF16,
            w13=lambda g, u: torch.cat([u, g]),
            w2=lambda d: d,
            w13_layout=lambda part, s, p, st: E.w13_stack(part, s, p, st, word_nbytes=2, order="up_first"),
            w2_layout=w2_plain(2),
        ),
        moe_case(
            "moe-cutedsl-groups-of-64-scales",
            inner=320,
            hidden=18,
            dtype=FP8,
            tp_rank=0,
            tp_size=2,
            w13=lambda g, u: swizzle_blockscale(interleave_groups(u, g, 64)),
            w2=lambda d: swizzle_blockscale(d),
            w13_layout=lambda part, s, p, st: E.w13_interleaved(part, s, p, st, word_nbytes=1, scales=True),
            w2_layout=w2_steps(1, E.swizzled),
        ),
        moe_case(
            "moe-megamoe-groups-of-16",
            inner=40,
            hidden=12,
            dtype=U8,
            w13=lambda g, u: interleave_groups(g, u, 16),
            w2=lambda d: d,
            w13_layout=lambda part, s, p, st: E.w13_interleaved(
                part, s, p, st, word_nbytes=1, group=16, order="gate_first"
            ),
            w2_layout=w2_plain(1),
        ),
        moe_case(
            "moe-nvfp4-cutlass-scales",
            inner=160,
            hidden=10,
            dtype=FP8,
            w13=lambda g, u: swizzle_blockscale(torch.cat([g, u])),
            w2=lambda d: swizzle_blockscale(d),
            w13_layout=w13_steps(1, "gate_first", E.swizzled),
            w2_layout=w2_steps(1, E.swizzled),
        ),
        moe_case(
            "moe-nvfp4-trtllm-weights",
            inner=100,
            hidden=24,
            dtype=U8,
            w13=lambda g, u: shuffle_matrix(
                interleave_halves(torch.cat([pad_to(u, 128, 32), pad_to(g, 128, 32)])), MAP_32
            ),
            w2=lambda d: shuffle_matrix(pad_to(d, 256, 128), MAP_32),
            w13_layout=lambda part, s, p, st: E.w13_trtllm(
                part, s, p, st, word_nbytes=1, steps=E.shuffled_32, col_multiple=32
            ),
            w2_layout=w2_steps(1, E.shuffled_32, row_multiple=256, col_multiple=128),
        ),
        moe_case(
            "moe-nvfp4-trtllm-scales",
            inner=100,
            hidden=7,
            dtype=FP8,
            w13=lambda g, u: swizzle_blockscale(
                shuffle_matrix(interleave_halves(torch.cat([pad_to(u, 128, 7), pad_to(g, 128, 7)])), MAP_32)
            ),
            w2=lambda d: swizzle_blockscale(shuffle_matrix(pad_to(d, 256, 100), MAP_32)),
            w13_layout=lambda part, s, p, st: E.w13_trtllm(part, s, p, st, word_nbytes=1, steps=E.shuffled_32_swizzled),
            w2_layout=w2_steps(1, E.shuffled_32_swizzled, row_multiple=256),
        ),
        moe_case(
            "moe-bf16-trtllm-block-major",
            inner=128,
            hidden=128,
            dtype=BF16,
            w13=lambda g, u: block_layout(shuffle_matrix(interleave_halves(torch.cat([u, g])), MAP_32), 64),
            w2=lambda d: block_layout(shuffle_matrix(d, MAP_32), 64),
            w13_layout=lambda part, s, p, st: E.w13_trtllm(part, s, p, st, word_nbytes=2, steps=E.block_major(32, 64)),
            w2_layout=w2_steps(2, E.block_major(32, 64)),
        ),
        moe_case(
            "moe-deepseek-fp8-trtllm",
            inner=64,
            hidden=256,
            dtype=FP8,
            w13=lambda g, u: block_layout(shuffle_matrix(torch.cat([u, g]), MAP_16), 128),
            w2=lambda d: block_layout(shuffle_matrix(d, MAP_16), 32),
            w13_layout=w13_steps(1, "up_first", E.block_major(16, 128)),
            w2_layout=w2_steps(1, E.block_major(16, 32)),
        ),
        moe_case(
            "moe-cpu-tiles",
            inner=32,
            hidden=48,
            dtype=BF16,
            w13=lambda g, u: cpu_pack(torch.cat([g, u])),
            w2=lambda d: cpu_pack(d),
            w13_layout=w13_steps(2, "gate_first", E.cpu_tiles),
            w2_layout=w2_steps(2, E.cpu_tiles),
        ),
    ]


def two_images_case() -> Case:
    """A block scale held both plain and swizzled."""
    plain = arrange((130, 6), word_nbytes=1)
    layout = with_copies(plain.to("plain"), plain.swizzle_128x4().to("image"))
    return Case(
        "two-images",
        {"s": ((130, 6), FP8)},
        {"s": layout},
        lambda w: {"plain": raw(w["s"]).clone().view(FP8), "image": swizzle_blockscale(raw(w["s"])).view(FP8)},
    )


ALL = [*dense_cases(), *expert_cases(), two_images_case()]
