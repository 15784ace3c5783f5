"""The broker of a machine's devices: its thread, the queue of requests, the shared ledger and the view of the devices.

The rules of placement are in `scheduling`; this folder applies and carries them out. `runner`, `cluster` and `cli` use it.
"""
