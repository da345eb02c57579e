"""Models: found, loaded, divided between processes, saved."""

from unteach.models.load import (
    context_length,
    decoder_layers,
    find_folder,
    load_model,
    load_tokenizer,
    read_context_length,
    trainable_parameters,
)
from unteach.models.save import Rounding, rounding_loss, save_model

__all__ = [
    "Rounding", "context_length", "decoder_layers", "find_folder", "load_model", "load_tokenizer",
    "read_context_length", "rounding_loss", "save_model", "trainable_parameters",
]  # fmt: skip
