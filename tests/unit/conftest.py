"""What all unit tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Both ask how long something took, which tells how busy the machine is.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
