"""Reads models, profiles and gear tables; the only module of the planner that opens files."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from flexslurm.config.bounded import read_bytes, read_text
from flexslurm.config.site import MeasuredSettings
from flexslurm.errors import ConfigError, ModelError
from flexslurm.planner.links import read_links, with_links
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.problem import StageKind
from flexslurm.planner.profiles import Profile, read_profile
from flexslurm.planner.published import PUBLISHED, config_of
from flexslurm.planner.table import GearTable
from flexslurm.planner.topology import Topology


def load_spec(model: str, dtype: str = "bfloat16", *, kv_dtype: str | None = None) -> ModelSpec:
    """The model called `model`: a checkpoint directory, a config.json or a published name.

    Raises ModelError.
    """
    path = Path(model)
    if not path.exists():
        if model.lower() not in PUBLISHED and ("/" in model or path.suffix == ".json"):
            raise ModelError(
                f"{model}: no such file or directory",
                hint="give a checkpoint directory, a config.json or the name of a published model",
            )
        return ModelSpec.from_config(config_of(model), dtype, kv_dtype=kv_dtype, name=model.lower())
    file = path / "config.json" if path.is_dir() else path
    try:
        config = msgspec.json.decode(read_bytes(file))
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no config.json in it") from None
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ModelError(f"{file}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file}: not a model's configuration")
    name = path.resolve().name if path.is_dir() else path.resolve().parent.name
    try:
        return ModelSpec.from_config(config, dtype, kv_dtype=kv_dtype, name=name)
    except ModelError as error:
        raise ModelError(f"{file}: {error.message}", hint=error.hint) from error


def load_acted(topology: Topology, dtype: str) -> Mapping[str, ModelSpec]:
    """The models that virtual GPUs act out, by the names the site file gives them."""
    names = {gpu.acts_model for gpu in topology.gpus.values()} - {None}
    return {name: load_spec(name, dtype) for name in sorted(filter(None, names))}


def load_profiles(
    paths: Iterable[Path], spec: ModelSpec, topology: Topology
) -> dict[StageKind, Profile]:
    """Profiles of this model, from files and all `*.csv` of directories, by stage kind.

    Those of other models are passed over. Raises ConfigError for a malformed one and for a GPU type
    that the site does not define.
    """
    return {profile.kind: profile for _, profile in own_profiles(paths, spec, topology)}


def own_profiles(
    paths: Iterable[Path], spec: ModelSpec, topology: Topology
) -> list[tuple[Path, Profile]]:
    """As `load_profiles`, with the file that each is in; of one kind the last file counts."""
    files = [
        file for path in paths for file in (sorted(path.glob("*.csv")) if path.is_dir() else [path])
    ]
    found: list[tuple[Path, Profile]] = []
    for file in files:
        profile = read_profile(read_csv(file), str(file))
        if profile.model == spec.name and profile.dtype == spec.dtype:
            topology.gpu(profile.gpu_type)
            found.append((file, profile))
    return found


def load_links(path: Path, topology: Topology) -> Topology:
    """The topology with the link between nodes that was measured. Raises ConfigError."""
    return with_links(topology, read_links(read_csv(path), str(path)))


def load_measured(
    measured: MeasuredSettings, spec: ModelSpec, topology: Topology
) -> tuple[Topology, dict[StageKind, Profile]]:
    """What a site file names: the topology with measured links, and this model's profiles.

    Raises ConfigError for what is malformed or not there, naming file and line.
    """
    profiles = load_profiles(profile_paths(measured), spec, topology)
    if measured.links is not None:
        topology = load_links(Path(measured.links), topology)
    return topology, profiles


def profile_paths(measured: MeasuredSettings) -> tuple[Path, ...]:
    """The profiles that a site file names; raises ConfigError where a path is wrong."""
    if measured.profiles is None:
        return ()
    path = Path(measured.profiles)
    if not path.exists():
        raise ConfigError(
            "there is no such file or directory",
            file=str(path),
            key="measured.profiles",
            hint="flexslurm profile writes them",
        )
    return (path,)


def read_csv(path: Path) -> str:
    """The text of a file of measurements. Raises ConfigError."""
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"cannot read it: {reason}", file=str(path)) from error


def open_table(path: Path) -> GearTable:
    """A gear table, mapped, once its check is right; entries are decoded when they are asked for.

    Raises ConfigError.
    """
    try:
        with path.open("rb") as file:
            data: memoryview | bytes
            try:
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            except ValueError:  # an empty file cannot be mapped
                data = b""
    except OSError as error:
        raise ConfigError(f"cannot read it: {error.strerror}", file=str(path)) from error
    return GearTable(data, str(path))
