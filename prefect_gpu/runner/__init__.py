"""One submitted task, from `submit` to its final state, and Prefect's engine on the parent's side.

What a task is given, which processes it gets and what becomes of each. The devices are handed out by
`broker`, the processes are started by `processes`. Only `task_runner`, `cli` and `testing` import this.
"""
