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
fitted, only on the eight step times of table 5 in arXiv:2205.05198: see `fused_tp.planning.hardware.FITTED` and
`fused_tp.planning.published`. `fused_tp.planning.measure` measures the constants of a machine instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import log2
from operator import mul

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
        more = vars(other)
        return StepTime(**{name: value + more[name] for name, value in vars(self).items()})

    def __mul__(self, times: float) -> StepTime:
        return StepTime(**{name: value * times for name, value in vars(self).items()})


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
        count: number of parameters on a rank before data parallelism shards them.
        shards: number of ranks that shard them.
        copies: number of ranks that replicate them.
        inside: distance in ranks between two neighbors of such a group.
    """

    count: float
    shards: int
    copies: int
    inside: int


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
    def rows(self) -> float:
        """Rows of a microbatch."""
        return self.global_batch / (self.config.data_parallel * self.config.microbatches)

    @cached_property
    def tokens(self) -> float:
        """Tokens of a microbatch on one context parallel rank."""
        return self.rows * self.seq / self.config.cp

    @cached_property
    def stages(self) -> int:
        """Stages per pipeline rank."""
        return self.config.virtual_stages or 1

    @cached_property
    def layers(self) -> int:
        """Number of layers of the largest pipeline rank, counting each of its stages as long as the longest stage."""
        return -(-self.shape.layers // (self.config.pp * self.stages)) * self.stages

    @cached_property
    def _stage_layers(self) -> list[tuple[int, ...]]:
        """Number of layers of each kind in each stage of the pipeline."""
        return self.shape.stages(self.config.pp * self.stages)

    @cached_property
    def spread(self) -> int:
        """Number of ranks that sequence parallelism shards the tokens between layers over."""
        return self.config.tp if self.config.sequence_parallel else 1

    @cached_property
    def element(self) -> int:
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

    def _memory_seconds(self, count: float, share: float | None = None) -> float:
        return count / (self.machine.memory_bandwidth * (share or self.constants.memory))

    def _pointwise_seconds(self, count: float) -> float:
        """Seconds of pointwise ops between matmuls; `count`: bytes that they would move in bf16."""
        return self._memory_seconds(count * self.element / 2, self.constants.pointwise)

    def _matmul_seconds(
        self, m: float, n: float, k: float, precision: str | None = None, written: int | None = None
    ) -> float:
        """Seconds of a matmul [m, k] x [k, n]; `written`: bytes moved per element of the result."""
        precision = precision or self.precision
        element = 1 if precision == "fp8" else self.element
        rate = self.machine.matmul_flops[precision] * (self.constants.fused_matmul if self.config.tp > 1 else 1)
        moved = element * (m * k + k * n) + (written or self.element) * m * n
        return 2 * m * n * k / rate + self._memory_seconds(moved) + self.constants.kernel

    def _grad_weight_matmul_seconds(self, wide: float, narrow: float, precision: str | None = None) -> float:
        """Seconds of the gradient of a weight [wide, narrow], which is accumulated in fp32."""
        return self._matmul_seconds(wide, narrow, self.tokens, precision, written=8)

    def _collective_seconds(
        self, count: float, ranks: int, inside: int, times: int = 1, messages: bool = False
    ) -> float:
        """Seconds of an all-gather or reduce-scatter.

        Args:
            count: bytes of the gathered tensor.
            ranks: number of participating ranks.
            inside: number of ranks of the inner mesh dims, that is, the distance in ranks between two neighbors.
            times: 2 for an all-reduce.
            messages: torch.distributed communicates, at `Machine.message_bandwidth`, not fused_tp's transport.
        """
        if ranks == 1:
            return 0.0
        machine = self.machine
        local = max(1, min(ranks, machine.ranks_per_node // inside))
        bandwidth, latency = machine.link_bandwidth, machine.link_latency
        if messages:
            bandwidth, latency = machine.message_bandwidth or bandwidth, machine.message_latency or latency
        bandwidth *= self.constants.links
        if local < ranks:
            # Each GPU has a network adapter, so the local ranks together have `local` times its bandwidth.
            bandwidth = min(bandwidth, machine.network_bandwidth * self.constants.network * local)
            latency = machine.network_latency
        return times * (latency * log2(ranks) + count * (ranks - 1) / ranks / bandwidth)

    def _hidden_seconds(self, collective: float, compute: float) -> float:
        """Seconds of a collective that overlap with compute of `compute` seconds."""
        return min(collective, compute) if self.machine.overlaps else 0.0

    def _exposed_seconds(self, matmul: float, collective: float) -> float:
        """Exposed seconds of a collective overlapped with a matmul; both run in tp steps with separate kernels."""
        if not self.software.fused_tp:
            return collective
        hidden = self._hidden_seconds(collective, matmul) * (1 - 1 / self.config.tp)
        kernels = (self.config.tp - 1) * self.constants.kernel
        return min(collective, collective - (1 - OVERLAP_COST) * hidden + kernels)

    @cached_property
    def layer(self) -> tuple[StepTime, StepTime]:
        """Forward and backward time of a layer and a microbatch, averaged over all layers."""
        (counts,) = self.shape.stages(1)
        forward, backward = (_sum_over_layers(times, counts) for times in zip(*self._layer_times, strict=True))
        return forward * (1 / self.shape.layers), backward * (1 / self.shape.layers)

    @cached_property
    def _layer_times(self) -> list[tuple[StepTime, StepTime]]:
        """Forward and backward time of a microbatch for a layer of each kind."""
        return [self._layer_time(kind) for kind in self.shape.kinds]

    def _layer_time(self, layer: Layer) -> tuple[StepTime, StepTime]:
        tp, tokens, hidden, kernel = self.config.tp, self.tokens, self.shape.hidden, self.constants.kernel
        between = (10 + self.software.dropout) * hidden / self.spread  # bytes per token of a norm and a residual sum
        forward, backward = StepTime(), StepTime()
        for attention in layer.attention:
            ahead, back = self._attention_time(attention)
            forward, backward = forward + ahead, backward + back
        for block in layer.blocks:
            ahead, back = self._block_time(block)
            inside = block.kept / tp + block.kept_whole
            moved = tokens * (between + (2 * inside if block.pointwise else 0.0))
            outputs, inputs = block.wide / tp + block.whole, block.narrow / tp
            casts = (tokens * 2 * (hidden + inputs), tokens * 4 * (outputs + hidden))
            if self.precision != "fp8":
                casts = (0.0, 0.0)
            forward += ahead + StepTime(memory_bound=self._pointwise_seconds(moved + casts[0]) + 5 * kernel)
            backward += back + StepTime(memory_bound=self._pointwise_seconds(2 * moved + casts[1]) + 7 * kernel)
        if self.config.ep > 1 and layer.experts:
            sent = self.element * tokens * hidden * layer.experts_per_token
            there_and_back = StepTime(
                ep=2 * self._collective_seconds(sent, self.config.ep, tp * self.config.cp, messages=True)
            )
            forward, backward = forward + there_and_back, backward + there_and_back
        if self.config.recompute == "full":
            again = StepTime(tp=forward.tp, cp=forward.cp, ep=forward.ep)
            backward += again + StepTime(recompute=forward.total - forward.communication)
        return forward, backward

    def _block_time(self, block: Block) -> tuple[StepTime, StepTime]:
        """Forward and backward time of a block: its matmuls sharded over tp, and its replicated matmuls."""
        hidden, tp = self.shape.hidden, self.config.tp
        forward = backward = StepTime()
        if block.wide or block.narrow:
            forward, backward = self._sharded_matmuls_time(block.wide / tp, block.narrow / tp)
        if block.whole:
            one = self._matmul_seconds(self.tokens, block.whole, hidden)
            forward += StepTime(matmul=one)
            backward += StepTime(matmul=one + self._grad_weight_matmul_seconds(block.whole, hidden))
            # Replicated matmuls run on every rank's tokens, so their sharded input is all-gathered first.
            if self.config.sequence_parallel and not (block.wide or block.narrow):
                gather = StepTime(tp=self._collective_seconds(self.element * self.tokens * hidden, tp, 1))
                forward, backward = forward + gather, backward + gather
        return forward, backward

    def _sharded_matmuls_time(self, wide: float, narrow: float) -> tuple[StepTime, StepTime]:
        """Time of an all-gather and a matmul hidden -> wide, then a matmul narrow -> hidden and a reduce-scatter.

        Without sequence parallelism, one all-reduce per direction replaces both collectives. In backward, the weight
        gradient hides this all-reduce; with sequence parallelism it hides the all-gather.
        """
        hidden, tokens, tp = self.shape.hidden, self.tokens, self.config.tp
        first = (
            self._matmul_seconds(tokens, wide, hidden),
            self._matmul_seconds(tokens, hidden, wide),
            self._grad_weight_matmul_seconds(wide, hidden),
        )
        last = (
            self._matmul_seconds(tokens, hidden, narrow),
            self._matmul_seconds(tokens, narrow, hidden),
            self._grad_weight_matmul_seconds(hidden, narrow),
        )
        count = tokens * hidden / self.constants.fused_links
        gather = self._collective_seconds((1 if self.precision == "fp8" else self.element) * count, tp, 1)
        scatter = self._collective_seconds(self.element * count, tp, 1)
        forward = StepTime(matmul=first[0] + last[0])
        backward = StepTime(matmul=sum(first[1:]) + sum(last[1:]))
        if self.config.sequence_parallel:
            exposed = self._exposed_seconds(first[0], gather), self._exposed_seconds(last[0], scatter)
            # The weight gradient needs the gathered input, which backward gathers a second time.
            again = gather - self._hidden_seconds(gather, last[1])
            back = self._exposed_seconds(last[1], gather) + self._exposed_seconds(first[1], scatter) + again
            return forward + StepTime(tp=sum(exposed)), backward + StepTime(tp=back)
        reduce = 2 * scatter
        if self.software.fused_tp:
            back = self._exposed_seconds(first[1] + first[2], reduce)
        else:
            back = reduce - self._hidden_seconds(reduce, first[2])
        return forward + StepTime(tp=self._exposed_seconds(last[0], reduce)), backward + StepTime(tp=back)

    def _weight_grad_seconds(self, layer: Layer) -> float:
        """Seconds of the weight gradients of a layer, which zero-bubble schedules compute separately."""
        tp, hidden = self.config.tp, self.shape.hidden
        sizes = [n for one in layer.blocks for n in (one.wide / tp, one.narrow / tp, one.whole) if n]
        return sum(self._grad_weight_matmul_seconds(size, hidden) for size in sizes)

    def _attention_time(self, attention: Attention) -> tuple[StepTime, StepTime]:
        """Forward and backward time of attention, with the ring of keys and values."""
        cp, tp = self.config.cp, self.config.tp if attention.sharded else 1
        heads, head_dim = attention.heads / tp, attention.head_dim
        if self.software.attention == "flash":
            rate = self.machine.attention_flops * (self.constants.ring_attention if cp > 1 else 1)
            seconds = 4 * self.tokens * attention.seen(self.seq) * heads * head_dim / rate
            forward, backward = StepTime(attention=seconds), StepTime(attention=2.5 * seconds)
        else:
            scores = self.tokens * self.seq * heads
            batch = self.rows * heads
            length = self.seq / cp
            kernels = 2 * self.constants.kernel  # two batched matmuls launch two kernels for all heads and rows
            one = self._matmul_seconds(length, self.seq, head_dim, self._dense_precision)
            one += self._matmul_seconds(length, head_dim, self.seq, self._dense_precision) - kernels
            products = batch * one + kernels
            # Bytes per score: 2 written, 4 for softmax, 5 for dropout with its mask, 2 read.
            softmax = self._pointwise_seconds((2 + 4 + 5 * self.software.dropout + 2) * scores)
            forward = StepTime(attention=products + softmax)
            backward = StepTime(attention=2 * (products + softmax))
            if self.software.attention == "selective":
                backward += StepTime(recompute=products / 2 + softmax)
        ring = 0.0
        if cp > 1 and self.config.ulysses_size == 1:
            count = 2 * self.element * cp * self.tokens * attention.kv_heads * head_dim / tp
            step = self._collective_seconds(count, cp, tp) / (cp - 1)
            hidden = self._hidden_seconds(step, forward.attention / cp)
            ring = (cp - 1) * (step - hidden + OVERLAP_COST * hidden)
        elif cp > 1:
            sent = self.tokens * (2 * attention.heads + 2 * attention.kv_heads) * head_dim / tp * self.element
            ring = self._collective_seconds(sent, cp, tp)
        return forward + StepTime(cp=ring), backward + StepTime(cp=2 * ring)

    @cached_property
    def _logit_features(self) -> float:
        """Number of logits per token on a rank."""
        output = self.shape.output
        return self.shape.vocab * output.on_rank(self.config.tp) / max(1, output.count)

    @cached_property
    def _output_layer_time(self) -> StepTime:
        """Time of the output layer and the loss, forward and backward."""
        width, tokens, hidden = self._logit_features, self.tokens, self.shape.hidden
        seconds = self._matmul_seconds(tokens, width, hidden, self._dense_precision) + self._matmul_seconds(
            tokens, hidden, width, self._dense_precision
        )
        seconds += self._grad_weight_matmul_seconds(width, hidden, self._dense_precision)
        gather = self._collective_seconds(self.element * tokens * hidden, self.config.tp, 1)
        loss = self._memory_seconds(
            20 * tokens * width, self.constants.pointwise
        )  # the loss is fp32 for every precision
        return StepTime(matmul=seconds, memory_bound=loss, tp=2 * gather)

    # -- time of a step -----------------------------------------------------------------------------------------------

    @cached_property
    def time(self) -> StepTime:
        """Time of one training step by component, in seconds."""
        config, pp, micro = self.config, self.config.pp, self.config.microbatches
        forward, backward = self.layer
        layers = [ahead + back for ahead, back in self._layer_times]
        stages = {counts: _sum_over_layers(layers, counts) for counts in dict.fromkeys(self._stage_layers)}
        longest = max(stages.values(), key=lambda stage: stage.total)
        first, last = (
            longest * self.stages,
            longest * (self.stages - 1) + stages[self._stage_layers[-1]] + self._output_layer_time,
        )
        slowest = last if last.total > first.total or pp == 1 else first
        share = self.shape.layers / pp
        mean = (forward.total + backward.total) * share + self._output_layer_time.total / pp
        step = slowest * micro + StepTime(dp=self._exposed_dp_seconds(forward.total, backward.total))
        if pp > 1:
            idle = mean
            if SCHEDULES[config.schedule].splits_backward:
                # torch's ZBV and DualPipeV schedules have this idle time, too: all ranks begin and end a step together.
                (counts,) = self.shape.stages(1)
                weights = (
                    sum(n * self._weight_grad_seconds(kind) for n, kind in zip(counts, self.shape.kinds, strict=True))
                    / pp
                )
                idle = max(forward.total * share, mean - 2 * weights)
            bubble = (pp - 1) / self.stages * idle
            split = config.tp if self.software.split_sends else self.spread
            inside = config.tp * config.cp * config.data_parallel
            hop = self._collective_seconds(
                2 * self.element * self.tokens * self.shape.hidden / split, 2, inside, messages=True
            )
            # Interleaved stages compute other microbatches during a message, which hides it.
            hops = 2 * (micro if self.stages == 1 else 0) + 2 * (pp - 1)
            step += StepTime(bubble=bubble, pp=hops * hop)
        adam = 28 if self.precision == "fp32" else 32  # bytes per parameter; bf16 adds an fp32 copy of the weights
        optimizer = self._memory_seconds(adam * self._optimized_parameters, self.constants.optimizer)
        if self.config.tp > 1 or self.config.is_sharded:
            optimizer += (self._on_largest_rank(lambda layer: layer.tensors) + 3) * self.constants.dtensor
        return step + StepTime(optimizer=optimizer)

    def _exposed_dp_seconds(self, forward: float, backward: float) -> float:
        """Exposed seconds of gradient and parameter communication between data parallel ranks."""
        config, gradient_bytes, micro = self.config, self.software.gradient_bytes, self.config.microbatches
        overlap = self.software.overlap_dp and self.machine.overlaps
        # Without FSDP2, fused_tp's transport reduces gradients over cp and ep ranks; otherwise torch.distributed does.
        ring = partial(self._collective_seconds, messages=config.is_sharded or self.software.shards == "optimizer")
        if self.software.shards == "optimizer":
            window = self.layers * forward, self.layers * backward
            gradients, weights = 0.0, 0.0
            for part in self._parameter_groups:
                times = 2 if part.shards == 1 else 1
                gradients += ring(gradient_bytes * part.count, part.shards * part.copies, part.inside, times)
                weights += ring(self.element * part.count, part.shards, part.inside)
            if not overlap:
                return gradients + weights
            return sum(
                max(one / self.layers, one - seconds) for one, seconds in zip((weights, gradients), window, strict=True)
            )
        weights, scatter, over = 0.0, 0.0, 0.0  # per layer
        for part in self._parameter_groups:
            local = part.count / self.layers
            weights += ring(self.element * local, part.shards, part.inside)
            scatter += ring(gradient_bytes * local, part.shards, part.inside)
            over += ring(gradient_bytes * local / part.shards, part.copies, part.inside * part.shards, times=2)
        # Gradients are reduced after the last microbatch. A pipeline gathers parameters once per step; without a
        # pipeline, each forward and each backward gathers them.
        if not overlap:
            return self.layers * ((1 if config.pp > 1 else 2 * micro) * weights + scatter + over)
        if config.pp > 1:
            return weights + scatter + self.layers * (max(0.0, weights - forward) + max(0.0, scatter + over - backward))
        each, last = max(0.0, weights - backward), max(0.0, weights + scatter + over - backward)
        first = weights + self.layers * max(0.0, weights - forward)
        return micro * first + self.layers * ((micro - 1) * each + last) + over

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

    def _on_largest_rank(self, of_layer: Callable[[Layer], float]) -> float:
        """Sum of `of_layer` over the layers of the largest pipeline rank; its stages all count as the largest stage."""
        found = [of_layer(kind) for kind in self.shape.kinds]
        return self.stages * max(sum(map(mul, found, counts)) for counts in set(self._stage_layers))

    def _expert_parameters(self, layer: Layer) -> float:
        """Number of expert parameters of a layer on a rank."""
        return layer.expert_weights.on_rank(self.config.tp) / self.config.ep

    def _layer_parameters(self, layer: Layer) -> float:
        """Number of parameters of a layer on a rank, before data parallelism shards them."""
        return layer.weights.on_rank(self.config.tp) + self._expert_parameters(layer)

    @cached_property
    def _parameters_on_rank(self) -> float:
        """Number of parameters on the rank that holds the most, before data parallelism shards them."""
        ends = [one.on_rank(self.config.tp) for one in (self.shape.embedding, self.shape.output)]
        at_ends = max(ends) if self.config.pp > 1 else ends[0] + (0 if self.shape.tied else ends[1])
        return self._on_largest_rank(self._layer_parameters) + at_ends

    @cached_property
    def _parameter_groups(self) -> list[_ParameterGroup]:
        """Parameters of the rank in two groups: experts distributed over ep, not replicated there, and the rest."""
        config = self.config
        dealt = self._on_largest_rank(self._expert_parameters) if config.ep > 1 else 0.0
        parts = []
        for count, ep in ((self._parameters_on_rank - dealt, config.ep), (dealt, 1)):
            if self.software.shards == "optimizer":
                ranks = config.data_parallel // config.ep * ep * config.cp
                shards, copies = (ranks, 1) if config.dp_shard * config.ep > 1 else (1, ranks)
            elif config.is_sharded:
                shards, copies = config.dp_shard * config.cp * ep, config.dp_replicate
            else:  # cp ranks replicate parameters, too
                shards, copies = 1, config.cp * ep
            if count:
                parts.append(_ParameterGroup(count, shards, copies, config.tp * config.ep // ep))
        return parts

    @cached_property
    def _optimized_parameters(self) -> float:
        """Number of parameters whose optimizer state the rank keeps."""
        return sum(part.count / part.shards for part in self._parameter_groups)

    @cached_property
    def memory(self) -> Memory:
        """Bytes on the rank that needs the most memory.

        In a pipeline this is the first rank, which keeps the most microbatches, or the last, which holds the logits.
        """
        config, shape = self.config, self.shape
        weights, gradients = self.element * self._parameters_on_rank, 4 * self._parameters_on_rank
        if self.software.shards == "parameters" and config.is_sharded and config.pp == 1:
            # FSDP2 holds at most three modules gathered: the running layer, the prefetched one, and the output layer.
            at_once = 2 * max(map(self._layer_parameters, shape.kinds)) + shape.output.on_rank(config.tp)
            weights = self.element * min(self._parameters_on_rank, at_once)
            if config.microbatches == 1:  # several microbatches accumulate unsharded gradients
                gradients = 4 * self._optimized_parameters
        logits = self.tokens * (2 * self.element * shape.hidden / self.spread)
        logits += self.tokens * (self.element + 4) * self._logit_features
        first = self._on_largest_rank(self._activation_bytes) * self._microbatches_in_flight
        last = self._on_largest_rank(self._activation_bytes) + logits
        if config.recompute == "full":
            again = replace(self, config=replace(config, recompute="none"))
            at_work = max(map(again._activation_bytes, shape.kinds))
            first, last = first + at_work, last + at_work
        at_end = last > first or config.pp == 1
        return Memory(
            weights=weights,
            gradients=gradients,
            optimizer=(8 if self.precision == "fp32" else 12) * self._optimized_parameters,
            activations=(last - logits) if at_end else first,
            logits=logits if at_end else 0.0,
        )

    def _activation_bytes(self, layer: Layer) -> float:
        """Bytes that a layer saves per microbatch for backward.

        The terms of table 2 in Korthikanti et al. (arXiv:2205.05198) are counted separately, to cover grouped heads,
        gated MLPs and experts. For ungrouped heads, an MLP of width 4 h, and dropout, they sum to the paper's 34 s b h.
        """
        hidden, tp = self.shape.hidden, self.config.tp
        if self.config.recompute == "full":
            return self.tokens * self.element * hidden / self.spread
        # Each block keeps the input and the output of its norm.
        kept = len(layer.blocks) * (4 + self.software.dropout) * hidden / self.spread
        kept += sum(2 * (block.kept / tp + block.kept_whole) for block in layer.blocks)
        if self.software.attention == "unfused":
            heads = sum(one.heads / (tp if one.sharded else 1) for one in layer.attention)
            kept += (4 + self.software.dropout) * heads * self.seq
        return self.tokens * kept * self.element / 2

    @property
    def _microbatches_in_flight(self) -> float:
        """Number of microbatches whose activations the first rank keeps (arXiv:2205.05198, section 4.2.3)."""
        pp, micro = self.config.pp, self.config.microbatches
        if self.config.schedule == "GPipe" and pp > 1:
            return micro
        if self.stages == 1 or self.config.schedule in ("ZBVZeroBubble", "DualPipeV"):
            return min(micro, pp)
        return min(micro, pp * (1 + (pp - 1) / (pp * self.stages)))


def _sum_over_layers(of_kinds: Iterable[StepTime], counts: Iterable[int]) -> StepTime:
    """Sum of times over all layers; `of_kinds`: time of a layer of each kind, `counts`: number of layers per kind."""
    return sum((time * n for time, n in zip(of_kinds, counts, strict=True) if n), StepTime())
