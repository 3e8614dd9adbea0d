"""Every engine passes the engine contract (megasync.receiver.contract)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from megasync.adapters.torch_module import TorchModuleEngine
from megasync.layout.experts import Place, w2_stack, w13_interleaved
from megasync.receiver.contract import CHECKS, EngineCase
from megasync.receiver.dense import MaskBackend
from megasync.receiver.engine import Engine
from tests.unit.publishing import make_schema, random_words, spec
from tests.unit.receiving import PlainEngine, identity, live, load

Words = Mapping[str, np.ndarray]
DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}


def moe() -> EngineCase:
    """Stacked, interleaved experts beside plain tensors."""
    specs = [spec("embed", "BF16", (50, 24)), spec("layers.0.scale", "F32", ()), spec("layers.0.norm", "F32", (24,))]
    places = {t.name: identity(t) for t in specs}
    for e in range(3):
        for part in ("gate", "up"):
            t = spec(f"layers.0.experts.{e}.{part}", "U8", (96, 40))
            specs.append(t)
            places[t.name] = w13_interleaved(part, t.shape, Place(e, 3), "w13", word_nbytes=1)  # type: ignore[arg-type]
        t = spec(f"layers.0.experts.{e}.down", "U8", (40, 96), cut="last")
        specs.append(t)
        places[t.name] = w2_stack(t.shape, Place(e, 3), "w2", word_nbytes=1)
    words = random_words(specs)
    storages = {t.name: live(words[t.name]) for t in specs[:3]}
    storages["w13"] = torch.zeros(3 * 2 * 128 * 40, dtype=torch.uint8)
    storages["w2"] = torch.zeros(3 * 40 * 96, dtype=torch.uint8)
    return EngineCase(make_schema("run", specs), words, lambda w: PlainEngine(load(places, storages, w), places))


def moe_by_masks() -> EngineCase:
    """The same through the reference backend."""
    return replace(moe(), backend=MaskBackend)


def to_tensor(words: np.ndarray, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(words.copy().view(np.uint8).reshape(-1)).view(dtype).view(like.shape)


def module(wide: bool) -> EngineCase:
    """A torch module in the run's dtype, or in single precision (shadows and casts)."""

    class Net(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.a = nn.Linear(24, 30, dtype=dtype)
            self.b = nn.Linear(30, 8, dtype=dtype)
            self.register_buffer("cache", torch.zeros(3), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    names = {n: tuple(t.shape) for n, t in Net(torch.bfloat16).state_dict().items()}
    specs = [spec(n, "BF16", shape) for n, shape in names.items()]
    dtype = torch.float32 if wide else torch.bfloat16

    def make(words: Words) -> Engine:
        net = Net(dtype)
        state = net.state_dict()
        net.load_state_dict({n: to_tensor(words[n], t, torch.bfloat16).to(dtype) for n, t in state.items()})
        x = torch.linspace(-1, 1, 48).view(2, 24).to(dtype)

        def observe() -> bytes:
            with torch.inference_mode():
                return net(x).float().numpy().tobytes()

        return TorchModuleEngine(net, observe=observe)

    return EngineCase(make_schema("run", specs), random_words(specs), make)


def transformers_moe() -> EngineCase:
    """A tiny Qwen3-MoE, whose live experts are stacked and fused by transformers' own loader."""
    transformers = pytest.importorskip("transformers")
    from megasync.adapters.torch_module_hf import TransformersEngine

    config = transformers.Qwen3MoeConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        decoder_sparse_step=1,
        dtype=torch.bfloat16,
    )

    def fresh() -> nn.Module:
        made: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        return made

    from transformers.core_model_loading import revert_weight_conversion

    model = fresh()
    state = revert_weight_conversion(model, dict(model.state_dict()))
    specs = [spec(n, DTYPES[t.dtype], tuple(t.shape)) for n, t in state.items()]

    def make(words: Words) -> Engine:
        net = fresh()
        for expert in ("gate_up_proj", "down_proj"):
            stacked = getattr(net.model.layers[0].mlp.experts, expert)  # type: ignore[union-attr,index]
            for e in range(3):
                parts = ("gate_proj", "up_proj") if expert == "gate_up_proj" else ("down_proj",)
                rows = [f"model.layers.0.mlp.experts.{e}.{p}.weight" for p in parts]
                stacked.data[e] = torch.cat([to_tensor(words[n], state[n], torch.bfloat16) for n in rows])
        own = net.state_dict()
        for n, t in own.items():
            if n in words:
                t.copy_(to_tensor(words[n], t, t.dtype))
        return TransformersEngine(net)

    return EngineCase(make_schema("run", specs), random_words(specs), make)


CASES: dict[str, Callable[[], EngineCase]] = {
    "plain-moe": moe,
    "plain-moe-masks": moe_by_masks,
    "module": lambda: module(False),
    "module-wide": lambda: module(True),
    "transformers-moe": transformers_moe,
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_engine(case: Callable[[], EngineCase], check: Callable[[EngineCase], None]) -> None:
    check(case())


def test_the_suite_finds_engines_that_break_the_contract() -> None:
    """An engine that forgets a tensor, one that moves, one that resumes a tainted engine."""
    good = moe()

    def forgets(words: Words) -> Engine:
        engine = good.load(words)
        real = engine.layouts
        engine.layouts = lambda schema: {n: x for n, x in real(schema).items() if n != "embed"}  # type: ignore[method-assign]
        return engine

    for bad, check in (
        (forgets, CHECKS[0]),
        (forgets, CHECKS[1]),
    ):
        with pytest.raises(Exception, match="embed"):
            check(EngineCase(good.schema, good.words, bad))

    def wrong_place(words: Words) -> Engine:
        engine = good.load(words)
        engine.live["w2"].view(3, 40, 96)[0] = 0  # type: ignore[attr-defined]
        return engine

    with pytest.raises(Exception, match="experts"):
        CHECKS[1](EngineCase(good.schema, good.words, wrong_place))


class Stale:
    """Engines that hold the weights once more: outside what updates write, or outside what is told."""

    def __init__(self, kind: str) -> None:
        self.good, self.kind = moe(), kind

    def load(self, words: Words) -> Engine:
        engine = self.good.load(words)
        live = engine.live  # type: ignore[attr-defined]
        packed: list[bytes] = []

        def output() -> bytes:
            if not packed:
                packed.append(live["w13"].numpy().tobytes())
            seen = packed[0] if self.kind == "packed" else live["w13"].numpy().tobytes()
            rest = [live[n].numpy().tobytes() for n in ("embed", "w2", "layers.0.norm", "layers.0.scale")]
            return seen + b"".join(rest[1:] if self.kind == "unread" else rest)

        engine.output = output  # type: ignore[attr-defined]
        if self.kind == "transpose":
            live["embed.t"] = live["embed"].view(50, 24).t().contiguous()
        if self.kind in ("noise", "right"):
            live["noise"], live["zeros"] = torch.randn(7), torch.zeros(3)
        return engine


def failed(kind: str) -> set[str]:
    out = set()
    for check in CHECKS:
        stale = Stale(kind)
        try:
            check(EngineCase(stale.good.schema, stale.good.words, stale.load))
        except AssertionError:
            out.add(check.__name__)
    return out


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("right", set()),
        ("noise", set()),
        ("transpose", {"check_no_live_tensor_is_left_behind"}),
        ("packed", {"check_observation_follows_the_weights"}),
        ("unread", {"check_weights_are_what_it_computes_with"}),
    ],
)
def test_the_suite_finds_second_copies_and_packed_ones(kind: str, found: set[str]) -> None:
    assert failed(kind) == found
