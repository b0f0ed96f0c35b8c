"""Steps of the tiny model in the oracle's words: token by token, link by link.

Plans are taken as they are; ``tests/planning`` looks after them. All of it is for tp = 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise

from planning.oracles import homes_of, keys_needed, placed_rows, read_tasks
from sim.oracle import (
    DRAIN,
    Attended,
    Instruction,
    Named,
    OracleTransfer,
    Pass,
    Program,
    name,
    play,
    programs_of,
    usual_pipeline,
)
from sim.tiny import (
    AFTER,
    AFTER_S,
    BEFORE,
    BEFORE_S,
    END,
    HEAD_S,
    KV_BYTES,
    LAYER,
    OPTIMIZER_S,
    PAIR_S,
    Q_BYTES,
)

from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_plan import StepPlan
from distca.planning.plan import Plan
from distca.sim.cluster import Cluster, Link
from distca.sim.packing import PackedPlan

# -- transfers -----------------------------------------------------------------------------------

Flows = Mapping[tuple[int, int], int]  # bytes from rank to rank


def link_s(link: Link, num_bytes: float) -> float:
    return link.latency_s + num_bytes / link.bytes_per_s if num_bytes else 0.0


def point_to_point(flows: Flows, cluster: Cluster, tp: int = 1) -> OracleTransfer | None:
    """Each rank has a port into its node and one out of it; each sends and receives at once."""
    per_node = cluster.gpus_per_node // tp
    loads: dict[int, Counter[tuple[str, str]]] = {}
    partners: dict[int, set[int]] = {}
    for (source, target), num_bytes in flows.items():
        if num_bytes == 0:
            continue
        where = "near" if source // per_node == target // per_node else "far"
        loads.setdefault(source, Counter())[where, "sent"] += num_bytes
        loads.setdefault(target, Counter())[where, "received"] += num_bytes
        partners.setdefault(source, {source}).add(target)
        partners.setdefault(target, {target}).add(source)
    if not loads:
        return None
    links = {"near": cluster.inside, "far": cluster.across}
    return OracleTransfer(
        {
            rank: max(link_s(links[where], n) for (where, _), n in load.items())
            for rank, load in loads.items()
        },
        {rank: frozenset(others) for rank, others in partners.items()},
    )


def collective(members: Sequence[int], received: float, cluster: Cluster) -> OracleTransfer | None:
    """So many bytes for every member, in a ring."""
    if len(members) == 1 or not received:
        return None
    seconds = link_s(ring(len(members), cluster), received)
    return OracleTransfer(
        dict.fromkeys(members, seconds), dict.fromkeys(members, frozenset(members))
    )


def ring(members: int, cluster: Cluster) -> Link:
    """Several rings fill a node, and stay inside; or one fills several, and what a node lacks comes
    in once, over all its ports; or some lie across two nodes, with one port between them."""
    per_node = cluster.gpus_per_node
    if per_node % members == 0:
        return cluster.inside
    ports = per_node if members % per_node == 0 else 1
    slower = min(cluster.inside.bytes_per_s, ports * cluster.across.bytes_per_s)
    return Link(slower, cluster.across.latency_s)


def together(transfers: Sequence[OracleTransfer | None]) -> OracleTransfer | None:
    """Of groups that have nothing to do with each other."""
    there = [transfer for transfer in transfers if transfer is not None]
    if not there:
        return None
    return OracleTransfer(
        {rank: s for one in there for rank, s in one.seconds.items()},
        {rank: p for one in there for rank, p in one.partners.items()},
    )


# -- the tiny model ------------------------------------------------------------------------------


def attended(plan: Plan, ranks: int, cluster: Cluster, *, backward: bool) -> Attended:
    """One layer of a plan, token by token."""
    tasks = read_tasks(plan, ["causal"] * plan.placement.num_documents, backward=backward)
    homes = homes_of(placed_rows(plan))
    own, remote = [0.0] * ranks, [0.0] * ranks
    for task in tasks:
        needed = {homes[task.document, task.start]}
        needed |= {homes[task.document, key] for key in task.keys}
        into = own if needed == {task.server} else remote
        into[task.server] += task.pairs * PAIR_S[backward]
    out, back = flows(plan, ranks, backward=backward)
    return Attended(own, remote, point_to_point(out, cluster), point_to_point(back, cluster))


def flows(plan: Plan, ranks: int, *, backward: bool) -> tuple[Flows, Flows]:
    """Forward: q and keys out, o back. Backward: q, o, do, two floats and keys out, and back dq
    and the gradients of keys."""
    tasks = read_tasks(plan, ["causal"] * plan.placement.num_documents, backward=backward)
    homes = homes_of(placed_rows(plan))
    out: Counter[tuple[int, int]] = Counter()
    back: Counter[tuple[int, int]] = Counter()
    for task in tasks:
        for position in range(task.start, task.stop):
            home = homes[task.document, position]
            if home != task.server:
                out[home, task.server] += 3 * Q_BYTES + 2 * 4 if backward else Q_BYTES
                back[task.server, home] += Q_BYTES
    for server, keys in enumerate(keys_needed(tasks, ranks)):
        for key in keys:
            if homes[key] != server:
                out[homes[key], server] += KV_BYTES
                back[server, homes[key]] += KV_BYTES if backward else 0
    return out, back


def linear_parts(tokens: float, layers: int, head: bool, *, backward: bool) -> list[float]:
    """Seconds of each seam of some layers; backward goes through the same seams from the end."""
    seams = [tokens * BEFORE_S]
    seams += [tokens * (AFTER_S + BEFORE_S)] * (layers - 1)
    seams += [tokens * (AFTER_S + (HEAD_S if head else 0.0))]
    return [2 * seconds for seconds in reversed(seams)] if backward else seams


def step_of(
    step: StepPlan, parallel: MeshShape, cluster: Cluster, layers: int
) -> tuple[list[Program], Named]:
    """A step of the tiny model in ticks: tick by tick, on every rank."""
    ranks, width, stages = parallel.num_plan_ranks, parallel.workers_per_stage, parallel.pp
    programs: list[Program] = [[] for _ in range(ranks)]
    named: Named = {}

    def everywhere(*instructions: Instruction) -> None:
        for program in programs:
            program.extend(instructions)

    def over_workers(num_bytes: int) -> OracleTransfer | None:
        received = num_bytes * (width - 1) / width
        groups = [range(stage * width, (stage + 1) * width) for stage in range(stages)]
        return together([collective(group, received, cluster) for group in groups])

    once = stages > 1 or parallel.keep_weights
    # Of a pipeline, that of its largest stage.
    largest = -(-layers // stages) * LAYER + (2 * END if stages == 1 else END)
    if once and width > 1:
        for what, elements in (("one layer", LAYER), ("the others", largest - LAYER)):
            name(named, ("weights", what), over_workers(2 * elements))
            name(named, ("gradients", what), over_workers(4 * elements))
        everywhere(("send", ("weights", "one layer")), ("wait", ("weights", "one layer")))
        everywhere(("send", ("weights", "the others")))
    seams = [END + BEFORE, *[LAYER] * (layers - 1), AFTER + END]
    known: dict[tuple[int, bool], Attended] = {}

    def layer(plan: Plan, backward: bool) -> Attended:
        key = (id(plan), backward)
        if key not in known:
            known[key] = attended(plan, ranks, cluster, backward=backward)
        return known[key]

    sent: dict[tuple[str, int, int], Hashable] = {}
    for number, (tick, slots) in enumerate(zip(step.schedule.ticks, step.slots, strict=True)):
        backward = tick.phase == "B"
        if once and width > 1 and number == len(step.slots) - 1:
            everywhere(("send", ("gradients", "the others")))
        halves = len(step.micro_batches[0])
        parts = [[[0.0] * ranks for _ in range(halves)] for _ in range(len(slots) + 1)]
        for stage, m in enumerate(tick.micro_batches):
            if m is None:
                continue
            start, stop = step.stages[stage]
            for half, placed in enumerate(step.micro_batches[m]):
                for place, tokens in enumerate(placed.placement.tokens.tolist()):
                    rank = stage * width + place
                    found = linear_parts(
                        tokens, stop - start, stage == stages - 1, backward=backward
                    )
                    for seam, seconds in enumerate(found):
                        parts[seam][half][rank] = seconds
            if (tick.phase, stage, m) in sent:
                for rank in range(stage * width, (stage + 1) * width):
                    programs[rank].append(("wait", sent[tick.phase, stage, m]))
        order = seams[::-1] if backward else seams
        attention = [[layer(plan, backward) for plan in slot] for slot in slots]
        if backward:  # the last half comes first
            parts, attention = ([halves[::-1] for halves in all_] for all_ in (parts, attention))
        one = Pass(
            parts,
            attention,
            () if once else [over_workers(2 * n) for n in order],
            () if once or not backward else [over_workers(4 * n) for n in order],
        )
        pieces, names = programs_of(one, ranks, ("tick", number))
        named |= names
        for program, piece in zip(programs, pieces, strict=True):
            program.extend(piece)
        moving: Counter[tuple[int, int]] = Counter()
        for stage, m in enumerate(tick.micro_batches):
            other = stage - 1 if backward else stage + 1
            if m is None or not 0 <= other < stages:
                continue
            sent[tick.phase, other, m] = ("activations", number)
            for placed in step.micro_batches[m]:
                for place, tokens in enumerate(placed.placement.tokens.tolist()):
                    moving[stage * width + place, other * width + place] += tokens * 8 * 2
        if moving:
            transfer = point_to_point(moving, cluster)
            named["activations", number] = transfer or OracleTransfer({}, {})
            everywhere(("send", ("activations", number)))
    if once and width > 1:
        everywhere(("send", ("gradients", "one layer")))
    everywhere(DRAIN)
    parameters = layers * LAYER + 2 * END
    for rank in range(stages * width):
        programs[rank].append(("run", parameters / (stages * width) * OPTIMIZER_S))
    return programs, named


def packed_step(packed: PackedPlan, parallel: MeshShape, cluster: Cluster, layers: int) -> float:
    """When the last group is done: bins through stages, one by one, each group for itself.

    Weights come under the first forward and gradients leave under the last backward: a layer's part
    of them shows, and all that the shortest of those does not hide.
    """
    p, each = parallel, -(-layers // parallel.pp)
    counts = [each if stage < layers - p.pp * (each - 1) else each - 1 for stage in range(p.pp)]
    speed = [cluster.slow.get(rank, 1.0) for rank in range(p.num_plan_ranks)]
    ends, first, last = [], [], []
    for group in range(p.dp):
        bins = [int(packed.order[m, group]) for m in range(len(packed.order))]
        ranks = [
            range((stage * p.dp + group) * p.cp, (stage * p.dp + group + 1) * p.cp)
            for stage in range(p.pp)
        ]
        forward, backward = (
            [
                [
                    _through(
                        packed.plan, number, cluster, count, stage == p.pp - 1, direction,
                        [speed[rank] for rank in ranks[stage]],
                    )
                    for number in bins
                ]
                for stage, count in enumerate(counts)
            ]
            for direction in (False, True)
        )  # fmt: skip
        moving = [
            [_passing(_bin(packed.plan, number, p.cp), here, there, cluster) for number in bins]
            for here, there in pairwise(ranks)
        ]
        found = usual_pipeline(forward, backward, moving)
        ends.append(max(stop for _, stop in found.values()))
        first += [row[0] for row in forward]
        last += [row[-1] for row in backward]
    elements = each * LAYER + (END if p.pp > 1 else 2 * END)
    shown = 0.0
    if p.workers_per_stage > 1:
        received = elements * (p.workers_per_stage - 1) / p.workers_per_stage
        for width, under in ((2, min(first)), (4, min(last))):
            seconds = link_s(ring(p.workers_per_stage, cluster), width * received)
            shown += max(seconds * LAYER / elements, seconds - under)
    parameters = layers * LAYER + 2 * END
    return max(ends) + shown + parameters / p.num_workers * OPTIMIZER_S / min(speed)


def _bin(plan: Plan, number: int, cp: int) -> list[int]:
    """Tokens of a bin's workers."""
    return [len(row) for row in placed_rows(plan)[number * cp : (number + 1) * cp]]


