"""GPU types and links as figures for the cost model; never asks the cluster.

Figures come from the site file; what it leaves out comes from the catalogue, and for GPUs that a
CPU plays from rough figures of one core, so that every site has figures and none is zero.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import msgspec

from flexslurm.config.site import GpuType, LinkFigures, Site
from flexslurm.errors import ConfigError
from flexslurm.planner import catalogue

COMPUTE_REACHED = 0.55
"""Share of the peak FLOP/s that large matrix products reach in practice."""
BANDWIDTH_REACHED = 0.75
"""Share of the peak memory bandwidth that reading weights and KV reaches."""
LAYER_S = 120e-6
"""Launching the kernels of one layer from Python, where the GPU would be faster."""
STORAGE_BANDWIDTH = 1e9
"""Bytes per second at which one GPU's weights come from shared storage, where nothing says."""

# One core of a CPU that plays a GPU: rough, for planning before anything has been measured.
CPU_FLOPS = 30e9
CPU_BANDWIDTH = 8e9
CPU_LAYER_S = 400e-6
CPU_LINK_BANDWIDTH = 1e9
CPU_LINK_LATENCY_S = 150e-6


class Link(msgspec.Struct, frozen=True):
    """A link in one direction."""

    bandwidth: float
    """Bytes per second over all rails."""
    latency_s: float


class GpuFigures(msgspec.Struct, frozen=True):
    """One GPU type. Rates are what programs reach, not peaks."""

    name: str
    memory_bytes: int
    memory_bandwidth: float
    flops: float
    link: Link
    """To the other GPUs of its node."""
    layer_s: float
    """Fixed time of one layer in one step."""
    storage_bandwidth: float = STORAGE_BANDWIDTH
    virtual: bool = False
    acts_model: str | None = None
    """Steps take the time of this model's layers, see `config.site.VirtualGpu`."""
    source: str = ""


class Topology(msgspec.Struct, frozen=True):
    """All GPU types of a site, and the link between its nodes."""

    gpus: dict[str, GpuFigures]
    node_link: Link
    step_s: float = 1e-3
    """From the last stage's token to the next step on the first: head and messages."""

    @classmethod
    def from_site(cls, site: Site, dtype: str = "bfloat16") -> Topology:
        """Figures for a model served in `dtype`.

        Raises ConfigError where a type has neither figures nor an entry in the catalogue.
        """
        gpus = {name: _figures(name, entry, dtype) for name, entry in site.gpu_types.items()}
        return cls(gpus=gpus, node_link=_link(site.network.node_link))

    @classmethod
    def from_catalogue(cls, names: tuple[str, ...], dtype: str = "bfloat16") -> Topology:
        """Catalogue figures and default links: 100 Gbit/s and 5 us between nodes."""
        gpus = {}
        for name in names:
            known = catalogue.get(name)
            gpus[name] = _figures(name, GpuType(model=known.name), dtype)
        return cls(gpus=gpus, node_link=Link(12.5e9, 5e-6))

    def gpu(self, name: str) -> GpuFigures:
        """Raises ConfigError for a type that is not defined."""
        figures = self.gpus.get(name)
        if figures is None:
            near = difflib.get_close_matches(name, self.gpus, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(self.gpus)}"
            raise ConfigError(f"the site defines no GPU type '{name}'", hint=hint)
        return figures

    def with_memory(self, found: Mapping[str, int]) -> Topology:
        """The same with the memory that workers really found, by type."""
        gpus = {
            name: msgspec.structs.replace(gpu, memory_bytes=found.get(name, gpu.memory_bytes))
            for name, gpu in self.gpus.items()
        }
        return msgspec.structs.replace(self, gpus=gpus)


def _link(figures: LinkFigures) -> Link:
    return Link(figures.bandwidth * figures.rails, figures.latency)


def _figures(name: str, entry: GpuType, dtype: str) -> GpuFigures:
    key = f"gpu_types.{name}"
    known = catalogue.find(name)
    if entry.model is not None:
        known = catalogue.get(entry.model, key=f"{key}.model")
    acted = entry.virtual is not None and entry.virtual.pacing == "acted"
    if entry.virtual is not None and not acted:
        return _cpu_figures(name, entry, entry.virtual.speed, known)
    memory = entry.memory if entry.memory is not None else known and known.memory_bytes
    bandwidth = entry.memory_bandwidth or (known and known.memory_bandwidth)
    flops = entry.flops or (known and known.flops.get(dtype, known.flops["float16"]))
    if memory == 0:
        raise ConfigError("it must be above 0", key=f"{key}.memory")
    for figure, value in (("memory", memory), ("memory_bandwidth", bandwidth), ("flops", flops)):
        if not value:
            raise ConfigError(
                f"this figure is needed: '{entry.model or name}' is not in the catalogue",
                key=f"{key}.{figure}",
                hint=f"give it, or set model to one of {', '.join(catalogue.CATALOGUE)}",
            )
    assert memory and bandwidth and flops
    link = entry.gpu_link and _link(entry.gpu_link)
    return GpuFigures(
        name=name,
        memory_bytes=memory,
        memory_bandwidth=bandwidth * BANDWIDTH_REACHED,
        flops=flops * COMPUTE_REACHED,
        link=link or Link(known.link_bandwidth if known else 16e9, 5e-6),
        layer_s=LAYER_S,
        virtual=acted,
        acts_model=entry.virtual.acts_model if acted and entry.virtual else None,
        source=known.source if known else "site file",
    )


def _cpu_figures(
    name: str, entry: GpuType, speed: float, known: catalogue.CatalogueGpu | None
) -> GpuFigures:
    """A CPU at its own pace: the card's rates say nothing of it, its memory does."""
    memory = entry.memory if entry.memory is not None else known and known.memory_bytes
    if not memory:
        words = "it must be above 0" if memory == 0 else "a virtual GPU needs its memory"
        raise ConfigError(words, key=f"gpu_types.{name}.memory")
    link = entry.gpu_link and _link(entry.gpu_link)
    return GpuFigures(
        name=name,
        memory_bytes=memory,
        memory_bandwidth=(entry.memory_bandwidth or CPU_BANDWIDTH) * speed,
        flops=(entry.flops or CPU_FLOPS) * speed,
        link=link or Link(CPU_LINK_BANDWIDTH, CPU_LINK_LATENCY_S),
        layer_s=CPU_LAYER_S / speed,
        virtual=True,
        source="a CPU core",
    )
