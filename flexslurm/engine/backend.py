"""Imports torch, transformers and DeepSpeed the way the engine needs them; builds no stage.

DeepSpeed is loud and keeps a little state in its modules. What has to be set before or right
after its import is set here, once, and every other module gets DeepSpeed through `deepspeed()`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

BUILD_LOCK = threading.Lock()
"""Held while DeepSpeed goes over a model: its layers read class attributes that it sets."""

_import_lock = threading.Lock()
_deepspeed: Any = None


def deepspeed(device_type: str = "cpu") -> Any:
    """DeepSpeed, imported at the first call and quiet.

    The accelerator is DeepSpeed's process-wide choice: a process serves one type of device.
    """
    global _deepspeed  # noqa: PLW0603 - DeepSpeed itself is process-wide
    with _import_lock:
        if _deepspeed is None:
            os.environ.setdefault("DS_ACCELERATOR", device_type)
            os.environ.setdefault("DS_BUILD_OPS", "0")
            # Asking the driver for its devices would spoil CUDA in forked children; NVML does not.
            os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
            logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
            import deepspeed as module
            from deepspeed.inference import engine

            logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
            # Its shared-memory all-reduce ignores the group it is given and spans the world.
            module.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            # init_inference prints its findings; shadow the built-in in that module alone.
            engine.print = _say_nothing
            _deepspeed = module
    return _deepspeed


def _say_nothing(*_: object, **__: object) -> None:
    return


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' advice about configurations to itself while a stage is built."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a service file's name for it."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def warm_up(device_type: str = "cpu") -> None:
    """Import everything and build one small meta model of each family; for the fork server.

    Starts no thread and makes no device context: only metadata is computed. The first real build
    afterwards, in a child, takes tens of milliseconds instead of seconds.
    """
    deepspeed(device_type)
    from flexslurm.engine.families import FAMILIES
    from flexslurm.engine.stage_model import tiny_meta_model

    for family in FAMILIES.values():
        tiny_meta_model(family)
