"""Make a language model forget chosen documents and keep everything else."""
