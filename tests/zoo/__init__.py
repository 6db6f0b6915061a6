"""Tiny models with random weights, of nearly every diffusion architecture of the host."""

from . import audio_family, flux_family, image_family, newer_family, other_images, unets, video_family, wan_family

FAMILIES = (unets, flux_family, wan_family, image_family, other_images, video_family, audio_family, newer_family)
ALL = {setup.name: setup for family in FAMILIES for setup in family.SETUPS}
# Those of models that this host has, and the names of the others.
SETUPS = {name: setup for name, setup in ALL.items() if setup.available}
LACKING = sorted(set(ALL) - set(SETUPS))
