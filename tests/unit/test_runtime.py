"""Partitions, settings, the dispatch table, `fused-tp explain`, and the group of one rank."""

from __future__ import annotations

import itertools
import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

import fused_tp
from fused_tp.cli.main import main
from fused_tp.core import dispatch, settings
from fused_tp.core.dispatch import ScheduleKey
from fused_tp.core.group import check_mesh_order, group_by_name, resolve_group
from fused_tp.core.partition import shard_range, shard_sizes
from fused_tp.core.pending import sum_in_rank_order
from fused_tp.ops.explain import explain_hypothetical, tensor_argument_names


def test_partition_is_that_of_torch_chunk() -> None:
    for size, world_size in itertools.product((0, 1, 2, 3, 5, 7, 8, 12, 13), range(1, 6)):
        chunks = list(torch.arange(size).chunk(world_size)) if size else []
        chunks += [torch.arange(0)] * (world_size - len(chunks))
        assert shard_sizes(size, world_size) == [len(chunk) for chunk in chunks]
        for rank, chunk in enumerate(chunks):
            assert list(range(*shard_range(size, world_size, rank))) == chunk.tolist()


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "soon"])
def test_timeout_must_be_a_positive_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FUSED_TP_TIMEOUT", text)
    with pytest.raises(ValueError, match="set it to a positive number of seconds"):
        settings.timeout_seconds()


def test_settings_are_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSED_TP_CHECK", raising=False)
    assert not settings.check_ranks()
    monkeypatch.setenv("FUSED_TP_CHECK", "yes")
    assert settings.check_ranks()
    monkeypatch.setenv("FUSED_TP_CHECK", "perhaps")
    with pytest.raises(ValueError, match="FUSED_TP_CHECK is 'perhaps'; set it to 1 or 0"):
        settings.check_ranks()
    monkeypatch.setenv("FUSED_TP_TIMEOUT", "2.5")
    assert settings.timeout_seconds() == 2.5


