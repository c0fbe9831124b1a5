"""Checks the words of comments, docstrings and pages; prints the file and line of each violation.

    check_words.py <source folder>

Headers open with a comment whose first word is not interrogative. Words that read like a private
language have a replacement here. Tests and data are not checked.
"""

import os
import pathlib
import re
import sys

# Pattern, replacement.
WORDS = {
    r"[Ww]hat(?! if| about)": "the noun that is meant",
    r"[Ww]hatever": "any",
    r"[Bb]ehind": "after (time), below or inside (place)",
    r"alike": "equally, on all ranks",
    r"such as it is": "unchanged",
    r"equally many|so many": "the same number of, n",
    r"tells? of|told of": "report, name",
    r"lets? go of": "release",
    r"gives? up": "abort",
    r"patience": "timeout",
}
INTERROGATIVE = re.compile(r"(What|Which|Whether|Who|Whose|Where|When|How)\b")
SUFFIXES = (".h", ".cc", ".cu", ".py", ".sh", ".md")
LONGEST_LINE = {".md": 165, ".py": 100, ".sh": 120}
SKIPPED = re.compile(r"^(tests/|build/|examples/.*/data/|\.|third_party/)")


def prose_of(path: pathlib.Path, text: str) -> list[tuple[int, str]]:
    """Returns the numbered lines of comments, docstrings or pages."""
    lines = text.splitlines()
    if path.suffix == ".md":
        fenced = re.sub(r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), text, flags=re.S | re.M)
        return list(enumerate(fenced.splitlines(), 1))
    mark = "//" if path.suffix in (".h", ".cc", ".cu") else "#"
    found = [(n, line.split(mark, 1)[1]) for n, line in enumerate(lines, 1) if mark in line]
    if path.suffix == ".py":
        for match in re.finditer(r'"""(.*?)"""', text, re.S):
            first = text.count("\n", 0, match.start()) + 1
            found += [(first + i, line) for i, line in enumerate(match[1].splitlines())]
    return found


def violations(path: pathlib.Path, text: str) -> list[str]:
    found = []
    if path.suffix == ".h":
        opening = re.match(r"// *(\S.*)", text)
        if not opening:
            found.append(f"{path}:1: open the header with a comment that says what it is")
        elif INTERROGATIVE.match(opening[1]):
            found.append(f'{path}:1: open with a noun phrase, found "{opening[1]}"')
    for number, line in prose_of(path, text):
        line = re.sub(r"`[^`]*`|\"[^\"]*\"", "", line)  # code and quoted texts
        for pattern, instead in WORDS.items():
            if match := re.search(rf"\b({pattern})\b", line):
                found.append(f'{path}:{number}: "{match[0]}": write {instead}')
    limit = LONGEST_LINE.get(path.suffix, 1000)
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > limit and not line.startswith(("|", "-- ", "    ", "![")):
            found.append(f"{path}:{number}: {len(line)} characters, at most {limit}")
    return found


def main() -> None:
    root = pathlib.Path(sys.argv[1])
    found, count = [], 0
    for folder, folders, names in os.walk(root):
        place = pathlib.Path(folder).relative_to(root)
        folders[:] = [name for name in folders if not SKIPPED.match(f"{place / name}/")]
        for name in names:
            path = place / name
            if path.suffix in SUFFIXES and not SKIPPED.match(path.as_posix()):
                found += violations(path, (root / path).read_text(encoding="utf-8"))
                count += 1
    print("\n".join(found) or f"{count} files have plain words")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
