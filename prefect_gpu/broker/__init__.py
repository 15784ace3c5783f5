"""The one shell around `scheduling`: its thread, its queue of requests and its view of the devices.

It carries out what `scheduling` decides and decides nothing itself. `runner` imports it.
"""
