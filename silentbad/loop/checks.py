"""Checks of several parts of the configuration together, or of the records too, before any weights
load."""

from silentbad.data import buckets
from silentbad.data.elements import DataInfo, clean_shown
from silentbad.data.records import Records
from silentbad.errors import UserError
from silentbad.memory.probes import FEWEST
from silentbad.model.family import Family
from silentbad.settings import memory as roles
from silentbad.settings.memory import REHEARSED, ROLES
from silentbad.settings.rules import Facts, check_rules
from silentbad.settings.train import TrainConfig
from silentbad.settings.types import changed_fields
from silentbad.settings.user_code import is_place


def check_records(config: TrainConfig, info: DataInfo, records: Records) -> None:
    """Refuse a part that acts on none of the records."""
    memory = config.memory
    phrases = records.phrases
    if memory.region.name == "mask" and not records.masked:
        raise UserError(
            "memory.region.name=mask: no record has a mask; give masks in the metadata, or set "
            f"memory.region.name to estimated, which finds them from {FEWEST} pictures a phrase or more"
        )
    few = all(len(rows) < FEWEST for rows in info.rows)
    if memory.region.name == "estimated" and few and not (records.masked and info.rows):
        raise UserError(
            f"memory.region.name=estimated: no element has {FEWEST} pictures, from which its mask is "
            "estimated; give more pictures, or set memory.region.name to none"
        )
    rehearses = memory.rehearsal.name in REHEARSED or is_place(memory.rehearsal.name)
    added_roles = ["rehearsal"] if rehearses else []
    unseen = set() if clean_shown(info, memory.sampler.clean_ratio) else {"clean"}
    there = {*info.roles, *added_roles} - unseen
    for role in ROLES:
        names = changed_fields(getattr(memory.roles, role))
        if names and role not in there:
            raise UserError(
                f"memory.roles.{role}.{names[0]}: there is no {role} record to act on; leave it out"
            )
    if there and not any(roles.role_settings(memory)[role].loss_weight for role in there):
        named = " and ".join(sorted(there))
        raise UserError(f"memory.roles: loss_weight is 0 for {named}, so nothing would be learnt")
    if memory.retention.name == "self_distillation" and "clean" not in there:
        raise UserError(
            "memory.retention.name=self_distillation: no clean record is shown, on which it acts; "
            "leave it out"
        )
    if memory.rehearsal.name == "leak_free":
        captioned = (
            ("rehearsal", "clean") if roles.dropout(memory).get("clean", 0) < 1 else ("rehearsal",)
        )
        if not any(role in captioned and len(phrases[r]) > 1 for r, role in enumerate(info.roles)):
            raise UserError(
                "memory.rehearsal.name=leak_free: joins phrases of clean and rehearsal records; "
                "none with a caption has two"
            )


def bucket_step(config: TrainConfig, side: int, factor: int) -> int:
    """The step of the bucket sides, a multiple of `factor`; 0: squares."""
    if not config.buckets:
        return 0
    fine = buckets.STEP % factor == 0 and side % buckets.STEP == 0 and side >= 4 * buckets.STEP
    step = config.bucket_step or (buckets.STEP if fine else factor)
    if step % factor or side % step:
        right = f"be a multiple of {factor}, which the pipeline needs, and divide {side}"
        raise UserError(f"bucket_step: {step} must {right}, the resolution")
    return step


# ---------------------------------------------------------------- of a family of models
def check_family(config: TrainConfig, family: Family, sharded: bool = False) -> None:
    """Refuse settings that have no meaning for a family of models."""
    check_rules(config, {}, Facts(family=family, sharded=sharded), about=("FLOW", "TRANSFORMER"))
