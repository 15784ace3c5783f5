"""Reports of processes and flow runs, and the histories of tasks.

`model` holds the values, `markdown`, `advice` and `timeline` turn them into text and images, `publish` sends
them to Prefect's API, `events` names Prefect's events, and `history` keeps what the runs of a task needed.
Nothing here measures memory or decides about a task. `runner` imports it.
"""
