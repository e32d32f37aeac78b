"""plan_recovery: the newest whole version, and where each rank takes it from."""

from __future__ import annotations

from dataclasses import replace

from p2pstate.plan_recovery import NUM_WARM_STEPS, Lineage, Plan, RankReport, StartOver, StateLost, plan_recovery
from p2pstate.types import Part, RoundInfo, SlotRecord, Start, Version, Worker

INFO = RoundInfo(
    "run", "nonce", 3, Start.IN_PLACE, "test", tuple(Worker(r, r % 2, f"n{r // 2}", "::1") for r in range(4))
)


def reports(committed: int = 7, warm: int = 5, newcomers: tuple[int, ...] = ()) -> dict[int, RankReport]:
    return {
        r: RankReport(r, r in newcomers, 2 if r in newcomers else warm, 0 if r in newcomers else committed)
        for r in range(4)
    }


def own(rank: int, node: str, version: Version | None, slot: int | None = None, num_sets: int = 0) -> SlotRecord:
    number = slot if slot is not None else rank * 10 + (version.step if version else 0)
    return SlotRecord(node, number, Part.own(rank), version, 100, f"d{rank}", num_sets)


def rep(piece: int, node: str, version: Version) -> SlotRecord:
    return SlotRecord(node, 1000 + piece, Part.shared((0, 1, 2, 3), piece, 2), version, 50, f"r{piece}", 0)


V6, V7 = Version(2, 6), Version(2, 7)
BOTH = {0: ("n0", "n1"), 1: ("n0", "n1"), 2: ("n1", "n0"), 3: ("n1", "n0")}  # own node, buddy's node


def everywhere(version: Version) -> list[SlotRecord]:
    return [own(rank, node, version) for rank, holders in BOTH.items() for node in holders]


def test_plan_with_everything_whole_takes_the_newest_from_the_own_node() -> None:
    plan = plan_recovery(INFO, reports(), everywhere(V6) + everywhere(V7))
    assert isinstance(plan, Plan)
    assert plan.version == V7
    assert plan.steps_lost == 0
    assert all(fetch.sender is None and fetch.node == INFO.node_of(fetch.rank) for fetch in plan.fetches)


def test_plan_does_not_resume_a_version_in_which_ranks_had_begun_to_train_apart() -> None:
    apart = [replace(r, balance={0: 3, 1: -1}.get(r.part.members[0], 0)) for r in everywhere(V7)]
    plan = plan_recovery(INFO, reports(), everywhere(V6) + apart)
    assert isinstance(plan, Plan)
    assert plan.version == V6
    assert "differ in what they were to hold alike" in plan.reason
    even = [replace(r, balance={0: 1, 1: -1}.get(r.part.members[0], 0)) for r in everywhere(V7)]
    assert plan_recovery(INFO, reports(), everywhere(V6) + even).version == V7  # type: ignore[union-attr]


def test_plan_with_one_shard_missing_goes_back_to_the_version_that_everybody_has() -> None:
    records = everywhere(V6) + [r for r in everywhere(V7) if r.part != Part.own(2)]
    plan = plan_recovery(INFO, reports(), records)
    assert isinstance(plan, Plan)
    assert plan.version == V6
    assert plan.steps_lost == 1
    assert "no live node has shard 2" in plan.reason


def test_plan_after_a_node_died_pulls_from_the_buddies_of_its_ranks() -> None:
    records = [r for r in everywhere(V7) if r.node == "n1"]
    plan = plan_recovery(INFO, reports(newcomers=(0, 1)), records)
    assert isinstance(plan, Plan)
    assert {(f.rank, f.sender) for f in plan.fetches} == {(0, 2), (1, 3), (2, None), (3, None)}


def test_plan_with_a_corrupt_slot_uses_the_other_copy() -> None:
    records = everywhere(V7)
    bad = next(r for r in records if r.part == Part.own(0) and r.node == "n0")
    plan = plan_recovery(INFO, reports(), records, corrupt=frozenset({(bad.node, bad.slot)}))
    assert isinstance(plan, Plan)
    assert next(f for f in plan.fetches if f.rank == 0).node == "n1"


