"""Every way of changing a model that the host has and compiled code must honour.

`host/model/test_patches.py`, `host/weights/test_lora.py` and `host/model/test_conditions.py` show that each comes out right
with ours, `host/model/test_unsound.py` that it comes out wrong with less.
"""
