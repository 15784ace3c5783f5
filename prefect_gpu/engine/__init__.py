"""Adapters to Prefect's task engine in the flow's process. Only this folder uses undocumented names of Prefect.

This folder holds the engine of GPU tasks, the log and states of a task run, the context of a task run for its child
process, and access to the flow run. `child.prefect_context` is the child process's side. Nothing here decides about
devices or processes. `runner`, `task_runner` and `task_worker` import this folder.

Checked against Prefect 3.6.20, 3.8.8 and 3.9.1: `tests/prefect_names.py` reports names that another version lacks, and
`tests/integration/test_bridge.py` tests each name.
"""
