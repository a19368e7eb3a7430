"""The plugin for SGLang in SGLang's own engine, on CPU ranks (`make serve`)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("sglang")
from tests.serving.engine import CONFIGS, check_cancelled_requests, kill_worker, run_on_ranks, save_model, start_engine

pytestmark = pytest.mark.serving

PROMPTS = [5 + 11 * index for index in range(20)]
ON, OFF = "fused_tp: linear layers by kernels for few rows", "fused_tp: off"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "qwen3_tied"])  # SGLang's Gemma is tied
def test_tokens_as_stock_and_as_one_process(name: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path)
    tokens = {}
    for plugin, ranks in ((False, 1), (False, 2), (True, 2)):
        options = ("--dtype", "float32")
        with start_engine(model, tmp_path, *options, name="sglang", ranks=ranks, has_plugin=plugin) as engine:
            tokens[plugin, ranks] = engine.run(PROMPTS, 64)["tokens"]
            assert (ON if plugin else OFF) in engine.log.read_text()
    assert len({token for request in tokens[False, 1] for token in request}) > 20, "the model repeats itself"
    assert tokens[True, 2] == tokens[False, 2] == tokens[False, 1]


def test_plugin_that_sglang_does_not_load(llama: Path, tmp_path: Path) -> None:
    with start_engine(llama, tmp_path, name="sglang", SGLANG_PLUGINS="other") as engine:
        engine.run([4], 2)
        assert "fused_tp:" not in engine.log.read_text()


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_worker(llama: Path, tmp_path: Path, victim: int) -> None:
    """The engine ends within seconds, and its log names the rank."""
    with start_engine(llama, tmp_path, name="sglang") as engine:
        log = kill_worker(engine, victim)
    # Whoever notices first: the peer that waits in a collective, or in SGLang's own broadcast of requests.
    assert re.search(rf"rank {victim} died|Connection (reset|closed) by peer", log)


def test_cancelled_requests(llama: Path, tmp_path: Path) -> None:
    with start_engine(llama, tmp_path, "--dtype", "float32", name="sglang") as engine:
        check_cancelled_requests(engine, PROMPTS)


def test_hooks_and_collectives() -> None:
    """Each hook gives the result of SGLang's function; collectives on three ranks that are not the world."""
    run_on_ranks("sglang_hooks.py", 4)
