"""The device kernels of csrc/cuda on the CPU: the same sources, with threads as ranks, against sums in rank order."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_tp.runtime.partition import shard_range
from fused_tp.transport.shm import dtype_number
from fused_tp.triton_kernels.comm import protocol
from tests.native_build import (
    GPU_ON_CPU,
    GPU_ON_CPU_FLAGS,
    build_program,
    device_sources,
    output_of,
    prebuild,
    require_sanitizer,
)
from tests.reference import assert_within_dtype_error, seeded
from tests.unit.device_ranks import (
    MULTIMEM,
    ONE_SHOT,
    TWO_SHOT,
    Rank,
    Ranks,
    guards_hold,
    kernels,
    placed,
)

pytestmark = pytest.mark.full

WORLDS = (1, 2, 3, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALGORITHMS = (ONE_SHOT, TWO_SHOT, MULTIMEM)
COUNTS = (0, 1, 7, 251, 4096, 10007)  # none, one, less than 16 bytes, primes, whole packets
EPS = 1e-5


def inputs(world: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """One tensor for each rank."""
    return [seeded(*shape, dtype=dtype, seed=seed * 100 + rank) for rank in range(world)]


def summed(terms: list[Tensor], bias: Tensor | None = None) -> Tensor:
    """What a sum must be to the bit: in fp32, in the order of ranks, the bias last, rounded once."""
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


def check_op(
    ranks: Ranks,
    xs: list[Tensor],
    expected: list[Tensor],
    call: Callable[[Rank, Tensor, Tensor, int], None],
    in_place: Callable[[int, Tensor], tuple[Tensor, Tensor]],
) -> None:
    """`call(rank, x, out, blocks)` with arrays that are aligned, alike and unlike misaligned, and where one is in the
    other: in_place(rank, x) is (x, out) of memory like the larger one's."""
    for number, (x_offset, out_offset) in enumerate(((0, 0), (1, 1), (3, 0), (0, 5))):
        blocks = 1 + number
        x_at = [placed(x, x_offset * (rank + 1)) for rank, x in enumerate(xs)]
        outs = [placed(torch.zeros_like(wanted), out_offset) for wanted in expected]
        ranks.run(lambda r: call(r, x_at[r.rank], outs[r.rank], blocks))
        for x, given, out, wanted in zip(xs, x_at, outs, expected, strict=True):
            assert_bits(out, wanted)
            assert_bits(given, x)
            assert guards_hold(out)
        shared = [in_place(rank, x) for rank, x in enumerate(x_at)]
        ranks.run(lambda r: call(r, *shared[r.rank], blocks))
        for (_, out), wanted in zip(shared, expected, strict=True):
            assert_bits(out, wanted)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce(world: int, dtype: torch.dtype, algorithm: int) -> None:
    for number, count in enumerate(COUNTS):
        xs = inputs(world, count, dtype=dtype, seed=number)
        bias = placed(seeded(3, dtype=dtype, seed=7), 1) if number % 2 and algorithm != MULTIMEM else None

        def call(r: Rank, x: Tensor, out: Tensor, blocks: int) -> None:
            r.all_reduce(x, out, algorithm=algorithm, bias=bias, blocks=blocks)

        check_op(Ranks(world), xs, [summed(xs, bias)] * world, call, lambda rank, x: (x, x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter(world: int, dtype: torch.dtype) -> None:
    for number, count in enumerate(COUNTS):
        chunk, parts = -(-count // world), [slice(*shard_range(count, world, rank)) for rank in range(world)]
        xs = inputs(world, count, dtype=dtype, seed=number)
        bias = seeded(3, dtype=dtype, seed=7) if number % 2 else None
        total = summed(xs, bias)

        def call(r: Rank, x: Tensor, out: Tensor, blocks: int) -> None:
            r.reduce_scatter(x, out, chunk, bias=bias, blocks=blocks)

        check_op(Ranks(world), xs, [total[part] for part in parts], call, lambda rank, x: (x, x[parts[rank]]))


@pytest.mark.parametrize("dtype", (torch.uint8, torch.bfloat16, torch.int64))
@pytest.mark.parametrize("world", WORLDS)
def test_all_gather(world: int, dtype: torch.dtype) -> None:
    for count in COUNTS:
        chunk, parts = -(-count // world), [slice(*shard_range(count, world, rank)) for rank in range(world)]
        whole = (torch.arange(count) * 37 % 251).to(dtype)

        def call(r: Rank, x: Tensor, out: Tensor, blocks: int) -> None:
            r.all_gather(x, out, chunk, blocks=blocks)

        def in_place(rank: int, x: Tensor) -> tuple[Tensor, Tensor]:
            out = torch.ones_like(whole)
            out[parts[rank]] = x
            return out[parts[rank]], out

        check_op(Ranks(world), [whole[part] for part in parts], [whole] * world, call, in_place)


def test_all_to_all_in_place() -> None:
    xs = [torch.arange(3 * 50) + 1000 * rank for rank in range(3)]
    expected = torch.stack(xs).view(3, 3, 50).transpose(0, 1).reshape(3, -1)
    Ranks(3).run(lambda r: r.all_to_all(xs[r.rank], xs[r.rank], (1, 1, 400, 400, 0, 0, 400, 0, 0)))
    assert torch.equal(torch.stack(xs), expected)


def norm_reference(xs: list[Tensor], residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(normed in fp64, new_residual to the bit)."""
    h = summed([*xs, residual])
    h64 = h.double()
    return h64 * torch.rsqrt(h64.square().mean(-1, keepdim=True) + EPS) * weight.double(), h


NORM_SHAPES = ((1, 8), (5, 64), (7, 33), (3, 1), (13, 1000), (0, 8))


@pytest.mark.parametrize("algorithm", (ONE_SHOT, TWO_SHOT))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce_rms_norm(world: int, dtype: torch.dtype, algorithm: int) -> None:
    ranks = Ranks(world)
    for number, (rows, columns) in enumerate(NORM_SHAPES):
        given = inputs(world, rows, columns, dtype=dtype, seed=number)
        xs = [placed(x, (number + rank) % 2) for rank, x in enumerate(given)]
        residual, weight = seeded(rows, columns, dtype=dtype, seed=98), seeded(columns, dtype=dtype, seed=99)
        wanted, h = norm_reference(xs, residual, weight)
        normed = [placed(torch.zeros_like(x), 0) for x in xs]
        residuals = [placed(torch.zeros_like(x), 0) for x in xs]

        def apart(r: Rank) -> None:
            results = normed[r.rank], residuals[r.rank]
            r.all_reduce_rms_norm(xs[r.rank], residual, weight, *results, eps=EPS, algorithm=algorithm, blocks=3)

        def in_place(r: Rank) -> None:
            x = xs[r.rank]
            own = residuals[r.rank].copy_(residual)
            r.all_reduce_rms_norm(x, own, weight, x, own, eps=EPS, algorithm=algorithm, blocks=2)

        ranks.run(apart)
        for out, new in zip(normed, residuals, strict=True):
            assert_bits(new, h)
            assert_within_dtype_error(out, wanted, dtype, reduced_over=columns)
            assert_bits(out, normed[0])
            assert guards_hold(out) and guards_hold(new)
        ranks.run(in_place)
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
        kernels().preload()  # which is nothing on a CPU
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


def every_op(x: Tensor) -> dict[str, Callable[[Rank], list[Tensor]]]:
    """All ops that give results, by name; each returns its results."""

    def reduce(algorithm: int, r: Rank) -> list[Tensor]:
        out = torch.zeros_like(x)
        r.all_reduce(x, out, algorithm=algorithm)
        return [out]

    def norm(algorithm: int, r: Rank) -> list[Tensor]:
        rows = x.view(10, -1)
        normed, new = torch.zeros_like(rows), torch.zeros_like(rows)
        r.all_reduce_rms_norm(rows, rows, torch.ones_like(rows[0]), normed, new, eps=EPS, algorithm=algorithm)
        return [normed, new]

    def scatter(r: Rank) -> list[Tensor]:
        out = torch.zeros_like(x[: -(-x.numel() // r.world)])[: shard_length(x, r)]
        r.reduce_scatter(x, out, -(-x.numel() // r.world))
        return [out]

    def gather(r: Rank) -> list[Tensor]:
        out = torch.zeros(x.numel() * r.world, dtype=x.dtype)
        r.all_gather(x, out, x.numel())
        return [out]

    def exchange(r: Rank) -> list[Tensor]:
        part = x.nbytes // r.world // 2 * 2
        out = torch.zeros_like(x[: part * r.world // 2])
        r.all_to_all(x, out, (1, 1, part, part, 0, 0, part, 0, 0))
        return [out]

    return {
        "all_reduce one_shot": partial(reduce, ONE_SHOT),
        "all_reduce two_shot": partial(reduce, TWO_SHOT),
        "all_reduce multimem": partial(reduce, MULTIMEM),
        "all_reduce_rms_norm one_shot": partial(norm, ONE_SHOT),
        "all_reduce_rms_norm two_shot": partial(norm, TWO_SHOT),
        "reduce_scatter": scatter,
        "all_gather": gather,
        "all_to_all": exchange,
    }


def shard_length(x: Tensor, r: Rank) -> int:
    start, stop = shard_range(x.numel(), r.world, r.rank)
    return stop - start


OPS = tuple(every_op(torch.zeros(10)))


@pytest.mark.parametrize("op", OPS)
def test_a_rank_that_does_not_come(op: str) -> None:
    ranks = Ranks(3)
    ranks.run(Rank.barrier)
    for rank in ranks.ranks:
        rank.workspace.timeout_ns = int(0.3e9)  # more than the two that come may be apart
    call = every_op(torch.ones(700, dtype=torch.bfloat16))[op]
    start = time.monotonic()
    results = ranks.run(call, only=(0, 2))
    assert time.monotonic() - start < 5
    for tensors in results:
        for tensor in tensors:
            assert is_missing(tensor), "what did not arrive must be NaN"
    names = {protocol.OPS[int(ranks.ranks[number].error[protocol.ERROR_OP])] for number in (0, 2)}
    assert names == {op.split()[0]}
    for number in (0, 2):
        error = ranks.ranks[number].error
        assert error[protocol.ERROR_SET] == 1
        assert error[protocol.ERROR_CALL] == 2
        assert error[protocol.ERROR_RANK] == number
        # Who waited for a result that rests on the absent rank may hear first that its maker has given up.
        if not error[protocol.ERROR_GAVE_UP]:
            assert error[protocol.ERROR_SOURCE] == 1
        assert error[protocol.ERROR_ABSENT] == 0b010
        assert ranks.ranks[number].state[protocol.EXPIRED] == 2

    # The next call touches nothing of the peers but the word that says that nothing will come.
    before = [memory.clone() for memory in ranks.memories]
    start = time.monotonic()
    results = ranks.run(call, only=(0,))
    assert time.monotonic() - start < 5
    assert all(is_missing(tensor) for tensors in results for tensor in tensors)
    half = ranks.memories[0].nbytes // 2
    for memory, was in zip(ranks.memories, before, strict=True):
        assert memory.view(torch.int64)[half // 8] == -3
        changed = (memory != was).nonzero().flatten()
        assert changed.min() >= half and changed.max() < half + 8
    assert ranks.ranks[0].state[protocol.EPOCH] == -3


@pytest.mark.parametrize("op", [name for name in OPS if "two_shot" in name or "multimem" in name])
def test_what_rests_on_something_that_did_not_arrive_is_not_taken_for_good(op: str) -> None:
    """Rank 0 gives up for want of rank 2, which then comes: both others have all terms, but not rank 0's sum."""
    ranks = Ranks(3, timeout_seconds=60.0)
    ranks.ranks[0].workspace.timeout_ns = int(0.05e9)
    call = every_op(torch.ones(700, dtype=torch.bfloat16))[op]
    gave_up = threading.Event()

    def in_order(r: Rank) -> list[Tensor]:
        if r.rank == 2:
            assert gave_up.wait(20)
        results = call(r)
        if r.rank == 0:
            gave_up.set()
        return results

    start = time.monotonic()
    results = ranks.run(in_order)
    assert time.monotonic() - start < 20
    assert all(is_missing(results[0][number]) for number in range(len(results[0])))
    for number in (1, 2):
        # What a rank makes itself it may keep; the rows of rank 0 are the first ones.
        assert all(is_missing(tensor[:1]) for tensor in results[number])
        error = ranks.ranks[number].error
        assert error[protocol.ERROR_SET] == 1
        assert error[protocol.ERROR_GAVE_UP] == 1 and error[protocol.ERROR_SOURCE] == 0


@pytest.mark.parametrize("op", ("all_reduce", "all_gather"))
def test_once_a_wait_has_expired_no_other_waits(op: str) -> None:
    """Here blocks run one after the other: each would have a deadline of its own."""
    ranks = Ranks(3, timeout_seconds=1.0)
    x = torch.ones(4096)
    out = torch.zeros(4096 * (3 if op == "all_gather" else 1))
    start = time.monotonic()
    if op == "all_gather":
        ranks.run(lambda r: r.all_gather(x, out, 4096, blocks=5), only=(0,))
    else:
        ranks.run(lambda r: r.all_reduce(x, out, algorithm=TWO_SHOT, blocks=5), only=(0,))
    assert 1 <= time.monotonic() - start < 2
    assert is_missing(out)


def test_the_stop_word_ends_waits_for_a_rank() -> None:
    ranks = Ranks(3, timeout_seconds=60.0)
    call = every_op(torch.ones(700))["all_reduce two_shot"]
    start = time.monotonic()

    def stopped(r: Rank) -> Any:
        if r.rank == 0:
            return call(r)
        time.sleep(0.1)  # rank 0 waits by then, most likely
        ranks.ranks[0].state[protocol.STOP] = 1 << 1
        return call(r) if r.rank == 2 else None

    ranks.ranks[2].state[protocol.STOP] = 1 << 1
    results = ranks.run(stopped, only=(0, 2))
    assert time.monotonic() - start < 20
    assert all(is_missing(tensors[0]) for tensors in results)
    assert ranks.ranks[0].error[protocol.ERROR_SET] == 1


def test_bad_arguments_are_refused_before_anything_is_launched() -> None:
    ranks = Ranks(2, workspace_bytes=1 << 16, multicast=False)
    rank = ranks.ranks[0]
    x = torch.zeros(1 << 16)
    small = torch.zeros(64)
    refused = {
        "too small a workspace": lambda: rank.all_reduce(x, x),
        "no blocks": lambda: rank.all_reduce(small, small, blocks=0),
        "a dtype that is not summed": lambda: rank.all_reduce(small.double(), small.double()),
        "no multicast": lambda: rank.all_reduce(small, small, algorithm=MULTIMEM),
        "chunks that leave some out": lambda: rank.reduce_scatter(small, small, 31),
        "half an element": lambda: rank.all_reduce(small, small.view(torch.uint8)[2:]),
        "norms by the switch": lambda: rank.all_reduce_rms_norm(
            *(small.view(8, 8) for _ in range(5)), eps=EPS, algorithm=MULTIMEM
        ),
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