def test_a_setting_is_what_was_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting is read once per lookup: if the variable changed between two reads, the cache would keep the value of
    one text under the other."""
    monkeypatch.setenv("FUSED_TP_SCHEDULE", "plain")
    with monkeypatch.context() as patched:
        patched.setattr(settings, "RAW_ENVIRON", {settings.forced_schedule.key: os.environ.encodevalue("pipelined")})
        assert settings.forced_schedule() == "pipelined"
    assert settings.forced_schedule() == "plain"


def test_group_of_one_process() -> None:
    group = resolve_group(None)
    assert (group.size, group.rank, group.ranks) == (1, 0, (0,))
    assert group_by_name(group.name) is group
    with pytest.raises(RuntimeError, match="No process group is named 'gone'"):
        group_by_name("gone")


def test_sum_is_in_rank_order_and_rounded_once() -> None:
    terms = torch.tensor([[1.0], [2.0**-9], [2.0**-9]], dtype=torch.bfloat16)
    # In bf16 each small term alone would be rounded away; both make half a unit, and with the bias a whole unit.
    assert sum_in_rank_order(terms, torch.tensor([2.0**-8], dtype=torch.bfloat16)).item() == 1.0 + 2.0**-7
    big = torch.tensor([[1e8], [-1e8], [1.0]])
    assert sum_in_rank_order(big).item() == 1.0
    assert big[0].item() == 1e8, "the terms must not change"


def choose(op: str, m: int, k: int | None, n: int | None) -> str:
    return dispatch.choose_schedule(
        ScheduleKey(op, torch.float32, torch.device("cpu"), m, k, n), 2, "gloo", "cpu"
    ).schedule


def test_small_calls_run_plain_collectives_and_large_ones_overlap() -> None:
    assert choose("matmul_all_reduce", 1, None, 4096) == "plain"
    assert choose("matmul_all_reduce", 4096, None, 4096) == "pipelined"
    assert choose("all_gather_matmul", 1, 4096, None) == "plain"
    assert choose("all_gather_matmul", 4096, 4096, None) == "pipelined"


def write(path: Path, rules: list[dict[str, object]]) -> str:
    path.write_text(json.dumps({"arch": {"default": {"default": {"default": rules}}}}))
    return str(path)


def test_a_table_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rules: list[dict[str, object]] = [
        {"max_m": 4, "dtypes": ["bfloat16"], "schedule": "pipelined"},
        {"world_sizes": [8], "schedule": "pipelined"},
        {"max_bytes": 40, "schedule": "nccl_pipeline", "chunks": 3},
        {"schedule": "plain"},
    ]
    monkeypatch.setenv("FUSED_TP_TABLE", write(tmp_path / "table.json", rules))

    def ask(m: int, dtype: torch.dtype, world_size: int, *without: str) -> str:
        key = ScheduleKey("matmul_all_reduce", dtype, torch.device("cpu"), m, None, 8)
        choice = dispatch.choose_schedule(key, world_size, "gloo", "cpu", without)
        assert choice.num_chunks == (3 if choice.schedule == "nccl_pipeline" else None)
        return choice.schedule

    assert ask(1, torch.float32, 2) == "nccl_pipeline" and ask(1, torch.float32, 2, "nccl_pipeline") == "plain"
    assert ask(4, torch.bfloat16, 2) == "pipelined"
    assert ask(5, torch.bfloat16, 2) == "plain"
    assert ask(4, torch.float32, 2) == "plain"
    assert ask(4, torch.float32, 8) == "pipelined"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"table\.json is not a dispatch table"),
        ("{", "is not a dispatch table"),
        ("{}", "is not a dispatch table"),
        pytest.param("[" * 100_000, "is not a dispatch table", id="deep"),
        ("[]", r"table\.json is not a dispatch table \(the file must be a JSON object, got \[\]"),
        ('{"arch": {"cpu": {"gloo": 3}}}', "cpu/gloo must be a JSON object, got 3"),
        ('{"arch": {"cpu": {"gloo": {"x": {}}}}}', "cpu/gloo/x must be a list of rules, got {}"),
        (
            '{"arch": {"cpu": {"gloo": {"x": [{"schedule": "plain"}, 1]}}}}',
            "rule 1 of cpu/gloo/x, 1: required are schedule",
        ),
        (
            '{"arch": {"cpu": {"gloo": {"x": [{"schedule": "plain", "max_m": "4"}]}}}}',
            "max_m must be a number of at least 0",
        ),
        (
            '{"arch": {"cpu": {"gloo": {"x": [{"schedule": "plain", "dtypes": "float32"}]}}}}',
            "dtypes must be a list of dtype names",
        ),
        (
            '{"arch": {"cpu": {"gloo": {"x": [{"schedule": "plain", "world_sizes": 2}]}}}}',
            "world_sizes must be a list of world sizes",
        ),
        ('{"arch": {"cpu": {"gloo": {"x": [{"schedul": "plain"}]}}}}', "required are schedule, and optional are"),
        (
            '{"arch": {"cpu": {"gloo": {"x": [{"schedule": "plain", "chunks": 2}]}}}}',
            "chunks must be a positive integer",
        ),
        (
            '{"arch": {"cpu": {"gloo": {"x": [{"schedule": "nccl_pipeline", "chunks": 0}]}}}}',
            "must be a positive integer",
        ),
        (
            '{"arch": {"cpu": {"gloo": {"x": [{"schedule": "copy_engine", "chunks": true}]}}}}',
            "must be a positive integer",
        ),
        (
            '{"arch": {"default": {"default": {"default": [{"max_m": 1, "schedule": "plain"}]}}}}',
            "No rule of the dispatch table below default/default/default covers this call",
        ),
    ],
)
def test_tables_without_an_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "table.json").write_text(content)
    monkeypatch.setenv("FUSED_TP_TABLE", str(tmp_path / "table.json"))
    with pytest.raises(ValueError, match=said):
        choose("matmul_all_reduce", 2, None, 1)


def test_a_table_is_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks would reread a rewritten file at different calls and choose different schedules."""
    monkeypatch.setenv("FUSED_TP_TABLE", write(tmp_path / "table.json", [{"schedule": "plain"}]))
    assert choose("matmul_all_reduce", 1, None, 1) == "plain"
    write(tmp_path / "table.json", [{"schedule": "pipelined"}])
    for i in range(8):  # reading other tables does not evict it from the cache
        monkeypatch.setenv("FUSED_TP_TABLE", write(tmp_path / f"{i}.json", [{"schedule": "pipelined"}]))
        assert choose("matmul_all_reduce", 2, None, 1) == "pipelined"
    monkeypatch.setenv("FUSED_TP_TABLE", str(tmp_path / "table.json"))
    assert choose("matmul_all_reduce", 2, None, 2) == "plain"


def test_explain_on_one_rank() -> None:
    explanation = fused_tp.explain("matmul_all_reduce", (1, 8), (4, 8), dtype=torch.float32)
    assert str(explanation).splitlines() == [
        "matmul_all_reduce(x [1, 8], weight [4, 8]), float32 on cpu, 1 rank",
        "  forward: local over none, because the group has one rank, so nothing moves",
        "  backward: nothing moves",
    ]


