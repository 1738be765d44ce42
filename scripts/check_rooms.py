#!/usr/bin/env python3
"""Which folder of src/ may include which: the rooms of docs/architecture.md. And that one file alone asks OpenMP for
threads, in src/, examples/ and bench/: its run time ends a process that is at a limit, unless it is asked with care.

    scripts/check_rooms.py [SRC]    exit 1 where a file includes what is not in its room
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# A folder, and those whose headers its files may include; `strobe` is include/strobe.
ROOMS = {
    "core": ["core", "strobe"],
    "cpu": ["core", "cpu"],
    "cuda/ptx": ["cuda/ptx"],
    "cuda/common": ["core", "cuda/common", "cuda/ptx"],
    "cuda/backward": ["core", "cuda/common", "cuda/ptx", "cuda/backward"],
    "cuda/mma_sync": ["core", "cuda/common", "cuda/ptx", "cuda/backward", "cuda/mma_sync"],
    "cuda/cache": ["core", "cuda/common", "cuda/ptx", "cuda/cache"],
    "cuda/hopper": ["core", "cuda/common", "cuda/ptx", "cuda/backward", "cuda/cache", "cuda/hopper"],
    "cuda/decode": ["core", "cuda/common", "cuda/ptx", "cuda/cache", "cuda/decode"],
    "cuda/host": ["core", "cuda/common", "cuda/host"],
    "cuda/rows": ["core", "cuda/common", "cuda/ptx", "cuda/cache", "cuda/decode", "cuda/host", "cuda/rows"],  # whole kernels with their launches
    "cuda": ["cuda/mma_sync", "cuda/hopper", "cuda/decode", "cuda/host"],  # the template of an instance's source
    "api": ["core", "cpu", "cuda/host", "api", "strobe"],
    "cli": ["cli", "check", "core", "oracle", "strobe"],
}
# The host side of a kernel. Device code includes none of them.
LAUNCH = "_launch.h"
LAUNCHES_ALSO = ["cuda/host"]
TEAM = "src/core/team.cpp"
OPENMP = re.compile(r"\s*#\s*(include\s*<omp\.h>|pragma\s+omp\s+parallel)")
GENERATED = {"cuda_instances.inc": "cuda/host"}


def room_of(path: str) -> str:
    return path.rpartition("/")[0]


def faults(source: Path) -> tuple[int, list[str]]:
    found, files = [], 0
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        name = path.relative_to(source).as_posix()
        files += 1
        room = room_of(name)
        if room not in ROOMS:
            found.append(f"src/{name}: {room or 'src'} is not a room; scripts/check_rooms.py lists them")
            continue
        is_launch = name.endswith(LAUNCH) and room.startswith("cuda/")
        allowed = ROOMS[room] + (LAUNCHES_ALSO if is_launch else [])
        for number, line in enumerate(path.read_text().splitlines(), 1):
            include = re.match(r'\s*#\s*include\s+(?:"([^"]+)"|<(strobe/[^>]+)>)', line)
            if not include:  # others in <> are not ours: <cuda/ptx> is CUDA's
                continue
            header = include[1] or include[2]
            wanted = GENERATED.get(header, room_of(header))
            if "@" in wanted:
                continue
            place = f"src/{name}:{number}: includes {header}"
            if wanted not in allowed:
                found.append(f"{place}, expected something of {', '.join(allowed)}")
            elif header.endswith(LAUNCH) and not is_launch and room not in ("cuda", "cuda/host"):
                found.append(f"{place}, the host side of a kernel: device code does without")
    return files, found


def teams(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{number}: asks OpenMP, expected core/team.h"
        for folder in ("src", "examples", "bench")
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in (".h", ".cpp", ".cuh", ".cu") and path != root / TEAM
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if OPENMP.match(line)
    ]


def main() -> int:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "src"
    files, found = faults(source)
    found += teams(source.parent)
    print("\n".join(found + [f"check_rooms: {files} files, " + (f"{len(found)} faults" if found else "no faults")]))
    return 1 if found or not files else 0


if __name__ == "__main__":
    sys.exit(main())
