"""The private names of torch that groups.py stands on; a new torch that lacks one fails here."""

from __future__ import annotations

import inspect

import torch.distributed as td
from torch.distributed import distributed_c10d as c10d


def test_names_of_the_world() -> None:
    for name in (
        "pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_coalesce_state",
        "pg_to_tag", "tags_to_pg",
    ):  # fmt: skip
        assert isinstance(getattr(c10d._world, name), dict), name
    for function in (c10d._register_process_group, c10d._unregister_process_group):
        assert callable(function)


def test_names_of_gloo() -> None:
    options = td.ProcessGroupGloo._Options()
    for name in ("_devices", "_threads", "_timeout"):
        assert hasattr(options, name), name
    for name in ("create_device", "_set_default_timeout"):
        assert callable(getattr(td.ProcessGroupGloo, name)), name
    for name in ("_register_backend", "_set_default_backend", "_set_group_name"):
        assert callable(getattr(c10d.ProcessGroup, name)), name
    assert c10d.ProcessGroup.BackendType.GLOO != c10d.ProcessGroup.BackendType.NCCL


def test_a_group_in_python_and_the_options_of_its_operations() -> None:
    class Own(c10d.ProcessGroup):
        pass

    group = Own(1, 3)
    assert (group.rank(), group.size()) == (1, 3)
    options = c10d.BroadcastOptions()
    for name in ("rootRank", "rootTensor", "asyncOp"):
        assert hasattr(options, name), name
    assert callable(c10d.AllreduceOptions)
    for name in ("wait", "is_completed"):
        assert callable(getattr(c10d.Work, name)), name


def test_what_a_python_store_must_answer() -> None:
    from flexslurm.engine.rendezvous import HeadStore

    called_from_c = {
        "set", "get", "add", "check", "wait", "delete_key", "multi_get", "multi_set",
        "has_extended_api", "set_timeout", "clone",
    }  # fmt: skip
    assert called_from_c <= set(dir(td.Store))
    own = {name for name, _ in inspect.getmembers(HeadStore, inspect.isfunction)}
    assert called_from_c <= own
