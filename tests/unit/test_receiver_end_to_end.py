"""Trainer to engine in one process, through the real publishing side: every version lands bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from megasync.adapters.torch_module import TorchModuleEngine
from megasync.adapters.torch_trainer import TensorExporter
from megasync.config import ApplyConfig, PublishConfig
from megasync.receiver.applier import Applier
from megasync.receiver.shadow import same_bytes
from megasync.sinks.local import LocalSink
from megasync.trainer.callback import MegasyncCallback


class Net(nn.Module):
    """Mixed dtypes, a tied head, a scalar, an empty parameter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(300, 48, dtype=torch.bfloat16)
        self.layers = nn.ModuleList([nn.Linear(48, 48, dtype=torch.bfloat16) for _ in range(2)])
        self.head = nn.Linear(48, 300, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.bias = nn.Parameter(torch.randn(64))
        self.scale = nn.Parameter(torch.tensor(float(seed), dtype=torch.float64))
        self.register_buffer("packed", torch.randint(0, 256, (70, 900), dtype=torch.uint8))
        self.register_buffer("none", torch.empty(0, 4))


def step(net: nn.Module, share: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, t in net.state_dict().items():
            if t.numel() and name != "head.weight":
                chosen = torch.rand(t.shape, generator=g) < share
                t[chosen] = (t[chosen].double() * 3 + 1).to(t.dtype)


@pytest.mark.parametrize("codec", ["sparse", "auto", "lz4+zstd"])
@pytest.mark.parametrize("workers", [1, 4])
def test_every_version_lands_bit_for_bit(codec: str, workers: int, tmp_path: Path) -> None:
    trained, served = Net(1), Net(2)
    with LocalSink(tmp_path / "sink") as sink:
        config = PublishConfig(codec=codec, max_first_density=1)
        callback = MegasyncCallback(TensorExporter.of_module(trained), sink, config)
        callback.on_train_start()
        callback.flush()
        engine = TorchModuleEngine(served)
        applier = Applier(engine, sink, ApplyConfig(workers=workers), status_path=tmp_path / "status")
        joined = applier.join()
        assert joined.versions == (0,), "other weights are overwritten by the anchor"
        for n, share in enumerate((0.01, 0.7, 0.0, 1e-3), 1):
            step(trained, share, n)
            assert callback.step_end() == n
            callback.flush()
            applier.update()
            assert (applier.version, engine.version, applier.ready) == (n, n, True)
            for name, t in trained.state_dict().items():
                assert same_bytes(served.state_dict()[name], t), (n, name)
        assert served.head.weight.data_ptr() == served.embed.weight.data_ptr()
        assert applier.audit().version == 4
        callback.on_train_end()
        applier.close()
