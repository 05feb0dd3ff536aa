"""Holder: a process that keeps images of weights without an engine, and serves them to engines and peers.

`inventory` decides which images are kept, `image_keeper` fetches and serves one, and `process` runs them and reports to
the planner, which decides which images are wanted.
"""
