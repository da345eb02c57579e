"""The paper, readable in an hour: losses, divergences, the chunked vocabulary head, the optimizers, the theory."""
