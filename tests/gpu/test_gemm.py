"""The matmul kernel, compiled and run, against fp64: dtypes, layouts, bias, odd sizes, every shipped config."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from benchmarks.gpu_ranks import normal
from tests.reference import assert_within_dtype_error, matmul64

pytestmark = pytest.mark.gpu

SHAPES = ((256, 512, 384), (1, 8, 8), (1, 4096, 512), (17, 100, 72), (129, 257, 131), (1000, 40, 33), (512, 130, 1024))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def nothing_of_the_last_test() -> Iterator[None]:
    """Errors of the device show in the test that made them."""
    yield
    torch.cuda.synchronize()


def operand(rows: int, columns: int, dtype: torch.dtype, device: torch.device, seed: int, swapped: bool) -> Tensor:
    if swapped:
        return operand(columns, rows, dtype, device, seed, False).t()
    return normal(rows, columns, dtype=dtype, device=device, seed=seed)


def assert_close(y: Tensor, reference: Tensor, k: int, name: str, tf32: bool = False) -> None:
    if tf32:  # 10 bits of mantissa in each operand: errors of random sign, relative to the sum
        error = (y.double() - reference).norm() / reference.norm()
        assert float(error) < 2e-3, f"{name}: {error:.3g}"
        return
    assert_within_dtype_error(y, reference, y.dtype, reduced_over=k, name=name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("x_swapped", [False, True])
@pytest.mark.parametrize("w_swapped", [False, True])
@pytest.mark.usefixtures("default_config")
def test_layouts_and_odd_sizes(dtype: torch.dtype, x_swapped: bool, w_swapped: bool, device: torch.device) -> None:
    from fused_tp.triton_kernels.gemm.gemm import gemm

    for m, n, k in SHAPES:
        bias = normal(n, dtype=dtype, device=device, seed=4) if x_swapped else None
        x, w = operand(m, k, dtype, device, 1, x_swapped), operand(n, k, dtype, device, 2, w_swapped)
        for precision in ("ieee", "tf32") if dtype == torch.float32 else ("ieee",):
            name = f"{m}x{n}x{k} swapped {x_swapped} {w_swapped} {precision}"
            out = torch.full((m, n), torch.nan, dtype=dtype, device=device)
            y = gemm(x, w, bias, precision=precision, out=out)
            assert_close(y, matmul64(x, w, bias), k, name, precision == "tf32")


@pytest.mark.parametrize("kind", ["bf16", "tf32", "ieee"])
@pytest.mark.parametrize("tma", [True, False], ids=["tma", "pointers"])
def test_every_shipped_config(kind: str, tma: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each config of this architecture by itself; normally the fastest of them is taken."""
    from fused_tp.triton_kernels.device import arch_of
    from fused_tp.triton_kernels.gemm import gemm as module
    from fused_tp.triton_kernels.gemm.configs import gemm_configs

    configs = gemm_configs(arch_of(device), kind, tma=tma)
    if not configs:
        pytest.skip(f"no {kind} configs by {'TMA' if tma else 'pointers'} on this architecture")
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    precision = kind if dtype == torch.float32 else "ieee"
    # K that is no multiple of 16 bytes keeps TMA away.
    m, n, k = (520, 776, 1040) if tma else (520, 776, 1037)
    x, w = (operand(rows, k, dtype, device, seed, False) for seed, rows in enumerate((m, n)))
    assert module.plan_gemm(x, w, precision=precision).tma == tma
    wanted = matmul64(x, w)
    for config in configs:
        monkeypatch.setattr(module, "gemm_configs", lambda *args, config=config, **kinds: (config,))
        y = module.gemm(x, w, precision=precision)
        error = float((y.double() - wanted).norm() / wanted.norm())
        assert error < {"tf32": 2e-3, "ieee": 1e-5}.get(kind, 5e-3), f"{config}: {error:.3g}"


@pytest.mark.usefixtures("default_config")
def test_share_of_sms_changes_no_bit(device: torch.device) -> None:
    from fused_tp.triton_kernels.gemm.gemm import gemm

    x, w = operand(777, 512, torch.bfloat16, device, 1, False), operand(1032, 512, torch.bfloat16, device, 2, False)
    y = gemm(x, w)
    for num_sms in (1, 7, 66):
        assert torch.equal(gemm(x, w, num_sms=num_sms), y)


@pytest.mark.usefixtures("default_config")
def test_more_than_2_to_the_31_elements(device: torch.device) -> None:
    from fused_tp.triton_kernels.gemm.gemm import gemm

    m, k = 70_000, 32_768
    if torch.cuda.mem_get_info(device)[0] < 12 * m * k:  # x in fp32, twice, and in bf16, and some room
        pytest.skip("needs 28 GB of free GPU memory")
    x, w = normal(m, k, dtype=torch.bfloat16, device=device, seed=1), operand(64, k, torch.bfloat16, device, 2, False)
    y = gemm(x, w)
    assert_close(y[-256:], matmul64(x[-256:], w), k, "the last rows")


def test_it_is_captured_and_replayed(device: torch.device) -> None:
    from fused_tp.triton_kernels.gemm.gemm import gemm

    x, w = operand(256, 512, torch.bfloat16, device, 1, False), operand(384, 512, torch.bfloat16, device, 2, False)
    gemm(x, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gemm(x, w)
    for seed in range(5):
        x.copy_(operand(256, 512, torch.bfloat16, device, seed, False))
        y.fill_(torch.nan)
        graph.replay()
        assert_close(y, matmul64(x, w), 512, f"replay {seed}")


def test_a_size_met_first_in_a_capture_takes_the_default_config(device: torch.device) -> None:
    from fused_tp.triton_kernels.gemm.gemm import gemm

    # Kernels are compiled by then: a compilation in a capture is fine, timing one is not.
    x, w = operand(320, 512, torch.bfloat16, device, 1, False), operand(448, 512, torch.bfloat16, device, 2, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        y = gemm(x, w)
    graph.replay()
    assert_close(y, matmul64(x, w), 512, "captured first")