def test_explain_where_a_table_prefers_messages_to_shared_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FUSED_TP_TABLE", write(tmp_path / "table.json", [{"schedule": "pipelined"}]))
    answer = explain_hypothetical("all_reduce", (4, 8), dtype=torch.float32, world_size=2, transport="shm", arch="cpu")
    assert f"  forward: pipelined over torch.distributed, because dispatch table {tmp_path}/table.json, rule" in str(
        answer
    )


FORCED = [  # FUSED_TP_SCHEDULE, options, output for an all_reduce: an error except in the last three
    ("nonsense", "", "FUSED_TP_SCHEDULE is 'nonsense'; it must be one of plain, "),
    ("two_shot", "", "Schedule 'two_shot' does not support this group: it is for cuda, not cpu."),
    ("two_shot", "--arch sm_90 --ranks 64", "this group: it supports at most 63 ranks, and the group has 64."),
    ("one_sided", "--transport gloo", "this group: its transport is gloo."),
    ("one_sided", "--ranks 65", "this group: the group has 65 ranks; shared memory supports at most 64."),
    ("copy_engine", "", "copy engines do not implement all_reduce; dispatch table as shipped, rule cpu/shm/default"),
    (
        "",
        "--ranks 65",
        "cpu/default/default: max_bytes 1048576 (by default); no shared memory: the group has 65 ranks; shared",
    ),
    ("", "--arch sm_90", "forward: plain over nccl, because"),
]


@pytest.mark.parametrize(("forced", "options", "said"), FORCED)
def test_explain_goes_by_what_the_group_can_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forced: str, options: str, said: str
) -> None:
    monkeypatch.delenv("FUSED_TP_TABLE", raising=False)
    monkeypatch.setenv("FUSED_TP_SCHEDULE", forced)
    refused = main(["explain", "all_reduce", "2x64", *options.split()]) == 2
    out, err = capsys.readouterr()
    assert said in (err if refused else out) and refused == (forced not in ("copy_engine", ""))


def test_explain_of_a_table_that_names_no_schedule(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSED_TP_TABLE", write(tmp_path / "table.json", [{"schedule": "nonesuch"}]))
    assert main(["explain", "all_reduce", "2x64"]) == 2
    assert "every size, names schedule 'nonesuch'; it must be one of plain, " in capsys.readouterr().err


def test_help_of_explain_lists_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    listed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert all([op, *", ".join(names).split()] in listed for op, names in tensor_argument_names().items())


def test_explain_of_ring_attention_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = ["1x64x8x32", "1x64x2x32", "1x64x2x32"]
    assert main(["explain", "ring_attention", *shapes, "--transport", "gloo", "--ranks", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ring_attention(q [1, 64, 8, 32], k [1, 64, 2, 32], v [1, 64, 2, 32]), bfloat16 on cpu")
    assert lines[1].startswith("  forward: plain over gloo, because dispatch table")
    assert lines[3].startswith("  each step: native-cpu, because")


def test_explain_of_a_collective_along_a_dim(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "all_gather", "2x64", "--dim", "-1", "--ranks", "4"]) == 0
    assert capsys.readouterr().out.startswith("all_gather(x_shard [2, 64], dim=-1), bfloat16 on cpu, 4 ranks\n")


def test_question_that_makes_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    for shape, given, message in (
        ("2x64", ["--dim", "1"], "not for all_reduce"),
        ("2x64", ["--arch", "hopper"], "must be cpu, or sm_80"),
        ("2x64", ["--transport", "bogus"], "'bogus'; it must be one that supports tensors on cpu: shm, gloo, "),
        ("2x64", ["--transport", "nccl"], "'nccl'; it must be one that supports tensors on cpu: shm, gloo, "),
        (f"{2**70}x2", [], "more elements than a tensor"),
    ):
        try:
            status = main(["explain", "all_reduce", shape, *given])
        except SystemExit as refused:  # raised by argparse
            status = int(refused.code or 0)
        assert status == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "served", "flattened"),
    [
        ([[0, 1], [2, 3]], True, True),
        ([[3, 2], [1, 0]], True, True),
        ([[0, 2], [1, 3]], True, False),  # 1 and 2 have another order in the group of all four
        ([[0, 1], [3, 2]], False, False),  # 0 and 3 have different ranks in their rows' groups
        ([[3, 1], [0, 2]], False, False),
    ],
)
def test_meshes_whose_groups_number_their_ranks_apart(ranks: list[list[int]], served: bool, flattened: bool) -> None:
    mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("cp", "tp"), _init_backend=False, _rank=0)
    for together, fits in ((False, served), (True, flattened)):
        with nullcontext() if fits else pytest.raises(ValueError, match="must ascend along every dim"):
            assert check_mesh_order(mesh, (0, 1), is_flattened=together)
    with FakeTensorMode():
        assert not check_mesh_order(mesh, (0, 1))
