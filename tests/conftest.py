"""What all tests share: models, leak checks, hypothesis profiles, the order on few cores."""

from __future__ import annotations

import fcntl
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# One thread per process: the tests run many processes on few cores. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["DS_BUILD_OPS"] = "0"

import leaks
import pytest
from hypothesis import HealthCheck, settings

from flexslurm.cli.model_prepare import cache_dir

# A shell that runs us in the background has us ignore Ctrl-C, and nohup a hangup; the tests, and
# the processes they start, are to hear both.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

ROOT = Path(__file__).resolve().parent.parent
TOKEN = uuid.uuid4().hex
os.environ[leaks.TOKEN_VARIABLE] = TOKEN

_PREPARED = cache_dir() / "models" / "smollm2"
if (_PREPARED / "prepared.json").is_file():
    os.environ.setdefault("FLEXSLURM_TEST_MODEL", str(_PREPARED))

# How fast a busy machine draws examples says nothing of them.
BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("everyday", BUSY, max_examples=40)
settings.register_profile("ci", BUSY, max_examples=40, derandomize=True, database=None)
settings.register_profile("thorough", BUSY, max_examples=1000)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "everyday")
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their directory. Benches are for a quiet machine: `make bench`, not CI."""
    for item in items:
        parts = item.path.relative_to(ROOT).parts
        for name in ("cluster", "sandbox"):
            if name in parts:
                item.add_marker(name)
        if "bench" in parts:
            item.add_marker("long")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """Tests that fill the machine go to a worker by file, two such files at a time; others singly.

    So a file's service and the sandbox's Slurm are started once, and while they wait for
    something, another worker has small tests to do. (xdist's own groups change an attribute of the
    items that pytest no longer reads.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByWeight(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = () if nodeid.startswith(_WITH_ITS_OWN) else _SHARED
            whole = next((place for place in shared if nodeid.startswith(place)), None)
            return whole or (nodeid.partition("::")[0] if _is_heavy(nodeid) else nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            given = [unit for units in self.assigned_work.values() for unit in units.items()]
            busy = sum(_is_heavy(scope) and not all(unit.values()) for scope, unit in given)
            wanted = (scope for scope in self.workqueue if _is_heavy(scope) == (busy < _MOST_HEAVY))
            first = next(wanted, None)
            if first is not None:
                self.workqueue.move_to_end(first, last=False)
            super()._assign_work_unit(node)

    return ByWeight(config, log) if config.getoption("dist") == "loadscope" else None


_MOST_HEAVY = 2
_SHARED = ("tests/cluster/test_engine_", "tests/sandbox/")
"""Files with a fork server or a Slurm that is made once for all of them, but for these."""
_WITH_ITS_OWN = ("tests/sandbox/test_streams_", "tests/sandbox/test_slurm_sandbox_life")


def _is_heavy(scope: str) -> bool:
    return scope.startswith(("tests/cluster/", "tests/sandbox/"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How long it took from each of Slurm's acts until the service knew, as the tests saw it."""
    reports = (report for group in terminalreporter.stats.values() for report in group)
    called = (report for report in reports if getattr(report, "when", "") == "call")
    lines = [str(v) for report in called for k, v in report.user_properties if k == "slurm-act"]
    if lines:
        terminalreporter.section("from Slurm's act to our event")
        for line in sorted(lines):
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each cluster or sandbox test no process, thread, descriptor or shared memory is left.

    What fixtures of a wider scope hold was there before and does not count. Tests of one whole
    service (`shared_service`) replace its processes; the fixture that ends the service looks.
    """
    marks = ("cluster", "sandbox")
    shared = request.node.get_closest_marker("shared_service") is not None
    if shared or not any(request.node.get_closest_marker(mark) for mark in marks):
        yield
        return
    before = leaks.take(TOKEN)
    yield
    found = leaks.left_since(before, TOKEN)
    assert not found, "left behind:\n  " + "\n  ".join(found)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of field cases beside the checkout; tests that want it are skipped without."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip(f"no folder of shared cases at {path}")
    return path


TinyModels = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """`tiny_models(family="llama", **sizes)`: a checkpoint as write_tiny_model makes it, kept."""
    from flexslurm.engine.tiny import write_tiny_model

    kept: dict[tuple[object, ...], Path] = {}

    def get(family: str = "llama", **sizes: object) -> Path:
        key = (family, *sorted(sizes.items()))
        if key not in kept:
            where = tmp_path_factory.mktemp(f"model-{family}") / family
            kept[key] = write_tiny_model(where, family, **sizes)  # type: ignore[arg-type]
        return kept[key]

    return get


@pytest.fixture(scope="session")
def tiny_model(tiny_models: TinyModels) -> Path:
    """The everyday tiny model: llama, 6 layers, 6 heads, 3 KV heads, float64."""
    return tiny_models()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in float32: $FLEXSLURM_TEST_MODEL, or the prepared one.

    It is prepared here when it is missing and pip can fetch it; the tests are skipped otherwise.
    """
    named = os.environ.get("FLEXSLURM_TEST_MODEL")
    if named:
        return Path(named).resolve(strict=True)
    return _prepare_once(_PREPARED)


def _prepare_once(path: Path) -> Path:
    """Prepare the model in the user's cache; other xdist workers wait for the first."""
    from flexslurm.cli.model_prepare import MODELS, prepare_packaged
    from flexslurm.errors import EnvironmentFault

    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "prepare.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return prepare_packaged(MODELS["smollm2"], path, "float32", lambda line: None)
        except EnvironmentFault as error:
            pytest.skip(f"SmolLM2 cannot be prepared here: {error.message}")
