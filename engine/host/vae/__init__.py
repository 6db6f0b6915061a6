"""The faster memory layout for a workflow's VAE, kept where it was measured to pay.

May import: `host/graphs` and what is below it. Door: `attach.attach_vae`.
"""
