"""`measure_machine`: measure the Machine of this host by microbenchmarks that all ranks run at the same time.

| number              | measured by                                                                   |
|---------------------|-------------------------------------------------------------------------------|
| `matmul_flops`      | a linear layer, forward and backward                                          |
| `fused_matmul`      | the same matmuls by the kernel that fused ops call                            |
| `attention_flops`   | torch's attention with the mask of packed documents, as transformers calls it |
| `ring_attention`    | that attention over context parallel ranks                                    |
| `memory_bandwidth`  | a copy                                                                        |
| `kernel`            | small transformers layers on few tokens                                       |
| `pointwise`         | large layers on many tokens, minus their matmuls, attention and kernels       |
| `optimizer`         | gradient clipping and AdamW on large layers                                   |
| `dtensor`           | clipping and AdamW on small layers: time with FSDP2 minus time without        |
| `link_bandwidth`    | fused_tp's all-gather and reduce-scatter                                      |
| `link_latency`      | small layers: time with tensor parallelism minus time without                 |
| `fused_links`       | large layers with tensor parallelism, minus compute; 1 on GPUs, which overlap |
| `message_latency`   | small layers: time with FSDP2 minus time without                              |
| `message_bandwidth` | large layers on few tokens: time with FSDP2 minus time without                |

No number is fitted to the time of a training step.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from fused_tp.backends import gemm
from fused_tp.nn.grad_norm import clip_grad_norm_
from fused_tp.ops.collectives import all_gather, reduce_scatter
from fused_tp.ops.ring_attention import ring_attention
from fused_tp.parallelizing.parallelize import parallelize
from fused_tp.planning.config import ParallelConfig
from fused_tp.planning.costs import CostModel, StepTime
from fused_tp.planning.hardware import HardwareConstants, Machine
from fused_tp.planning.model_count import count_config
from fused_tp.planning.model_shape import ModelShape

# Each round times each case for ROUND_SECONDS; the best round counts: other load only slows it down.
ROUNDS, ROUND_SECONDS = (8, 0.2)
LAYER_COUNT, VOCAB_SIZE = 4, 16
ONE_RANK = ParallelConfig()
_COPY_BYTES = 1 << 26  # bytes; larger than CPU and GPU caches
Case = Callable[[], object]


@dataclass(frozen=True)
class LlamaSizes:
    """Sizes of the Llama model whose layers are measured."""

    num_rows: int
    seq: int
    hidden: int
    intermediate: int
    num_heads: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.seq

    @property
    def config(self) -> Any:
        """Return transformers' LlamaConfig with these sizes."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=LAYER_COUNT,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads // 2,
        )

    @cached_property
    def shape(self) -> ModelShape:
        return count_config(self.config)


LARGE_SIZES = {
    "cpu": LlamaSizes(num_rows=4, seq=256, hidden=384, intermediate=1024, num_heads=8),
    "cuda": LlamaSizes(num_rows=4, seq=4096, hidden=4096, intermediate=14336, num_heads=32),  # enough to fill a GPU
}
SMALL_SIZES = LlamaSizes(num_rows=1, seq=16, hidden=64, intermediate=128, num_heads=4)


