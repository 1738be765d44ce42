"""Runs programs, each in a process of its own that begins with what they import already there.

Standard input: a JSON list of pairs, a name and a program's text. The first that fails ends it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

import documents

# Those that a child of a process may use which has imported them. JAX starts threads.
SHARED = ("torch", "transformers", "strobe")


def main() -> None:
    programs = json.load(sys.stdin)
    for module in SHARED:
        if any(documents.imports(module, text) for _, text in programs):
            importlib.import_module(module)
    for name, text in programs:
        child = os.fork()
        if child == 0:
            # Its own globals, as of a program: what it defines can be pickled and traced.
            own, end = vars(sys.modules["__main__"]), sys.exit
            for word in [x for x in own if not x.startswith("__")]:
                del own[word]
            exec(compile(text, name, "exec"), own)
            end()
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"{name}: exit status {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
