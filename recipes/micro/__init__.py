"""The embedded benchmark: texts, data files, tokenizer, models and their recorded scores."""
