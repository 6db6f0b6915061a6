"""Compiled code on disk: folders by block group, their size limit, the files that Save and Load handle, and what the first
compilation of a process needs.

May import: `failures`, the modules of `engine/`. Door: `disk.current`.
"""
