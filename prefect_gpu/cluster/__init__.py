"""The same runner over all devices of a Ray cluster.

A flow and the nodes:

    flow's process                                   each node with devices
    --------------                                   ----------------------
    `Broker` over `flow_side.ClusterReader`          `node_agent.NodeAgent`, a Ray actor:
      chooses node, device and budget        ───▶      an ordinary `Broker` of the node, on the node's
    `flow_side.ClusterLauncher`                        ledger, confirms what was chosen, or refuses it;
      sends the launch, hears messages       ◀───      its launcher, guardian and readings of devices

- `wire`: the values that travel between the two.
- `node_agent`: what runs on a node. It knows nothing of Ray.
- `flow_side`: what the flow's process knows of the nodes: a reader, a launcher, a store of reservations.
- `membership`: Ray: the connection, the nodes, the actors, the object store. The only module that imports it.
"""
