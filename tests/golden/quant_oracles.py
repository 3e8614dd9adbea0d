"""The published quantisers of TransformerEngine, nvidia-modelopt and compressed-tensors, where they can be found.

None of them is needed to run the tests: golden files hold what they gave. Where a package is on the path, the live tests
compare with it. The first two are loaded from one file each, since the whole packages need CUDA libraries; the few names
that the file imports from the rest of its package are stubs that hold no arithmetic of quantising.

``python -m tests.golden.quant_oracles`` writes the golden files anew from the packages on the path.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.golden.quant_inputs import DTYPES, inputs

GOLDEN = Path(__file__).parent
# Returns codes (packed), scale bytes and the global number that the library keeps: amax, decode scale or encode scale.
Oracle = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
FORMULAS = {
    "te-2d": "transformer_engine",
    "te-1d": "transformer_engine",
    "modelopt-1d": "modelopt",
    "compressed-tensors-1d": "compressed_tensors",
}


def _folder(package: str) -> Path | None:
    """Where a package lies, without importing it."""
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


@contextmanager
def _stubs(modules: dict[str, ModuleType]) -> Iterator[None]:
    before = {n: sys.modules.get(n) for n in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def _stub(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []
    module.__dict__.update(names)
    return module


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _transformer_engine(tile: tuple[int, int]) -> Oracle | None:
    folder = _folder("transformer_engine")
    recipes = folder / "pytorch" / "custom_recipes" if folder else None
    if recipes is None or not (recipes / "reference_nvfp4.py").exists():
        return None

    class Quantizer:
        def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    te = "transformer_engine"
    gemm = _stub(f"{te}.pytorch.custom_recipes.gemm", MMParams=object, GEMMType=SimpleNamespace(FPROP=0))
    stubs = {
        te: _stub(te),
        f"{te}.pytorch": _stub(f"{te}.pytorch"),
        f"{te}.pytorch.custom_recipes": _stub(f"{te}.pytorch.custom_recipes", gemm=gemm),
        gemm.__name__: gemm,
        f"{te}.pytorch.quantized_tensor": _stub("qt", Quantizer=Quantizer, QuantizedTensorStorage=object),
        f"{te}.pytorch.custom_recipes.reference_utils": _stub("unused"),
        f"{te}.pytorch.custom_recipes.reference_nvfp4": _stub("unused"),
    }
    with _stubs(stubs):
        utils = _load(f"{te}.pytorch.custom_recipes.reference_utils", recipes / "reference_utils.py")
        stubs[f"{te}.pytorch.custom_recipes"].reference_utils = utils  # type: ignore[attr-defined]
        module = _load(f"{te}.pytorch.custom_recipes.reference_nvfp4", recipes / "reference_nvfp4.py")
    make = module.NVFP4QuantizerRef(dtype=utils.Fp4Formats.E2M1, rowwise=True, columnwise=False, quant_tile_shape=tile)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out = make.quantize(x)
        return out.data, out.scale.view(torch.uint8), out.global_amax_row

    return run


def _modelopt() -> Oracle | None:
    folder = _folder("modelopt")
    path = folder / "torch" / "quantization" / "qtensor" / "nvfp4_tensor.py" if folder else None
    if path is None or not path.exists():
        return None

    class Base:
        def __init__(self, shape: torch.Size, dtype: torch.dtype, data: torch.Tensor) -> None:
            self._quantized_data = data

    root = "modelopt.torch.quantization"
    stubs = {
        "modelopt": _stub("modelopt"),
        "modelopt.torch": _stub("modelopt.torch"),
        root: _stub(root),
        f"{root}.backends": _stub(f"{root}.backends"),
        f"{root}.backends.utils": _stub(f"{root}.backends.utils", fp4_compatible=lambda: False),
        f"{root}.qtensor": _stub(f"{root}.qtensor"),
        f"{root}.qtensor.base_qtensor": _stub("base", BaseQuantizedTensor=Base),
        f"{root}.utils": _stub(
            f"{root}.utils",
            reduce_amax=lambda x: x.abs().amax(),
            reduce_block_amax=lambda x, block_sizes: x.abs().unflatten(-1, (-1, block_sizes[-1])).amax(-1),
            reduce_block_padding=lambda x, block_sizes: x,
        ),
        f"{root}.utils.numeric_utils": _stub(
            "numbers", E2M1_MAX=6.0, E4M3_MAX=448.0, fp8_max_for_normalization=lambda quantizer: 448.0
        ),
        f"{root}.qtensor.nvfp4_tensor": _stub("unused"),
    }
    with _stubs(stubs):
        module = _load(f"{root}.qtensor.nvfp4_tensor", path)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out, scales, whole = module.NVFP4QTensor.quantize(x.clone(), 16)
        return out._quantized_data, scales.view(torch.uint8), whole

    return run


def _compressed_tensors() -> Oracle | None:
    try:
        helpers = importlib.import_module("compressed_tensors.compressors.nvfp4.helpers")
        schemes = importlib.import_module("compressed_tensors.quantization.quant_scheme")
        tools = importlib.import_module("compressed_tensors.quantization.utils")
    except (ImportError, AttributeError):
        return None

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        blocks = x.unflatten(-1, (-1, 16))
        low, high = blocks.amin(-1), blocks.amax(-1)  # what the min-max observer keeps, in the weights' dtype
        top = torch.maximum(high.max(), -low.min()).reshape(1)
        whole = tools.generate_gparam(-top, top)
        scales, _ = tools.calculate_qparams(low, high, schemes.NVFP4A16["weights"], global_scale=whole)
        codes = helpers.quantize_and_pack_fp4(x, scales, global_scale=whole)
        return codes, scales.to(torch.float8_e4m3fn).view(torch.uint8), whole

    return run


def oracle(name: str) -> Oracle | None:
    """The published quantiser that a formula follows, or None where its package is not on the path."""
    if name.startswith("te-"):
        return _transformer_engine((16, 16) if name == "te-2d" else (1, 16))
    return _modelopt() if name == "modelopt-1d" else _compressed_tensors()


def knows(name: str, case: str) -> bool:
    """Whether an oracle has an answer: modelopt gives NaN scales for an all-zero weight."""
    return (name, case) != ("modelopt-1d", "zero")


def _version(package: str) -> str:
    for name in {
        "transformer_engine": ("transformer-engine-cu13", "transformer-engine"),
        "modelopt": ("nvidia-modelopt",),
    }.get(package, (package,)):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def write() -> None:
    """Write the golden files and their provenance from the packages on the path."""
    arrays: dict[str, np.ndarray] = {}
    provenance: dict[str, str] = {"torch": torch.__version__}
    for name, package in FORMULAS.items():
        run = oracle(name)
        if run is None:
            raise SystemExit(f"{package} is not on the path")
        provenance[name] = f"{package} {_version(package)}, CPU"
        for dtype in DTYPES:
            for case, x in inputs(dtype).items():
                if knows(name, case):
                    codes, scales, whole = run(x)
                    arrays[f"{name}/{dtype}/{case}/codes"] = codes.numpy()
                    arrays[f"{name}/{dtype}/{case}/scales"] = scales.numpy()
                    arrays[f"{name}/{dtype}/{case}/global"] = whole.float().reshape(1).numpy()
    np.savez_compressed(GOLDEN / "quant_nvfp4.npz", **arrays)  # type: ignore[arg-type]
    (GOLDEN / "quant_nvfp4.json").write_text(json.dumps(provenance, indent=2) + "\n")


if __name__ == "__main__":
    write()
