"""What kills, stops, starves or misleads flows, on real processes; each ends as its user would want.

| fault | test |
|---|---|
| a thread cannot be started | `test_limits`, `process/test_outcomes`, `process/test_standby`, `unit/broker/test_broker` |
| no thread writes what children print; the stream lacks characters | `test_output` |
| a task waits for its retry as its flow raises | `test_retry_delay` |
| guardians are killed one after the other | `test_guardian` |
| a standby is killed before the first line of its task; three died in a row | `process/test_standby` |
| no descriptor is left | `test_limits` |
| errors and values whose classes fail when they are used | `test_odd_objects` |
| long names, and names that cannot be shown | `test_names` |
| wrong tags, and tags that can never be met | `test_impossible_tags` |
| the API is away, slow, silent, limits the rate or refuses artifacts | `test_api` |
| 200 tasks on a busy machine | `integration/test_scale`: it has no limit of time but for silence |
| processes are stopped, killed, fork, hide in namespaces, ignore signals | `test_processes` |
| folders are full, read-only or missing; values of 4 GiB | `test_files` |
| the ledger is full, damaged, removed, of another release, on a slow disk | `test_ledger`, `unit/broker/test_ledger`, `unit/broker/test_ledger_faults` |
| several flows, containers and users on one machine | `test_many_flows`, `test_two_flows`, `test_containers`, `test_other_users` |
| the driver does not answer, or has lost a device | `test_two_flows`, `unit/devices/test_nvml` |
| limits of tags with GPU tasks | `integration/test_tag_limits` |
| all of it at random moments | `test_chaos` |
"""
