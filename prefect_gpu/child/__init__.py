"""The task's side of a child process: its start, the body, its measurements and its end.

Runs in child processes only; the parent's side and the messages are in `processes`.
"""
