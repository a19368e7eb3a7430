"""FUSED_TP_AUTOTUNE: slow or wrong schedules are not chosen, all ranks choose alike, and choices are stored."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fused_tp
from fused_tp.backends import autotune, registry
from fused_tp.backends.gemm import Product
from fused_tp.backends.messages.plain import PlainSchedule
from fused_tp.backends.messages.torch_dist import torch_dist
from fused_tp.backends.schedule import GatherMatmul
from fused_tp.cli import doctor
from fused_tp.core.group import resolve_group
from tests.reference import seeded
from tests.workers import fresh_ranks


class Quick(PlainSchedule):
    """Plain schedule under another name, while the one named plain is made slow."""


class Slow(PlainSchedule):
    def all_gather_matmul(self, asked: GatherMatmul) -> tuple[list[Tensor], Tensor | None]:
        time.sleep(0.01)
        return super().all_gather_matmul(asked)

    def _matmul_all_reduce(self, products: list[Product], *rest: Any) -> Tensor:  # type: ignore[override]
        time.sleep(0.01)
        return super()._matmul_all_reduce(products, *rest)


class Wrong(PlainSchedule):
    """Schedule that is faster than all others, and wrong in one element of 16,384 on rank 1."""

    def all_gather_matmul(self, asked: GatherMatmul) -> tuple[list[Tensor], Tensor | None]:
        outputs, gathered = super().all_gather_matmul(asked)
        outputs[0].view(-1)[77] += 100.0 * self.rank
        return outputs, gathered

    def _matmul_all_reduce(self, products: list[Product], *rest: Any) -> Tensor:  # type: ignore[override]
        return super()._matmul_all_reduce(products, *rest) * 1.1


class OtherBits(PlainSchedule):
    """Schedule that is right except for the last bits, which differ between ranks."""

    def _matmul_all_reduce(self, products: list[Product], *rest: Any) -> Tensor:  # type: ignore[override]
        return super()._matmul_all_reduce(products, *rest) * (1 + 1e-6 * self.rank)


class Uneven(PlainSchedule):
    """Schedule that is right, but returns different bits in each call."""

    calls = 0

    def _matmul_all_reduce(self, products: list[Product], *rest: Any) -> Tensor:  # type: ignore[override]
        self.calls += 1
        return super()._matmul_all_reduce(products, *rest) * (1 + 1e-6 * self.calls)


class Raises(PlainSchedule):
    def _matmul_all_reduce(self, products: list[Product], *rest: Any) -> Tensor:  # type: ignore[override]
        raise NotImplementedError("not for these sizes")


@contextmanager
def only(**kinds: type[PlainSchedule]) -> Iterator[None]:
    """Replace all schedules by `kinds`; `one_sided`, which the table names, is slow."""
    spec, kinds = registry.SCHEDULES["plain"], {**kinds, "one_sided": Slow}

    def made(kind: type[PlainSchedule]) -> Any:
        return lambda group, device, chunks: kind(torch_dist(group, device.type))

    specs = {name: replace(spec, name=name, make=made(kind)) for name, kind in kinds.items()}
    with mock.patch.dict(registry.SCHEDULES, specs, clear=True):
        yield


def chosen(group: Any) -> dict[str, str]:
    """Choices of this rank: schedule by call in words."""
    choices = autotune._SAVED_CHOICES[resolve_group(group)]["choices"]
    return {words.split(",")[0]: choice["schedule"] for words, choice in choices.items()}


def calls(group: Any) -> None:
    x, w = seeded(128, 64), seeded(128, 64, seed=1)
    y = fused_tp.all_gather_matmul(x.chunk(group.size())[group.rank()], w, group=group, gather_size=128)
    torch.testing.assert_close(y, x @ w.t())
    for _ in range(2):
        total = fused_tp.matmul_all_reduce(x, w, group=group)
        torch.testing.assert_close(total, group.size() * (x @ w.t()))


def choose(group: Any, folder: str) -> tuple[dict[str, str], dict[str, str], int]:
    """Choices of this rank, schedules found wrong, and the number of measurements."""
    kinds = {"plain": Slow, "quick": Quick, "wrong": Wrong, "other": OtherBits, "uneven": Uneven}
    measured = mock.Mock(wraps=autotune._measure_candidates)
    with (
        mock.patch.dict(os.environ, FUSED_TP_AUTOTUNE=folder),
        mock.patch.object(autotune, "_measure_candidates", measured),
        only(**kinds, raises=Raises),
    ):
        calls(group)
        return chosen(group), autotune._SAVED_CHOICES[resolve_group(group)]["wrong"], measured.call_count


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_what_is_slow_or_wrong_is_not_chosen(world_size: int, tmp_path: Path) -> None:
    first, *others = [outcome.unwrap() for outcome in fresh_ranks(world_size, choose, str(tmp_path))]
    choices, wrong, measured = first
    assert all(other == first for other in others)  # equal on all ranks
    assert choices["all_gather_matmul"] in ("quick", "other", "uneven", "raises")  # plain schedules, but quick
    assert choices["matmul_all_reduce"] == "quick" and measured == 2
    assert wrong["wrong: all_gather_matmul in float32"].startswith("on rank 1 0.01% of the result are wrong")
    assert wrong["wrong: matmul_all_reduce in float32"].startswith("on rank 0 ")
    assert wrong["other: matmul_all_reduce in float32"] == "ranks hold different bits"
    assert wrong["uneven: matmul_all_reduce in float32"] == "on rank 0 two equal calls returned different bits"
    assert "NotImplementedError: not for these sizes" in wrong["raises: matmul_all_reduce in float32"]

    # Other processes read all results from the file, and measure nothing.
    (file,) = tmp_path.iterdir()
    kept = json.loads(file.read_text())
    assert set(kept["wrong"]) == set(wrong)
    outcomes = [outcome.unwrap() for outcome in fresh_ranks(world_size, choose, str(tmp_path))]
    assert outcomes == [(choices, wrong, 0)] * world_size

    # A choice that was found wrong later, or that this program lacks, is replaced by a new one.
    for words, choice in kept["choices"].items():
        choice["schedule"] = "wrong" if words.startswith("all_gather") else "another"
    file.write_text(json.dumps(kept))
    outcomes = [outcome.unwrap() for outcome in fresh_ranks(world_size, choose, str(tmp_path))]
    assert all(again["matmul_all_reduce"] == "quick" and count == 2 for again, _, count in outcomes)


def real(group: Any, folder: str) -> None:
    x, w = seeded(64, 64), seeded(32, 64, seed=1)
    with mock.patch.dict(os.environ, FUSED_TP_AUTOTUNE=folder):
        ask: dict[str, Any] = {"dtype": torch.float32, "group": group}
        before = str(fused_tp.explain("matmul_all_reduce", (64, 64), (32, 64), **ask))
        assert "until FUSED_TP_AUTOTUNE measures the first such call" in before
        w = w.requires_grad_()
        fused_tp.all_gather_matmul(x.chunk(2)[group.rank()].requires_grad_(), w, group=group).sum().backward()
        for rows in (64, 49, 64):  # in steps: one choice for up to 64
            fused_tp.matmul_all_reduce(x[:rows], w, group=group)
        assert set(chosen(group)) == {"all_gather_matmul", "all_gather_matmul_backward", "matmul_all_reduce"}
        after = str(fused_tp.explain("matmul_all_reduce", (60, 64), (32, 64), **ask))
        assert f"forward: {chosen(group)['matmul_all_reduce']} over" in after
        assert "because measured here: " in after
        # Forced schedules are not measured.
        with mock.patch.dict(os.environ, FUSED_TP_SCHEDULE="pipelined"):
            fused_tp.matmul_all_reduce(x[:5], w, group=group)
        assert len(chosen(group)) == 3


def test_schedules_of_cpus(tmp_path: Path) -> None:
    for outcome in fresh_ranks(2, real, str(tmp_path)):
        outcome.unwrap()


def test_doctor_names_what_was_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_TP_AUTOTUNE", str(tmp_path))
    (tmp_path / "autotune-1.json").write_text("{")  # is ignored
    kept = {
        "machine": {"device": "NVIDIA H100", "ranks of each host": [8]},
        "choices": {"one": {}},
        "wrong": {"fused_kernel: all_gather_matmul in bfloat16": "on rank 3 2.00% of the result are wrong"},
    }
    (tmp_path / "autotune-2.json").write_text(json.dumps(kept))
    good, bad = doctor._examine_autotuned_schedules()
    assert good.name == "NVIDIA H100" and good.value.startswith("1 choices for ranks [8]")
    assert bad.status == doctor.PROBLEM and "fused_kernel" in bad.name and "autotune-2.json" in bad.advice


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    autotune._save_choices(
        {"about": "", "machine": {}, "choices": {}, "wrong": {}, "path": str(tmp_path / "file" / "a.json")}
    )
    assert "could not be saved" in caplog.text
