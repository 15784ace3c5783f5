"""Pure decisions about devices: how much memory a task gets, which request is next, and on which device.

The values here describe devices, requests and reservations; the functions decide over them. There is no clock,
thread, process, file, log or framework: measurements come in as snapshots, decisions go out as values, and
`prefect_gpu.broker` carries them out. Imports the standard library only; every folder above may import it.
"""
