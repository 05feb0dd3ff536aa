"""Between an instance and the planner: the REST client, the heartbeat, the lease tokens."""
