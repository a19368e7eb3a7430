"""Keys of Triton's disk cache that do not depend on the order in which a process launches kernels.

Triton hashes a function at its first launch, and includes the constants of a called function only if that one was
hashed before (Triton 3.6 to 3.9). A kernel's key thus depends on the kernels that the process launched before it, and a
cached kernel may be compiled again. Hashing all functions at the end of their module, in source order, makes the keys
the same in every process: the modules that it imports are hashed by then.
"""

from __future__ import annotations

import sys

from triton.runtime.jit import JITFunction


def fix_cache_keys(module_name: str) -> None:
    """Hash all compiled (not interpreted) functions of a module. Every module of kernels ends with this call.

    Args:
        module_name: `__name__` of the module.
    """
    # Interpreted functions have another class and no keys.
    functions = [f for f in vars(sys.modules[module_name]).values() if isinstance(f, JITFunction)]
    for function in sorted(functions, key=lambda f: f.starting_line_number):
        if function.__module__ == module_name:
            _ = function.cache_key
