"""The parent's code for child processes, and the messages between parent and child.

`launcher` starts and ends children and exchanges messages with them; `guardian` ends them if the parent dies. The
child's own code is in `child`, pickling and bytes in `values`, and placement in `scheduling`.
"""
