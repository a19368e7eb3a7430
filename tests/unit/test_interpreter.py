"""Triton's interpreter and the numpy that it runs with."""

from __future__ import annotations

import numpy
import pytest
import torch
import triton

from fused_tp.attention.kernels import triton as attention
from fused_tp.attention.kernels.base import KernelRequest
from fused_tp.triton_kernels.language import interpreter_obstacle

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("of_triton", "of_numpy", "refused"),
    [("3.6.0", "2.4.6", True), ("3.6.0", "2.3.5", False), ("3.7.1", "2.4.6", False), ("3.10.0+git1a", "2.10.0", False)],
)
def test_versions_that_do_not_go_together(
    of_triton: str, of_numpy: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", of_triton)
    monkeypatch.setattr(numpy, "__version__", of_numpy)
    why = interpreter_obstacle()
    assert bool(why) == refused
    assert why is None or ("Triton 3.6.0" in why and "pip install 'numpy<2.4', or Triton 3.7" in why)


def test_attention_goes_without_kernels_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("of two versions")

    monkeypatch.setattr(attention, "_load_kernels", broken)
    available = attention.triton_availability(KernelRequest(torch.device("cpu"), torch.bfloat16, 64, 64))
    assert available.reason == "the Triton kernels cannot be loaded (of two versions)"
