"""Native build of setup.py: choice of GPU architectures, search for nvcc, and incremental rebuilds."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from fused_tp.core import settings
from tests.native_build import native_build

pytestmark = pytest.mark.full

native = native_build()


def test_architectures_from_the_environment() -> None:
    for text, archs in {
        "90a": "90a",
        "90A": "90a",
        "9.0": "90",
        "80;sm_100a+PTX": "80 100a",
        "80;90a;90a;": "80 90a",
        "80, 86 89": "80 86 89",
    }.items():
        flags = [flag for arch in native.parse_archs(text) for flag in arch.flags[1::2]]
        wanted = [f"arch=compute_{arch},code=sm_{arch}" for arch in archs.split()]
        assert flags == wanted + ["arch=compute_100,code=compute_100"] * ("PTX" in text), text
    for text in ("hopper", "8", "80;;x", "90b", " ", ";"):
        with pytest.raises(native.SettingError, match=r"FUSED_TP_CUDA_ARCHS is .* set it to architectures like 80;90a"):
            native.CudaBuild(text)


def test_switches_and_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Switches accept the same words as all other settings."""
    for text, on in (("true", True), (" ON ", True), ("no", False), ("0", False), ("", None)):
        monkeypatch.setenv("FUSED_TP_CUDA", text)
        assert native.parse_switch("FUSED_TP_CUDA") is on
        if on is not None:
            assert settings.cuda() is on
    monkeypatch.setenv("FUSED_TP_CUDA", "maybe")
    with pytest.raises(native.SettingError, match="FUSED_TP_CUDA is 'maybe'; set it to 1 or 0"):
        native.parse_switch("FUSED_TP_CUDA")
    for text in ("0", "-2", "many", "1.5"):
        monkeypatch.setenv("MAX_JOBS", text)
        with pytest.raises(native.SettingError, match=f"MAX_JOBS is '{text}'; set it to the number of files"):
            native.run_steps([], tmp_path)


def fake_nvcc(folder: Path, *known: str, release: str = "12.4") -> Path:
    """Write a fake nvcc that accepts these architectures and compiles nothing; return its path."""
    path = folder / "cuda" / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    tests = " ".join(f"*=sm_{arch}|*=compute_{arch}) ;;" for arch in known)
    path.write_text(f"""#!/bin/sh
[ "$1" = --version ] && {{ echo 'Cuda compilation tools, release {release}, V{release}.131'; exit; }}
for word; do case "$word" in {tests} arch=*) exit 1;; esac; done
""")
    path.chmod(0o755)
    return path


@pytest.fixture
def no_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(native, "DEFAULT_TOOLKIT", str(tmp_path / "nowhere"))
    which = shutil.which
    monkeypatch.setattr(native.shutil, "which", lambda name: None if name == "nvcc" else which(name))


@pytest.mark.parametrize(
    ("variables", "release", "said"),
    [
        ({}, "", r"no nvcc was found .looked in CUDA_HOME, CUDA_PATH, PATH and"),
        (
            {"CUDA_HOME": "/nowhere", "CUDA_PATH": "HERE"},
            "12.4",
            "no nvcc that runs was found in /nowhere/bin: CUDA_HOM",
        ),
        ({"CUDA_HOME": "HERE"}, "11.8", r"nvcc 11\.8\.131 .* is too old"),
        ({"CUDA_HOME": "HERE"}, "12.4", ""),
        ({"CUDA_PATH": "HERE"}, "12.4", ""),
    ],
)
def test_toolkits(
    no_toolkit: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, str],
    release: str,
    said: str,
) -> None:
    nvcc = fake_nvcc(tmp_path, "80", release=release) if release else None
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("HERE", str(tmp_path / "cuda")))
    if said:
        with pytest.raises(native.NotBuiltError, match=said) as error:
            native.find_nvcc()
        assert error.value.missing_software.startswith("the CUDA toolkit (12.0 or later")
        return
    assert native.find_nvcc() == nvcc and native.nvcc_version(nvcc) == "12.4.131"
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(native.NotBuiltError) as error:
        native.CudaBuild()
    assert "apt-get install g++" in error.value.missing_software and "CUDA" not in error.value.missing_software


