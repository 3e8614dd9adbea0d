"""vLLM's own loading as a load function of `layout.probe`: its model classes, weight loaders and post-processing.

``loader(vllm_config)`` makes throw-away models, so the live engine is not touched. It works inside a worker, and alone
within ``process_groups``. What it returns are the parameters and buffers of the model by name, as ``ProbedEngine`` has them
of the live one. Written for vLLM 0.32. Before it: the engine's configuration. After it: `layout.probe`.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megasync.errors import MissingPackageError
from megasync.layout.live import LoadFn

try:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype
except ImportError as e:
    raise MissingPackageError(f"vLLM is needed to probe its layouts: pip install 'megasync[vllm]' ({e})") from e

LOCAL = (r".*\._(q|k|v|prob)_scale",)
"""``local`` of the live engine: attention's scales, constants that vLLM registers as weights, unless the checkpoint has
them."""


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a vLLM model by name, tied ones under each of their names."""
    named: dict[str, torch.Tensor] = {n: p.data for n, p in model.named_parameters(remove_duplicate=False)}
    return named | dict(model.named_buffers(remove_duplicate=False))


def load(vllm_config: Any, weights: dict[str, torch.Tensor], *, num_layers: int | None = None) -> torch.nn.Module:
    """Loads canonical tensors into a new model as vLLM does, post-processing included.

    Args:
        vllm_config: ``vllm.config.VllmConfig`` of the engine; not changed.
        weights: Canonical (checkpoint) name to CPU tensor.
        num_layers: Build only so many layers; all by default.

    Returns:
        The model, on the device of the configuration. No engine knows of it.
    """
    config = _apart(vllm_config, num_layers)
    device = torch.device(config.device_config.device)
    with set_default_torch_dtype(config.model_config.dtype), set_current_vllm_config(config):
        with device:
            model: Any = initialize_model(config)
        model.load_weights(iter(weights.items()))
        process_weights_after_loading(model, config.model_config, device)
    found: torch.nn.Module = model.eval()
    return found


def loader(vllm_config: Any, *, num_layers: int | None = None) -> LoadFn:
    """A load function for `layout.probe`.

    Args:
        vllm_config: ``vllm.config.VllmConfig`` of the engine; not changed.
        num_layers: Build only so many layers, for a model too large to have twice: layers of equal shapes have equal
            layouts (``ProbedPlan.renamed`` and ``verify_on``).

    Where post-processing raises on some scales, give `layout.probe` their range: ``values={name: (low, high)}``.
    """
    return lambda weights: live_tensors(load(vllm_config, weights, num_layers=num_layers))


@contextmanager
def process_groups(vllm_config: Any) -> Iterator[None]:
    """vLLM's process groups of one rank, for a process that is no worker; does nothing in one that has them.

    Args:
        vllm_config: Its parallel sizes must all be 1. A model with experts needs a group more than a dense one: open the
            groups with the configuration of the one with experts where a process probes both.
    """
    if parallel_state.model_parallel_is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(vllm_config):
        backend = "nccl" if torch.device(vllm_config.device_config.device).type == "cuda" else "gloo"
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, backend)
        parallel_state.ensure_model_parallel_initialized(1, 1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def _apart(vllm_config: Any, num_layers: int | None) -> Any:
    """A configuration whose layers register themselves in a place of their own, and not with the live engine."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    if num_layers is not None:
        config.model_config = copy.copy(config.model_config)
        config.model_config.hf_config = copy.deepcopy(config.model_config.hf_config)
        config.model_config.hf_text_config = config.model_config.hf_config.get_text_config()
        config.model_config.hf_text_config.num_hidden_layers = num_layers
    return config
