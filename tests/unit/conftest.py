"""Hypothesis has no say in how fast examples are: on a machine that is busy each may take any time."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")
