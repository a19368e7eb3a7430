"""Streams that nobody else has, as far as there is something to test without a GPU."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

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
