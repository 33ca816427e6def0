"""What a worker is told to build, put together from a shift's facts; sends nothing."""

from __future__ import annotations

from collections.abc import Iterable

from flexslurm.control.installed import InstalledReplica
from flexslurm.control.phases import InstallSettings, ShiftOrder
from flexslurm.gear import Slot
from flexslurm.messages import Assemble, Install, Pacing

_ROOM_MARGIN_S = 30.0


def install_message(
    slot: Slot, one: InstalledReplica, settings: InstallSettings, order: ShiftOrder,
    new: Iterable[InstalledReplica],
    *, arena_bytes: int, block_tokens: int, pacing: Pacing | None, hand_over: int, serving: bool,
) -> Install:  # fmt: skip
    """One slot of a new replica, of all that are `new`.

    `serving`: a gear does beside, which transfers stand back for.
    """
    peers = one.peers()
    here = next(peer.address for peer in peers if peer.slot == slot)
    return Install(
        epoch=one.key.epoch,
        model=settings.model,
        dtype=settings.dtype,
        block_tokens=block_tokens,
        slot=slot,
        replica=one.replica,
        peers=peers,
        arena_bytes=arena_bytes,
        timeout_s=settings.install_timeout_s,
        pacing=pacing,
        holders=order.holders,
        hand_over=hand_over,
        turn_layers=max(order.turn_layers, 1),
        host_workers=sum(peer.address == here for each in new for peer in each.peers()),
        rate_bytes_per_s=order.rate_bytes_per_s if serving else 0.0,
        probe=settings.probe,
    )


def assemble_message(install: Install, settings: InstallSettings, ahead_s: float) -> Assemble:
    """The same before there is room: that comes after this phase, PARK and CLOSE, and a moment."""
    bounds_s = ahead_s + settings.park_timeout_s + settings.close_timeout_s
    return Assemble(install=install, room_s=bounds_s + _ROOM_MARGIN_S)
