"""What went wrong while compiling, in words that lead to a cure for this machine.

Imports nothing of ours. Door: `describe.describe_failure`.
"""
