import pytest
import torch

from megasync.adapters.registry import known_engines, make_engine
from megasync.adapters.torch_module import TorchModuleEngine


def test_built_in_adapters_are_found_by_name() -> None:
    assert {"torch_module", "hugging_face"} <= known_engines().keys()
    engine = make_engine("torch_module", torch.nn.Linear(3, 4), local=["bias"])
    assert isinstance(engine, TorchModuleEngine)


def test_an_unknown_adapter_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="hugging_face, torch_module"):
        make_engine("sglang9", torch.nn.Linear(3, 4))
