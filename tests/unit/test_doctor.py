"""`fused-tp doctor` and the command line around it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fused_tp.backends.cuda import cuda_driver, native_kernels
from fused_tp.cli import doctor
from fused_tp.cli.main import COMMANDS, main
from fused_tp.core.availability import AVAILABLE
from fused_tp.ops.explain import explain_hypothetical

pytestmark = pytest.mark.full


def finding(name: str) -> doctor.Finding:
    return next(one for one in doctor.examine() if one.name == name)


def test_report_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    text = capsys.readouterr().out
    for word in ("python", "torch", "native core", "FUSED_TP_TIMEOUT", "matmul_all_reduce"):
        assert word in text
    assert text.rstrip().endswith("Nothing needs fixing." if code == 0 else "marked !!.")
    assert main(["doctor", "--json"]) == code
    answer = json.loads(capsys.readouterr().out)
    assert answer["healthy"] is (code == 0)
    assert {"section", "name", "value", "status", "advice"} == set(answer["findings"][0])
    assert answer["healthy"] == all(one["status"] != doctor.PROBLEM for one in answer["findings"])


def test_two_processes_share_memory() -> None:
    core, _ = doctor.import_native_core()
    if core is None:
        pytest.skip("the native core is not built")
    assert doctor._try_shared_memory(core)
    broken = ModuleType("broken")  # a peer that fails is a problem, not a hang
    broken.__file__ = "/nowhere/_core.so"
    broken.__dict__["Group"] = core.Group
    assert "_core.so" in doctor._try_shared_memory(broken).reason
    assert all(hasattr(core.NcclLibrary, name) for name in (*doctor._NCCL_FEATURES, "version_text"))


def test_a_missing_core_comes_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fused_tp._core", None)  # import raises ImportError
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    found = finding("native core")
    assert found.status == doctor.PROBLEM
    assert "apt-get install g++" in found.advice and "pip install" in found.advice
    assert "pipelined" in finding("matmul_all_reduce, cpu").value or "plain" in finding("matmul_all_reduce, cpu").value


BAD_SETTINGS = {
    "FUSED_TP_TIMEOUT": {"soon": "positive number"},
    "FUSED_TP_SHM": {"maybe": "1 or 0"},
    "FUSED_TP_TABLE": {"/nowhere.json": "nowhere.json"},
    "FUSED_TP_TIMOUT": {"5": "misspelt"},
    "FUSED_TP_SCHEDULE": {"magic": "must be one of plain, ", "pipelined": ""},
    "FUSED_TP_NVTX": {"sometimes": "1 or 0", "off": ""},
    "FUSED_TP_CUDA": {"maybe": "1 or 0", "yes": ""},
    "FUSED_TP_REQUIRE_NATIVE": {"2": "1 or 0"},
    "FUSED_TP_CUDA_ARCHS": {
        **dict.fromkeys(("hopper", " "), "architectures such as 80;90a"),
        **dict.fromkeys(("80;sm_90A, 10.0a+PTX;", ""), ""),
    },
    "FUSED_TP_ISA": {"sse": "plain, avx2, avx512 or avx512_bf16", "avx2": ""},
    "FUSED_TP_SM_MARGIN": {" ": "number of multiprocessors", "-1": "0 or more", "": "", " 3": ""},
    "FUSED_TP_SHM_RESERVE": {"lots": "positive number", "1000000": ""},
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_settings(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for value, advice in BAD_SETTINGS[name].items():
        monkeypatch.setenv(name, value)
        found = {one.name: one for one in doctor._examine_settings()}[name]
        assert found.status == (doctor.PROBLEM if advice else doctor.OK) and advice in found.advice


def test_a_forced_schedule_is_shown_where_it_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> dict[str, str]:
        return {one.name: one.value for one in doctor._examine_schedules(None) if one.name.endswith("cpu")}

    by_table = shown()
    monkeypatch.setenv("FUSED_TP_SCHEDULE", "hierarchical")
    assert shown()["matmul_all_reduce, cpu"] == "hierarchical (1 token), hierarchical (2048 tokens)"
    monkeypatch.setenv("FUSED_TP_SCHEDULE", "fused_kernel")  # for GPUs; no fused kernel exists for a sum alone
    assert shown() == {**dict.fromkeys(by_table, "no choice"), (alone := "all_reduce_rms_norm, cpu"): by_table[alone]}
    monkeypatch.setenv("FUSED_TP_SCHEDULE", "copy_engine")
    on_gpus: dict[str, Any] = {"dtype": torch.float32, "world_size": 2, "transport": "nccl", "arch": "sm_90"}
    for op, forced in (("all_reduce", False), ("all_gather", True)):  # copy engines do not serve sums alone
        decision = explain_hypothetical(op, (4, 8), **on_gpus).forward
        assert decision is not None and (decision.schedule == "copy_engine") == forced


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            '{"arch": {"default": {"default": {"default": [{"schedule": "nonesuch"}]}}}}',
            "names schedule 'nonesuch'; it",
        ),
        pytest.param("[" * 100_000, "is not a dispatch table", id="deep"),
    ],
)
def test_a_table_that_cannot_be_followed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, table: str, said: str
) -> None:
    (tmp_path / "table.json").write_text(table)
    monkeypatch.setenv("FUSED_TP_TABLE", str(tmp_path / "table.json"))
    assert all(one.status == doctor.PROBLEM and said in one.advice for one in doctor._examine_schedules(None))


def test_the_cuda_compiler_is_the_one_that_builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert doctor._examine_cuda_compiler().value == f"none in {nvcc}, as CUDA_PATH says"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\necho Build cuda_11.8\n")
    nvcc.chmod(0o755)
    found = doctor._examine_cuda_compiler()
    assert (found.status, found.value) == (doctor.NOTE, "Build cuda_11.8") and "12.0 or later" in found.advice
    monkeypatch.delenv("CUDA_PATH")
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setattr(doctor, "TOOLKIT_NVCC", str(nvcc))
    assert doctor._examine_cuda_compiler().value == "Build cuda_11.8"


# -- machines with GPUs ------------------------------------------------------------------------------------------------


class Machine:
    """Fake answers of torch and the driver for a machine with GPUs, which tests may change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.gpus = [SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=141 << 30) for _ in range(4)]
        self.peers = {(one, other) for one in range(4) for other in range(4)}
        self.attributes = {cuda_driver.MULTICAST_SUPPORTED: 1}
        self.nccl = SimpleNamespace(version_text="2.27.3", has_revoke=False, has_shared_devices=False)
        self.core = ModuleType("core")
        self.core.__dict__["NcclLibrary"] = lambda: self.nccl
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.gpus))
        monkeypatch.setattr(torch.cuda, "get_device_properties", self.properties)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) in self.peers)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
        monkeypatch.setattr(cuda_driver, "cuda_version", lambda: (13, 0))
        monkeypatch.setattr(cuda_driver, "device_attribute", lambda attribute, device: self.attributes.get(attribute))
        version = tmp_path / "version"
        version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2026\n")
        monkeypatch.setattr(doctor, "_DRIVER_VERSION_FILE", version)
        self.library = tmp_path / "_cuda.so"
        monkeypatch.setattr(native_kernels, "KERNEL_LIBRARY", self.library)
        monkeypatch.setattr(native_kernels, "read_kernel_targets", lambda path=self.library: self.built)
        self.built: native_kernels.KernelTargets | None = None

    def properties(self, device: int) -> SimpleNamespace:
        return self.gpus[device]

    def findings(self, core: bool = True) -> dict[str, doctor.Finding]:
        return {one.name: one for one in doctor.examine_gpu(self.core if core else None)}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_gpus_that_all_reach_each_other(machine: Machine) -> None:
    found = machine.findings()
    assert found["NVIDIA driver"].value == "580.95.05, for CUDA up to 13.0"
    assert found["CUDA of torch"].value == "13.0"
    assert found["cuda:3"].value == "NVIDIA H200, sm_90, 141 GiB, multicast"
    assert found["peer access"].value == "all 4 GPUs reach each other"
    assert found["NCCL"].value == (
        "2.27.3; a later one adds communicators that can be stopped, several ranks on one GPU"
    )
    assert found["device kernels"].value.startswith(
        "none: the device kernels were not built when fused_tp was installed"
    )
    assert all(one.status != doctor.PROBLEM for one in found.values())


