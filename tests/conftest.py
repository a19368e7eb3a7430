"""Session-wide setup: one torch thread, the rank pool's end at the end of the session, and skips with their reason."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from tests import beside, native_build, session_end, tiers, workers
from tests.beside import outcome as outcome  # a fixture

torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched; rank processes inherit it


def pytest_configure(config: pytest.Config) -> None:
    session_end.start_guardian()
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU; skipped, saying so, where there is none")
    config.addinivalue_line("markers", "beside(work): runs at the same time as that of others; see tests/beside.py")
    config.addinivalue_line("markers", "gpus(count): needs that many NVIDIA GPUs")


@pytest.hookimpl(tryfirst=True)  # before items are deselected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.assign(items)
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        several = item.get_closest_marker("gpus")
        needed = several.args[0] if several else 1 if item.get_closest_marker("gpu") else 0
        if found < needed:
            reason = f"needs {needed} NVIDIA GPU{'s' if needed > 1 else ''}, this machine has {found or 'none'}"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        native_build.start_prebuilding(
            {item.module.__name__ for item in session.items if isinstance(item, pytest.Function)}
        )
        gc.freeze()  # collections need not traverse the modules again


def pytest_sessionfinish() -> None:
    beside.stop()
    workers.stop_pool()
