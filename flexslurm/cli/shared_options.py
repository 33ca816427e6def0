"""Arguments and options that several commands have, each written once; reads no file."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

_MOST_S = 1e8


class Number(click.FloatRange):
    """A finite number within a range; nan, which no range keeps out, is none."""

    what = "number"

    def convert(
        self, value: str | float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))  # type: ignore[arg-type]
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a {self.what}", param, ctx)
        return number

    def _describe_range(self) -> str:
        """For help; without bounds click would say x<=None."""
        return "" if self.min is None and self.max is None else super()._describe_range()


class _SecondsType(Number):
    """Seconds to wait: no negative ones, no endless ones."""

    name = "seconds"
    what = "number of seconds"


SECONDS = _SecondsType(min=0, max=_MOST_S)
PATH = click.Path(path_type=Path)

SERVICE = click.argument("service", metavar="SERVICE", required=False, default=None)
SERVICE_FILE = click.argument("service_file", metavar="SERVICE.yaml", type=PATH)


def _not_empty(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """As an unset variable of a shell leaves it; it would mean the working directory."""
    if value == "":
        raise click.BadParameter("it is empty")
    return value


SERVICE_DIR = click.option(
    "--service-dir",
    metavar="DIR",
    callback=_not_empty,
    help="The service's directory, where it is not the default.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
QUIET = click.option("--quiet", "-q", is_flag=True, help="No progress.")
KEEP = click.option("--keep", is_flag=True, help="Keep the working directory, with all logs.")
FORCE = click.option("--force", is_flag=True, help="Replace a file that is there.")
FIGURES_FILE = click.option(
    "--json", "json_file", metavar="FILE", type=PATH, help="Also write the figures there."
)
TO_FILE = click.option("--to", "target", metavar="FILE", type=PATH, help="Default: print it.")


class _SiteFileType(click.Path):
    """A site file; where none is named, it says how to name or make one."""

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return (
            "It names the site file; the variable FLEXSLURM_SITE does it too. To write one from a "
            "live cluster: flexslurm site discover --to site.yaml"
        )


def site(words: str, *, required: bool = False) -> Callable[[Command], Command]:
    """`--site`, or $FLEXSLURM_SITE; `words`: what the command wants it for."""
    return click.option(
        "--site",
        "site_file",
        metavar="SITE.yaml",
        type=_SiteFileType(path_type=Path),
        envvar="FLEXSLURM_SITE",
        required=required,
        help=words,
    )


SITE = site("What the cluster is made of.", required=True)


def of_service(service: str | None, word: str | None, what: str) -> tuple[str | None, str]:
    """SERVICE and the word after it: where there is one word alone, it is the second.

    Raises UsageError where there is none; `what` the second word is.
    """
    if word is None:
        service, word = None, service
    if word is None:
        raise click.UsageError(f"which {what}? 'flexslurm status' lists them")
    return service, word
