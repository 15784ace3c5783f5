"""Code that runs in child processes only: their start, the task's body, its measurements, and their end.

The parent's code and the messages between parent and child are in `processes`.
"""
