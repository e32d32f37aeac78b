"""Rendezvous without a root: contacts and packets in, views and an epoch's store out.

Files import only what stands above them in this list:
types, config, wire, effects, suspicion, membership, detector, views, agreement, motives, core, keys, discovery,
transport, zmq_transport, store_shard, store_router, node, store, testing.
torch is imported by `store` only, zmq by `zmq_transport` only.
"""
