"""`rfork top`: the fleet as it is now, again and again.

`overview` makes what is shown of what the planner knows, `picture` fits it into a terminal, `looking` asks
the planner, `keys` reads the keyboard, and `command` is what the user calls.
"""
