"""`make soak`: random ops of random sizes on random numbers of ranks, for as long as asked.

    python -m tests.soak --minutes 10 [--seed 0]

Every round starts new ranks, runs a few hundred random calls with their backwards, and compares each with fp64. It also
fails when memory of a rank keeps growing or something is left in /dev/shm. Its seed, printed first, repeats it.

Before the rounds come what has a length of its own: 10,000 calls of the shared-memory core (tests/shm_soak.py) and the
fault campaign of 1,000 injections (tests/campaign.py).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fused_tp.ops.ring_attention import ring_attention
from fused_tp.ops.sequence import shard_sequence
from tests import campaign, faults, shm_soak
from tests.attention_reference import dense_attention, dense_mask
from tests.distributed import test_tp_ops as cases
from tests.reference import assert_within_dtype_error, seeded
from tests.workers import fresh_ranks

CALLS = 300
SHM_CALLS = 10_000
FAULTS = 1000
GROWTH_MIB = 64  # what a rank may grow by in the second half of a round: allocators keep some of what they free
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SCHEDULES = (None, "plain", "pipelined", "one_sided")  # None: the dispatch table's choice


def shape_and_dtype(rng: random.Random) -> tuple[cases.Shape, torch.dtype]:
    m, k, n = (rng.choice((1, rng.randint(2, 33), rng.randint(34, 300))) for _ in range(3))
    return (rng.randint(1, 2), m, k, n), rng.choice(DTYPES)


def product(group: Any, rng: random.Random) -> None:
    cases.matmul_case(group, rng.choice(list(cases.MATMULS)), *shape_and_dtype(rng))


def normed_matmul(group: Any, rng: random.Random) -> None:
    cases.rms_norm_case(group, *shape_and_dtype(rng))


def attention(group: Any, rng: random.Random) -> None:
    seq, kv_heads, head_dim = rng.randint(8, 200), rng.choice((1, 2)), rng.choice((8, 16))
    causal, dtype, layout = rng.random() < 0.7, rng.choice(DTYPES), rng.choice(("zigzag", "contiguous"))
    seed = rng.randrange(1 << 30)
    q = seeded(1, seq, kv_heads * 2, head_dim, dtype=dtype, seed=seed)
    k, v = (seeded(1, seq, kv_heads, head_dim, dtype=dtype, seed=seed + i) for i in (1, 2))
    out64 = dense_attention(q, k, v, *dense_mask(seq, seq, causal=causal))[0]
    shards = [shard_sequence(t, 1, group=group, layout=layout) for t in (q, k, v)]
    out = ring_attention(*shards, group=group, causal=causal, layout=layout, seq_len=seq)
    wanted = shard_sequence(out64, 1, group=group, layout=layout)
    assert_within_dtype_error(out, wanted, dtype, reduced_over=head_dim + seq, roundings=2, name="ring_attention")


CASES: tuple[Callable[[Any, random.Random], None], ...] = (product, product, product, normed_matmul, attention)


def soak_rank(group: Any, seed: int, calls: int) -> int:
    """Runs the calls that `seed` gives, the same on all ranks, and returns by how many bytes this rank then grew."""
    rng = random.Random(seed)
    half_way = 0
    for call in range(calls):
        rng.choice(CASES)(group, rng)
        if call == calls // 2:
            half_way = resident_bytes()
    return resident_bytes() - half_way


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak_round(seed: int, calls: int = CALLS) -> str:
    """One round; returns what it did, raises what went wrong."""
    rng = random.Random(seed)
    world_size, schedule = rng.randint(2, 4), rng.choice(SCHEDULES)
    left_before = faults.left_in_dev_shm()
    began = time.monotonic()
    outcomes = fresh_ranks(world_size, soak_rank, seed, calls, timeout=600, env={"FUSED_TP_SCHEDULE": schedule})
    assert faults.left_in_dev_shm() <= left_before
    growth = max(outcome.unwrap() for outcome in outcomes) / 2**20
    assert growth < GROWTH_MIB, f"a rank grew by {growth:.0f} MiB over {math.ceil(calls / 2)} calls"
    what = f"{world_size} ranks, schedule {schedule or 'by table'}, {calls} calls, {time.monotonic() - began:.0f} s"
    return f"{what}, growth {growth:.1f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--calls", type=int, default=CALLS, help="per round")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}: {shm_soak.soak(SHM_CALLS, arguments.seed)}", flush=True)
    campaign.main(["--count", str(FAULTS), "--seed", str(arguments.seed)])
    end = time.monotonic() + 60 * arguments.minutes
    rounds = 0
    while rounds == 0 or time.monotonic() < end:
        seed = arguments.seed + rounds
        print(f"seed {seed}: ", end="", flush=True)
        print(soak_round(seed, arguments.calls), flush=True)
        rounds += 1
    print(f"{rounds} passed, 0 failed")


if __name__ == "__main__":
    # Under its own name: the ranks import the function they run by the name of its module.
    from tests.soak import main as soak_main

    soak_main()
