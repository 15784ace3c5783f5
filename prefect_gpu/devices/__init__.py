"""The devices of a machine, and their free memory.

There is one module for each kind of device (`nvml`, `host`, `simulated`), the base class that they
share (`reader`), the specification that a user writes (`spec`) and the thread that reads them
(`sampler`). Decisions about the readings are in `prefect_gpu.scheduling`. The folders `frameworks`
and above may import this one.
"""
