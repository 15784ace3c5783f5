"""A run of flows under faults at random moments, from a seed: `python -m tests.chaos --seed 1 --seconds 120`.

`plan` decides from the seed what is submitted and which faults come when. `flow` is the program of each flow, with the
bodies of `bodies`; `faults` finds processes and does to them what the plan says; `proxy` stands between the flows and
Prefect's server; `checks` looks at what became of it all; `__main__` holds them together.
"""
