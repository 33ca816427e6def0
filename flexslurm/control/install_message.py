"""What a worker is told to build, put together from a shift's facts; sends nothing."""

from __future__ import annotations

from flexslurm.control.installed import InstalledReplica
from flexslurm.control.phases import InstallSettings, ShiftOrder
from flexslurm.gear import Slot
from flexslurm.messages import Install, Pacing


def install_message(
    slot: Slot, one: InstalledReplica, settings: InstallSettings, order: ShiftOrder,
    *, arena_bytes: int, block_tokens: int, pacing: Pacing | None, hand_over: int, serving: bool,
) -> Install:  # fmt: skip
    """One slot of a new replica. `serving`: a gear does beside, which transfers stand back for."""
    return Install(
        epoch=one.key.epoch,
        model=settings.model,
        dtype=settings.dtype,
        block_tokens=block_tokens,
        slot=slot,
        replica=one.replica,
        peers=one.peers(),
        arena_bytes=arena_bytes,
        timeout_s=settings.install_timeout_s,
        pacing=pacing,
        holders=order.holders,
        hand_over=hand_over,
        turn_layers=max(order.turn_layers, 1),
        rate_bytes_per_s=order.rate_bytes_per_s if serving else 0.0,
        probe=settings.probe,
    )
