"""Any torch module as an engine: names, rules, casts, tied weights, and everything that does not fit listed at plan
time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import nn

from megasync.adapters.torch_module import TorchModuleEngine, rename
from megasync.adapters.torch_module_sketch import Sketch, cat, stack
from megasync.config import ApplyConfig
from megasync.errors import BaseMismatchError, PlanError, RetryError, TaintedError, UndoneError
from megasync.receiver.applier import Applier
from megasync.sinks.memory import MemorySink
from megasync.types import TensorSpec
from tests.unit.publishing import Publisher, changed, make_schema, spec
from tests.unit.receiving import BrokenBackend

DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16", torch.int64: "I64"}


class Net(nn.Module):
    """A tied head, a cache, a persistent buffer and a frozen-by-nobody bias."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 16, dtype=dtype)
        self.proj = nn.Linear(16, 24, dtype=dtype)
        self.head = nn.Linear(16, 40, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("inv_freq", torch.arange(8).float(), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids) + self.proj(self.embed(ids))[..., :16])


def words_of(tensor: torch.Tensor) -> np.ndarray:
    size = tensor.element_size()
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw.view(f"<u{size}").reshape(tuple(tensor.shape) or (1,)).copy()


def run_of(tensors: Mapping[str, torch.Tensor], **more: object) -> tuple[list[TensorSpec], dict[str, np.ndarray]]:
    specs = [spec(n, DTYPES[t.dtype], tuple(t.shape), **more) for n, t in tensors.items()]
    return specs, {n: words_of(t) for n, t in tensors.items()}


def publish(specs: list[TensorSpec], words: dict[str, np.ndarray]) -> Publisher:
    publisher = Publisher(MemorySink(), make_schema("run", specs), frame_changed=50)
    publisher.checkpoint(words)
    return publisher


