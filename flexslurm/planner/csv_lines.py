"""Lines of the CSV files that measurements are kept in; knows no columns."""

from __future__ import annotations

import csv

from flexslurm.errors import ConfigError


def cells_of(line: str, file: str, number: int) -> list[str]:
    """The values of one line. Raises ConfigError naming file and line."""
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error as error:
        raise ConfigError(f"not CSV: {error}", file=file, line=number) from None
