#!/usr/bin/env python
"""Prints what planned shifts cost on virtual GPUs, side by side: `flexslurm bench shift`.

python tests/bench/shifts.py [--quick] [--json FILE]
"""

# ruff: noqa: E402 - the environment is set before torch is imported
from __future__ import annotations

import os
import sys
from pathlib import Path

for name, value in (("OMP_NUM_THREADS", "1"), ("DS_BUILD_OPS", "0"), ("DS_ACCELERATOR", "cpu")):
    os.environ.setdefault(name, value)
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from flexslurm.cli.main import run

if __name__ == "__main__":
    sys.exit(run(["bench", "shift", *sys.argv[1:]]))
