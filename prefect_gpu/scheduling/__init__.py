"""Pure decisions about devices: how much, whose turn, which device, wait or never.

Here live the values that describe devices, requests and reservations, and the functions that decide
over them. No clock, thread, process, file, log or framework: what is measured comes in as a
snapshot, what is decided goes out as a value, and `prefect_gpu.broker` carries it out. Standard
library only.
"""
