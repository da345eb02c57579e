"""The scalars of a run for TensorBoard."""

from __future__ import annotations

from pathlib import Path

from unteach.report.load import load, number


def write_tensorboard(run: Path, folder: Path) -> Path:
    """Write the scalars of a run folder as TensorBoard event files.

    Training figures (`train/nll_forget`, `train/grad_norm`, ...) come from metrics.jsonl, scores
    (`scores/verbmem_f`, ...) from the evaluations. Gaps (None, NaN) are left out. Run names with their seed
    become subfolders of `folder`, so several runs can share it.

    Args:
        run: the run folder.
        folder: where the event files go; `tensorboard --logdir FOLDER` shows them.

    Returns:
        The subfolder that was written.

    Raises:
        ValueError: the run cannot be read, or the `tensorboard` package is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("writing TensorBoard files needs the tensorboard package: pip install tensorboard") from error

    inputs = load([run])
    if not inputs.runs:
        raise ValueError(f"{run}: not a run folder, so it has no scalars over steps for TensorBoard")
    loaded = inputs.runs[0]
    seed = "" if loaded.seed is None else f"-seed{loaded.seed}"
    name = "".join(letter if letter.isalnum() or letter in "-_.+" else "_" for letter in loaded.name).strip(".")
    target = folder / f"{name or 'run'}{seed}"
    with SummaryWriter(str(target)) as writer:
        for row in loaded.steps:
            for key, value in row.items():
                scalar = number(value)
                if key != "step" and scalar is not None:
                    writer.add_scalar(f"train/{key}", scalar, int(row["step"]))
        for result in loaded.evaluations:
            for key, value in result.items():
                writer.add_scalar(f"scores/{key}", value, result.step)
    return target
