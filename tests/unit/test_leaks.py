"""The leak check finds what it is for: a check that cannot fail would be worth nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from multiprocessing import shared_memory

import leaks
import pytest

TOKEN = os.environ[leaks.TOKEN_VARIABLE]


def test_quiet_when_nothing_is_left() -> None:
    before = leaks.take(TOKEN)
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    assert leaks.left_since(before, TOKEN) == []


def test_finds_a_process_even_when_it_left_our_tree() -> None:
    before = leaks.take(TOKEN)
    program = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    os.close(0); os.close(1)\n"
        "    time.sleep(60)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    found = leaks.left_since(before, TOKEN, within_s=0.2)
    found = [line for line in found if "shared memory" not in line]  # it is the whole machine's
    assert len(found) == 1 and found[0].startswith("process "), found
    pid = int(found[0].split()[1].rstrip(":"))
    os.kill(pid, 9)
    assert leaks.left_since(before, TOKEN) == []


def test_finds_threads_and_descriptors_and_shared_memory() -> None:
    before = leaks.take(TOKEN)
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, args=(60,), name="left-over")
    thread.start()
    read, write = os.pipe()
    memory = shared_memory.SharedMemory(create=True, size=64)
    found = leaks.left_since(before, TOKEN, within_s=0.1)
    text = "\n".join(found)
    assert "thread left-over" in text
    assert text.count("pipe:") == 2
    assert f"shared memory {memory.name.lstrip('/')}" in text
    go_on.set()
    thread.join()
    os.close(read)
    os.close(write)
    memory.unlink()  # first, so that it is never there without a holder
    memory.close()
    assert leaks.left_since(before, TOKEN) == []


@pytest.mark.cluster
def test_marked_tests_run_the_check(request: pytest.FixtureRequest) -> None:
    assert "_nothing_left" in request.fixturenames
