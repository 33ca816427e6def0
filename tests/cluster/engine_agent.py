"""An agent for tests that only keeps two workers: prints their pids and the fork server's.

Run: python -m tests.cluster.engine_agent ENDPOINT KEYS LOG_DIR
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from flexslurm.engine.nursery import Nursery, WorkerSpec


async def main() -> None:
    endpoint, keys, log_dir = sys.argv[1:]
    nursery = Nursery("cpu", Path(log_dir), on_exit=lambda ended: print(ended, file=sys.stderr))
    starting = asyncio.ensure_future(nursery.start())
    while nursery.server_pid is None:
        await asyncio.sleep(0.01)
    print(json.dumps({"server": nursery.server_pid}), flush=True)
    await starting
    workers = [
        await nursery.spawn(WorkerSpec(gpu, endpoint, keys, "agent-1", "127.0.0.1"))
        for gpu in range(2)
    ]
    assert "torch" not in sys.modules
    print(json.dumps({"workers": [started.pid for started in workers]}), flush=True)
    await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main())
