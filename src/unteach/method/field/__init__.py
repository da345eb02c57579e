"""Forget losses of other papers, one file each: ``losses.py`` imports every file that lies here."""
