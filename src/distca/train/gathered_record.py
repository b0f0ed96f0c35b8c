"""What all ranks have measured in a step: gathered, learned from, and made into its record."""

import torch

from distca.model.config import ModelConfig
from distca.train.metrics import Record
from distca.train.run_ranks import RunRanks
from distca.train.step_record import Measured, step_record
from distca.train.tick_record import measured_ticks, tick_record


def gathered_record(
    ranks: RunRanks,
    model: ModelConfig,
    *,
    loss: float,
    grad_norm: float,
    seconds: float,
    stop: bool,
    leaves: bool,
) -> Record:
    """Returns the record of a step, after all ranks have told each other what they measured.

    Later steps are planned with the speeds that follow, and by the servers that leave and join.

    loss, grad_norm, seconds, stop, leaves: those of this rank, as in ``Measured``.
    """
    context, fetched = ranks.context, ranks.batch
    meters = [attention.meter for attention in ranks.runner.attentions]
    ticks = measured_ticks(meters, len(fetched.step.plan.schedule.ticks))
    _, attention_s, planned_s, exposed_s = ticks.sum(0).tolist()
    on_gpu = context.device.type == "cuda"
    mine = Measured(
        plan_rank=context.plan_rank,
        loss=loss,
        grad_norm=grad_norm,
        seconds=seconds,
        attention_s=attention_s,
        planned_s=planned_s,
        serves=fetched.step.plan.serves(context.plan_rank),
        exposed_s=exposed_s,
        waited_s=fetched.waited_s,
        memory_bytes=torch.cuda.max_memory_allocated() if on_gpu else 0,
        stop=stop,
        leaves=leaves,
        admits=ranks.admits,
    ).tensor()
    both = torch.cat([mine, ticks.flatten()])
    everyone = ranks.survive("the record of a step", lambda: ranks.context.host.gather(both))
    measured = Measured.of_ranks(everyone[:, : len(mine)])
    idle_s = measured["exposed_s"] + measured["waited_s"]
    other_s = measured["seconds"] - measured["attention_s"] - idle_s
    ranks.learn_speed(measured["planned_s"], measured["attention_s"], other_s)
    ranks.plan_change(measured["leaves"], measured["admits"])
    record = step_record(measured, fetched, model, context.device)
    if ranks.context.rank == 0 and len(ticks) > 2:
        of_ranks = everyone[:, len(mine) :].view(-1, *ticks.shape)
        record["ticks"] = tick_record(fetched.step.plan, measured["plan_rank"], of_ranks)
    return record
