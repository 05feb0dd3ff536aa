"""The planner's decisions and records: no clock, thread, socket or event loop. Times are parameters."""
