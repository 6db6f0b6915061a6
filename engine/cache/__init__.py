"""Keep compiled code by its content: on disk, where machines share it, in files to save and load.

May import: `failures`, the modules of `engine/`. Door: `code_store.current`.
"""
