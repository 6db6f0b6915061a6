"""Every way of changing a model that the host has and compiled code must honour.

`test_host_patches.py`, `test_host_lora.py` and `test_host_conditions.py` show that each comes out right with ours,
`test_host_unsound.py` that it comes out wrong with less.
"""
