"""Rendezvous without a root: contacts and packets in, views and an epoch's store out.

Layout, from the top down (a file imports only what stands above it):
channel.py         framed messages between processes of one host
plain.py           untrusted plain values, read with suspicion
types.py           members, views, verdicts, what an application must answer
store_line.py      a process's own line to its agent's store
keys.py            the job's secret and what is derived from it
interfaces.py      addresses of network interfaces
config.py          settings; every timeout from two numbers
view_delta.py      what a view has that the one before has not
messages.py        what nodes say to each other
wire.py            messages as bytes: tags, limits, encode, decode
events.py          what can happen to the core
effects.py         what the core asks the outside to do
suspicion.py       when a suspect is dead
membership.py      who is alive, suspect, dead, gone
rumours.py         news in large groups
detector.py        probes, indirect probes, proof of death
views.py           whose votes are enough, and which view comes next
hearsay.py         views that others speak of
agreement.py       one decision per epoch
motives.py         why a new view is wanted, and whose turn it is
joining.py         how members come to know each other
fences.py          who is gone by the word of somebody outside
decisions.py       what is decided, as far as this node knows
core.py            all of it as step(event, now) -> effects
discovery.py       where contacts come from
open_files.py      as many as a group's size needs
transport.py       the network as one small interface
zmq_transport.py   the real one
cut_transport.py   one that can be silenced for a while
operator.py        asking and telling a run from outside
store_shard.py     one member's keys of one round
store_copies.py    values that all read, on every member
store_parts.py     an operation on keys of several owners
store_router.py    which shard, and getting there
fence_command.py   a command that tells whether a node is gone
node.py            the loop: receive -> step -> effects
completion.py      when a run has finished
local.py           the line between a node's agent and its other processes
standing.py        what a node can tell of its run
store.py           torch's Store on top
node_store.py      the same beside a node in one process
processes.py       processes that are not our children
autoload.py        env:// without a TCPStore, in torchrun's workers
companion.py       what other distributions add to a torchrun node's agent
agent.py           the process that holds a node's membership under torchrun
torchrun_settings.py  what torchrun was told
torchrun.py        torchrun --rdzv-backend=p2p
faults.py          faults as data, for simulations
invariants.py      what every decided view must fulfil
simulated_node.py  one life of one agent in a simulation
simulated_network.py  time, and what passes from where to where
referee.py         sees everything that happens in a simulation, and objects
testing.py         a simulated cluster of real cores
End of layout.

torch is imported by store.py and torchrun.py only, zmq by zmq_transport.py only.
"""
