"""Size limits of reducer.h: Reducer delegates to its policy and its engine.

    reducer_size_test.py <repository root>
"""

import pathlib
import re
import sys

MAX_LINES = 250
MAX_FIELDS = 8
FIELD = re.compile(r"^  [^/(]*\b\w+_(\{.*\}| = .*)?;")

lines = (pathlib.Path(sys.argv[1]) / "reducer/reducer.h").read_text().splitlines()
fields = [line for line in lines if FIELD.match(line)]
print(f"reducer.h: {len(lines)} lines, at most {MAX_LINES}; {len(fields)} fields, at most {MAX_FIELDS}")
if not fields or len(lines) > MAX_LINES or len(fields) > MAX_FIELDS:
    sys.exit(1)
