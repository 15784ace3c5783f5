"""What each framework needs so that a policy holds: one file each, behind one protocol.

Adapters say which environment a child starts with, apply caps inside it, read the framework's own
counters, recognise out-of-memory and make values safe to send. They are imported by the parent too,
so a framework is imported inside functions only, by its own adapter alone. They decide nothing:
budgets come from `prefect_gpu.scheduling`, contexts from `prefect_gpu.frameworks.context`.
"""
