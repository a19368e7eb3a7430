"""Planner: predictions against published numbers, legal and sorted plans, machines, the command."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_tp.cli.main import main
from fused_tp.planning import published
from fused_tp.planning.config import ParallelConfig
from fused_tp.planning.costs import CostModel, Software
from fused_tp.planning.find_shape import find_shape
from fused_tp.planning.hardware import FITTED_CONSTANTS, GIB, MACHINES, Machine, find_machine
from fused_tp.planning.model_shape import SHAPES, ModelShape, decoder_shape
from fused_tp.planning.recommend import USABLE_MEMORY, configurations, recommend
from tests.workers import error_of

SMALL = decoder_shape("small", layers=8, hidden=1024, heads=16, kv_heads=4, intermediate=4096, vocab=32000)


# -- published numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "bar"),
    [
        (published.fitted_rows, 1.0),
        (published.nemo_rows, 3.0),
        (lambda: published.weak_scaling_rows() + published.strong_scaling_rows(), 4.0),
        (published.strong_scaling_rows, 1.5),
        (published.fused_tp_rows, 4.5),
    ],
)
def test_mean_error_of_predictions(rows: Any, bar: float) -> None:
    assert published.mean_error(rows()) <= bar


def test_memory_is_that_of_the_published_formulas() -> None:
    for row in published.memory_rows():
        assert row.predicted == pytest.approx(row.published, rel=0.01), row.name


def test_flops_are_counted_as_published() -> None:
    """NeMo's TFLOP/s follow from its tokens/s by the formula of MFU."""
    for row, (*_, tflops) in zip(published.nemo_rows(), published._NEMO_SUMMARY, strict=True):
        assert row.published / 100 * 1979 == pytest.approx(tflops, abs=1.5), row.name


def test_order_of_published_configurations() -> None:
    nemo = {row.name: row for row in published.nemo_rows()}
    few, many = nemo["GPT3-175B, 128 GPUs"], nemo["GPT3-175B, 512 GPUs"]
    assert few.predicted < many.predicted  # 512 GPUs have twice the microbatch
    assert min(nemo.values(), key=lambda row: row.predicted) == nemo["Nemotron-22B, 64 GPUs"]
    steps = published.fitted_rows()
    assert all(selective.predicted > full.predicted for selective, full in zip(steps[:4], steps[4:], strict=True))
    few, many = published.strong_scaling_rows()
    assert few.predicted > many.predicted
    assert all(5 < row.predicted < 20 for row in published.fused_tp_rows())


@pytest.mark.parametrize("change", [{"links": 0.6}, {"links": 0.88}, {"kernel": 12e-6}, {"kernel": 25e-6}])
def test_fitted_constants_are_the_best(change: dict[str, float]) -> None:
    def error(constants: Any) -> float:
        found = ((row.model, row.published) for row in published.fitted_rows())
        models = [(replace(one, machine=replace(one.machine, constants=constants)), mfu) for one, mfu in found]
        return sum((100 * model.mfu / mfu - 1) ** 2 for model, mfu in models)

    assert error(FITTED_CONSTANTS) < error(replace(FITTED_CONSTANTS, **change))


# -- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [
        ("llama-3-8b", 8.03, 8.03),
        ("llama-3.1-405b", 405.8, 405.8),
        ("qwen3-30b-a3b", 30.5, 3.35),
        ("mixtral-8x7b", 46.7, 12.9),
        ("gpt3-175b", 174.6, 174.6),
    ],
)
def test_parameters_of_published_shapes(name: str, parameters: float, active: float) -> None:
    assert SHAPES[name].parameters / 1e9 == pytest.approx(parameters, rel=0.01)
    assert SHAPES[name].active_parameters / 1e9 == pytest.approx(active, rel=0.01)


