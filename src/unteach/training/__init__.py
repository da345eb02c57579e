"""Unlearning as a run: a step, the loop around it, calibration, stop rules, checkpoints."""
