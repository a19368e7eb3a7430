"""Waiting kernels beside a collective of another library on the same GPUs: no order of their blocks deadlocks.

The model in `tests.block_scheduling` enumerates every order of the kernels of `triton_kernels` on two ranks. They share
a GPU with a collective as NCCL launches it, on a stream of the least or of a higher priority; its blocks are clusters
since sm_90.
"""

from __future__ import annotations

import pytest

from tests.block_scheduling import ROOM, Kernel, Model, Passed, Placed

LEAST, HIGH, GREATEST = range(3)  # priorities

# A block of a matmul takes a whole SM; blocks of stages and relays also fit beside a block of a collective.
SMALL, FOREIGN = 1, 6


def side(priority: int, copies: int, held: int) -> list[Kernel]:
    """Kernels that copy shards while a kernel `matmul` uses them: on one stream, with a relay between any two copies.

    `held`: shards that fit in memory; a further one waits until the kernel has finished with the first.
    """
    stage = Kernel("stage", "main", room=SMALL)
    ready = Kernel("relay 0", "side", 1, SMALL, priority, waits=(Passed("stage"),), behind=("stage",))
    made = [stage, ready]
    for number in range(1, copies + 1):
        frees = number + 1 - held
        waits = (Passed("matmul", frees, here=True),) if frees > 0 and number < copies else ()
        made.append(Kernel(f"copy {number}", "side", blocks=0))
        made.append(Kernel(f"relay {number}", "side", 1, SMALL, priority, waits=waits))
    return made


def gathered(sms: int) -> list[Kernel]:
    """all_gather_matmul, copied: a stream (no kernel) waits for the other rank and copies; the matmul waits for it."""
    return [
        Kernel("stage", "main", room=SMALL),
        Kernel("copy", "side", blocks=0, waits=(Passed("stage"),), behind=("stage",)),
        Kernel("matmul", "main", sms, ROOM, waits=(Passed("copy", here=True),)),
    ]


def ring(priority: int, sms: int, copies: int = 3) -> list[Kernel]:
    """ring_attention: kernels between copies, and more groups of heads than fit in memory at a time."""
    stage, *rest = side(priority, copies=copies, held=2)
    waits = tuple(Passed(f"relay {number}", here=True) for number in range(1, copies + 1))
    return [stage, Kernel("matmul", "main", sms - 1, ROOM, waits=waits), *rest]


def direct(sms: int) -> list[Kernel]:
    """all_gather_matmul, direct: every block waits until the other rank has staged its shard."""
    return [
        Kernel("stage", "main", room=SMALL),
        Kernel("matmul", "main", sms, ROOM, waits=(Passed("stage"),)),
    ]


def summed(sms: int) -> list[Kernel]:
    """matmul_reduce_scatter, matmul_all_reduce, and the collectives of csrc/cuda: a block sets its own flags,
    then waits for the block of the same number on the other rank."""
    return [Kernel("matmul", "main", sms, ROOM, waits=(Placed("matmul"),))]


def foreign(priority: int, cluster: bool) -> Kernel:
    """A collective of two blocks that wait for those of the other rank."""
    return Kernel("other", "other", 2, FOREIGN, priority, cluster, waits=(Placed("other"),))


# (kernels, SMs). A collective that takes every SM would block any kernel that waits for another rank.
KERNELS = [
    pytest.param(gathered(2), 2, id="all_gather_matmul"),
    pytest.param(direct(2), 2, id="all_gather_matmul direct"),
    pytest.param(summed(3), 3, id="sums"),
    pytest.param(ring(GREATEST, 2), 2, id="ring_attention", marks=pytest.mark.full),
]


@pytest.mark.parametrize("cluster", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("priority", [LEAST, HIGH])
@pytest.mark.parametrize(("kernels", "sms"), KERNELS)
def test_nothing_gets_stuck(kernels: list[Kernel], sms: int, priority: int, cluster: bool) -> None:
    model = Model([*kernels, foreign(priority, cluster)], sms=sms)
    state, _, _ = model.stuck()
    assert state is None, model.told(state)


@pytest.mark.full
def test_relays_of_the_least_priority_get_stuck_behind_a_cluster() -> None:
    """The model finds the deadlock that `own_streams(has_high_priority=True)` prevents."""
    for behind in (LEAST, HIGH):
        model = Model([*ring(LEAST, 2, copies=1), foreign(behind, True)])
        state, count, _ = model.stuck()
        assert state is not None and count > 5
        assert "relay" in model.told(state).partition("running")[0]
    assert Model(ring(LEAST, 2, copies=1)).stuck()[0] is None  # no deadlock without the collective


def test_a_collective_that_takes_every_sm_holds_up_what_waits_for_the_other_rank() -> None:
    state, _, _ = Model([*summed(2), foreign(LEAST, False)], sms=2).stuck()
    assert state is not None
