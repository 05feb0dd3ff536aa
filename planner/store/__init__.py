"""Where the planner keeps what it was told."""
