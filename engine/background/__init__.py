"""Code that is made while images go on: the thread, when it may run, what it works on.

May import: `failures`, the modules of `engine/`. Door: `thread.compiler`.
"""
