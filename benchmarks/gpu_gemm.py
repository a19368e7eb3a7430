"""The matmul kernel alone against cuBLAS: as `gemm` tunes itself, and each shipped config for itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .case import OURS, Case, Contestant, Rival, Unavailable
from .gpu_ranks import normal
from .gpu_timing import GpuContext, assert_near, checked_rows
from .ratios import SPEEDUP

CUBLAS = "torch.mm"
FP8 = torch.float8_e4m3fn
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": FP8}
# (M, N, K): cubes, and up and down projection of Llama 3 8B's MLP for 4096 tokens.
SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (2048, 2048, 2048), (4096, 14336, 4096), (4096, 4096, 14336))
QUICK_SHAPES = SHAPES[:2]
# Of cuBLAS's speed, at the two sizes that a bar is set for.
BAR, AIM = 0.90, 0.97
WITH_BAR = {("bf16", 4096), ("bf16", 8192)}


def cases(dtypes: Sequence[str], quick: bool) -> Iterator[Case]:
    for dtype in dtypes:
        for m, n, k in QUICK_SHAPES if quick else SHAPES:
            judged = (dtype, m) in WITH_BAR and m == n == k
            rivals = {CUBLAS: Rival(SPEEDUP, BAR, AIM) if judged else Rival(SPEEDUP)}
            if dtype == "fp8":
                rivals = {name: Rival(SPEEDUP) for name in ("torch._scaled_mm", "torch._scaled_mm, fast accumulation")}
            parameters = {"dtype": dtype, "m": m, "n": n, "k": k}
            yield Case(f"alone/{dtype}/{m}x{n}x{k}", contestants, parameters, rivals, seconds=6.0)


def contestants(context: GpuContext, dtype: str, m: int, n: int, k: int) -> dict[str, Callable[[], Contestant]]:
    from fused_tp.triton_kernels.gemm import gemm as module

    kind, device = DTYPES[dtype], context.device
    if kind == FP8 and torch.cuda.get_device_capability(device) < (9, 0):

        def refuse() -> Contestant:
            raise Unavailable("fp8 needs sm_90 or later.")

        return {OURS: refuse}
    sets = [
        (_operand(m, k, kind, device, 2 * i), _operand(n, k, kind, device, 2 * i + 1))
        for i in range(context.input_sets((m + n) * k * kind.itemsize))
    ]
    one = torch.ones((), device=device)
    scales: dict[str, Any] = {"x_scale": one, "weight_scale": one} if kind == FP8 else {}
    out_dtype = torch.bfloat16 if kind == FP8 else kind

    def contestant(multiply: Callable[[Tensor, Tensor, Tensor], object], note: Callable[[], str]) -> Contestant:
        return _contestant(context, sets, out_dtype, multiply, note)

    def ours(x: Tensor, w: Tensor, out: Tensor) -> None:
        module.gemm(x, w, out=out, **scales)

    def chosen() -> str:
        return str(list(module._tuned.values())[-1]) if module._tuned else "the only config"

    made = {OURS: lambda: contestant(ours, chosen)}
    if kind == FP8:
        for fast in (False, True):

            def scaled_mm(x: Tensor, w: Tensor, out: Tensor, fast: bool = fast) -> None:
                torch._scaled_mm(
                    x, w.t(), scale_a=one, scale_b=one, out_dtype=out_dtype, use_fast_accum=fast, out=out
                )  # fmt: skip

            name = f"torch._scaled_mm{', fast accumulation' * fast}"
            made[name] = partial(contestant, scaled_mm, str)
    else:
        made[CUBLAS] = lambda: contestant(lambda x, w, out: torch.mm(x, w.t(), out=out), str)
    for config in module.plan_gemm(*sets[0]).configs:

        def fixed(x: Tensor, w: Tensor, out: Tensor, config: Any = config) -> None:
            with only(config):
                module.gemm(x, w, out=out, **scales)

        made[f"config {config}"] = partial(contestant, fixed, str)
    return made


@contextmanager
def only(config: Any) -> Iterator[None]:
    """Inside it `gemm` knows no other config than this one."""
    from fused_tp.triton_kernels.gemm import gemm as module

    before = module.gemm_configs
    module.gemm_configs = lambda *args, **kinds: (config,)
    try:
        yield
    finally:
        module.gemm_configs = before


def _contestant(
    context: GpuContext,
    sets: Sequence[tuple[Tensor, Tensor]],
    out_dtype: torch.dtype,
    multiply: Callable[[Tensor, Tensor, Tensor], object],
    note: Callable[[], str],
) -> Contestant:
    (stream,) = context.streams(1)
    turn = itertools.count()
    m, n = sets[0][0].shape[0], sets[0][1].shape[0]
    out = torch.empty(m, n, dtype=out_dtype, device=context.device)

    def run() -> None:
        with torch.cuda.stream(stream):
            multiply(*sets[next(turn) % len(sets)], out)

    def check() -> None:
        with torch.cuda.stream(stream):
            out.fill_(torch.nan)
            multiply(*sets[0], out)
            rows = checked_rows(m)
            x, w = sets[0]
            expected = x[rows].double() @ w.double().t()
            assert_near(out[rows], expected)

    torch.cuda.synchronize(context.device)  # the inputs were made in another stream
    with torch.cuda.stream(stream):
        multiply(*sets[0], out)  # compiles and tunes, so that the note can say what was taken
    return Contestant(run, check, note())


def _operand(rows: int, columns: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    return normal(rows, columns, dtype=dtype, device=device, seed=seed)
