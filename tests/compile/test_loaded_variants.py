"""The kernels loaded before a call are those that it launches, so that Triton compiles none within the call.

Triton compiles one variant for each kind of arguments: pointers and sizes at multiples of 16, sizes of 1, sizes of more
than 32 bits. The tests compare Triton's own keys of loaded and launched kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from benchmarks.local_ranks import LocalRank, run_local
from fused_tp.attention.layout import TokenLayout
from fused_tp.attention.ring_fused import make_keys_layout
from fused_tp.attention.ring_plan import ring_plan
from fused_tp.attention.spec import AttentionMask
from fused_tp.backends.copy_engine.copy_engine import CopyEngine
from fused_tp.backends.symmetric_memory.group_kernels import MAX_TIMEOUT_SECONDS
from fused_tp.triton_kernels.attention import ring_keys
from fused_tp.triton_kernels.comm import gather
from fused_tp.triton_kernels.comm.arrivals import Arrivals
from fused_tp.triton_kernels.comm.gather import GatherWorkspace, KernelLaunch, Shards
from fused_tp.triton_kernels.comm.signals import Workspace, begin_kernel
from fused_tp.triton_kernels.gemm import all_gather_gemm
from fused_tp.triton_kernels.gemm.all_gather_gemm import Peers, multiply_arriving_shards
from fused_tp.triton_kernels.gemm.tiles import GemmConfig, Launch
from tests.compile.variants import Handle, workspace_of
from tests.native.doubles.libraries import gpu_double
from tests.native_build import use_driver

pytestmark = pytest.mark.full

LAUNCH = Launch(4, GemmConfig(64, 64, 32, 4, 3))
PAGE = 4096


def variant(launch: KernelLaunch) -> str:
    """Triton's key of the compiled kernel that a launch uses."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel, _, arguments = launch
    backend = make_backend(GPUTarget("cuda", 90, 32))
    _, specialization, options = create_function_from_signature(kernel.signature, kernel.params, backend)(**arguments)
    return f"{kernel.__name__} {specialization} {sorted(options.items(), key=str)}"


class OnGpu(Tensor):
    """A CPU tensor that claims to be on a GPU."""

    is_cuda = True


@pytest.fixture
def driver() -> Iterator[None]:
    use_driver(gpu_double())
    yield
    use_driver(None)


@pytest.mark.skipif(find_spec("fused_tp._core") is None, reason="needs the native core: pip install -e .")
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_a_matmul_of_shards_that_arrive(driver: Any, world: int) -> None:
    """The copy engine's words are aligned like those that the kernel was loaded with, for every number of ranks."""

    loaded: dict[int, list[KernelLaunch]] = {rank: [] for rank in range(world)}
    launched: dict[int, list[KernelLaunch]] = {rank: [] for rank in range(world)}
    noted = SimpleNamespace(
        load_kernel=lambda launch: loaded[launch[2]["rank"]].append(launch),
        run_kernel=lambda launch: launched[launch[2]["rank"]].append(launch),
    )
    how: dict[str, Any] = {"world_size": world, "launch": LAUNCH, "rows_per_rank": 8, "timeout_ns": 5 * 10**9}

    def ranks(rank: LocalRank) -> CopyEngine:
        engine = CopyEngine(rank)
        for _ in range(2):  # channels
            own, gathered = torch.zeros(8, 64, dtype=torch.bfloat16), torch.empty(8 * world, 64, dtype=torch.bfloat16)
            weight = torch.empty(32, 64, dtype=torch.bfloat16)
            with engine.begin_call("all_gather_matmul", gather_bytes=own.nbytes) as call:

                def start(call: Any = call, own: Tensor = own, gathered: Tensor = gathered) -> Arrivals:
                    offered = call.offer(own, list(gathered.split(8)))
                    return Arrivals(offered.arrival_flags, offered.order_scratch, offered.expired_flag, 5 * 10**9)

                on_gpu = own.as_subclass(OnGpu)
                multiply_arriving_shards(
                    on_gpu, gathered, [weight], start_gather=start, rank=rank.rank, loaded_keys=set(), **how
                )
                call.finish(gathered)
        rank.barrier()
        engine.stop()
        return engine

    with mock.patch.object(all_gather_gemm, "gather", noted):
        engines = run_local(world, ranks, timeout=60)
    for rank in range(world):
        assert len(loaded[rank]) == len(launched[rank]) == 2
        assert {variant(one) for one in loaded[rank]} == {variant(one) for one in launched[rank]}
    del engines  # the launches hold addresses of their memory


