"""Weights of Tensor subclasses: subclasses that expose their memory unchanged use the kernels for plain tensors."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fused_tp import all_gather_matmul, explain, matmul_all_reduce
from fused_tp.backends import gemm
from tests.workers import on_ranks


class Loaded(nn.Parameter):
    """Parameter subclass like those of checkpoint loaders."""


class Delegating(nn.Parameter):
    """Parameter subclass like vLLM's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(Tensor): ...


class OwnMeaning(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert callable(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@on_ranks(2)
def test_few_rows(group: dist.ProcessGroup) -> None:
    generator = torch.Generator().manual_seed(0)
    w, x = torch.randn(512, 512, generator=generator), torch.randn(1, 512, generator=generator)
    with torch.inference_mode():
        made_in_inference = w.clone()
    weights = {
        "loaded": Loaded(w.clone()),
        "delegating": Delegating(w.clone(), requires_grad=False),
        "named": w.clone().as_subclass(Named),
        "own": w.clone().as_subclass(OwnMeaning),
        "inference": made_in_inference,
        "view": torch.cat([w, w])[:512],
        "strided": torch.stack([w, w], 1)[:, 0],
        "transposed": w.t().contiguous().t(),
    }
    wanted, gathered = matmul_all_reduce(x, w, group=group), all_gather_matmul(x, [w], group=group)[0]
    used: list[bool] = []
    own = gemm._few_rows_matmul

    def few_rows(*args: Any) -> Any:
        y = own(*args)
        used.append(y is not None)
        return y

    for name, weight in weights.items():
        told = str(explain("matmul_all_reduce", x, weight, group=group)).splitlines()[-1]
        used.clear()
        with torch.no_grad(), mock.patch.object(gemm, "_few_rows_matmul", few_rows):
            found, other = matmul_all_reduce(x, weight, group=group), all_gather_matmul(x, [weight], group=group)[0]
            assert type(found) is type(nn.functional.linear(x, weight)), name
        for one, expected in ((found, wanted), (other, gathered)):
            torch.testing.assert_close(one.as_subclass(Tensor), expected, rtol=1e-4, atol=1e-4, msg=name)
        assert any(used) == ("kernels for few rows, because" in told), (name, told)
        assert ("OwnMeaning" in told) == (name == "own"), told
    loaded: Any = weights["loaded"]
    matmul_all_reduce(x, loaded, group=group).sum().backward()
    assert type(loaded.grad) is Tensor and loaded.grad.shape == w.shape
    loaded.main_grad, loaded.grad = torch.zeros_like(w), None
    matmul_all_reduce(x, loaded, group=group).sum().backward()
    assert loaded.main_grad.abs().sum() > 0 and loaded.grad is None
