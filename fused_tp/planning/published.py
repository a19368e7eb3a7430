"""Published measurements, and the predictions of the cost model for them.

`hardware.FITTED_CONSTANTS` is fitted only to `fitted_rows`. The other rows influenced the form of the cost model, and
the microbatch size that is assumed for Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fused_tp.planning.config import ParallelConfig
from fused_tp.planning.costs import CostModel, Software
from fused_tp.planning.hardware import GIB, MACHINES, Machine
from fused_tp.planning.model_shape import SHAPES, ModelShape, Weights, decoder_shape


@dataclass(frozen=True, kw_only=True)
class PublishedResult:
    """A published measurement and its prediction.

    Attributes:
        name: name of the model and the variant.
        model: cost model of the measured configuration.
        published, predicted: values in the unit of the set (see `SETS`).
    """

    name: str
    model: CostModel
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted minus published value."""
        return self.predicted - self.published


def mean_error(rows: list[PublishedResult]) -> float:
    """Return the mean absolute error of `rows`."""
    return sum(abs(row.error) for row in rows) / len(rows)


def gpt(name: str, num_layers: int, hidden_size: int, num_heads: int, vocab: int, **other_sizes: Any) -> ModelShape:
    """Return the shape of a GPT: ungrouped heads, an MLP of 4 x hidden features without a gate."""
    other_sizes = {"intermediate": 4 * hidden_size, "gated": False} | other_sizes
    return decoder_shape(name, layers=num_layers, hidden=hidden_size, heads=num_heads, vocab=vocab, **other_sizes)


def _make_config(dp: int, microbatches: int, virtual_stages: int = 1, **sizes: Any) -> ParallelConfig:
    interleaved: dict[str, Any] = (
        {"schedule": "Interleaved1F1B", "virtual_stages": virtual_stages} if virtual_stages > 1 else {}
    )
    return ParallelConfig(dp_shard=dp, microbatches=microbatches, **interleaved, **sizes)


# -- Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198 --------------

_MEGATRON_LM_SOFTWARE = Software(
    attention="selective", shards="optimizer", fused_tp=False, overlap_dp=False, dropout=True, split_sends=True
)
# Name; layers, hidden, heads (table 3); pp, stages per rank, batch, microbatch (table 3); seconds per step (table 5)
# with sequence parallelism and selective recomputation, then with full recomputation and no sequence parallelism;
# GiB (figure 1) of parameters and optimizer state, of activations without either method, of activations with both.
_RECOMPUTATION_TABLE = (
    ("22B", (48, 6144, 64), (1, 1, 4, 4), (1.10, 1.42), (45.5625, 59.25, 9.5625)),
    ("175B", (96, 12288, 96), (8, 3, 64, 1), (13.75, 18.13), (45.5625, 66.84375, 12.3515625)),
    ("530B", (105, 20480, 128), (35, 3, 280, 1), (37.83, 49.05), (31.640625, 114.0234375, 23.076171875)),
    ("1T", (128, 25600, 160), (64, 1, 512, 1), (71.49, 94.42), (32.958984375, 131.25, 26.5625)),
)


def _recomputation_models(recomputes_all: bool, keeps_scores: bool = False) -> Iterator[CostModel]:
    for name, (num_layers, hidden_size, num_heads), (
        pp,
        virtual_stages,
        batch,
        microbatch_rows,
    ), _, _ in _RECOMPUTATION_TABLE:
        config = _make_config(
            1, batch // microbatch_rows, virtual_stages, pp=pp, tp=8, recompute="full" if recomputes_all else "none",
            sequence_parallel=not recomputes_all and not keeps_scores,
        )  # fmt: skip
        yield CostModel(
            shape=gpt(name, num_layers, hidden_size, num_heads, 51200, tied=True),
            config=config,
            machine=MACHINES["a100"],
            seq=2048,
            global_batch=batch,
            software=replace(
                _MEGATRON_LM_SOFTWARE, attention="unfused" if recomputes_all or keeps_scores else "selective"
            ),
        )


