"""Controller: announces scale-ups, protects the last seeds, opens readiness gates, and writes Events."""