def test_shapes_of_configs(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    config.save_pretrained(tmp_path)
    assert find_shape(tmp_path) == find_shape(tmp_path / "config.json")
    assert find_shape(config).parameters == 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64 + 2 * 128 * 64
    assert "Did you mean 'llama-3-70b'" in str(error_of(find_shape, "llama3-70b"))
    (tmp_path / "config.json").write_text("{}")
    assert "does not contain a valid config" in str(error_of(find_shape, tmp_path))


# Model types that differ most from formulas over a config: shared layers, states, convolutions, shared experts.
UNLIKE_LLAMA = (
    *("bamba", "bitnet", "falcon", "falcon_h1", "gemma3n_text", "granitemoehybrid", "jamba", "kimi_linear", "lfm2"),
    *("llama4", "mpt", "starcoder2", "zamba2"),
)


def check_count(kind: str) -> ModelShape:
    """Check that every parameter of a model type with its default config is counted once; return its shape."""
    from transformers import CONFIG_MAPPING

    from fused_tp.planning.model_count import count_model, make_meta_model

    model = make_meta_model(CONFIG_MAPPING[kind]())
    wanted = sum(parameter.numel() for parameter in model.parameters())
    shape = count_model(model)
    assert shape.parameters == wanted, kind
    rank = CostModel(shape=shape, config=ParallelConfig(), machine=MACHINES["h100"], seq=512, global_batch=1)
    assert rank.memory.weights == 2 * wanted and rank.memory.optimizer == 12 * wanted, kind
    used = (
        sum(
            one.column_features + one.row_features + one.replicated_features
            for layer in shape.stack
            for one in layer.blocks
        )
        * shape.hidden
    )
    assert shape.flops(1, 1) >= 6 * (used + shape.output.count) and rank.time.total > 0, kind
    return shape


@pytest.mark.parametrize("kind", UNLIKE_LLAMA)
def test_models_are_counted_as_they_are(kind: str) -> None:
    pytest.importorskip("transformers")
    check_count(kind)


@pytest.mark.long
def test_every_type_is_counted_or_refused() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    refused = []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            with torch.device("meta"):
                transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[kind]())
        except Exception:  # the default config does not make a model
            assert isinstance(error_of(find_shape, kind), ValueError), kind
            refused.append(kind)
            continue
        check_count(kind)
    assert len(refused) < 25, refused


def test_a_counted_llama_costs_what_formulas_say() -> None:
    transformers = pytest.importorskip("transformers")
    known = decoder_shape("known", layers=3, hidden=256, heads=8, kv_heads=4, intermediate=512, vocab=1000)
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4,
    )  # fmt: skip
    counted = find_shape(config)
    assert counted.layer_kinds[0].blocks == known.layer_kinds[0].blocks and counted.attention == known.attention
    assert counted.flops(1, 512) == known.flops(1, 512)
    assert counted.parameters == known.parameters + 7 * 256  # norms
    assert counted.output == known.output and counted.layer_kinds[0].tensor_count == known.layer_kinds[0].tensor_count


def test_layers_of_several_kinds() -> None:
    pytest.importorskip("transformers")
    gpt_oss, llama4, moe = find_shape("gpt_oss"), find_shape("llama4"), find_shape("deepseek_v3")
    assert {one.window for one in gpt_oss.attention} == {128, None}
    assert gpt_oss.experts == (128,) and gpt_oss.active_parameters / 1e9 == pytest.approx(5.7, rel=0.01)
    assert {layer.experts for layer in llama4.layer_kinds} == {16}
    dense, sparse = moe.layer_kinds
    assert (
        moe.layer_counts_of_stages(1) == [(3, 58)]
        and not dense.experts
        and (sparse.experts, sparse.experts_per_token) == (256, 8)
    )
    assert moe.layer_counts_of_stages(2) == [(3, 28), (0, 30)]
    assert moe.active_parameters / 1e9 == pytest.approx(37.5, rel=0.01)

    def of_rank(**sizes: int) -> CostModel:
        config = ParallelConfig(**sizes)
        return CostModel(shape=moe, config=config, machine=MACHINES["h100"], seq=512, global_batch=8)

    # The second stage has no dense layer. Every tp rank holds the projections to latents and the routers.
    halves = of_rank(pp=2, microbatches=8).memory.weights / 2
    assert halves == 30 * sparse.parameters + moe.embedding.count
    cut = of_rank(tp=2).memory.weights / 2
    assert moe.parameters / 2 < cut < 0.502 * moe.parameters and all(one.is_sharded for one in moe.attention)


