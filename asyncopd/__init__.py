"""Asynchronous on-policy distillation; the data flow is drawn in `asyncopd/pipeline.py`."""
