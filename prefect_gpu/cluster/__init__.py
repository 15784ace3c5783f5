"""Task runs on the devices of all nodes of a Ray cluster.

    flow's process                                   each node with devices
    --------------                                   ----------------------
    `Broker` over `flow_side.ClusterReader`          `node_agent.NodeAgent`, a Ray actor:
      chooses node, device and budget        ───▶      an ordinary `Broker` of the node, on the node's
    `flow_side.ClusterLauncher`                        ledger, confirms the choice, or refuses it;
      sends the launch, hears messages       ◀───      its launcher, guardian and readings of devices

- `wire`: the values that travel between flow and nodes.
- `node_agent`: the node's side. It does not use Ray.
- `flow_side`: the flow's side: a reader, a launcher and a store of reservations of all nodes.
- `membership`: Ray's connection, nodes, actors and object store. The only module that imports Ray.
"""
