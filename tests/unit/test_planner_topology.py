"""GPU figures: from the site, else the catalogue, else a CPU's; each with its source."""

from __future__ import annotations

from typing import Any

import pytest

from flexslurm.config.site import Site
from flexslurm.errors import ConfigError
from flexslurm.planner.catalogue import ALIASES, CATALOGUE, find
from flexslurm.planner.topology import (
    BANDWIDTH_REACHED,
    COMPUTE_REACHED,
    CPU_BANDWIDTH,
    Topology,
)


def site(**types: Any) -> Site:
    return Site.model_validate({"name": "test", "gpu_types": types})


def test_catalogue_is_whole() -> None:
    wanted = "a100-40 a100-80 h100 h200 b200 l40s l4 a10 a6000 rtx4090 v100-16 t4 mi300x"
    assert set(wanted.split()) <= set(CATALOGUE)
    for gpu in CATALOGUE.values():
        assert gpu.source
        assert min(gpu.memory_bytes, gpu.memory_bandwidth, gpu.link_bandwidth) > 0
        assert min(gpu.flops.values()) > 0
        assert {"float32", "float16", "bfloat16"} <= set(gpu.flops)
    assert all(target in CATALOGUE for target in ALIASES.values())
    assert find("RTX_4090") is CATALOGUE["rtx4090"]


def test_site_figures_win_over_the_catalogue() -> None:
    topology = Topology.from_site(
        site(
            big={"model": "h100", "memory": "64GiB", "memory_bandwidth": "2TB/s"},
            h100={"flops": "100TFLOPS", "gpu_link": {"bandwidth": "50GB/s", "latency": "1us"}},
        )
    )
    big, plain = topology.gpu("big"), topology.gpu("h100")
    assert big.memory_bytes == 64 * 2**30
    assert big.memory_bandwidth == 2e12 * BANDWIDTH_REACHED
    assert big.flops == CATALOGUE["h100"].flops["bfloat16"] * COMPUTE_REACHED
    assert plain.memory_bytes == CATALOGUE["h100"].memory_bytes
    assert plain.flops == 100e12 * COMPUTE_REACHED
    assert (plain.link.bandwidth, plain.link.latency_s) == (50e9, 1e-6)
    assert "H100" in plain.source


def test_dtype_chooses_the_rate() -> None:
    def flops(name: str, dtype: str) -> float:
        return Topology.from_catalogue((name,), dtype).gpu(name).flops / COMPUTE_REACHED

    assert flops("h100", "float8") == pytest.approx(1978.9e12)
    assert flops("h100", "float32") == pytest.approx(66.9e12)
    assert flops("a100", "float8") == pytest.approx(312e12)  # no fp8 units: as fp16
    assert flops("v100", "bfloat16") == pytest.approx(15.7e12)  # no bf16 units: as fp32


def test_rails_multiply_the_node_link() -> None:
    whole = Site.model_validate(
        {
            "name": "test",
            "gpu_types": {"l4": {}},
            "network": {"node_link": {"bandwidth": "200Gbit/s", "latency": "2us", "rails": 4}},
        }
    )
    link = Topology.from_site(whole).node_link
    assert (link.bandwidth, link.latency_s) == (100e9, 2e-6)


def test_cpu_at_its_own_pace_has_its_own_rates() -> None:
    figures = site(v={"model": "h100", "memory": "1GiB", "virtual": {"speed": 0.5}})
    gpu = Topology.from_site(figures).gpu("v")
    assert gpu.virtual and gpu.acts_model is None
    assert gpu.memory_bytes == 2**30
    assert gpu.memory_bandwidth == CPU_BANDWIDTH * 0.5


def test_acting_uses_the_cards_rates_and_the_cpus_memory() -> None:
    virtual = {"pacing": "acted", "acts_model": "llama-3.1-70b"}
    gpu = Topology.from_site(site(v={"model": "h100", "memory": "1GiB", "virtual": virtual})).gpu(
        "v"
    )
    assert gpu.acts_model == "llama-3.1-70b"
    assert gpu.memory_bytes == 2**30
    assert gpu.memory_bandwidth == CATALOGUE["h100"].memory_bandwidth * BANDWIDTH_REACHED


@pytest.mark.parametrize(
    ("types", "key"),
    [
        ({"mystery": {}}, "gpu_types.mystery.memory"),
        ({"mystery": {"memory": "1GiB"}}, "gpu_types.mystery.memory_bandwidth"),
        (
            {"mystery": {"memory": "1GiB", "memory_bandwidth": "1GB/s"}},
            "gpu_types.mystery.flops",
        ),
        ({"v": {"virtual": {}}}, "gpu_types.v.memory"),
        ({"x": {"model": "h1000"}}, "gpu_types.x.model"),
    ],
)
def test_missing_figures_are_named(types: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Topology.from_site(site(**types))
    assert caught.value.key == key
    assert caught.value.hint is not None or "virtual" in caught.value.message


def test_unknown_types_are_refused_with_the_nearest() -> None:
    topology = Topology.from_catalogue(("l40s", "h100"))
    with pytest.raises(ConfigError) as caught:
        topology.gpu("l40")
    assert caught.value.hint == "did you mean 'l40s'?"
    with pytest.raises(ConfigError, match="catalogue has no 'h1000'"):
        Topology.from_catalogue(("h1000",))


def test_memory_that_was_found_replaces_the_figure() -> None:
    topology = Topology.from_catalogue(("l4",)).with_memory({"l4": 123, "other": 5})
    assert topology.gpu("l4").memory_bytes == 123
