"""Run the slow work of several tests of a file concurrently: ranks that wait for a deadline, or for a peer's death.

    @beside(lambda schedule: fresh_ranks(2, stay_away, env={"FUSED_TP_SCHEDULE": schedule}))
    @pytest.mark.parametrize("schedule", ["plain", "pipelined"])
    def test_a_rank_that_does_not_come(outcome: Any, schedule: str) -> None:
        assert outcome ...

The first such test to run starts the work of all selected ones in its file; each then takes its own `outcome`, or
raises the error of its work. Only for work that mostly sleeps and starts its own processes: a thread runs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

AT_ONCE = 3  # each about three processes; more would delay the prompt reactions to a rank's end that tests time

_pool = ThreadPoolExecutor(AT_ONCE)
_started: dict[str, Future[Any]] = {}


def beside(work: Callable[..., Any]) -> pytest.MarkDecorator:
    """Mark a test whose `outcome` is the result of `work`, called with the test parameters that `work` names."""
    return pytest.mark.beside.with_args(work)


@pytest.fixture
def outcome(request: pytest.FixtureRequest) -> Any:
    """Result of this test's work; see `tests.beside`."""
    node = request.node
    if node.nodeid not in _started:
        for item in request.session.items:
            if item.path == node.path and item.nodeid not in _started and item.get_closest_marker("beside"):
                _started[item.nodeid] = _pool.submit(_call, item)
    return _started[node.nodeid].result()


def stop() -> None:
    """Cancel work that has not begun, at the end of the session; running work is bounded by its own deadlines."""
    _pool.shutdown(cancel_futures=True)


def _call(item: pytest.Item) -> Any:
    marker = item.get_closest_marker("beside")
    assert marker is not None
    (work,) = marker.args
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return work(**{name: params[name] for name in inspect.signature(work).parameters})
