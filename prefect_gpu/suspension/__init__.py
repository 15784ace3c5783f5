"""Suspension of a process: its GPU memory is moved to the host and back by the CUDA driver's checkpoint calls.

Covers eligibility, the calls, their order and failures. `scheduling` decides which process is suspended, and when.
"""