def _passing(tokens: Sequence[int], here: range, there: range, cluster: Cluster) -> float:
    """From the ranks of a stage to those of the next: all of them over the link of the farthest."""
    of_node = cluster.gpus_per_node
    near = all(a // of_node == b // of_node for a, b in zip(here, there, strict=True))
    return link_s(cluster.inside if near else cluster.across, max(tokens) * 8 * 2)


def _through(
    plan: Plan,
    number: int,
    cluster: Cluster,
    layers: int,
    head: bool,
    backward: bool,
    speed: Sequence[float],
) -> float:
    """One bin through some layers, its group alone in the world."""
    cp = len(speed)
    tokens = _bin(plan, number, cp)
    pairs = [0] * cp
    for task in read_tasks(plan, ["causal"] * plan.placement.num_documents, backward=backward):
        if task.server // cp == number:
            pairs[task.server % cp] += task.pairs
    seconds = [count * PAIR_S[backward] for count in pairs]
    keys = collective(range(cp), sum(tokens) * KV_BYTES * (cp - 1) // cp, cluster)
    out, back = (None, keys) if backward else (keys, None)
    by_worker = [linear_parts(count, layers, head, backward=backward) for count in tokens]
    parts = [[list(seam)] for seam in zip(*by_worker, strict=True)]
    one = Pass(parts, [[Attended([0.0] * cp, seconds, out, back)]] * layers)
    programs, named = programs_of(one, cp)
    slowed = [
        [(verb, what / fast if verb == "run" else what) for verb, what in program] + [DRAIN]
        for program, fast in zip(programs, speed, strict=True)
    ]
    return max(play(slowed, named).finish)
