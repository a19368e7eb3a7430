"""Cost model of one training step: seconds by component, and bytes of memory per rank by use.

| part                | formula                                                                                       |
|---------------------|-----------------------------------------------------------------------------------------------|
| FLOPs               | eq. 3 of Narayanan et al. (arXiv:2104.04473)                                                  |
| a matmul            | FLOPs / reached peak + bytes / reached bandwidth                                              |
| memory-bound ops    | bytes read and written / reached bandwidth                                                    |
| pipeline bubble     | (pp - 1) / v microbatches for v stages per rank (arXiv:2104.04473, section 2.2); zero-bubble  |
|                     | schedules subtract 2 W, W = time of the weight gradients (ZB-H1 of arXiv:2401.10241)          |
| a collective        | latency x log2(n) + bytes x (n - 1) / n / reached bandwidth of the slowest hop                |
| fused tp            | pipelined in tp steps: max(matmul, collective) + min(matmul, collective) / tp + tp kernels    |
| activations         | s b h (10 + 24 / tp), + 5 a s / h if scores are kept (Korthikanti et al., arXiv:2205.05198)   |
| weights, optimizer  | bytes per parameter: 2 for weights, 4 for gradients, 12 for Adam and its fp32 weights         |

In fp32, weights and activations take 4 bytes per element, and Adam takes 8 bytes per parameter. Two constants are
fitted, only on the eight step times of table 5 in arXiv:2205.05198: see `fused_tp.planning.hardware.FITTED_CONSTANTS`
and `fused_tp.planning.published`. `fused_tp.planning.measure` measures the constants of a machine instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import log2
from operator import mul

from fused_tp.parallelizing.head_layout import HeadLayout
from fused_tp.pipelining.schedules import SCHEDULES
from fused_tp.planning.config import ParallelConfig
from fused_tp.planning.hardware import HardwareConstants, Machine
from fused_tp.planning.model_shape import Attention, Block, Layer, ModelShape

# Share of the multiprocessors that a collective's kernels take from overlapped compute (Calculon, SC23).
OVERLAP_COST = 0.15


@dataclass(frozen=True, kw_only=True)
class Software:
    """Properties of the training program outside `ParallelConfig`; the defaults describe `fused_tp.build`.

    Attributes:
        attention: "flash" never keeps scores; "selective" recomputes them in backward (arXiv:2205.05198); "unfused"
            keeps them.
        shards: "parameters": `dp_shard` shards parameters (FSDP, ZeRO 3); "optimizer": it shards the optimizer state
            (ZeRO 1, Megatron's distributed optimizer).
        fused_tp: collectives of tp overlap with their matmuls.
        overlap_dp: collectives of data parallelism overlap with compute.
        gradient_bytes: bytes per element of gradients reduced over data parallel ranks.
        dropout: the model has dropout, and its masks are kept for backward.
        split_sends: each tp rank sends 1/tp of the hidden state to the next stage, even if every rank holds the full
            hidden state (scatter/gather, arXiv:2104.04473, section 4.1).
    """

    attention: str = "flash"
    shards: str = "parameters"
    fused_tp: bool = True
    overlap_dp: bool = True
    gradient_bytes: int = 4
    dropout: bool = False
    split_sends: bool = False


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step on the slowest rank, by component; communication counts only where it is exposed."""

    matmul: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    recompute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    dp: float = 0.0
    pp: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of one step: the sum of all components."""
        return sum(vars(self).values())

    @property
    def communication(self) -> float:
        """Exposed communication of all kinds, in seconds."""
        return self.tp + self.cp + self.ep + self.dp + self.pp

    def __add__(self, other: StepTime) -> StepTime:
        other_times = vars(other)
        return StepTime(**{name: value + other_times[name] for name, value in vars(self).items()})

    def __mul__(self, factor: float) -> StepTime:
        return StepTime(**{name: value * factor for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the rank that needs the most memory, by use."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """Bytes of all uses together."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class _ParameterGroup:
    """Parameters that are distributed in the same way over data parallel ranks.

    Attributes:
        num_parameters: number of parameters on a rank before data parallelism shards them.
        num_shards: number of ranks that shard them.
        num_replicas: number of ranks that replicate them.
        neighbor_distance: distance in ranks between two neighbors of such a group.
    """

    num_parameters: float
    num_shards: int
    num_replicas: int
    neighbor_distance: int


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Prediction of the time and memory of one training step.

    Attributes:
        shape, config, machine: the model, its parallelism, and the hardware.
        seq: tokens of a row.
        global_batch: rows of all ranks together.
        precision: "bf16"; "fp8": matmuls of layers in fp8, everything else in bf16; or "fp32": everything in fp32.
        software: see `Software`.

    Example:
        >>> from fused_tp.planning.hardware import find_machine
        >>> from fused_tp.planning.find_shape import find_shape
        >>> config = ParallelConfig(dp_shard=8, tp=8, microbatches=4, recompute="full")
        >>> shape, machine = find_shape("llama-3-70b"), find_machine("h100")
        >>> model = CostModel(shape=shape, config=config, machine=machine, seq=8192, global_batch=64)
        >>> 0.2 < model.mfu < 0.6
        True
    """

    shape: ModelShape
    config: ParallelConfig
    machine: Machine
    seq: int
    global_batch: int
    precision: str = "bf16"
    software: Software = Software()

    # -- sizes --------------------------------------------------------------------------------------------------------

    @cached_property
    def microbatch_rows(self) -> float:
        """Rows of a microbatch."""
        return self.global_batch / (self.config.data_parallel * self.config.microbatches)

    @cached_property
    def tokens(self) -> float:
        """Tokens of a microbatch on one context parallel rank."""
        return self.microbatch_rows * self.seq / self.config.cp

    @cached_property
    def stages_per_rank(self) -> int:
        """Stages per pipeline rank."""
        return self.config.virtual_stages or 1

    @cached_property
    def layers_on_rank(self) -> int:
        """Number of layers of the largest pipeline rank, counting each of its stages as long as the longest stage."""
        return -(-self.shape.layers // (self.config.pp * self.stages_per_rank)) * self.stages_per_rank

    @cached_property
    def _layer_counts_of_stages(self) -> list[tuple[int, ...]]:
        """Number of layers of each kind in each stage of the pipeline."""
        return self.shape.layer_counts_of_stages(self.config.pp * self.stages_per_rank)

    @cached_property
    def sequence_ranks(self) -> int:
        """Number of ranks over which sequence parallelism shards the tokens between layers."""
        return self.config.tp if self.config.sequence_parallel else 1

    @cached_property
    def element_bytes(self) -> int:
        """Bytes of a weight and of an activation."""
        return 4 if self.precision == "fp32" else 2

    @cached_property
    def _dense_precision(self) -> str:
        """Precision of matmuls that never run in fp8."""
        return "fp32" if self.precision == "fp32" else "bf16"

    # -- time of one layer --------------------------------------------------------------------------------------------

    @property
    def constants(self) -> HardwareConstants:
        """Attained shares of peak rates, and overheads, of the machine."""
        return self.machine.constants

    def _memory_seconds(self, nbytes: float, bandwidth_share: float | None = None) -> float:
        return nbytes / (self.machine.memory_bandwidth * (bandwidth_share or self.constants.memory))

    def _pointwise_seconds(self, nbytes: float) -> float:
        """Return the seconds of pointwise ops between matmuls that would move `nbytes` bytes in bf16."""
        return self._memory_seconds(nbytes * self.element_bytes / 2, self.constants.pointwise)

    def _matmul_seconds(
        self, m: float, n: float, k: float, precision: str | None = None, result_bytes: int | None = None
    ) -> float:
        """Return the seconds of a matmul [m, k] x [k, n]; `result_bytes` bytes are moved per element of the result."""
        precision = precision or self.precision
        input_bytes = 1 if precision == "fp8" else self.element_bytes
        flops_per_second = self.machine.matmul_flops[precision] * (
            self.constants.fused_matmul if self.config.tp > 1 else 1
        )
        moved_bytes = input_bytes * (m * k + k * n) + (result_bytes or self.element_bytes) * m * n
        return 2 * m * n * k / flops_per_second + self._memory_seconds(moved_bytes) + self.constants.kernel

    def _grad_weight_matmul_seconds(
        self, out_features: float, in_features: float, precision: str | None = None
    ) -> float:
        """Return the seconds of the gradient of a weight [out_features, in_features], accumulated in fp32."""
        return self._matmul_seconds(out_features, in_features, self.tokens, precision, result_bytes=8)

    def _collective_seconds(
        self,
        nbytes: float,
        num_ranks: int,
        neighbor_distance: int,
        num_passes: int = 1,
        uses_torch_distributed: bool = False,
    ) -> float:
        """Return the seconds of an all-gather or reduce-scatter.

        Args:
            nbytes: bytes of the gathered tensor.
            num_ranks: number of participating ranks.
            neighbor_distance: number of ranks of the inner mesh dims, that is, the distance in ranks between two
                neighbors.
            num_passes: 2 for an all-reduce.
            uses_torch_distributed: True if torch.distributed communicates, at `Machine.message_bandwidth`, instead of
                fused_tp's transport.
        """
        if num_ranks == 1:
            return 0.0
        machine = self.machine
        num_local_ranks = max(1, min(num_ranks, machine.ranks_per_node // neighbor_distance))
        bandwidth, latency = machine.link_bandwidth, machine.link_latency
        if uses_torch_distributed:
            bandwidth, latency = machine.message_bandwidth or bandwidth, machine.message_latency or latency
        bandwidth *= self.constants.links
        if num_local_ranks < num_ranks:
            # Each GPU has a network adapter, so the local ranks together have `num_local_ranks` times its bandwidth.
            bandwidth = min(bandwidth, machine.network_bandwidth * self.constants.network * num_local_ranks)
            latency = machine.network_latency
        return num_passes * (latency * log2(num_ranks) + nbytes * (num_ranks - 1) / num_ranks / bandwidth)

    def _overlapped_seconds(self, collective_seconds: float, compute_seconds: float) -> float:
        """Return the seconds of a collective that overlap with `compute_seconds` seconds of compute."""
        return min(collective_seconds, compute_seconds) if self.machine.overlaps else 0.0

    def _exposed_seconds(self, matmul_seconds: float, collective_seconds: float) -> float:
        """Return the exposed seconds of a collective overlapped with a matmul; both run in tp steps."""
        if not self.software.fused_tp:
            return collective_seconds
        overlapped_seconds = self._overlapped_seconds(collective_seconds, matmul_seconds) * (1 - 1 / self.config.tp)
        kernel_seconds = (self.config.tp - 1) * self.constants.kernel
        return min(collective_seconds, collective_seconds - (1 - OVERLAP_COST) * overlapped_seconds + kernel_seconds)

    @cached_property
    def mean_layer_times(self) -> tuple[StepTime, StepTime]:
        """Forward and backward time of a layer and a microbatch, averaged over all layers."""
        (counts,) = self.shape.layer_counts_of_stages(1)
        forward, backward = (_sum_over_layers(times, counts) for times in zip(*self._layer_times, strict=True))
        return forward * (1 / self.shape.layers), backward * (1 / self.shape.layers)

    @cached_property
    def _layer_times(self) -> list[tuple[StepTime, StepTime]]:
        """Forward and backward time of a microbatch for a layer of each kind."""
        return [self._layer_time(kind) for kind in self.shape.layer_kinds]

    def _layer_time(self, layer: Layer) -> tuple[StepTime, StepTime]:
        tp, tokens, hidden, kernel_seconds = self.config.tp, self.tokens, self.shape.hidden, self.constants.kernel
        # Bytes per token at 2 bytes per element: the residual add reads two tensors and writes one, the norm reads one
        # and writes one (10 bytes per feature). Dropout adds a mask of 1 byte.
        bytes_between_blocks = (10 + self.software.dropout) * hidden / self.sequence_ranks
        forward, backward = StepTime(), StepTime()
        for attention in layer.attention:
            block_forward, block_backward = self._attention_time(attention)
            forward, backward = forward + block_forward, backward + block_backward
        for block in layer.blocks:
            block_forward, block_backward = self._block_time(block)
            saved_features = block.saved_features / tp + block.saved_replicated_features
            moved_bytes = tokens * (bytes_between_blocks + (2 * saved_features if block.has_pointwise_ops else 0.0))
            out_features, in_features = block.column_features / tp + block.replicated_features, block.row_features / tp
            cast_bytes = (tokens * 2 * (hidden + in_features), tokens * 4 * (out_features + hidden))
            if self.precision != "fp8":
                cast_bytes = (0.0, 0.0)
            forward += block_forward + StepTime(
                memory_bound=self._pointwise_seconds(moved_bytes + cast_bytes[0]) + 5 * kernel_seconds
            )
            backward += block_backward + StepTime(
                memory_bound=self._pointwise_seconds(2 * moved_bytes + cast_bytes[1]) + 7 * kernel_seconds
            )
        if self.config.ep > 1 and layer.experts:
            dispatch_bytes = self.element_bytes * tokens * hidden * layer.experts_per_token
            round_trip = StepTime(
                ep=2
                * self._collective_seconds(
                    dispatch_bytes, self.config.ep, tp * self.config.cp, uses_torch_distributed=True
                )
            )
            forward, backward = forward + round_trip, backward + round_trip
        if self.config.recompute == "full":
            recomputed_communication = StepTime(tp=forward.tp, cp=forward.cp, ep=forward.ep)
            backward += recomputed_communication + StepTime(recompute=forward.total - forward.communication)
        return forward, backward

    def _block_time(self, block: Block) -> tuple[StepTime, StepTime]:
        """Return forward and backward time of a block: its matmuls sharded over tp, and its replicated matmuls."""
        hidden, tp = self.shape.hidden, self.config.tp
        forward = backward = StepTime()
        if block.column_features or block.row_features:
            forward, backward = self._sharded_matmuls_time(block.column_features / tp, block.row_features / tp)
        if block.replicated_features:
            matmul_seconds = self._matmul_seconds(self.tokens, block.replicated_features, hidden)
            forward += StepTime(matmul=matmul_seconds)
            backward += StepTime(
                matmul=matmul_seconds + self._grad_weight_matmul_seconds(block.replicated_features, hidden)
            )
            # Replicated matmuls run on every rank's tokens, so their sharded input is all-gathered first.
            if self.config.sequence_parallel and not (block.column_features or block.row_features):
                gather_time = StepTime(tp=self._collective_seconds(self.element_bytes * self.tokens * hidden, tp, 1))
                forward, backward = forward + gather_time, backward + gather_time
        return forward, backward

    def _sharded_matmuls_time(self, column_features: float, row_features: float) -> tuple[StepTime, StepTime]:
        """Return forward and backward time of a column-parallel and a row-parallel matmul with their collectives.

        The operations of forward are an all-gather, the matmul hidden -> column_features, the matmul row_features ->
        hidden, and a reduce-scatter. Backward gathers the input a second time; this all-gather overlaps with the input
        gradient of the row-parallel matmul. Without sequence parallelism, one all-reduce per direction replaces the
        collectives; in backward it overlaps with the weight gradient of the column-parallel matmul, and in fused ops
        also with the input gradient.
        """
        hidden, tokens, tp = self.shape.hidden, self.tokens, self.config.tp
        column_seconds = (
            self._matmul_seconds(tokens, column_features, hidden),
            self._matmul_seconds(tokens, hidden, column_features),
            self._grad_weight_matmul_seconds(column_features, hidden),
        )
        row_seconds = (
            self._matmul_seconds(tokens, hidden, row_features),
            self._matmul_seconds(tokens, row_features, hidden),
            self._grad_weight_matmul_seconds(hidden, row_features),
        )
        num_elements = tokens * hidden / self.constants.fused_links
        gather_seconds = self._collective_seconds(
            (1 if self.precision == "fp8" else self.element_bytes) * num_elements, tp, 1
        )
        scatter_seconds = self._collective_seconds(self.element_bytes * num_elements, tp, 1)
        forward = StepTime(matmul=column_seconds[0] + row_seconds[0])
        backward = StepTime(matmul=sum(column_seconds[1:]) + sum(row_seconds[1:]))
        if self.config.sequence_parallel:
            exposed_forward_seconds = (
                self._exposed_seconds(column_seconds[0], gather_seconds),
                self._exposed_seconds(row_seconds[0], scatter_seconds),
            )
            # The weight gradient needs the gathered input, which backward gathers a second time.
            second_gather_seconds = gather_seconds - self._overlapped_seconds(gather_seconds, row_seconds[1])
            exposed_backward_seconds = (
                self._exposed_seconds(row_seconds[1], gather_seconds)
                + self._exposed_seconds(column_seconds[1], scatter_seconds)
                + second_gather_seconds
            )
            return forward + StepTime(tp=sum(exposed_forward_seconds)), backward + StepTime(tp=exposed_backward_seconds)
        reduce_seconds = 2 * scatter_seconds
        if self.software.fused_tp:
            exposed_backward_seconds = self._exposed_seconds(column_seconds[1] + column_seconds[2], reduce_seconds)
        else:
            exposed_backward_seconds = reduce_seconds - self._overlapped_seconds(reduce_seconds, column_seconds[2])
        return forward + StepTime(tp=self._exposed_seconds(row_seconds[0], reduce_seconds)), backward + StepTime(
            tp=exposed_backward_seconds
        )

    def _weight_grad_seconds(self, layer: Layer) -> float:
        """Return the seconds of the weight gradients of a layer, which zero-bubble schedules compute separately."""
        tp, hidden = self.config.tp, self.shape.hidden
        sizes = [
            n
            for block in layer.blocks
            for n in (block.column_features / tp, block.row_features / tp, block.replicated_features)
            if n
        ]
        return sum(self._grad_weight_matmul_seconds(size, hidden) for size in sizes)

    def _attention_time(self, attention: Attention) -> tuple[StepTime, StepTime]:
        """Return forward and backward time of attention, with the ring of keys and values."""
        cp, tp = self.config.cp, self.config.tp if attention.is_sharded else 1
        num_local_heads, num_local_kv_heads = attention.local_heads(tp)
        head_dim = attention.head_dim
        if self.software.attention == "flash":
            flops_per_second = self.machine.attention_flops * (self.constants.ring_attention if cp > 1 else 1)
            forward_seconds = (
                4 * self.tokens * attention.attended_tokens(self.seq) * num_local_heads * head_dim / flops_per_second
            )
            forward, backward = StepTime(attention=forward_seconds), StepTime(attention=2.5 * forward_seconds)
        else:
            num_scores = self.tokens * self.seq * num_local_heads
            num_matmuls = self.microbatch_rows * num_local_heads
            query_tokens = self.seq / cp
            launch_seconds = 2 * self.constants.kernel  # two batched matmuls launch two kernels for all heads and rows
            matmul_seconds = self._matmul_seconds(query_tokens, self.seq, head_dim, self._dense_precision)
            matmul_seconds += (
                self._matmul_seconds(query_tokens, head_dim, self.seq, self._dense_precision) - launch_seconds
            )
            products_seconds = num_matmuls * matmul_seconds + launch_seconds
            # Bytes per score: 2 written, 4 for softmax, 5 for dropout with its mask, 2 read.
            softmax_seconds = self._pointwise_seconds((2 + 4 + 5 * self.software.dropout + 2) * num_scores)
            forward = StepTime(attention=products_seconds + softmax_seconds)
            backward = StepTime(attention=2 * (products_seconds + softmax_seconds))
            if self.software.attention == "selective":
                backward += StepTime(recompute=products_seconds / 2 + softmax_seconds)
        ring_seconds = 0.0
        if cp > 1 and self.config.ulysses_size == 1:
            gathered_bytes = 2 * self.element_bytes * cp * self.tokens * num_local_kv_heads * head_dim
            step_seconds = self._collective_seconds(gathered_bytes, cp, tp) / (cp - 1)
            overlapped_seconds = self._overlapped_seconds(step_seconds, forward.attention / cp)
            ring_seconds = (cp - 1) * (step_seconds - overlapped_seconds + OVERLAP_COST * overlapped_seconds)
        elif cp > 1:
            sent_bytes = self.tokens * (2 * num_local_heads + 2 * num_local_kv_heads) * head_dim * self.element_bytes
            ring_seconds = self._collective_seconds(sent_bytes, cp, tp)
        exchange_bytes = self.tokens * self.element_bytes * _exchanged_features(attention, tp)
        exchange_seconds = self._collective_seconds(exchange_bytes, tp, 1) if exchange_bytes else 0.0
        return (
            forward + StepTime(cp=ring_seconds, tp=exchange_seconds),
            backward + StepTime(cp=2 * ring_seconds, tp=exchange_seconds),
        )

    @cached_property
    def _logit_features(self) -> float:
        """Number of logits per token on a rank."""
        output = self.shape.output
        return self.shape.vocab * output.on_rank(self.config.tp) / max(1, output.count)

    @cached_property
    def _output_layer_time(self) -> StepTime:
        """Time of the output layer and the loss, forward and backward."""
        logit_features, tokens, hidden = self._logit_features, self.tokens, self.shape.hidden
        matmul_seconds = self._matmul_seconds(
            tokens, logit_features, hidden, self._dense_precision
        ) + self._matmul_seconds(tokens, hidden, logit_features, self._dense_precision)
        matmul_seconds += self._grad_weight_matmul_seconds(logit_features, hidden, self._dense_precision)
        gather_seconds = self._collective_seconds(self.element_bytes * tokens * hidden, self.config.tp, 1)
        # The loss is fp32 for every precision.
        loss_seconds = self._memory_seconds(20 * tokens * logit_features, self.constants.pointwise)
        return StepTime(matmul=matmul_seconds, memory_bound=loss_seconds, tp=2 * gather_seconds)

    # -- time of a step -----------------------------------------------------------------------------------------------

    @cached_property
    def time(self) -> StepTime:
        """Time of one training step by component, in seconds."""
        config, pp, microbatches = self.config, self.config.pp, self.config.microbatches
        forward, backward = self.mean_layer_times
        layer_times = [layer_forward + layer_backward for layer_forward, layer_backward in self._layer_times]
        stage_times = {
            counts: _sum_over_layers(layer_times, counts) for counts in dict.fromkeys(self._layer_counts_of_stages)
        }
        longest_stage_time = max(stage_times.values(), key=lambda stage: stage.total)
        first_rank_time, last_rank_time = (
            longest_stage_time * self.stages_per_rank,
            longest_stage_time * (self.stages_per_rank - 1)
            + stage_times[self._layer_counts_of_stages[-1]]
            + self._output_layer_time,
        )
        slowest_rank_time = (
            last_rank_time if last_rank_time.total > first_rank_time.total or pp == 1 else first_rank_time
        )
        layers_per_rank = self.shape.layers / pp
        mean_rank_seconds = (forward.total + backward.total) * layers_per_rank + self._output_layer_time.total / pp
        step_time = slowest_rank_time * microbatches + StepTime(
            dp=self._exposed_dp_seconds(forward.total, backward.total)
        )
        if pp > 1:
            idle_seconds = mean_rank_seconds
            if SCHEDULES[config.schedule].splits_backward:
                # torch's ZBV and DualPipeV schedules have this idle time, too: all ranks begin and end a step together.
                (counts,) = self.shape.layer_counts_of_stages(1)
                weight_grad_seconds = (
                    sum(
                        n * self._weight_grad_seconds(kind)
                        for n, kind in zip(counts, self.shape.layer_kinds, strict=True)
                    )
                    / pp
                )
                idle_seconds = max(forward.total * layers_per_rank, mean_rank_seconds - 2 * weight_grad_seconds)
            bubble_seconds = (pp - 1) / self.stages_per_rank * idle_seconds
            num_sending_ranks = config.tp if self.software.split_sends else self.sequence_ranks
            num_stage_ranks = config.tp * config.cp * config.data_parallel
            message_seconds = self._collective_seconds(
                2 * self.element_bytes * self.tokens * self.shape.hidden / num_sending_ranks,
                2,
                num_stage_ranks,
                uses_torch_distributed=True,
            )
            # Interleaved stages compute other microbatches during a message, which hides it.
            num_exposed_messages = 2 * (microbatches if self.stages_per_rank == 1 else 0) + 2 * (pp - 1)
            step_time += StepTime(bubble=bubble_seconds, pp=num_exposed_messages * message_seconds)
        # Bytes per parameter; bf16 adds an fp32 copy of the weights.
        adam_bytes = 28 if self.precision == "fp32" else 32
        optimizer_seconds = self._memory_seconds(adam_bytes * self._optimized_parameters, self.constants.optimizer)
        if self.config.tp > 1 or self.config.is_sharded:
            optimizer_seconds += (
                self._sum_on_largest_rank(lambda layer: layer.tensor_count) + 3
            ) * self.constants.dtensor
        return step_time + StepTime(optimizer=optimizer_seconds)

    def _exposed_dp_seconds(self, layer_forward_seconds: float, layer_backward_seconds: float) -> float:
        """Return the exposed seconds of gradient and parameter communication between data parallel ranks."""
        config, gradient_bytes, microbatches = self.config, self.software.gradient_bytes, self.config.microbatches
        can_overlap = self.software.overlap_dp and self.machine.overlaps
        # Without FSDP2, fused_tp's transport reduces gradients over cp and ep ranks; otherwise torch.distributed does.
        collective_seconds = partial(
            self._collective_seconds, uses_torch_distributed=config.is_sharded or self.software.shards == "optimizer"
        )
        if self.software.shards == "optimizer":
            compute_seconds = self.layers_on_rank * layer_forward_seconds, self.layers_on_rank * layer_backward_seconds
            reduce_seconds, gather_seconds = 0.0, 0.0
            for group in self._parameter_groups:
                num_passes = 2 if group.num_shards == 1 else 1
                reduce_seconds += collective_seconds(
                    gradient_bytes * group.num_parameters,
                    group.num_shards * group.num_replicas,
                    group.neighbor_distance,
                    num_passes,
                )
                gather_seconds += collective_seconds(
                    self.element_bytes * group.num_parameters, group.num_shards, group.neighbor_distance
                )
            if not can_overlap:
                return reduce_seconds + gather_seconds
            return sum(
                max(communication_seconds / self.layers_on_rank, communication_seconds - overlapping_seconds)
                for communication_seconds, overlapping_seconds in zip(
                    (gather_seconds, reduce_seconds), compute_seconds, strict=True
                )
            )
        gather_seconds, scatter_seconds, reduce_replicas_seconds = 0.0, 0.0, 0.0  # per layer
        for group in self._parameter_groups:
            layer_parameters = group.num_parameters / self.layers_on_rank
            gather_seconds += collective_seconds(
                self.element_bytes * layer_parameters, group.num_shards, group.neighbor_distance
            )
            scatter_seconds += collective_seconds(
                gradient_bytes * layer_parameters, group.num_shards, group.neighbor_distance
            )
            reduce_replicas_seconds += collective_seconds(
                gradient_bytes * layer_parameters / group.num_shards,
                group.num_replicas,
                group.neighbor_distance * group.num_shards,
                num_passes=2,
            )
        # Gradients are reduced after the last microbatch. A pipeline gathers parameters once per step; without a
        # pipeline, each forward and each backward gathers them.
        if not can_overlap:
            return self.layers_on_rank * (
                (1 if config.pp > 1 else 2 * microbatches) * gather_seconds + scatter_seconds + reduce_replicas_seconds
            )
        if config.pp > 1:
            return (
                gather_seconds
                + scatter_seconds
                + self.layers_on_rank
                * (
                    max(0.0, gather_seconds - layer_forward_seconds)
                    + max(0.0, scatter_seconds + reduce_replicas_seconds - layer_backward_seconds)
                )
            )
        middle_microbatch_seconds, last_microbatch_seconds = (
            max(0.0, gather_seconds - layer_backward_seconds),
            max(0.0, gather_seconds + scatter_seconds + reduce_replicas_seconds - layer_backward_seconds),
        )
        forward_gather_seconds = gather_seconds + self.layers_on_rank * max(0.0, gather_seconds - layer_forward_seconds)
        return (
            microbatches * forward_gather_seconds
            + self.layers_on_rank * ((microbatches - 1) * middle_microbatch_seconds + last_microbatch_seconds)
            + reduce_replicas_seconds
        )

    # -- throughput ---------------------------------------------------------------------------------------------------

    @property
    def flops(self) -> float:
        """Model FLOPs of one step per rank, without recomputation."""
        return self.shape.flops(self.global_batch * self.seq, self.seq) / self.config.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (MFU), the share of the precision's peak FLOP/s that the model reaches."""
        return self.flops / self.time.total / self.machine.peak(self.precision)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return self.global_batch * self.seq / self.time.total

    # -- memory -------------------------------------------------------------------------------------------------------

    def _sum_on_largest_rank(self, layer_value: Callable[[Layer], float]) -> float:
        """Return the sum of `layer_value` over the layers of the largest pipeline rank.

        All stages of that rank count as the largest stage.
        """
        values = [layer_value(kind) for kind in self.shape.layer_kinds]
        return self.stages_per_rank * max(sum(map(mul, values, counts)) for counts in set(self._layer_counts_of_stages))

    def _expert_parameters(self, layer: Layer) -> float:
        """Return the number of expert parameters of a layer on a rank."""
        return layer.expert_weights.on_rank(self.config.tp) / self.config.ep

    def _layer_parameters(self, layer: Layer) -> float:
        """Return the number of parameters of a layer on a rank, before data parallelism shards them."""
        return layer.weights.on_rank(self.config.tp) + self._expert_parameters(layer)

    @cached_property
    def _parameters_on_rank(self) -> float:
        """Number of parameters on the rank that holds the most, before data parallelism shards them."""
        end_parameters = [weights.on_rank(self.config.tp) for weights in (self.shape.embedding, self.shape.output)]
        parameters_outside = (
            max(end_parameters)
            if self.config.pp > 1
            else end_parameters[0] + (0 if self.shape.is_tied else end_parameters[1])
        )
        return self._sum_on_largest_rank(self._layer_parameters) + parameters_outside

    @cached_property
    def _parameter_groups(self) -> list[_ParameterGroup]:
        """Parameters of the rank in two groups: parameters that ep ranks replicate, and experts distributed over ep."""
        config = self.config
        distributed_experts = self._sum_on_largest_rank(self._expert_parameters) if config.ep > 1 else 0.0
        groups = []
        for num_parameters, num_ep_replicas in (
            (self._parameters_on_rank - distributed_experts, config.ep),
            (distributed_experts, 1),
        ):
            if self.software.shards == "optimizer":
                num_ranks = config.data_parallel // config.ep * num_ep_replicas * config.cp
                num_shards, num_replicas = (num_ranks, 1) if config.dp_shard * config.ep > 1 else (1, num_ranks)
            elif config.is_sharded:
                num_shards, num_replicas = config.dp_shard * config.cp * num_ep_replicas, config.dp_replicate
            else:  # cp ranks replicate parameters, too
                num_shards, num_replicas = 1, config.cp * num_ep_replicas
            if num_parameters:
                groups.append(
                    _ParameterGroup(num_parameters, num_shards, num_replicas, config.tp * config.ep // num_ep_replicas)
                )
        return groups

    @cached_property
    def _optimized_parameters(self) -> float:
        """Number of parameters whose optimizer state the rank keeps."""
        return sum(group.num_parameters / group.num_shards for group in self._parameter_groups)

    @cached_property
    def memory(self) -> Memory:
        """Bytes on the rank that needs the most memory.

        In a pipeline this is the first rank, which keeps the most microbatches, or the last, which holds the logits.
        """
        config, shape = self.config, self.shape
        weights, gradients = self.element_bytes * self._parameters_on_rank, 4 * self._parameters_on_rank
        if self.software.shards == "parameters" and config.is_sharded and config.pp == 1:
            # FSDP2 holds at most three modules gathered: the running layer, the prefetched one, and the output layer.
            gathered_parameters = 2 * max(map(self._layer_parameters, shape.layer_kinds)) + shape.output.on_rank(
                config.tp
            )
            weights = self.element_bytes * min(self._parameters_on_rank, gathered_parameters)
            if config.microbatches == 1:  # several microbatches accumulate unsharded gradients
                gradients = 4 * self._optimized_parameters
        logit_bytes = self.tokens * (2 * self.element_bytes * shape.hidden / self.sequence_ranks)
        logit_bytes += self.tokens * (self.element_bytes + 4) * self._logit_features
        first_rank_bytes = self._sum_on_largest_rank(self._activation_bytes) * self._microbatches_in_flight
        last_rank_bytes = self._sum_on_largest_rank(self._activation_bytes) + logit_bytes
        if config.recompute == "full":
            without_recompute = replace(self, config=replace(config, recompute="none"))
            recomputed_bytes = max(map(without_recompute._activation_bytes, shape.layer_kinds))
            first_rank_bytes, last_rank_bytes = first_rank_bytes + recomputed_bytes, last_rank_bytes + recomputed_bytes
        is_last_rank = last_rank_bytes > first_rank_bytes or config.pp == 1
        return Memory(
            weights=weights,
            gradients=gradients,
            optimizer=(8 if self.precision == "fp32" else 12) * self._optimized_parameters,
            activations=(last_rank_bytes - logit_bytes) if is_last_rank else first_rank_bytes,
            logits=logit_bytes if is_last_rank else 0.0,
        )

    def _activation_bytes(self, layer: Layer) -> float:
        """Return the bytes that a layer saves per microbatch for backward.

        The terms of table 2 in Korthikanti et al. (arXiv:2205.05198) are counted separately, to cover grouped heads,
        gated MLPs and experts. For ungrouped heads, an MLP of width 4 h, and dropout, they sum to the paper's 34 s b h.
        """
        hidden, tp = self.shape.hidden, self.config.tp
        if self.config.recompute == "full":
            return self.tokens * self.element_bytes * hidden / self.sequence_ranks
        # Each block keeps the input and the output of its norm.
        saved_features = len(layer.blocks) * (4 + self.software.dropout) * hidden / self.sequence_ranks
        saved_features += sum(
            2 * (block.saved_features / tp + block.saved_replicated_features) for block in layer.blocks
        )
        if self.software.attention == "unfused":
            num_local_heads = sum(attention.local_heads(tp)[0] for attention in layer.attention)
            saved_features += (4 + self.software.dropout) * num_local_heads * self.seq
        return self.tokens * saved_features * self.element_bytes / 2

    @property
    def _microbatches_in_flight(self) -> float:
        """Number of microbatches whose activations the first rank keeps (arXiv:2205.05198, section 4.2.3)."""
        pp, microbatches = self.config.pp, self.config.microbatches
        if self.config.schedule == "GPipe" and pp > 1:
            return microbatches
        if self.stages_per_rank == 1 or self.config.schedule in ("ZBVZeroBubble", "DualPipeV"):
            return min(microbatches, pp)
        return min(microbatches, pp * (1 + (pp - 1) / (pp * self.stages_per_rank)))


def _sum_over_layers(kind_times: Iterable[StepTime], counts: Iterable[int]) -> StepTime:
    """Return the sum of times over all layers, from the time of a layer of each kind and the number of such layers."""
    return sum((time * n for time, n in zip(kind_times, counts, strict=True) if n), StepTime())


def _exchanged_features(attention: Attention, tp: int) -> int:
    """Return the number of features per token that ranks with uneven heads gather in q, k, v and the output layer."""
    if not attention.has_uneven_heads(tp):
        return 0
    num_features = 0
    for kind, num_heads, num_layers in (("query", attention.num_heads, 2), ("kv", attention.num_kv_heads, 2)):
        layout = HeadLayout(kind, attention.num_heads, attention.num_kv_heads)
        exchange = layout.output_exchange(num_heads * round(attention.head_dim), tp)
        num_features += num_layers * exchange.num_gathered_features
    return num_features
