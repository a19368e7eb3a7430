"""Slow work of several tests of a file at the same time: ranks that wait for a deadline, or for one another's death.

    @beside(lambda schedule: fresh_ranks(2, stay_away, env={"FUSED_TP_SCHEDULE": schedule}))
    @pytest.mark.parametrize("schedule", ["plain", "pipelined"])
    def test_a_rank_that_does_not_come(outcome: Any, schedule: str) -> None:
        assert outcome ...

The first of them that is run starts the work of all those of its file that have been selected; each then gets its own
`outcome`, or its error. Only for what mostly sleeps, and has processes of its own: a thread of the tests runs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

AT_ONCE = 3  # of about three processes each, of which some moments after an end must be prompt

_pool = ThreadPoolExecutor(AT_ONCE)
_started: dict[str, Future[Any]] = {}


def beside(work: Callable[..., Any]) -> pytest.MarkDecorator:
    """Marks a test whose `outcome` is what `work` returns; it is given the test's parameters that it names."""
    return pytest.mark.beside.with_args(work)


@pytest.fixture
def outcome(request: pytest.FixtureRequest) -> Any:
    """What the work of this test has returned; see `tests.beside`."""
    node = request.node
    if node.nodeid not in _started:
        for item in request.session.items:
            if item.path == node.path and item.nodeid not in _started and item.get_closest_marker("beside"):
                _started[item.nodeid] = _pool.submit(_call, item)
    return _started[node.nodeid].result()


def stop() -> None:
    """At the end of the session: what has not begun does not begin, and what has is bounded by its own deadlines."""
    _pool.shutdown(cancel_futures=True)


def _call(item: pytest.Item) -> Any:
    marker = item.get_closest_marker("beside")
    assert marker is not None
    (work,) = marker.args
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return work(**{name: params[name] for name in inspect.signature(work).parameters})
