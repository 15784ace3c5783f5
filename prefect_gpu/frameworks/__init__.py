"""What each framework needs so that a policy holds: one adapter each, with one base class.

Adapters choose the environment of a child, apply caps inside it, read the framework's own counters and copy values to
the host. The parent imports adapters too, so each framework is imported inside functions, and by its own adapter only.
Budgets are decided in `prefect_gpu.scheduling`. The folders `processes` and above may import this one.
"""
