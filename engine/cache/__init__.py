"""Keep compiled code on disk: a folder for each block group, a limit on their size, files of them to save and load.

May import: `failures`, the modules of `engine/`. Door: `disk.current`.
"""