def test_default_architectures_are_those_that_nvcc_knows(
    no_toolkit: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_nvcc(tmp_path, "80", "90", "90a")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    build = native.CudaBuild()
    assert build.built_for == "sm_80 sm_90a compute_90, nvcc 12.4.131"
    assert (
        "nvcc 12.4.131 does not support sm_100a, so the device kernels are built without it." in capsys.readouterr().out
    )
    with pytest.raises(native.NotBuiltError, match=r"nvcc 12.4.131 .* does not support sm_100a"):
        native.CudaBuild("90a;100a")


def test_gpus_are_found_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def cuInit(self, flags: int) -> int:
            return 0 if devices else 100  # CUDA_ERROR_NO_DEVICE

        def cuDeviceGetCount(self, count: Any) -> int:
            count._obj.value = len(devices)
            return 0

        def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
            value._obj.value = devices[device][{75: 0, 76: 1}[attribute]]
            return 0

    monkeypatch.setattr(native.ctypes, "CDLL", lambda name: Driver())
    for devices, archs in (([], ""), ([(8, 0)], "80"), ([(9, 0)] * 8, "90a"), ([(12, 0), (8, 6)], "86;120a")):  # noqa: B007
        assert native.visible_archs() == archs

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(native.ctypes, "CDLL", missing)
    assert native.visible_archs() == ""


def test_how_many_compile_at_once_is_no_part_of_what_is_built(
    no_toolkit: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_nvcc(tmp_path, "80", "90", "90a")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(native, "replace_atomically", lambda source, destination: None)
    ran = []
    monkeypatch.setattr(native, "run_steps", lambda steps, folder, environment: ran.append((steps, environment)))
    for threads in (1, 2):
        native.CudaBuild().run(tmp_path / "_cuda.so", tmp_path, threads)
    assert ran[0][0] == ran[1][0]
    assert [environment["NVCC_PREPEND_FLAGS"].split()[:2] for _, environment in ran] == [["--threads", n] for n in "12"]


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two sources and a header in csrc."""
    if shutil.which("c++") is None or native.find_ninja() is None:
        pytest.skip("needs a C++ compiler and ninja")
    csrc = tmp_path / "a tree" / "csrc"
    csrc.mkdir(parents=True)
    monkeypatch.setattr(native, "CSRC", csrc)
    (csrc / "number.h").write_text("#define NUMBER 1\n")
    (csrc / "one.cpp").write_text('#include "number.h"\nint one() { return NUMBER; }\n')
    (csrc / "two.cpp").write_text("int two() { return 2; }\n")
    return csrc


def built(csrc: Path, *flags: str) -> dict[str, int]:
    """Build; return the time of last modification of each file."""
    folder = csrc.parent / "build"
    steps = [
        native.compile_step(f"{name}.o", f"../csrc/{name}.cpp", ["c++", *flags], f"{name}.o.log")
        for name in ("one", "two")
    ]
    objects = [step.output for step in steps]
    link = native.Step("both.so", objects, ["c++", "-shared", *objects, "-o", "both.so"])
    native.run_steps([*steps, link], folder)
    return {name: (folder / name).stat().st_mtime_ns for name in ("one.o", "two.o", "both.so")}


def changed(before: dict[str, int], after: dict[str, int]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def later(file: Path, text: str) -> None:
    """Write the file with a later time of modification than anything built from it, whatever the clock's resolution."""
    file.write_text(text)
    moment = time.time() + 2
    os.utime(file, (moment, moment))


def test_only_what_has_changed_is_built(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = built(project, "-fPIC")
    assert not changed(first, built(project, "-fPIC"))
    copy = project.parents[1] / "copy"
    shutil.copytree(project.parent, copy)
    with monkeypatch.context() as patch:
        patch.setattr(native, "CSRC", copy / "csrc")
        assert not changed(first, built(copy / "csrc", "-fPIC")), "a copy of a built tree is built"
    with_flag = built(project, "-fPIC", "-DEXTRA")
    assert changed(first, with_flag) == {"one.o", "two.o", "both.so"}, "a flag is part of what is built"
    later(project / "two.cpp", "int two() { return 3; }\n")
    source = built(project, "-fPIC", "-DEXTRA")
    assert changed(with_flag, source) == {"two.o", "both.so"}
    later(project / "number.h", "#define NUMBER 2\n")
    header = built(project, "-fPIC", "-DEXTRA")
    assert changed(source, header) >= {"one.o", "both.so"}, "a header is part of what is built"


def test_what_a_compiler_says_is_logged_and_shown_if_it_fails(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later(project / "two.cpp", '#warning "mind this"\nint two() { return 3; }\n')
    built(project, "-fPIC")
    assert "mind this" in (project.parent / "build" / "two.o.log").read_text()
    assert "mind this" not in capsys.readouterr().out
    later(project / "two.cpp", "this is not C++\n")
    with pytest.raises(native.NotBuiltError, match=r"two\.cpp"):
        built(project, "-fPIC")
