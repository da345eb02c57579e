"""How the embedded texts and models, and the SmolLM2 benchmark, were made; not installed."""
