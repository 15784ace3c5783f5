"""Framework adapters: one class for each framework, which applies a task's GPU policy in the task's child process.

Adapters choose the environment of a child, apply caps inside it, read the framework's own counters and copy values to
the host. The parent process imports adapters, too, so each framework is imported inside functions, by its own adapter
only. Budgets are decided in `prefect_gpu.scheduling`. The folders `processes` and above may import this one.
"""
