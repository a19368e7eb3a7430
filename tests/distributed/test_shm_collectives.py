"""The native collectives: every dtype, sizes around every boundary, bit for bit in rank order."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fused_tp
from fused_tp.core.group import resolve_group
from fused_tp.core.partition import shard_sizes
from tests.distributed.shm_tools import (
    FLOATS,
    INTEGERS,
    assert_same_bits,
    checksum,
    summed,
    transport_of,
    values,
)
from tests.reference import assert_within_dtype_error, rms_norm64
from tests.workers import fresh_ranks, on_ranks, run_ranks

ONE_SHOT_BYTES = 32 * 1024  # csrc/shm/collectives.cpp
CHUNK_BYTES = 256 * 1024
WORLD_SIZES = [1, 2, 3, 4]


def sizes(dtype: torch.dtype) -> list[int]:
    """Sizes 0, 1 and primes; the one-shot boundary and a chunk of the pipeline, each +-1; several chunks."""
    boundary, chunk = ONE_SHOT_BYTES // dtype.itemsize, CHUNK_BYTES // dtype.itemsize
    if dtype in (torch.bfloat16, torch.float32, torch.uint8):
        return [0, 1, 13, 997, boundary - 1, boundary, boundary + 1, chunk - 1, chunk, chunk + 1, 3 * chunk + 13]
    return [0, 1, 997, boundary + 1, 2 * chunk + 17]


@on_ranks(*WORLD_SIZES)
def test_all_reduce_in_rank_order(group: Any) -> None:
    transport = transport_of(group)
    for dtype in (*FLOATS, *INTEGERS):
        for count in sizes(dtype):
            terms = [values(count, dtype, rank) for rank in range(transport.world_size)]
            what = f"all_reduce of {count} {dtype}"
            wanted = summed(terms)
            own = terms[transport.rank].clone()
            out = transport.all_reduce(own)
            assert_same_bits(out, wanted, what)
            assert_same_bits(own, terms[transport.rank], f"{what}, its input")
            assert transport.all_reduce(own, out=own) is own
            assert_same_bits(own, wanted, f"{what}, in place")


@on_ranks(*WORLD_SIZES)
def test_gather(group: Any) -> None:
    """Each rank in turn is the root; ranks may run ahead of it."""
    transport = transport_of(group)
    size, rank = transport.world_size, transport.rank
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        for shape, dim in (((1, 3), -1), ((5, 4), 0), ((2, 7, 3), 1), ((3, 50_000), -1)):
            shards = [values(math.prod(shape), dtype, r).view(shape) for r in range(size)]
            for root in range(size):
                gathered = transport.gather(shards[rank], root, dim)
                assert (gathered is not None) == (rank == root)
                if gathered is not None:
                    assert_same_bits(gathered, torch.cat(shards, dim), f"gather of {shape} {dtype}")
    empty = transport.gather(torch.empty(0, 3), 0, 0)
    assert (empty is not None and empty.shape == (0, 3)) if rank == 0 else empty is None
    strided = transport.gather(values(6, torch.float32, rank).view(2, 3).t(), 0, 1)
    if strided is not None:
        assert_same_bits(strided, torch.cat([values(6, torch.float32, r).view(2, 3).t() for r in range(size)], 1), "t")
    for root, dim in ((size, 0), (-1, 0), (0, 2)):
        with pytest.raises(ValueError, match="must be a rank"):
            transport.gather(torch.zeros(2, 2), root, dim)


@on_ranks(*WORLD_SIZES)
def test_collectives_that_move(group: Any) -> None:
    """reduce_scatter and all_to_all with unequal parts, some of them empty."""
    transport = transport_of(group)
    size, rank = transport.world_size, transport.rank
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        big = CHUNK_BYTES // dtype.itemsize
        for rows, columns in ((0, 3), (1, 1), (7, 5), (13, 1), (2 * big // 64 + 3, 64)):
            for parts in (shard_sizes(rows, size), uneven(rows, size)):
                what = f"{rows}x{columns} {dtype} as {parts}"
                begins = [sum(parts[:r]) for r in range(size)]
                whole = [values(rows * columns, dtype, r, 1).view(rows, columns) for r in range(size)]
                mine = slice(begins[rank], begins[rank] + parts[rank])
                if dtype != torch.bool:
                    scattered = transport.reduce_scatter(whole[rank], parts)
                    assert_same_bits(scattered, summed(whole)[mine], f"reduce_scatter {what}")
                # Row b of the table holds the parts that rank b sends: `parts`, rotated by b places.
                table = [parts[r:] + parts[:r] for r in range(size)]
                receive = [table[r][rank] for r in range(size)]
                exchanged = transport.all_to_all(whole[rank], table[rank], receive)
                wanted = [whole[r][sum(table[r][:rank]) : sum(table[r][: rank + 1])] for r in range(size)]
                assert_same_bits(exchanged, torch.cat(wanted), f"all_to_all {what}")
        transport.barrier()


def uneven(rows: int, size: int) -> list[int]:
    """Sizes with all rows but one on the last rank, so that the others' chunks are short or empty."""
    first = min(1, rows)
    return [first, *[0] * (size - 2), rows - first] if size > 1 else [rows]


