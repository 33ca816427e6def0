"""Which gear follows an operator's, once the choice is given back; never starts a shift.

The operator's word is what the gear in place rests on. When it is taken back, nothing speaks for
that gear any more: the best gear by estimate is gone to at once. From then on it is left only for
what is measured, as any other.
"""

from __future__ import annotations

from flexslurm.control.choices import Decision, Observation, PolicySettings
from flexslurm.control.policy import decide, same_layout
from flexslurm.gear import Gear


def best_at_once(seen: Observation, settings: PolicySettings) -> Decision:
    """The default plan where it fits, else the best gear by estimate; no gap or gain is asked for.

    Where that gear is in place, or a loss or a notice forces a shift, the policy decides as ever.
    """
    if seen.current is None or seen.lost or seen.leaving:
        return decide(seen, settings)
    usual = [o.gear for o in seen.options if o.gear.name == settings.default_plan]
    if isinstance(seen.best, Gear) and settings.allows(seen.best):
        usual.append(seen.best)
    if not usual or same_layout(usual[0], seen.current):
        return decide(seen, settings)
    best = usual[0]
    what = "the default plan" if best.name == settings.default_plan else "the best by estimate"
    rate = f"{best.estimates.tokens_per_s:.0f} tokens/s"
    return Decision(best, f"the choice was given back: {best.name} is {what} ({rate})")
