"""GPU memory of a running process moved to the host and back, by the CUDA driver's checkpoint calls.

It covers the calls, their order, and what they leave of the process if one fails. Which process is suspended when is not
decided here.
"""