def test_plan_ignores_what_a_later_round_went_back_behind() -> None:
    records = everywhere(V6) + everywhere(V7)
    plan = plan_recovery(INFO, reports(), records, [Lineage(3, V6)])
    assert isinstance(plan, Plan)
    assert plan.version == V6


def test_plan_prefers_a_later_round_over_a_later_step() -> None:
    records = everywhere(V7) + [own(r, n, Version(3, 6), slot=500 + r) for r, holders in BOTH.items() for n in holders]
    plan = plan_recovery(INFO, reports(), records, [Lineage(3, V6)])
    assert isinstance(plan, Plan)
    assert plan.version == Version(3, 6)


def test_plan_with_replicated_parts_needs_all_of_them_on_one_node() -> None:
    owns = [own(rank, node, V7, num_sets=1) for rank, holders in BOTH.items() for node in holders]
    split = plan_recovery(INFO, reports(), [*owns, rep(0, "n0", V7), rep(1, "n1", V7)])
    assert isinstance(split, StateLost)
    plan = plan_recovery(INFO, reports(newcomers=(0, 1)), [*owns, rep(0, "n1", V7), rep(1, "n1", V7)])
    assert isinstance(plan, Plan)
    assert [f.sender for f in plan.of(0) if f.part.kind == "shared"] == [2, 2]
    assert [f.sender for f in plan.of(3) if f.part.kind == "shared"] == [None, None]


def test_plan_with_shards_replicated_between_nodes_takes_the_dead_nodes_from_their_twins() -> None:
    """HSDP: ranks 0 and 2, and 1 and 3, hold the same shard; each node has each shard once."""
    owns = [own(rank, node, V7, num_sets=1) for rank, holders in BOTH.items() for node in holders]
    shards = [
        SlotRecord("n1", 2000 + first, Part.shared((first, first + 2), 0, 1), V7, 50, f"s{first}", 0)
        for first in (0, 1)
    ]
    plan = plan_recovery(INFO, reports(newcomers=(0, 1)), owns + shards)
    assert isinstance(plan, Plan)
    assert [(f.part.members, f.sender) for f in plan.of(0) if f.part.kind == "shared"] == [((0, 2), 2)]
    assert [(f.part.members, f.sender) for f in plan.of(3) if f.part.kind == "shared"] == [((1, 3), None)]
    lost = plan_recovery(INFO, reports(newcomers=(0, 1)), owns + shards[:1])
    assert isinstance(lost, StateLost)
    assert "rank 1 shares" in lost.reason


def test_plan_with_a_half_written_slot_does_not_count_it() -> None:
    records = everywhere(V6) + [own(0, "n0", None)] + [r for r in everywhere(V7) if r.part != Part.own(0)]
    plan = plan_recovery(INFO, reports(), records)
    assert isinstance(plan, Plan)
    assert plan.version == V6


def test_plan_without_any_version_starts_over() -> None:
    decision = plan_recovery(INFO, reports(committed=0), [])
    assert isinstance(decision, StartOver)
    assert decision.start == Start.FRESH


def test_plan_without_a_copy_of_a_shard_does_not_start_anew_but_says_what_is_lost() -> None:
    records = [r for r in everywhere(V6) + everywhere(V7) if r.part != Part.own(1)]
    decision = plan_recovery(INFO, reports(newcomers=(0, 1)), records)
    assert isinstance(decision, StateLost)
    assert "no live node has shard 1" in decision.reason
    assert "step 7" in decision.reason


def test_plan_with_all_vaults_empty_is_lost_if_anybody_remembers_a_step() -> None:
    assert isinstance(plan_recovery(INFO, reports(committed=9, newcomers=(0, 1)), []), StateLost)


