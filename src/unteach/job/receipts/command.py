"""``unteach receipt RUN``: write a run's receipt again, with the audits made since, and sign it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unteach.errors import InputError
from unteach.job.receipts.receipt import RECEIPT, renew
from unteach.job.receipts.signature import check_key, sign, signature_of

__all__ = ["ReceiptOptions", "run", "show", "sign_receipt"]


@dataclass(frozen=True, kw_only=True)
class ReceiptOptions:
    """What ``unteach receipt`` takes."""

    run: str = ""
    """The folder of a run that has ended."""
    sign: Path | None = None
    """Sign the receipt with this SSH key."""
    json: bool = False
    """Print the result as one JSON object and nothing else."""


def run(options: ReceiptOptions) -> dict[str, Any]:
    """Write, and sign if asked: where the receipt is, its hash, and the attacks in it."""
    folder = Path(options.run)
    if not options.run or not (folder / RECEIPT).is_file():
        raise InputError(f"run is {options.run!r}: it has no {RECEIPT}; a run writes it when it ends")
    if options.sign is not None:
        check_key(options.sign)
    receipt = renew(folder)
    signature = None if options.sign is None else sign_receipt(folder, options.sign)
    audits = [audit["attack"] for audit in receipt.content["audits"]]
    content = {"receipt": str(receipt.path), "sha256": receipt.sha256, "audits": audits}
    return {**content, "signature": signature and str(signature)}


def show(result: dict[str, Any]) -> None:
    """Say where it is, and what is in it."""
    audits = f"{len(result['audits'])} audits" if result["audits"] else "no audit"
    print(f"receipt: {result['receipt']} ({audits}; SHA-256 {result['sha256']})")
    if result["signature"]:
        print(f"signature: {result['signature']}")


def sign_receipt(run: Path, key: Path) -> Path:
    """Sign the receipt of a run; a copy of the signature goes beside the model."""
    signature = sign(run / RECEIPT, key.expanduser())
    shutil.copyfile(signature, signature_of(run / "model" / RECEIPT))
    return signature
