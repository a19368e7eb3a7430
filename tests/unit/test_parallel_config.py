"""ParallelConfig: consistency of its fields, names used by other libraries, and limits set by a model's sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fused_tp.planning.config import ParallelConfig
from fused_tp.planning.dialects import DIALECTS
from fused_tp.planning.model_shape import decoder_shape
from tests.workers import error_of

SHAPE = decoder_shape("small", layers=8, hidden=64, heads=8, kv_heads=4, intermediate=128, vocab=100, experts=6)


def test_sizes_and_what_follows_from_them() -> None:
    config = ParallelConfig(pp=2, dp_replicate=3, dp_shard=2, cp=2, tp=4, microbatches=4)
    assert config.world_size == 96 and config.data_parallel == 6
    assert config.sequence_parallel and config.loss_parallel and config.virtual_stages == 1
    assert config.shown() == "pp2 x dp_replicate3 x dp_shard2 x cp2 x tp4"
    assert ParallelConfig().shown() == "one rank" and not ParallelConfig().sequence_parallel
    assert config.at_world_size(48).dp_shard == 1
    assert "ep" not in config.mesh_sizes and ParallelConfig(ep=2).mesh_sizes["ep"] == 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tp": 0}, "tp is 0; it must be at least 1"),
        ({"tp": True}, "tp must be"),
        ({"sequence_parallel": True}, "got tp=1; omit it"),
        ({"recompute": "half"}, "'none', 'full'"),
        ({"cp": 4, "ulysses_size": 3}, "must divide cp=4"),
        ({"virtual_stages": 2}, "got pp=1; omit it"),
        ({"pp": 4, "microbatches": 2}, "at least one for each of the 4 pipeline ranks"),
        ({"pp": 2, "microbatches": 2, "ep": 2}, "a pipeline distributes experts"),
        ({"schedule": "foo"}, "schedule must be one of"),
        ({"cp": 2, "ep": 2}, "ep=2 with cp=2 is not supported"),
    ],
)
def test_fields_that_do_not_fit(fields: dict[str, Any], says: str) -> None:
    assert says in str(error_of(ParallelConfig, **fields))


def test_a_world_that_leaves_no_whole_number() -> None:
    assert "must be a multiple of 4" in str(error_of(ParallelConfig(tp=4).at_world_size, 6))


def test_from_files(tmp_path: Path) -> None:
    config = ParallelConfig(pp=2, tp=2, microbatches=4, schedule="zbv", recompute="full")
    (tmp_path / "a.json").write_text(json.dumps(config.to_dict()))
    (tmp_path / "a.yaml").write_text("tensor_model_parallel_size: 2\ncontext_parallel_size: 2\n")
    assert ParallelConfig.from_file(tmp_path / "a.json") == config
    assert ParallelConfig.from_file(tmp_path / "a.yaml") == ParallelConfig(cp=2, tp=2)
    (tmp_path / "b.yaml").write_text("- tp\n")
    assert "got a list" in str(error_of(ParallelConfig.from_file, tmp_path / "b.yaml"))
    (tmp_path / "b.yaml").write_text("tp: [\n")
    assert "is not valid YAML" in str(error_of(ParallelConfig.from_file, tmp_path / "b.yaml"))
    assert "cannot be read" in str(error_of(ParallelConfig.from_file, tmp_path / "none.json"))
    (tmp_path / "b.yaml").write_text("tp: 2\ncp: 2\ntp: 4\n")
    (tmp_path / "b.json").write_text('{"tp": 2, "tp": 4}')
    for name in ("b.yaml", "b.json"):
        assert "the key 'tp' appears twice" in str(error_of(ParallelConfig.from_file, tmp_path / name))
    (tmp_path / "b.yaml").write_text("tp: 2\n<<: {cp: 2, tp: 4}\n")  # an explicit key overrides a merged one
    assert ParallelConfig.from_file(tmp_path / "b.yaml") == ParallelConfig(cp=2, tp=2)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (
            {
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "micro_batch_size": 1,
                "global_batch_size": 32,
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
                "world_size": 16,
            },
            ParallelConfig(
                pp=2, tp=2, dp_shard=4, schedule="Interleaved1F1B", microbatches=8, recompute="full", virtual_stages=2
            ),
        ),
        ({"expert_model_parallel_size": 4, "world_size": 8}, ParallelConfig(ep=4, dp_shard=2)),
        ({"dp_shard_size": 2, "tp_size": 4}, ParallelConfig(dp_shard=2, tp=4)),
        ({"sp_size": 4}, ParallelConfig(cp=4, ulysses_size=4)),
        (
            {"data_parallel_shard_degree": -1, "tensor_parallel_degree": 2, "world_size": 8},
            ParallelConfig(dp_shard=4, tp=2),
        ),
        (
            {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3}, "world_size": 8},
            ParallelConfig(dp_shard=4, tp=2),
        ),
        ({"tp": 2, "world_size": 8}, ParallelConfig(dp_shard=4, tp=2)),
    ],
)
def test_words_of_others(given: dict[str, Any], wanted: ParallelConfig) -> None:
    assert ParallelConfig.from_dict(given) == wanted


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tensor_parallel_sise": 2}, "Did you mean 'tensor_parallel'?"),
        ({"tp": 2, "tp_size": 2}, "use the keys of one library"),
        ({"dp_shard": 3, "world_size": 8}, "needs 3 ranks, got world_size=8"),
        ({"micro_batch_size": 2, "tensor_model_parallel_size": 2}, "or neither"),
        ({"recompute_granularity": "full", "recompute_method": "block"}, "must be 'uniform' and 1"),
        ({"sp_size": 2, "cp_size": 2}, "cannot be combined in accelerate"),
    ],
)
def test_words_that_are_refused(given: dict[str, Any], says: str) -> None:
    assert says in str(error_of(ParallelConfig.from_dict, given))


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from(["megatron", "accelerate", "torchtitan", "deepspeed"]),
)
def test_there_and_back(tp: int, cp: int, dp: int, name: str) -> None:
    ulysses = cp if name == "deepspeed" else 1
    config = ParallelConfig(tp=tp, cp=cp, dp_shard=dp, ulysses_size=ulysses)
    written = DIALECTS[name].write(config) | {"world_size": config.world_size}
    assert ParallelConfig.from_dict(written) == config


def test_what_a_dialect_has_no_word_for() -> None:
    config = ParallelConfig(pp=2, tp=2, microbatches=4, schedule="ZBV")
    for name, says in (
        ("megatron", "ZBVZeroBubble"),
        ("accelerate", "not support pp=2"),
        ("deepspeed", "not support pp=2"),
    ):
        assert says in str(error_of(DIALECTS[name].write, config))


def test_what_a_model_allows() -> None:
    ParallelConfig(tp=4, cp=2).check(SHAPE)
    one = decoder_shape("one", layers=2, hidden=64, heads=8, kv_heads=1, intermediate=128, vocab=100)
    ParallelConfig(tp=8).check(one)  # all ranks compute a single key/value head
    ParallelConfig(tp=8).check(SHAPE)  # two neighboring ranks compute each of four
    for config, how, says in (
        (ParallelConfig(tp=64), {}, "tp=64 is more than the 8 attention heads"),
        (ParallelConfig(ep=4), {}, "ep=4 does not divide the 6 experts; 1, 2, 3 and 6 do"),
        (ParallelConfig(pp=16, microbatches=16), {}, "16 stages, got 8 layers"),
        (ParallelConfig(dp_shard=3, microbatches=2), {"global_batch": 8}, "cannot be split into 2 microbatches"),
        (ParallelConfig(cp=4, ulysses_size=4, tp=2), {}, "ulysses_size=4 does not divide the heads"),
    ):
        assert says in str(error_of(config.check, SHAPE, **how)), says
    dense = decoder_shape("d", layers=2, hidden=8, heads=2, intermediate=8, vocab=8)
    assert "ep=2 needs experts, but the model has none" in str(error_of(ParallelConfig(ep=2).check, dense))
