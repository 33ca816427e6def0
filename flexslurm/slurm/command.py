"""Running one command with a deadline and a clean environment; never through a shell."""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexslurm.errors import EnvironmentFault, SlurmError, SlurmUnavailable

_NO_CONFIGURATION = re.compile(
    r"Could not establish a configuration source|Unable to process configuration file", re.I
)
_INHERITED = re.compile(
    r"^(SLURM|SLURMD|SBATCH|SRUN|SALLOC|SQUEUE|SINFO|SACCT|SCANCEL|SCONTROL|SPRIO|SSTAT|SUBMITIT)_"
)
_KEPT = frozenset({"SLURM_CONF"})

_NO_ANSWER = (
    "socket timed out",
    "unable to contact slurm controller",
    "connection refused",
    "connection timed out",
    "zero bytes were transmitted or received",
    "unexpected message received",
    "slurm controller not responding",
    "communications connection failure",
    "communication connection failure",
    "slurmctld is in standby",
    "slurm backup controller in standby mode",
    "too many requests",
    "rate limit",
    "munge encode failed",
    "protocol authentication error",
    "resource temporarily unavailable",
    "transport endpoint is not connected",
    "insane message length",
    "broken pipe",
)


@dataclass(frozen=True, slots=True)
class Completed:
    """What a command said, stdout and stderr apart."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str


def clean_env(conf: str | None = None, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a Slurm command: ours, less what changes Slurm's answers.

    Options that a surrounding job or a user's profile set (`SLURM_MEM_PER_CPU`, `SQUEUE_FORMAT`)
    change what commands do and print. `SLURM_CONF` stays: without it another cluster answers.
    """
    source = os.environ if environ is None else environ
    env = {k: v for k, v in source.items() if k in _KEPT or not _INHERITED.match(k)}
    if conf is not None:
        env["SLURM_CONF"] = conf
    return env


def is_unavailable(text: str) -> bool:
    """Whether an error text means that nobody answered, so that nothing is known."""
    lowered = text.lower()
    return any(phrase in lowered for phrase in _NO_ANSWER)


def run(
    argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, cwd: Path | None = None
) -> Completed:
    """Run a command to its end, whatever its exit status.

    Raises EnvironmentFault where the command does not exist and SlurmUnavailable at the deadline.
    """
    try:
        done = subprocess.run(
            list(argv), env=dict(env), timeout=timeout_s, cwd=cwd, check=False,
            stdin=subprocess.DEVNULL, capture_output=True,
        )  # fmt: skip
    except FileNotFoundError:
        raise EnvironmentFault(
            f"the command '{argv[0]}' is not on this machine",
            hint="run on a login node, or name the site's own commands under slurm.commands",
        ) from None
    except OSError as error:
        raise EnvironmentFault(
            f"cannot start '{argv[0]}': {error.strerror}",
            hint="see slurm.commands in the site file, and whether this machine has room",
        ) from error
    except subprocess.TimeoutExpired:
        raise SlurmUnavailable(
            f"{argv[0]} did not answer within {timeout_s:g} s; nothing is known of its jobs"
        ) from None
    return Completed(
        tuple(argv), done.returncode,
        done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"),
    )  # fmt: skip


def failure(done: Completed) -> SlurmError:
    """The error a failed command stands for: transient where Slurm did not answer."""
    text = " ".join(line.strip() for line in done.err.splitlines() if line.strip())
    text = text or done.out.strip() or f"exit status {done.code}"
    name = Path(done.argv[0]).name
    if is_unavailable(text):
        return SlurmUnavailable(f"Slurm does not answer: {text}")
    if _NO_CONFIGURATION.search(text):
        return SlurmError(
            f"{name} finds no configuration of Slurm on this machine",
            hint="run on a login node, set SLURM_CONF (flexslurm sandbox up makes one to try "
            "with), or launch with --cluster local",
        )
    return SlurmError(text if text.startswith(f"{name}:") else f"{name}: {text}")


def backoff_s(base_s: float, cap_s: float, rng: random.Random | None = None) -> Iterator[float]:
    """Endless waits between tries: doubling from `base_s` to `cap_s`, each 50 to 100 % of it.

    The jitter keeps many heads from asking one controller at the same moment.
    """
    draw = random.Random() if rng is None else rng  # noqa: S311 - not for secrets
    wait = base_s
    while True:
        yield wait * (0.5 + draw.random() / 2)
        wait = min(cap_s, wait * 2)
