"""Asking slurmrestd; an option beside Slurm's commands, for sites that offer it. Only reads."""

from __future__ import annotations

import getpass
import http.client
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flexslurm.config.site import RestSettings
from flexslurm.errors import EnvironmentFault, SlurmError, SlurmUnavailable
from flexslurm.slurm.json_forms import read_answer

_MOST_BYTES = 256 * 2**20


def ask_rest(settings: RestSettings, path: str, timeout_s: float) -> dict[str, Any]:
    """GET `path` below the url of the settings.

    Raises SlurmUnavailable where nobody answers, SlurmError where the answer is no.
    """
    parts = urlsplit(settings.url)
    secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    headers = _headers(settings)
    try:
        link = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    except (ValueError, http.client.InvalidURL) as error:  # a port that is none
        raise EnvironmentFault(
            f"slurm.rest.url {settings.url}: {error}", hint="write http://HOST:PORT/slurm/v0.0.40"
        ) from None
    try:
        link.request("GET", parts.path + path, headers=headers)
        with link.getresponse() as answer:
            status = answer.status
            text = answer.read(_MOST_BYTES).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise SlurmUnavailable(f"slurmrestd at {settings.url} does not answer: {error}") from None
    finally:
        link.close()
    if status in (401, 403):
        raise SlurmError(
            f"slurmrestd refuses the token ({status})",
            hint="put a new one into slurm.rest.token_file: scontrol token lifespan=86400",
        )
    if status >= 500:
        raise SlurmUnavailable(f"slurmrestd at {settings.url} fails with status {status}")
    return read_answer(text)


def _headers(settings: RestSettings) -> dict[str, str]:
    headers = {
        "Accept": "application/json",
        "X-SLURM-USER-NAME": settings.user or getpass.getuser(),
    }
    if settings.token_file is not None:
        try:
            token = Path(settings.token_file).expanduser().read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise EnvironmentFault(
                f"cannot read the token in {settings.token_file}: {error}",
                hint="mend slurm.rest.token_file in the site file",
            ) from None
        token = token.removeprefix("SLURM_JWT=")
        if not token.isprintable() or not token:
            raise EnvironmentFault(
                f"{settings.token_file} holds no token",
                hint="put one line into it: scontrol token lifespan=86400",
            )
        headers["X-SLURM-USER-TOKEN"] = token
    return headers