def test_shared_layers_cost_memory_once_and_operations_each_time() -> None:
    pytest.importorskip("transformers")
    shape = find_shape("zamba2")
    first, again = (kind for kind in shape.layer_kinds if kind.attention)
    assert first.parameters > again.parameters and first.blocks == again.blocks
    assert shape.flops(1, 1) > 6 * shape.parameters
    assert any("Zamba2MambaMixer (in 54 of 54 layers) and Conv1d" in note for note in shape.notes)


def test_tied_embeddings_are_counted_once() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    apart, tied = (
        find_shape(transformers.LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=tied))
        for tied in (False, True)
    )
    assert tied.is_tied and apart.parameters - tied.parameters == 128 * 64
    assert apart.flops(1, 8) == tied.flops(1, 8)


def test_what_parallelize_refuses_is_not_planned() -> None:
    """The planner checks whole models with the functions of `parallelize`."""
    pytest.importorskip("transformers")
    shape_of = cache(find_shape)
    for kind, sizes, says in (
        ("roformer", {"tp": 2}, "which sequence_parallel=True needs"),
        ("xlnet", {"tp": 2}, "has no tp_plan"),
        ("minimax", {"cp": 2}, "mix tokens by other means than attention"),
        ("gemma", {"tp": 2, "sequence_parallel": False}, ""),
        ("gemma3", {"tp": 2}, "sequence_parallel=True supports only these"),
        ("gemma3", {"tp": 2, "sequence_parallel": False, "loss_parallel": False}, ""),
        ("xlm", {"dp_shard": 2}, "has 4 lists of layers"),
        ("longcat_flash", {"ep": 2}, "cannot be distributed"),
    ):
        refusal: Any = None
        try:
            ParallelConfig(**sizes).check(shape_of(kind))
        except ValueError as error:
            refusal = str(error)
        assert says in refusal if says else refusal is None, (kind, refusal)
    found = list(configurations(shape_of("gemma3"), 2, 2, seq=512, global_batch=2))
    assert any(config.tp == 2 for config in found)
    assert not any(config.sequence_parallel or config.cp > 1 for config in found)


def test_heads_that_differ_by_layer() -> None:
    """The config of such a model has no single number of heads."""
    pytest.importorskip("transformers")
    assert [one.num_heads for one in find_shape("dots3_note").attention] == [128, 64]


# -- plans ------------------------------------------------------------------------------------------------------------


def test_plans_of_70b_are_legal_fit_and_come_in_time() -> None:
    start = time.process_time()
    plans = recommend("llama-3-70b", 64, seq=8192, global_batch=512, top=10)
    assert time.process_time() - start < 2
    shape, machine = SHAPES["llama-3-70b"], MACHINES["h100"]
    for plan in plans:
        plan.config.check(shape, seq=8192, global_batch=512)
        assert plan.config.world_size == 64 and plan.config.tp <= machine.ranks_per_node
        assert plan.memory.total <= machine.memory * USABLE_MEMORY
        assert plan.microbatch_rows * plan.config.microbatches * plan.config.data_parallel == 512
        assert plan.fused_exposed_share <= plan.plain_exposed_share and plan.reason
    assert [plan.time.total for plan in plans] == sorted(plan.time.total for plan in plans)
    assert plans[0].reason == "The fastest plan that fits into memory."


