"""What the catalogue of GPUs adds to a site file, for showing and checking; never plans."""

from __future__ import annotations

from collections.abc import Sequence

from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.config.sources import Loaded, Setting
from flexslurm.config.units import COMPUTE, RATE, SIZE
from flexslurm.config.yaml_text import Origin
from flexslurm.errors import ConfigError
from flexslurm.planner import catalogue
from flexslurm.planner.topology import Topology


def with_catalogue(site: Site, settings: Sequence[Setting]) -> list[Setting]:
    """The settings with the figures that GPU types take from the catalogue, and its name."""
    known: dict[str, Setting] = {}
    for name, entry in site.gpu_types.items():
        gpu = catalogue.find(entry.model or name)
        if gpu is None:
            continue
        source = f"catalogue: {gpu.name}"
        flops = gpu.flops.get("bfloat16", 0.0)
        for key, value, quantity in (
            ("memory", gpu.memory_bytes, SIZE),
            ("memory_bandwidth", gpu.memory_bandwidth, RATE),
            ("flops", flops, COMPUTE),
        ):
            dotted = f"gpu_types.{name}.{key}"
            known[dotted] = Setting(dotted, value, quantity.show(value), Origin.DEFAULT, source)
    return [
        known.get(setting.key, setting) if setting.value is None else setting
        for setting in settings
    ]


def check_figures(service: Loaded[Service], site: Loaded[Site]) -> None:
    """Whether every GPU type has its figures. Raises ConfigError at its place in the site file."""
    try:
        Topology.from_site(site.value, service.value.model.dtype)
    except ConfigError as error:
        if error.file is not None or error.key is None:
            raise
        words = error.message.removeprefix(f"{error.key}: ")
        raise site.error(tuple(error.key.split(".")), words, error.hint) from None
