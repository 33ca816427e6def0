"""Checks service and site against each other; never asks Slurm, and reads no model but its name.

What one file alone can get wrong is checked when it is read. Here is what only shows beside the
other file or the disk: a GPU type or partition that the site lacks, more GPUs than a node has, a
model that is not there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexslurm.config.schema import nearest_hint
from flexslurm.config.service import Service
from flexslurm.config.site import GpuType, Partition, Site
from flexslurm.config.sources import Loaded, load_service, load_site
from flexslurm.config.units import TIME
from flexslurm.config.yaml_text import Loc
from flexslurm.errors import ModelError


@dataclass(frozen=True, slots=True)
class Pair:
    """A service and the site it goes to, with what is worth saying about them."""

    service: Loaded[Service]
    site: Loaded[Site]
    notes: tuple[str, ...]


def load_pair(
    service_file: Path,
    site_file: Path,
    *,
    overrides: Sequence[str] = (),
    cluster: str = "slurm",
    environ: Mapping[str, str] = os.environ,
) -> Pair:
    """Read and check both files under `--set` overrides and the environment.

    Raises ConfigError naming the file, the line, the key and, where one is near, the legal word,
    and ModelError where the model's directory is none.
    """
    service = load_service(service_file, overrides, environ)
    site = load_site(site_file, overrides, environ)
    check_pair(service, site, cluster)
    check_paths(service)
    return Pair(service, site, tuple(notes(service, site)))


def check_pair(service: Loaded[Service], site: Loaded[Site], cluster: str = "slurm") -> None:
    """Whether the site has what the service asks for. Raises ConfigError."""
    for index, entry in enumerate(service.value.pool):
        types = site.value.gpu_types
        if entry.gpu_type not in types:
            raise service.error(
                ("pool", index, "gpu_type"),
                f"the site '{site.value.name}' has no GPU type '{entry.gpu_type}'",
                nearest_hint(entry.gpu_type, list(types)),
            )
        if cluster == "slurm":
            _check_partition(service, site, index)
    plans = service.value.scheduling
    for key in ("default_plan", "fallback_plan"):
        plan = getattr(plans, key)
        if plan is not None and plans.plans is not None and plan not in plans.plans:
            raise service.error(
                ("scheduling", key),
                f"'{plan}' is not among scheduling.plans",
                nearest_hint(plan, plans.plans),
            )


def _check_partition(service: Loaded[Service], site: Loaded[Site], index: int) -> None:
    entry = service.value.pool[index]
    partitions = site.value.partitions
    fitting = [
        name
        for name, partition in partitions.items()
        if not partition.gpu_types or entry.gpu_type in partition.gpu_types
    ]
    at: Loc = ("pool", index, "partition")
    if entry.partition is None:
        words = f"which partition? {entry.gpu_type} is found in {', '.join(fitting) or 'none'}"
        raise service.error(at, words, "not needed with --cluster local")
    if entry.partition not in partitions:
        words = f"the site '{site.value.name}' has no partition '{entry.partition}'"
        raise service.error(at, words, nearest_hint(entry.partition, list(partitions)))
    if entry.partition not in fitting:
        words = f"the partition '{entry.partition}' has no {entry.gpu_type}"
        legal = f"it is found in {', '.join(fitting)}" if fitting else "no partition has it"
        raise service.error(at, words, legal)
    _check_limits(service, index, entry.partition, partitions[entry.partition])


def _check_limits(service: Loaded[Service], index: int, name: str, partition: Partition) -> None:
    """Whether the partition gives what an entry of the pool asks of it."""
    entry, most = service.value.pool[index], partition.gpus_per_node
    for number, shape in enumerate(entry.all_shapes):
        if most is not None and shape.gpus > most:
            own: Loc = ("gpus",) if number == 0 else ("shapes", number - 1, "gpus")
            raise service.error(
                ("pool", index, *own),
                f"a node of '{name}' has at most {most} GPUs, not {shape.gpus}",
                f"for {shape.gpus} GPUs ask for more nodes or a higher count",
            )
    if entry.preemptible is False and partition.preemptible:
        raise service.error(
            ("pool", index, "preemptible"),
            f"Slurm may take jobs of '{name}'",
            "choose a partition that the site file calls preemptible: false",
        )
    longest = partition.max_walltime
    if entry.walltime is not None and longest is not None and entry.walltime > longest:
        raise service.error(
            ("pool", index, "walltime"),
            f"'{name}' allows at most {TIME.show(longest)}",
        )


def check_paths(service: Loaded[Service]) -> None:
    """Whether the files that the service names are there. Raises ConfigError, ModelError.

    What is wrong with a model's directory is a ModelError in every command; here it says which
    key of which file named it.
    """
    model = Path(service.value.model.path)
    if not model.exists():
        raise _no_model(service, f"no model at {model}", _nearest_model(model))
    if not (model / "config.json").is_file():
        words = f"{model} is not a checkpoint directory: it has no config.json"
        raise _no_model(service, words, "'flexslurm model prepare' turns a GGUF file into one")
    for loc in (("model", "chat_template"), ("gateway", "api_keys_file")):
        section, key = loc
        path = getattr(getattr(service.value, section), key)
        if path is not None and not Path(path).is_file():
            raise service.error(loc, f"no file at {path}")


def _no_model(service: Loaded[Service], words: str, hint: str | None) -> ModelError:
    place = service.error(("model", "path"), words)
    return ModelError(place.message, hint=hint)


def site_with_slurm(path: Path) -> Site:
    """The site file of a command that asks Slurm. Raises ConfigError."""
    loaded = load_site(path)
    check_slurm_conf(loaded)
    return loaded.value


def check_slurm_conf(site: Loaded[Site]) -> None:
    """Whether the slurm.conf that the site names can be read, before Slurm is asked by it.

    Without one, Slurm's commands search for a minute or two and then say something else.
    Raises ConfigError.
    """
    conf = site.value.slurm.conf
    if conf is None or (Path(conf).is_file() and os.access(conf, os.R_OK)):
        return
    words = f"{conf} cannot be read here" if Path(conf).exists() else f"no file at {conf}"
    raise site.error(
        ("slurm", "conf"), words, "name this cluster's slurm.conf, or leave it to Slurm's default"
    )


def _nearest_model(model: Path) -> str:
    try:
        names = [entry.name for entry in model.parent.iterdir() if entry.is_dir()]
    except OSError:
        names = []
    hint = nearest_hint(model.name, names) if names else None
    if hint is not None and hint.startswith("did you mean"):
        return hint
    return "'flexslurm model prepare smollm2' makes a small one to try with"


def notes(service: Loaded[Service], site: Loaded[Site]) -> list[str]:
    """What is legal and yet may surprise, one sentence each."""
    found = []
    block, chunk = ("serving", "block_tokens"), ("executor", "kvcache_chunk_size")
    tokens, other = service.value.serving.block_tokens, service.value.executor.kvcache_chunk_size
    if service.written(*block) and service.written(*chunk) and tokens != other:
        found.append(
            f"serving.block_tokens ({tokens}) is used; executor.kvcache_chunk_size ({other}) is not"
        )
    head = site.value.partitions.get(site.value.head.partition or "")
    if head is not None and head.preemptible:
        found.append(
            f"the head runs in '{site.value.head.partition}', which Slurm may preempt: "
            "streams break when it does"
        )
    return [*found, *_notes_on_parts(service.value, site.value)]


def _notes_on_parts(service: Service, site: Site) -> list[str]:
    """NCCL does not join processes that share a card."""
    return [
        f"pool.{index}: slices and shares of a card form no groups with each other: ask for "
        f"'gpus: 1' and a count of {entry.gpus * entry.count}"
        for index, entry in enumerate(service.pool)
        if entry.gpus > 1 and _is_part(site.gpu_types.get(entry.gpu_type))
    ]


def _is_part(gpu_type: GpuType | None) -> bool:
    """A share, or a MIG slice by its name, as a100_3g.40gb."""
    if gpu_type is None or gpu_type.virtual is not None:
        return False
    gres = gpu_type.gres or f"gpu:{gpu_type.slurm_type or ''}"
    return gres.startswith(("shard", "mps")) or re.search(r"\dg\.\d+gb", gres) is not None
