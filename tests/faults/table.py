"""What goes wrong, when, and what must hold afterwards: the tests in this folder are made from this list.

After every row: the image is eager's or the error the model's own, blocks and PyTorch's settings are as found, the next run is
right and compiled, and other entries of the cache and the user's files are as they were.
"""

from typing import NamedTuple

MOMENTS = {
    "background": "while code is compiled in the background",
    "at once": "while code is compiled at once",
    "sampling": "while a model samples compiled",
    "file": "while the cache file is saved or loaded",
    "start": "while the cache is read at start",
}


class Row(NamedTuple):
    """One fault at one moment.

    Args:
        moment: see MOMENTS.
        happens: what is done to the process or its files.
        then: what holds beside what holds after every row.
        by: the function that does it: in `here.py` in the process of the tests, in `there.py` in processes of their own.
    """

    fault: str
    moment: str
    happens: str
    then: str
    by: str

    def __str__(self) -> str:
        return f"{self.fault}, {self.moment}: {self.happens}"


HERE = [
    Row("error", "background", "the compiler refuses the code", "eager, said once; other settings compile", "refused"),
    Row("error", "at once", "the compiler refuses the code", "eager, said once; other settings compile", "refused"),
    Row("error", "background", "a file cannot be read once", "eager until the next run", "passes"),
    Row("error", "at once", "a file cannot be read once", "eager until the next run", "passes"),
    Row("error", "sampling", "the prompt does not fit the model", "the model's own words, no new code", "model_raises"),
    Row("out of memory", "background", "in the compiler", "tried until there is", "no_memory_to_compile"),
    Row("out of memory", "at once", "in the compiler", "eager until the next run", "no_memory_to_compile"),
    Row("out of memory", "at once", "for copies of the inputs", "compiled all the same", "no_copies"),
    Row("out of memory", "at once", "for copies, then in the compiler", "eager until the next run", "no_copies_nor_compiler"),
    Row("out of memory", "background", "beside copies of the inputs", "uncompiled until there is", "copies_fill_memory"),
    Row("out of memory", "sampling", "in the last layer", "the host sees it, no new code", "no_memory_to_sample"),
    Row("interrupt", "background", "cancel while the thread compiles", "stops; the code is made", "cancelled_meanwhile"),
    Row("interrupt", "at once", "cancel while it compiles", "stops after that code", "cancelled_compiling"),
    Row("interrupt", "at once", "cancel while another thread compiles", "stops at once", "cancelled_behind_another"),
    Row("interrupt", "sampling", "cancel in a step", "stops before the next block, no new code", "cancelled_sampling"),
    Row("interrupt", "start", "cancel while the compile process is waited for", "stops at once", "cancelled_waiting"),
]
THERE = [
    Row("error", "file", "writing fails half way", "said; the file of before is whole", "cannot_save"),
    Row("error", "background", "a reset by another node's thread", "code is made; nothing ends the process", "reset_meanwhile"),
    Row("error", "start", "entries cannot be read", "compiled anew", "unreadable_entry"),
    Row("out of memory", "file", "while a file is loaded", "the error; the cache is as it was", "no_memory_to_load"),
    Row("out of memory", "start", "while code is read", "eager, said; the next process reads it", "no_memory_to_read"),
    Row("interrupt", "file", "cancel while it is saved", "the file is whole; the next run stops", "cancelled_saving"),
    Row("damaged file", "at once", "the new entry is cut off", "the next process compiles anew", "half_entry"),
    Row("damaged file", "background", "the new entry is cut off", "the next process compiles anew", "half_entry"),
    Row("damaged file", "start", "an entry is cut off, as by a loss of power", "said; compiled anew", "cut_entry"),
    Row("damaged file", "file", "a byte flips in the file to load", "refused in words", "flipped_file"),
    Row("damaged file", "sampling", "the cache's files vanish", "nothing is noticed", "vanished_cache"),
    Row("full disk", "at once", "nothing can be written", "eager; compiled when there is room", "full_disk"),
    Row("full disk", "background", "nothing can be written", "eager; compiled when there is room", "full_disk"),
    Row("full disk", "sampling", "from a step on nothing can be written", "nothing is noticed", "full_disk_sampling"),
    Row("full disk", "file", "saving", "said; the file of before is whole", "full_disk_saving"),
    Row("full disk", "file", "loading", "said; loaded when there is room", "full_disk_loading"),
    Row("full disk", "start", "nothing can be written", "eager; read when there is room", "full_disk_reading"),
    Row("kill -9", "at once", "while the C++ compiler runs", "the next process compiles", "killed_compiling"),
    Row("kill -9", "background", "while the C++ compiler runs", "the next process compiles", "killed_compiling"),
    Row("kill -9", "sampling", "in a step", "the next process reads the code", "killed_sampling"),
    Row("kill -9", "file", "saving", "the file of before is whole; what is left goes", "killed_saving"),
    Row("kill -9", "file", "loading", "loaded by the next process; what is left goes", "killed_loading"),
    Row("kill -9", "start", "reading", "the next process reads the code", "killed_reading"),
    Row("read-only folder", "at once", "the entry cannot be written", "said; compiled", "read_only_entry"),
    Row("read-only folder", "background", "the entry cannot be written", "said; compiled", "read_only_entry"),
    Row("read-only folder", "sampling", "a file takes the cache's place in a step", "nothing is noticed", "blocked_cache"),
    Row("read-only folder", "file", "saving", "said", "read_only_saving"),
    Row("read-only folder", "start", "the cache", "said; compiled elsewhere", "read_only_cache"),
    Row("another process", "at once", "compiles the same", "both compiled; another reads", "two_compile"),
    Row("another process", "background", "compiles the same", "both compiled; another reads", "two_compile"),
    Row("another process", "sampling", "clears the cache", "nothing is noticed", "cleared_meanwhile"),
    Row("another process", "file", "saves under the same name", "one whole file", "two_save"),
    Row("another process", "start", "reads the same", "both read", "two_read"),
    Row("clock set back", "at once", "by a year", "compiled; read later", "clock_back"),
    Row("clock set back", "background", "by a year", "compiled; read later", "clock_back"),
    Row("clock set back", "sampling", "by a year, in a step", "nothing is noticed", "clock_back_sampling"),
    Row("clock set back", "file", "saved in the future, loaded now", "loaded", "clock_back_file"),
    Row("clock set back", "start", "the cache is dated in the future", "code is read", "clock_back_reading"),
]
TABLE = HERE + THERE
