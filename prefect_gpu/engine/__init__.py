"""Prefect's engine on the parent's side. Only this folder uses names of Prefect outside its documented API.

It holds the engine of GPU tasks, the task run's log and states, its context for a child process, and the flow run
around it. The child's side is `child.prefect_context`. Nothing here decides about devices or processes. `runner`,
`task_runner` and `task_worker` import it.

Checked against Prefect 3.6.20, 3.8.8 and 3.9.1: `tests/prefect_names.py` reports names that another version lacks, and
`tests/integration/test_bridge.py` tests each name.
"""
