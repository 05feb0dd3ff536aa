"""`rfork top`: a live view of the fleet.

`poller` polls the planner, `overview` computes the rows, `render` fits them into the terminal, `keys` reads the
keyboard, and `command` is the command.
"""
