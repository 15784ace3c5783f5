"""Reports on the memory of task processes and flow runs, and the histories from which budgets are learned.

`model` has the values; `markdown`, `advice` and `timeline` make text and images; `publish` sends reports to Prefect's
API; `events` defines Prefect events; `history` stores the memory of past runs. Measuring and scheduling are elsewhere.
`runner`, `engine` and `cli` import this folder.
"""
