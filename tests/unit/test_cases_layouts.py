"""Cases that users of such systems reported, layouts: live bytes after updates against what the engine's own loader makes
of the new weights, restated in plain torch (layout_oracles), through the whole receiver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from megasync.adapters.torch_module import TorchModuleEngine
from megasync.config import ApplyConfig
from megasync.errors import BaseMismatchError, PlanError
from megasync.layout import probe
from megasync.layout.compose import arrange
from megasync.layout.modes import Layout
from megasync.receiver.applier import Applier
from megasync.receiver.engine import Derivation
from megasync.sinks.memory import MemorySink
from megasync.types import TensorSpec
from tests.unit.layout_oracles import ALL, FP8, U8
from tests.unit.publishing import Publisher, changed, make_schema, random_words, spec
from tests.unit.receiving import PlainEngine, identity, live, words_of

DTYPES = {torch.bfloat16: "BF16", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}
Words = Mapping[str, np.ndarray]
Tensors = Mapping[str, torch.Tensor]


def tensors_of(specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]], words: Words) -> dict[str, torch.Tensor]:
    return {
        n: torch.from_numpy(words[n].copy().view(np.uint8).reshape(-1)).view(d).view(s) for n, (s, d) in specs.items()
    }


def raw(t: torch.Tensor) -> bytes:
    return t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def follow(
    specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    load: Callable[[Tensors], dict[str, torch.Tensor]],
    places: Mapping[str, Layout],
    steps: int = 3,
    groups: tuple[Derivation, ...] = (),
) -> PlainEngine:
    """Apply a few versions to what ``load`` made of the first one; live bytes must be what it makes of each new one."""
    rows = [spec(n, DTYPES[d], s) for n, (s, d) in specs.items()]
    words = random_words(rows)
    publisher = Publisher(MemorySink(), make_schema("run", rows), frame_changed=200)
    publisher.checkpoint(words)
    engine = PlainEngine(load(tensors_of(specs, words)), places, groups=groups)
    addresses = {n: t.data_ptr() for n, t in engine.live.items()}
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1))
    assert applier.join().version == 0
    for v in range(1, steps + 1):
        words = changed(words, 0.02 if v % 2 else 0.7, seed=v)
        publisher.delta(words)
        applier.update()
        for n, t in load(tensors_of(specs, words)).items():
            assert raw(engine.live[n]) == raw(t), f"{n} at version {v}"
            assert engine.live[n].data_ptr() == addresses[n]
    applier.audit()
    return engine


@pytest.mark.parametrize(
    "name", ["nvfp4-dense-trtllm", "moe-nvfp4-trtllm-weights", "moe-nvfp4-trtllm-scales", "marlin"]
)
def test_case_36_shuffled_fp4_weights_are_followed_exactly(name: str) -> None:
    case = next(c for c in ALL if c.name == name)
    follow(case.specs, case.load, case.layouts)


def drops_low_bits(w: torch.Tensor) -> torch.Tensor:
    """Of both codes in a byte: different weights become the same."""
    return w.view(U8).flip(0) & 0xEE


def drops_signs(w: torch.Tensor) -> torch.Tensor:
    """A scale is positive, says the kernel; for all bytes that a probe would spell positions with, that is a move."""
    return (w.view(U8).flip(0) & 0x7F).view(w.dtype)


@pytest.mark.parametrize(("repack", "dtype"), [(drops_low_bits, U8), (drops_signs, FP8)])
def test_case_36_a_one_way_repack_is_refused_before_any_write(
    repack: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    """No inverse exists, so no delta can land."""
    shape = (32, 24)
    plan = probe(lambda w: {"w": repack(w["w"])}, {"w": (shape, dtype)}, num_draws=1)
    assert plan.mapped == frozenset()
    assert "w" in plan.unmapped
    # An adapter that maps it all the same is found out by content, before anything is written.
    rows = [spec("w", DTYPES[dtype], shape)]
    words = random_words(rows)
    publisher = Publisher(MemorySink(), make_schema("run", rows))
    publisher.checkpoint(words)
    (loaded,) = tensors_of({"w": (shape, dtype)}, words).values()
    engine = PlainEngine({"w": repack(loaded)}, {"w": arrange(shape, word_nbytes=1).reverse(0).to("w")})
    before = raw(engine.live["w"])
    with pytest.raises(BaseMismatchError, match="1 tensors differ from version 0, the closest: w"):
        Applier(engine, publisher.sink, ApplyConfig(workers=1)).join()
    assert raw(engine.live["w"]) == before
    assert engine.events == []


def test_case_44_the_update_path_needs_no_loader_of_the_layer() -> None:
    """A channel-FP8 layer whose parameter was re-wrapped, transposed and without its loader, after the first load."""
    rows = [spec("proj.weight", "F8_E4M3", (24, 16)), spec("proj.weight_scale", "F32", (24, 1))]
    words = random_words(rows)

    class Layer(nn.Module):
        def __init__(self, w: torch.Tensor, s: torch.Tensor) -> None:
            super().__init__()
            loaded = nn.Parameter(w, requires_grad=False)
            loaded.weight_loader = lambda *_: pytest.fail("the loader was called")  # type: ignore[attr-defined]
            self.weight = nn.Parameter(loaded.view(U8).t().contiguous().view(FP8), requires_grad=False)
            self.weight_scale = nn.Parameter(s, requires_grad=False)

    specs = {"proj.weight": ((24, 16), FP8), "proj.weight_scale": ((24, 1), torch.float32)}
    root = nn.Module()
    root.proj = Layer(*tensors_of(specs, words).values())
    assert not hasattr(root.proj.weight, "weight_loader")

    def transposed(t: TensorSpec):  # type: ignore[no-untyped-def]
        return ("proj.weight", lambda s: s.t()) if t.name == "proj.weight" else None

    publisher = Publisher(MemorySink(), make_schema("run", rows))
    publisher.checkpoint(words)
    applier = Applier(TorchModuleEngine(root, rules=[transposed]), publisher.sink, ApplyConfig(workers=1))
    applier.join()
    for v in (1, 2):
        words = changed(words, 0.3, seed=v)
        publisher.delta(words)
        applier.update()
        np.testing.assert_array_equal(root.proj.weight.detach().view(U8).t().numpy(), words["proj.weight"])
        np.testing.assert_array_equal(words_of(root.proj.weight_scale), words["proj.weight_scale"])


def test_case_48_a_four_dimensional_expert_stack_is_refused_without_a_rule_and_mapped_with_one() -> None:
    experts, rows_of, cols = 3, 32, 24
    rows = [spec(f"experts.{e}.w", "BF16", (rows_of, cols)) for e in range(experts)]
    words = random_words(rows)

    def pack(words: Words) -> torch.Tensor:
        stacked = torch.stack([live(words[t.name]) for t in rows])
        return stacked.view(experts, rows_of // 16, 16, cols).transpose(2, 3).contiguous()

    net = nn.Module()
    net.w = nn.Parameter(pack(words).view(torch.bfloat16), requires_grad=False)
    publisher = Publisher(MemorySink(), make_schema("run", rows))
    publisher.checkpoint(words)
    naive = [lambda t: ("w", lambda s: s)]
    with pytest.raises(PlanError, match=r"w is live torch\.bfloat16\[3, 2, 24, 16\], made of .*\(32, 24\)"):
        Applier(TorchModuleEngine(net, rules=naive), publisher.sink, ApplyConfig(workers=1)).join()

    def rule(t: TensorSpec):  # type: ignore[no-untyped-def]
        slot = int(t.name.split(".")[1])

        def place(s):  # type: ignore[no-untyped-def]
            tiles = s.reshape(rows_of // 16, 16, cols).permute(0, 2, 1)
            return tiles._then(lambda x: x.stack(slot, experts), (experts, *tiles.shape))

        return "w", place

    applier = Applier(TorchModuleEngine(net, rules=[rule]), publisher.sink, ApplyConfig(workers=1))
    assert applier.join().version == 0
    for v in (1, 2):
        words = changed(words, 0.2, seed=v)
        publisher.delta(words)
        applier.update()
        assert torch.equal(net.w.view(torch.int16), pack(words))


HEADS, NOPE, VALUE, RANK, HIDDEN = 3, 8, 6, 16, 20
MLA = {
    "layers.0.q_a_proj": ((12, HIDDEN), torch.bfloat16),
    "layers.0.kv_a_proj_with_mqa": ((RANK + 4, HIDDEN), torch.bfloat16),
    "layers.0.kv_b_proj": ((HEADS * (NOPE + VALUE), RANK), torch.bfloat16),
}


def load_mla(w: Tensors) -> dict[str, torch.Tensor]:
    """One fused first projection; kv_b as it is, and absorbed into two batched matrices."""
    q_a, kv_a, kv_b = w.values()
    heads = kv_b.view(HEADS, NOPE + VALUE, RANK)
    return {
        "fused_qkv_a": torch.cat((q_a, kv_a)),
        "kv_b": kv_b.clone(),
        "w_kc": heads[:, :NOPE].contiguous(),
        "w_vc": heads[:, NOPE:].transpose(1, 2).contiguous(),
    }


def mla_places(absorbed: bool) -> dict[str, Layout]:
    q_a, kv_a, kv_b = (arrange(shape, word_nbytes=2) for shape, _ in MLA.values())
    rows = 12 + RANK + 4
    first = kv_b.to("kv_b")
    copies = []
    for h in range(HEADS if absorbed else 0):
        at = h * (NOPE + VALUE)
        shape = MLA["layers.0.kv_b_proj"][0]
        k = arrange(shape, word_nbytes=2, start=(at, 0), stop=(at + NOPE, RANK))
        v = arrange(shape, word_nbytes=2, start=(at + NOPE, 0), stop=(at + NOPE + VALUE, RANK))
        copies += k.stack(h, HEADS).to("w_kc", primary=False).records
        copies += v.permute((1, 0)).stack(h, HEADS).to("w_vc", primary=False).records
    return {
        "layers.0.q_a_proj": q_a.concat(0, offset=0, total=rows).to("fused_qkv_a"),
        "layers.0.kv_a_proj_with_mqa": kv_a.concat(0, offset=12, total=rows).to("fused_qkv_a"),
        "layers.0.kv_b_proj": replace(first, records=(*first.records, *copies)),
    }


def test_case_49_absorbed_weights_follow_kv_b_as_copies() -> None:
    follow(MLA, load_mla, mla_places(absorbed=True))


def test_case_49_absorbed_weights_follow_kv_b_as_a_derivation() -> None:
    """As engines do that keep them in another dtype: derived again from the canonical bytes, in place."""

    def load(w: Tensors) -> dict[str, torch.Tensor]:
        return {n: t.float() if n.startswith("w_") else t for n, t in load_mla(w).items()}

    def derive(x: Tensors) -> Tensors:
        heads = x["layers.0.kv_b_proj"].view(HEADS, NOPE + VALUE, RANK)
        return {"w_kc": heads[:, :NOPE].float(), "w_vc": heads[:, NOPE:].transpose(1, 2).float()}

    group = Derivation("absorbed kv_b of layer 0", ("layers.0.kv_b_proj",), ("w_kc", "w_vc"), derive)
    follow(MLA, load, mla_places(absorbed=False), groups=(group,))


def test_case_49_a_stale_absorbed_weight_is_found_by_audit() -> None:
    engine = follow(MLA, load_mla, mla_places(absorbed=True), steps=1)
    rows = [spec(n, "BF16", s) for n, (s, _) in MLA.items()]
    cut = {"q": engine.live["fused_qkv_a"][:12], "kv": engine.live["fused_qkv_a"][12:], "b": engine.live["kv_b"]}
    words = {t.name: words_of(x) for t, x in zip(rows, cut.values(), strict=True)}
    publisher = Publisher(MemorySink(), make_schema("run", rows))
    publisher.checkpoint(words)
    engine.live["w_vc"].view(torch.int16)[1, 2, 3] ^= 1
    with pytest.raises(BaseMismatchError, match=r"layers\.0\.kv_b_proj"):
        Applier(engine, publisher.sink, ApplyConfig(workers=1)).join()


def test_case_89_a_merged_weight_gets_its_new_value_at_its_old_address() -> None:
    """A convolution with its scale merged in, and a kernel's global scale; replayed graphs read the old addresses."""
    specs = {"conv.weight": ((6, 10), torch.float32), "conv.gain": ((6, 1), torch.float32)}
    rows = [spec(n, "F32", s) for n, (s, _) in specs.items()]
    words = random_words(rows)

    def merge(x: Tensors) -> dict[str, torch.Tensor]:
        w = x["conv.weight"] * x["conv.gain"]
        return {"merged": w, "alpha": w.abs().amax().reshape(1) / 448}

    group = Derivation("merged convolution", tuple(specs), ("merged", "alpha"), merge)
    publisher = Publisher(MemorySink(), make_schema("run", rows))
    publisher.checkpoint(words)
    engine = PlainEngine(merge(tensors_of(specs, words)), groups=[group], seeds=words)
    captured = {n: t.view(-1) for n, t in engine.live.items()}  # what a captured graph holds: addresses
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1))
    applier.join()
    for touched in (["conv.gain"], list(specs)):
        words = {n: (w.view(np.float32) * (1.5 if n in touched else 1)).view(np.uint32) for n, w in words.items()}
        publisher.delta(words)
        before = {n: raw(t) for n, t in captured.items()}
        assert applier.update().derived == ("merged convolution",)
        for n, t in merge(tensors_of(specs, words)).items():
            assert raw(captured[n]) == raw(t) != before[n], n
            assert engine.live[n].data_ptr() == captured[n].data_ptr()


def test_case_36_identity_of_plain_tensors_is_not_assumed_for_shuffled_ones() -> None:
    """The same shape and dtype, other order: an identity plan is refused by content."""
    case = next(c for c in ALL if c.name == "nvfp4-dense-trtllm")
    shape, dtype = case.specs["w"]
    t = spec("w", DTYPES[dtype], (256, shape[1]))
    words = random_words([t])
    publisher = Publisher(MemorySink(), make_schema("run", [t]))
    publisher.checkpoint(words)
    shuffled = case.load({"w": live(words["w"][:200]), "s": torch.zeros(200, 10, dtype=FP8)})
    live_w = next(x for x in shuffled.values() if tuple(x.shape) == (256, shape[1]))
    engine = PlainEngine({"w": live_w}, {"w": identity(t)})
    with pytest.raises(BaseMismatchError, match="the closest: w"):
        Applier(engine, publisher.sink, ApplyConfig(workers=1)).join()
