"""The parent's side of child processes, and the wire between both sides.

`launcher` starts children, exchanges messages with them and ends them; `guardian` ends them if the
parent dies. `messages` defines what is sent, `transport` how it travels, and `values` how users' values
are pickled. Which device a child gets, and when, is decided elsewhere; the child's own code is in
`child`, which imports the wire from here.
"""