def test_plan_for_survivors_that_are_not_warm_restarts_all_from_memory() -> None:
    version = Version(2, 1)
    decision = plan_recovery(INFO, reports(committed=1, warm=1), everywhere(version))
    assert isinstance(decision, StartOver)
    assert decision.start == Start.RESTART
    assert "resume from memory at step 1" in decision.reason
    assert isinstance(plan_recovery(INFO, reports(committed=1, warm=NUM_WARM_STEPS), everywhere(version)), Plan)


def test_plan_at_the_initial_state_starts_anew_whatever_was_committed() -> None:
    """A first step that is done again after rehearsals would not be the first step's bits."""
    decision = plan_recovery(INFO, reports(committed=3), everywhere(Version(2, 0)))
    assert isinstance(decision, StartOver)
    assert decision.start == Start.FRESH


def test_plan_keeps_the_resumed_version_when_it_is_in_two_places() -> None:
    plan = plan_recovery(INFO, reports(), everywhere(V6) + everywhere(V7))
    assert isinstance(plan, Plan)
    assert plan.keep == V7


def test_plan_keeps_the_version_that_is_in_two_places_when_the_resumed_one_is_not() -> None:
    """Else the slots of the only version that outlives the next loss of a node would be written."""
    just_whole = [own(rank, nodes[0], V7) for rank, nodes in BOTH.items()]
    plan = plan_recovery(INFO, reports(), everywhere(V6) + just_whole)
    assert isinstance(plan, Plan)
    assert (plan.version, plan.keep) == (V7, V6)


def test_plan_keeps_the_resumed_version_when_one_node_has_all_that_is_left() -> None:
    left = [record for record in everywhere(V6) + everywhere(V7) if record.node == "n1"]
    plan = plan_recovery(INFO, reports(newcomers=(0, 1)), left)
    assert isinstance(plan, Plan)
    assert (plan.version, plan.keep) == (V7, V7)


def test_plan_keeps_a_version_whose_shared_leaves_are_on_two_nodes() -> None:
    holders = [(piece, node) for piece in (0, 1) for node in ("n0", "n1")]
    owns = [own(r, n, v, num_sets=1) for v in (V6, V7) for r, nodes in BOTH.items() for n in nodes]
    alike = [rep(piece, node, V6) for piece, node in holders] + [rep(piece, "n0", V7) for piece in (0, 1)]
    plan = plan_recovery(INFO, reports(), owns + alike)
    assert isinstance(plan, Plan)
    assert (plan.version, plan.keep) == (V7, V6)


def test_plan_of_every_rank_is_the_same_whatever_the_order_of_records() -> None:
    records = everywhere(V6) + everywhere(V7)
    assert plan_recovery(INFO, reports(), records) == plan_recovery(INFO, reports(), records[::-1])


def test_plan_goes_on_in_place_only_where_wrappers_have_come_equally_far() -> None:
    new, changing, settled = b"\0", b"\1", b"\2"
    survivor, newcomer = 0, 1
    for stages, in_place in (
        ({survivor: settled, newcomer: settled}, True),
        ({survivor: new, newcomer: new}, True),
        ({survivor: settled, newcomer: new}, False),
        ({survivor: new, newcomer: settled}, False),
        ({survivor: settled + new, newcomer: settled + settled}, False),
        ({survivor: changing, newcomer: changing}, False),
    ):
        told = {
            rank: replace(report, wrappers=stages[newcomer if rank == 3 else survivor])
            for rank, report in reports(newcomers=(3,)).items()
        }
        plan = plan_recovery(INFO, told, everywhere(V7))
        assert isinstance(plan, Plan) == in_place, stages
        assert in_place or (isinstance(plan, StartOver) and "DistributedDataParallel" in plan.reason)


def test_plan_of_newcomers_only_does_not_ask_how_far_their_wrappers_are() -> None:
    told = {rank: replace(r, wrappers=bytes([rank % 3])) for rank, r in reports(newcomers=(0, 1, 2, 3)).items()}
    assert isinstance(plan_recovery(INFO, told, everywhere(V7)), Plan)