def test_gpus_in_pairs(machine: Machine) -> None:
    machine.peers = {(0, 1), (1, 0), (0, 2), (2, 0)}
    machine.attributes = {}
    found = machine.findings()
    assert found["cuda:0"].value == "NVIDIA H200, sm_90, 141 GiB"
    assert found["cuda:0 reaches"].value == "cuda:1, cuda:2"
    assert found["cuda:3 reaches"].value == "no other"
    assert found["cuda:0 reaches"].status == doctor.OK and found["cuda:3 reaches"].status == doctor.NOTE
    machine.gpus = machine.gpus[:1]
    assert not [name for name in machine.findings() if "reaches" in name or "peer" in name]


def test_a_gpu_that_does_not_answer(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: int) -> SimpleNamespace:
        if device == 1:
            raise RuntimeError("CUDA error: unspecified launch failure\nmore of it")
        return machine.gpus[device]

    monkeypatch.setattr(torch.cuda, "get_device_properties", fails)
    found = machine.findings()
    assert found["cuda:1"].status == doctor.PROBLEM
    assert found["cuda:1"].value == "unusable: CUDA error: unspecified launch failure"
    assert "cuda:2" in found


def test_a_driver_that_does_not_serve_this_torch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    found = machine.findings()
    assert found["CUDA of torch"].status == doctor.NOTE and "install a torch with CUDA" in found["CUDA of torch"].advice
    assert found["CUDA devices"].status == doctor.NOTE and "NCCL" not in found
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda_driver, "cuda_version", lambda: (12, 4))
    too_old = machine.findings()["CUDA of torch"]
    assert too_old.status == doctor.PROBLEM and "13.0, which this driver does not support" in too_old.value


