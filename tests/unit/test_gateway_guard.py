"""Keys and their file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flexslurm.errors import ConfigError
from flexslurm.gateway.guard import KeyRing, load_api_keys


def write(path: Path, text: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text)
    path.chmod(mode)
    return path


def test_keys_are_read_one_a_line(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", b"# ours\nkey-one\n\n  key-two \r\nkey-one\n")
    assert load_api_keys(path) == {"key-one", "key-two"}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o610])
def test_a_file_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "keys", b"key\n", mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}") as caught:
        load_api_keys(path)
    assert caught.value.hint == f"chmod 600 {path}"


def test_a_file_without_a_usable_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no key"):
        load_api_keys(write(tmp_path / "empty", b"# nothing\n\n"))
    with pytest.raises(ConfigError, match="printable ASCII") as caught:
        load_api_keys(write(tmp_path / "odd", b"good\nnot good\n"))
    assert caught.value.line == 2
    with pytest.raises(ConfigError, match="No such file"):
        load_api_keys(tmp_path / "missing")
    with pytest.raises(ConfigError, match="not a file"):
        load_api_keys(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="not a file"):
        load_api_keys(tmp_path / "pipe")


def test_a_key_ring_admits_bearers_of_whole_keys() -> None:
    ring = KeyRing({"alpha", "beta"})
    assert ring and not KeyRing(())
    assert all(ring.admits(f"{scheme} {key}") for scheme in ("Bearer", "bearer", "BEARER")
               for key in ("alpha", "beta"))  # fmt: skip
    for header in (None, "", "alpha", "Bearer", "Bearer ", "Bearer alph", "Bearer alphaa",
                   "Basic alpha", "Bearer gamma", "Bearer alpha beta"):  # fmt: skip
        assert not ring.admits(header), header
