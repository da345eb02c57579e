"""Documents, general text and keep text as token batches."""

from unteach.data.batches import EMBEDDED_GENERAL, GENERAL_BYTES, ForgetBatches, GeneralText, TokenSet, pad, tokenise
from unteach.data.documents import Documents, read_documents, special_ids
from unteach.data.encoding import lengths_of
from unteach.data.overlap import Overlap, overlap

__all__ = [
    "EMBEDDED_GENERAL", "GENERAL_BYTES", "Documents", "ForgetBatches", "GeneralText", "Overlap", "TokenSet",
    "lengths_of", "overlap", "pad", "read_documents", "special_ids", "tokenise",
]  # fmt: skip
