"""`make soak`: random calls of every op (tests/fuzz.py) on random numbers of ranks, for a given time.

    python -m tests.soak --minutes 10 [--seed 0]

Every round starts new ranks. It fails if a call is wrong, a rank's memory keeps growing, or files are left in /dev/shm.
Its seed, printed first, repeats it.

Parts of fixed length run before the rounds: 10,000 calls of the shared-memory core (tests/shm_soak.py), the fault
campaign of 1,000 injections (tests/campaign.py), and 2,000 odd inputs of each op on one rank and on two.
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
IN_A_ROW = 3  # consecutive calls of one op
SHM_CALLS = 10_000
FAULTS = 1000
INPUTS = 2000
GROWTH_MIB = 64  # bound of a rank's growth in the second half of a round: allocators keep some freed memory
SCHEDULES = (None, "plain", "pipelined", "one_sided")  # None: the dispatch table's choice


def soak_rank(group: Any, seed: int, calls: int) -> int:
    """Run random calls, the same on all ranks; return the growth of this rank in bytes over their second half."""
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
    """Run one round; return a summary, or raise the first failure."""
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
    # Imported under its own name: ranks import the function they run by its module's name.
    from tests.soak import main as soak_main

    soak_main()
