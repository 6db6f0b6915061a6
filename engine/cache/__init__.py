"""Store compiled code by content hash: on disk, in a cache that machines share, in files to save and load.

May import: `failures`, the modules of `engine/`. Door: `code_store.current`.
"""
