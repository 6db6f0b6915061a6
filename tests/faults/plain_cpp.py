"""Have inductor write plain C++, here and in the compile process: it compiles fast, and nobody asks what the CPU can."""

from torch._inductor import config, cpu_vec_isa

cpu_vec_isa.valid_vec_isa_list = list
config.cpp_cache_precompile_headers = False
