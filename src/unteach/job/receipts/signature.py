"""A detached signature beside a receipt (``receipt.json.sig``), made and checked by OpenSSH's ``ssh-keygen -Y``."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from unteach.errors import InputError, first_line, given_path

__all__ = ["check_key", "check_signature", "sign", "signature_of"]

NAMESPACE = "unteach-receipt"
"""What the signature is for: one made for something else does not count."""


def signature_of(receipt: Path) -> Path:
    """Where the signature of a receipt lies."""
    return receipt.with_name(f"{receipt.name}.sig")


def check_key(key: Path | str) -> None:
    """Refuse, before a run has cost anything, a key that cannot sign."""
    key = given_path(str(key), "sign")
    if not key.is_file():
        raise InputError(f"sign is {str(key)!r}: there is no such file; give an SSH key, such as ~/.ssh/id_ed25519")
    _program("sign", key)


def sign(receipt: Path, key: Path) -> Path:
    """Sign a receipt with an SSH key (of a public key, the agent has the other half); the signature's file."""
    signature_of(receipt).unlink(missing_ok=True)
    done = _run("sign", ["-Y", "sign", "-q", "-f", str(key), "-n", NAMESPACE, str(receipt)])
    if done.returncode or not signature_of(receipt).exists():
        raise InputError(
            f"sign is {str(key)!r}: ssh-keygen does not sign with it ({first_line(ValueError(done.stderr))})"
        )
    return signature_of(receipt)


def check_signature(receipt: Path, signature: Path, signer: Path | None) -> tuple[bool, str]:
    """Whether a signature is one of this receipt's bytes and, given a public key, of that key's owner; and in words."""
    data = receipt.read_bytes()
    if signer is None:
        done = _run("signer", ["-Y", "check-novalidate", "-n", NAMESPACE, "-s", str(signature)], data)
        key = next((word for word in done.stdout.split() if word.startswith("SHA256:")), "a key")
        said = f"by {key}; whose key that is was not checked (--signer PUBLIC_KEY)"
    else:
        try:
            public = signer.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"signer is {str(signer)!r}: it cannot be read ({first_line(error)})") from None
        if "\n" in public or not public.startswith(("ssh-", "ecdsa-", "sk-")):
            raise InputError(f"signer is {str(signer)!r}: it must hold one public key, as id_ed25519.pub does")
        with tempfile.TemporaryDirectory() as folder:
            allowed = Path(folder) / "allowed_signers"
            allowed.write_text(f"signer {public}\n", encoding="utf-8")
            given = ["-f", str(allowed), "-I", "signer", "-n", NAMESPACE, "-s", str(signature)]
            done = _run("signer", ["-Y", "verify", *given], data)
        said = f"by the owner of {signer}"
    if done.returncode:
        return False, f"does not hold ({first_line(ValueError(done.stderr or done.stdout))})"
    return True, said


def _program(option: str, given: Path | str) -> str:
    found = shutil.which("ssh-keygen")
    if found is None:
        raise InputError(f"{option} is {str(given)!r}, but there is no ssh-keygen: install OpenSSH")
    return found


def _run(option: str, arguments: list[str], data: bytes | None = None) -> subprocess.CompletedProcess[str]:
    """Run ssh-keygen, which may ask for a passphrase where nothing is piped in."""
    program, said = _program(option, arguments[-1]), {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = subprocess.run([program, *arguments], input=data, **said, check=False)  # type: ignore[call-overload]
    texts = (done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))
    return subprocess.CompletedProcess(done.args, done.returncode, *texts)
