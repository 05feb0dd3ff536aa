"""The controller: announces scale-ups, keeps seeds, opens readiness gates, and tells people by Events."""
