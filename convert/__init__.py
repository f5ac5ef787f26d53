"""Cuts a head out of a checkpoint and writes it as a drafter folder: first a plan, then the work.

`plan_split` decides everything and touches nothing; `carry_out` does it; `split_inputs` and `split_body` tell.
"""

from draftpair.convert.parallel import Progress
from draftpair.convert.plan import PlannedTensor, SplitPlan, plan_split
from draftpair.convert.report import split_body, split_inputs
from draftpair.convert.request import Request, check_request
from draftpair.convert.write import SplitResult, carry_out

__all__ = [
    "PlannedTensor",
    "Progress",
    "Request",
    "SplitPlan",
    "SplitResult",
    "carry_out",
    "check_request",
    "plan_split",
    "split_body",
    "split_inputs",
]
