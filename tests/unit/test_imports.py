"""Direction of imports, and the libraries that `import fused_tp` may load."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys

import pytest

from fused_tp.core import settings
from tests.workers import REPOSITORY

PACKAGE = REPOSITORY / "fused_tp"
BELOW_CLI = [file for file in sorted(PACKAGE.glob("*/**/*.py")) if file.relative_to(PACKAGE).parts[0] != "cli"]
VARIABLE = re.compile(r"\bFUSED_TP_[A-Z0-9_]+\b")

# Imports every module of the package without the optional libraries; neither torch.distributed nor CUDA may start.
IMPORT_ALL = """
import importlib, pkgutil, sys
import torch, torch.distributed as dist, torch.distributed.fsdp  # torch itself looks for some of them

class Missing:
    names = {*"transformers triton matplotlib rich psutil deepspeed megatron peft yaml pytest".split()}
    names |= {*"lightning torchtitan spmd_types vllm".split()}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"import fused_tp must not need {name}", name=name)

sys.meta_path.insert(0, Missing())
import fused_tp
for module in pkgutil.walk_packages(fused_tp.__path__, "fused_tp."):
    # Imported where their library has been, whose classes theirs are made from, or by it.
    libraries = ("integrations.torchtitan", "integrations.megatron", "integrations.vllm_")
    libraries += ("integrations.transformers_serve", "parallelizing.peft", "selftest.")
    of_a_library = module.name.startswith(tuple(f"fused_tp.{name}" for name in libraries))
    if not of_a_library and module.name.split(".")[1] not in ("triton_kernels", "_core", "_cuda", "__main__"):
        importlib.import_module(module.name)
assert not dist.is_initialized() and not torch.cuda.is_initialized()
assert not Missing.names & set(sys.modules), Missing.names & set(sys.modules)
"""


# One op loads what it needs itself; schedules and transports come with the first call over several ranks.
IMPORT_ONE = """
import pickle, sys
import fused_tp
own = lambda: [name for name in sys.modules if name.split(".")[0] == "fused_tp"]
assert len(own()) <= 6, own()
assert set(fused_tp.__all__) <= set(dir(fused_tp)) and "matmul_all_reduce" not in vars(fused_tp)
from fused_tp import matmul_all_reduce
import torch
assert matmul_all_reduce(torch.ones(2, 3), torch.ones(4, 3), group=None).shape == (2, 4)
assert len(own()) <= 26, own()
assert vars(fused_tp)["matmul_all_reduce"] is pickle.loads(pickle.dumps(matmul_all_reduce)) is matmul_all_reduce
assert torch.ops.fused_tp.matmul_all_reduce.default
try:
    fused_tp.no_such_name
except AttributeError as error:
    assert "no_such_name" in str(error)
for name in fused_tp.__all__:
    if name not in ("FusedColwiseParallel", "FusedRowwiseParallel", "FusedSequenceParallel", "parallelize"):
        getattr(fused_tp, name)
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(importlib.util.find_spec("importlinter") is None, reason="needs import-linter (the extra `dev`)")
def test_imports_point_downwards_and_kernels_stand_alone() -> None:
    done = run(sys.executable, "-c", "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())")
    assert done.returncode == 0, done.stdout + done.stderr


def test_modules_take_only_the_core_from_the_top_level() -> None:
    """The top level imports all layers, so that importing a name from it would be an import upwards."""
    for file in BELOW_CLI:
        for node in ast.walk(ast.parse(file.read_text())):
            where = f"{file.relative_to(REPOSITORY)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ImportFrom) and node.module == "fused_tp":
                submodules = {path.stem for path in PACKAGE.iterdir()} | {"_core"}
                names = {alias.name for alias in node.names}
                assert names <= submodules, f"{where} takes {sorted(names - submodules)} from the top level"
            if isinstance(node, ast.Import):
                assert "fused_tp" not in {alias.name for alias in node.names}, f"{where} imports the top level"


def test_names_that_torch_has_changed_stand_in_one_place() -> None:
    """A benchmark once used only the new names, which torch 2.11 lacks."""
    changed = re.compile(r"dist\.(all_gather_(single|into_tensor)|reduce_scatter_(single|tensor))\b")
    files = [file for folder in ("fused_tp", "benchmarks", "examples") for file in (REPOSITORY / folder).rglob("*.py")]
    assert {file.name for file in files if changed.search(file.read_text())} == {"pending.py"}


def test_import_needs_no_optional_library_and_starts_nothing() -> None:
    done = run(sys.executable, "-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr


def test_an_op_imports_what_it_needs() -> None:
    done = run(sys.executable, "-c", IMPORT_ONE)
    assert done.returncode == 0, done.stderr


# Imports the tables of the documentation with the libraries that the extra `docs` installs.
IMPORT_TABLES = """
import sys
import torch._dynamo  # looks for some of them

class Missing:
    names = {*"pytest hypothesis transformers matplotlib rich psutil deepspeed megatron peft".split()}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"`make docs` must not need {name}", name=name)

sys.meta_path.insert(0, Missing())
sys.path[:0] = ["docs", "."]
import tables
assert tables.all_tables()
"""


def test_lint_needs_no_library_of_the_tests() -> None:
    """`make lint` runs in an environment of its own: a library of another extra has to be named in mypy's overrides."""
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    config = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["mypy"]
    paths = [REPOSITORY / path for path in config["files"]]
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    imported: set[str] = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported.add(node.module or "")
    overridden = {name.partition(".")[0] for override in config["overrides"] for name in override["module"]}
    # What the package and the extra `dev` install (rich with import-linter), and folders of the repository.
    installed = {"torch", "numpy", "pytest", "rich", "typing_extensions", "tests", "examples", "native_build"}
    missing = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names - overridden - installed
    assert not missing, f"mypy cannot find {sorted(missing)}: add them to its overrides in pyproject.toml"


def test_documentation_needs_no_library_of_the_tests() -> None:
    done = run(sys.executable, "-c", IMPORT_TABLES)
    assert done.returncode == 0, done.stderr


def variables_in_code() -> set[str]:
    files = [*PACKAGE.rglob("*.py"), REPOSITORY / "setup.py"]
    names = set().union(*(VARIABLE.findall(file.read_text()) for file in files))
    getenv = re.compile(r'getenv\("(FUSED_TP_\w+)"\)')
    for file in (REPOSITORY / "csrc").rglob("*.cpp"):
        names |= set(getenv.findall(file.read_text()))
    return names - {"FUSED_TP_X86"}  # a macro of the build


def test_every_variable_is_declared() -> None:
    assert variables_in_code() == {setting.name for setting in settings.SETTINGS}
