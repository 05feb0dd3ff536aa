"""`rfork explain`: explains the duration of a fork, or why it fell back.

`fork_stats` sums up what a fork reported, `time_breakdown` attributes its time to causes, `diagnosis` states
the main cause, `advice` explains errors, `render` draws the result, and `command` is the command.
"""
