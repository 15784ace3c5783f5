"""Pure decisions about devices: how much memory a task gets, which request is next, and on which device.

It holds the values that describe devices, requests and reservations, and the functions that decide over
them. There is no clock, thread, process, file, log or framework: what was measured comes in as a snapshot,
what is decided goes out as a value, and `prefect_gpu.broker` carries it out. It imports the standard library
only, and every folder above it may import it.
"""
