"""Models: found, loaded, divided between processes, saved."""

from unteach.models.load import (
    backbone_and_head,
    context_length,
    decoder_layers,
    find_folder,
    load_model,
    load_tokenizer,
    read_context_length,
    stored_tensors,
    trainable_parameters,
)
from unteach.models.save import Rounding, rounding_loss, save_model

__all__ = [
    "Rounding", "backbone_and_head", "context_length", "decoder_layers", "find_folder", "load_model", "load_tokenizer",
    "read_context_length", "rounding_loss", "save_model", "stored_tensors", "trainable_parameters",
]  # fmt: skip