def rms_norm_case(group: Any) -> int:
    transport = transport_of(group)
    seen, eps = 0, 1e-5
    for dtype in FLOATS:
        for rows, columns in ((0, 8), (3, 0), (1, 1), (3, 17), (5, 64), (40, 1024), (333, 1023), (2, 70_000)):
            what = f"all_reduce_rms_norm [{rows}, {columns}] {dtype}"
            partials = [values(rows * columns, dtype, r, 2).view(rows, columns) for r in range(transport.world_size)]
            residual = values(rows * columns, dtype, 9, 3).view(rows, columns)
            weight = values(columns, dtype, 9, 4)
            normed, new_residual = transport.all_reduce_rms_norm(partials[transport.rank], residual, weight, eps)
            assert_same_bits(new_residual, summed([*partials, residual]), f"{what}, new_residual")
            wanted = rms_norm64(new_residual, weight, eps)
            assert_within_dtype_error(normed, wanted, dtype, reduced_over=max(columns, 1), roundings=2, name=what)
            seen = checksum(new_residual, checksum(normed, seen))
    return seen


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_reduce_rms_norm(world_size: int) -> None:
    assert len(set(run_ranks(world_size, rms_norm_case))) == 1, "the ranks got different bits"


@on_ranks(3)
def test_nan_and_infinity(group: Any) -> None:
    """NaN and infinity on one rank, at every position of a vector and of its tail."""
    transport = transport_of(group)
    for dtype in FLOATS:
        for special in (math.nan, math.inf, -math.inf):
            for count in (37, 20_000):
                for holder in range(transport.world_size):
                    terms = [values(count, dtype, r) for r in range(transport.world_size)]
                    terms[holder][:: 3 if count < 100 else 1111] = special
                    terms[(holder + 1) % transport.world_size][5] = -special  # inf - inf
                    out = transport.all_reduce(terms[transport.rank])
                    assert_same_bits(out, summed(terms), f"{special} on {holder}, {count} {dtype}")
    for dtype in (torch.bfloat16, torch.float16):  # a sum that overflows only where it is rounded
        largest = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
        out = transport.all_reduce(largest)
        assert_same_bits(out, summed([largest] * transport.world_size), f"overflow of {dtype}")


# Loads the core by its path, since importing torch and fused_tp would cost seconds per instruction set.
KERNELS_UNDER_ISA = """
import importlib.util, sys, zlib
import numpy as np
spec = importlib.util.spec_from_file_location("_core", sys.argv[1])
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
random = np.random.default_rng(7)
BYTES = {0: 4, 1: 2, 2: 2, 3: 8, 4: 1, 5: 1, 6: 2, 7: 4, 8: 8}  # csrc/dtype.h
EXPONENT = {0: ("u4", 0x7F800000), 1: ("u2", 0x7F80), 2: ("u2", 0x7C00), 3: ("u8", 0x7FF << 52)}
bits = 0
for dtype, size in BYTES.items():
    for count in (1, 7, 15, 16, 17, 31, 63, 64, 65, 100, 1023):
        sources = [np.frombuffer(random.bytes(count * size), "u1").copy() for _ in range(4)]
        if dtype in EXPONENT:  # any bits but NaN, infinity and what a bf16 conversion may flush to zero
            kind, mask = EXPONENT[dtype]
            for source in sources:
                words = source.view(kind)
                exponent = words & mask
                words[(exponent == mask) | (exponent == 0)] = 0
        out = np.zeros(count * size, "u1")
        core.sum_arrays(out.ctypes.data, [s.ctypes.data for s in sources], count, dtype)
        bits = zlib.crc32(out.tobytes(), bits)
print(core.isa(), bits)
"""


