"""Copy engines: the arithmetic of the workspace, the protocol in all orders, ranks that run far ahead of streams."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.local_ranks import LocalGroup, LocalRank, run_local
from fused_tp.backends.copy_engine import copy_engine
from fused_tp.backends.copy_engine.copy_engine import CopyEngine, copy_engine_available
from fused_tp.backends.symmetric_memory import symm_mem
from fused_tp.core.errors import FusedTPError
from tests.native.doubles.libraries import double_knobs, gpu_double
from tests.native_build import build_program, output_of, prebuild, require_sanitizer, use_driver

pytestmark = pytest.mark.full

NATIVE = Path("tests/native/copy_engine")
NEEDS_CORE = pytest.mark.skipif(find_spec("fused_tp._core") is None, reason="needs the native core: pip install -e .")
CPU = torch.device("cpu")
THREADS, ADDRESSES = ("-fsanitize=thread",), ("-fsanitize=address",)


def test_arithmetic() -> None:
    output_of(build_program("copy_engine_arithmetic", [NATIVE / "arithmetic.cpp"], ["-Icsrc", "-O1"]))


# ---- the protocol --------------------------------------------------------------------------------------------------


def explore(world: int, calls: str, givers: int, fault: str = "none", walks: int = 0) -> tuple[int, str]:
    """Run model.cpp and return (number of states or steps, error or "")."""
    program = build_program("copy_engine_model", [NATIVE / "model.cpp"], ["-Icsrc", "-O2"])
    command = [str(program), str(world), calls, str(givers), fault, str(walks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    states, _, wrong = done.stdout.strip().partition(" ")
    assert done.returncode == (1 if wrong else 0), done.stderr
    return int(states), wrong


@pytest.mark.parametrize(
    ("world", "calls", "givers"),
    [(2, "ggg", 0), (2, "sSs", 0), (2, "gGG", 0), (3, "gs", 0), (2, "g", 1), (2, "s", 1), (2, "oo", 0), (2, "o", 1)],
)
def test_protocol_in_all_orders(world: int, calls: str, givers: int) -> None:
    states, wrong = explore(world, calls, givers)
    assert states > 100 and wrong == ""


@pytest.mark.parametrize(
    ("world", "calls", "givers"),
    [(2, "gsgs", 2), (2, "GSsgg", 1), (3, "gGs", 2), (3, "GSsg", 0), (2, "ooog", 2), (3, "ogo", 1), (3, "oGGo", 1)],
)
def test_protocol_in_random_orders(world: int, calls: str, givers: int) -> None:
    steps, wrong = explore(world, calls, givers, walks=1000)
    assert steps > 10_000 and wrong == ""


@pytest.mark.parametrize(
    ("fault", "calls", "givers", "wrong"),
    [
        ("token not taken", "gGgG", 0, "wrong bytes"),
        ("token not taken", "sSs", 0, "wrong bytes"),
        ("ready not cleared", "gGgG", 0, "wrong bytes"),
        ("ready not cleared", "sSs", 0, "wrong bytes"),
        ("not given back", "gg", 0, "words that are not what they were"),
        ("not given back", "gGgG", 0, "nothing lets go on"),
        ("told before copied", "gg", 0, "wrong bytes"),
        ("gates before the sum", "ssss", 1, "wrong bytes"),
        ("one gate", "gg", 1, "wrong bytes"),
        ("gates left open", "gg", 1, "wrong bytes"),
        ("arrived not cleared", "ooo", 0, "wrong bytes"),
        ("arrived before copied", "o", 0, "wrong bytes"),
        ("not begun", "oo", 0, "wrong bytes"),
        ("not joined", "Goo", 0, "wrong bytes"),
        ("not drained", "o", 0, "words that are not what they were"),
    ],
)
def test_the_model_finds_what_is_wrong(fault: str, calls: str, givers: int, wrong: str) -> None:
    # Two ranks copy on one stream: "not joined" needs three ranks.
    assert wrong in explore(3 if fault == "not joined" else 2, calls, givers, fault, walks=20_000)[1]


# ---- streams -------------------------------------------------------------------------------------------------------


def stress_program(*flags: str) -> Path:
    sources = [NATIVE / "stress.cpp", Path("tests/native/doubles/cuda_double.cpp")]
    for folder in ("copy_engine", "driver"):
        sources += sorted(Path(__file__).parents[2].joinpath("csrc", folder).glob("*.cpp"))
    return build_program("copy_engine_stress", sources, ["-Icsrc", "-O1", "-rdynamic", *flags])


prebuild(lambda: [stress_program(*flags) for flags in ((), THREADS, ADDRESSES)])


def test_more_memory_operations_than_one_call_takes() -> None:
    sources = [
        NATIVE / "memory_ops.cpp",
        Path("tests/native/doubles/cuda_double.cpp"),
        *sorted(Path("csrc/driver").glob("*.cpp")),
    ]
    output_of(build_program("copy_engine_memory_ops", sources, ["-Icsrc", "-O1", "-rdynamic"]))


def stress(world: int, rounds: int, seed: int, trouble: bool, *flags: str, **env: str) -> str:
    return output_of(stress_program(*flags), world, rounds, seed, int(trouble), **env)


@pytest.mark.parametrize(("world", "seed"), [(2, 1), (3, 5)])
def test_ranks_that_give_up_far_ahead_of_their_streams(world: int, seed: int) -> None:
    assert "with trouble" in stress(world, 6, seed, True)


def test_streams_under_thread_sanitizer() -> None:
    require_sanitizer("thread")
    stress(3, 4, 1, False, *THREADS, TSAN_OPTIONS="halt_on_error=1")


def test_streams_under_address_sanitizer() -> None:
    require_sanitizer("address")
    # The functions that the double enqueues as kernels are never freed: a graph may run them again.
    stress(2, 4, 2, True, *ADDRESSES, ASAN_OPTIONS="detect_leaks=0")


# ---- the transport -------------------------------------------------------------------------------------------------


@pytest.fixture
def driver() -> Iterator[None]:
    use_driver(gpu_double())
    yield
    use_driver(None)


@NEEDS_CORE
def test_a_driver_that_cannot_be_loaded_is_a_reason(tmp_path: Path) -> None:
    use_driver(tmp_path / "libcuda.so")
    try:
        assert "the CUDA driver could not be loaded" in copy_engine_available(CPU).reason
    finally:
        use_driver(None)


@NEEDS_CORE
def test_it_does_not_grow_under_capture(driver: Any) -> None:
    engine = CopyEngine(LocalGroup(1).rank(0))
    with engine.begin_call("all_gather", gather_bytes=100) as call:
        call.finish()
    with (
        mock.patch.object(copy_engine, "is_capturing", return_value=True),
        mock.patch.object(symm_mem, "is_capturing", return_value=True),
    ):
        with engine.begin_call("all_gather", gather_bytes=200) as call:  # there is room
            call.finish()
        with pytest.raises(RuntimeError, match="Run the same ops once before the capture"):
            engine.begin_call("all_gather", gather_bytes=1 << 30)
    first = engine._slots[""]
    assert first.is_captured
    with engine.begin_call("all_gather", gather_bytes=1 << 20) as call:
        call.finish()
    assert engine._outgrown_slots == [first]  # the graph may still use it


@NEEDS_CORE
def test_a_gather_that_a_kernel_waits_for_takes_three_calls_of_the_driver(driver: Any) -> None:
    """Two graphs with all work of the streams, and the gates, for any number of ranks; the matmul is a fourth."""
    rounds, world = 5, 8
    stream_calls = double_knobs().cuda_double_stream_calls

    def ranks(rank: LocalRank) -> int:
        engine, shard = CopyEngine(rank), torch.empty(100)
        gathered = torch.empty(world, 100)

        def gather(number: int) -> None:
            shard.fill_(10 * number + rank.rank)
            gathered.zero_()
            with engine.begin_call("all_gather_matmul", gather_bytes=shard.nbytes) as call:
                offered = call.offer(shard, list(gathered))
                for source in range(world):
                    while source != rank.rank and not offered.arrival_flags[source]:
                        time.sleep(1e-4)
                assert torch.equal(gathered, (10.0 * number + torch.arange(world))[:, None].expand(world, 100))
                call.finish(gathered)

        for number in range(4):  # each of two channels, first without a graph
            gather(number)
        rank.barrier()
        before = stream_calls()
        rank.barrier()
        for number in range(rounds):
            gather(number)
        rank.barrier()
        made = stream_calls() - before
        rank.barrier()
        engine.stop()
        return int(made)

    assert set(run_local(world, ranks, timeout=60)) == {3 * rounds * world}


@NEEDS_CORE
def test_two_scatters_at_a_time(driver: Any) -> None:
    engine = CopyEngine(LocalGroup(1).rank(0))
    call = engine.begin_call("matmul_all_reduce", scatter_bytes=100)
    first, second = call.scatter(), call.scatter()
    with pytest.raises(RuntimeError, match="scatters have begun already; receive one of them before the next begins"):
        call.scatter()
    second.receive()
    third = call.scatter()  # in the place of the second
    assert third.scatter_id == second.scatter_id != first.scatter_id
    first.receive()
    assert call.scatter().scatter_id == first.scatter_id


@NEEDS_CORE
def test_what_a_call_without_an_end_may_write_is_never_given_back(driver: Any) -> None:
    """The engine's streams may still write it later, after an exception or a gather without a wait."""
    engine = CopyEngine(LocalGroup(1).rank(0))
    finished, left, unfinished = (torch.ones(5) for _ in range(3))
    with engine.begin_call("all_gather", gather_bytes=20) as call:
        call.gather(finished, [finished])
        call.finish(finished)
    call = engine.begin_call("all_gather", gather_bytes=20)
    call.gather(unfinished, [unfinished])
    with pytest.raises(ZeroDivisionError), engine.begin_call("all_gather", gather_bytes=20) as inner:
        inner.gather(left, [left])
        raise ZeroDivisionError
    del call, inner
    assert [t.data_ptr() for t in engine.abandoned_tensors] == [t.data_ptr() for t in (unfinished, left)]


