"""Upload a finished model with its card to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from unteach.errors import InputError, first_line

__all__ = ["check_hub", "push"]


def check_hub(name: str) -> None:
    """Refuse, before a run has cost anything, a name that is none, and a hub that does not know who is asking."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise InputError(f"push_to_hub is {name!r}: it must be OWNER/NAME ({first_line(error)})") from None
    try:
        HfApi().whoami()
    except Exception as error:  # the hub's own exceptions and those of the network below it
        wrong = f"the hub does not let us in, run hf auth login or set HF_TOKEN ({first_line(error)})"
        raise InputError(f"push_to_hub is {name!r}: {wrong}") from error


def push(folder: Path, name: str) -> str:
    """Upload a model folder as it is, into a private repository if there is none yet; the address of what was done."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        return api.upload_folder(repo_id=name, folder_path=folder, commit_message="Unlearned with unteach").commit_url
    except Exception as error:
        again = f"the model is complete in {folder}; upload it with: hf upload {name} {folder}"
        raise RuntimeError(f"not pushed to {name}: {first_line(error)}; {again}") from error
