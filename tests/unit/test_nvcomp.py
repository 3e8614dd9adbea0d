"""nvCOMP without a GPU: finding the library, its binary interface, plans, and what a batch is told and reports."""

from __future__ import annotations

import ctypes
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

from megasync.codecs import nvcomp_abi
from megasync.codecs.block_batch import BatchPlan, Span, batch_rows
from megasync.codecs.nvcomp import check_results, plan_compress, plan_decompress, span_of
from megasync.codecs.nvcomp_library import DISTRIBUTIONS, NvcompLibrary, find_library
from megasync.errors import FormatError, MegasyncError, MissingPackageError, TaintedError


def install(folder: Path, name: str, version: str, shared_object: str | None) -> None:
    """Lay out an installed package as pip does."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    record = "nvidia/libnvcomp/__init__.py,,\n"
    if shared_object:
        path = folder / "nvidia" / "libnvcomp" / "lib64" / shared_object
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"not a library")
        record += f"nvidia/libnvcomp/lib64/libnvcomp_cpu.so.6,,\nnvidia/libnvcomp/lib64/{shared_object},,\n"
    (info / "RECORD").write_text(record)


def test_library_is_found_by_its_package(tmp_path: Path) -> None:
    install(tmp_path, "nvidia-libnvcomp-cu12", "6.0.0.12", "libnvcomp.so.6")
    file = find_library([str(tmp_path)])
    assert (file.distribution, file.version) == ("nvidia-libnvcomp-cu12", "6.0.0.12")
    assert file.path == tmp_path / "nvidia/libnvcomp/lib64/libnvcomp.so.6"
    with pytest.raises(MissingPackageError, match=r"libnvcomp.so.6 .* cannot be loaded"):
        NvcompLibrary(file)


def test_missing_double_and_broken_packages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingPackageError, match=r"install megasync\[cu13\] or megasync\[cu12\]"):
        find_library([str(tmp_path)])
    install(tmp_path, "nvidia-libnvcomp-cu13", "6.0.0.12", None)
    with pytest.raises(MissingPackageError, match=r"no libnvcomp\.so on disk"):
        find_library([str(tmp_path)])
    install(tmp_path, "nvidia-libnvcomp-cu12", "6.0.0.12", "libnvcomp.so.6")
    with pytest.raises(MissingPackageError, match=r"both installed.*overwrite each other"):
        find_library([str(tmp_path)])


def test_option_structs_have_the_size_and_order_of_the_headers() -> None:
    for struct in (
        nvcomp_abi.SnappyCompressOptions,
        nvcomp_abi.SnappyDecompressOptions,
        nvcomp_abi.Lz4CompressOptions,
        nvcomp_abi.Lz4DecompressOptions,
    ):
        assert ctypes.sizeof(struct) == 64
    assert ctypes.sizeof(nvcomp_abi.Alignments) == 24
    assert ctypes.sizeof(nvcomp_abi.Properties) == 8
    for kind in ("lz4", "snappy"):
        assert bytes(nvcomp_abi.options(kind, "compress")) == bytes(64)
        assert bytes(nvcomp_abi.options(kind, "decompress")) == b"\x02" + bytes(63)  # the SM decoder, no sorting
    assert nvcomp_abi.status_name(12) == "CannotDecompress (12)"
    assert nvcomp_abi.status_name(77) == "unknown status (77)"


def _installed() -> list[str]:
    return [name for name in DISTRIBUTIONS if any(metadata.Distribution.discover(name=name))]


@pytest.fixture
def library() -> NvcompLibrary:
    if not _installed():
        pytest.skip("nvCOMP is not installed")
    return NvcompLibrary(find_library())


def test_host_queries_of_the_installed_library(library: NvcompLibrary) -> None:
    """Right answers prove the names, the structs passed by value and the order of the arguments; no GPU is asked."""
    assert 5300 <= library.version < 7000
    assert library.asks_with_stream == (library.version >= 6000)
    assert library.file.version.startswith(f"{library.version // 1000}.{library.version // 100 % 10}.")
    assert f"at {library.file.path}" in library.describe()
    assert library.max_output_nbytes("snappy", 1 << 16) == 32 + (1 << 16) + (1 << 16) // 6 == 76490
    assert library.max_output_nbytes("snappy", 1 << 20) == 1223370
    assert library.max_output_nbytes("lz4", 1 << 16) == 65800
    assert library.max_output_nbytes("lz4", 1 << 20) == 1052696
    assert library.temp_nbytes("lz4", "compress", 256, 1 << 20, 256 << 20) == 256 * 32768
    assert library.temp_nbytes("snappy", "compress", 256, 1 << 20, 256 << 20) == 0
    for kind in ("lz4", "snappy"):
        assert library.temp_nbytes(kind, "decompress", 4096, 1 << 16, 1 << 28) == 0
        assert library.alignments(kind, "decompress") == (1, 1, 1)
    assert library.alignments("lz4", "compress") == (1, 1, 2)
    with pytest.raises(MegasyncError, match=r"CompressGetMaxOutputChunkSize returned ChunkSizeTooLarge \(18\)"):
        library.max_output_nbytes("lz4", (16 << 20) + 1)


def test_forced_backend_is_reported(library: NvcompLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVCOMP_HW_DECOMPRESSION", raising=False)
    assert library.forced_backend is None
    monkeypatch.setenv("NVCOMP_HW_DECOMPRESSION", "1")
    assert library.forced_backend == "1"
    assert "NVCOMP_HW_DECOMPRESSION=1 forces its decoder" in library.describe()


def test_plans_of_the_installed_library(library: NvcompLibrary) -> None:
    plan = plan_compress(library, "snappy", 10, 65_536)
    assert (plan.input_nbytes, plan.slot_nbytes, plan.output_nbytes) == (655_360, 76_496, 764_960)
    assert (plan.temp_nbytes, plan.table_nbytes) == (0, 440)
    plan = plan_compress(library, "lz4", 4, 1 << 20)
    assert (plan.slot_nbytes, plan.temp_nbytes) == (1_052_704, 4 * 32768)
    plan = plan_decompress(library, "lz4", 100, 1 << 20, 900_000)
    assert (plan.input_nbytes, plan.output_nbytes, plan.slot_nbytes, plan.temp_nbytes) == (900_000, 100 << 20, 0, 0)
    for call in (
        lambda: plan_compress(library, "lz4", 0, 100),
        lambda: plan_compress(library, "lz4", 1, (1 << 20) + 1),
        lambda: plan_compress(library, "zstd", 1, 100),  # type: ignore[arg-type]
        lambda: plan_decompress(library, "lz4", 1, 100, 0),
    ):
        with pytest.raises(ValueError):
            call()


def _plan(direction: str = "decompress", alignments: tuple[int, int, int] = (1, 1, 1)) -> BatchPlan:
    return BatchPlan("lz4", direction, 3, 1000, 500, 3000, 0, 0, 132, alignments)  # type: ignore[arg-type]


def _rows(plan: BatchPlan | None = None, **change: object) -> np.ndarray:
    arguments: dict[str, object] = {
        "direction": "decompress",
        "source": Span(0x1000, 400),
        "source_offsets": [0, 100, 250],
        "source_nbytes": [100, 150, 150],
        "out": Span(0x9000, 2500),
        "out_offsets": [0, 1000, 2000],
        "out_nbytes": [1000, 1000, 500],
    }
    return batch_rows(plan or _plan(), **{**arguments, **change})  # type: ignore[arg-type]


def test_rows_are_addresses_and_sizes() -> None:
    assert _rows().tolist() == [
        [0x1000, 0x1000 + 100, 0x1000 + 250],
        [100, 150, 150],
        [0x9000, 0x9000 + 1000, 0x9000 + 2000],
        [1000, 1000, 500],
    ]
    nothing = np.empty(0, dtype=np.int64)
    empty = _rows(source_offsets=nothing, source_nbytes=nothing, out_offsets=nothing, out_nbytes=nothing)
    assert empty.shape == (4, 0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"direction": "compress"}, "the plan is for decompress"),
        ({"source_nbytes": [100, 150]}, "shapes"),
        ({"source_nbytes": [100, 150, 151]}, "input block lies outside"),
        ({"source_offsets": [-1, 100, 250]}, "input block lies outside"),
        ({"source_nbytes": [100, 0, 150]}, "input block lies outside"),
        ({"source_offsets": [0, 2**63 - 1, 250]}, "input block lies outside"),
        ({"source_nbytes": [100, 2**63 - 1, 150]}, "input block lies outside"),
        ({"out_nbytes": [1000, 1000, 501]}, "output block lies outside"),
        ({"out_nbytes": [1000, 1001, 499]}, "planned for 1 to 1000"),
        ({"out_nbytes": [1000, 0, 500]}, "planned for 1 to 1000"),
        ({"out_offsets": [0, 999, 2000]}, "overlap"),
        ({"out_offsets": [1000, 0, 2000]}, "overlap"),
        ({"source_nbytes": [300, 150, 150]}, "600 input bytes, planned for 500"),
    ],
)
def test_case_23_what_breaks_plan_or_memory_is_refused_on_the_host(change: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        _rows(**change)


def test_too_many_blocks_and_alignment_are_refused() -> None:
    four = np.arange(4)
    with pytest.raises(ValueError, match="4 blocks, planned for 3"):
        _rows(source_offsets=four, source_nbytes=four + 1, out_offsets=four, out_nbytes=four + 1)
    with pytest.raises(ValueError, match="input blocks must be aligned to 4"):
        _rows(_plan(alignments=(4, 1, 1)))
    with pytest.raises(ValueError, match="output blocks must be aligned to 16"):
        _rows(_plan(alignments=(1, 16, 1)), out_offsets=[0, 1001, 2001], out_nbytes=[1000, 1000, 499])


def test_memory_that_a_gpu_cannot_read_is_refused() -> None:
    with pytest.raises(ValueError, match="not pinned"):
        span_of(torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="contiguous uint8"):
        span_of(torch.zeros(8, dtype=torch.uint8)[::2])
    with pytest.raises(ValueError, match="contiguous uint8"):
        span_of(torch.zeros(8, dtype=torch.int8))


def test_results_of_a_batch() -> None:
    good, sizes = np.zeros(3, dtype=np.int32), np.array([10, 20, 30])
    check_results(_plan(), good, sizes, sizes)
    check_results(_plan("compress"), good, sizes, np.array([40, 40, 40]))
    with pytest.raises(
        FormatError, match=r"1 of 3 blocks failed, first block 1: status Success \(0\), 19 bytes, expected 20"
    ):
        check_results(_plan(), good, np.array([10, 19, 30]), sizes)
    with pytest.raises(FormatError, match=r"2 of 3 .* first block 0: status CannotDecompress \(12\)"):
        check_results(_plan(), np.array([12, 0, 15], dtype=np.int32), sizes, sizes)
    with pytest.raises(TaintedError, match=r"CudaError \(1000\)"):
        check_results(_plan(), np.array([0, 0, 1000], dtype=np.int32), sizes, sizes)
    with pytest.raises(MegasyncError, match=r"first block 2: status CannotCompress \(19\)"):
        check_results(_plan("compress"), np.array([0, 0, 19], dtype=np.int32), sizes, sizes)
    with pytest.raises(MegasyncError, match="0 bytes, expected 20"):
        check_results(_plan("compress"), good, np.array([10, 0, 30]), np.array([20, 20, 30]))
