"""Prefect's engine on the parent's side: the names of Prefect outside its documented API.

The engine of GPU tasks and what it runs in place of a body, the task run with its log and states, its context for a child, and
the flow run around it. The child's side is `child.prefect_context`. Nothing here decides about devices or processes.
`runner`, `task_runner` and `task_worker` import it.

Checked against Prefect 3.6.20, 3.8.8 and 3.9.1: `tests/prefect_names.py` says what another version has no more, and
`tests/integration/test_bridge.py` has a test for each other name.
"""
