"""The planner's web page: a live view of the fleet.

`files` serves the page (`page/`, and third-party files in `vendor/`), `broadcaster` streams the fleet's state
and changes, which `fleet_diff` computes from the rows of `rows`. The page reads nothing but this stream.
"""
