"""Keys of Triton's disk cache that do not depend on the order in which a process launches kernels.

Triton hashes a function when it is first launched, and with it the constants of the functions it calls, but only of
those that were hashed before (Triton 3.6 to 3.9). So the same kernel has other keys in a process that launches others
first, and what was compiled there is compiled again. Hashing the functions of a module as soon as it is defined, in
the order of its source, gives them one hash: a module's imports come before it, and are hashed by then.
"""

from __future__ import annotations

import sys

from triton.runtime.jit import JITFunction


def fix_cache_keys(module_name: str) -> None:
    """Hash all functions of a module that are compiled. Every module of kernels ends with this call.

    Args:
        module_name: `__name__` of the module.
    """
    # Interpreted functions are of another class, and have no keys.
    functions = [f for f in vars(sys.modules[module_name]).values() if isinstance(f, JITFunction)]
    for function in sorted(functions, key=lambda f: f.starting_line_number):
        if function.__module__ == module_name:
            _ = function.cache_key
