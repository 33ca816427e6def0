"""`python -m flexslurm.cli.trial_process PLAN RESULT [SERVE]`: a whole trial on its node.

Stages are timed one after the other (`engine.profiling`), then the model is served for a while
(`served_trial`). RESULT gets a `trial.TrialOutcome`, unless a signal ends this; what is under way
goes to standard output. That a model could not be served leaves what was measured before.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import msgspec

from flexslurm.cli.served_trial import Say, ServeAsk, serve
from flexslurm.engine.profiling import run
from flexslurm.engine.trial import Trial, TrialOutcome
from flexslurm.errors import FlexslurmError


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGTERM, _end)
    plan, result = Path(argv[1]), Path(argv[2])

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    outcome = run(msgspec.json.decode(plan.read_bytes(), type=Trial), say)
    if len(argv) > 3 and not outcome.error:
        outcome = _served(outcome, Path(argv[3]), say)
    part = result.with_name(result.name + ".part")
    part.write_bytes(msgspec.json.encode(outcome))
    part.replace(result)
    return 1 if outcome.error else 0


def _end(number: int, _: object) -> None:
    """By an exception, so that ranks and service are ended too."""
    raise SystemExit(128 + number)


def _served(outcome: TrialOutcome, file: Path, say: Say) -> TrialOutcome:
    ask = msgspec.json.decode(file.read_bytes(), type=ServeAsk)
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        del os.environ[name]  # its processes are of this trial, and no pilots of the job
    try:
        with tempfile.TemporaryDirectory(prefix="flexslurm-trial-") as home:
            served = serve(ask, Path(home), say)
    except FlexslurmError as error:
        return msgspec.structs.replace(outcome, unserved=error.message)
    return msgspec.structs.replace(outcome, served=served)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