@NEEDS_CORE
def test_gates_that_cannot_be_closed_hold_up_no_thread(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device stops copying: the abort ends within its deadline, with a message; so does stop()."""
    monkeypatch.setenv("FUSED_TP_TIMEOUT", "5")
    engine = CopyEngine(LocalGroup(1).rank(0))
    with engine.begin_call("all_gather", gather_bytes=20) as call:
        call.finish()
    del call
    core, memory = engine._slots[""].core, engine._slots[""].buffer
    double_knobs().cuda_double_stall(1)
    try:
        core.abort("Something went wrong.")
        until = time.monotonic() + 20
        while "could not be closed within 5.0 s" not in core.message:
            assert time.monotonic() < until, core.message
            time.sleep(0.05)
        assert core.message.startswith("Something went wrong. The gates of the group's calls")
        assert core.message.endswith("Its streams may never end: exit the process.")
        with pytest.raises(FusedTPError, match="does not copy to the memory of some rank"):
            engine.raise_if_failed()
        ended = threading.Thread(target=lambda: (engine.stop(), engine._slots.clear()), daemon=True)
        del core
        ended.start()
        ended.join(20)
        assert not ended.is_alive(), "it waits for the device"
    finally:
        double_knobs().cuda_double_stall(0)
    until = time.monotonic() + 20
    while not memory.view(torch.int64)[:2].gt(1).all():  # the gates are closed after all, in memory that still exists
        assert time.monotonic() < until


@NEEDS_CORE
def test_a_forked_child_leaves_the_workspace_alone(driver: Any) -> None:
    """The child lacks the thread that watches the streams; the objects that it waits on cannot be destroyed."""
    engine = CopyEngine(LocalGroup(1).rank(0))
    with engine.begin_call("all_gather", gather_bytes=20) as call:
        call.finish()
    del call
    time.sleep(0.2)  # the thread waits now
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        engine._slots.clear()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
