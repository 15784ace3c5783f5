"""The one shell around `scheduling`: its thread, its queue of requests and its view of the devices.

It carries out the decisions of `scheduling` and makes none itself. `runner` imports it.
"""
