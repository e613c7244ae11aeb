"""Settings that all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No test is a measurement: a busy machine fails none.
settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")
