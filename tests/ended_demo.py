"""A demo that is ended by a signal at a moment of its story; for the tests of both clusters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path


def end_demo(model: Path, moment: str, number: signal.Signals, *options: str) -> str:
    """Run the demo until a line has `moment`, then send it the signal; what it printed.

    Its temporary directories must be gone afterwards. They lie in a directory with a short name:
    sockets have little room for theirs.
    """
    with tempfile.TemporaryDirectory(prefix="fd") as where:
        code, told = _run_until(Path(where), model, moment, number, options)
        assert moment in told, told
        assert code == 128 + number, told
        assert "Traceback" not in told, told
        assert list(Path(where).iterdir()) == [], told
    return told


def _run_until(
    where: Path, model: Path, moment: str, number: signal.Signals, options: tuple[str, ...]
) -> tuple[int, str]:
    command = [sys.executable, "-P", "-u", "-m", "flexslurm", "demo", "--model", str(model)]
    lines = []
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "TMPDIR": str(where)},
    ) as process:  # fmt: skip
        watch = threading.Timer(240.0, process.kill)  # so that no line is waited for forever
        watch.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if moment in line:
                    process.send_signal(number)
                    process.send_signal(number)  # one who is impatient
                    break
            lines += process.stdout
            code = process.wait()
        finally:
            watch.cancel()
            watch.join()
            process.kill()
    return code, "".join(lines)