def measure_machine(name: str = "this machine") -> Machine:
    """Measure this host with all ranks of the default group, which all must call this function.

    CPU ranks are measured in fp32, GPUs in bf16. Each rank uses its current number of threads. Takes about 40 seconds.

    Args:
        name: name of the Machine for messages.

    Returns:
        The Machine, equal on all ranks.

    Raises:
        ValueError: the number of ranks is odd and above 1.

    Example:
        >>> machine = measure_machine("workstation")  # under torchrun; or `fused-tp plan --measure FILE`
    """
    num_ranks = dist.get_world_size()
    if num_ranks > 1 and num_ranks % 2:
        raise ValueError(f"the number of ranks must be even, because links are measured in pairs, got {num_ranks}.")
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / num_ranks)
    if device.type == "cuda":
        memory = float(torch.cuda.get_device_properties(device).total_memory)
    sizes = LARGE_SIZES[device.type]
    return machine_from_timings(_time_cases(_make_cases(sizes, device)), sizes, num_ranks, Machine(
        name=name,
        peak_flops={"fp32" if device.type == "cpu" else "bf16": 1.0},
        matmul_flops={"fp32" if device.type == "cpu" else "bf16": 1.0},
        attention_flops=1.0,
        memory=memory,
        memory_bandwidth=1.0,
        link_bandwidth=1.0,
        network_bandwidth=1.0,
        ranks_per_node=num_ranks,
        overlaps=device.type != "cpu",
        source=f"measured with torch {torch.__version__}; between nodes: as torch.distributed within this one",
    ))  # fmt: skip


def machine_from_timings(
    case_seconds: Mapping[str, float], sizes: LlamaSizes, num_ranks: int, machine: Machine
) -> Machine:
    """Return `machine` with the numbers computed from the `case_seconds` of all cases.

    With one rank there are no links; link and network bandwidth are then set to the memory bandwidth.
    """
    (precision,) = machine.peak_flops
    element_bytes = 4 if precision == "fp32" else 2
    num_tokens, hidden, intermediate = sizes.num_tokens, sizes.hidden, sizes.intermediate
    copy_bandwidth = 2 * _COPY_BYTES / case_seconds["copy"]
    moved_bytes = 3 * element_bytes * (num_tokens * (hidden + intermediate) + hidden * intermediate)
    matmul_flops = {
        precision: 6 * num_tokens * hidden * intermediate / (case_seconds["linear"] - moved_bytes / copy_bandwidth)
    }
    parameters = sum(layer.parameters for layer in sizes.shape.stack)
    constants = HardwareConstants(
        links=1.0,
        network=1.0,
        kernel=1e-12,
        memory=1.0,
        pointwise=1.0,
        optimizer=28 * parameters / copy_bandwidth / case_seconds["optimizer"],
        fused_matmul=case_seconds["linear"] / case_seconds["fused linear"],
        # Each of two ranks computes half.
        ring_attention=case_seconds["attention"] / min(num_ranks, 2) / case_seconds["ring"],
    )
    rates: dict[str, Any] = {
        "peak_flops": matmul_flops,
        "matmul_flops": matmul_flops,
        "memory_bandwidth": copy_bandwidth,
    }
    # Forward, and 2.5 times as much in backward.
    rates["attention_flops"] = 3.5 * 2 * num_tokens * sizes.seq * hidden / case_seconds["attention"]
    machine = replace(machine, **rates, constants=constants)

    # Solve for `pointwise` and `kernel_seconds` with a small and a large layer:
    # matmul + attention + memory_bound / pointwise + kernel_count * kernel_seconds = seconds of a layer.
    small_layer, large_layer = _layer_time(machine, SMALL_SIZES), _layer_time(machine, sizes)
    memory_bound = [
        case_seconds[name] / LAYER_COUNT - layer_time.matmul - layer_time.attention
        for name, layer_time in (("few", small_layer), ("many", large_layer))
    ]
    extra_memory_bound = large_layer.memory_bound - small_layer.memory_bound
    pointwise = extra_memory_bound / max(memory_bound[1] - memory_bound[0], extra_memory_bound)
    num_kernels = (
        _layer_time(replace(machine, constants=replace(constants, kernel=1.0)), SMALL_SIZES).total - small_layer.total
    )
    kernel_seconds = max(memory_bound[0] - small_layer.memory_bound / pointwise, memory_bound[0] / 10) / num_kernels
    constants = replace(constants, pointwise=pointwise, kernel=kernel_seconds)
    machine = replace(machine, constants=constants)
    if num_ranks == 1:
        return replace(machine, link_bandwidth=copy_bandwidth, network_bandwidth=copy_bandwidth)

    def seconds_per_collective(case: str, baseline: str, num_collectives: int) -> float:
        return max((case_seconds[case] - case_seconds[baseline]) / LAYER_COUNT / num_collectives, 1e-6)

    # With sequence parallelism a layer runs 4 collectives in forward and 6 in backward. FSDP2 runs 3 per layer: two
    # all-gathers of its parameters and one reduce-scatter of its gradients.
    message_latency = seconds_per_collective("few, FSDP2", "few", 3)
    message_bandwidth = (
        element_bytes
        * parameters
        / LAYER_COUNT
        / 2
        / max(seconds_per_collective("short, FSDP2", "short", 3) - message_latency, 1e-6)
    )
    link_latency, collective_seconds = seconds_per_collective("few, tp", "few", 10), case_seconds["exchange"] / 2
    dtensor = max(case_seconds["few optimizer, FSDP2"] - case_seconds["few optimizer"], 0.0) / (9 * LAYER_COUNT + 3)
    constants = replace(constants, dtensor=dtensor)
    if not machine.overlaps:
        layer = _layer_time(machine, sizes, ParallelConfig(tp=2))
        exposed_seconds = (case_seconds["many, tp"] / LAYER_COUNT - layer.total + layer.tp) / 10
        constants = replace(
            constants, fused_links=collective_seconds / max(exposed_seconds - link_latency, collective_seconds)
        )
    return replace(
        machine,
        constants=constants,
        link_latency=link_latency,
        link_bandwidth=element_bytes * num_tokens * hidden / 2 / collective_seconds,
        message_latency=message_latency,
        message_bandwidth=message_bandwidth,
        network_latency=message_latency,
        network_bandwidth=message_bandwidth,
    )