def test_every_instruction_set_gives_the_same_bits() -> None:
    from fused_tp import _core

    found = {}
    for isa in ("plain", "avx2", "avx512", "avx512_bf16"):
        command = [sys.executable, "-c", KERNELS_UNDER_ISA, _core.__file__]
        name, bits = subprocess.check_output(command, env={**os.environ, "FUSED_TP_ISA": isa}, text=True).split()
        found[name] = bits
    assert "plain" in found
    assert len(set(found.values())) == 1, found
    with pytest.raises(ValueError, match="FUSED_TP_ISA is 'sse'; set it to plain, avx2, avx512 or avx512_bf16"):
        _core.attention_isa(0, "sse")
    assert _core.attention_isa(0, "PLAIN") == "plain"


AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
CPUS = {  # features and FUSED_TP_ISA -> instruction set in use
    (frozenset(), ""): "plain",
    (frozenset(AVX2 - {"fma"}), ""): "plain",
    (frozenset(AVX2), "avx512"): "avx2",
    (frozenset(AVX512 - AVX2), ""): "plain",
    (frozenset(AVX512 - {"avx512dq"} | {"avx512bf16"}), ""): "avx2",
    (frozenset(AVX512), ""): "avx512",  # Skylake to Ice Lake
    (frozenset(AVX512), "avx512_bf16"): "avx512",
    (frozenset(AVX512 | {"avx512bf16", "sse2"}), ""): "avx512_bf16",
    (frozenset(AVX512 | {"avx512bf16"}), "avx512"): "avx512",
    (frozenset(AVX512 | {"avx512bf16"}), "avx2"): "avx2",
    (frozenset(AVX512 | {"avx512bf16"}), "plain"): "plain",
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have the plain kernels only")
def test_an_instruction_set_is_used_where_the_cpu_has_all_of_it() -> None:
    from fused_tp import _core

    assert {cpu: _core.isa_of(set(cpu[0]), cpu[1]) for cpu in CPUS} == CPUS


def same_name_case(group: Any, folder: str) -> list[float]:
    """A second init after destroy_process_group reuses the name of the group, and here even its store."""
    rank, size, gone = dist.get_rank(group), dist.get_world_size(group), dist.group.WORLD
    dist.destroy_process_group()
    results = []
    for i in range(3):
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("gloo", store=dist.PrefixStore(str(i), store), rank=rank, world_size=size)
        world = dist.group.WORLD
        assert world is not None
        results.append(transport_of(world).all_reduce(torch.tensor([float(rank + i)])).item())
        assert resolve_group(None).process_group is world
        with pytest.raises(RuntimeError, match="destroyed"):  # though its name is that of `world`
            fused_tp.all_reduce(torch.ones(1), group=gone)
        if i < 2:
            dist.destroy_process_group()
    return results


def test_the_name_of_a_group_may_be_reused(tmp_path: Any) -> None:
    for outcome in fresh_ranks(3, same_name_case, str(tmp_path)):
        assert outcome.unwrap() == [3.0, 6.0, 9.0]


@on_ranks(2)
def test_bad_input_is_refused_before_anything_is_sent(group: Any) -> None:
    transport = transport_of(group)
    x = torch.ones(4, 2)
    refused: list[tuple[str, Any]] = [
        ("Sums of torch.bool are not supported", lambda: transport.all_reduce(x.bool())),
        ("got torch.complex64", lambda: transport.all_reduce(x.to(torch.complex64))),
        ("floating", lambda: transport.all_reduce_rms_norm(x.int(), x.int(), x[0].int(), 1e-5)),
    ]
    for words, call in refused[: 2 + transport.rank]:  # ranks make different numbers of these, and stay in step
        with pytest.raises(TypeError, match=words):
            call()
    out: Tensor = transport.all_reduce(x)
    assert out.sum().item() == 16
