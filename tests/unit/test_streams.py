"""Streams that nobody else has, as far as there is something to test without a GPU."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fused_tp.triton_kernels.attention import ring_keys
from fused_tp.triton_kernels.comm import streams

pytestmark = pytest.mark.full


class Owner:
    """One that only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


def test_streams_come_back_while_others_are_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(100))

    def create(index: int, urgent: bool) -> int:
        gc.collect()
        return next(numbers)

    monkeypatch.setattr(streams, "_create", create)
    monkeypatch.setattr(streams, "_free", {})
    device = torch.device("cuda", 0)
    found: list[list[int]] = []

    def take() -> None:
        found.append(streams.own_streams(Owner(), device, 2))  # given back in the middle of the next call
        found.append(streams.own_streams(streams, device, 1))
        found.append(streams.own_streams(streams, device, 2))

    gc.disable()  # not before it
    try:
        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "it waits for itself"
    finally:
        gc.enable()
    assert found[0] == [0, 1] and found[1] == [2] and sorted(found[2]) == [0, 1]
    assert streams.own_streams(streams, device, 1, urgent=True) == [3]  # not those of another priority


class Driver:
    """As much of libcuda as makes a stream; notes its priority."""

    def __init__(self) -> None:
        self.priorities: list[int] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name == "cuCtxGetStreamPriorityRange":
                for pointer, value in zip(arguments, (0, -5), strict=True):
                    pointer._obj.value = value
            if name == "cuStreamCreateWithPriority":
                arguments[0]._obj.value = 7
                self.priorities.append(arguments[2])
            return 0

        return call


def test_what_a_kernel_waits_for_has_the_greatest_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    assert [streams.new_stream(driver, 0), streams.new_stream(driver, 0, urgent=True)] == [7, 7]
    assert driver.priorities == [0, -5]

    def asked(owner: object, device: torch.device, count: int, *, urgent: bool = False) -> None:
        raise LookupError(f"{count} streams, urgent: {urgent}")

    monkeypatch.setattr(ring_keys, "own_streams", asked)
    buffer, handle = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0)), SimpleNamespace(world_size=3)
    with pytest.raises(LookupError, match="2 streams, urgent: True"):
        ring_keys.RingWorkspace(cast("Any", buffer), cast("Any", handle), timeout_seconds=1)
