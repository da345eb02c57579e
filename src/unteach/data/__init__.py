"""Documents, general text and keep text as token batches."""

from unteach.data.batches import EMBEDDED_GENERAL, GENERAL_BYTES, ForgetBatches, GeneralText, TokenSet, pad, tokenise
from unteach.data.documents import Documents, read_documents
from unteach.data.overlap import Overlap, overlap
from unteach.data.text import special_ids

__all__ = [
    "EMBEDDED_GENERAL", "GENERAL_BYTES", "Documents", "ForgetBatches", "GeneralText", "Overlap", "TokenSet", "overlap",
    "pad", "read_documents", "special_ids", "tokenise",
]  # fmt: skip
