"""What devices exist and what is free on them, now.

One module for each kind of device (`nvml`, `host`, `simulated`), the protocol that they share
(`reader`), the specification that a user writes (`spec`) and the one thread that reads them
(`sampler`). What to do with what is read is decided in `prefect_gpu.scheduling`.
"""
