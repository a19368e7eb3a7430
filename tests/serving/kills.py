"""Kill a rank of a working vLLM again and again: python -m tests.serving.kills --count 200.

Requests are in flight, and some of them are cancelled. Each engine must end within a limit, and its log must name the
rank. Prints the failures and ends with 1 if there are any.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from tests.serving.engine import kill_worker, save_model, start_engine

SIGNALS = (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGTERM)
# Logged by the peer that waits for the rank, or by vLLM's monitor of its processes.
NAMES_RANK = r"rank {0} (died|has left)|VllmWorker-{0} died"


def main() -> int:
    """Kill as many ranks as asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=90.0, help="limit; an idle rank answers SIGTERM after 15")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_model("llama", folder)
        for number in range(1, arguments.count + 1):
            rank, sent = random.randrange(arguments.ranks), random.choice(SIGNALS)
            try:
                with start_engine(model, folder, ranks=arguments.ranks) as engine:
                    log = kill_worker(engine, rank, sent, random.choice((8, 2000)), arguments.seconds)
                outcome = "named" if re.search(NAMES_RANK.format(rank), log) else "did not name the rank"
            except subprocess.TimeoutExpired:
                outcome = "did not end"
            outcomes[outcome] += 1
            if outcome != "named":
                print(f"{number}: {sent.name} to rank {rank}: {outcome}\n{engine.log.read_text()[-4000:]}", flush=True)
            if number % 10 == 0:
                print(f"{number} kills: {dict(outcomes)}", flush=True)
    return int(set(outcomes) != {"named"})


if __name__ == "__main__":
    raise SystemExit(main())
