"""The device kernels of csrc/cuda on the CPU: the same sources, with threads as ranks, against sums in rank order."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_tp.backends.shared_memory.shm import dtype_number
from fused_tp.core.partition import shard_range
from fused_tp.triton_kernels.comm import signals
from tests.native_build import (
    GPU_ON_CPU,
    GPU_ON_CPU_FLAGS,
    build_program,
    cpu_device_library,
    device_sources,
    output_of,
    prebuild,
    require_sanitizer,
)
from tests.reference import assert_within_dtype_error, seeded

_core = pytest.importorskip("fused_tp._core")

pytestmark = pytest.mark.full

WORLDS = (1, 2, 3, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALGORITHMS = ("one_shot", "two_shot", "multimem")
MOVES = (*(f"all_reduce {algorithm}" for algorithm in ALGORITHMS), "reduce_scatter", "all_gather", "all_to_all")
OPS = (*MOVES, "all_reduce_rms_norm one_shot", "all_reduce_rms_norm two_shot")
COUNTS = (0, 1, 7, 251, 4096, 10007)  # none, one, less than 16 bytes, primes, whole packets
EPS = 1e-5
PAD = 16  # guard elements around a tensor of `placed`


# -- ranks as threads of the test, with workspaces in CPU memory -------------------------------------------------------


@cache
def kernels() -> Any:
    """The `_core.DeviceKernels` of the CPU build."""
    return _core.DeviceKernels(str(cpu_device_library()))


class Rank:
    """One rank's workspace, and the ops on it with tensors in place of addresses."""

    def __init__(self, rank: int, memories: Sequence[Tensor], timeout_seconds: float, multicast: bool) -> None:
        self.rank = rank
        self.world = len(memories)
        self.addresses = torch.tensor([memory.data_ptr() for memory in memories])
        self.state = torch.zeros(signals.COUNTERS.value, dtype=torch.int64)
        self.error = torch.zeros(signals.ERROR_WORDS, dtype=torch.int64)
        half_bytes = memories[rank].nbytes // 2 // signals.DATA_ALIGNMENT * signals.DATA_ALIGNMENT
        pointers = self.addresses.data_ptr(), self.state.data_ptr(), self.error.data_ptr()
        self.workspace = _core.DeviceWorkspace(
            *pointers, half_bytes, int(timeout_seconds * 1e9), int(multicast), rank, self.world
        )

    def barrier(self) -> None:
        kernels().barrier(self.workspace, 0)

    def move(self, op: str, x: Tensor, out: Tensor, *, bias: Tensor | None = None, blocks: int = 2) -> None:
        """Run one of MOVES; the larger of the two arrays is the whole, sharded like torch.chunk."""
        name, _, algorithm = op.partition(" ")
        which = [ALGORITHMS.index(algorithm)] if algorithm else []
        whole = max(x, out, key=Tensor.numel)
        size, count = x.element_size(), whole.numel()
        chunk, added = -(-count // self.world), (0, 1) if bias is None else (bias.data_ptr(), bias.numel())
        if name == "all_gather":
            sizes: list[Any] = [count * size, chunk * size]
        elif name == "all_to_all":
            part = count // self.world * size
            sizes = [(1, 1, part, part, 0, 0, part, 0, 0)]
        else:
            sizes = [count, *([chunk] if name == "reduce_scatter" else []), dtype_number(x.dtype), added]
        getattr(kernels(), name)(self.workspace, *which, x.data_ptr(), out.data_ptr(), *sizes, blocks, 0)

    def norm(self, algorithm: str, tensors: Sequence[Tensor], blocks: int = 2) -> None:
        """Run all_reduce_rms_norm of partial, residual and weight into normed and new_residual."""
        partial, *others = tensors
        norm = (*(tensor.data_ptr() for tensor in others), *partial.shape, EPS)
        which, dtype = ALGORITHMS.index(algorithm), dtype_number(partial.dtype)
        kernels().all_reduce_rms_norm(self.workspace, which, partial.data_ptr(), norm, dtype, blocks, 0)

    def results(self, op: str, x: Tensor) -> list[Tensor]:
        """Results of one of OPS on x."""
        if op in MOVES:
            start, stop = shard_range(x.numel(), self.world, self.rank)
            counts = {"reduce_scatter": stop - start, "all_gather": x.numel() * self.world}
            out = torch.zeros(counts.get(op, x.numel()), dtype=x.dtype)
            self.move(op, x, out, blocks=5)
            return [out]
        rows = x.view(10, -1)
        made = [torch.zeros_like(rows) for _ in range(2)]
        self.norm(op.split()[1], (rows, rows, torch.ones_like(rows[0]), *made), blocks=5)
        return made


class Ranks:
    """All ranks of a group. `run` calls a function on each, in threads of their own."""

    def __init__(
        self, world: int, *, workspace_bytes: int = 1 << 20, timeout_seconds: float = 20.0, multicast: bool = True
    ) -> None:
        memories = [aligned_bytes(workspace_bytes, 128).zero_() for _ in range(world)]
        self.memories = memories
        self.ranks = [Rank(rank, memories, timeout_seconds, multicast) for rank in range(world)]

    def run(self, function: Callable[[Rank], Any], *, only: Sequence[int] | None = None) -> list[Any]:
        """Call function(rank) on every rank, or on some, and return the results in order."""
        chosen = self.ranks if only is None else [self.ranks[rank] for rank in only]
        with ThreadPool(len(chosen)) as pool:
            return pool.map_async(function, chosen, chunksize=1).get(60)


def aligned_bytes(nbytes: int, to: int) -> Tensor:
    """uint8 [nbytes] at a multiple of `to` bytes."""
    whole = torch.empty(nbytes + to, dtype=torch.uint8)
    return whole[-whole.data_ptr() % to :][:nbytes]


def placed(values: Tensor, offset: int) -> Tensor:
    """Copy of the values, `offset` elements after a multiple of 16 bytes, between guards for `guards_hold`."""
    size = values.element_size()
    whole = aligned_bytes((values.numel() + offset + 2 * PAD) * size, 16).fill_(0xA5).view(values.dtype)
    tensor = whole[PAD + offset :][: values.numel()].view(values.shape)
    return tensor.copy_(values)


def guards_hold(tensor: Tensor) -> bool:
    """True if nothing beside a tensor of `placed` was written."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    pad = PAD * tensor.element_size()
    start = tensor.data_ptr() - storage.data_ptr()
    before, after = storage[start - pad : start], storage[start + tensor.nbytes :][:pad]
    return bool((before == 0xA5).all() and (after == 0xA5).all())


# -- numbers -----------------------------------------------------------------------------------------------------------


def inputs(world: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """One tensor for each rank."""
    return [seeded(*shape, dtype=dtype, seed=seed * 100 + rank) for rank in range(world)]


def summed(terms: list[Tensor], bias: Tensor | None = None) -> Tensor:
    """Expected sum to the bit: in fp32, in the order of ranks, the bias last, rounded once."""
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    if bias is not None:
        total = total + bias.float().repeat(-(-total.numel() // bias.numel()))[: total.numel()]
    return total.to(terms[0].dtype)


def assert_bits(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def is_missing(tensor: Tensor) -> bool:
    return bool((tensor.contiguous().view(torch.uint8) == 0xFF).all())


def parts_of(whole: Tensor, world: int) -> list[Tensor]:
    return [whole[slice(*shard_range(len(whole), world, rank))] for rank in range(world)]


@pytest.mark.parametrize("op", MOVES)
@pytest.mark.parametrize("world", WORLDS)
def test_sums_and_movements(world: int, op: str) -> None:
    moves = op in ("all_gather", "all_to_all")
    for dtype, count in itertools.product((torch.uint8, torch.bfloat16, torch.int64) if moves else DTYPES, COUNTS):
        bias = placed(seeded(3, dtype=dtype, seed=7), 1) if count % 2 and not moves and "multimem" not in op else None
        if op == "all_gather":
            whole = (torch.arange(count) * 37 % 251).to(dtype)
            check_op(op, parts_of(whole, world), [whole] * world)
        elif op == "all_to_all":
            blocks = (torch.arange(world * world * count) * 37 % 251).to(dtype).view(world, world, count)
            check_op(op, list(blocks.flatten(1)), list(blocks.transpose(0, 1).flatten(1)))
        else:
            xs = inputs(world, count, dtype=dtype, seed=count)
            total = summed(xs, bias)
            check_op(op, xs, parts_of(total, world) if op == "reduce_scatter" else [total] * world, bias)


def check_op(op: str, xs: list[Tensor], expected: list[Tensor], bias: Tensor | None = None) -> None:
    """Check aligned arrays, equally and unequally misaligned ones, and a smaller one inside of the larger."""
    world, ranks = len(xs), Ranks(len(xs))
    for number, (x_offset, out_offset) in enumerate(((0, 0), (1, 1), (3, 0), (0, 5))):
        x_at = [placed(x, x_offset * (rank + 1)) for rank, x in enumerate(xs)]
        outs = [placed(torch.zeros_like(wanted), out_offset) for wanted in expected]
        ranks.run(lambda r: r.move(op, x_at[r.rank], outs[r.rank], bias=bias, blocks=1 + number))
        for x, given, out, wanted in zip(xs, x_at, outs, expected, strict=True):
            assert_bits(out, wanted)
            assert_bits(given, x)
            assert guards_hold(out)
        if op == "all_gather":
            for rank, (x, out) in enumerate(zip(xs, outs, strict=True)):
                x_at[rank] = parts_of(out.fill_(1), world)[rank].copy_(x)
        elif op == "reduce_scatter":
            outs = [parts_of(x, world)[rank] for rank, x in enumerate(x_at)]
        else:
            outs = x_at
        ranks.run(lambda r: r.move(op, x_at[r.rank], outs[r.rank], bias=bias, blocks=1 + number))
        for out, wanted in zip(outs, expected, strict=True):
            assert_bits(out, wanted)


def norm_reference(xs: list[Tensor], residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(normed in fp64, new_residual to the bit)."""
    h = summed([*xs, residual])
    h64 = h.double()
    return h64 * torch.rsqrt(h64.square().mean(-1, keepdim=True) + EPS) * weight.double(), h


NORM_SHAPES = ((1, 8), (5, 64), (7, 33), (3, 1), (13, 1000), (0, 8))


@pytest.mark.parametrize("algorithm", ALGORITHMS[:2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce_rms_norm(world: int, dtype: torch.dtype, algorithm: str) -> None:
    ranks = Ranks(world)
    for number, (rows, columns) in enumerate(NORM_SHAPES):
        given = inputs(world, rows, columns, dtype=dtype, seed=number)
        xs = [placed(x, (number + rank) % 2) for rank, x in enumerate(given)]
        residual, weight = seeded(rows, columns, dtype=dtype, seed=98), seeded(columns, dtype=dtype, seed=99)
        wanted, h = norm_reference(xs, residual, weight)
        normed = [placed(torch.zeros_like(x), 0) for x in xs]
        residuals = [placed(torch.zeros_like(x), 0) for x in xs]

        ranks.run(lambda r: r.norm(algorithm, (xs[r.rank], residual, weight, normed[r.rank], residuals[r.rank]), 3))
        for out, new in zip(normed, residuals, strict=True):
            assert_bits(new, h)
            assert_within_dtype_error(out, wanted, dtype, reduced_over=columns)
            assert_bits(out, normed[0])
            assert guards_hold(out) and guards_hold(new)
        for new in residuals:
            new.copy_(residual)
        in_place = [(x, new, weight, x, new) for x, new in zip(xs, residuals, strict=True)]
        ranks.run(lambda r: r.norm(algorithm, in_place[r.rank]))
        for x, new in zip(xs, residuals, strict=True):
            assert_bits(new, h)
            assert_bits(x, normed[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_terms(dtype: torch.dtype) -> None:
    for count, terms, offset, stride in (
        (1, 1, 0, 1),
        (1000, 3, 0, 1000),
        (333, 4, 1, 335),
        (64, 2, 0, 80),
        (0, 2, 0, 0),
    ):
        memory = placed(seeded(stride * (terms - 1) + count, dtype=dtype), offset)
        bias = seeded(7, dtype=dtype, seed=3) if terms % 2 else None
        out = placed(torch.zeros(count, dtype=dtype), offset)
        bias_arguments = (0, 1) if bias is None else (bias.data_ptr(), 7)
        sizes = out.data_ptr(), count, dtype_number(dtype), bias_arguments
        kernels().preload()  # does nothing on a CPU
        kernels().sum_terms(memory.data_ptr(), terms, stride, *sizes, 0)
        assert_bits(out, summed([memory[term * stride :][:count] for term in range(terms)], bias))
        assert guards_hold(out)


def test_no_rank_passes_a_barrier_before_all_have_come() -> None:
    came: list[float] = [0.0] * 3

    def late(r: Rank) -> float:
        time.sleep(0.05 * r.rank)  # the others would have left by then
        came[r.rank] = time.monotonic()
        r.barrier()
        return time.monotonic()

    assert min(Ranks(3).run(late)) >= max(came)


@pytest.mark.parametrize("op", OPS)
def test_a_rank_that_does_not_come(op: str) -> None:
    ranks = Ranks(3)
    ranks.run(Rank.barrier)
    for rank in ranks.ranks:
        rank.workspace.timeout_ns = int(0.4e9)  # more than the two ranks that take part may be apart
    x = torch.ones(720, dtype=torch.bfloat16)
    start = time.monotonic()
    results = ranks.run(lambda r: r.results(op, x), only=(0, 2))
    # After a wait has expired no other one waits: here the five blocks run one after the other.
    assert 0.4 <= time.monotonic() - start < 1.9
    for tensors in results:
        for tensor in tensors:
            assert is_missing(tensor), "what did not arrive must be NaN"
    names = {signals.OPS[int(ranks.ranks[number].error[signals.ERROR_OP.value])] for number in (0, 2)}
    assert names == {op.split()[0]}
    for number in (0, 2):
        error = ranks.ranks[number].error
        assert error[signals.ERROR_SET.value] == 1
        assert error[signals.ERROR_CALL.value] == 2
        assert error[signals.ERROR_RANK.value] == number
        # A rank may wait for a peer that waits for the absent rank, and see first that the peer gave up.
        if not error[signals.ERROR_GAVE_UP.value]:
            assert error[signals.ERROR_SOURCE.value] == 1
        assert error[signals.ERROR_ABSENT.value] == 0b010
        assert ranks.ranks[number].state[signals.EXPIRED.value] == 2

    # The next call writes nothing to the peers except the word that announces that nothing will arrive.
    before = [memory.clone() for memory in ranks.memories]
    ranks.ranks[0].workspace.timeout_ns = int(30e9)
    start = time.monotonic()
    results = ranks.run(lambda r: r.results(op, x), only=(0,))
    assert time.monotonic() - start < 5
    assert all(is_missing(tensor) for tensors in results for tensor in tensors)
    half = ranks.memories[0].nbytes // 2
    for memory, was in zip(ranks.memories, before, strict=True):
        assert memory.view(torch.int64)[half // 8] == -3
        changed = (memory != was).nonzero().flatten()
        assert changed.min() >= half and changed.max() < half + 8
    assert ranks.ranks[0].state[signals.EPOCH.value] == -3


@pytest.mark.parametrize("op", [name for name in OPS if "two_shot" in name or "multimem" in name])
def test_what_rests_on_something_that_did_not_arrive_is_not_taken_for_good(op: str) -> None:
    """Rank 0 gives up waiting for rank 2, which then arrives: the others have all terms, but not rank 0's sum."""
    ranks = Ranks(3, timeout_seconds=60.0)
    ranks.ranks[0].workspace.timeout_ns = int(0.05e9)
    x = torch.ones(720, dtype=torch.bfloat16)
    gave_up = threading.Event()

    def in_order(r: Rank) -> list[Tensor]:
        if r.rank == 2:
            assert gave_up.wait(20)
        results = r.results(op, x)
        if r.rank == 0:
            gave_up.set()
        return results

    start = time.monotonic()
    results = ranks.run(in_order)
    assert time.monotonic() - start < 20
    assert all(is_missing(results[0][number]) for number in range(len(results[0])))
    for number in (1, 2):
        # A rank may keep the rows that it computes itself; the first rows are those of rank 0.
        assert all(is_missing(tensor[:1]) for tensor in results[number])
        error = ranks.ranks[number].error
        assert error[signals.ERROR_SET.value] == 1
        assert error[signals.ERROR_GAVE_UP.value] == 1 and error[signals.ERROR_SOURCE.value] == 0


def test_the_stop_word_ends_waits_for_a_rank() -> None:
    ranks = Ranks(3, timeout_seconds=60.0)
    call = partial(Rank.results, op="all_reduce two_shot", x=torch.ones(700))
    start = time.monotonic()

    def stopped(r: Rank) -> Any:
        if r.rank == 0:
            return call(r)
        time.sleep(0.1)  # rank 0 waits by then, most likely
        ranks.ranks[0].state[signals.UNREACHABLE_RANKS.value] = 1 << 1
        return call(r) if r.rank == 2 else None

    ranks.ranks[2].state[signals.UNREACHABLE_RANKS.value] = 1 << 1
    results = ranks.run(stopped, only=(0, 2))
    assert time.monotonic() - start < 20
    assert all(is_missing(tensors[0]) for tensors in results)
    assert ranks.ranks[0].error[signals.ERROR_SET.value] == 1


def test_bad_arguments_are_refused_before_anything_is_launched() -> None:
    ranks = Ranks(2, workspace_bytes=1 << 16, multicast=False)
    rank = ranks.ranks[0]
    small = torch.zeros(64)
    sums = partial(kernels().all_reduce, rank.workspace)
    address, f64 = small.data_ptr(), dtype_number(torch.float64)
    refused = {
        "too small a workspace": lambda: rank.move("all_reduce one_shot", *[torch.zeros(1 << 16)] * 2),
        "a dtype that is not summed": lambda: sums(0, address, address, 64, f64, (0, 1), 2, 0),
        "no multicast": lambda: rank.move("all_reduce multimem", small, small),
        "norms by the switch": lambda: rank.norm("multimem", [small.view(8, 8)] * 5),
    }
    for why, call in refused.items():
        with pytest.raises(RuntimeError, match=r"could not be launched: (invalid argument|operation not supported)"):
            call()
            pytest.fail(f"{why} was taken")
    assert not ranks.memories[1].any() and not rank.state.any()


SANITIZERS = ("thread", "address,undefined")


def stress_program(sanitizer: str) -> Path:
    flags = [*GPU_ON_CPU_FLAGS, "-O0", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    sources = [*device_sources(), GPU_ON_CPU / "stress.cpp"]
    return build_program(f"device_stress_{re.sub(',', '_', sanitizer)}", sources, flags)


prebuild(lambda: [stress_program(sanitizer) for sanitizer in SANITIZERS])


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_no_races_and_no_stray_accesses(sanitizer: str) -> None:
    """Fibers are threads to ThreadSanitizer, so this covers threads of a block as well as ranks."""
    require_sanitizer(sanitizer)
    assert output_of(stress_program(sanitizer), 40, timeout=240) == "no error"
