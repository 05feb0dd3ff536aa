"""The planner's page: what the fleet does, at a glance, in a browser.

`files` serves the page (`page/`, and what is vendored in `vendor/`), `feed` sends it what there is and what
changes, which `telling` finds, in the words of `rows`. The page runs in the reader's browser and reads
nothing but the feed.
"""