def fitted_rows() -> list[PublishedResult]:
    """Return MFU in percent, computed from the step times that the constants are fitted to."""
    rows = []
    for column, (recomputes_all, method) in enumerate(
        ((False, "sequence parallel, selective"), (True, "full recomputation"))
    ):
        for (name, _, _, seconds, _), model in zip(
            _RECOMPUTATION_TABLE, _recomputation_models(recomputes_all), strict=True
        ):
            published = 100 * model.flops / seconds[column] / model.machine.peak("bf16")
            rows.append(
                PublishedResult(name=f"{name}, {method}", model=model, published=published, predicted=100 * model.mfu)
            )
    return rows


def memory_rows() -> list[PublishedResult]:
    """Return the memory per rank in GiB, without embeddings, as in figure 1."""
    rows = []
    for (name, _, _, _, (state_gib, all_activations_gib, selective_gib)), unsharded_model, selective_model in zip(
        _RECOMPUTATION_TABLE, _recomputation_models(False, keeps_scores=True), _recomputation_models(False), strict=True
    ):
        layers_only = replace(
            selective_model, shape=replace(selective_model.shape, vocab=0, embedding=Weights(), output=Weights())
        )
        memory = layers_only.memory
        for quantity, model, published, predicted in (
            ("weights and optimizer", layers_only, state_gib, memory.weights + memory.gradients + memory.optimizer),
            ("activations, all kept", unsharded_model, all_activations_gib, unsharded_model.memory.activations),
            (
                "activations, sequence parallel and selective",
                selective_model,
                selective_gib,
                selective_model.memory.activations,
            ),
        ):
            rows.append(
                PublishedResult(name=f"{name}, {quantity}", model=model, published=published, predicted=predicted / GIB)
            )
    return rows


# -- Megatron-Core r0.8, README of NVIDIA/Megatron-LM: weak and strong scaling on H100 --------------------------------

_MEGATRON_CORE_SOFTWARE = Software(shards="optimizer", dropout=True, split_sends=True)
# Name, heads, hidden, layers, tp, pp, GPUs, batch; percent of MFU. images/model_table.png
_WEAK_SCALING_TABLE: tuple[tuple[Any, ...], ...] = (
    ("1.7B", 16, 2048, 24, 1, 1, 48, 192, 41),
    ("7.1B", 32, 4096, 30, 2, 1, 96, 192, 47),
    ("16B", 48, 6144, 32, 4, 1, 192, 192, 49),
    ("32B", 56, 7168, 48, 8, 1, 384, 192, 46),
    ("70B", 64, 8192, 84, 8, 2, 768, 384, 42),
    ("119B", 80, 10240, 92, 8, 4, 1536, 768, 43),
    ("177B", 96, 12288, 96, 8, 6, 2304, 1152, 44),
    ("314B", 128, 16384, 96, 8, 8, 3072, 1536, 48),
    ("462B", 144, 18432, 112, 8, 16, 6144, 3072, 47),
)
# GPUs and percent of MFU of the 177B model with a batch of 1152.
STRONG_SCALING = ((96, 47), (4608, 42))