def test_nccl_as_it_is(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in doctor._NCCL_FEATURES:
        setattr(machine.nccl, name, True)
    assert machine.findings()["NCCL"].value.endswith("several ranks on one GPU")
    assert machine.findings(core=False)["NCCL"].value == "2.27.3; schedule nccl_pipeline needs the native core"

    def too_old() -> None:
        raise RuntimeError("NCCL 2.18.1 is too old.")

    machine.core.__dict__["NcclLibrary"] = too_old
    assert "not for schedule nccl_pipeline: NCCL 2.18.1 is too old." in machine.findings()["NCCL"].value
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert machine.findings()["NCCL"].status == doctor.PROBLEM


def test_device_kernels(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.library.touch()
    machine.built = native_kernels.KernelTargets(("sm_80",), (13, 0, 88))
    found = machine.findings()["device kernels"]
    assert found.status == doctor.PROBLEM and found.value == "built for sm_80 by CUDA 13.0, but not usable"
    assert found.advice.startswith("The device kernels were built for sm_80, and this GPU is sm_90; reinstall")
    machine.built = native_kernels.KernelTargets(("sm_90a", "compute_90"), (13, 0, 88))
    with monkeypatch.context() as without_gpu:
        without_gpu.setattr(torch.cuda, "is_available", lambda: False)
        found = machine.findings()["device kernels"]
        assert found.status == doctor.NOTE
        assert found.value.startswith("built for sm_90a, compute_90 by CUDA 13.0; torch finds no GPU")
    monkeypatch.setattr(native_kernels, "native_kernels_available", lambda arch: AVAILABLE)
    found = machine.findings()["device kernels"]
    assert (found.status, found.value) == (doctor.OK, "built for sm_90a, compute_90 by CUDA 13.0")


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], *([command, "--help"] for command in COMMANDS)])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(command in text for command in (COMMANDS if len(arguments) == 1 else (f"fused-tp {arguments[0]}",)))


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "doctor" in capsys.readouterr().out


def test_a_missing_library_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def needs_rich(arguments: object) -> int:
        raise ModuleNotFoundError("No module named 'rich'", name="rich")

    monkeypatch.setattr(doctor, "main", needs_rich)
    assert main(["doctor"]) == 2
    assert "pip install 'fused-tp[train]'" in capsys.readouterr().err