def _layer_time(machine: Machine, sizes: LlamaSizes, config: ParallelConfig = ONE_RANK) -> StepTime:
    """Return the predicted time of a layer, forward and backward."""
    (precision,) = machine.peak_flops
    forward, backward = CostModel(
        shape=sizes.shape,
        config=config,
        machine=machine,
        seq=sizes.seq,
        global_batch=sizes.num_rows,
        precision=precision,
    ).mean_layer_times
    return forward + backward


def _make_cases(sizes: LlamaSizes, device: torch.device) -> dict[str, Case]:
    """Return the cases to time, by name."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    def random_tensor(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def make_layers(
        sizes: LlamaSizes, parallelize_model: Callable[[nn.Module], object] = lambda model: None
    ) -> tuple[Case, Case]:
        """Return two cases: forward and backward; gradient clipping and an optimizer step."""
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)  # the same on all ranks
        model = AutoModelForCausalLM.from_config(sizes.config, dtype=dtype).to(device)
        parallelize_model(model)
        tokens = torch.zeros(sizes.num_rows, sizes.seq, dtype=torch.int64, device=device)
        # Two documents in each row, so that transformers builds a mask.
        positions = (torch.arange(sizes.seq, device=device) % (sizes.seq // 2)).expand(sizes.num_rows, -1)

        def run() -> None:
            model.zero_grad()
            model(input_ids=tokens, position_ids=positions, labels=tokens, use_cache=False).loss.backward()

        def update() -> None:
            clip_grad_norm_(model, 1.0)
            optimizer.step()

        optimizer = torch.optim.AdamW(model.parameters())
        return run, update

    source, target = (torch.zeros(_COPY_BYTES, device=device, dtype=torch.uint8) for _ in range(2))
    num_tokens, hidden, intermediate = sizes.num_tokens, sizes.hidden, sizes.intermediate
    x, w, dy = (
        random_tensor(num_tokens, hidden),
        random_tensor(intermediate, hidden),
        random_tensor(num_tokens, intermediate),
    )
    linear_inputs = x.clone().requires_grad_(), w.clone().requires_grad_()
    q, k, v = (
        random_tensor(sizes.num_rows, sizes.num_heads, sizes.seq, sizes.hidden // sizes.num_heads) for _ in range(3)
    )
    attention_inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    attend: Any = F.scaled_dot_product_attention
    mask = torch.ones(sizes.num_rows, 1, sizes.seq, sizes.seq, dtype=torch.bool, device=device).tril()
    (few_layers_case, few_update_case), (many_layers_case, many_update_case) = (
        make_layers(SMALL_SIZES),
        make_layers(sizes),
    )
    cases: dict[str, Case] = {
        "copy": lambda: target.copy_(source),
        "linear": lambda: torch.autograd.grad(F.linear(*linear_inputs), linear_inputs, dy),
        "fused linear": lambda: (gemm.linear(x, w), gemm.linear(dy, w.t()), gemm.linear(dy.t(), x.t())),
        "attention": lambda: torch.autograd.grad(attend(*attention_inputs, attn_mask=mask), attention_inputs, q),
        "few": few_layers_case,
        "few optimizer": few_update_case,
        "many": many_layers_case,
        "optimizer": many_update_case,
    }
    pair_size = min(2, dist.get_world_size())
    pair_mesh = init_device_mesh(
        device.type, (dist.get_world_size() // pair_size, pair_size), mesh_dim_names=("pair", "tp")
    )["tp"]
    ring_inputs = [t.transpose(1, 2)[:, : sizes.seq // pair_size].contiguous().requires_grad_() for t in (q, k, v)]
    cases["ring"] = lambda: torch.autograd.grad(
        ring_attention(*ring_inputs, group=pair_mesh, causal=True), ring_inputs, ring_inputs[0]
    )
    if pair_size == 1:
        return cases
    short_row_sizes = replace(sizes, num_rows=1, seq=SMALL_SIZES.seq)
    half_sequence, full_sequence = (
        random_tensor(sizes.num_rows, seq, sizes.hidden) for seq in (sizes.seq // 2, sizes.seq)
    )

    def shard_over_tp(model: nn.Module) -> None:
        parallelize(model, pair_mesh, sequence_parallel=True)

    def apply_fsdp(model: nn.Module) -> None:
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, mesh=pair_mesh)
        fully_shard(model, mesh=pair_mesh)

    few_fsdp_case, few_fsdp_update_case = make_layers(SMALL_SIZES, apply_fsdp)
    return cases | {
        "exchange": lambda: (
            all_gather(half_sequence, 1, group=pair_mesh),
            reduce_scatter(full_sequence, 1, group=pair_mesh),
        ),
        "few, tp": make_layers(SMALL_SIZES, shard_over_tp)[0],
        "many, tp": make_layers(sizes, shard_over_tp)[0],
        "few, FSDP2": few_fsdp_case,
        "few optimizer, FSDP2": few_fsdp_update_case,
        "short": make_layers(short_row_sizes)[0],
        "short, FSDP2": make_layers(short_row_sizes, apply_fsdp)[0],
    }


def _time_cases(cases: Mapping[str, Case]) -> dict[str, float]:
    """Return the seconds per call of each case on the slowest rank: the best round's median."""
    best_seconds: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, run in cases.items():
            run()
            num_calls = max(3, int(ROUND_SECONDS / _max_over_ranks(_time_call(run))))
            seconds = _max_over_ranks(statistics.median(_time_call(run) for _ in range(num_calls)))
            best_seconds[name] = min(seconds, best_seconds.get(name, seconds))
    return best_seconds


def _time_call(run: Case) -> float:
    start = time.perf_counter()
    run()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def _max_over_ranks(seconds: float) -> float:
    """Return the maximum over all ranks; a collective call."""
    maximum = torch.tensor(seconds, dtype=torch.float64, device=torch.accelerator.current_accelerator())
    dist.all_reduce(maximum, dist.ReduceOp.MAX)
    return float(maximum)
