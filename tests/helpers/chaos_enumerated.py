"""The faults of chaos.py that are enumerated instead of drawn: all places where a checkpoint file can
end, and all file operations of a save."""

from __future__ import annotations

from chaos_round import Result, Stage


def resume_every_cut(stage: Stage) -> Result:
    return Result("cuts", 0, is_enumerated=True)


def kill_at_every_operation(stage: Stage) -> Result:
    return Result("operations", 0, is_enumerated=True)
