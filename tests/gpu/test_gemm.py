"""The matmul kernel, compiled and run, against fp64: dtypes, layouts, epilogues, odd sizes, every shipped config."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from benchmarks.gpu_ranks import normal
from tests.reference import assert_within_dtype_error, matmul64

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
SHAPES = ((256, 512, 384), (1, 8, 8), (1, 4096, 512), (17, 100, 72), (129, 257, 131), (1000, 40, 33), (512, 130, 1024))
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


def dtypes() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16, torch.float32, FP8]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def nothing_of_the_last_test() -> Iterator[None]:
    """Errors of the device show in the test that made them."""
    yield
    torch.cuda.synchronize()


def needs_fp8(dtype: torch.dtype) -> None:
    if dtype == FP8 and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("fp8 needs sm_90 or later")


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


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("x_swapped", [False, True])
@pytest.mark.parametrize("w_swapped", [False, True])
@pytest.mark.usefixtures("default_config")
def test_layouts_and_odd_sizes(dtype: torch.dtype, x_swapped: bool, w_swapped: bool, device: torch.device) -> None:
    from fused_tp.triton_kernels.gemm.gemm import gemm

    needs_fp8(dtype)
    for m, n, k in SHAPES:
        x, w = operand(m, k, dtype, device, 1, x_swapped), operand(n, k, dtype, device, 2, w_swapped)
        for precision in ("ieee", "tf32") if dtype == torch.float32 else ("ieee",):
            name = f"{m}x{n}x{k} swapped {x_swapped} {w_swapped} {precision}"
            out = torch.full((m, n), torch.nan, dtype=torch.bfloat16 if dtype == FP8 else dtype, device=device)
            y = gemm(x, w, precision=precision, out=out)
            assert_close(y, matmul64(x, w), k, name, precision == "tf32")


@pytest.mark.parametrize(
    ("dtype", "activation"),
    [*((torch.bfloat16, name) for name in ACTIVATIONS), *((dtype, "gelu") for dtype in dtypes()[1:])],
    ids=str,
)
@pytest.mark.usefixtures("default_config")
def test_epilogues(dtype: torch.dtype, activation: str, device: torch.device) -> None:
    from fused_tp.triton_kernels.gemm.gemm import gemm

    needs_fp8(dtype)
    function = ACTIVATIONS[activation]
    for m, n, k in ((100, 152, 80), (33, 77, 45))[: 2 if dtype == torch.bfloat16 else 1]:
        x, w, g = (operand(rows, k, dtype, device, seed, False) for seed, rows in enumerate((m, n, n)))
        bias, gate_bias = (normal(n, dtype=torch.float32, device=device, seed=seed) for seed in (4, 5))
        value, gate = matmul64(x, w, bias), matmul64(x, g, gate_bias)
        assert_close(gemm(x, w, bias, activation=activation), function(value), k, f"{m}x{n}x{k}")
        y = gemm(x, w, bias, gate_weight=g, gate_bias=gate_bias, activation=activation)
        assert_close(y, function(gate) * value, k, f"gated {m}x{n}x{k}")


@pytest.mark.parametrize("by_row", [False, True], ids=["tensor", "row"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("default_config")
def test_scaled_fp8(by_row: bool, out_dtype: torch.dtype, device: torch.device) -> None:
    from fused_tp.triton_kernels.gemm.gemm import gemm

    needs_fp8(FP8)
    for m, n, k in ((256, 384, 512), (100, 152, 80), (33, 77, 45)):
        x, w = operand(m, k, FP8, device, 1, False), operand(n, k, FP8, device, 2, False)
        sizes = ((m,), (n,)) if by_row else ((), ())
        x_scale, w_scale = (
            normal(*size, dtype=torch.float32, device=device, seed=seed).abs() * 0.1 + 0.01
            for seed, size in enumerate(sizes, 4)
        )
        wanted = matmul64(x.double() * x_scale.double().reshape(-1, 1), w.double() * w_scale.double().reshape(-1, 1))
        y = gemm(x, w, x_scale=x_scale, weight_scale=w_scale, out_dtype=out_dtype)
        # sm_90 adds fp8 products with 13 bits of fraction before they reach fp32.
        error = float((y.double() - wanted).norm() / wanted.norm())
        assert error < 4e-3, f"{m}x{n}x{k}: {error:.3g}"


def shipped() -> list[tuple[str, bool, bool]]:
    return [
        (kind, tma, gated)
        for kind in ("bf16", "fp8e4nv", "tf32", "ieee")
        for tma in (True, False)
        for gated in (False, True)
    ]


@pytest.mark.parametrize(("kind", "tma", "gated"), shipped())
def test_every_shipped_config(
    kind: str, tma: bool, gated: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each config of this architecture by itself; normally the fastest of them is taken."""
    from fused_tp.triton_kernels.gemm import gemm as module
    from fused_tp.triton_kernels.gemm.configs import gemm_configs
    from fused_tp.triton_kernels.gemm.operands import arch_of

    configs = gemm_configs(arch_of(device), kind, tma=tma, gated=gated)
    if not configs:
        pytest.skip(f"no {kind} configs by {'TMA' if tma else 'pointers'} on this architecture")
    dtype = {"bf16": torch.bfloat16, "fp8e4nv": FP8}.get(kind, torch.float32)
    precision = kind if dtype == torch.float32 else "ieee"
    # K that is no multiple of 16 bytes keeps TMA away.
    m, n, k = (520, 776, 1040) if tma else (520, 776, 1037)
    x, w, g = (operand(rows, k, dtype, device, seed, False) for seed, rows in enumerate((m, n, n)))
    assert module.plan_gemm(x, w, precision=precision).tma == tma
    wanted = matmul64(x, w)
    if gated:
        wanted = torch.nn.functional.silu(matmul64(x, g)) * wanted
    for config in configs:
        monkeypatch.setattr(module, "gemm_configs", lambda *args, config=config, **kinds: (config,))
        keywords = {"gate_weight": g, "activation": "silu"} if gated else {}
        y = module.gemm(x, w, precision=precision, **keywords)
        error = float((y.double() - wanted).norm() / wanted.norm())
        assert error < {torch.float32: 2e-3 if kind == "tf32" else 1e-5}.get(dtype, 5e-3), f"{config}: {error:.3g}"


@pytest.mark.usefixtures("default_config")
def test_order_of_tiles_and_share_of_sms_change_no_bit(device: torch.device) -> None:
    from fused_tp.triton_kernels.gemm.gemm import gemm

    x, w = operand(777, 512, torch.bfloat16, device, 1, False), operand(1032, 512, torch.bfloat16, device, 2, False)
    y = gemm(x, w)
    for start in (1, 13, 10_000):
        for num_sms in (1, 7, 66):
            assert torch.equal(gemm(x, w, start=start, num_sms=num_sms), y)


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
