"""A small service file and its site file, as tests of settings write them."""

from __future__ import annotations

import pytest

from flexslurm.config.schema import parse_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.errors import ConfigError

SERVICE = """\
name: chat
model:
  path: models/small
pool:
  - partition: scav
    gpu_type: a100
    gpus: 2
  - {partition: scav, gpu_type: l40s, gpus: 1, count: 2}
serving:
  max_batch: 8
"""
SITE = """\
name: here
gpu_types:
  a100: {model: a100-80}
  l40s: {memory: 48GiB}
partitions:
  scav:
    gpu_types: [a100, l40s]
    gpus_per_node: 4
    max_walltime: 1-00:00:00
  prio: {gpu_types: [a100], preemptible: false}
head: {partition: prio}
"""


def refused(text: str, kind: type[Service] | type[Site] = Service) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_section(kind, text, "f.yaml")
    return caught.value
