"""Built-in figures of common GPUs, each with its source; only values.

Memory is what the driver reports as total; bandwidth and dense FLOP/s are the vendors' peaks; links
are bytes per second in one direction. What a program reaches of a peak is in `topology`.
"""

from __future__ import annotations

import difflib

import msgspec

from flexslurm.errors import ConfigError

MIB = 2**20


class CatalogueGpu(msgspec.Struct, frozen=True):
    """One GPU as its vendor describes it."""

    name: str
    memory_bytes: int
    memory_bandwidth: float
    flops: dict[str, float]
    """Dense peak by dtype; a dtype that is absent runs at the rate of `float16`."""
    link_bandwidth: float
    """To the other GPUs of the node."""
    link: str
    source: str


def _gpu(
    name: str,
    memory_mib: int,
    bandwidth_gb: float,
    tflops: tuple[float, float, float, float],
    link: tuple[str, float],
    source: str,
) -> CatalogueGpu:
    """`tflops`: float64, float32, float16 and bfloat16, float8 (0: it has none)."""
    rates = dict(zip(("float64", "float32", "float16", "float8"), tflops, strict=True))
    flops = {dtype: rate * 1e12 for dtype, rate in rates.items() if rate}
    if name.startswith(("v100", "t4")):
        flops["bfloat16"] = flops["float32"]  # no bf16 units: computed as float32
    else:
        flops["bfloat16"] = flops["float16"]
    return CatalogueGpu(
        name, memory_mib * MIB, bandwidth_gb * 1e9, flops, link[1] * 1e9, link[0], source
    )


CATALOGUE: dict[str, CatalogueGpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40", 40960, 1555, (9.7, 19.5, 312, 0), ("NVLink 3", 300),
             "NVIDIA A100 Tensor Core GPU datasheet, SXM 40GB"),
        _gpu("a100-80", 81920, 2039, (9.7, 19.5, 312, 0), ("NVLink 3", 300),
             "NVIDIA A100 Tensor Core GPU datasheet, SXM 80GB"),
        _gpu("h100", 81559, 3350, (33.5, 66.9, 989.4, 1978.9), ("NVLink 4", 450),
             "NVIDIA H100 Tensor Core GPU datasheet, SXM5 80GB; dense rates: H100 white paper"),
        _gpu("h200", 143771, 4800, (33.5, 66.9, 989.4, 1978.9), ("NVLink 4", 450),
             "NVIDIA H200 Tensor Core GPU datasheet, SXM"),
        _gpu("b200", 183359, 8000, (37, 75, 2250, 4500), ("NVLink 5", 900),
             "NVIDIA HGX B200 datasheet, per GPU"),
        _gpu("l40s", 46068, 864, (1.4, 91.6, 362.05, 733), ("PCIe 4.0 x16", 32),
             "NVIDIA L40S datasheet"),
        _gpu("l4", 23034, 300, (0.5, 30.3, 121, 242.5), ("PCIe 4.0 x16", 32),
             "NVIDIA L4 datasheet; dense is half of the rates with sparsity"),
        _gpu("a10", 23028, 600, (0.5, 31.2, 125, 0), ("PCIe 4.0 x16", 32),
             "NVIDIA A10 datasheet"),
        _gpu("a6000", 49140, 768, (0.6, 38.7, 154.8, 0), ("PCIe 4.0 x16", 32),
             "NVIDIA RTX A6000 datasheet; dense is half of the rates with sparsity"),
        _gpu("rtx4090", 24564, 1008, (1.3, 82.6, 165.2, 330.3), ("PCIe 4.0 x16", 32),
             "NVIDIA Ada GPU architecture white paper, GeForce RTX 4090, FP32 accumulate"),
        _gpu("v100-16", 16384, 900, (7.8, 15.7, 125, 0), ("NVLink 2", 150),
             "NVIDIA V100 Tensor Core GPU datasheet, SXM2 16GB"),
        _gpu("v100-32", 32768, 900, (7.8, 15.7, 125, 0), ("NVLink 2", 150),
             "NVIDIA V100 Tensor Core GPU datasheet, SXM2 32GB"),
        _gpu("t4", 15360, 320, (0.25, 8.1, 65, 0), ("PCIe 3.0 x16", 16),
             "NVIDIA T4 datasheet"),
        _gpu("mi300x", 196592, 5300, (81.7, 163.4, 1307.4, 2614.9), ("Infinity Fabric", 448),
             "AMD Instinct MI300X datasheet; 7 links of 64 GB/s each way"),
    )
}  # fmt: skip

ALIASES: dict[str, str] = {
    "a100": "a100-40",
    "h100-80": "h100",
    "v100": "v100-16",
    "4090": "rtx4090",
    "rtx-4090": "rtx4090",
    "rtx-a6000": "a6000",
}
"""Names people use; of a card sold with two memories the smaller is meant."""


def find(name: str) -> CatalogueGpu | None:
    key = name.lower().replace("_", "-")
    return CATALOGUE.get(ALIASES.get(key, key))


def get(name: str, *, key: str | None = None) -> CatalogueGpu:
    """As `find`; raises ConfigError naming the nearest entry, `key` being where the name stood."""
    gpu = find(name)
    if gpu is not None:
        return gpu
    near = difflib.get_close_matches(name.lower(), [*CATALOGUE, *ALIASES], n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(CATALOGUE)}"
    raise ConfigError(f"the GPU catalogue has no '{name}'", key=key, hint=hint)
