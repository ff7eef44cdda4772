"""Models to compare with. Each file is copied as the `1/model.py` of a served model (see targets.py)."""
