"""The devices of a machine and their free memory: a reader for each kind of device, `devices=`, and the sampler.

Decisions about the readings are in `prefect_gpu.scheduling`. The folders `frameworks` and above may import this one.
"""
