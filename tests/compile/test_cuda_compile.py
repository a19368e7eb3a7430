"""csrc/cuda compiles for sm_80, sm_90a and sm_100a as setup.py builds it; needs nvcc, but no GPU.

No function spills, no compiler warns, and the library exports one symbol. It is built in the same folder as an
installation from this tree, so that sources are compiled only once. `python -m tests.compile.resources` writes the
checked values to a table.
"""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from tests.compile.resources import CudaMeasured, Resources, measure_cuda, parse, short, table
from tests.native_build import native_build

pytestmark = pytest.mark.full

native = native_build()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> CudaMeasured:
    try:
        native.find_nvcc()
        native.find_compiler()
    except native.NotBuiltError as error:
        pytest.skip(str(error))
    return measure_cuda(tmp_path_factory.mktemp("cuda") / "_cuda.so")


def test_every_source_compiles_for_every_architecture(measured: CudaMeasured) -> None:
    known = {f"sm_{arch.name}" for arch in native.CudaBuild().archs}
    by_arch = {arch: {one.name for one in measured.resources if one.arch == arch} for arch in known}
    assert {one.arch for one in measured.resources} == known
    if int(measured.toolkit.split(".")[0]) >= 13:
        assert known == {"sm_80", "sm_90a", "sm_100a"}
    every = set().union(*by_arch.values())
    sources = {one.kernel for one in measured.resources}
    launching = {path.stem for path in native.CSRC.glob("cuda/*.cu") if "<<<" in path.read_text()}
    assert launching <= sources
    for arch, kernels in by_arch.items():
        assert kernels == every, f"{arch} lacks {sorted(every - kernels)}"


def test_nothing_spills(measured: CudaMeasured) -> None:
    complaints = [one.complaint for one in measured.resources if one.complaint]
    assert not complaints, "\n".join(complaints)


def test_no_compiler_warns(measured: CudaMeasured) -> None:
    assert not measured.warnings, "\n".join(measured.warnings)


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm (binutils)")
def test_the_library_shows_one_symbol_and_says_what_it_is_for(measured: CudaMeasured) -> None:
    command = ["nm", "-D", "--defined-only", str(measured.library)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["fused_tp_launchers"]
    needed = subprocess.run(["readelf", "-d", str(measured.library)], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"NEEDED.*(cudart|libcuda|libtorch|libnccl)", needed), "CUDA's runtime belongs inside"


def test_it_can_be_loaded_without_a_driver(measured: CudaMeasured) -> None:
    core = pytest.importorskip("fused_tp._core")
    from fused_tp.backends.cuda.native_kernels import read_kernel_targets

    kernels = core.DeviceKernels(str(measured.library))
    built = read_kernel_targets(measured.library)
    assert built is not None and built.runs_on(90) and built.toolkit == tuple(map(int, measured.toolkit.split(".")))
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"^barrier could not be launched: .+ \(CUDA error \d+\)\.$"):
            kernels.barrier(core.DeviceWorkspace(0, 0, 0, 0, 0, 0, 0, 1), 0)


# -- without nvcc ------------------------------------------------------------------------------------------------------

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel' for 'sm_80'
ptxas info    : Function properties for kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers, 4096 bytes smem, 372 bytes cmem[0]
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
ptxas info    : Function properties for kernel
    64 bytes stack frame, 76 bytes spill stores, 120 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
"""


def test_what_ptxas_says_is_read() -> None:
    clean, spilling = parse("sum", LOG)
    assert clean == Resources("sum", "kernel", "sm_80", 10, 4096, 0) and not clean.complaint
    assert spilling == Resources("sum", "kernel", "sm_90a", 255, 0, 196)
    assert spilling.complaint == "sum kernel on sm_90a spills 196 bytes a thread"
    written = table("kernels", "nvcc 13.0.88", [clean, spilling])
    assert "| `kernel` | 10 | 4.0 | 0 |" in written and "| `kernel` | 255 | 0 | 196 |" in written
    assert "1 of 2 spill" in written


def test_names_are_short() -> None:
    assert short("void fused_tp::cuda::k<fused_tp::cuda::F32, (fused_tp::Way)1, 8>(fused_tp::A, int)") == "k<F32, 1, 8>"
    assert short("fused_tp::cuda::barrier_kernel(fused_tp::cuda::Workspace)") == "barrier_kernel"
