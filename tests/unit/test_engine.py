"""The Decompression Engine against a driver library of our own, which decodes the parameter rows it is given.

It keeps the rules of the real one: memory must have been created with the usage flag and mapped for the device, Snappy
comes without its length, lengths have a limit, sizes are written as 32 bits.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from megasync.codecs import zero_run
from megasync.codecs.block_batch import Span
from megasync.codecs.engine import PARAMS, Engine, EngineProbe, build_params, probe_engine
from megasync.codecs.engine_arena import HostArena
from megasync.codecs.engine_driver import (
    AccessDescription,
    AllocationProperties,
    CudaDriver,
    load_libcuda,
)
from megasync.codecs.zero_run_walk import shortest_varint
from megasync.errors import FormatError, MegasyncError, MemoryPlanError, MissingPackageError, PlanError
from megasync.kernels.zero_run_rules import BLOCK_KINDS, BlockKind

_UNIT = 2 << 20


class SoftwareEngine:
    """The functions of libcuda that are used, over host memory. ``calls`` has their names in order."""

    def __init__(self, **attributes: int) -> None:
        self.attributes = {134: 1, 136: 6, 137: 4 << 20, 141: 1} | {int(k[1:]): v for k, v in attributes.items()}
        self.version = 13000
        self.calls: list[str] = []
        self.fail_at: tuple[str, int] | None = None
        self.fail_index: int | None = None
        self.memory: dict[int, np.ndarray] = {}
        self.capable: dict[int, int] = {}
        self.created: AllocationProperties | None = None
        self.access: list[tuple[int, int, int]] = []
        self.params = b""

    def _status(self, name: str) -> int:
        self.calls.append(name)
        return self.fail_at[1] if self.fail_at and self.fail_at[0] == name else 0

    def capable_memory(self, nbytes: int) -> tuple[np.ndarray, Span]:
        """HBM from cudaMalloc, so to speak."""
        memory = np.full(nbytes, 0xEE, dtype=np.uint8)
        self.memory[memory.ctypes.data] = memory
        self.capable[memory.ctypes.data] = nbytes
        return memory, Span(memory.ctypes.data, nbytes)

    def cuInit(self, flags: ctypes.c_uint) -> int:
        assert flags.value == 0
        return self._status("cuInit")

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = self.version
        return 0

    def cuDeviceGet(self, out: Any, ordinal: ctypes.c_int) -> int:
        out._obj.value = 40 + ordinal.value
        return self._status("cuDeviceGet")

    def cuDeviceGetAttribute(self, out: Any, attribute: ctypes.c_int, device: ctypes.c_int) -> int:
        assert device.value == 43
        if attribute.value not in self.attributes:
            return 1
        out._obj.value = self.attributes[attribute.value]
        return self._status("cuDeviceGetAttribute")

    def cuPointerGetAttribute(self, out: ctypes.c_void_p, attribute: ctypes.c_int, address: ctypes.c_uint64) -> int:
        assert attribute.value == 21
        inside = any(a <= address.value < a + n for a, n in self.capable.items())
        if not inside and not any(a <= address.value < a + len(m) for a, m in self.memory.items()):
            return 1
        ctypes.memmove(out, bytes([inside, 0, 0, 0]), 4)
        return self._status("cuPointerGetAttribute")

    def cuGetErrorName(self, status: ctypes.c_int, out: Any) -> int:
        if status.value == 999:
            return 1
        out._obj.value = f"CUDA_ERROR_{status.value}".encode()
        return 0

    def cuMemGetAllocationGranularity(self, out: Any, properties: Any, option: ctypes.c_int) -> int:
        assert option.value == 0
        assert properties._obj.usage == 2
        out._obj.value = _UNIT
        return self._status("cuMemGetAllocationGranularity")

    def cuMemCreate(self, out: Any, nbytes: ctypes.c_size_t, properties: Any, flags: ctypes.c_uint64) -> int:
        assert nbytes.value % _UNIT == 0
        self.created = AllocationProperties.from_buffer_copy(properties._obj)
        out._obj.value = 77
        return self._status("cuMemCreate")

    def cuMemRelease(self, handle: ctypes.c_uint64) -> int:
        assert handle.value == 77
        return self._status("cuMemRelease")

    def cuMemAddressReserve(self, out: Any, nbytes: ctypes.c_size_t, alignment: Any, where: Any, flags: Any) -> int:
        memory = np.zeros(nbytes.value, dtype=np.uint8)
        self.memory[memory.ctypes.data] = memory
        out._obj.value = memory.ctypes.data
        return self._status("cuMemAddressReserve")

    def cuMemAddressFree(self, address: ctypes.c_uint64, nbytes: ctypes.c_size_t) -> int:
        assert len(self.memory.pop(address.value)) == nbytes.value
        return self._status("cuMemAddressFree")

    def cuMemMap(self, address: Any, nbytes: Any, offset: Any, handle: ctypes.c_uint64, flags: Any) -> int:
        assert (offset.value, handle.value, flags.value) == (0, 77, 0)
        assert self.created is not None
        if self.created.usage == 2 and self.attributes[136]:
            self.capable[address.value] = nbytes.value
        return self._status("cuMemMap")

    def cuMemUnmap(self, address: ctypes.c_uint64, nbytes: ctypes.c_size_t) -> int:
        self.capable.pop(address.value, None)
        return self._status("cuMemUnmap")

    def cuMemSetAccess(self, address: Any, nbytes: Any, description: Any, count: ctypes.c_size_t) -> int:
        assert count.value == 1
        d: AccessDescription = description._obj
        self.access.append((d.location.type, d.location.id, d.flags))
        return self._status("cuMemSetAccess")

    def cuMemBatchDecompressAsync(
        self, params: ctypes.c_void_p, count: ctypes.c_size_t, flags: ctypes.c_uint, index: Any, stream: ctypes.c_void_p
    ) -> int:
        assert (flags.value, stream.value) == (0, 0x51)
        self.params = ctypes.string_at(params.value or 0, 64 * count.value)
        if self.fail_index is not None:
            index._obj.value = self.fail_index
            return 1
        for row in np.frombuffer(self.params, PARAMS):
            src, dst, actual = int(row["src"]), int(row["dst"]), int(row["dst_actual"])
            encoded = ctypes.string_at(src, int(row["src_nbytes"]))
            out = np.empty(int(row["dst_nbytes"]), dtype=np.uint8)
            kind: BlockKind = {2: "snappy", 4: "lz4"}[int(row["algorithm"])]  # type: ignore[assignment]
            zero_run.decode_into(kind, shortest_varint(len(out)) + encoded if kind == "snappy" else encoded, out)
            ctypes.memmove(dst, out.ctypes.data, len(out))
            ctypes.memmove(actual, len(out).to_bytes(4, "little"), 4)
        return self._status("cuMemBatchDecompressAsync")


def masks(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    parts = []
    for n in lengths:
        mask = np.zeros(n, dtype=np.uint8)
        mask[rng.random(n) < 0.01] = 5
        parts.append(mask)
    return parts


class Loaded:
    """Encoded blocks in an arena, padded to 16 bytes, as the outer decoder leaves them."""

    def __init__(self, library: SoftwareEngine, kind: BlockKind, *lengths: int) -> None:
        self.driver = CudaDriver(library)
        self.parts = masks(*lengths)
        self.blocks = [zero_run.encode_mask(kind, m, np.array([0, len(m)])).data for m in self.parts]
        self.nbytes = np.array([len(b) for b in self.blocks])
        padded = -(-self.nbytes // 16) * 16
        self.offsets = np.cumsum(padded) - padded
        self.arena = HostArena(self.driver, 3, 1 << 20, device_writes=True)
        self.sizes = self.arena.view[-64:].view(np.uint32)
        for at, block in zip(self.offsets, self.blocks, strict=True):
            self.arena.view[at : at + len(block)] = block
        self.out_nbytes = np.array(lengths)
        self.out_offsets = np.cumsum(lengths) - lengths
        self.out, self.out_span = library.capable_memory(sum(lengths))

    def run(self, engine: Engine, **change: Any) -> Any:
        plan = engine.plan(len(self.blocks), int(self.out_nbytes.max()), int(self.nbytes.sum()) + 100)
        arguments = {
            "source": self.arena.view,
            "source_offsets": self.offsets,
            "source_nbytes": self.nbytes,
            "out": self.out_span,
            "out_offsets": self.out_offsets,
            "out_nbytes": self.out_nbytes,
            "actual": self.sizes,
            "stream": 0x51,
        }
        return engine.decompress(plan, **{**arguments, **change})


@pytest.fixture
def library() -> SoftwareEngine:
    return SoftwareEngine()


def test_struct_layouts_are_those_of_cuda_h() -> None:
    assert PARAMS.itemsize == 64
    assert ctypes.sizeof(AllocationProperties) == 32
    assert (AllocationProperties.location.offset, AllocationProperties.usage.offset) == (8, 26)
    assert ctypes.sizeof(AccessDescription) == 12


def test_parameter_bytes() -> None:
    rows = np.array([[0x7F0000001000, 0x7F0000002000], [300, 400], [0x7E0000000000, 0x7E0000010000], [65_536, 1000]])
    params = build_params("snappy", rows, np.array([3, 2]), 0x7D0000000100)
    assert params.shape == (2, 64)
    assert params.dtype == np.uint8
    assert params[0].tobytes() == bytes.fromhex(
        "2901000000000000"  # 300 - 3 bytes
        "0000010000000000"  # 65,536 bytes at most
        "00010000007d0000"  # where the size goes
        "03100000007f0000"  # past the three bytes of the length
        "00000000007e0000"  # where the bytes go
        "02000000" + "00" * 20  # Snappy, padding
    )
    second = params[1].view(PARAMS)[0]
    assert tuple(int(x) for x in second) == (398, 1000, 0x7D0000000104, 0x7F0000002002, 0x7E0000010000, 2)
    lz4 = build_params("lz4", rows, np.zeros(2, dtype=np.int64), 0x7D0000000100)
    assert lz4[1].view(PARAMS)[0].tolist() == (400, 1000, 0x7D0000000104, 0x7F0000002000, 0x7E0000010000, 4)
    assert not params[:, 44:].any()


def test_probe_reads_the_attributes(library: SoftwareEngine) -> None:
    probe = probe_engine(CudaDriver(library), 3)
    assert probe == EngineProbe(3, 13000, True, 6, 4 << 20)
    assert probe.refusal("lz4") is None
    assert probe.refusal("snappy") is None


@pytest.mark.parametrize(
    ("probe", "match"),
    [
        (EngineProbe(0, 13000, True, 0, 0), "device 0 has no Decompression Engine"),
        (EngineProbe(0, 12060, True, 6, 4 << 20), "CUDA 12060, the engine needs 12080"),
        (EngineProbe(0, 13000, False, 6, 4 << 20), "the engine needs 12080"),
        (EngineProbe(0, 13000, True, 3, 4 << 20), "does not know lz4"),
        (EngineProbe(0, 13000, True, 6, 0), "takes no length"),
    ],
)
def test_a_device_without_the_engine_is_refused(library: SoftwareEngine, probe: EngineProbe, match: str) -> None:
    with pytest.raises(PlanError, match=f"{match}.*choose the scatter, sm or cpu backend"):
        Engine(CudaDriver(library), probe, "lz4")


def test_attributes_that_an_old_driver_does_not_know_are_zero(library: SoftwareEngine) -> None:
    del library.attributes[136], library.attributes[137]
    assert probe_engine(CudaDriver(library), 3) == EngineProbe(3, 13000, True, 0, 0)


def test_no_driver_is_a_clear_error() -> None:
    with pytest.raises(
        MissingPackageError, match=r"needs the NVIDIA driver, and libno-such-driver\.so cannot be loaded"
    ):
        load_libcuda("libno-such-driver.so")


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_blocks_reach_the_engine_and_come_back(library: SoftwareEngine, kind: BlockKind) -> None:
    loaded = Loaded(library, kind, 1, 100, 127, 128, 16_383, 16_384, 65_537, 1 << 20)
    engine = Engine(loaded.driver, probe_engine(loaded.driver, 3), kind)
    loaded.sizes[:] = 0xFFFFFFFF
    queued = loaded.run(engine)
    queued.check()
    assert np.array_equal(loaded.out, np.concatenate(loaded.parts))
    assert queued.actual.tolist() == [len(m) for m in loaded.parts]
    rows = np.frombuffer(library.params, PARAMS)
    headers = [len(shortest_varint(len(m))) if kind == "snappy" else 0 for m in loaded.parts]
    assert rows["src"].tolist() == [
        loaded.arena.span.address + o + h for o, h in zip(loaded.offsets, headers, strict=True)
    ]
    assert rows["src_nbytes"].tolist() == [n - h for n, h in zip(loaded.nbytes, headers, strict=True)]
    assert library.calls.count("cuMemBatchDecompressAsync") == 1
    loaded.arena.close()


def test_sizes_that_differ_after_the_run_are_refused(library: SoftwareEngine) -> None:
    loaded = Loaded(library, "lz4", 1000, 2000)
    queued = loaded.run(Engine(loaded.driver, probe_engine(loaded.driver, 3), "lz4"))
    queued.actual[1] = 1999
    with pytest.raises(
        FormatError, match="1 of 2 blocks have another length, first block 1: 1999 bytes, expected 2000"
    ):
        queued.check()


def test_lengths_over_the_limit_are_refused_before_submission() -> None:
    library = SoftwareEngine(a137=4096)
    loaded = Loaded(library, "snappy", 4096, 1000)
    engine = Engine(loaded.driver, probe_engine(loaded.driver, 3), "snappy")
    loaded.run(engine).check()
    with pytest.raises(ValueError, match="the engine takes 4096"):
        engine.plan(1, 4097, 100)
    library.calls.clear()
    noise = np.random.default_rng(0).integers(1, 256, 4096).astype(np.uint8)
    longer = zero_run.encode_mask("snappy", noise, np.array([0, 4096])).data  # 4096 bytes that grow when encoded
    loaded.arena.view[: len(longer)] = longer
    with pytest.raises(FormatError, match=rf"block 0 of 1: {len(longer) - 2} bytes that decode to 4096, .* takes 4096"):
        engine.decompress(
            engine.plan(1, 4096, 5000),
            loaded.arena.view,
            np.array([0]),
            np.array([len(longer)]),
            loaded.out_span,
            np.array([0]),
            np.array([4096]),
            loaded.sizes,
            0x51,
        )
    assert "cuMemBatchDecompressAsync" not in library.calls


@pytest.mark.parametrize("wrong", [b"\xe9\x07", b"\xe8\x87\x00", b"\xe8"])
def test_case_23_snappy_lengths_are_read_on_the_host(library: SoftwareEngine, wrong: bytes) -> None:
    loaded = Loaded(library, "snappy", 1000)
    loaded.arena.view[: len(wrong)] = np.frombuffer(wrong, np.uint8)
    nbytes = np.array([1]) if len(wrong) == 1 else loaded.nbytes
    with pytest.raises(FormatError, match="does not begin with its length 1000"):
        loaded.run(Engine(loaded.driver, probe_engine(loaded.driver, 3), "snappy"), source_nbytes=nbytes)
    assert "cuMemBatchDecompressAsync" not in library.calls


def test_memory_that_the_engine_cannot_use_is_refused(library: SoftwareEngine) -> None:
    loaded = Loaded(library, "lz4", 1000)
    engine = Engine(loaded.driver, probe_engine(loaded.driver, 3), "lz4")
    plain = np.zeros(1 << 20, dtype=np.uint8)
    plain[: loaded.nbytes[0]] = loaded.blocks[0]
    sizes = np.zeros(4, dtype=np.uint32)
    for name, change in (
        ("input", {"source": plain}),
        ("output", {"out": Span(plain.ctypes.data, plain.nbytes)}),
        ("size", {"actual": sizes}),
    ):
        with pytest.raises(PlanError, match=f"cannot use the {name} memory"):
            loaded.run(engine, **change)
        library.memory[plain.ctypes.data] = plain  # known to the driver, but ordinary pinned memory
    for change in (
        {"actual": loaded.sizes.view(np.int32)},
        {"actual": loaded.sizes[:0]},
        {"source": plain.view(np.int8)},
    ):
        with pytest.raises(ValueError):
            loaded.run(engine, **change)
    assert "cuMemBatchDecompressAsync" not in library.calls


def test_a_refused_batch_names_the_operation(library: SoftwareEngine) -> None:
    loaded = Loaded(library, "lz4", 1000, 1000)
    engine = Engine(loaded.driver, probe_engine(loaded.driver, 3), "lz4")
    library.fail_index = 1
    with pytest.raises(
        MegasyncError, match=r"cuMemBatchDecompressAsync failed at operation 1 of 2: CUDA_ERROR_1 \(1\)"
    ):
        loaded.run(engine)
    library.fail_index = (1 << 64) - 1
    with pytest.raises(MegasyncError, match=r"cuMemBatchDecompressAsync failed: CUDA_ERROR_1 \(1\)"):
        loaded.run(engine)


def test_arena_is_made_and_freed_in_order(library: SoftwareEngine) -> None:
    driver = CudaDriver(library)
    library.calls.clear()
    with HostArena(driver, 3, _UNIT + 1) as arena:
        assert arena.span.nbytes == 2 * _UNIT
        assert arena.numa_node == 1
        arena.view[:] = 9
        assert (library.memory[arena.span.address] == 9).all()
        assert library.created is not None
        created = library.created
        assert (created.type, created.location.type, created.location.id, created.usage) == (1, 3, 1, 2)
        assert library.access == [(3, 1, 3), (1, 3, 1)]  # host reads and writes, the device reads
    arena.close()
    made = ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemSetAccess"]
    freed = ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]
    assert [c for c in library.calls if c.startswith("cuMem") and "Granularity" not in c] == made + freed
    assert not library.memory


@pytest.mark.parametrize(
    "step", ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuPointerGetAttribute"]
)
def test_case_68_a_half_made_arena_leaves_nothing(library: SoftwareEngine, step: str) -> None:
    driver = CudaDriver(library)
    library.fail_at = (step, 800)
    with pytest.raises(MegasyncError, match=rf"{step} failed: CUDA_ERROR_800 \(800\)"):
        HostArena(driver, 3, 100)
    for made, undone in (("cuMemCreate", "cuMemRelease"), ("cuMemMap", "cuMemUnmap")):
        worked = made in library.calls and made != step
        assert library.calls.count(undone) == worked


def test_arena_refusals(library: SoftwareEngine) -> None:
    driver = CudaDriver(library)
    with pytest.raises(ValueError, match="0 bytes"):
        HostArena(driver, 3, 0)
    library.fail_at = ("cuMemCreate", 2)
    with pytest.raises(MemoryPlanError, match=f"{_UNIT} bytes of host memory on NUMA node 1"):
        HostArena(driver, 3, 100)
    library.fail_at = None
    library.attributes[134] = -1
    with HostArena(driver, 3, 100) as arena:
        assert arena.numa_node == 0
    library.attributes[136] = 0  # a GPU without an engine takes the flag all the same
    with pytest.raises(PlanError, match="says that the Decompression Engine cannot use it"):
        HostArena(driver, 3, 100)
    assert not library.memory
    library.attributes[141] = 0
    with pytest.raises(PlanError, match="attribute 141 is 0"):
        HostArena(driver, 3, 100)


def test_driver_errors_without_a_name(library: SoftwareEngine) -> None:
    library.fail_at = ("cuInit", 999)
    with pytest.raises(MegasyncError, match=r"cuInit failed: unknown error \(999\)"):
        CudaDriver(library)
