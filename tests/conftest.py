"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# How long an input takes to make says how busy the machine is, nothing about what is tested; the
# first one also pays for hypothesis' own tables.
settings.register_profile(
    "shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared machine")