@pytest.mark.parametrize("kind", [Workspace, GatherWorkspace, ring_keys.RingWorkspace])
@pytest.mark.parametrize("nbytes", [1 << 20, 5 << 30])
def test_a_call_that_gives_up(kind: Any, nbytes: int) -> None:
    """The kernel of such a call is loaded when the workspace is made, possibly with another deadline."""
    loaded: list[str] = []

    class Noting(kind):
        def _set_expired(self, value: int) -> None:  # called just before the kernel is loaded
            loaded.append(variant((begin_kernel, (1,), self._begin_arguments())))

    memory = torch.zeros(PAGE, dtype=torch.uint8)
    buffer: Any = SimpleNamespace(
        nbytes=nbytes, is_cuda=False, device=memory.device, data_ptr=memory.data_ptr, zero_=memory.zero_
    )
    for world in (1, 2, 3):
        workspace = Noting(buffer, Handle(memory, world), timeout_seconds=600.0)
        for seconds in (0.1, 1.0, MAX_TIMEOUT_SECONDS):
            workspace.timeout_ns = int(seconds * 1e9) | 1
            assert variant((begin_kernel, (1,), workspace._begin_arguments())) == loaded[-1]


@pytest.mark.parametrize("seconds", [0.3, 1.0, 2.0, 2.2, 600.0, MAX_TIMEOUT_SECONDS])
@pytest.mark.parametrize("world", [2, 3])
def test_relays(world: int, seconds: float) -> None:
    workspace = workspace_of(ring_keys.RingWorkspace, world)
    workspace.timeout_ns = int(seconds * 1e9)
    plan = ring_plan(AttentionMask(world * 64, world * 64), world, TokenLayout("contiguous"))
    with mock.patch.object(ring_keys, "LEAST_GROUP_BYTES", 1):
        k = torch.empty(1, 64, 6, 16, dtype=torch.bfloat16)
        layout = make_keys_layout(plan, 0, k, k)
    assert layout.num_groups > layout.num_slots
    puller = ring_keys.KeysPuller(layout, workspace)
    loaded = {variant(one) for one in puller.relays_to_load()}
    pulls = [
        None,
        *itertools.starmap(ring_keys._Pull, itertools.product(range(layout.num_groups), range(len(layout.chunks)))),
    ]
    launched = {variant(puller.relay_launch(*pair)) for pair in itertools.product(pulls, pulls)}
    assert launched <= loaded


def test_matmuls_of_the_same_key_are_one_variant() -> None:
    """A call loads its kernels only if its `_variant_key` is new."""
    found: dict[Any, set[str]] = {}
    workspace = workspace_of(GatherWorkspace, 2)
    peers = Peers(0, 2, workspace.arguments())
    sizes = (1, 2, 15, 16, 17, 32)
    memory = torch.empty(1 << 16, dtype=torch.bfloat16)
    for rows, k, n, offset in itertools.product((1, 2, 16, 32, 33), sizes, sizes, (0, 1)):
        shards = Shards(2 * rows, rows, k)
        x, weight = memory[offset : offset + rows * k].view(rows, k), memory[: n * k].view(n, k)
        y, bias = memory.new_empty(2 * rows, n), memory[:n]
        key = all_gather_gemm._variant_key(x, [weight], [bias], shards, LAUNCH)
        launches = [
            gather.stage_launch(x, workspace, 4),
            all_gather_gemm.matmul_launch(x, [(weight, y, bias)], None, shards, peers, LAUNCH, True),
        ]
        found.setdefault(key, set()).add("\n".join(map(variant, launches)))
    assert len(found) > 20
    assert {len(variants) for variants in found.values()} == {1}
