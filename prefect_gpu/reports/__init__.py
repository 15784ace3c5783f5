"""Reports of processes and flow runs, and the histories of tasks.

Values are in `model`, text and images in `markdown`, `advice` and `timeline`; `publish` sends them to Prefect's API,
`events` names Prefect's events, `history` keeps the memory needs of past runs. Nothing here measures memory or decides
about a task. `runner` imports it.
"""