def _megatron_core_model(
    name: str, num_heads: int, hidden_size: int, num_layers: int, tp: int, pp: int, num_gpus: int, batch: int
) -> CostModel:
    """Return the cost model of a Megatron-Core row.

    Some sizes are not published. Microbatches are assumed to have one row, as in Megatron-LM's examples of GPT-3. The
    stages per rank and the recomputation are assumed to be those with the lowest predicted time.
    """
    dp = num_gpus // (tp * pp)
    models = [
        CostModel(
            shape=gpt(name, num_layers, hidden_size, num_heads, 131072),
            config=_make_config(dp, batch // dp, virtual_stages, tp=tp, pp=pp, recompute=recompute),
            machine=MACHINES["h100"],
            seq=4096,
            global_batch=batch,
            software=_MEGATRON_CORE_SOFTWARE,
        )
        for virtual_stages in (range(1, num_layers // pp + 1) if pp > 1 else (1,))
        if num_layers % (pp * virtual_stages) == 0
        for recompute in ("none", "full")
    ]
    return min(
        (candidate for candidate in models if candidate.memory.total < candidate.machine.memory),
        key=lambda candidate: candidate.time.total,
    )


def weak_scaling_rows() -> list[PublishedResult]:
    """Return MFU in percent for models and batches that grow with the number of GPUs."""
    models = [(_megatron_core_model(*sizes), published) for *sizes, published in _WEAK_SCALING_TABLE]
    return [
        PublishedResult(
            name=f"{model.shape.name}, {model.config.world_size} GPUs",
            model=model,
            published=mfu,
            predicted=100 * model.mfu,
        )
        for model, mfu in models
    ]


def strong_scaling(num_gpus: int) -> CostModel:
    """Return the cost model of the 177B model with a batch of 1152 on `num_gpus` GPUs."""
    return _megatron_core_model("177B", 96, 12288, 96, 8, 6, num_gpus, 1152)


def strong_scaling_rows() -> list[PublishedResult]:
    """Return MFU in percent for the 177B model with a fixed batch."""
    return [
        PublishedResult(
            name=f"177B, {num_gpus} GPUs, batch 1152", model=model, published=mfu, predicted=100 * model.mfu
        )
        for num_gpus, mfu in STRONG_SCALING
        for model in [strong_scaling(num_gpus)]
    ]


# -- NeMo 24.12, performance summary: H100, FP8 -----------------------------------------------------------------------

_NEMO_SOFTWARE = Software(shards="optimizer", gradient_bytes=2)
_GPT3_175B = gpt("GPT3-175B", 96, 12288, 96, 51200)
# Shape; GPUs, batch, microbatch, seq, tp, pp, cp, stages per rank; tokens/s per GPU; TFLOP/s per GPU.
_NEMO_SUMMARY = (
    (gpt("GPT3-5B", 24, 4096, 32, 51200), (64, 2048, 4, 2048, 1, 1, 1, 1), 23406, 765),
    (gpt("GPT3-20B", 44, 6144, 48, 51200), (64, 256, 2, 2048, 2, 1, 1, 1), 5851, 750),
    (_GPT3_175B, (128, 256, 1, 2048, 4, 8, 1, 6), 716, 771),
    (_GPT3_175B, (512, 2048, 2, 2048, 4, 8, 1, 6), 825, 888),
    (SHAPES["llama-2-7b"], (8, 128, 1, 4096, 1, 1, 1, 1), 16934, 780),
    (SHAPES["llama-2-13b"], (16, 128, 1, 4096, 1, 4, 1, 10), 8715, 760),
    (SHAPES["llama-2-70b"], (64, 128, 1, 4096, 4, 4, 1, 20), 1728, 768),
    (gpt("Nemotron-8B", 32, 4096, 32, 256000), (64, 256, 4, 4096, 2, 1, 1, 1), 12507, 643),
    (gpt("Nemotron-22B", 40, 6144, 48, 256000), (64, 256, 2, 4096, 2, 4, 1, 10), 4312, 562),
    (gpt("Nemotron-340B", 96, 18432, 96, 256000, kv_heads=8), (128, 32, 1, 4096, 8, 8, 1, 12), 326, 686),
    (SHAPES["llama-3-8b"], (8, 128, 1, 8192, 1, 1, 2, 1), 12273, 711),
    (SHAPES["llama-3-70b"], (64, 128, 1, 8192, 4, 4, 2, 5), 1524, 734),
)


def nemo_rows() -> list[PublishedResult]:
    """Return the MFU of NeMo 24.12 in percent of the FP8 peak."""
    rows = []
    for shape, (
        num_gpus,
        batch,
        microbatch_rows,
        seq,
        tp,
        pp,
        cp,
        virtual_stages,
    ), tokens_per_second, _ in _NEMO_SUMMARY:
        dp = num_gpus // (tp * pp * cp)
        model = CostModel(
            shape=shape,
            config=_make_config(dp, batch // (dp * microbatch_rows), virtual_stages, tp=tp, pp=pp, cp=cp),
            machine=MACHINES["h100"],
            seq=seq,
            global_batch=batch,
            precision="fp8",
            software=_NEMO_SOFTWARE,
        )
        published = 100 * shape.flops(tokens_per_second, seq) / model.machine.peak("fp8")
        rows.append(
            PublishedResult(
                name=f"{shape.name}, {num_gpus} GPUs", model=model, published=published, predicted=100 * model.mfu
            )
        )
    return rows


# -- torchtitan, asynchronous tensor parallelism: pytorch/pytorch issue 149990 ----------------------------------------


def fused_tp_rows() -> list[PublishedResult]:
    """Return the throughput gain of overlapped tp in percent.

    Llama 3 70B on 128 H100 GPUs, FSDP 16 x TP 8, a local batch of 16 rows of 8192 tokens.
    """
    rows = []
    for precision, plain_throughput, fused_throughput in (("bf16", 598, 673), ("fp8", 820, 950)):
        model = CostModel(
            shape=SHAPES["llama-3-70b"],
            config=ParallelConfig(dp_shard=16, tp=8, recompute="full"),
            machine=MACHINES["h100"],
            seq=8192,
            global_batch=256,
            precision=precision,
        )
        plain_model = replace(model, software=replace(model.software, fused_tp=False))
        gain = 100 * (plain_model.time.total / model.time.total - 1)
        name = f"Llama-3-70B, {precision}"
        rows.append(
            PublishedResult(
                name=name, model=model, published=100 * (fused_throughput / plain_throughput - 1), predicted=gain
            )
        )
    return rows


# -- torchtitan, 1D FSDP of Llama 3 8B: its docs/performance.md, and benchmarks/llama3_h100_202412_torchtitan.md -------

# Machine, GPUs, rows of a rank, precision, compiled; tokens/s of a GPU. The H100 have a limit of 500 W.
_TORCHTITAN_TABLE: tuple[tuple[str, int, int, str, bool, float], ...] = (
    ("a100", 64, 1, "bf16", False, 2973),
    ("h100", 8, 2, "bf16", False, 5762),
    ("h100", 8, 2, "bf16", True, 6667),
    ("h100", 128, 2, "bf16", False, 5605),
    ("h100", 128, 2, "bf16", True, 6514),
    ("h100", 8, 2, "fp8", True, 8532),
    ("h100", 128, 2, "fp8", True, 8380),
)


def torchtitan_rows() -> list[PublishedResult]:
    """Return MFU in percent. torchtitan recomputes selected ops; the prediction omits this recomputation."""
    rows = []
    for machine, num_gpus, num_rows_of_rank, precision, is_compiled, tokens_per_second in _TORCHTITAN_TABLE:
        model = CostModel(
            shape=SHAPES["llama-3-8b"],
            config=_make_config(num_gpus, 1),
            machine=MACHINES[machine],
            seq=8192,
            global_batch=num_gpus * num_rows_of_rank,
            precision=precision,
        )
        published = 100 * model.shape.flops(tokens_per_second, 8192) / model.machine.peak(precision)
        name = f"Llama-3-8B, {num_gpus} {machine.upper()}, {precision}{', torch.compile' if is_compiled else ''}"
        rows.append(PublishedResult(name=name, model=model, published=published, predicted=100 * model.mfu))
    return rows


def torchtitan_share(machine: Machine, precision: str) -> float | None:
    """Return the lowest share of the predicted speed that torchtitan reaches; None without results for the machine."""
    machine_rows = (row for row in torchtitan_rows() if row.model.machine == machine)
    shares = (row.published / row.predicted for row in machine_rows if row.model.precision == precision)
    return min(shares, default=None)


# Title of each set of measurements, its unit, and its rows.
SETS: dict[str, tuple[str, Callable[[], list[PublishedResult]]]] = {
    "Step times of arXiv:2205.05198, A100 (fitted)": ("MFU, %", fitted_rows),
    "Memory of arXiv:2205.05198": ("GiB", memory_rows),
    "Megatron-Core, weak scaling, H100 (not fitted)": ("MFU, %", weak_scaling_rows),
    "Megatron-Core, strong scaling, H100 (not fitted)": ("MFU, %", strong_scaling_rows),
    "NeMo 24.12, H100, FP8 (not fitted)": ("MFU of the FP8 peak, %", nemo_rows),
    "Gain of overlapped tp, H100 (not fitted)": ("tokens/s more, %", fused_tp_rows),
    "torchtitan, H100 at 500 W, A100 (not fitted)": ("MFU, %", torchtitan_rows),
}
