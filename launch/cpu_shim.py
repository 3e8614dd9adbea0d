"""Lets megatron-core train on CPU tensors and gloo, for the demo and for tests on machines without a GPU.

megatron-core names CUDA in many places where only "the device of this rank" is meant. ``install()`` answers them with
the CPU: one torch-function mode rewrites ``device="cuda"`` and ``.cuda()``, ``torch.cuda`` streams, events and random
state become stand-ins, and a few small parts that exist only as CUDA or TransformerEngine code get torch versions
(launch/cpu_attention.py has the larger one). No Megatron file is changed. Written for megatron-core 0.16.1 and 0.19.2;
0.19 also needs an importable ``triton``, though nothing of it runs.

Call it once per process, before anything is built. It changes ``torch.cuda`` for the whole process and refuses to run
where CUDA works. megasync itself never imports this module: it takes devices from the parameters it is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_installed: _CpuForCuda | None = None


def install() -> None:
    """Make megatron-core run on the CPU in this process. Calling it again does nothing.

    The mode is active in the calling thread only: build and train the model in the thread that installed it.

    Raises:
        ValueError: CUDA is available here: train on it instead.
        ImportError: megatron-core is not installed.
    """
    global _installed
    if _installed is not None:
        return
    if torch.cuda.is_available():
        raise ValueError("the CPU shim is for machines without CUDA; this one has it: do not install the shim")
    # Megatron compiles small functions; on a CPU that costs seconds a process and gains nothing.
    torch.compiler.set_stance("force_eager")
    _patch_torch_cuda()
    _patch_megatron()
    _installed = _CpuForCuda()
    _installed.__enter__()


class _CpuForCuda(TorchFunctionMode):
    """Rewrites what names CUDA in calls of torch functions."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if "device" in given:
            given["device"] = _on_cpu(given["device"])
        if given.get("pin_memory"):
            given["pin_memory"] = False
        if func is torch.Tensor.to:
            args = (args[0], *(_on_cpu(a) for a in args[1:]))
        result = func(*args, **given)
        if func is torch.Tensor.type and isinstance(result, str):
            # The optimizers accept only parameters whose type() is one of torch.cuda.*Tensor.
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _on_cpu(device: Any) -> Any:
    """The CPU for anything that means a CUDA device, else the argument itself."""
    named = isinstance(device, str) and device.startswith("cuda")
    return _CPU if named or (isinstance(device, torch.device) and device.type == "cuda") else device


class _Null:
    """Stands for a CUDA stream or event: accepts every method, orders nothing, since CPU work is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Null:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self


def _patch_torch_cuda() -> None:
    def get_state(device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: Any = None, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    replacements: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "current_stream": lambda *a, **k: _Null(),
        "default_stream": lambda *a, **k: _Null(),
        "set_stream": lambda *a, **k: None,
        "stream": lambda *a, **k: contextlib.nullcontext(),
        "Stream": _Null,
        "Event": _Null,
        "synchronize": lambda *a, **k: None,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": get_state,
        "set_rng_state": set_state,
        "manual_seed": torch.manual_seed,
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = get_state


def _patch_megatron() -> None:
    from megatron.core.models import backends
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from launch.cpu_attention import CpuCoreAttention

    megatron_random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    WrappedTorchNorm.__new__ = staticmethod(_torch_norm)
    # Megatron's own local attention asserts that there is no context parallelism, and knows no MLA head sizes.
    backends.LocalSpecProvider.core_attention = lambda self: CpuCoreAttention
    token_dispatcher.maybe_move_tensor_to_cpu = _splits_to_numpy
    if not hasattr(moe_utils, "te_general_gemm"):
        # 0.16.1 reads the name even where TransformerEngine, which defines it, is absent.
        moe_utils.te_general_gemm = None
    if not isinstance(multi_latent_attention.TELinear, type):
        # 0.16.1 takes its own stand-ins for absent TransformerEngine classes for the real ones.
        multi_latent_attention.HAVE_TE = False


def _torch_norm(
    cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *args: Any, **kwargs: Any
) -> torch.nn.Module:
    """A torch norm that also serves sequence parallelism: its weight asks for the all-reduce of gradients over TP."""
    norm_class = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    norm: torch.nn.Module = norm_class(hidden_size, eps=eps, dtype=config.params_dtype)
    parameter: Any
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def _splits_to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Token counts as the collectives want them; Megatron converts only what lies on a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
