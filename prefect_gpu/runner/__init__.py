"""One submitted task, from `submit` to its final state.

This folder decides the budget of a task, runs its processes and evaluates their ends. `broker` reserves devices,
`processes` starts processes. Only `task_runner`, `cli` and `testing` import this folder.
"""
