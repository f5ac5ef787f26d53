"""What a split, planned or done, has to report: the body of the JSON that `split-mtp --json` prints."""

from __future__ import annotations

from typing import Any

from draftpair.convert.plan import SplitPlan
from draftpair.convert.write import SplitResult
from draftpair.findings import by_severity


def split_inputs(plan: SplitPlan) -> dict[str, Any]:
    """What was asked for; how to quantize is null when the whole head is not to be quantized."""
    request, base = plan.request, plan.scheme.base
    return {
        "model": plan.checkpoint.source,
        "revision": plan.checkpoint.revision,
        "q_bits": base.bits if base else None,
        "q_group_size": base.group_size if base else None,
        "q_mode": base.mode if base else None,
        "q_overrides": list(request.q_overrides),
        "dtype": request.dtype,
        "norms": request.norms,
        "block_size": request.block_size,
    }


def split_body(done: SplitPlan | SplitResult) -> dict[str, Any]:
    """The report of a plan (`"written": false`) or of a result (`true`); otherwise they are equal.

    `bytes_read` and `bytes_written` count tensor data: the second is the sum of the tensors' bytes.
    """
    plan = done.plan if isinstance(done, SplitResult) else done
    return {
        "family": plan.family.name,
        "maturity": plan.family.maturity,
        "drafter_model_type": plan.family.drafter.model_type,
        "block_size": plan.block_size.value,
        "written": isinstance(done, SplitResult),
        "output": str(plan.request.output),
        "tensors": [
            {
                "name": output.name,
                "dtype": output.dtype,
                "shape": list(output.shape),
                "bytes": output.nbytes,
                "sources": [source.name for source in tensor.tensors],
                "transforms": list(tensor.transforms),
                "quantized": bool(tensor.quantization or tensor.packed),
            }
            for output, tensor in plan.outputs
        ],
        "kept_full_precision": [
            {"name": name, "reason": reason} for name, reason in plan.kept_full_precision
        ],
        "files": list(plan.files),
        "bytes_read": plan.bytes_read,
        "bytes_written": plan.total_size,
        "upload": None,
        "findings": [finding.as_dict() for finding in by_severity(plan.findings)],
    }
