"""Memory, disk and time of a run, before anything is loaded."""