def test_experts_are_dealt_out() -> None:
    found = {config.ep for config in configurations(SHAPES["mixtral-8x7b"], 8, 8, seq=4096, global_batch=8)}
    assert found == {1, 2, 4, 8}


def test_less_memory_takes_recomputation_or_more_ranks_for_a_layer() -> None:
    tight = recommend("llama-3-70b", 64, seq=8192, global_batch=512, memory=32 * GIB)[0]
    wide = recommend("llama-3-70b", 64, seq=8192, global_batch=512)[0]
    assert tight.memory.total < wide.memory.total and tight.time.total > wide.time.total


def test_questions_without_an_answer() -> None:
    assert "does not fit: the smallest" in str(error_of(recommend, "llama-3.1-405b", 8, seq=8192, global_batch=8))
    assert "with 1 rows of 512 tokens" in str(error_of(recommend, SMALL, 64, seq=512, global_batch=1))
    assert "machine a100 does not support" in str(
        error_of(recommend, SMALL, 8, machine="a100", seq=512, global_batch=8, precision="fp8")
    )


@pytest.mark.parametrize(
    ("change", "less"),
    [
        ({"tp": 2}, "weights"),
        ({"dp_shard": 2}, "optimizer"),
        ({"recompute": "full"}, "activations"),
        ({"cp": 2}, "activations"),
        ({"microbatches": 2}, "logits"),
    ],
)
def test_what_each_kind_of_parallelism_saves(change: dict[str, Any], less: str) -> None:
    def memory(config: ParallelConfig) -> float:
        model = CostModel(shape=SMALL, config=config, machine=MACHINES["h100"], seq=4096, global_batch=8)
        return float(getattr(model.memory, less))

    assert memory(ParallelConfig(**change)) < memory(ParallelConfig())


def test_fp32_has_four_bytes_and_no_copy_of_weights() -> None:
    def model(precision: str) -> CostModel:
        machine = replace(MACHINES["h100"], peak_flops={precision: 1e12}, matmul_flops={precision: 1e12})
        return CostModel(
            shape=SMALL, config=ParallelConfig(), machine=machine, seq=1024, global_batch=4, precision=precision
        )

    narrow, wide = model("bf16"), model("fp32")
    assert wide.memory.weights == 2 * narrow.memory.weights and wide.memory.activations == 2 * narrow.memory.activations
    assert wide.memory.gradients == narrow.memory.gradients
    assert wide.memory.optimizer == narrow.memory.optimizer * 8 / 12
    assert wide.time.memory_bound > narrow.time.memory_bound and wide.time.matmul > narrow.time.matmul


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}])
def test_ranks_that_copy_themselves_hide_no_communication(sizes: dict[str, int]) -> None:
    def communication(fused_tp: bool = True, **change: Any) -> float:
        machine = replace(MACHINES["h100"], **change)
        model = CostModel(
            shape=SMALL, config=ParallelConfig(**sizes), machine=machine, seq=4096, global_batch=8,
            software=Software(fused_tp=fused_tp),
        )  # fmt: skip
        return model.time.communication

    assert communication(overlaps=False) > communication()
    assert communication(overlaps=False) == communication(fused_tp=False, overlaps=False)


def test_messages_are_of_data_parallelism_and_pipelines() -> None:
    slow = replace(MACHINES["h100"], message_bandwidth=1e9)

    def slower(**sizes: int) -> bool:
        model = CostModel(shape=SMALL, config=ParallelConfig(**sizes), machine=slow, seq=4096, global_batch=8)
        return model.time.total > replace(model, machine=MACHINES["h100"]).time.total

    assert slower(dp_shard=2) and slower(pp=2, microbatches=4)
    assert not slower(tp=2) and not slower(cp=2)


def test_gradients_that_are_accumulated_are_whole() -> None:
    def gradients(microbatches: int) -> float:
        config = ParallelConfig(dp_shard=4, microbatches=microbatches)
        return CostModel(
            shape=SMALL, config=config, machine=MACHINES["h100"], seq=1024, global_batch=16
        ).memory.gradients

    assert gradients(2) == gradients(4) == 4 * gradients(1)


