"""Child processes from the parent's side, and the messages between parent and child.

`launcher` starts and ends children and exchanges messages with them; `guardian` ends them if the parent dies.
`messages` defines the messages, `transport` how they travel, and `values` how users' values are pickled. The
child's own code is in `child`, which imports the messages from here. Placement is decided elsewhere.
"""
