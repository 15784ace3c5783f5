"""From samples to something a person reads: the report of one process, and of one flow run.

`model` holds the values, `markdown` and `timeline` turn them into text and SVG, `publish` brings
them to Prefect's API. Nothing here measures or decides.
"""
