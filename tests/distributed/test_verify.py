"""`fused_tp.ops.verify` and `fused-tp tune`: wrong schedules are found, named, stored and never chosen."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fused_tp
from fused_tp.backends import autotune
from fused_tp.backends.gemm import Product
from fused_tp.backends.messages.plain import PlainSchedule
from fused_tp.backends.symmetric_memory.symm_mem import GroupMemory
from fused_tp.backends.triton import fused_kernel
from fused_tp.cli.main import main
from fused_tp.core.errors import FusedTPError
from fused_tp.core.group import resolve_group
from fused_tp.ops import verify
from tests.distributed.schedule_cases import multicast
from tests.distributed.test_autotune import OtherBits, Quick, Uneven, Wrong, only
from tests.native.doubles.libraries import doubles
from tests.reference import seeded
from tests.workers import fresh_ranks

SIZE = (10, 64, 96)
LATE_SECONDS = 0.4  # more than a call takes on a busy machine


class Stale(PlainSchedule):
    """Schedule that sometimes returns the result of the previous call."""

    calls = 0
    before: Tensor | None = None

    def _matmul_all_reduce(self, products: list[Product], *rest: Any) -> Tensor:  # type: ignore[override]
        self.calls += 1
        found = super()._matmul_all_reduce(products, *rest)
        before, self.before = self.before, found
        return before if before is not None and self.calls % 9 == 0 else found


class Hurried(PlainSchedule):
    """Schedule that is wrong if a peer is late."""

    def _matmul_all_reduce(self, products: list[Product], *rest: Any) -> Tensor:  # type: ignore[override]
        begun = time.perf_counter()
        found = super()._matmul_all_reduce(products, *rest)
        return torch.zeros_like(found) if time.perf_counter() - begun > LATE_SECONDS / 2 else found


class Disturbed(PlainSchedule):
    """Schedule that is wrong while torch.distributed transfers data."""

    moving = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        Disturbed.moving = False  # ignores transfers in checks of other schedules

    def _matmul_all_reduce(self, products: list[Product], *rest: Any) -> Tensor:  # type: ignore[override]
        found = super()._matmul_all_reduce(products, *rest)
        moving, Disturbed.moving = Disturbed.moving, False
        return 2 * found if moving else found


class Backward(PlainSchedule):
    """Schedule that is right except for gradients: the reduction in the backward of a gather."""

    def _matmul_reduce_scatter(self, *given: Any) -> Tensor:
        return super()._matmul_reduce_scatter(*given) * 1.05


class GivesUp(PlainSchedule):
    """Schedule in which rank 1 raises while its peers wait."""

    def _matmul_all_reduce(self, products: list[Product], *rest: Any) -> Tensor:  # type: ignore[override]
        if self.rank == 1:
            raise FusedTPError("out of slots")
        return super()._matmul_all_reduce(products, *rest)


class Ends(PlainSchedule):
    """Schedule whose call ends the program, like a crash or an interrupt by the user."""

    how: type[BaseException] = SystemExit

    def _matmul_all_reduce(self, products: list[Product], *rest: Any) -> Tensor:  # type: ignore[override]
        raise self.how


@contextmanager
def shorter(op: str, **environment: str) -> Iterator[None]:
    """Check only one op."""
    made = verify.make_examples

    def one(*given: int) -> list[verify.Example]:
        return [example for example in made(*given) if example.op == op]

    with mock.patch.object(verify, "make_examples", one), mock.patch.dict(os.environ, environment):
        yield


def told(move: Any) -> Any:
    def all_reduce(x: Tensor, **how: Any) -> Any:
        Disturbed.moving = x.numel() == verify.CONCURRENT_ELEMENTS
        return move(x, **how)

    return all_reduce


def found(group: Any, folder: str, op: str, kinds: dict[str, type[PlainSchedule]], seconds: str) -> dict[str, str]:
    """Run the checks and return the problems by schedule."""
    with (
        shorter(op, FUSED_TP_AUTOTUNE=folder, FUSED_TP_TIMEOUT=seconds),
        only(**kinds),
        mock.patch.object(dist, "all_reduce", told(dist.all_reduce)),
    ):
        verdicts = verify.verify(group, torch.device("cpu"), torch.float32, [SIZE], num_calls=20)
        return {verdict.schedule: verdict.problem for verdict in verdicts}


KINDS = {
    "plain": PlainSchedule,
    "right": Quick,
    "wrong": Wrong,
    "other": OtherBits,
    "uneven": Uneven,
    "stale": Stale,
    "disturbed": Disturbed,
}


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_what_is_wrong_is_found_and_kept(world_size: int, tmp_path: Path) -> None:
    outcomes = fresh_ranks(world_size, found, str(tmp_path), "matmul_all_reduce", KINDS, "60")
    first, *others = [outcome.unwrap() for outcome in outcomes]
    assert all(other == first for other in others)
    assert first["plain"] == first["right"] == ""
    assert "of the result are wrong" in first["wrong"]
    assert first["other"] == "ranks hold different bits"
    assert first["uneven"] == "on rank 0 different bits in a later call"
    assert first["stale"].startswith("on rank 0 ") and first["stale"].endswith(" in a later call")
    assert first["disturbed"].endswith(" during another collective of torch.distributed")
    (file,) = tmp_path.iterdir()
    wrong = json.loads(file.read_text())["wrong"]
    assert wrong["stale: matmul_all_reduce in float32"] == first["stale"]
    assert not [what for what in wrong if what.startswith(("plain", "right"))]  # right schedules leave no entry


def test_gradients_are_checked(tmp_path: Path) -> None:
    kinds = {"plain": PlainSchedule, "backward": Backward}
    for outcome in fresh_ranks(2, found, str(tmp_path), "all_gather_matmul", kinds, "60"):
        problems = outcome.unwrap()
        assert problems["plain"] == "" and "of the result are wrong" in problems["backward"]


@pytest.mark.full
def test_a_group_that_has_failed_is_made_anew(tmp_path: Path) -> None:
    kinds = {"plain": PlainSchedule, "gives_up": GivesUp, "right": Quick}
    for outcome in fresh_ranks(2, found, str(tmp_path), "matmul_all_reduce", kinds, "3"):
        problems = outcome.unwrap()
        assert "out of slots" in problems["gives_up"] or "rank 1" in problems["gives_up"]
        assert problems["plain"] == problems["right"] == ""


def ends(group: Any, folder: str, how: type[BaseException]) -> None:
    with mock.patch.object(Ends, "how", how), pytest.raises(how):
        found(group, folder, "matmul_all_reduce", {"plain": PlainSchedule, "ends": Ends}, "60")


@pytest.mark.parametrize(("how", "kept"), [(SystemExit, 1), (KeyboardInterrupt, 0)])
def test_what_ended_the_program_is_not_tried_again(how: type[BaseException], kept: int, tmp_path: Path) -> None:
    for outcome in fresh_ranks(2, ends, str(tmp_path), how):
        outcome.unwrap()
    (file,) = tmp_path.iterdir()
    assert len(json.loads(file.read_text())["wrong"]) == kept
    if kept:
        kinds = {"plain": PlainSchedule, "ends": Ends, "right": Quick}
        for outcome in fresh_ranks(2, found, str(tmp_path), "matmul_all_reduce", kinds, "60"):
            problems = outcome.unwrap()
            assert "never finished" in problems["ends"] and problems["right"] == ""


def chosen(group: Any, folder: str) -> str:
    """Schedules that FUSED_TP_AUTOTUNE measures after the fastest one has been found wrong."""
    with mock.patch.dict(os.environ, FUSED_TP_AUTOTUNE=folder), only(plain=PlainSchedule, hurried=Hurried):
        what = ("hurried", "matmul_all_reduce", torch.float32)
        assert "late" in autotune.known_problem(resolve_group(group), torch.device("cpu"), *what)
        fused_tp.matmul_all_reduce(seeded(8, 16), seeded(8, 16, seed=1), group=group)
        (choice,) = autotune._SAVED_CHOICES[resolve_group(group)]["choices"].values()
        return str(choice["seconds"].keys())


def hurried(group: Any, folder: str) -> dict[str, str]:
    with mock.patch.object(verify, "LATE_SECONDS", LATE_SECONDS):
        return found(group, folder, "matmul_all_reduce", {"plain": PlainSchedule, "hurried": Hurried}, "60")


def test_the_autotuner_leaves_out_what_a_check_has_found(tmp_path: Path) -> None:
    for outcome in fresh_ranks(2, hurried, str(tmp_path)):
        problems = outcome.unwrap()
        assert problems["plain"] == "" and problems["hurried"].endswith(" with a late rank")
    for outcome in fresh_ranks(2, chosen, str(tmp_path)):
        assert "hurried" not in outcome.unwrap()


def test_other_bits_are_right_where_those_of_the_plain_schedule_differ_too(tmp_path: Path) -> None:
    kinds = {"plain": Uneven, "one_sided": Uneven}
    for outcome in fresh_ranks(2, found, str(tmp_path), "matmul_all_reduce", kinds, "60"):
        assert outcome.unwrap() == {"plain": "", "one_sided": ""}


def on_doubles(group: Any, folder: str, double: str) -> dict[str, set[str]]:
    """Run the checks of all ops on test doubles, and return the problems by schedule."""
    problems: dict[str, set[str]] = {}
    with (
        doubles(double),
        multicast(),
        mock.patch.object(GroupMemory, "has_multicast", property(lambda memory: True, lambda *_: None), create=True),
        mock.patch.object(fused_kernel, "DIRECT_BYTES", -1),
        mock.patch.dict(os.environ, FUSED_TP_AUTOTUNE=folder),
    ):
        for verdict in verify.verify(group, torch.device("cpu"), torch.float32, [(18, 64, 40)], num_calls=4):
            problems.setdefault(verdict.schedule, set()).add(verdict.problem)
    return problems


@pytest.mark.full
@pytest.mark.parametrize(
    ("double", "schedules", "environment"),
    [
        ("copy_engine", {"copy_engine"}, {}),
        ("two_shot", {"one_shot", "two_shot", "multimem"}, {}),
        ("nccl_pipeline", {"nccl_pipeline"}, {}),
        ("copy_engine", {"copy_engine", "fused_kernel"}, {"TRITON_INTERPRET": "1"}),
    ],
)
def test_schedules_of_gpus(double: str, schedules: set[str], environment: dict[str, str], tmp_path: Path) -> None:
    """Check schedules for GPUs on doubles of the driver and NCCL, the kernels' CPU build, and Triton's interpreter."""
    if environment:
        pytest.importorskip("triton", reason="needs Triton")
    outcomes = fresh_ranks(2, on_doubles, str(tmp_path), double, env=environment, timeout=200)
    for outcome in outcomes:
        problems = outcome.unwrap()
        assert problems.keys() == {"plain", "pipelined", "one_sided"} | schedules
        assert set().union(*problems.values()) == {""}, problems


def test_one_rank_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="one rank"):
            next(verify.verify(dist.group.WORLD, torch.device("cpu"), torch.float32, [SIZE]))
    finally:
        dist.destroy_process_group()


@pytest.mark.full
def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = ["--folder", str(tmp_path / "kept"), "--json", str(tmp_path / "found.json")]
    sizes = ["--calls", "3", "--dtypes", "fp32", "--tokens", "8"]
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 256,
            }
        )
    )
    assert main(["tune", *place, *sizes, "--model", str(tmp_path / "config.json")]) == 0
    said = json.loads((tmp_path / "found.json").read_text())
    assert said["wrong"] == {} and "all_gather_matmul in fp32 on pipelined" in said["right"]
    assert {words.split(",")[0] for words in said["choices"]} == {
        "all_gather_matmul",
        "all_gather_matmul_backward",
        "matmul_reduce_scatter",
        "matmul_reduce_scatter_backward",
        "matmul_all_reduce",
    }
    assert "ring_attention in fp32 is right on plain, pipelined, one_sided" in capfd.readouterr().out


def test_arguments_that_do_not_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["tune", "--ranks", "33"]) == 2
    assert "llama-3-8b cannot run at tp33: tp=33 is more than the 32 attention heads" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["tune", "--ranks", "3"]) == 2
    assert "--ranks is 3, but torchrun has started 2. Omit --ranks." in capsys.readouterr().err
