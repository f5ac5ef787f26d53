"""What a split, planned or done, has to report: the body of the JSON that `split-mtp --json` prints."""

from __future__ import annotations

from typing import Any

from draftpair.convert.plan import SplitPlan
from draftpair.convert.write import SplitResult
from draftpair.findings import by_severity


def split_inputs(plan: SplitPlan) -> dict[str, Any]:
    """What was asked for; how to quantize is null when nothing is to be quantized."""
    request, quantization = plan.request, plan.quantization
    return {
        "model": plan.checkpoint.source,
        "revision": plan.checkpoint.revision,
        "q_bits": request.q_bits,
        "q_group_size": quantization.group_size if quantization else None,
        "q_mode": request.q_mode if quantization else None,
        "dtype": request.dtype,
        "block_size": request.block_size,
    }


def split_body(done: SplitPlan | SplitResult) -> dict[str, Any]:
    """The report of a plan (`"written": false`) or of a result (`true`); otherwise they are equal.

    `bytes_read` and `bytes_written` count tensor data: the second is the sum of the tensors' bytes.
    """
    plan = done.plan if isinstance(done, SplitResult) else done
    return {
        "family": plan.family.name,
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
                "sources": [source.name for source in tensor.sources],
                "transforms": list(tensor.transforms),
                "quantized": tensor.quantized,
            }
            for output, tensor in plan.outputs
        ],
        "kept_full_precision": [
            {"name": name, "reason": reason} for name, reason in plan.kept_full_precision
        ],
        "files": plan.files,
        "bytes_read": plan.bytes_read,
        "bytes_written": plan.total_size,
        "findings": [finding.as_dict() for finding in by_severity(plan.findings)],
    }
