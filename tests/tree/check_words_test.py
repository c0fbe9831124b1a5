"""Tests of check_words.py on single files."""

import pathlib
import unittest

import check_words

# File, text, and a part of the reported violation; None if it is allowed.
CASES = [
    ("a.h", "// Flat storage of gradients.\nint x;\n", None),
    ("a.h", "// Which buckets are full.\n", "a.h:1: open with a noun phrase"),
    ("a.h", "int x;\n", "a.h:1: open the header with a comment"),
    ("a.cc", "// Waits.\nint x;  // runs behind it\n", 'a.cc:2: "behind"'),
    ("a.cc", 'auto x = "what";\n', None),
    ("a.py", '"""Sums.\n\nWhat is left stays.\n"""\n', 'a.py:3: "What"'),
    ("a.sh", "# Asks what if.\necho what\n", None),
    ("a.md", "```cpp\n// what\n```\n`what` is code.\n", None),
    ("a.md", "word " * 40 + "\n", "a.md:1: 200 characters"),
]


class CheckWordsTest(unittest.TestCase):
    def test_each_rule(self):
        for name, text, reason in CASES:
            with self.subTest(name=name, text=text):
                found = check_words.violations(pathlib.Path(name), text)
                if reason is None:
                    self.assertEqual(found, [])
                else:
                    self.assertEqual(len(found), 1, found)
                    self.assertIn(reason, found[0])


if __name__ == "__main__":
    unittest.main()
