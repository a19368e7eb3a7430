"""`recommend`: rank all configurations that a model can run in by predicted step time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fused_tp.core.errors import join_words
from fused_tp.ops.arguments import check_int
from fused_tp.planning.config import ParallelConfig
from fused_tp.planning.costs import CostModel, Memory, Software, StepTime
from fused_tp.planning.dialects import DIALECTS
from fused_tp.planning.find_shape import find_shape
from fused_tp.planning.hardware import GIB, PRECISIONS, Machine, find_machine
from fused_tp.planning.model_shape import ModelShape
from fused_tp.planning.published import torchtitan_share

# Share of a GPU's memory that remains after CUDA, NCCL and fragmentation.
USABLE_MEMORY = 0.92
MICROBATCH_ROWS = (1, 2, 4, 8)
MIN_CP_TOKENS = 1024
VIRTUAL_STAGES = (1, 2, 4, 5, 8, 10)
# Which tensors tp shards besides weights, in order of preference; the first option that the model supports is used.
SHARDING_OPTIONS: tuple[dict[str, bool], ...] = (
    {},
    {"sequence_parallel": False},
    {"sequence_parallel": False, "loss_parallel": False},
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A configuration and its predicted performance.

    Attributes:
        config: config to pass to `fused_tp.build`.
        time, memory: step time by component, and memory by use on the rank that needs the most.
        microbatch_rows: rows of one microbatch.
        mfu: share of peak FLOP/s.
        tokens_per_second: tokens per second of all ranks together, at the speed of the fastest published stacks.
        low_tokens_per_second: tokens per second at the lowest share of the predicted speed that published results of
            torchtitan reach; None: torchtitan has published no results for the machine.
        fused_exposed_share, plain_exposed_share: share of the step that waits for communication, with fused, plain tp.
        reason: message that says why this plan is slower than the best one.
        notes: messages about parts of the model that the prediction omits.
    """

    config: ParallelConfig
    time: StepTime
    memory: Memory
    microbatch_rows: int
    mfu: float
    tokens_per_second: float
    fused_exposed_share: float
    plain_exposed_share: float
    reason: str
    low_tokens_per_second: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def bubble(self) -> float:
        """Share of the step in which a pipeline rank idles."""
        return self.time.bubble / self.time.total

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a dict for JSON, in seconds, GiB and shares."""
        return {
            "config": self.config.to_dict(),
            "step_seconds": self.time.total,
            "seconds": {name: value for name, value in vars(self.time).items() if value},
            "memory_gib": self.memory.total / GIB,
            "gib": {name: value / GIB for name, value in vars(self.memory).items()},
            "microbatch_rows": self.microbatch_rows,
            "mfu": self.mfu,
            "tokens_per_second": self.tokens_per_second,
            "low_tokens_per_second": self.low_tokens_per_second,
            "bubble": self.bubble,
            "exposed_communication": {"fused": self.fused_exposed_share, "plain": self.plain_exposed_share},
            "reason": self.reason,
            "notes": list(self.notes),
        }


def recommend(
    model: str | Path | ModelShape | Any,
    gpus: int,
    *,
    machine: str | Path | Machine = "h100",
    seq: int,
    global_batch: int,
    precision: str = "bf16",
    memory: float | None = None,
    fused_tp: bool = True,
    top: int = 5,
    words: str | None = None,
) -> list[Plan]:
    """Return the `top` fastest configurations that fit into memory, best first.

    Tensor parallel ranks stay within a node. Times come from the model in `fused_tp.planning.costs`; the guide on
    planning lists its errors against published times.

    Args:
        model: a name in `fused_tp.planning.model_shape.SHAPES`, a config.json or its folder, a transformers config or
            model type, or a ModelShape.
        gpus: total number of ranks.
        machine: a name in `fused_tp.planning.hardware.MACHINES`, a JSON file of a Machine, or a Machine.
        seq: tokens of a row.
        global_batch: rows of all ranks together in a step.
        precision: "bf16" or "fp8" for the matmuls of layers, or "fp32" for everything.
        memory: bytes per GPU; None: the machine's.
        fused_tp: collectives of tp overlap with matmuls; False: plain collectives.
        top: maximum number of configurations.
        words: a library in `fused_tp.planning.dialects.DIALECTS`. If its configuration can express none of the `top`,
            the fastest one that it can express follows them.

    Raises:
        ValueError: an unknown model, machine or library; no legal configuration fits, or none that `words` can express.

    Example:
        >>> best = recommend("llama-3-8b", 8, seq=8192, global_batch=64)[0]
        >>> best.config.world_size
        8
    """
    shape, machine = find_shape(model), find_machine(machine)
    for name, value in (("gpus", gpus), ("seq", seq), ("global_batch", global_batch), ("top", top)):
        check_int(name, value, 1)
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {join_words(map(repr, PRECISIONS))}, got {precision!r}.")
    machine.peak(precision)
    usable_memory = (machine.memory if memory is None else memory) * USABLE_MEMORY
    software = Software(fused_tp=fused_tp)
    fitting_models, lowest_memory = [], float("inf")
    # With fewer tokens per cp rank, a GPU (or core) is partly idle.
    cp_tokens = MIN_CP_TOKENS if machine.overlaps else MIN_CP_TOKENS // 16
    for config in configurations(
        shape, gpus, machine.ranks_per_node, seq=seq, global_batch=global_batch, cp_tokens=cp_tokens
    ):
        costs = CostModel(
            shape=shape, config=config, machine=machine, seq=seq, global_batch=global_batch, precision=precision,
            software=software,
        )  # fmt: skip
        lowest_memory = min(lowest_memory, costs.memory.total)
        if costs.memory.total <= usable_memory:
            fitting_models.append(costs)
    if lowest_memory == float("inf"):
        raise ValueError(
            f"No config of {gpus} ranks supports {shape.name} with {global_batch} rows of {seq} tokens: data "
            "parallel ranks and microbatches must divide the rows, and tp the key/value heads; change rows or ranks."
        )
    if not fitting_models:
        raise ValueError(
            f"{shape.name} does not fit: the smallest of all configurations of {gpus} ranks needs "
            f"{lowest_memory / GIB:.0f} GiB per rank, and {usable_memory / GIB:.0f} GiB are usable; use more ranks, "
            "more memory, or shorter rows."
        )
    fitting_models.sort(key=lambda candidate: (round(candidate.time.total, 6), candidate.memory.total))
    chosen_models = fitting_models[:top]
    if words is not None:
        expressible_model, reason = _find_expressible(fitting_models, words)
        if expressible_model is None:
            raise ValueError(
                f"none of the {len(fitting_models)} configurations that fit into memory can be written as a {words} "
                f"config: {reason}"
            )
        if expressible_model not in chosen_models:
            chosen_models.append(expressible_model)
    attained_share = torchtitan_share(machine, precision)
    return [_make_plan(candidate, fitting_models[0], attained_share) for candidate in chosen_models]


def _find_expressible(fitting_models: list[CostModel], words: str) -> tuple[CostModel | None, str]:
    """Return the first configuration that a library can express, or None, and why it cannot express an earlier one.

    The second value is "" if the library can express the first configuration.
    """
    if words not in DIALECTS:
        raise ValueError(f"words must be one of {join_words(map(repr, DIALECTS))}, got {words!r}.")
    reason = ""
    for candidate in fitting_models:
        try:
            DIALECTS[words].write(candidate.config)
        except ValueError as error:
            reason = reason or str(error)
        else:
            return candidate, reason
    return None, reason


def configurations(
    shape: ModelShape, gpus: int, ranks_per_node: int, *, seq: int, global_batch: int, cp_tokens: int = MIN_CP_TOKENS
) -> Iterator[ParallelConfig]:
    """Yield all ParallelConfigs of `gpus` ranks that `ParallelConfig.check` accepts for this shape.

    Each context parallel rank gets at least `cp_tokens` tokens of a row.
    """
    for tp in _divisors(gpus, ranks_per_node):
        for cp in _divisors(gpus // tp, max(1, seq // cp_tokens)):
            for pp in _divisors(gpus // (tp * cp), shape.layers):
                dp = gpus // (tp * cp * pp)
                for sizes in _data_parallel_sizes(shape, dp, pp):
                    yield from _valid_configs(shape, sizes | {"tp": tp, "cp": cp, "pp": pp}, dp, seq, global_batch)


def _data_parallel_sizes(shape: ModelShape, dp: int, pp: int) -> Iterator[dict[str, Any]]:
    """Yield data parallel sizes whose product is `dp`: all replicas, all shards, or experts distributed over ep."""
    yield {"dp_shard": dp}
    if dp > 1:
        yield {"dp_replicate": dp}
    if shape.experts and pp == 1:
        yield from ({"ep": ep, "dp_shard": dp // ep} for ep in _divisors(dp, max(shape.experts)) if ep > 1)


def _valid_configs(
    shape: ModelShape, sizes: dict[str, Any], dp: int, seq: int, global_batch: int
) -> Iterator[ParallelConfig]:
    for num_rows in MICROBATCH_ROWS:
        if global_batch % (dp * num_rows):
            continue
        for virtual in VIRTUAL_STAGES if sizes["pp"] > 1 else (1,):
            schedule: dict[str, Any] = {"schedule": "Interleaved1F1B", "virtual_stages": virtual} if virtual > 1 else {}
            for sharding_options in SHARDING_OPTIONS if sizes["tp"] > 1 else ({},):
                options: dict[str, Any] = {
                    **sizes,
                    **schedule,
                    **sharding_options,
                    "microbatches": global_batch // (dp * num_rows),
                }
                recompute_options = [{}, {"recompute": "full"}]
                valid_configs = [
                    config
                    for recompute in recompute_options
                    if (config := _make_valid_config(shape, options | recompute, seq, global_batch))
                ]
                yield from valid_configs
                if valid_configs:
                    break


def _make_valid_config(
    shape: ModelShape, options: dict[str, Any], seq: int, global_batch: int
) -> ParallelConfig | None:
    """Return the config with these options; None if it is invalid or `shape` cannot run in it."""
    try:
        config = ParallelConfig(**options)
        config.check(shape, seq=seq, global_batch=global_batch)
    except ValueError:
        return None
    return config


def _divisors(count: int, at_most: int) -> list[int]:
    return [n for n in range(1, min(count, at_most) + 1) if count % n == 0]


def _make_plan(costs: CostModel, best: CostModel, attained_share: float | None) -> Plan:
    plain_costs = replace(costs, software=replace(costs.software, fused_tp=False))
    fused_costs = replace(costs, software=replace(costs.software, fused_tp=True))
    return Plan(
        config=costs.config,
        time=costs.time,
        memory=costs.memory,
        microbatch_rows=round(costs.microbatch_rows),
        mfu=costs.mfu,
        tokens_per_second=costs.tokens_per_second,
        low_tokens_per_second=None if attained_share is None else attained_share * costs.tokens_per_second,
        fused_exposed_share=fused_costs.time.communication / fused_costs.time.total,
        plain_exposed_share=plain_costs.time.communication / plain_costs.time.total,
        reason=_explain_slowdown(costs, best),
        notes=costs.shape.notes,
    )


_REASON_OF_COMPONENT = {
    "matmul": "its matmuls are smaller or more numerous",
    "attention": "attention takes longer",
    "memory_bound": "memory-bound ops move more bytes",
    "recompute": "activations are recomputed",
    "tp": "communication of tp is exposed",
    "cp": "communication of cp is exposed",
    "ep": "communication of ep is exposed",
    "dp": "communication of data parallelism is exposed",
    "pp": "stages wait for messages",
    "bubble": "the pipeline's bubble is larger",
    "optimizer": "a rank has more optimizer state to update",
}


def _explain_slowdown(costs: CostModel, best: CostModel) -> str:
    """Return a message that names the component with the most extra time compared to the best plan."""
    if costs is best:
        return "The fastest plan that fits into memory."
    extra_seconds = {name: getattr(costs.time, name) - getattr(best.time, name) for name in _REASON_OF_COMPONENT}
    name = max(extra_seconds, key=lambda component: extra_seconds[component])
    slowdown = costs.time.total / best.time.total - 1
    if slowdown < 5e-4:
        return "As fast as the best plan."
    return f"{slowdown:.1%} slower: {_REASON_OF_COMPONENT[name]} ({extra_seconds[name]:.2f} s more)."