def test_experts_have_no_copies_along_ep() -> None:
    """`build` shards experts over dp_shard, and all else over dp_shard and ep."""
    shape = SHAPES["mixtral-8x7b"]
    experts = sum(layer.expert_weights.count for layer in shape.stack)
    rest = shape.parameters - experts

    def owned(software: Software, **sizes: int) -> float:
        model = CostModel(
            shape=shape, config=ParallelConfig(**sizes), machine=MACHINES["h100"], seq=4096, global_batch=32,
            software=software,
        )  # fmt: skip
        return model.memory.optimizer / 12

    fsdp, zero1 = Software(), Software(shards="optimizer")
    assert owned(fsdp, ep=4) == pytest.approx(experts / 4 + rest)
    for software in (fsdp, zero1):
        assert owned(software, ep=4, dp_shard=2) == pytest.approx(experts / 8 + rest / 8)
        assert owned(software, ep=2, dp_shard=4, tp=2) == pytest.approx((experts / 8 + rest / 8) / 2)


# -- machines, the command --------------------------------------------------------------------------------------------


def test_machines_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(MACHINES["h100"].to_dict() | {"name": "mine", "memory": 40e9}))
    assert find_machine(path) == replace(MACHINES["h100"], name="mine", memory=40e9)
    path.write_text(json.dumps(MACHINES["h100"].to_dict() | {"memory": 0}))
    assert "memory of machine h100 must be positive" in str(error_of(Machine.from_file, path))
    path.write_text(
        json.dumps(MACHINES["h100"].to_dict() | {"constants": {"links": 1.0, "kernel": 1e-5, "pointwise": 0}})
    )
    assert "pointwise of machine h100 must be positive" in str(error_of(Machine.from_file, path))
    path.write_text(json.dumps({"name": "mine", "speed": 1}))
    assert "'speed', which is not a field" in str(error_of(Machine.from_file, path))
    path.write_text(json.dumps({"name": "mine"}))
    assert "lacks the Machine fields peak_flops" in str(error_of(Machine.from_file, path))
    assert "Unknown machine 'v100'; use" in str(error_of(find_machine, "v100"))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "llama-3-8b", "--gpus", "8", "--seq", "4096", "--batch", "32"]
    path = tmp_path / "plan.json"
    assert main([*arguments, "--write", str(path)]) == 0
    said = capsys.readouterr().out
    assert "llama-3-8b, 8.0 billion parameters, on 8 x h100" in said and "1. The fastest" in said
    best = ParallelConfig.from_file(path)
    assert best.world_size == 8
    assert main([*arguments, "--json", "--top", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 3 and ParallelConfig.from_dict(found[0]["config"]) == best
    assert main(["plan", "--model", "mamba", "--gpus", "2", "--batch", "2"]) == 0
    assert "counted in MambaMixer (in 32 of 32 layers)" in capsys.readouterr().out
    (tmp_path / "mine.json").write_text(json.dumps(MACHINES["a100"].to_dict() | {"name": "mine"}))
    written = [*arguments, "--machine", str(tmp_path / "mine.json"), "--write", str(path), "--format", "megatron"]
    assert main(written) == 0
    assert "8 x mine" in capsys.readouterr().out and "tensor_model_parallel_size" in json.loads(path.read_text())


def test_command_writes_the_best_plan_that_another_library_expresses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of the fastest plans have a pipeline, which DeepSpeed's configuration has no words for."""
    path = tmp_path / "plan.json"
    arguments = ["plan", "--model", "llama-3-70b", "--gpus", "64", "--top", "3", "--format", "deepspeed"]
    assert main([*arguments, "--write", str(path)]) == 0
    said = capsys.readouterr().out
    assert "Wrote plan 4 to" in said and "4. " in said and "slower" in said
    found = ParallelConfig.from_file(path)
    assert json.loads(path.read_text())["tensor_parallel"]["autotp_size"] == found.tp > 1
    assert main(arguments) == 2 and "add --write FILE" in capsys.readouterr().err
    alone = recommend("llama-3-8b", 8, seq=4096, global_batch=32, words="megatron", top=2)
    assert len(alone) == 2
    assert "words must be one of" in str(error_of(recommend, "llama-3-8b", 8, seq=64, global_batch=8, words="latin"))


def test_speed_is_a_range_where_one_is_published(capsys: pytest.CaptureFixture[str]) -> None:
    """torchtitan's 5,605 to 6,667 tokens/s a GPU are in the range of Llama 3 8B on H100, as its share of bf16 says."""
    best = recommend("llama-3-8b", 8, seq=8192, global_batch=64)[0]
    assert best.low_tokens_per_second is not None
    assert best.low_tokens_per_second / 8 < 5605 < 6667 < best.tokens_per_second / 8
    arguments = ["plan", "--model", "llama-3-8b", "--gpus", "8", "--batch", "64"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert f"{best.low_tokens_per_second / 8:,.0f} - {best.tokens_per_second / 8:,.0f}" in said
    assert "that torchtitan publishes for Llama 3 8B in bf16" in said
    assert main([*arguments, "--gpu", "b200"]) == 0
    assert "Other stacks are slower." in capsys.readouterr().out


def test_command_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(MACHINES["a100"], name="here", peak_flops={"fp32": 1e11}, matmul_flops={"fp32": 9e10})
    monkeypatch.setattr("fused_tp.cli.plan.measure_this_machine", lambda: found)
    path = tmp_path / "here.json"
    assert main(["plan", "--measure", str(path)]) == 0 and find_machine(path) == found
    arguments = ["plan", "--model", "llama-3-8b", "--gpus", "8", "--seq", "4096", "--batch", "32"]
    assert main([*arguments, "--machine", str(path)]) == 0
    assert "8 x here: 32 rows of 4096 tokens, fp32" in capsys.readouterr().out
    assert main(["plan", "--gpus", "8"]) == 2
    assert "needs --model and --gpus" in capsys.readouterr().err


def test_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    plan = ["--model", "llama-3-8b", "--gpus", "8"]
    for wrong, says in (
        ([*plan, "--write", str(tmp_path)], f"--write must be a file, got the folder {tmp_path}"),
        ([*plan, "--write", str(tmp_path / "file" / "a")], "cannot be created or written to"),
        (["--model", "no-such", "--gpus", "8"], "'no-such' is not a known model name"),
        (
            ["--model", "reformer", "--gpus", "8"],
            "transformers cannot create a causal language model from the config of",
        ),
        (["--model", "llama-3.1-405b", "--gpus", "1"], "does not fit"),
        ([*plan, "--machine", "none.json"], "none.json cannot be read"),
    ):
        assert main(["plan", *wrong]) == 2
        assert says in capsys.readouterr().err


# -- the guide --------------------------------------------------------------------------------------------------------


def test_guide_has_the_tables_and_the_figures_of_the_code() -> None:
    pytest.importorskip("transformers")
    from docs import tables

    guide = (Path(tables.__file__).parent / "guides" / "planning.md").read_text()
    assert "{{ predictions }}" in guide and "{{ machines }}" in guide
    assert (
        f"({FITTED_CONSTANTS.links:.0%})".replace("%", " %") in guide
        and f"({FITTED_CONSTANTS.kernel * 1e6:.0f} µs)" in guide
    )
    scaling = published.weak_scaling_rows() + published.strong_scaling_rows()
    assert f"{published.mean_error(published.nemo_rows()):.1f} points of MFU off" in guide
    assert f"{published.mean_error(scaling):.1f} points off" in guide
    for name, _, _ in ((row.name, row.published, row.predicted) for row in scaling):
        assert name in tables.predictions()
