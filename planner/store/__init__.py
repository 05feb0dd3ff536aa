"""Storage of the planner's records."""
