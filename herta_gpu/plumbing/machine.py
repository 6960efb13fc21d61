"""What this machine has: memory and threads."""

from __future__ import annotations

import os


def host_memory() -> int:
    """Bytes of the host's memory that are free."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: ask for the physical memory below
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return 4 << 30


def num_threads() -> int:
    """Threads to use: ``HERTA_NUM_THREADS``, or every core this process may run on."""
    given = os.environ.get("HERTA_NUM_THREADS", "")
    if given:
        if not given.isdigit() or int(given) < 1:
            raise ValueError(f"HERTA_NUM_THREADS must be a positive integer, not {given!r}.")
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
