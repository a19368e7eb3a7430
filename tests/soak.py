"""`make soak`: random calls of every op (tests/fuzz.py) on random numbers of ranks, for as long as asked.

    python -m tests.soak --minutes 10 [--seed 0]

Every round starts new ranks. It fails where a call is wrong, memory of a rank keeps growing, or something is left in
/dev/shm. Its seed, printed first, repeats it.

Before the rounds come what has a length of its own: 10,000 calls of the shared-memory core (tests/shm_soak.py), the
fault campaign of 1,000 injections (tests/campaign.py), and 2,000 odd inputs of each op on one rank and on two.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import time
from pathlib import Path
from typing import Any

from tests import campaign, faults, shm_soak
from tests.fuzz import PROBLEMS, fuzz, fuzz_rank
from tests.workers import fresh_ranks

CALLS = 3000
IN_A_ROW = 3  # of one op
SHM_CALLS = 10_000
FAULTS = 1000
INPUTS = 2000
GROWTH_MIB = 64  # what a rank may grow by in the second half of a round: allocators keep some of what they free
SCHEDULES = (None, "plain", "pipelined", "one_sided")  # None: the dispatch table's choice


def soak_rank(group: Any, seed: int, calls: int) -> int:
    """Runs the calls that `seed` gives, the same on all ranks, and returns by how many bytes this rank then grew."""
    rng, half_way = random.Random(seed), 0
    for call in range(0, calls, IN_A_ROW):
        if call <= calls // 2:
            half_way = resident_bytes()
        wrong = fuzz_rank(group, rng.choice(list(PROBLEMS)), rng.randrange(1 << 30), IN_A_ROW)
        assert not wrong, "\n".join(wrong)
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
    assert growth < GROWTH_MIB, f"a rank grew by {growth:.0f} MiB over the last {calls // 2} calls"
    what = f"{world_size} ranks, schedule {schedule or 'by table'}, {calls} calls, {time.monotonic() - began:.0f} s"
    return f"{what}, growth {growth:.1f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}: {shm_soak.soak(SHM_CALLS, arguments.seed)}", flush=True)
    campaign.main(["--count", str(FAULTS), "--seed", str(arguments.seed)])
    for world_size, name in itertools.product((1, 2), PROBLEMS):
        wrong = fuzz(name, arguments.seed, INPUTS, world_size)
        print(f"{name}, {world_size} ranks: {len(wrong)} of {INPUTS} odd inputs wrong", *wrong, sep="\n", flush=True)
        if wrong:
            raise SystemExit(1)
    end = time.monotonic() + 60 * arguments.minutes
    seed = arguments.seed
    while seed == arguments.seed or time.monotonic() < end:
        print(f"seed {seed}: ", end="", flush=True)
        print(soak_round(seed), flush=True)
        seed += 1
    print(f"{seed - arguments.seed} passed, 0 failed")


if __name__ == "__main__":
    # Under its own name: the ranks import the function they run by the name of its module.
    from tests.soak import main as soak_main

    soak_main()
