"""Client side of the planner: REST client, heartbeat and lease tokens."""
