"""How installs go on: what workers say of them, for whoever looks; never decides anything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flexslurm.config.size_words import show_bytes
from flexslurm.messages import Installed, InstallFailed, InstallProgress, Message

_EPOCHS = 100
"""As many as the controller's history has reports."""


@dataclass(slots=True)
class InstallFigures:
    """One epoch's installs together."""

    workers: int = 0
    weights_bytes: int = 0
    moved_bytes: int = 0
    """Weights that came from other workers."""
    kept_bytes: int = 0
    """Weights that were on their GPU already."""
    read_bytes: int = 0
    """Weights that came from files."""
    load_s: float = 0.0
    """The slowest worker's stage, its weights in it."""
    move_s: float = 0.0
    """The slowest worker's weights from other workers and files."""
    groups_s: float = 0.0
    """The slowest worker's process groups."""

    def add(self, installed: Installed) -> None:
        self.workers += 1
        self.weights_bytes += installed.weights_bytes
        self.moved_bytes += installed.moved_bytes
        self.kept_bytes += installed.kept_bytes
        self.read_bytes += installed.read_bytes
        self.load_s = max(self.load_s, installed.load_s)
        self.move_s = max(self.move_s, installed.move_s)
        self.groups_s = max(self.groups_s, installed.groups_s)


class Installs:
    """Installs under way by worker, and the figures of those that are done by epoch."""

    def __init__(self) -> None:
        self._under_way: dict[str, InstallProgress] = {}
        self._figures: dict[int, InstallFigures] = {}

    def take(self, message: Message) -> None:
        match message:
            case InstallProgress(worker=worker):
                self._under_way[worker] = message
            case Installed(worker=worker, epoch=epoch):
                self._under_way.pop(worker, None)
                self._figures.setdefault(epoch, InstallFigures()).add(message)
                while len(self._figures) > _EPOCHS:
                    del self._figures[min(self._figures)]
            case InstallFailed(worker=worker):
                self._under_way.pop(worker, None)

    def forget_all_but(self, workers: Iterable[str], epoch: int | None) -> None:
        """Keep what these workers said of the epoch that is being installed."""
        kept = set(workers)
        self._under_way = {
            worker: said
            for worker, said in self._under_way.items()
            if worker in kept and said.epoch == epoch
        }

    def figures(self, epoch: int) -> InstallFigures:
        return self._figures.get(epoch, InstallFigures())

    def detail(self, workers: Iterable[str]) -> str:
        """What these workers do, in words: the phase of the slowest, and all their bytes."""
        said = [self._under_way[worker] for worker in workers if worker in self._under_way]
        total = sum(one.total_bytes for one in said)
        done = sum(one.done_bytes for one in said)
        if not said:
            return ""
        phase = min(said, key=lambda one: one.done_bytes / max(one.total_bytes, 1)).phase
        share = f" {10 * (10 * done // total)} % of {show_bytes(total)}" if total else ""
        return f"epoch {said[0].epoch}: {phase}{share}"
