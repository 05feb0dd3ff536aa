"""HTTP/1.1, TLS and rate limits for peers, storage and the planner's client."""
