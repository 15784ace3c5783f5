"""GPU memory of a running process moved to the host and back, by the CUDA driver's checkpoint calls.

Covers the calls, their order, and the state of the process if one fails. Other folders decide which process is suspended
and when.
"""
