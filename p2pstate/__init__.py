"""Checkpointless training: every rank's state lives in two machines' memory, current after every step.

In: a training loop, the machines it runs on. Out: the same training, bit for bit, whatever process or node dies. See
the README for how to use it.

Layout, from the top down (a file imports only what stands above it):
    errors.py               what can go wrong, by what the reader can do about it
    autoload.py             what torch runs when it has been imported
    sizes.py                bytes, as a person reads them
    arguments.py            command lines, as all commands take them
    types.py                versions, parts, slot records, rounds
    placement.py            pure: whose nodes keep whose copies
    interval.py             pure: how many steps lie between two versions
    versions.py             pure: what becomes a version, what is kept, which slot is next
    plan_recovery.py        pure: inventories -> what everybody resumes
    redundancy.py           pure: who writes what all ranks hold alike
    stats.py                what protection costs
    trace.py                what a worker is doing, for its agent to read
    observe/goodput.py      observe/: where the time went
    observe/meter.py
    observe/ledger.py
    observe/reading.py
    observe/incidents.py
    observe/skew.py         pure: who is waited for
    observe/timeline.py     pure: what ranks were doing when
    observe/history.py
    observe/svg.py
    observe/report.py       p2pstate report
    observe/perfetto.py
    observe/spans.py        OpenTelemetry
    observe/tracking.py     a tracker's numbers
    observe/live.py         what a running node knows
    observe/metrics.py
    observe/whole.py        pure: what all nodes told, put together
    observe/page.py
    observe/top.py          p2pstate top
    observe/command.py
    memory.py               what is left of the host's memory, and what bounds it
    slots.py                the memory of one part of one version
    memory_need.py          pure: whether all copies fit
    vault.py                all slots of a node
    groups/uncompiled.py    what torch.compile is to leave alone
    state/errors.py         state/: live objects <-> named leaves <-> bytes
    state/rng.py
    state/standard.py       values that a line of text says exactly
    state/encoding.py       plain values as bytes that depend on nothing else
    state/lengths.py
    state/decoding.py
    state/quantised.py
    state/leaves.py
    state/holders.py
    state/forms.py
    state/spreads.py        DTensors where no parameter lends its mesh
    state/sameness.py
    state/chunks.py
    state/layout.py
    state/hashed_copy.py
    state/naming.py
    state/buffers.py
    state/comm_hooks.py
    state/reducers.py
    state/growth.py
    state/collecting.py
    state/rebuilding.py
    state/attributes.py
    state/carried.py
    state/optimizers.py
    state/inner.py
    state/objects.py
    state/restore.py
    state/training_state.py
    cards/card.py           cards/: a stream beside the training's, pinned memory
    cards/pinning.py        slots that a card copies to
    cards/gather.py         from a card to slots, while training goes on
    groups/nccl_settings.py  what torch is to do about NCCL errors
    groups/journal.py       what collectives returned at the start
    groups/waiting.py       waits that end with the round
    groups/nccl.py          NCCL of one group, on one card
    groups/status.py        the process's one error flag
    groups/sockets.py       finding and cutting connections
    groups/echo.py          what a collective returns when nobody is there
    groups/works.py         handles that turn errors into values
    groups/inner.py         the real connections of one round
    groups/transport.py     what carries bulk state: messages and promises
    groups/mesh.py          one TCP connection to every rank
    groups/tcp.py           bulk state over them
    groups/group_transport.py  bulk state over a process group (cards)
    groups/group.py         the group that models hold
    groups/registry.py      all groups, connected together
    groups/gate.py          the vote
    groups/install.py       torch's entry points
    cards/copies.py         versions on their way from a card, taken for good or not
    finite.py               whether gradients are numbers
    settings.py             what all ranks ask for alike
    meeting.py              whether all do, and have the memory for it
    worker/link.py          the line to the agent
    worker/farewell.py      a worker that is asked to go
    worker/context.py       this worker's place in the run
    worker/start_journal.py  what collectives returned at the start, sent to the agent
    unprotected.py          optimizers that step where nothing keeps what they change
    footprint.py            how much of the live state is unique
    description.py          pure: what is protected, where, and what the loss of a node does
    image_format.py         data, tail and footer of one part of one version
    live_body.py            bytes that are sent from live state
    sampling.py             whether what should be alike is, at once
    replicas.py             whether what should be alike is
    repairing.py            what differs from most, put right
    capture.py              live state -> own slots
    replicate.py            own slots -> the buddies
    durable/files.py        durable/: versions on disk
    durable/storage.py      where they are: the interface, a directory
    durable/manifest.py
    durable/remote.py       object storage, through a stage
    durable/keys.py
    durable/division.py     pure: who writes what
    durable/catalog.py      what is on disk, and what of it is good
    durable/dcp_write.py    slots -> files
    durable/publish.py      all nodes' files -> a checkpoint
    durable/dcp_read.py
    durable/resize.py       pure: a checkpoint for another number of ranks
    durable/session.py      pure: one save, as one node sees it
    durable/patience.py     storage that does not answer
    durable/resume.py       which checkpoint, and a rank's state out of it
    durable/export.py       the weights alone, as safetensors
    durable/command.py      p2pstate checkpoints, p2pstate export
    durable/writer.py       the process that touches storage
    gradients.py            forgetting a discarded step
    rehearsal.py            what a newcomer does alone
    saving.py               which version goes to disk
    user_errors.py          what an exception in a step means
    loop_exit.py            how a for loop ends
    block.py                one block, as the user sees it
    interrupting.py         a discarded step ends early
    hooks.py                what all ranks do between steps
    protection.py           what is captured when, and kept
    resume.py               a checkpoint -> the live state
    feed.py                 the batches
    joined.py               how the joining of a round ends
    loops.py                pure: which of a script's training loops is resumed
    recover_disk.py         a round that resumes a checkpoint
    recover.py              a round -> the same version everywhere
    rounds.py               from one round to the next
    stepping.py             when optimizers step
    reports.py              what a rank tells of its steps
    loop_end.py             all ranks leave at one step
    departure.py            one that is asked to go
    counting.py             steps, where several loops follow each other
    blocks.py               one block after the other
    steps.py                the loop
    data/shuffle_buffer.py  samples that a data set's state leaves out
    replicator.py           the public object
    restart.py              a function that is run again, without replication
    worker/entering.py      an assignment -> torch prepared
    worker/attaching.py     a worker that torchrun started
    worker/script.py        a user's script in a forked process
    worker/stand_in.py      p2pstate-python, in place of a worker that torchrun starts
    worker/main.py          from fork to exit
    agent/output.py         writing without making the agent wait
    agent/events.py         what happened, as JSON lines
    observe/alone.py        the meter in any script
    agent/template.py       the process workers are forked from
    agent/worker_output.py  what a worker writes
    agent/held.py           a process that may hold a rank
    agent/helpers.py        processes of a node without a rank
    agent/supervisor.py     the node's workers
    agent/pausing.py        letting workers finish their step
    agent/vitals.py         what the kernel says of a process
    agent/hang.py           pure: who is at fault when a job stands still
    agent/watchdog.py       finding and ending hung workers
    agent/job.py            what a node's workers run
    agent/describing.py     what a run was started with
    agent/budget.py         pure: how often a run may fail
    agent/rounds.py         pure: how a round begins
    agent/save_writer.py    the process that writes them, as its agent sees it
    agent/data_ends.py      a rank that has no batch any more, told to those that wait for it
    agent/saves.py          saves, as the agent runs them
    agent/draining.py       what goes to disk before the end
    agent/resizing.py       on fewer nodes, and on as many as before
    agent/sentences.py      what a person reads
    agent/weaknesses.py
    agent/round_state.py    how far the run has come, and whether it needs a round
    agent/journals.py       for newcomers: what collectives returned at the start
    agent/rehearsals.py     spares that have run the script
    agent/requests.py       what workers ask of their agent
    agent/status.py         what an operator is told
    agent/health.py         what probes look at
    agent/chaos.py          faults on request
    agent/page_server.py    the page, status and metrics over HTTP
    agent/serving.py        what all nodes know, for the page
    agent/ranks.py          which process holds which rank, round by round
    agent/waiting.py        a node's patience
    agent/agent.py          rendezvous, vault and workers together
    agent/attached.py       the workers of a torchrun node
    agent/preloaded.py      what they are forked from
    agent/companion.py      the vault of a torchrun node
    data/permutation.py     data/: p2pstate.data, which uses nothing else of p2pstate
    data/order.py
    data/split.py
    data/sampler.py
    data/files.py
    data/shards.py
    data/tokens.py
    data/pack.py
    data/counters.py
    data/remote.py
    data/chunks.py
    data/cache.py
    data/streams.py
    data/memfd.py
    data/fetching.py
    data/worker.py
    data/pool.py
    data/positions.py
    data/replayed.py
    data/engines.py
    data/device.py
    data/loader_stats.py
    data/loader.py
    data/command.py
    planning/units.py       planning/: p2pstate plan
    planning/inputs.py
    planning/formulas.py
    planning/simulation.py
    planning/measured.py
    planning/plan.py
    planning/text.py
    planning/plot.py
    planning/command.py
    options.py              what several commands share
    doctor.py               is this host ready?
    witness.py              a member that only votes
    verdict.py              how a run ended
    operating.py            p2prun status, stop, assume-dead
    chaos.py                p2pstate chaos
    operator/types.py       operator/: p2pstate-operator, for Kubernetes
    operator/decide.py      pure: what to do about a run
    operator/objects.py     pure: its Kubernetes objects
    operator/reading.py     pure: objects -> values -> status
    operator/cluster.py     the API server
    operator/reconcile.py   one look at a run
    operator/worker.py      which run to look at next
    operator/command.py
    operator/gone.py        the pods' fencing command
    integrations/accelerate.py   a loop with Accelerate
    integrations/huggingface.py  their Trainer, with its steps in a Replicator
    integrations/tensorboard.py
    integrations/mlflow.py
    integrations/lightning.py    Lightning's, with a callback
    integrations/torchtitan.py   torchtitan's, with a checkpoint manager
    keygen.py               p2pstate keygen
    tools.py                p2pstate
    cli.py                  p2prun
    __main__.py             python -m p2pstate
End of layout.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    raise ImportError(
        f"p2pstate needs Linux (memfd, pidfd, parent-death signals); this is {sys.platform}: run it in a Linux "
        "container or virtual machine"
    )

if TYPE_CHECKING:
    from p2pstate.replicator import Replicator
    from p2pstate.restart import restartable

__version__ = "0.1.0"
__all__ = ["Replicator", "init_process_group", "restartable"]


def init_process_group(**kwargs: Any) -> None:
    """Create the default process group, from connections that p2pstate can replace while the model lives.

    Takes the keyword arguments of ``torch.distributed.init_process_group`` except ``backend``, ``store``, ``rank`` and
    ``world_size``, which the launcher gives. Raises ConfigError in a process that neither p2prun nor torchrun with the
    backend ``p2p`` has started.
    """
    import torch.distributed as dist

    from p2pstate.unprotected import warn_of_unprotected_steps
    from p2pstate.worker.attaching import attach
    from p2pstate.worker.context import current

    attach()
    context = current()
    dist.init_process_group("p2p", **kwargs)
    warn_of_unprotected_steps(context)


def __getattr__(name: str) -> Any:
    # Agents import this package too, and never need torch.
    if name == "Replicator":
        from p2pstate.replicator import Replicator

        return Replicator
    if name == "restartable":
        from p2pstate.restart import restartable

        return restartable
    raise AttributeError(f"module 'p2pstate' has no attribute {name!r}")
