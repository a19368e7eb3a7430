"""The plugin for vLLM in vLLM's own engine, on CPU ranks (`make serve`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
from tests.serving.engine import CONFIGS, check_cancelled_requests, kill_worker, run_on_ranks, save_model, start_engine
from tests.serving.kills import NAMES_RANK

pytestmark = pytest.mark.serving

PROMPTS = [5 + 11 * index for index in range(20)]
GPU_LAYERS = {"FUSED_TP_TEST_GPU_LAYERS": "1", "PYTHONPATH": str(Path(__file__).with_name("vllm_stand_ins"))}
ON, OFF = "fused_tp: linear layers by packed weights", "fused_tp: off"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_as_stock_and_as_one_process(name: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path)
    tokens = {}
    for plugin, ranks in ((False, 1), (False, 2), (True, 2), (True, 1)):
        with start_engine(model, tmp_path, "--dtype", "float32", ranks=ranks, has_plugin=plugin) as engine:
            tokens[plugin, ranks] = engine.run(PROMPTS, 256)["tokens"]
            assert (ON if plugin else OFF) in engine.log.read_text()
    assert len({token for request in tokens[False, 1] for token in request}) > 20, "the model repeats itself"
    assert tokens[True, 2] == tokens[False, 2] == tokens[False, 1] == tokens[True, 1]


def test_compiled(llama: Path, tmp_path: Path) -> None:
    with start_engine(llama, tmp_path, "--dtype", "float32", has_plugin=False) as engine:
        wanted = engine.run(PROMPTS, 32)["tokens"]
    cache = tmp_path / "cache"  # both ways share it: a graph of one must not be taken for the other's
    known_files = set[Path]()
    for plugin in (True, False):
        options = ("--dtype", "float32", "--compile")
        with start_engine(llama, tmp_path, *options, has_plugin=plugin, VLLM_CACHE_ROOT=str(cache)) as engine:
            assert engine.run(PROMPTS, 32)["tokens"] == wanted
            assert (ON if plugin else OFF) in engine.log.read_text()
        files = set(cache.rglob("*.py"))
        code = "".join(path.read_text() for path in files - known_files)
        assert code
        assert all((f"torch.ops.fused_tp.{name}" in code) == plugin for name in ("packed_linear", "all_reduce"))
        known_files = files


@pytest.mark.parametrize("options", [(), ("--compile",)], ids=["eager", "compiled"])
def test_layers_for_gpus(options: tuple[str, ...], tmp_path: Path) -> None:
    """Tokens are stock's with the layers for GPUs, which run on CPU ranks in this test."""
    model = save_model("qwen3_tied", tmp_path)
    with start_engine(model, tmp_path, "--dtype", "float32", *options, has_plugin=False) as engine:
        wanted = engine.run(PROMPTS, 64)["tokens"]
    with start_engine(model, tmp_path, "--dtype", "float32", *options, **GPU_LAYERS) as engine:
        assert engine.run(PROMPTS, 64)["tokens"] == wanted
        log = engine.log.read_text()
    assert "fused_tp: row-parallel layers by matmul_all_reduce" in log
    for features in (256, 688):  # of the attention and the MLP of a rank
        assert f"(512, {features}) of torch.float32 is faster with 1, 8, 32, 128 rows" in log
    assert "is not used" not in log


def test_plugin_that_vllm_does_not_load(llama: Path, tmp_path: Path) -> None:
    with start_engine(llama, tmp_path, VLLM_PLUGINS="other") as engine:
        engine.run([4], 2)
        assert "fused_tp" not in engine.log.read_text()


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_worker(llama: Path, tmp_path: Path, victim: int) -> None:
    """The engine ends within seconds, and its log names the rank."""
    with start_engine(llama, tmp_path) as engine:
        log = kill_worker(engine, victim)
    assert re.search(NAMES_RANK.format(victim), log)


def test_cancelled_requests(llama: Path, tmp_path: Path) -> None:
    with start_engine(llama, tmp_path, "--dtype", "float32") as engine:
        check_cancelled_requests(engine, PROMPTS)


def test_subclasses_of_replaced_layers() -> None:
    """Instances of what is registered for their base class, or vLLM's LoRA would pass over them."""
    done = subprocess.run([sys.executable, "-c", SUBCLASSES], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


SUBCLASSES = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.model_executor.custom_op import maybe_get_oot_by_class
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear

registered = maybe_get_oot_by_class(ReplicatedLinear)
assert registered is not ReplicatedLinear
for layer_class in (GateLinear, ReplicatedLinear, registered):
    assert isinstance(layer_class.__new__(layer_class), registered)
assert not isinstance(ColumnParallelLinear.__new__(ColumnParallelLinear), registered)
"""


def test_collectives() -> None:
    """Each collective gives the result of vLLM's, on three ranks that are not the world."""
    run_on_ranks("vllm_collectives.py", 4)


def test_memory(llama: Path, tmp_path: Path) -> None:
    """Weights are kept in one form only: no worker takes more than stock's by 2 %."""
    memory = []
    for plugin in (False, True):
        with start_engine(llama, tmp_path, has_plugin=plugin) as engine:
            engine.run(PROMPTS, 4)
            memory.append(engine.describe_workers()["memory"])
    assert max(memory[1]) < 1.02 * max(memory[0])


def test_threads(llama: Path, tmp_path: Path) -> None:
    """One rank of two threads: the kernels run on the threads that vLLM has pinned, and create none."""
    num_threads, cores = [], ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:2])
    for plugin in (False, True):
        with start_engine(llama, tmp_path, ranks=1, has_plugin=plugin, VLLM_CPU_OMP_THREADS_BIND=cores) as engine:
            engine.run(PROMPTS, 4)
            num_threads.append(engine.describe_workers()["threads"])
    assert num_threads[1] <= num_threads[0]