def canonical(net: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint of the module holds: tied weights once."""
    return {n: t for n, t in net.state_dict().items() if n != "head.weight"}


@pytest.mark.parametrize("aliases", [(), ("head.weight",)])
def test_case_82_tied_head_without_its_own_tensor(aliases: tuple[str, ...]) -> None:
    net = Net()
    specs, words = run_of(canonical(net))
    specs = [spec(t.name, t.dtype, t.shape, aliases=aliases if t.name == "embed.weight" else ()) for t in specs]
    publisher = publish(specs, words)
    engine = TorchModuleEngine(net)
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1))
    assert applier.join().version == 0
    address = net.head.weight.data_ptr()
    new = changed(words, 0.3)
    publisher.delta(new)
    result = applier.update()
    assert result.num_written == publisher.newest.num_changed  # type: ignore[union-attr]
    assert net.head.weight.data_ptr() == net.embed.weight.data_ptr() == address
    np.testing.assert_array_equal(words_of(net.head.weight), new["embed.weight"])
    np.testing.assert_array_equal(words_of(net.steps), new["steps"])  # type: ignore[arg-type]
    assert torch.equal(net.inv_freq, torch.arange(8).float())  # type: ignore[arg-type]
    assert engine.version == 1


def test_warm_update_equals_cold_load() -> None:
    net, other = Net(), Net()
    specs, words = run_of(canonical(net))
    publisher = publish(specs, words)
    applier = Applier(TorchModuleEngine(net), publisher.sink, ApplyConfig(workers=1))
    applier.join()
    new = changed(words, 0.4)
    publisher.delta(new)
    applier.update()
    state = {
        n: torch.from_numpy(w.view(np.uint8)).view(t.dtype).view(t.shape)
        for (n, w), t in zip(((n, new[n]) for n in canonical(net)), canonical(net).values(), strict=True)
    }
    other.load_state_dict(state, strict=False)
    ids = torch.arange(12)
    assert torch.equal(net(ids), other(ids))


def test_case_75_caches_are_left_out_by_rule() -> None:
    net = Net()
    specs, words = run_of(canonical(net))
    assert "inv_freq" not in words
    publisher = publish(specs, words)
    applier = Applier(TorchModuleEngine(net), publisher.sink, ApplyConfig(workers=1))
    applier.join()
    net.inv_freq.mul_(3)  # type: ignore[operator]
    assert applier.audit().num_tensors == len(specs)


def test_case_24_57_everything_that_does_not_resolve_is_listed() -> None:
    net = Net()
    tensors = canonical(net) | {"extra.weight": torch.zeros(3), "more.bias": torch.zeros(2)}
    del tensors["proj.bias"]
    specs, words = run_of(tensors)
    publisher = publish(specs, words)
    with pytest.raises(PlanError) as found:
        Applier(TorchModuleEngine(net), publisher.sink, ApplyConfig(workers=1)).join()
    assert "names that lead to no live tensor: extra.weight, more.bias" in str(found.value)
    assert "live weights that no tensor of the run reaches: proj.bias" in str(found.value)


def test_exclusions_and_local_weights_are_said_by_rule() -> None:
    net = Net()
    tensors = canonical(net) | {"mtp.weight": torch.zeros(3)}
    del tensors["proj.bias"]
    specs, words = run_of(tensors)
    publisher = publish(specs, words)
    engine = TorchModuleEngine(net, exclude={r"mtp\..*": "no draft model"}, local=[r".*\.bias"])
    result = Applier(engine, publisher.sink, ApplyConfig(workers=1)).join()
    assert (result.version, result.excluded) == (0, ("mtp.weight",))


def test_empty_parameter_and_other_shape_are_refused() -> None:
    net = Net()
    specs, words = run_of(canonical(net))
    publisher = publish(specs, words)
    net.proj.weight = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
    with pytest.raises(
        PlanError, match=r"proj\.weight is live torch\.bfloat16\[0\], made of \['BF16'\] \[\(24, 16\)\]"
    ):
        Applier(TorchModuleEngine(net), publisher.sink, ApplyConfig(workers=1)).join()


def test_module_in_a_wider_dtype_is_cast_and_in_a_narrower_one_refused() -> None:
    net, wide = Net(), Net(torch.float32)
    wide.load_state_dict({n: t.float() if t.is_floating_point() else t for n, t in net.state_dict().items()})
    specs, words = run_of(canonical(net))
    publisher = publish(specs, words)
    applier = Applier(TorchModuleEngine(wide), publisher.sink, ApplyConfig(workers=1))
    assert applier.join().version == 0
    new = changed(words, 0.3)
    publisher.delta(new)
    result = applier.update()
    assert sorted(result.derived) == ["cast of embed.weight", "cast of proj.bias", "cast of proj.weight"]
    for n, t in canonical(wide).items():
        expected = torch.from_numpy(new[n].view(np.uint8)).view(dict(canonical(net))[n].dtype).view(t.shape)
        assert torch.equal(t, expected.to(t.dtype)), n
    half = Net(torch.float16)
    with pytest.raises(PlanError, match="loses bits"):
        Applier(TorchModuleEngine(half), publisher.sink, ApplyConfig(workers=1)).join()


def test_rules_rename_and_relay() -> None:
    """An engine with its own names and a transposed, fused projection."""

    class Fused(nn.Module):
        def __init__(self, q: torch.Tensor, k: torch.Tensor, norm: torch.Tensor) -> None:
            super().__init__()
            self.qk = nn.Parameter(torch.cat((q, k)).t().contiguous())
            self.n = nn.Parameter(norm.clone())

    torch.manual_seed(1)
    tensors = {"layers.0.q": torch.randn(8, 6), "layers.0.k": torch.randn(4, 6), "layers.0.norm": torch.randn(6)}
    specs, words = run_of(tensors)
    fused = Fused(*tensors.values())

    def qk(t: TensorSpec):  # type: ignore[no-untyped-def]
        where = {"layers.0.q": 0, "layers.0.k": 8}
        if t.name not in where:
            return None
        place = lambda s: s._then(lambda x: x.concat(0, offset=where[t.name], total=12), (12, 6)).t()  # noqa: E731
        return "qk", place

    publisher = publish(specs, words)
    engine = TorchModuleEngine(fused, rules=[qk, rename(r"layers\.(\d)\.norm", "n")])
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1))
    assert applier.join().version == 0
    new = changed(words, 0.3)
    publisher.delta(new)
    applier.update()
    expected = np.concatenate((new["layers.0.q"], new["layers.0.k"])).T
    np.testing.assert_array_equal(words_of(fused.qk), expected)
    np.testing.assert_array_equal(words_of(fused.n), new["layers.0.norm"])


def test_serving_holds_one_version_and_refuses_tainted_weights() -> None:
    net = Net()
    specs, words = run_of(canonical(net))
    publisher = publish(specs, words)
    engine = TorchModuleEngine(net, pause_timeout_s=0.05)
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1))
    applier.join()
    publisher.delta(changed(words, 0.3))
    with engine.serving(), pytest.raises(RetryError, match="did not end"):
        applier.update()
    with engine.serving() as version:  # it went on
        assert version == 0
    assert applier.version == 0
    applier.update()
    with engine.serving() as version:
        assert version == 1
    engine.quarantine("torn")
    with pytest.raises(TaintedError, match="torn"), engine.serving():
        pass


def test_failed_update_of_a_module_with_casts_is_undone() -> None:
    net, wide = Net(), Net(torch.float32)
    wide.load_state_dict({n: t.float() if t.is_floating_point() else t for n, t in net.state_dict().items()})
    specs, words = run_of(canonical(net))
    publisher = publish(specs, words)
    engine = TorchModuleEngine(wide)
    applier = Applier(
        engine, publisher.sink, ApplyConfig(workers=1), backend=lambda b: BrokenBackend(b, write_fails_after=1)
    )
    applier.join()
    before = {n: t.clone() for n, t in wide.state_dict().items()}
    publisher.delta(changed(words, 0.3))
    with pytest.raises(UndoneError):
        applier.update()
    assert all(torch.equal(before[n], t) for n, t in wide.state_dict().items())


def test_inference_mode_and_gradients_do_not_matter() -> None:
    with torch.inference_mode():
        net = Net()
        ids = torch.arange(5)
        first = net(ids).clone()
    specs, words = run_of(canonical(net))
    publisher = publish(specs, words)
    applier = Applier(TorchModuleEngine(net), publisher.sink, ApplyConfig(workers=1))
    applier.join()
    new = changed(words, 0.5)
    publisher.delta(new)
    applier.update()
    np.testing.assert_array_equal(words_of(net.proj.weight), new["proj.weight"])
    with torch.inference_mode():
        assert not torch.equal(net(ids), first)


def test_weights_of_another_checkpoint_are_found_by_content() -> None:
    net = Net()
    specs, words = run_of(canonical(net))
    publisher = publish(specs, words)
    with torch.no_grad():
        net.proj.weight[0, 0] += 1
    with pytest.raises(BaseMismatchError, match=r"proj\.weight"):
        Applier(TorchModuleEngine(net), publisher.sink, ApplyConfig(workers=1)).join()


def sketch_words(sketch: Sketch, words: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Run a sketch's layouts over real words."""
    from megasync.layout.evaluate import xor_

    size = int(np.prod(sketch.shape))
    live = torch.zeros(size * 4, dtype=torch.uint8)
    strides = torch.empty(sketch.shape, device="meta").stride()
    for p in sketch.parts:
        layout = p.layout("live", 0, strides)
        inside = tuple(slice(a, b) for a, b in zip(p.start, p.stop, strict=True))
        part = words[p.name].reshape(p.shape)[inside].contiguous().reshape(-1).view(torch.uint8)
        xor_(layout, {"live": live}, part)
    return live.view(torch.int32).view(sketch.shape)


def test_sketches_follow_torch() -> None:
    torch.manual_seed(0)
    words = {n: torch.randint(0, 1 << 30, (6, 8), dtype=torch.int32) for n in "abcd"}
    sketches = {n: Sketch.of(n, (6, 8), 4) for n in words}

    def programs(x):  # type: ignore[no-untyped-def]
        a, b, c, d = x.values()
        yield torch.stack([a, b, c])
        yield torch.cat([torch.stack([a, b]), torch.stack([c, d])], dim=1)
        yield torch.transpose(torch.stack([a, b], dim=1), dim0=0, dim1=2).contiguous()
        yield torch.chunk(a, 2, dim=0)[1]
        yield torch.split(a, [1, 5], dim=0)[1].t()
        yield a.reshape(3, 2, 8).transpose(0, 1).reshape(6, 8)
        yield a.reshape(48)
        yield a.reshape(2, -1, 4)
        yield torch.cat([a, b], dim=-1).permute(1, 0)
        yield a.unsqueeze(0).squeeze(0)
        yield torch.stack([a.t(), b.t()]).flatten()

    for real, sketch in zip(programs(words), programs(sketches), strict=True):
        assert tuple(real.shape) == tuple(sketch.shape)
        assert torch.equal(sketch_words(sketch, words), real.contiguous())


def test_sketches_refuse_what_is_no_step_of_a_layout() -> None:
    a, b = Sketch.of("a", (4, 4), 4), Sketch.of("b", (4, 2), 4)
    for bad in (
        lambda: torch.add(a, a),
        lambda: a.float(),
        lambda: torch.nn.functional.pad(a, (0, 1)),
        lambda: a.t().narrow(0, 0, 1),
        lambda: a.reshape(3, 5),
        lambda: stack([a, b]),
        lambda: cat([a, Sketch.of("c", (2, 3), 4)], dim=0),
    ):
        with pytest.raises(PlanError, match="a"):
            bad()
